"""The books of the process: how many ranks share the host is what the launcher says, or an error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache_core.errors import SpecError
from hicache_core.memory.ledger import Kind
from hicache_core.memory.process import process_ledger


@pytest.fixture(autouse=True)
def no_books() -> Iterator[None]:
    """Books are made by the test, and again by whoever comes after it."""
    process_ledger.cache_clear()
    yield
    process_ledger.cache_clear()


@pytest.mark.parametrize("ranks", ["0", "-1", "abc", "2.0", " 2", "1_0", "²", "9" * 5000])
def test_a_number_of_ranks_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, ranks: str) -> None:
    """The error names the variable, and another try may work."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    with pytest.raises(SpecError) as caught:
        process_ledger()
    assert "LOCAL_WORLD_SIZE" in caught.value.who
    assert len(caught.value.got) < 100
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert process_ledger().budgets[Kind.HOST]


def test_an_empty_number_of_ranks_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is not set."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    assert "over 1 rank" in process_ledger().source
