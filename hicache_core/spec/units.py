"""Sizes as people write them: GB are powers of ten, GiB powers of two, and neither stands for the other."""

from __future__ import annotations

import re
from fractions import Fraction

from hicache_core.errors import ByteSizeError

UNIT_BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "PiB": 2**50,
}
"""Bytes of each unit, by the only way in which it is written."""

_SIZE = re.compile(r"(?P<number>[0-9]{1,30}(?:\.[0-9]{1,30})?) ?(?P<unit>[A-Za-z]*)", re.ASCII)


def parse_bytes(text: str, *, who: str = "size") -> int:
    """The bytes that a text stands for; a fraction of a byte is cut off.

    Args:
        text: a number and a unit of :data:`UNIT_BYTES`, ``64GiB`` or ``1.5 GB``; without a unit, whole bytes.
        who: what the size is for, in errors.

    Raises:
        ByteSizeError: no such size; a unit such as ``G`` or ``gb`` is refused, since it does not say which.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = found["unit"] or "B" if found else ""
    if found is None or unit not in UNIT_BYTES or (unit == "B" and "." in found["number"]):
        raise ByteSizeError(
            who=who,
            text=text,
            expected="a number and one of KB, MB, GB, TB, PB (powers of 1000) or KiB, MiB, GiB, TiB, PiB "
            "(powers of 1024), or whole bytes",
            remedy="Write for example 64GiB, 1.5GB or 68719476736.",
        )
    return int(Fraction(found["number"]) * UNIT_BYTES[unit])


def unit_of(text: str) -> str:
    """The unit in which a size was given; ``B`` where it has none or is no size."""
    found = _SIZE.fullmatch(text.strip())
    unit = found["unit"] if found else ""
    return unit if unit in UNIT_BYTES else "B"


def format_bytes_like(nbytes: int, like: str = "") -> str:
    """A size for people, in the unit of another and in exact bytes: ``1.500 GiB (1,610,612,736 bytes)``.

    Args:
        nbytes: the size; may be negative.
        like: a size as it was given (``64GiB``), or a unit; bytes alone where it has none.
    """
    exact, unit = f"{nbytes:,} bytes", unit_of(f"1{like}" if like in UNIT_BYTES else like)
    if unit == "B":
        return exact
    whole, thousandths = divmod(round(Fraction(abs(nbytes) * 1000, UNIT_BYTES[unit])), 1000)
    return f"{'-' if nbytes < 0 else ''}{whole:,}.{thousandths:03} {unit} ({exact})"


_BINARY = [(unit, nbytes) for unit, nbytes in reversed(UNIT_BYTES.items()) if "i" in unit] + [("B", 1)]


def format_bytes(nbytes: int) -> str:
    """A size in the largest binary unit that it fills, two decimals at most: ``1.5 GiB``, ``0 B``.

    Decimals beyond are cut off, never rounded up: nothing is promised that is not there. Negative numbers
    keep their sign.
    """
    sign, left = ("-", -nbytes) if nbytes < 0 else ("", nbytes)
    unit, unit_bytes = next((pair for pair in _BINARY if left >= pair[1]), ("B", 1))
    whole, rest = divmod(left, unit_bytes)
    decimals = f"{rest * 100 // unit_bytes:02d}".rstrip("0")
    return f"{sign}{whole}{'.' if decimals else ''}{decimals} {unit}"
