"""The rules of compatibility one by one: which pool breaks which, and what stands beside it."""

from __future__ import annotations

import pytest
from attrs import evolve

from hicache_core.spec import IndexSpace
from tests.core.compat_queries import NO, ids, pool, query


def test_a_backup_that_is_not_staged_does_not_hide_a_load_without_a_way() -> None:
    """R2 and R5: loads of page_first on ROCm go by copies, whatever becomes of the backup."""
    both = pool(48, staged_write_back=NO, strided_copy=NO)
    asked = query("rocm", "kernel", "page_first", both)
    assert ids(asked) == [("R2-staged-write-back", "kv"), ("R5-no-way", "kv")]
    assert ids(query("rocm", "kernel", "page_first", pool(48, strided_copy=NO))) == [("R5-no-way", "kv")]
    staged_only = query("rocm", "kernel", "page_first", pool(48, staged_write_back=NO))
    assert ids(staged_only) == [("R2-staged-write-back", "kv")]


@pytest.mark.parametrize("unasked", ["kv", "swa"])
def test_pools_that_ride_on_one_whose_pages_are_not_asked_are_not_compared(unasked: str) -> None:
    """R6: two that ride on the same pool owe each other nothing."""
    space = IndexSpace(name="full" if unasked == "kv" else "swa", page_slots=4)
    source = pool(48, name=unasked, space=space)
    riders = [evolve(pool(48, name=f"on_it_{n}", space=space), host_pages=n) for n in (5, 3)]
    anchor = [] if unasked == "kv" else [evolve(pool(48), host_pages=9)]
    assert ids(query("cuda", "direct", "layer_first", *anchor, source, *riders)) == []
    fixed = query("cuda", "direct", "layer_first", *anchor, evolve(source, host_pages=4), *riders)
    assert ids(fixed) == [("R6-derived-pages", "on_it_3")]


@pytest.mark.parametrize(
    ("device", "wrong"),
    [
        ({"b0": 48, "b1": 24}, 0),
        ({"b0": 48}, 0),
        ({}, 0),
        ({"b0": 24, "b1": 24}, 1),
        ({"b0": 24, "b1": 48}, 2),
        ({"b0": 48, "b1": 24, "b2": 24}, 1),
        ({"k": 48}, 1),
    ],
)
def test_device_rows_are_those_of_the_host_buffer_by_buffer(device: dict[str, int], wrong: int) -> None:
    """R5: keys and values may differ, sides may not; a buffer that the pool lacks is no row of it."""
    asked = evolve(pool(48, 24), device_row_bytes=device)
    assert ids(query("cuda", "direct", "layer_first", asked)) == [("R5-row-bytes", "kv")] * wrong
    assert ids(query("cuda", "direct", "page_first", asked)) == [
        ("R1-served-pair", ""),
        *[("R5-row-bytes", "kv")] * wrong,
    ]
