"""The trace generator: valid records, the same everywhere, with the statistics of the published trace."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hicache_core.errors import SpecError, TraceError
from hicache_core.replay.generate import Quantiles, generate_conversation, write_trace
from hicache_core.replay.statistics import TraceStatistics, inspect_trace
from hicache_core.replay.trace import read_trace

# Requests of the published conversation trace, and its LRU curve: capacity in blocks -> block hit ratio.
FULL = 12_031
PUBLISHED_LRU = {1_000: 0.045, 4_000: 0.087, 8_000: 0.178, 16_000: 0.263, 32_000: 0.332}

Records = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[1, 20250])
def records(request: pytest.FixtureRequest) -> Records:
    """A trace as long as the published one; the fit must not hang on one seed."""
    return list(generate_conversation(FULL, request.param))


@pytest.fixture(scope="module")
def statistics(records: Records, tmp_path_factory: pytest.TempPathFactory) -> TraceStatistics:
    """Its statistics, by way of a file."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_trace(path, records)
    return inspect_trace(path, tuple(PUBLISHED_LRU))


def test_same_seed_gives_the_same_records() -> None:
    """A trace is named by its length and seed."""
    assert list(generate_conversation(500, 7)) == list(generate_conversation(500, 7))


def test_other_seed_gives_other_records() -> None:
    """The seed matters."""
    assert list(generate_conversation(50, 7)) != list(generate_conversation(50, 8))


def test_first_records_are_the_same_on_every_machine() -> None:
    """The start of seed 0 is pinned: generated traces are quoted by seed in reports."""
    first = next(generate_conversation(1, 0))
    assert (first["timestamp"], first["input_length"], first["output_length"]) == (0, 17_691, 161)


def test_short_trace_is_the_start_of_a_long_one() -> None:
    """Cutting a trace and asking for a shorter one are the same."""
    assert list(generate_conversation(333, 5)) == list(generate_conversation(900, 5))[:333]


def test_count_of_records_is_the_one_asked_for() -> None:
    """No tick is rounded up."""
    assert [len(list(generate_conversation(count, 1))) for count in (1, 2, 47)] == [1, 2, 47]


@pytest.mark.parametrize(("requests", "seed"), [(0, 1), (-1, 1), (1.5, 1), (True, 1), (1, -1), (1, "x")])
def test_misuse_is_refused_at_the_call(requests: Any, seed: Any) -> None:
    """The error comes before the first record is asked for."""
    with pytest.raises(SpecError):
        generate_conversation(requests, seed)


def test_ids_are_dense_prefix_hashes_with_block_0_everywhere(records: Records) -> None:
    """Ids appear in order of first use, each with one predecessor, and every request starts with 0."""
    predecessor: dict[int, int] = {}
    for record in records:
        ids = record["hash_ids"]
        assert ids[0] == 0
        assert len(ids) == math.ceil(record["input_length"] / 512)
        for before, block in itertools.pairwise(ids):
            if block not in predecessor:
                assert block == len(predecessor) + 1
            assert predecessor.setdefault(block, before) == before


def test_arrivals_come_in_ticks_of_about_3_s(records: Records) -> None:
    """Times rise, steps are 3 s give or take a few ms, and a tick holds 10.2 requests on average."""
    times = [record["timestamp"] for record in records]
    assert times == sorted(times)
    ticks = Counter(times)
    assert 9.8 < len(times) / len(ticks) < 10.6
    steps = [after - before for before, after in itertools.pairwise(sorted(ticks))]
    assert {round(step / 3000) for step in steps} <= {1, 2}
    assert all(min(step % 3000, -step % 3000) <= 3 for step in steps)
    assert 15 < max(ticks.values()) < 40


def test_next_turn_replaces_the_last_partial_block(records: Records) -> None:
    """Most next turns share all full blocks of an earlier request and not its partial one."""
    last_user: dict[int, int] = {}
    replaced = total = 0
    for number, record in enumerate(records):
        ids = record["hash_ids"]
        matched = sum(1 for block in ids if block in last_user)
        if matched > 1:
            earlier = records[last_user[ids[matched - 1]]]
            total += 1
            replaced += matched == len(earlier["hash_ids"]) - 1 == earlier["input_length"] // 512
        last_user.update(dict.fromkeys(ids, number))
    # Published: 4,658 of 12,031 requests match more than block 0, 3,833 of them all but one block.
    assert 0.33 < total / len(records) < 0.45
    assert 0.75 < replaced / total < 0.90


