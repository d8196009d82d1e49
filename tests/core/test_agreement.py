"""Invariant I8: ranks that meet in a store reach one verdict, whatever one of them does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from hicache_core.controller import ControllerConfig
from hicache_core.errors import RankError, SpecError
from hicache_core.memory.agreement import KeyStore, Ranks, agree, together

LONG_S = 60.0
SHORT_S = 0.3
Play = Callable[[Ranks], Any]


def _ranks(store: KeyStore, rank: int, members: int, timeout_s: float) -> Ranks:
    return Ranks(store, rank=rank, members=range(members), timeout_s=timeout_s, who="test")


def _play(*plays: Play, timeout_s: float = LONG_S, store: KeyStore | None = None) -> list[Any]:
    """What each rank returned or raised; a thread each, one store."""
    meeting = HashStore() if store is None else store
    results: list[Any] = [None] * len(plays)

    def run(rank: int) -> None:
        try:
            results[rank] = plays[rank](_ranks(meeting, rank, len(plays), timeout_s))
        except RankError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(plays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return results


def _asks(**figures: int) -> Play:
    return lambda ranks: ranks.minimum(figures)


def _absent(ranks: Ranks) -> None:
    """Comes in and does nothing."""


def test_least_value_of_each_name() -> None:
    """I8: over the ranks that have it; a rank may have none."""
    results = _play(_asks(kv=7, state=1), _asks(kv=5), _asks(index=9, kv=6), _asks())
    assert results == [{"kv": 5, "state": 1, "index": 9}] * 4


def test_figures_beyond_64_bits_are_exact() -> None:
    """Nothing passes through a tensor or a float."""
    assert _play(_asks(kv=(1 << 80) + 1), _asks(kv=(1 << 80) + 3))[1] == {"kv": (1 << 80) + 1}


def test_exchanges_follow_each_other() -> None:
    """Each has a verdict of its own."""

    def twice(ranks: Ranks) -> list[dict[str, int]]:
        first = ranks.minimum({"kv": 10 + ranks.rank})
        second = ranks.minimum({"kv": 20 - ranks.rank})
        ranks.commit()
        return [first, second]

    assert _play(twice, twice) == [[{"kv": 10}, {"kv": 19}]] * 2


def test_failure_is_told_at_once_and_to_all() -> None:
    """I8: nobody waits for the time to pass."""
    start = time.monotonic()
    results = _play(_asks(kv=1), lambda ranks: ranks.fail("no memory"), _asks(kv=1))
    assert [(error.ranks, error.rank, error.reason) for error in (results[0], results[2])] == [
        ((1,), 1, "no memory")
    ] * 2
    assert time.monotonic() - start < LONG_S / 2


def test_silent_ranks_are_named() -> None:
    """I8: all of them, by those who answered."""
    results = _play(_asks(kv=1), _absent, _asks(kv=1), _absent, timeout_s=SHORT_S)
    assert [(error.ranks, error.rank) for error in (results[0], results[2])] == [((1, 3), 1)] * 2


def test_rank_that_comes_too_late_fails_like_the_others() -> None:
    """I8: it reads the verdict about itself, although all reports are in by then."""
    given_up = threading.Event()

    def punctual(ranks: Ranks) -> None:
        try:
            ranks.commit()
        finally:
            given_up.set()

    def late(ranks: Ranks) -> None:
        assert given_up.wait(20)
        ranks.commit()

    results = _play(punctual, late, timeout_s=SHORT_S)
    assert [error.ranks for error in results] == [(1,), (1,)]
    assert results[0].reason == results[1].reason


def test_different_steps_are_refused_everywhere() -> None:
    """I8: a rank that commits is not taken for one that asks."""
    results = _play(_asks(kv=1), lambda ranks: ranks.commit())
    assert [error.ranks for error in results] == [(0, 1), (0, 1)]


def test_verdict_that_the_last_rank_did_not_write_is_written_by_another() -> None:
    """I8: all reports are in, so waiting has not been in vain; rank 1 was killed between two writes."""
    store = HashStore()
    place = "hicache/test/0-1/1/1"
    store.set(f"{place}/report/1", json.dumps({"step": "minimum", "figures": {"kv": 3}}))
    assert _ranks(store, 0, 2, SHORT_S).minimum({"kv": 5}) == {"kv": 3}


def test_next_try_does_not_see_the_verdict_of_the_last() -> None:
    """I8: a rank that was not there last time is a try behind, fails once, and then meets the others."""
    store = HashStore()
    with pytest.raises(RankError):
        _ranks(store, 0, 2, SHORT_S).minimum({"kv": 1})
    with pytest.raises(RankError) as raised:
        _ranks(store, 1, 2, SHORT_S).minimum({"kv": 1})
    assert raised.value.ranks == (1,)
    assert _play(_asks(kv=1), _asks(kv=2), store=store) == [{"kv": 1}] * 2


class _LostStore:
    """A store whose host is gone after a number of operations."""

    def __init__(self, operations: int) -> None:
        self._left = operations
        self._store = HashStore()

    def _use(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise dist.DistNetworkError("connection reset")

    def set(self, key: str, value: str, /) -> None:
        """Of KeyStore."""
        self._use()
        self._store.set(key, value)

    def get(self, key: str, /) -> bytes:
        """Of KeyStore."""
        self._use()
        return bytes(self._store.get(key))

    def add(self, key: str, amount: int, /) -> int:
        """Of KeyStore."""
        self._use()
        return int(self._store.add(key, amount))

    def check(self, keys: list[str], /) -> bool:
        """Of KeyStore."""
        self._use()
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Of KeyStore."""
        self._use()
        self._store.wait(keys, timeout)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Of KeyStore."""
        self._use()
        return bytes(self._store.compare_set(key, expected, desired))


@pytest.mark.parametrize("operations", range(7))
def test_lost_store_is_an_error_of_no_rank(operations: int) -> None:
    """I8: at whichever operation it is lost; the seventh would write the verdict about a silent rank."""
    with pytest.raises(RankError) as raised:
        _ranks(_LostStore(operations), 0, 2, SHORT_S).minimum({"kv": 1})
    assert (raised.value.ranks, raised.value.rank) == ((), -1)
    assert isinstance(raised.value.__cause__, dist.DistNetworkError)


def test_figures_of_a_process_alone_come_back() -> None:
    """Without torch.distributed there is nobody to ask."""
    assert agree({"kv": 5, "state": 2}, timeout_s=1) == {"kv": 5, "state": 2}
    with together(timeout_s=1) as ranks:
        assert (ranks.rank, ranks.members) == (0, (0,))
        assert ranks.minimum({"kv": 5}) == {"kv": 5}
        ranks.commit()


def test_error_of_a_process_alone_passes_through() -> None:
    """It is nobody else's."""
    with pytest.raises(ZeroDivisionError), together(timeout_s=1):
        raise ZeroDivisionError


