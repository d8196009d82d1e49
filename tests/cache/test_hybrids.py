"""The cache with windows and states beside the anchor: hits, moves and ages against the twin; overlaps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_core.cache.hierarchy import Admission
from hicache_core.errors import CapacityError
from tests.cache.marked_rows import Extra, long_window, short_window, states
from tests.cache.server import BLOCK_BYTES, FULL, Server, prefixes, serving
from tests.hybrid_twin import HybridCounts, HybridTwin

PAIRS = [("direct", "page_first_direct"), ("direct", "layer_first"), ("kernel", "page_first")]
# Few branches and short paths, so that requests share prefixes often and tiers overflow at once.
PATHS = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=12)
Kind = Callable[[int, int], Extra]
KINDS: list[Kind] = [short_window, long_window, states]
THOROUGH = settings(max_examples=50, deadline=None)


def moved(server: Server, admission: Admission) -> HybridCounts:
    """What one request did, as the twin counts it."""
    counts = HybridCounts(requests=1, referenced=len(admission.keys), cut=admission.cut_blocks)
    counts.device_hits = admission.match.device_blocks
    counts.host_hits = counts.loaded[FULL] = admission.match.host_blocks
    counts.backed_up[FULL] = len(admission.backed_up.at)
    for name, mine in admission.others.items():
        counts.loaded[name] = len(mine.loaded.at)
        counts.backed_up[name] = len(mine.backed_up.at)
    counts.dropped.update(admission.dropped)
    block_bytes = {FULL: BLOCK_BYTES, **{name: extra.block_bytes for name, extra in server.extras.items()}}
    assert admission.load.nbytes == counts.loaded_bytes(block_bytes)
    assert (admission.backup.nbytes if admission.backup else 0) == counts.backed_up_bytes(block_bytes)
    return counts


def check_ages(server: Server, twin: HybridTwin) -> None:
    """Both tiers of every space hold the twin's blocks, in its order."""
    state = server.state
    assert state.device[FULL] == twin.device.oldest_first()
    assert state.host[FULL] == twin.host.oldest_first()
    for name, space in twin.spaces.items():
        assert (name, state.device[name]) == (name, space.device)
        assert (name, state.host[name]) == (name, space.host)


def check_against_twin(
    paths: list[list[int]], device_blocks: int, host_blocks: int, *extras: Extra, pair: int = 0
) -> HybridCounts:
    """Serve requests and compare what each did and all ages after it; what all did."""
    twin = HybridTwin(device_blocks, host_blocks, {extra.space.name: extra.twin for extra in extras})
    total = HybridCounts()
    with serving(device_blocks, host_blocks, *extras, pair=PAIRS[pair]) as server:
        for keys in map(prefixes, paths):
            counts = twin.request(keys)
            total += counts
            if counts.too_large:
                assert not server.serves(keys)
                continue
            assert moved(server, server.serve(keys)) == counts
            check_ages(server, twin)
            assert server.state.unlocked
    return total


SIZES = st.tuples(st.integers(1, 8), st.integers(1, 12))
SPACE = st.tuples(st.sampled_from(KINDS[:2]), st.integers(1, 8), st.integers(1, 12))
STATES = st.tuples(st.integers(1, 5), st.integers(1, 8))


@THOROUGH
@given(PATHS, SIZES, SPACE, st.integers(0, len(PAIRS) - 1))
def test_windows_are_those_of_the_twin(
    paths: list[list[int]], sizes: tuple[int, int], space: tuple[Kind, int, int], pair: int
) -> None:
    """Whatever the stream, the window and the tiers."""
    kind, device_blocks, host_blocks = space
    check_against_twin(paths, *sizes, kind(device_blocks, host_blocks), pair=pair)


@THOROUGH
@given(PATHS, SIZES, STATES, st.integers(0, len(PAIRS) - 1))
def test_states_are_those_of_the_twin(
    paths: list[list[int]], sizes: tuple[int, int], slots: tuple[int, int], pair: int
) -> None:
    """Whatever the stream, the slots and the tiers."""
    check_against_twin(paths, *sizes, states(*slots), pair=pair)


@THOROUGH
@given(PATHS, SIZES, SPACE, STATES)
def test_windows_and_states_together_are_those_of_the_twin(
    paths: list[list[int]], sizes: tuple[int, int], space: tuple[Kind, int, int], slots: tuple[int, int]
) -> None:
    """A prefix must have what both of them need."""
    kind, device_blocks, host_blocks = space
    check_against_twin(paths, *sizes, kind(device_blocks, host_blocks), states(*slots))


# Long enough that every space overflows, and prefixes come back from the host.
WALK = [[0, 1, 2, 0], [0, 1, 1], [2, 2, 2], [0, 1, 2, 0], [1], [0, 1, 1], [0, 0, 0, 0], [0, 1, 2, 0], [2, 2]]


@pytest.mark.parametrize("window", [short_window, long_window])
@pytest.mark.parametrize(
    ("sizes", "window_blocks", "slots"),
    [
        ((4, 12), (4, 12), (4, 12)),
        ((4, 12), (2, 12), (8, 12)),
        ((4, 12), (1, 2), (8, 12)),
        ((4, 12), (4, 1), (8, 12)),
        ((4, 12), (4, 12), (1, 2)),
        ((4, 12), (4, 12), (1, 1)),
        ((8, 2), (8, 12), (8, 12)),
        ((8, 3), (3, 2), (2, 1)),
    ],
)
def test_each_space_is_short_in_turn(
    window: Kind, sizes: tuple[int, int], window_blocks: tuple[int, int], slots: tuple[int, int]
) -> None:
    """The corner cases that the properties above must not miss by chance: each tier of each space."""
    check_against_twin(WALK * 2, *sizes, window(*window_blocks), states(*slots))


