"""Models with windows, states and indexers: all their pools move, with the hits and the bytes of the twin."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from hicache_core.errors import CapacityError
from hicache_core.replay.trace import TraceRequest
from tests.replay.hybrids import HYBRIDS, WITH_SPACE
from tests.replay.replays import (
    WALK,
    WALK_BLOCKS,
    check_hybrid,
    free_pages,
    hybrid_of,
    replayed,
    replaying,
    request,
    stream,
)

PLATFORMS = ["cpu-sim", "cuda", "rocm-mi355x"]
PAIRS = [("kernel", "page_first"), ("direct", "page_first_direct"), ("direct", "layer_first")]
# A state pool has no rows of layers on the host.
CASES = [
    (model, platform, pair)
    for model, platform, pair in itertools.product(HYBRIDS, PLATFORMS, PAIRS)
    if not (HYBRIDS[model].space == "state" and pair[1] == "layer_first")
]


@pytest.mark.parametrize(("model", "platform", "pair"), CASES)
def test_hybrid_replays(model: str, platform: str, pair: tuple[str, str]) -> None:
    """Every byte is right; what moved is what the twin says, times the exact bytes of each space."""
    hybrid, requests = HYBRIDS[model], stream(*WALK)
    bound = WALK_BLOCKS[0] * hybrid.block_pages
    twin = hybrid_of(requests, *WALK_BLOCKS, hybrid.twin_spaces(*WALK_BLOCKS, bound))
    choices = {"platform": platform, "io_backend": pair[0], "layout": pair[1]}
    report = replayed(requests, **hybrid.bounded(bound), **choices)
    check_hybrid(report, twin, hybrid.block_bytes)
    assert twin.host_hits > 0
    if hybrid.space is not None:
        assert twin.loaded[hybrid.space] > 0


def conversations(requests: int) -> list[TraceRequest]:
    """Conversations that take turns at random, each turn some blocks longer; two system prompts."""
    random, fresh = Random(5), itertools.count(100)
    open_ones: list[list[int]] = []
    made: list[TraceRequest] = []
    for _ in range(requests):
        if len(open_ones) < 4 or random.random() < 0.1:
            open_ones = [*open_ones[-6:], [10 * (len(made) % 2) + place for place in range(3)]]
        one = random.choice(open_ones)
        one.extend(itertools.islice(fresh, random.randint(1, 3)))
        made.append(request(one))
    return made


TIERS = (30, 70)


@pytest.mark.parametrize("blocks", [2, 5, 12])
@pytest.mark.parametrize("model", HYBRIDS)
def test_conversations_agree_with_the_twin_however_short_the_space(model: str, blocks: int) -> None:
    """Room for few blocks in the second space, on tiers that are short for the stream themselves."""
    hybrid, requests = HYBRIDS[model], conversations(80)
    bound = blocks * hybrid.block_pages
    twin = hybrid_of(requests, *TIERS, hybrid.twin_spaces(*TIERS, bound))
    choices = {**hybrid.bounded(bound), "device_blocks": TIERS[0], "host_blocks": TIERS[1]}
    check_hybrid(replayed(requests, **choices), twin, hybrid.block_bytes)
    assert twin.device_hits > 0
    assert twin.host_hits > 0
    assert (twin.cut > 0) == (hybrid.space is not None)


@pytest.mark.parametrize("model", WITH_SPACE)
def test_bound_is_the_number_of_pages_and_a_smaller_one_cuts_hits(model: str) -> None:
    """Both tiers have just the pages that were asked for, and the hits are those of the twin."""
    hybrid, requests = HYBRIDS[model], conversations(40)
    assert hybrid.space is not None
    hits = []
    for blocks in (12, 3, 1):
        bound = blocks * hybrid.block_pages
        twin = hybrid_of(requests, *TIERS, hybrid.twin_spaces(*TIERS, bound))
        choices = {**hybrid.bounded(bound), "device_blocks": TIERS[0], "host_blocks": TIERS[1]}
        with replaying(**choices) as replay:
            host_blocks = -(-blocks * TIERS[1] // TIERS[0])
            assert free_pages(replay, hybrid.space) == (bound, host_blocks * hybrid.block_pages)
            report = replay.run(requests)
        check_hybrid(report, twin, hybrid.block_bytes)
        hits.append(report.hits_device_blocks + report.hits_host_blocks)
    assert hits[0] > hits[1] > hits[2]


def test_window_has_pages_for_all_blocks_where_no_bound_is_given() -> None:
    """As many as the blocks of each tier keep."""
    hybrid = HYBRIDS["gpt-oss-120b"]
    with replaying(**hybrid.choices) as replay:
        assert free_pages(replay, "swa") == (4 * WALK_BLOCKS[0], 4 * WALK_BLOCKS[1])


def test_states_have_sixteen_slots_where_no_bound_is_given() -> None:
    """And on the host as many more as it has blocks: 10 to 6."""
    with replaying(**HYBRIDS["jamba-v0.1"].choices) as replay:
        assert free_pages(replay, "state") == (16, 27)


def test_pages_that_make_no_whole_block_are_not_used() -> None:
    """Ten pages are two blocks of four; three are none, which is refused."""
    hybrid = HYBRIDS["gpt-oss-120b"]
    with replaying(**hybrid.bounded(10)) as replay:
        assert free_pages(replay, "swa") == (8, 16)
    with pytest.raises(CapacityError, match="swa"), replaying(**hybrid.bounded(3)):
        pass


def test_report_names_the_space_of_each_pool_and_what_each_space_dropped() -> None:
    """On a host of one block, the other blocks' rows, and windows that could go with them, are dropped."""
    hybrid, requests, sizes = HYBRIDS["deepseek-v4-flash"], stream("abc", "abc"), (6, 1)
    with replaying(**hybrid.choices, device_blocks=6, host_blocks=1) as replay:
        replay.run(requests)
        found = replay.as_dict()
    twin = hybrid_of(requests, *sizes, hybrid.twin_spaces(*sizes, sizes[0]))
    assert found["dropped_blocks_by_space"] == {"full": 4, "swa": 0}
    assert +twin.dropped == {"full": 4}
    assert found["dropped_blocks"] == 4
    spaces = {pool["pool"]: pool["index_space"] for pool in found["pools"]}
    assert {pool for pool, space in spaces.items() if space == "swa"} == {
        "swa",
        "c4_state",
        "c4_indexer_state",
    }
    assert {pool for pool, space in spaces.items() if space == "full"} == {"kv", "c4", "c4_indexer", "c128"}