def test_leaving_without_a_commit_is_an_error() -> None:
    """I8: on one rank as on many, so that it shows on a laptop."""
    with pytest.raises(RankError) as raised, together(timeout_s=1) as ranks:
        ranks.minimum({"kv": 5})
    assert raised.value.ranks == (0,)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_no_time_to_wait_is_refused(timeout_s: float) -> None:
    """Zero would be taken for ever, or for never."""
    with pytest.raises(SpecError):
        agree({}, timeout_s=timeout_s)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), 1e12])
def test_a_time_to_wait_that_no_store_takes_is_refused(seconds: float) -> None:
    """Before any rank waits, also where there is one alone; the configuration says so as early as it can."""
    with pytest.raises(SpecError), together(timeout_s=seconds):
        pytest.fail("the block was entered")
    with pytest.raises(SpecError):
        agree({}, timeout_s=seconds)
    with pytest.raises(SpecError) as caught:
        ControllerConfig(io_backend="direct", layout="layer_first", host_pages=1, agree_timeout_s=seconds)
    assert caught.value.who == "ControllerConfig.agree_timeout_s"


@pytest.mark.parametrize("seconds", ["5", None, True])
def test_a_configured_time_to_wait_is_a_number(seconds: Any) -> None:
    """Refused like any other field that is not what it must be."""
    with pytest.raises(SpecError):
        ControllerConfig(io_backend="direct", layout="layer_first", host_pages=1, agree_timeout_s=seconds)
