"""Fixtures of the suite for whole variants."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from hicache_core.testing.oracle import distinct_bytes, distinct_rows

remembered_bytes = functools.lru_cache(maxsize=16)(distinct_bytes)
remembered_rows = functools.lru_cache(maxsize=16)(distinct_rows)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Pages are too small to share out: threads that wait for one another, and for other tests, cost time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rigs of one variant are filled with the same bytes, and hashing them takes longer than moving them."""
    monkeypatch.setattr("hicache_core.testing.rigs.distinct_bytes", remembered_bytes)
    monkeypatch.setattr("hicache_core.testing.rigs.distinct_rows", remembered_rows)
