"""Statistics of a trace in one streaming pass: sizes, reuse, and what an LRU cache of blocks would hit."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np

from hicache_core.errors import SpecError
from hicache_core.replay.trace import IntArray, TraceRequest, read_trace

PERCENTILES: Final = (50, 90, 99)
# Smaller batches would spend the pass on calls, larger ones keep memory for each finished session.
_MIN_BATCH_IDS: Final = 1 << 12
# Ids are below 2**63, so a session number above them makes one key of both.
_SESSION_STRIDE: Final = 1 << 63


@attrs.frozen(kw_only=True)
class LruPoint:
    """One point of an LRU curve.

    Args:
        capacity_blocks: blocks that the cache holds.
        block_hit_ratio: blocks found by block references; 0.0 if there is no reference.
    """

    capacity_blocks: int
    block_hit_ratio: float


@attrs.frozen(kw_only=True)
class TraceStatistics:
    """What a trace holds. Means and ratios of nothing are 0.0.

    Args:
        requests: requests of all sessions.
        sessions: namespaces of ids; 1 where ids are global.
        block_tokens: the tokens of a full block; more than one entry if sessions differ.
        block_references: blocks of all requests together.
        unique_blocks: different blocks; the same id in two sessions is two blocks.
        blocks_used_once: unique blocks that only one request has.
        reuse_ratio: part of the references to a block that an earlier request had; with prefix hashes this
            is the hit ratio of a cache without bound that holds every earlier prompt.
        input_tokens: tokens of all prompts together.
        output_tokens: tokens of all answers together.
        mean_input_tokens: prompt tokens a request.
        mean_output_tokens: answer tokens a request.
        longest_request_blocks: blocks of the longest request.
        request_blocks_percentiles: (percent, blocks): so many percent of the requests have at most so many
            blocks (nearest rank).
        duration_s: from the first to the last arrival; the longest session's, as sessions share no clock.
        lru: the LRU curve, in the order of the capacities asked for.
    """

    requests: int
    sessions: int
    block_tokens: tuple[int, ...]
    block_references: int
    unique_blocks: int
    blocks_used_once: int
    reuse_ratio: float
    input_tokens: int
    output_tokens: int
    mean_input_tokens: float
    mean_output_tokens: float
    longest_request_blocks: int
    request_blocks_percentiles: tuple[tuple[int, int], ...]
    duration_s: float
    lru: tuple[LruPoint, ...] = ()

    def to_json_dict(self) -> dict[str, Any]:
        """The statistics as JSON values; every name of a quantity ends with its unit, ratios are 0 to 1."""
        return {
            "request_count": self.requests,
            "session_count": self.sessions,
            "block_tokens": list(self.block_tokens),
            "reference_blocks": self.block_references,
            "unique_blocks": self.unique_blocks,
            "used_once_blocks": self.blocks_used_once,
            "reuse_ratio": self.reuse_ratio,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "mean_input_tokens": self.mean_input_tokens,
            "mean_output_tokens": self.mean_output_tokens,
            "longest_request_blocks": self.longest_request_blocks,
            "request_blocks_percentiles": {f"p{p}": blocks for p, blocks in self.request_blocks_percentiles},
            "duration_s": self.duration_s,
            "lru": [attrs.asdict(point) for point in self.lru],
        }


class _BlockUses:
    """How often each id of one session was used, kept sorted; new ids wait in batches."""

    def __init__(self) -> None:
        self._ids: IntArray = np.empty(0, dtype=np.int64)
        self._uses: IntArray = np.empty(0, dtype=np.int64)
        self._waiting: list[IntArray] = []
        self._waiting_ids = 0

    def add(self, block_ids: IntArray) -> None:
        self._waiting.append(block_ids)
        self._waiting_ids += block_ids.size
        # A batch as large as what it is merged into keeps the whole pass at n log n.
        if self._waiting_ids >= max(_MIN_BATCH_IDS, self._ids.size):
            self._merge()

    def _merge(self) -> None:
        ids, uses = np.unique(np.concatenate([*self._waiting, self._ids[:0]]), return_counts=True)
        self._waiting, self._waiting_ids = [], 0
        merged, slots = np.unique(np.concatenate([self._ids, ids]), return_inverse=True)
        total = np.zeros(merged.size, dtype=np.int64)
        np.add.at(total, slots, np.concatenate([self._uses, uses]))
        self._ids, self._uses = merged, total

    def unique_and_once(self) -> tuple[int, int]:
        """Different ids, and those used by one request only."""
        self._merge()
        return self._ids.size, int(np.count_nonzero(self._uses == 1))


class _Lru:
    """A cache of ``capacity_blocks``, least recently used out first.

    A request touches all its blocks, its leaf as the oldest, so a prefix outlives what hangs on it.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.hits = 0
        self._resident: OrderedDict[int, None] = OrderedDict()

    def request(self, keys: Sequence[int]) -> None:
        resident = self._resident
        for key in keys:
            if key not in resident:
                break
            self.hits += 1
        for key in reversed(keys):
            resident[key] = None
            resident.move_to_end(key)
        while len(resident) > self.capacity_blocks:
            resident.popitem(last=False)

    def point(self, references: int) -> LruPoint:
        ratio = _ratio(self.hits, references)
        return LruPoint(capacity_blocks=self.capacity_blocks, block_hit_ratio=ratio)


