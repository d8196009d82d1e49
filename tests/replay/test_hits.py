"""Hits: the published figures by the twin, and the product against the twin."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Sequence

import numpy as np
import pytest

from hicache_core.cache.hierarchy import HierarchicalCache
from hicache_core.cache.policies import WriteThrough
from hicache_core.memory.slots import PageAllocator
from hicache_core.replay.generate import generate_conversation
from hicache_core.replay.trace import TraceRequest, read_trace
from hicache_core.spec import IndexSpace
from hicache_core.transfer.ticket import Ticket
from tests.lru_twin import Counts, Twin, twin_counts
from tests.replay.replays import TRACES as FOLDER
from tests.replay.replays import figures, needs_traces, replayed, request, twin_of

CONVERSATION = FOLDER / "mooncake_conversation_trace.full.jsonl.gz"
PUBLISHED_BLOCKS = (4_000, 16_000)
PUBLISHED = {"requests": 12_031, "referenced": 288_500, "device_hits": 24_964, "host_hits": 50_827}
REQUESTS = 500

FLASH = {
    "model": "deepseek-v4-flash",
    "variant": "rocm_unified_bf16",
    "platform": "rocm-mi355x",
    "page_slots": None,
    "block_tokens": 256,
}
FLASH_BLOCK_BYTES = 65_536 + 8_448 + 2_048
SMALL = {"model": "deepseek-v3", "variant": "fp8_plain", "page_slots": 4, "block_tokens": 4}
SMALL_BLOCK_BYTES = 4 * 576
DIRECT = {"platform": "cuda", "io_backend": "direct", "layout": "page_first_direct"}
KERNEL = {"platform": "rocm", "io_backend": "kernel", "layout": "page_first"}

# Device and host blocks: rows of a model fit, requests that are too large and a host with many hits, host
# smaller than the device, host smaller than many a request.
SIZES = [(400, 1600), (64, 14_000), (300, 100), (240, 12)]


def plain_blocks() -> list[list[int]]:
    """The whole conversation trace, read without the product."""
    with gzip.open(CONVERSATION, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


class StillController:
    """In place of a controller: a host allocator, and transfers that are done at once and move nothing."""

    anchor_space = "full"

    def __init__(self, space: IndexSpace, pages: int) -> None:
        self.host = PageAllocator(space, pages, who="host")
        self.group = self
        self.allocators = {"full": self.host}

    def allocator(self, space: str) -> PageAllocator:
        """The allocator of the host."""
        return self.host

    def load(self, host_pages: np.ndarray, device_pages: np.ndarray, **_: object) -> Ticket:
        """Nothing to wait for."""
        assert len(host_pages) == len(device_pages)
        assert self.host.owns(host_pages)
        return Ticket("load", 0, [], {}, lambda: None)

    backup = load


def cache_counts(requests: Sequence[Sequence[int]], device_blocks: int, host_blocks: int) -> Counts:
    """What the cache does with requests while no byte moves."""
    space = IndexSpace(name="full", page_slots=1)
    controller = StillController(space, host_blocks)
    device = PageAllocator(space, device_blocks, who="device")
    cache = HierarchicalCache(controller, {"full": device}, 1, WriteThrough())  # type: ignore[arg-type]
    counts = Counts()
    for blocks in requests:
        admission = cache.admit(blocks)
        cache.land(admission)
        cache.commit(admission)
        cache.settle(admission)
        counts.requests += 1
        counts.referenced += len(blocks)
        counts.device_hits += admission.match.device_blocks
        counts.host_hits += admission.match.host_blocks
        counts.backed_up += len(admission.backed_up.at)
        counts.dropped += admission.dropped_blocks
    return counts


def test_twin_gives_up_the_oldest_leaf_first() -> None:
    """The oracle itself, on a case worked out by hand: device of 3, host of 5."""
    twin = Twin(3, 5)
    assert twin.request("abc") == (0, 0)
    assert twin.request("ade") == (1, 0)
    assert twin.device.oldest_first() == ["e", "d", "a"]
    assert twin.host.oldest_first() == ["c", "b", "e", "d", "a"]
    # The root is on the device, the next two are on the host alone.
    assert twin.request("abc") == (1, 2)
    assert twin.request("af") == (1, 0)
    assert twin.device.oldest_first() == ["b", "f", "a"]
    assert twin.host.oldest_first() == ["d", "c", "b", "f", "a"]
    assert twin.request("ade") == (1, 1)
    assert twin.request("wxyz") == (0, 0)
    assert twin.counts == Counts(
        requests=6, too_large=1, referenced=14, device_hits=4, host_hits=3, backed_up=7, dropped=0
    )


def test_twin_drops_what_the_host_cannot_hold() -> None:
    """With a host of 2 under a request of 4, the leading two blocks are kept."""
    twin = Twin(4, 2)
    twin.request("abcd")
    assert twin.host.oldest_first() == ["b", "a"]
    assert (twin.counts.backed_up, twin.counts.dropped) == (2, 2)


@needs_traces
def test_whole_conversation_trace_has_the_published_hits() -> None:
    """4,000 device and 16,000 host blocks: 24,964 and 50,827 hits in 288,500 references, by the twin."""
    counts = twin_counts(plain_blocks(), *PUBLISHED_BLOCKS)
    assert {name: getattr(counts, name) for name in PUBLISHED} == PUBLISHED
    assert (counts.too_large, counts.dropped) == (0, 0)


@needs_traces
def test_cache_agrees_with_the_twin_on_the_whole_conversation_trace() -> None:
    """The product's own index, allocators and policy come to the same counts, without bytes."""
    blocks = plain_blocks()
    got = cache_counts(blocks, *PUBLISHED_BLOCKS)
    assert {name: getattr(got, name) for name in PUBLISHED} == PUBLISHED
    assert got == twin_counts(blocks, *PUBLISHED_BLOCKS)


