"""The cache over both tiers: age against the twin, books that add up, and transfers that go wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_core.errors import CapacityError, TransferError
from tests.cache.server import (
    BLOCK_BYTES,
    BLOCK_PAGES,
    FAULTS,
    FULL,
    CountingRuntime,
    Fault,
    prefixes,
    serving,
)
from tests.lru_twin import Twin

PAIRS = [("direct", "page_first_direct"), ("direct", "layer_first"), ("kernel", "page_first")]
# Few branches and short paths, so that requests share prefixes often and tiers overflow at once.
PATHS = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=12)
QUICK = settings(max_examples=50, deadline=None)
THOROUGH = settings(max_examples=80, deadline=None)


def check_against_twin(paths: list[list[int]], device_blocks: int, host_blocks: int, pair: int) -> None:
    """Serve requests and compare hits, drops and both orders of age after each."""
    twin = Twin(device_blocks, host_blocks)
    with serving(device_blocks, host_blocks, pair=PAIRS[pair]) as server:
        for keys in map(prefixes, paths):
            dropped = twin.counts.dropped
            hits = twin.request(keys)
            if len(keys) > device_blocks:
                assert not server.serves(keys)
                continue
            admission = server.serve(keys)
            assert (admission.match.device_blocks, admission.match.host_blocks) == hits
            assert admission.load.nbytes == hits[1] * BLOCK_BYTES
            assert admission.dropped_blocks == twin.counts.dropped - dropped
            assert list(server.cache.index.device) == twin.device.oldest_first()
            assert list(server.cache.index.host) == twin.host.oldest_first()


@THOROUGH
@given(PATHS, st.integers(1, 8), st.integers(1, 12), st.integers(0, len(PAIRS) - 1))
def test_age_and_hits_are_those_of_the_twin(
    paths: list[list[int]], device_blocks: int, host_blocks: int, pair: int
) -> None:
    """Whatever the stream and the tiers: host smaller than the device, or than a request, included."""
    check_against_twin(paths, device_blocks, host_blocks, pair)


@pytest.mark.parametrize(("device_blocks", "host_blocks"), [(4, 2), (4, 3), (3, 9), (1, 1)])
def test_age_and_hits_on_tiers_that_are_short(device_blocks: int, host_blocks: int) -> None:
    """The corner cases that the property above must not miss by chance."""
    paths = [[0, 1, 2, 0], [0, 1, 1], [2, 2, 2], [0, 1, 2, 0], [1], [0, 1, 1], [0, 0, 0, 0], [0, 1, 2, 0]]
    check_against_twin(paths, device_blocks, host_blocks, 0)


def test_request_without_blocks_passes() -> None:
    """It takes nothing and leaves nothing."""
    with serving(2, 2) as server:
        before = server.state
        admission = server.serve([])
        assert admission.pages.shape == (0, BLOCK_PAGES)
        assert server.state == before


def test_host_smaller_than_a_request_keeps_its_leading_blocks() -> None:
    """The last blocks are dropped and counted, so that what is kept can be hit; later as well."""
    with serving(4, 2) as server:
        assert server.serve("abcd").dropped_blocks == 2
        assert set(server.cache.index.host) == {"a", "b"}
        assert server.serve("abcd").dropped_blocks == 2
        server.serve("wxyz")
        assert server.serve("abcd").match.host_blocks == 0
        assert set(server.cache.index.host) == {"a", "b"}


def test_request_larger_than_the_device_leaves_everything_as_it_was() -> None:
    """Nothing is given up for a request that cannot fit, and nothing stays locked."""
    with serving(3, 6) as server:
        server.serve("ab")
        server.serve("xyz")
        before = server.state
        with pytest.raises(CapacityError) as caught:
            server.cache.admit("abcd")
        assert caught.value.code == "capacity"
        assert server.state == before
        assert server.serve("xyz").match.device_blocks == 3


def test_request_that_others_leave_no_room_for_leaves_everything_as_it_was() -> None:
    """Blocks of requests in progress are not given up; once these have ended, there is room."""
    with serving(4, 8) as server:
        server.serve("z")
        one = server.start("ab")
        before = server.state
        with pytest.raises(CapacityError):
            server.cache.admit("xyw")
        assert server.state == before
        server.commit(one)
        server.settle(one)
        assert server.serve("xyw").match.device_blocks == 0


def test_blocks_of_a_request_in_progress_are_not_given_up() -> None:
    """Neither what it hit on the device, nor what it loads, nor what it computes."""
    with serving(4, 3) as server:
        server.serve("ab")
        one = server.start("abc")
        server.serve("x")
        server.serve("y")
        assert {"a", "b"} <= set(server.cache.index.device)
        assert {"a", "b"} <= set(server.cache.index.host)
        server.commit(one)
        server.settle(one)
        assert server.serve("abc").match.device_blocks == 3


def test_two_requests_that_compute_the_same_block_keep_it_once() -> None:
    """The pages of the second are given back, on both tiers, and the second goes on with the first's."""
    with serving(6, 6) as server:
        first, second = server.start("ab"), server.start("abc")
        server.commit(first)
        server.commit(second)
        server.settle(second)
        server.settle(first)
        assert second.admission.pages[:2].tolist() == first.admission.pages.tolist()
        assert len(server.cache.index.device) == len(server.cache.index.host) == 3
        free = server.state.free_device_pages, server.state.free_host_pages
        assert free == ({FULL: 3 * BLOCK_PAGES}, {FULL: 3 * BLOCK_PAGES})
        assert server.serve("abc").match.device_blocks == 3