class _Session:
    """What is kept of one namespace of ids."""

    def __init__(self, number: int) -> None:
        self.first_key = number * _SESSION_STRIDE
        self.uses = _BlockUses()
        self.first_s = math.inf
        self.last_s = -math.inf

    def add(self, request: TraceRequest) -> None:
        self.uses.add(request.block_ids)
        self.first_s = min(self.first_s, request.timestamp_s)
        self.last_s = max(self.last_s, request.timestamp_s)


class _Tally:
    """The running totals of a pass."""

    def __init__(self, lru_capacities: Sequence[int]) -> None:
        self._sessions: dict[str, _Session] = {}
        self._caches = [_Lru(capacity) for capacity in lru_capacities]
        self._lengths: Counter[int] = Counter()
        self._block_tokens: set[int] = set()
        self._input_tokens = 0
        self._output_tokens = 0

    def add(self, request: TraceRequest) -> None:
        session = self._sessions.get(request.session)
        if session is None:
            session = self._sessions[request.session] = _Session(len(self._sessions))
        session.add(request)
        self._lengths[request.block_ids.size] += 1
        self._block_tokens.add(request.block_tokens)
        self._input_tokens += request.input_tokens
        self._output_tokens += request.output_tokens
        if self._caches:
            keys = [session.first_key + block_id for block_id in request.block_ids.tolist()]
            for cache in self._caches:
                cache.request(keys)

    def statistics(self) -> TraceStatistics:
        sessions = self._sessions.values()
        requests = self._lengths.total()
        references = sum(length * count for length, count in self._lengths.items())
        counted = [session.uses.unique_and_once() for session in sessions]
        unique = sum(pair[0] for pair in counted)
        return TraceStatistics(
            requests=requests,
            sessions=len(sessions),
            block_tokens=tuple(sorted(self._block_tokens)),
            block_references=references,
            unique_blocks=unique,
            blocks_used_once=sum(pair[1] for pair in counted),
            reuse_ratio=_ratio(references - unique, references),
            input_tokens=self._input_tokens,
            output_tokens=self._output_tokens,
            mean_input_tokens=_ratio(self._input_tokens, requests),
            mean_output_tokens=_ratio(self._output_tokens, requests),
            longest_request_blocks=max(self._lengths, default=0),
            request_blocks_percentiles=tuple((p, _nearest_rank(self._lengths, p)) for p in PERCENTILES),
            duration_s=max((session.last_s - session.first_s for session in sessions), default=0.0),
            lru=tuple(cache.point(references) for cache in self._caches),
        )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _nearest_rank(lengths: Counter[int], percent: int) -> int:
    rank = -(-lengths.total() * percent // 100)
    seen = 0
    for length in sorted(lengths):
        seen += lengths[length]
        if seen >= rank:
            return length
    return 0


def inspect_trace(
    path_or_requests: str | Path | Iterable[TraceRequest], lru_capacities: Sequence[int] = ()
) -> TraceStatistics:
    """Computes the statistics of a trace in one pass.

    Memory grows with the number of unique blocks (some 24 bytes each) and with the capacities, not with the
    length of the trace. Each capacity costs a dictionary operation per block reference.

    Args:
        path_or_requests: a trace file, or requests (an iterator is used up).
        lru_capacities: sizes of LRU caches to simulate, blocks, each at least 1. A hit is a block of the
            leading run of a request's blocks that is resident when the request comes.

    Raises:
        SpecError: a capacity below 1.
        TraceError: the file cannot be read, holds no request, or a line is malformed.
    """
    for capacity in lru_capacities:
        if type(capacity) is not int or capacity < 1:
            raise SpecError(
                who="inspect_trace",
                got=f"the LRU capacity {capacity!r}",
                expected="an integer of at least 1, blocks",
                remedy="Leave the capacity out; a cache of no blocks hits nothing.",
            )
    requests = read_trace(path_or_requests) if isinstance(path_or_requests, str | Path) else path_or_requests
    tally = _Tally(lru_capacities)
    for request in requests:
        tally.add(request)
    return tally.statistics()
