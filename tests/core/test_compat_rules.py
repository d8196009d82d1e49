"""The rules of compatibility one by one: which pool breaks which, and what stands beside it."""

from __future__ import annotations

from tests.core.compat_queries import NO, ids, pool, query


def test_a_backup_that_is_not_staged_does_not_hide_a_load_without_a_way() -> None:
    """R2 and R5: loads of page_first on ROCm go by copies, whatever becomes of the backup."""
    both = pool(48, staged_write_back=NO, strided_copy=NO)
    asked = query("rocm", "kernel", "page_first", both)
    assert ids(asked) == [("R2-staged-write-back", "kv"), ("R5-no-way", "kv")]
    assert ids(query("rocm", "kernel", "page_first", pool(48, strided_copy=NO))) == [("R5-no-way", "kv")]
    staged_only = query("rocm", "kernel", "page_first", pool(48, staged_write_back=NO))
    assert ids(staged_only) == [("R2-staged-write-back", "kv")]
