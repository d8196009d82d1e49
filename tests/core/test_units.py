"""Sizes in text: what each unit stands for, what is refused, and how a size is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_core.errors import ByteSizeError
from hicache_core.spec.units import format_bytes_like, parse_bytes, unit_of


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("68719476736", 68_719_476_736),
        ("17B", 17),
        ("1KiB", 1_024),
        ("1KB", 1_000),
        ("3MiB", 3_145_728),
        ("3MB", 3_000_000),
        ("64GiB", 68_719_476_736),
        ("64GB", 64_000_000_000),
        ("64 GB", 64_000_000_000),
        (" 64GB ", 64_000_000_000),
        ("1.5GiB", 1_610_612_736),
        ("0.1GiB", 107_374_182),
        ("2TiB", 2_199_023_255_552),
        ("2TB", 2_000_000_000_000),
    ],
)
def test_size_stands_for_its_bytes(text: str, nbytes: int) -> None:
    """Powers of ten and of two are told apart; part of a byte is cut off."""
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "64G", "64g", "64gb", "64Gib", "64GIB", "-1GiB", "+1", "1e9", "1.5", "1.5B", "1,000"),
        *("64GiB/s", "1..5GB", ".5GB", "5.GB", "64  GB", "inf", "nan", "0x10", "\u0664GB", "1_000"),
    ],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    """A unit that could be read two ways is refused like one that does not exist, and quoted."""
    with pytest.raises(ByteSizeError) as refused:
        parse_bytes(text)
    assert refused.value.code == "byte-size"
    assert repr(text) in refused.value.got


@pytest.mark.parametrize(
    ("nbytes", "like", "shown"),
    [
        (1_610_612_736, "64GiB", "1.500 GiB (1,610,612,736 bytes)"),
        (1_610_612_736, "64GB", "1.611 GB (1,610,612,736 bytes)"),
        (1_610_612_736, "GiB", "1.500 GiB (1,610,612,736 bytes)"),
        (1_610_612_736, "64000", "1,610,612,736 bytes"),
        (1_610_612_736, "", "1,610,612,736 bytes"),
        (-1_024, "1KiB", "-1.000 KiB (-1,024 bytes)"),
        (1_234_567_890_123_456, "1 TB", "1,234.568 TB (1,234,567,890,123,456 bytes)"),
    ],
)
def test_size_is_shown_in_the_unit_that_was_given_and_in_bytes(nbytes: int, like: str, shown: str) -> None:
    """The unit is that of the other size; the bytes are exact."""
    assert format_bytes_like(nbytes, like) == shown


@pytest.mark.parametrize(("text", "unit"), [("64GiB", "GiB"), ("1 MB", "MB"), ("17", "B"), ("64G", "B")])
def test_unit_is_that_of_the_text(text: str, unit: str) -> None:
    """Bytes where there is none."""
    assert unit_of(text) == unit


@given(st.integers(0, 10**30 - 1))
def test_plain_bytes_are_exact(nbytes: int) -> None:
    """No float is in between."""
    assert parse_bytes(str(nbytes)) == nbytes
    assert format_bytes_like(nbytes) == f"{nbytes:,} bytes"
