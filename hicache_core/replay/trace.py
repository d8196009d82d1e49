"""Reading prefix-hash traces: one request at a time, every malformed line refused with its number.

Three forms are read; the first record that shows its form decides for the whole file:

- Mooncake: one request a line, ids global, one id for each started block of 512 tokens.
- Claude Code sessions: one session a line, ``hash_ids`` for each full block, ids local to the session.
- Claude Code runs: the same with ``hash_runs`` = [[first, count], ...] in place of ``hash_ids``.

Source: the record schemas published with kvcache-ai/Mooncake and callanjfox/kv-cache-tester.
"""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final, cast

import attrs
import numpy as np
import numpy.typing as npt

from hicache_core.errors import SpecError, TraceError

IntArray = npt.NDArray[np.int64]

MOONCAKE_BLOCK_TOKENS: Final = 512
# A damaged count must not become an allocation: 16 Mi blocks are a prompt of 1 Gi tokens at 64 a block.
MAX_REQUEST_BLOCKS: Final = 1 << 24
_GZIP_MAGIC: Final = b"\x1f\x8b"
_MAX_ID: Final = (1 << 63) - 1


def _read_only(value: Any) -> Any:
    view = np.asarray(value).view()
    view.flags.writeable = False
    return view


def _check_ids(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value.dtype != np.int64 or value.ndim != 1:
        raise SpecError(
            who=f"TraceRequest.{attribute.name}",
            got=f"{value.dtype}{list(value.shape)}",
            expected="int64[n]",
            remedy="Give one id a block in a one-dimensional int64 array.",
        )


def _check_count(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if type(value) is not int or value < 0:
        raise SpecError(
            who=f"TraceRequest.{attribute.name}",
            got=repr(value),
            expected="an integer of at least 0",
            remedy="Give a count.",
        )


@attrs.frozen(kw_only=True, eq=False)
class TraceRequest:
    """One request of a trace. Compared by identity, because it holds an array.

    Args:
        session: the namespace of the ids; "" where ids are global (Mooncake).
        block_ids: int64[n], read-only; within the session one id names a whole prefix. Zero blocks means a
            prompt shorter than a block, in a form that counts full blocks only.
        block_tokens: tokens of a full block.
        input_tokens: length of the prompt, tokens.
        output_tokens: length of the answer, tokens; its blocks are not in ``block_ids``.
        timestamp_s: arrival, seconds since the start of the trace (Mooncake) or of the session.
        line: where the request stands in its file, 1-based; 0 if it comes from no file.

    Raises:
        SpecError: an array that is not int64[n], a count that is not an integer of at least 0.
    """

    session: str
    block_ids: IntArray = attrs.field(converter=_read_only, validator=_check_ids)
    block_tokens: int = attrs.field(validator=_check_count)
    input_tokens: int = attrs.field(validator=_check_count)
    output_tokens: int = attrs.field(validator=_check_count)
    timestamp_s: float
    line: int = attrs.field(validator=_check_count)


def expand_runs(runs: IntArray) -> IntArray:
    """The ids that runs stand for, in order.

    Args:
        runs: int64[r, 2], rows of (first id, count); a count of zero stands for no id.

    Returns:
        int64[sum of counts], a new array.

    Raises:
        ValueError: a negative count.
    """
    first, count = runs[:, 0], runs[:, 1]
    starts = np.cumsum(count) - count
    expanded = np.repeat(first - starts, count)
    expanded += np.arange(expanded.size, dtype=np.int64)
    return expanded


@attrs.frozen(kw_only=True)
class _Place:
    """Where a record stands; makes the errors about it and takes its fields apart."""

    path: str
    line: int

    def error(self, got: str, expected: str, remedy: str = "") -> TraceError:
        remedy = remedy or "Fix or remove this line; the other lines are not affected."
        return TraceError(path=self.path, line=self.line, got=got, expected=expected, remedy=remedy)

    def field(self, record: dict[str, Any], name: str) -> Any:
        if name not in record:
            raise self.error(f"a record without '{name}'", f"the field '{name}'")
        return record[name]

    def count(self, record: dict[str, Any], name: str, minimum: int = 0) -> int:
        value = self.field(record, name)
        if type(value) is not int or not minimum <= value <= _MAX_ID:
            raise self.error(f"{name} = {_shown(value)}", f"an integer of at least {minimum}, below 2**63")
        return value

    def seconds(self, record: dict[str, Any], name: str, per_second: int) -> float:
        value = self.field(record, name)
        if type(value) not in (int, float) or not 0 <= value <= _MAX_ID:
            raise self.error(f"{name} = {_shown(value)}", "a time of at least 0")
        return float(value) / per_second

    def objects(self, record: dict[str, Any], name: str) -> list[dict[str, Any]]:
        value = self.field(record, name)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.error(f"{name} = {_shown(value)}", "a list of objects")
        return cast("list[dict[str, Any]]", value)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer too long for the interpreter to print
        return f"a huge {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def _block_ids(place: _Place, record: dict[str, Any], blocks: int) -> IntArray:
    """``hash_ids`` as an array: ``blocks`` integers of at least 0, none twice."""
    value = place.field(record, "hash_ids")
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise place.error(f"hash_ids = {_shown(value)}", "a list of integers")
    if len(value) != blocks:
        raise place.error(f"{len(value)} hash_ids", f"{blocks}, by the length of the prompt")
    if value and not 0 <= min(value) <= max(value) <= _MAX_ID:
        wrong = min(value) if min(value) < 0 else max(value)
        raise place.error(f"the id {_shown(wrong)}", "ids from 0 to 2**63 - 1")
    if len(set(value)) != len(value):
        raise place.error("an id twice in one request", "an id a prefix, so each at most once")
    return np.array(value, dtype=np.int64)


def _run_ids(place: _Place, record: dict[str, Any], blocks: int) -> IntArray:
    """``hash_runs`` expanded, with the promises of ``_block_ids``; checked before anything is allocated."""
    value = place.field(record, "hash_runs")
    if not isinstance(value, list):
        raise place.error(f"hash_runs = {_shown(value)}", "a list of [first, count]")
    for run in value:
        if not isinstance(run, list) or len(run) != 2 or not set(map(type, run)) <= {int}:
            raise place.error(f"the run {_shown(run)}", "[first, count], two integers")
        if run[0] < 0 or run[1] < 1 or run[0] + run[1] - 1 > _MAX_ID:
            raise place.error(f"the run {_shown(run)}", "first >= 0, count >= 1, ids < 2**63")
    total = sum(run[1] for run in value)
    if total != blocks:
        raise place.error(f"hash_runs of {_shown(total)} ids", f"{blocks}, by the length of the prompt")
    if total > MAX_REQUEST_BLOCKS:
        raise place.error(f"{_shown(total)} blocks in one request", f"at most {MAX_REQUEST_BLOCKS}")
    ordered = sorted(value)
    for before, after in itertools.pairwise(ordered):
        if before[0] + before[1] > after[0]:
            raise place.error(f"the id {after[0]} twice in one request", "runs that do not overlap")
    return expand_runs(np.array(value, dtype=np.int64).reshape(-1, 2))


_IdReader = Callable[[_Place, dict[str, Any], int], IntArray]
_ID_READERS: Final[dict[str, _IdReader]] = {"hash_ids": _block_ids, "hash_runs": _run_ids}


def _timed(place: _Place, session: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Every request of a session that has ids, in the order of the file, with its time in the session."""
    # A stack and no recursion: how deep a file nests is not ours to decide.
    pending = [(0.0, request) for request in reversed(place.objects(session, "requests"))]
    while pending:
        start_s, request = pending.pop()
        timestamp_s = start_s + place.seconds(request, "t", 1)
        if request.get("type") != "subagent":
            yield timestamp_s, request
        elif any(key in request for key in _ID_READERS):
            raise place.error("a sub-agent with ids of its own", "ids on its nested requests only")
        else:
            nested = place.objects(request, "requests")
            pending.extend((timestamp_s, inner) for inner in reversed(nested))


class _Mooncake:
    """Records that are requests."""

    def requests(self, place: _Place, record: dict[str, Any]) -> Iterator[TraceRequest]:
        input_tokens = place.count(record, "input_length")
        blocks = -(-input_tokens // MOONCAKE_BLOCK_TOKENS)
        yield TraceRequest(
            session="",
            block_ids=_block_ids(place, record, blocks),
            block_tokens=MOONCAKE_BLOCK_TOKENS,
            input_tokens=input_tokens,
            output_tokens=place.count(record, "output_length"),
            timestamp_s=place.seconds(record, "timestamp", 1000),
            line=place.line,
        )


class _ClaudeCode:
    """Records that are sessions; ``key`` is the field with the ids of a request."""

    def __init__(self, key: str) -> None:
        self._read_ids = _ID_READERS[key]
        self._sessions: set[str] = set()

    def requests(self, place: _Place, record: dict[str, Any]) -> Iterator[TraceRequest]:
        session = place.field(record, "id")
        if not isinstance(session, str) or not session or session in self._sessions:
            raise place.error(f"id = {_shown(session)}", "a name that no other session of the file has")
        self._sessions.add(session)
        scope = record.get("hash_id_scope", "local")
        if scope != "local":
            raise place.error(f"hash_id_scope = {_shown(scope)}", "'local': ids that belong to their session")
        block_tokens = place.count(record, "block_size", minimum=1)
        timed = list(_timed(place, record))
        timed.sort(key=lambda pair: pair[0])
        for timestamp_s, request in timed:
            input_tokens = place.count(request, "in")
            yield TraceRequest(
                session=session,
                block_ids=self._read_ids(place, request, input_tokens // block_tokens),
                block_tokens=block_tokens,
                input_tokens=input_tokens,
                output_tokens=place.count(request, "out"),
                timestamp_s=timestamp_s,
                line=place.line,
            )


_Form = _Mooncake | _ClaudeCode


def _detect(place: _Place, record: dict[str, Any]) -> _Form | None:
    """The form of the file, or None if this record (a session without a request) does not show it."""
    if "requests" not in record:
        if "hash_ids" in record or "input_length" in record:
            return _Mooncake()
        raise place.error(
            f"a record with the fields {_shown(sorted(record))}",
            "a Mooncake request (hash_ids) or a Claude Code session (requests)",
            "Give a trace in one of these forms.",
        )
    for _, request in _timed(place, record):
        return _ClaudeCode("hash_runs" if "hash_runs" in request else "hash_ids")
    return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _parse(place: _Place, raw: bytes) -> dict[str, Any]:
    try:
        record = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise place.error(f"bytes that are not UTF-8 ({error.reason})", "UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        raise place.error(f"{_shown(raw)} ({error})", "one JSON object a line") from error
    if not isinstance(record, dict):
        raise place.error(f"{type(record).__name__} {_shown(record)}", "one JSON object a line")
    return record


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, unpacked if its first bytes are those of gzip."""
    number = 0
    try:
        with Path(path).open("rb") as plain:
            is_gzip = plain.peek(2)[:2] == _GZIP_MAGIC
            source = cast("IO[bytes]", gzip.GzipFile(fileobj=plain) if is_gzip else plain)
            for raw in source:
                number += 1
                yield number, raw
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(
            path=path,
            line=number + 1,
            got=f"a damaged gzip stream ({error})",
            expected="a whole gzip file",
            remedy="Fetch or pack the file again.",
        ) from error
    except OSError as error:
        raise TraceError(
            path=path,
            line=number + 1 if number else None,
            got=f"{type(error).__name__}: {error.strerror or error}",
            expected="a trace file that can be read",
            remedy="Check the path and its permissions.",
        ) from error


def read_trace(path: str | Path) -> Iterator[TraceRequest]:
    """Reads a trace, plain or gzip (told apart by content, not by name), holding one line at a time.

    Requests come in the order of the file. Within a Claude Code session they come in order of time:
    the time of a nested request counts from the start of its sub-agent (in the published sessions the
    first nested time is always 0 and all lie within the sub-agent's duration), so a sub-agent's requests
    interleave with later requests of its parent; equal times keep the order of the file. Sub-agents share
    the namespace of their session. Times of different sessions are not on one clock.

    Blank lines are skipped. A session is checked request by request, so those before a malformed one have
    been yielded when the error comes.

    Args:
        path: the file.

    Returns:
        An iterator; the file is opened at the first step and closed at the end or when it is dropped.

    Raises:
        TraceError: while iterating; the file cannot be read, holds no request, or a line is malformed.
    """
    name = str(path)
    form: _Form | None = None
    is_empty = True
    for number, raw in _lines(name):
        if not raw.strip():
            continue
        place = _Place(path=name, line=number)
        record = _parse(place, raw)
        form = form or _detect(place, record)
        if form is None:
            continue
        for request in form.requests(place, record):
            is_empty = False
            yield request
    if is_empty:
        raise TraceError(
            path=name,
            line=None,
            got="no request",
            expected="at least one request",
            remedy="Give a file that holds a trace.",
        )