def test_lengths_are_those_of_the_published_trace(statistics: TraceStatistics) -> None:
    """Published: blocks median 14, p90 54, p99 167, longest 247; mean 12,035 tokens in, 343 out."""
    blocks = dict(statistics.request_blocks_percentiles)
    assert blocks[50] == pytest.approx(14, abs=1)
    assert blocks[90] == pytest.approx(54, abs=5)
    assert blocks[99] == pytest.approx(167, abs=17)
    assert 235 <= statistics.longest_request_blocks <= 247
    assert statistics.mean_input_tokens == pytest.approx(12_035, rel=0.06)
    assert statistics.mean_output_tokens == pytest.approx(343, rel=0.03)
    assert statistics.duration_s == pytest.approx(3_537, rel=0.04)


def test_reuse_rises_with_length_as_published(records: Records) -> None:
    """Published: 0.289 at 2,000 requests, 0.346 at 5,980, 0.366 at 12,031."""
    seen: set[int] = set()
    references = 0
    reuse = {}
    for number, record in enumerate(records, start=1):
        seen.update(record["hash_ids"])
        references += len(record["hash_ids"])
        reuse[number] = 1 - len(seen) / references
    assert reuse[2_000] == pytest.approx(0.289, abs=0.05)
    assert reuse[5_980] == pytest.approx(0.346, abs=0.03)
    assert reuse[FULL] == pytest.approx(0.366, abs=0.025)
    assert reuse[2_000] < reuse[5_980] < reuse[FULL]


def test_lru_curve_is_near_the_published_one(statistics: TraceStatistics) -> None:
    """The recency of reuse is that of the published trace, so cache sizes mean the same."""
    for point in statistics.lru:
        assert point.block_hit_ratio == pytest.approx(PUBLISHED_LRU[point.capacity_blocks], abs=0.025)


def test_quantiles_interpolate_lines_and_exponentials() -> None:
    """Halfway between 1 and 100 is 50.5 on a line and 10 on an exponential."""
    line = Quantiles(levels=(0.0, 0.5, 1.0), values=(1, 100, 200))
    assert [line.at(0.0), line.at(0.25), line.at(0.5)] == [1, 50.5, 100]
    curve = Quantiles(levels=(0.0, 1.0), values=(1, 100), geometric=True)
    assert curve.at(0.5) == pytest.approx(10)


def test_written_trace_reads_back(tmp_path: Path) -> None:
    """Every generated record passes the reader, with nothing lost."""
    path = tmp_path / "t.jsonl"
    assert write_trace(path, generate_conversation(300, 3)) == 300
    read = [(r.timestamp_s, r.input_tokens, r.output_tokens, r.block_ids.tolist()) for r in read_trace(path)]
    assert read == [
        (r["timestamp"] / 1000, r["input_length"], r["output_length"], r["hash_ids"])
        for r in generate_conversation(300, 3)
    ]


def test_failed_write_leaves_the_earlier_file(tmp_path: Path) -> None:
    """Records that stop with an error replace nothing and leave nothing behind."""
    path = tmp_path / "t.jsonl"
    write_trace(path, [{"old": 1}])

    def failing() -> Any:
        yield {"new": 1}
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        write_trace(path, failing())
    assert json.loads(path.read_text()) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_path_that_is_no_file_is_written_directly() -> None:
    """A device is not replaced by a file."""
    assert write_trace("/dev/null", [{"a": 1}]) == 1
    assert Path("/dev/null").is_char_device()


def test_unwritable_path_is_refused(tmp_path: Path) -> None:
    """A missing folder is an error that names the path."""
    path = tmp_path / "absent" / "t.jsonl"
    with pytest.raises(TraceError) as caught:
        write_trace(path, [{"a": 1}])
    assert (caught.value.path, caught.value.line) == (str(path), None)