@needs_traces
def test_reader_gives_the_blocks_of_the_file() -> None:
    """The replay sees the requests that the twin sees."""
    assert [r.block_ids.tolist() for r in read_trace(CONVERSATION)] == plain_blocks()


def real() -> list[TraceRequest]:
    """The first requests of the conversation trace."""
    return list(itertools.islice(read_trace(CONVERSATION), REQUESTS))


def generated() -> list[TraceRequest]:
    """A trace of our own generator."""
    return [request(record["hash_ids"]) for record in generate_conversation(REQUESTS, seed=11)]


def check(requests: list[TraceRequest], sizes: tuple[int, int], block_bytes: int, **choices: object) -> None:
    """Replay requests with real bytes and compare with the twin."""
    twin = twin_of(requests, *sizes)
    report = replayed(requests, device_blocks=sizes[0], host_blocks=sizes[1], **choices)
    assert figures(report) == without_backed_up(twin)
    assert (report.mismatches, report.failed_transfers) == (0, 0)
    assert report.bytes_device_to_host == twin.backed_up * block_bytes
    assert report.bytes_host_to_device == report.verified_bytes == twin.host_hits * block_bytes
    assert twin.device_hits
    # The stream is not too easy: something came back from the host, or was dropped for want of room.
    assert twin.host_hits or twin.dropped


def without_backed_up(counts: Counts) -> Counts:
    """The counts without those that a report does not have."""
    return Counts(**{**vars(counts), "backed_up": 0})


@needs_traces
def test_replay_of_real_requests_with_rows_of_a_model_agrees_with_the_twin() -> None:
    """500 requests of the conversation trace, staged backups, aliases that differ, all loaded bytes right."""
    check(real(), SIZES[0], FLASH_BLOCK_BYTES, **FLASH)


@needs_traces
@pytest.mark.parametrize("sizes", SIZES[1:])
def test_replay_of_real_requests_agrees_with_the_twin_whatever_the_tiers(sizes: tuple[int, int]) -> None:
    """500 requests of the conversation trace on tiers that are short in one way or another."""
    check(real(), sizes, SMALL_BLOCK_BYTES, **SMALL, **DIRECT)


def test_replay_of_a_generated_trace_with_rows_of_a_model_agrees_with_the_twin() -> None:
    """500 generated requests, so that this is proven where no published trace is at hand."""
    check(generated(), SIZES[0], FLASH_BLOCK_BYTES, **FLASH)


@pytest.mark.parametrize("sizes", SIZES[1:])
def test_replay_of_a_generated_trace_agrees_with_the_twin_whatever_the_tiers(sizes: tuple[int, int]) -> None:
    """500 generated requests on tiers that are short in one way or another."""
    check(generated(), sizes, SMALL_BLOCK_BYTES, **SMALL, **KERNEL)


def interleaved(requests: list[TraceRequest], longest: int) -> list[TraceRequest]:
    """Requests of several sessions by turns, those of more than ``longest`` blocks left out.

    The published sessions come one after another, so that none would find anything on the host.
    """
    by_session: dict[str, list[TraceRequest]] = {}
    for one in requests:
        if len(one.block_ids) <= longest:
            by_session.setdefault(one.session, []).append(one)
    turns = itertools.zip_longest(*by_session.values())
    return [one for turn in turns for one in turn if one is not None]


@needs_traces
@pytest.mark.parametrize(
    ("name", "first", "sessions"),
    [("claude_code_sessions_excerpt.jsonl", 120, 7), ("claude_code_sessions.runs.jsonl.gz", 120, 2)],
)
def test_claude_code_sessions_agree_with_the_twin(name: str, first: int, sessions: int) -> None:
    """Both forms; ids are local to a session, so that equal ids of two sessions must not be mixed up."""
    read = itertools.islice(read_trace(FOLDER / name), first)
    requests = interleaved(list(read), longest=900)[:60]
    assert len({one.session for one in requests}) >= sessions
    ids = [one.block_ids[0] for one in requests]
    assert len(set(ids)) < len({(one.session, i) for one, i in zip(requests, ids, strict=True)})
    check(requests, (1_000, 6_000), SMALL_BLOCK_BYTES, **SMALL, **DIRECT)


@needs_traces
def test_synthetic_trace_agrees_with_the_twin() -> None:
    """The second Mooncake trace."""
    requests = list(itertools.islice(read_trace(FOLDER / "mooncake_synthetic_trace.jsonl"), 200))
    check(requests, (120, 3_000), SMALL_BLOCK_BYTES, **SMALL, **KERNEL)
