"""Statistics of a trace: hand-counted traces, an LRU of plain lists as oracle, and the published figures."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_core.errors import SpecError, TraceError
from hicache_core.replay.statistics import TraceStatistics, inspect_trace
from hicache_core.replay.trace import TraceRequest, read_trace

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "traces"
needs_traces = pytest.mark.skipif(
    not TRACES.is_dir(), reason="the published traces are not beside the checkout (shared/data/traces)"
)


def request(ids: Sequence[int], session: str = "", **fields: Any) -> TraceRequest:
    """A request made by hand."""
    values: dict[str, Any] = {"block_tokens": 512, "input_tokens": 512 * len(ids), "output_tokens": 10}
    values |= {"timestamp_s": 0.0, "line": 0, **fields}
    return TraceRequest(session=session, block_ids=np.array(ids, dtype=np.int64), **values)


def hit_ratios(statistics: TraceStatistics) -> list[float]:
    return [point.block_hit_ratio for point in statistics.lru]


def test_small_trace_is_counted_by_hand() -> None:
    """Nine references to six blocks, of which all but 0 and 1 are used once."""
    statistics = inspect_trace(
        [
            request([0, 1, 2], input_tokens=1300, output_tokens=10, timestamp_s=5.0),
            request([0, 1, 3], input_tokens=1500, output_tokens=20, timestamp_s=7.5),
            request([0, 4, 5], input_tokens=1400, output_tokens=60, timestamp_s=6.0),
        ]
    )
    assert (statistics.requests, statistics.sessions, statistics.block_tokens) == (3, 1, (512,))
    assert (statistics.block_references, statistics.unique_blocks) == (9, 6)
    assert statistics.blocks_used_once == 4
    assert statistics.reuse_ratio == pytest.approx(3 / 9)
    assert (statistics.input_tokens, statistics.output_tokens) == (4200, 90)
    assert (statistics.mean_input_tokens, statistics.mean_output_tokens) == (1400.0, 30.0)
    assert (statistics.longest_request_blocks, statistics.duration_s) == (3, 2.5)


def test_percentiles_are_nearest_rank() -> None:
    """Of requests with 1 to 200 blocks, 50, 90 and 99 percent have at most 100, 180 and 198."""
    statistics = inspect_trace(request(range(count)) for count in range(200, 0, -1))
    assert statistics.request_blocks_percentiles == ((50, 100), (90, 180), (99, 198))


def test_same_id_in_two_sessions_is_two_blocks() -> None:
    """Sessions are namespaces: nothing is shared between them, in counts or in the cache."""
    two = [request([1, 2], "a"), request([1, 2], "b"), request([1, 2, 3], "a")]
    statistics = inspect_trace(two, [100])
    assert (statistics.sessions, statistics.unique_blocks, statistics.blocks_used_once) == (2, 5, 3)
    assert hit_ratios(statistics) == [pytest.approx(2 / 7)]


def test_duration_is_that_of_the_longest_session() -> None:
    """Clocks of sessions are not compared."""
    times = [("a", 100.0), ("a", 104.0), ("b", 0.0), ("b", 1.0)]
    assert inspect_trace(request([1], name, timestamp_s=time) for name, time in times).duration_s == 4.0


def test_block_sizes_are_listed_once_each() -> None:
    """Sessions may differ in their block size."""
    sizes = [64, 16, 64]
    assert inspect_trace(request([1], block_tokens=size) for size in sizes).block_tokens == (16, 64)


def test_no_request_gives_zeros() -> None:
    """Ratios and means of nothing are zero and not an error."""
    statistics = inspect_trace([], [10])
    assert (statistics.requests, statistics.reuse_ratio, statistics.duration_s) == (0, 0.0, 0.0)
    assert hit_ratios(statistics) == [0.0]
    assert inspect_trace([request([])]).block_references == 0


def test_lru_evicts_the_leaf_first() -> None:
    """With room for three, [0 1 2] then [0 3] leaves the prefix 0 1 and drops the leaf 2."""
    chain = [request([0, 1, 2]), request([0, 3]), request([0, 1])]
    assert hit_ratios(inspect_trace(chain, [3])) == [pytest.approx((0 + 1 + 2) / 7)]
    last = [request([0, 1, 2]), request([0, 3]), request([0, 1, 2])]
    assert hit_ratios(inspect_trace(last, [3])) == [pytest.approx((0 + 1 + 2) / 8)]


def test_lru_hit_stops_at_the_first_absent_block() -> None:
    """A resident block behind an absent one is no hit."""
    gapped = [request([5]), request([6, 5])]
    assert hit_ratios(inspect_trace(gapped, [10])) == [0.0]


def test_request_longer_than_the_cache_leaves_its_start() -> None:
    """What does not fit is the end of the request."""
    long = [request([0, 1, 2, 3]), request([0, 1, 2, 3])]
    assert hit_ratios(inspect_trace(long, [2])) == [pytest.approx(2 / 8)]


def lru_oracle(requests: list[list[int]], capacity: int) -> int:
    """Hits of an LRU list, newest first, kept by plain list operations."""
    newest_first: list[int] = []
    hits = 0
    for ids in requests:
        hits += sum(1 for _ in itertools.takewhile(newest_first.__contains__, ids))
        newest_first = (ids + [block for block in newest_first if block not in ids])[:capacity]
    return hits


@given(
    st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True), min_size=1, max_size=25),
    st.integers(1, 12),
)
def test_lru_equals_a_plain_list(requests: list[list[int]], capacity: int) -> None:
    """Any trace hits as a list would, and every capacity is simulated by itself."""
    statistics = inspect_trace([request(ids) for ids in requests], [capacity, 1000])
    references = sum(map(len, requests))
    expected = [lru_oracle(requests, capacity) / references, lru_oracle(requests, 1000) / references]
    assert hit_ratios(statistics) == pytest.approx(expected)


def test_counts_do_not_depend_on_batches() -> None:
    """Uses are merged in batches; many requests of scattered ids count as one set would."""
    random = np.random.default_rng(3)
    drawn = [random.choice(1 << 62, size=100, replace=True) for _ in range(400)]
    drawn += drawn[:150]
    everything: dict[int, int] = {}
    for ids in drawn:
        for block in ids.tolist():
            everything[block] = everything.get(block, 0) + 1
    statistics = inspect_trace(request(ids.tolist()) for ids in drawn)
    assert statistics.unique_blocks == len(everything)
    assert statistics.blocks_used_once == sum(1 for uses in everything.values() if uses == 1)


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True])
def test_capacity_of_no_blocks_is_refused(capacity: Any) -> None:
    """A cache needs room for a block."""
    with pytest.raises(SpecError):
        inspect_trace([request([1])], [capacity])


def test_file_is_read_by_path(tmp_path: Path) -> None:
    """A path as text or object stands for its requests; an unreadable one is the reader's error."""
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [0, 1]}\n')
    assert inspect_trace(path) == inspect_trace(str(path)) == inspect_trace(read_trace(path))
    with pytest.raises(TraceError):
        inspect_trace(tmp_path / "absent")


