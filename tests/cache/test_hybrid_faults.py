"""Transfers that go wrong where a cache has several index spaces: nothing is counted, nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_core.errors import TransferError
from tests.cache.marked_rows import long_window, short_window, states
from tests.cache.server import FAULTS, FULL, CountingRuntime, Fault, Progress, Server, prefixes, serving

PAIRS = [("direct", "page_first_direct"), ("direct", "layer_first")]
PATHS = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=10)


def alone(server: Server, keys: Sequence[Any]) -> int:
    """The longest prefix that the device alone can restore, from the ages of all spaces."""
    device = server.state.device
    usable = 0
    while usable < len(keys) and keys[usable] in device[FULL]:
        usable += 1
    while not all(
        key in device[name]
        for name, extra in server.extras.items()
        for key in list(keys[:usable])[-extra.last_blocks :]
    ):
        usable -= 1
    return usable


def failing_load(server: Server, keys: str) -> Progress:
    """Start a request whose load fails, and check what is left of its hits."""
    server.runtime.fail_copy()
    one = server.start(keys)
    assert isinstance(one.admission.load.error, TransferError)
    match = one.admission.match
    assert (match.device_blocks, match.host_blocks) == (alone(server, keys), 0)
    assert all(not mine.loaded.at for mine in one.admission.others.values())
    return one


@contextmanager
def windows_on_the_host() -> Iterator[Server]:
    """Blocks a, b, c on the device; of their windows only a's, the others on the host."""
    with serving(8, 8, short_window(3, 8)) as server:
        for keys in ("a", "ab", "abc", "xyz", "x", "a"):
            server.serve(keys)
        assert server.state.device["window"] == ["z", "x", "a"]
        assert set("abc") <= set(server.state.host["window"])
        yield server


def test_failed_load_falls_back_to_what_the_device_alone_can_restore() -> None:
    """The block a has its window on the device; b and c are computed again, their pages stay."""
    with windows_on_the_host() as server:
        one = failing_load(server, "abcd")
        assert one.admission.match.device_blocks == 1
        assert one.admission.others["window"].computed.at == [2, 3]
        server.finish()
        assert server.state.device["window"] == ["a", "c", "d"]
        assert server.state.unlocked
        assert server.serve("abcd").match.device_blocks == 4


def test_window_that_a_failed_load_falls_back_to_is_not_given_up() -> None:
    """The engine reads it until the request is committed, whoever needs room."""
    with windows_on_the_host() as server:
        one = failing_load(server, "abcd")
        server.serve("pqr")
        assert "a" in server.state.device["window"]
        server.commit(one)
        server.finish()
        assert server.state.unlocked


def test_state_that_failed_to_load_is_computed_again() -> None:
    """The request is computed from the start, and on its way takes the checkpoint anew."""
    with serving(8, 8, states(2, 8)) as server:
        server.serve("ab")
        server.serve("x")
        server.serve("y")
        one = failing_load(server, "abc")
        assert one.admission.match.device_blocks == 0
        server.finish()
        assert server.state.device["state"] == ["b", "c"]
        assert server.serve("abz").match.device_blocks == 2


def test_refused_load_gives_pages_and_locks_of_every_space_back() -> None:
    """Whichever of its copies is refused; the next request is served as if nothing had been."""
    for ahead in range(1, 4):
        with serving(3, 8, long_window(3, 8), states(2, 8)) as server:
            server.serve("ab")
            server.serve("xyz")
            server.serve("x")
            server.runtime.refuse_copy(ahead)
            with pytest.raises(TransferError):
                server.cache.admit("ab")
            server.check_books()
            assert server.state.unlocked
            again = server.serve("ab")
            assert again.match.host_blocks == 2
            assert {name: mine.loaded.at for name, mine in again.others.items()} == {
                "window": [0, 1],
                "state": [1],
            }


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_failed_backup_is_none_in_any_space(fault: Fault, ahead: int) -> None:
    """Whichever space's copy goes wrong: all host pages come back, all count as dropped, all go next time."""
    with serving(4, 4, long_window(4, 4), states(4, 4)) as server:
        server.serve("x")
        fault(server.runtime, ahead)
        one = server.start("abc")
        assert server.commit(one) == (fault is CountingRuntime.fail_copy)
        admission = server.settle(one)
        assert admission.dropped == {FULL: 3, "window": 2, "state": 1}
        assert server.state.host == {FULL: ["x"], "window": ["x"], "state": ["x"]}
        assert server.state.unlocked
        again = server.serve("abc")
        assert (again.match.device_blocks, again.dropped.total()) == (3, 0)
        assert {name: set(keys) for name, keys in server.state.host.items()} == {
            FULL: set("xabc"),
            "window": set("xbc"),
            "state": set("xc"),
        }


@settings(max_examples=40, deadline=None)
@given(PATHS, st.integers(1, 40), st.sampled_from(FAULTS), st.integers(0, 9), st.booleans())
def test_one_fault_anywhere_costs_one_transfer_of_every_space(
    paths: list[list[int]], call: int, fault: Fault, seed: int, overlap: bool
) -> None:
    """Whichever copy fails or is refused: the books add up, no hit is wrong, and the cache works on."""
    extras = long_window(4, 6), states(3, 4)
    with serving(5, 8, *extras, pair=PAIRS[seed % 2], seed=seed) as server:
        fault(server.runtime, call)
        failed = 0
        for keys in map(prefixes, paths):
            failed += not runs(server, keys, overlap)
        server.finish()
        assert failed <= 1
        assert server.state.unlocked
        server.runtime.fail_copy(1_000_000)
        for keys in map(prefixes, paths):
            server.serve(keys)
            again = server.serve(keys)
            assert again.load.error is None
            assert again.match.device_blocks == len(keys)


def runs(server: Server, keys: list[Any], overlap: bool) -> bool:
    """Serve a request, or let the one before it end only after it has started; whether all went well."""
    if not overlap or sum(len(one.admission.keys) for one in server.progress) + len(keys) > 5:
        server.finish()
    before = list(server.progress)
    try:
        one = server.start(keys)
    except TransferError:
        server.check_books()
        return False
    if one.admission.load.error is not None:
        assert one.admission.match.device_blocks == alone(server, keys)
    accepted = server.commit(one)
    for other in before:
        server.settle(other)
    if not overlap:
        server.settle(one)
    return accepted and one.admission.load.error is None
