"""Reading traces: the three forms, the order of sub-agents, and a refusal with a line for every defect."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_core.errors import SpecError, TraceError
from hicache_core.replay.trace import TraceRequest, expand_runs, read_trace

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "traces"
needs_traces = pytest.mark.skipif(
    not TRACES.is_dir(), reason="the published traces are not beside the checkout (shared/data/traces)"
)

MOONCAKE = {"timestamp": 3000, "input_length": 1025, "output_length": 7, "hash_ids": [0, 1, 2]}


def session(*requests: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A Claude Code session of 64-token blocks."""
    return {"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": list(requests), **fields}


def turn(t: float = 0.0, **fields: Any) -> dict[str, Any]:
    """A request of two full blocks and a rest."""
    return {"t": t, "type": "n", "in": 150, "out": 5, "hash_ids": [1, 2], **fields}


def runs_turn(*runs: list[Any], tokens: int) -> dict[str, Any]:
    """The same with run-length coded ids."""
    return {"t": 0.0, "type": "s", "in": tokens, "out": 5, "hash_runs": list(runs)}


def agent(t: float, *requests: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A sub-agent that started at ``t``."""
    return {"t": t, "type": "subagent", "requests": list(requests), **fields}


def write(path: Path, *records: object) -> Path:
    """Writes records as lines; a string is written as it is."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def refusal(path: Path) -> TraceError:
    """The error that reading the file ends with."""
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    assert caught.value.path == str(path)
    return caught.value


def test_mooncake_record_is_read_field_by_field(tmp_path: Path) -> None:
    """A request carries global ids, 512-token blocks and seconds."""
    (request,) = read_trace(write(tmp_path / "t", MOONCAKE))
    assert (request.session, request.block_tokens, request.line) == ("", 512, 1)
    assert (request.input_tokens, request.output_tokens, request.timestamp_s) == (1025, 7, 3.0)
    assert request.block_ids.dtype == np.int64
    assert request.block_ids.tolist() == [0, 1, 2]


def test_session_record_is_read_field_by_field(tmp_path: Path) -> None:
    """Requests of a session carry its id and its block size, and count full blocks only."""
    second = turn(t=1.5, hash_ids=[1, 2, 9], **{"in": 200})
    first, later = read_trace(write(tmp_path / "t", session(turn(), second)))
    assert (first.session, first.block_tokens, first.line) == ("s", 64, 1)
    assert (later.input_tokens, later.output_tokens, later.timestamp_s) == (200, 5, 1.5)
    assert [first.block_ids.tolist(), later.block_ids.tolist()] == [[1, 2], [1, 2, 9]]


def test_runs_record_is_expanded(tmp_path: Path) -> None:
    """Runs become the ids they stand for, in their order and not sorted."""
    (request,) = read_trace(write(tmp_path / "t", session(runs_turn([7, 3], [1, 2], tokens=5 * 64))))
    assert request.block_ids.tolist() == [7, 8, 9, 1, 2]


def test_prompt_below_one_full_block_has_no_block(tmp_path: Path) -> None:
    """Both Claude Code forms count full blocks, so a short prompt is a request without ids."""
    short = [turn(hash_ids=[], **{"in": 63}), runs_turn(tokens=63)]
    for record in short:
        (request,) = read_trace(write(tmp_path / "t", session(record)))
        assert request.block_ids.shape == (0,)


def test_block_ids_cannot_be_written(tmp_path: Path) -> None:
    """Requests are shared between readers, so their ids are read-only."""
    (request,) = read_trace(write(tmp_path / "t", MOONCAKE))
    with pytest.raises(ValueError, match="read-only"):
        request.block_ids[0] = 5


def test_request_does_not_lock_the_array_it_was_given() -> None:
    """Making a request by hand leaves the caller's array writable."""
    mine = np.array([1, 2], dtype=np.int64)
    request = TraceRequest(
        session="",
        block_ids=mine,
        block_tokens=512,
        input_tokens=900,
        output_tokens=1,
        timestamp_s=0.0,
        line=0,
    )
    mine[0] = 3
    assert not request.block_ids.flags.writeable


@pytest.mark.parametrize(
    "fields",
    [
        {"block_ids": np.zeros(2)},
        {"block_ids": np.zeros((1, 2), dtype=np.int64)},
        {"input_tokens": -1},
        {"output_tokens": 1.5},
        {"line": True},
    ],
)
def test_request_of_wrong_values_is_refused(fields: dict[str, Any]) -> None:
    """A request is checked when made."""
    right: dict[str, Any] = {"session": "", "block_ids": np.zeros(1, dtype=np.int64), "block_tokens": 512}
    right |= {"input_tokens": 1, "output_tokens": 1, "timestamp_s": 0.0, "line": 1}
    TraceRequest(**right)
    with pytest.raises(SpecError):
        TraceRequest(**(right | fields))


def test_subagent_requests_interleave_by_time(tmp_path: Path) -> None:
    """Nested times count from the sub-agent's start; its requests keep the session's namespace."""
    nested = agent(10.0, turn(t=0.0, out=2), turn(t=6.0, out=4))
    record = session(turn(t=0.0, out=1), nested, turn(t=12.0, out=3), turn(t=20.0, out=5))
    requests = list(read_trace(write(tmp_path / "t", record)))
    assert [request.output_tokens for request in requests] == [1, 2, 3, 4, 5]
    assert [request.timestamp_s for request in requests] == [0.0, 10.0, 12.0, 16.0, 20.0]
    assert {request.session for request in requests} == {"s"}


def test_equal_times_keep_the_order_of_the_file(tmp_path: Path) -> None:
    """A tie between a sub-agent and its parent is decided by the file."""
    record = session(
        turn(t=5.0, out=1), agent(5.0, turn(t=0.0, out=2), turn(t=0.0, out=3)), turn(t=5.0, out=4)
    )
    requests = read_trace(write(tmp_path / "t", record))
    assert [request.output_tokens for request in requests] == [1, 2, 3, 4]


def test_subagent_of_a_subagent_adds_both_starts(tmp_path: Path) -> None:
    """Times of nested sub-agents add up."""
    record = session(agent(10.0, agent(5.0, turn(t=1.0)), turn(t=0.0)))
    assert [r.timestamp_s for r in read_trace(write(tmp_path / "t", record))] == [10.0, 16.0]


def test_form_is_found_behind_a_subagent_and_an_empty_session(tmp_path: Path) -> None:
    """The first request with ids shows the form, wherever it stands."""
    empty = session(id="empty")
    record = session(agent(0.0, runs_turn([4, 2], tokens=128)), runs_turn([6, 1], tokens=64))
    requests = read_trace(write(tmp_path / "t", empty, record))
    assert [request.block_ids.tolist() for request in requests] == [[4, 5], [6]]


def test_gzip_is_told_by_content_and_not_by_name(tmp_path: Path) -> None:
    """A packed file without .gz and a plain file with it are both read."""
    line = json.dumps(MOONCAKE).encode() + b"\n"
    (tmp_path / "packed.jsonl").write_bytes(gzip.compress(line))
    (tmp_path / "plain.jsonl.gz").write_bytes(line)
    for name in ("packed.jsonl", "plain.jsonl.gz"):
        assert [request.line for request in read_trace(tmp_path / name)] == [1]


def test_blank_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    """Line numbers are those of the file."""
    assert [r.line for r in read_trace(write(tmp_path / "t", "", MOONCAKE, "  \r", MOONCAKE))] == [2, 4]


def test_reading_is_lazy(tmp_path: Path) -> None:
    """A request comes before later lines are looked at."""
    requests = read_trace(write(tmp_path / "t", MOONCAKE, "broken"))
    assert next(requests).line == 1
    with pytest.raises(TraceError):
        next(requests)


def mooncake(**fields: Any) -> dict[str, Any]:
    return {**MOONCAKE, **fields}


def without(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != name}


MALFORMED: dict[str, object] = {
    "bad JSON": '{"timestamp": 0,',
    "not an object": [1, 2],
    "NaN": '{"timestamp": NaN, "input_length": 1025, "output_length": 7, "hash_ids": [0, 1, 2]}',
    "nested too deeply": "[" * 100_000,
    "integer too long": '{"timestamp": ' + "9" * 5000 + "}",
    **{f"no {name}": without(MOONCAKE, name) for name in MOONCAKE},
    "float ids": mooncake(hash_ids=[0, 1.0, 2]),
    "boolean ids": mooncake(hash_ids=[0, True, 2]),
    "text ids": mooncake(hash_ids=["0", "1", "2"]),
    "ids no list": mooncake(hash_ids=3),
    "negative id": mooncake(hash_ids=[0, -1, 2]),
    "id beyond int64": mooncake(hash_ids=[0, 1, 2**63]),
    "id twice": mooncake(hash_ids=[0, 1, 0]),
    "a block too few": mooncake(hash_ids=[0, 1]),
    "a block too many": mooncake(hash_ids=[0, 1, 2, 3]),
    "floor instead of ceil": mooncake(input_length=1536 + 1),
    "negative input": mooncake(input_length=-1, hash_ids=[]),
    "negative output": mooncake(output_length=-1),
    "text length": mooncake(input_length="1025"),
    "boolean length": mooncake(output_length=True),
    "negative time": mooncake(timestamp=-1),
    "text time": mooncake(timestamp="0"),
    "infinite time": json.dumps(MOONCAKE).replace("3000", "1e999"),
    "another form": session(turn()),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_mooncake_line_is_refused_by_number(tmp_path: Path, name: str) -> None:
    """Whatever is wrong with the third line of a file, the error names line 3."""
    error = refusal(write(tmp_path / "t", MOONCAKE, MOONCAKE, MALFORMED[name], MOONCAKE))
    assert (error.line, error.code) == (3, "trace")


SESSION = session(turn(), id="first")
MALFORMED_SESSIONS: dict[str, dict[str, Any]] = {
    **{f"no {name}": without(session(turn()), name) for name in ("id", "block_size", "requests")},
    **{f"no {name}": session(without(turn(), name)) for name in ("t", "in", "out", "hash_ids")},
    "id of another session": session(turn(), id="first"),
    "id no text": session(turn(), id=7),
    "global scope": session(turn(), hash_id_scope="global"),
    "no block size": session(turn(), block_size=0),
    "requests no list": session(requests={}),
    "request no object": session(requests=[3]),
    "ceil instead of floor": session(turn(hash_ids=[1, 2, 3])),
    "sub-agent without requests": session({"t": 0.0, "type": "subagent"}),
    "sub-agent with ids": session(agent(0.0, turn(), hash_ids=[1, 2])),
    "bad nested request": session(agent(0.0, turn(out=-1))),
    "runs among ids": session(runs_turn([1, 2], tokens=128)),
}


@pytest.mark.parametrize("name", MALFORMED_SESSIONS)
def test_malformed_session_is_refused_by_number(tmp_path: Path, name: str) -> None:
    """Whatever is wrong with the second session, the error names line 2."""
    assert refusal(write(tmp_path / "t", SESSION, MALFORMED_SESSIONS[name])).line == 2


MALFORMED_RUNS: dict[str, tuple[Any, int]] = {
    "no list": (3, 0),
    "a flat list": ([1, 2], 2),
    "three numbers": ([[1, 2, 3]], 2),
    "a float": ([[1, 2.0]], 2),
    "a boolean": ([[True, 2]], 2),
    "negative first": ([[-1, 2]], 2),
    "empty run": ([[1, 2], [5, 0]], 2),
    "negative count": ([[1, 4], [9, -2]], 2),
    "id beyond int64": ([[2**63 - 1, 2]], 2),
    "overlap": ([[4, 3], [1, 4]], 7),
    "too few": ([[1, 2]], 3),
    "too many": ([[1, 4]], 3),
    "more than memory": ([[0, 1 << 40]], 1 << 40),
}


@pytest.mark.parametrize("name", MALFORMED_RUNS)
def test_malformed_runs_are_refused_by_number(tmp_path: Path, name: str) -> None:
    """Runs are checked before they are expanded."""
    runs, blocks = MALFORMED_RUNS[name]
    right = session(runs_turn([1, 2], tokens=128), id="right")
    wrong = session({**runs_turn(tokens=blocks * 64), "hash_runs": runs})
    assert refusal(write(tmp_path / "t", right, wrong)).line == 2


def test_record_of_no_known_form_is_refused(tmp_path: Path) -> None:
    """A file whose first record is of no form is refused at that record."""
    assert refusal(write(tmp_path / "t", {"chat_id": 1})).line == 1


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    """A wrong byte is found at its line."""
    path = write(tmp_path / "t", MOONCAKE)
    path.write_bytes(path.read_bytes() + b'{"timestamp": "\xff"}\n')
    assert refusal(path).line == 2


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.99])
def test_truncated_gzip_is_refused_after_its_whole_lines(tmp_path: Path, kept: float) -> None:
    """What is cut off is noticed; the line is the first that could not be read."""
    path = tmp_path / "t"
    random = np.random.default_rng(1)
    lines = [mooncake(timestamp=int(random.integers(1 << 40))) for _ in range(2000)]
    packed = gzip.compress(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    path.write_bytes(packed[: int(len(packed) * kept)])
    whole: list[int] = []
    with pytest.raises(TraceError) as caught:
        whole.extend(request.line for request in read_trace(path))
    assert whole == list(range(1, len(whole) + 1))
    assert caught.value.line == len(whole) + 1


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    """A file that only starts like gzip is refused."""
    path = tmp_path / "t"
    path.write_bytes(b"\x1f\x8b" + b"x" * 50)
    assert refusal(path).line == 1


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_file_without_a_request_is_refused(tmp_path: Path, content: str) -> None:
    """An empty file is refused as a whole, at no line."""
    path = tmp_path / "t"
    path.write_text(content)
    assert refusal(path).line is None


def test_sessions_without_a_request_are_refused(tmp_path: Path) -> None:
    """A file of empty sessions holds no request either."""
    assert refusal(write(tmp_path / "t", session())).line is None


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    """What cannot be opened is refused as a whole."""
    assert refusal(tmp_path / "absent").line is None
    assert refusal(tmp_path).line is None


@given(st.lists(st.tuples(st.integers(0, 1 << 62), st.integers(0, 50)), max_size=20))
def test_expand_runs_equals_ranges(runs: list[tuple[int, int]]) -> None:
    """The expansion is that of one range a run."""
    expected = [value for first, count in runs for value in range(first, first + count)]
    assert expand_runs(np.array(runs, dtype=np.int64).reshape(-1, 2)).tolist() == expected


@needs_traces
@pytest.mark.parametrize(
    ("name", "requests", "blocks", "tokens"),
    [
        ("mooncake_conversation_trace.full.jsonl.gz", 12_031, 288_500, 144_793_823),
        ("mooncake_conversation_trace.first.jsonl", 5_980, 152_254, 76_504_042),
        ("mooncake_synthetic_trace.jsonl", 3_993, 121_877, 61_194_628),
    ],
)
def test_published_mooncake_trace_is_read_whole(name: str, requests: int, blocks: int, tokens: int) -> None:
    """Counts are the published ones, and no record is refused."""
    read = [(r.block_ids.size, r.input_tokens) for r in read_trace(TRACES / name)]
    assert (len(read), sum(pair[0] for pair in read), sum(pair[1] for pair in read)) == (
        requests,
        blocks,
        tokens,
    )


def by_session(name: str, count: int) -> Iterator[tuple[str, list[TraceRequest]]]:
    """The first sessions of a published file."""
    groups = itertools.groupby(read_trace(TRACES / name), key=lambda request: request.session)
    for session_id, requests in itertools.islice(groups, count):
        yield session_id, list(requests)


@needs_traces
def test_published_sessions_are_in_order_of_time() -> None:
    """The excerpt holds 25 sessions with 315 requests, one of them with sub-agents."""
    sessions = dict(by_session("claude_code_sessions_excerpt.jsonl", 1000))
    assert (len(sessions), sum(map(len, sessions.values()))) == (25, 315)
    for requests in sessions.values():
        times = [request.timestamp_s for request in requests]
        assert times == sorted(times)


@needs_traces
def test_published_runs_equal_the_published_ids() -> None:
    """Sessions that both files have are the same, expanded from runs or read as ids."""
    plain = dict(by_session("claude_code_sessions_excerpt.jsonl", 1000))
    compared = 0
    for session_id, requests in by_session("claude_code_sessions.runs.jsonl.gz", 40):
        for one, other in zip(requests, plain.get(session_id, requests), strict=True):
            assert np.array_equal(one.block_ids, other.block_ids)
            assert (one.input_tokens, one.timestamp_s) == (other.input_tokens, other.timestamp_s)
        compared += session_id in plain
    assert compared >= 2