def test_json_names_carry_units_and_survive_a_round_trip() -> None:
    """The dictionary is JSON as it stands."""
    values = inspect_trace([request([0, 1]), request([0, 2], timestamp_s=3.0)], [1]).to_json_dict()
    assert json.loads(json.dumps(values)) == values
    assert (values["reference_blocks"], values["unique_blocks"], values["duration_s"]) == (4, 3, 3.0)
    assert values["request_blocks_percentiles"] == {"p50": 2, "p90": 2, "p99": 2}
    assert values["lru"] == [{"capacity_blocks": 1, "block_hit_ratio": 0.25}]
    units = ("_count", "_blocks", "_tokens", "_ratio", "_s", "_percentiles")
    assert [name for name in values if not name.endswith(units)] == ["lru"]


@needs_traces
def test_published_conversation_trace_has_its_published_figures() -> None:
    """The table of the conversation trace, LRU curve included."""
    capacities = (1_000, 4_000, 8_000, 16_000, 32_000)
    statistics = inspect_trace(TRACES / "mooncake_conversation_trace.full.jsonl.gz", capacities)
    assert (statistics.requests, statistics.block_references, statistics.unique_blocks) == (
        12_031,
        288_500,
        182_790,
    )
    assert (statistics.input_tokens, statistics.blocks_used_once) == (144_793_823, 138_646)
    assert (statistics.longest_request_blocks, round(statistics.duration_s)) == (247, 3_537)
    assert statistics.request_blocks_percentiles == ((50, 14), (90, 54), (99, 167))
    assert (round(statistics.mean_input_tokens), round(statistics.mean_output_tokens)) == (12_035, 343)
    assert round(statistics.reuse_ratio, 4) == 0.3664
    assert [round(ratio, 3) for ratio in hit_ratios(statistics)] == [0.045, 0.087, 0.178, 0.263, 0.332]


@needs_traces
def test_published_synthetic_trace_has_its_published_figures() -> None:
    """The table of the synthetic trace."""
    statistics = inspect_trace(TRACES / "mooncake_synthetic_trace.jsonl", (1_000, 32_000))
    assert (statistics.requests, statistics.block_references, statistics.unique_blocks) == (
        3_993,
        121_877,
        43_924,
    )
    assert (statistics.blocks_used_once, statistics.longest_request_blocks) == (25_673, 374)
    assert round(statistics.reuse_ratio, 4) == 0.6396
    assert [round(ratio, 3) for ratio in hit_ratios(statistics)] == [0.084, 0.628]


@needs_traces
def test_published_sessions_have_the_figures_of_their_records() -> None:
    """The excerpt, counted from its JSON with one set a session and no reader of ours."""
    path = TRACES / "claude_code_sessions_excerpt.jsonl"
    references = unique = requests = 0
    for line in path.read_text().splitlines():
        pending = json.loads(line)["requests"]
        seen: set[int] = set()
        while pending:
            record = pending.pop()
            pending.extend(record.get("requests", []))
            seen.update(record.get("hash_ids", []))
            references += len(record.get("hash_ids", []))
            requests += "hash_ids" in record
        unique += len(seen)
    statistics = inspect_trace(path)
    assert (statistics.requests, statistics.sessions) == (requests, 25) == (315, 25)
    assert (statistics.block_references, statistics.unique_blocks) == (references, unique)
    assert statistics.block_tokens == (64,)