# Zero starts a request on the path; another number lets one in progress take its next step.
STEPS = st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), max_size=4)), max_size=25)


@QUICK
@given(STEPS, st.integers(0, 9))
def test_overlapping_requests_keep_the_books(steps: list[tuple[int, list[int]]], seed: int) -> None:
    """Requests that start, commit and end in any order: no page is lost, taken twice, or read too early."""
    with serving(5, 6, seed=seed, pair=PAIRS[seed % len(PAIRS)]) as server:
        for number, path in steps:
            waiting = server.progress
            if number == 0 or not waiting:
                before = server.state
                try:
                    server.start(prefixes(path))
                except CapacityError:
                    assert server.state == before
                continue
            server.go_on(waiting[number % len(waiting)])
        server.finish()
        assert server.state.unlocked


def test_failed_load_is_no_hit_and_is_computed_again() -> None:
    """Its error is kept, its host pages are free to be given up, and the request goes on without it."""
    with serving(2, 4) as server:
        server.serve("ab")
        server.serve("xy")
        server.runtime.fail_copy()
        admission = server.serve("ab")
        assert isinstance(admission.load.error, TransferError)
        assert (admission.match.device_blocks, admission.match.host_blocks) == (0, 0)
        # What the host has is still right: only the way to the device failed.
        server.serve("xy")
        assert server.serve("ab").match.host_blocks == 2
        # All host pages can change hands, so none is held any more.
        server.serve("cd")
        server.serve("ef")
        assert set(server.cache.index.host) == set("cdef")


def test_failed_load_after_a_device_hit_keeps_that_hit() -> None:
    """Only what was to be loaded is no hit."""
    with serving(3, 6) as server:
        server.serve("abc")
        server.serve("ax")
        server.serve("ay")
        assert set(server.cache.index.device) == set("axy")
        server.runtime.fail_copy()
        admission = server.serve("abc")
        assert (admission.match.device_blocks, admission.match.host_blocks) == (1, 0)
        assert server.serve("abc").match.device_blocks == 3


def test_refused_load_gives_pages_and_locks_back() -> None:
    """The request is not admitted; nothing of it is kept, and the next one is served."""
    with serving(3, 5) as server:
        server.serve("ab")
        server.serve("xyz")
        server.serve("x")
        server.runtime.refuse_copy()
        with pytest.raises(TransferError):
            server.cache.admit("ab")
        server.check_books()
        state = server.state
        # What was given up for room stays given up; all that is left can be.
        assert state.free_device_pages == {FULL: 2 * BLOCK_PAGES}
        assert state.unlocked
        assert server.serve("ab").match.host_blocks == 2


@pytest.mark.parametrize("fault", FAULTS)
def test_failed_backup_is_no_backup(fault: Fault) -> None:
    """Its host pages come back, its blocks count as dropped, and the next request backs them up."""
    with serving(4, 4) as server:
        server.serve("x")
        fault(server.runtime, 1)
        one = server.start("abc")
        accepted = server.commit(one)
        assert accepted == (fault is CountingRuntime.fail_copy)
        admission = server.settle(one)
        assert (admission.backup is None) == (not accepted)
        assert admission.dropped_blocks == 3
        assert set(server.cache.index.host) == {"x"}
        assert server.state.free_host_pages == {FULL: 3 * BLOCK_PAGES}
        assert set(server.cache.index.device) == set("xabc")
        again = server.serve("abc")
        assert (again.match.device_blocks, again.dropped_blocks) == (3, 0)
        assert set(server.cache.index.host) == set("xabc")


def test_failed_backup_gives_up_nothing_but_the_room_it_made() -> None:
    """Blocks given up for a backup that failed are gone; all others are where they were."""
    with serving(6, 3) as server:
        server.serve("xyz")
        server.runtime.fail_copy()
        server.serve("ab")
        assert set(server.cache.index.host) == {"x"}
        assert server.state.free_host_pages == {FULL: 2 * BLOCK_PAGES}


def test_backups_are_hits_only_once_they_are_acknowledged() -> None:
    """While a backup is under way, its blocks are on the device alone."""
    with serving(2, 4) as server:
        one = server.start("ab")
        server.commit(one)
        assert len(server.cache.index.host) == 0
        server.settle(one)
        assert set(server.cache.index.host) == set("ab")
        server.serve("xy")
        assert server.serve("ab").match.host_blocks == 2


@THOROUGH
@given(PATHS, st.integers(1, 20), st.sampled_from(FAULTS), st.integers(0, 2), st.integers(0, 9))
def test_one_fault_anywhere_costs_one_transfer(
    paths: list[list[int]],
    call: int,
    fault: Fault,
    pair: int,
    seed: int,
) -> None:
    """Whichever copy fails or is refused: the books add up, no hit is wrong, and the cache works on."""
    with serving(5, 8, pair=PAIRS[pair], seed=seed) as server:
        fault(server.runtime, call)
        refused = [path for path in paths if not server.serves(prefixes(path)) and len(path) <= 5]
        assert len(refused) <= 1
        assert server.state.unlocked
        server.runtime.fail_copy(1_000_000)
        for path in paths:
            assert server.serves(prefixes(path)) == (len(path) <= 5)
            assert server.serves(prefixes(path)) == (len(path) <= 5)


def test_pages_of_a_block_are_those_of_the_device_pool() -> None:
    """Page 0 is reserved; every block has its own whole pages."""
    with serving(3, 3) as server:
        pages = server.serve("abc").pages
        assert pages.shape == (3, BLOCK_PAGES)
        assert sorted(pages.ravel().tolist()) == [1, 2, 3, 4, 5, 6]
        assert pages.dtype == np.int64
