"""Numbers of bytes as text: GB and GiB are two things."""

from __future__ import annotations

import pytest

from hicache_core.errors import ByteSizeError
from hicache_core.spec.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "64G", "64k", "-1GiB", "1,5GiB", "1e9", "64GiBs", "1.5", "٣GiB", "1 2"]
)
def test_other_texts_are_refused(text: str) -> None:
    """I10: a bare G too, which could be either; nothing is rounded."""
    with pytest.raises(ByteSizeError) as raised:
        parse_bytes(text, who="--host-size")
    assert (raised.value.who, raised.value.text) == ("--host-size", text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (64_000_000_000, "59.6 GiB"),
        (68_719_476_736, "64 GiB"),
        (68_719_476_735, "63.99 GiB"),
        (1_649_267_441_664, "1.5 TiB"),
        (-3 << 30, "-3 GiB"),
    ],
)
def test_formatted(nbytes: int, text: str) -> None:
    """In binary units, and never more than there is."""
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize("nbytes", [7, 1536, 10**9, 2**40 - 1, 123_456_789_012])
def test_formatted_size_is_read_back_and_close(nbytes: int) -> None:
    """At most a hundredth of the unit is cut off."""
    number, unit = format_bytes(nbytes).split()
    unit_bytes = parse_bytes(f"1{unit}")
    shown = parse_bytes(f"{number.replace('.', '')}{unit}") // 10 ** len(number.partition(".")[2])
    assert 0 <= nbytes - shown <= unit_bytes / 100
