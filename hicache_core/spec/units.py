"""Numbers of bytes as text: decimal units (GB) and binary ones (GiB) are never taken for each other."""

from __future__ import annotations

import re
from fractions import Fraction

from hicache_core.errors import ByteSizeError

_POWERS = {letter: power for power, letter in enumerate("KMGTP", start=1)}
UNIT_BYTES = {
    "B": 1,
    **{f"{letter}B": 1000**power for letter, power in _POWERS.items()},
    **{f"{letter}iB": 1024**power for letter, power in _POWERS.items()},
}
"""Bytes of each unit."""
_BY_LOWER_CASE = {unit.lower(): nbytes for unit, nbytes in UNIT_BYTES.items()} | {"": 1}
_BINARY = [
    (unit, nbytes) for unit, nbytes in reversed(UNIT_BYTES.items()) if nbytes % 1024 == 0 or unit == "B"
]
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(text: str, *, who: str = "size") -> int:
    """The number of bytes that ``text`` states: ``64GiB``, ``64 GB``, ``1.5TiB``, ``1024`` (bytes).

    Args:
        text: a number, then a unit of :data:`UNIT_BYTES` in any case; without a unit it counts bytes.
        who: what the size is for, in errors.

    Raises:
        ByteSizeError: no such number or unit; a unit such as ``G`` that could be decimal or binary; or
            a figure that is not a whole number of bytes.
    """
    matched = _TEXT.fullmatch(text)
    if matched is None:
        raise _error(who, text, "a number and a unit, such as 64GiB")
    number, unit = matched.groups()
    if unit.upper() in _POWERS:
        letter = unit.upper()
        power = _POWERS[letter]
        raise _error(who, text, f"{letter}B (1000^{power} bytes) or {letter}iB (1024^{power} bytes)")
    if unit.lower() not in _BY_LOWER_CASE:
        raise _error(who, text, f"a unit out of {', '.join(UNIT_BYTES)}")
    nbytes = Fraction(number) * _BY_LOWER_CASE[unit.lower()]
    if nbytes.denominator != 1:
        raise _error(who, text, "a whole number of bytes")
    return int(nbytes)


def format_bytes(nbytes: int) -> str:
    """``nbytes`` in the largest binary unit that it fills, two decimals at most: ``1.5 GiB``, ``0 B``.

    Decimals beyond are cut off, never rounded up: nothing is promised that is not there. Negative numbers
    keep their sign.
    """
    sign, left = ("-", -nbytes) if nbytes < 0 else ("", nbytes)
    unit, unit_bytes = next((pair for pair in _BINARY if left >= pair[1]), ("B", 1))
    whole, rest = divmod(left, unit_bytes)
    decimals = f"{rest * 100 // unit_bytes:02d}".rstrip("0")
    return f"{sign}{whole}{'.' if decimals else ''}{decimals} {unit}"


def _error(who: str, text: str, expected: str) -> ByteSizeError:
    return ByteSizeError(who=who, text=text, expected=expected, remedy="A bare number is a number of bytes.")