def test_walk_loads_windows_and_states_and_is_cut_where_they_are_short() -> None:
    """The stream above is not too easy: everything happens in it."""
    wide = check_against_twin(WALK * 2, 4, 12, long_window(4, 12), states(4, 12))
    assert min(wide.loaded[name] for name in (FULL, "window", "state")) > 0
    short = check_against_twin(WALK * 2, 4, 12, long_window(1, 2), states(8, 12))
    assert short.cut > wide.cut
    assert short.host_hits + short.device_hits < wide.host_hits + wide.device_hits


def test_prefix_whose_window_is_gone_is_computed_again_up_to_one_that_has_it() -> None:
    """With windows of three blocks, the end of the newest request goes last."""
    with serving(8, 8, short_window(3, 3)) as server:
        server.serve("abcd")
        assert server.state.device["window"] == ["d"]
        assert server.serve("abx").cut_blocks == 2
        assert server.state.device["window"] == ["d", "b", "x"]
        cut = server.serve("abcy")
        # The block c is resident, its window is on neither tier any more.
        assert (cut.match.device_blocks, cut.cut_blocks) == (2, 1)
        assert server.state.device["window"] == ["b", "c", "y"]


def test_state_of_an_inner_block_is_not_kept() -> None:
    """Only a prefix at whose end a request ended can go on."""
    with serving(8, 8, states(8, 8)) as server:
        server.serve("abc")
        assert server.serve("ab").cut_blocks == 2
        assert server.serve("abcd").match.device_blocks == 3
        assert server.state.device["state"] == ["b", "c", "d"]


def test_window_that_has_no_room_on_the_device_cuts_the_hit() -> None:
    """A window of two blocks on a device with room for one: nothing is refused, and no hit is claimed."""
    with serving(4, 8, long_window(1, 8)) as server:
        server.serve("ab")
        server.serve("a")
        assert server.state.host["window"] == ["b", "a"]
        again = server.serve("abc")
        assert (again.match.device_blocks, again.cut_blocks) == (1, 1)


def test_window_that_others_leave_no_room_for_cuts_the_hit() -> None:
    """What a request in progress uses is not given up for another's hit, which is computed again."""
    with serving(8, 8, short_window(1, 8)) as server:
        server.serve("b")
        server.serve("a")
        one = server.start("ax")
        admission = server.serve("by")
        assert (admission.match.device_blocks, admission.cut_blocks) == (0, 1)
        assert server.state.device["window"] == ["a"]
        server.finish()
        assert one.admission.match.device_blocks == 1
        # Now there is room, and the host has the window.
        assert server.serve("by").match.device_blocks == 1


def test_window_that_a_backup_reads_is_not_given_up() -> None:
    """Not before the backup is acknowledged, however short the room is."""
    with serving(8, 8, short_window(1, 8)) as server:
        one = server.start("a")
        server.commit(one)
        server.serve("b")
        assert server.state.device["window"] == ["a"]
        server.settle(one)
        server.serve("b")
        assert server.state.device["window"] == ["b"]
        assert server.serve("ac").match.device_blocks == 1


def test_window_that_is_backed_up_belatedly_is_not_given_up() -> None:
    """A backup also takes windows that the request itself needs no more."""
    with serving(8, 8, short_window(2, 8)) as server:
        server.runtime.fail_copy()
        server.serve("ab")
        assert server.state.host["window"] == []
        one = server.start("abc")
        server.commit(one)
        server.serve("x")
        assert server.state.device["window"] == ["b", "c"]
        server.settle(one)
        assert server.state.host["window"] == ["b", "c"]


def test_end_of_a_request_is_what_a_short_host_keeps_of_its_windows() -> None:
    """A prefix needs its end: of the two windows that it keeps the first is dropped."""
    with serving(4, 8, long_window(4, 1)) as server:
        assert server.serve("abcd").dropped == {FULL: 0, "window": 1}
        assert server.state.host["window"] == ["d"]


# Zero starts a request on the path; another number lets one in progress take its next step.
STEPS = st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), max_size=4)), max_size=25)


@settings(max_examples=50, deadline=None)
@given(STEPS, st.integers(0, 9), SPACE, STATES)
def test_overlapping_requests_keep_the_books_of_every_space(
    steps: list[tuple[int, list[int]]],
    seed: int,
    space: tuple[Kind, int, int],
    slots: tuple[int, int],
) -> None:
    """Requests that start, commit and end in any order: no page is lost, taken twice, or reused too early."""
    kind, *blocks = space
    extras = kind(*blocks), states(*slots)
    with serving(5, 6, *extras, seed=seed, pair=PAIRS[seed % len(PAIRS)]) as server:
        for number, path in steps:
            waiting = server.progress
            if number == 0 or not waiting:
                before = server.state
                try:
                    server.start(prefixes(path))
                except CapacityError:
                    assert server.state == before
            else:
                server.go_on(waiting[number % len(waiting)])
        server.finish()
        assert server.state.unlocked
        # What is left can be hit, with the right bytes.
        for _, path in steps:
            server.serve(prefixes(path))
