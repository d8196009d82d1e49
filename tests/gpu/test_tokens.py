"""Copies of single tokens on a CUDA device, by kernel and by batch copies: every byte against the oracle."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from attrs import evolve

from hicache_core.controller import ControllerConfig
from hicache_core.device.cuda import CudaRuntime
from hicache_core.errors import IndexRangeError, UnsupportedTokensError
from hicache_core.memory.options import MemoryOptions
from hicache_core.spec import BufferSpec, PoolSpec, RowUnit, Span
from hicache_core.testing.rigs import DeviceOptions, Rig, differences
from hicache_core.testing.stand_ins import pool_spec

PAIRS = (("kernel", "page_first"), ("direct", "layer_first"), ("direct", "page_first_direct"))
LAYERS = (0, 2, 5)
COMPRESSED = BufferSpec(
    name="kv",
    row_bytes=37_440,
    spans=[Span(offset=0, stride=576, nbytes=576), Span(offset=36_864, stride=8, nbytes=8)],
    row_tokens=64,
)
ROWS: dict[str, tuple[PoolSpec, int, int]] = {
    # declaration, host pages, device pages
    "pages of 1": (pool_spec(1024, 512, page_slots=1, layer_ids=LAYERS), 96, 64),
    "pages of 16": (pool_spec(384, 256, page_slots=16, layer_ids=LAYERS), 64, 8),
    "pages of 64": (pool_spec(656, page_slots=64, layer_ids=LAYERS), 160, 4),
    "compressed": (
        evolve(pool_spec(page_slots=256, unit=RowUnit.PAGE, layer_ids=LAYERS), buffers=[COMPRESSED]),
        160,
        4,
    ),
}


@contextmanager
def token_rig(cuda: CudaRuntime, rows: str, pair: tuple[str, str], gap: int) -> Iterator[Rig[CudaRuntime]]:
    """A rig whose host buffers have several registrations, its host bytes distinct."""
    spec, host_pages, device_pages = ROWS[rows]
    config = ControllerConfig(
        io_backend=pair[0],
        layout=pair[1],
        host_pages=host_pages,
        memory=MemoryOptions(max_registration_bytes=4096),
    )
    options = DeviceOptions(pages=device_pages, gap_bytes=gap, slab=not gap)
    with Rig([spec], config, cuda, options=options) as rig:
        assert all(len(buffer.memory.segments) > 1 for buffer in rig.controller.group.anchor.buffers)
        rig.fill_host()
        yield rig


@pytest.fixture(params=["launching", "copying"])
def runtime(request: pytest.FixtureRequest) -> CudaRuntime:
    """A runtime with kernels, and one without."""
    found: CudaRuntime = request.getfixturevalue(request.param)
    return found


def sides(pairs: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Host tokens and device tokens, int64[n] each."""
    both = np.array(pairs, dtype=np.int64)
    return both[:, 0], both[:, 1]


def drawn_pairs(host_tokens: int, device_tokens: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of six over each cut of the host side, single tokens elsewhere, and padding, shuffled."""
    draw = random.Random(0)
    pairs = {
        cut - 3 + i: 6 * number + i
        for number, cut in enumerate(cuts[: device_tokens // 12])
        for i in range(6)
    }
    free = [token for token in range(device_tokens) if token not in pairs.values()]
    for token in draw.sample(free, min(len(free), 40)):
        pairs.setdefault(draw.randrange(host_tokens), token)
    listed = [*pairs.items(), (-1, 0), (0, -1), (-1, -1)]
    draw.shuffle(listed)
    return listed


@pytest.mark.parametrize("gap", [0, 64])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[1])
@pytest.mark.parametrize("rows", ROWS)
def test_listed_tokens_move_and_no_other_byte_changes(
    runtime: CudaRuntime, rows: str, pair: tuple[str, str], gap: int
) -> None:
    """Loads and backups over the ends of registrations, of one layer and of all."""
    with token_rig(runtime, rows, pair, gap) as rig:
        pool = rig.controller.group.anchor
        copies = pool.token_copies()
        page_tokens = copies.host_tokens // pool.pages
        firsts = {page for own in pool.tables for page in own.host.first_pages.tolist()} - {0}
        cuts = [page * page_tokens for page in sorted(firsts)]
        pairs = drawn_pairs(copies.host_tokens, copies.device_tokens, cuts[::8] or cuts)
        stream = runtime.new_stream(0)
        for to_host, layer in ((False, None), (True, 1), (False, 2), (True, None)):
            (rig.poison_host if to_host else rig.poison_device)()
            torch.cuda.synchronize()
            before = rig.snapshot()
            (copies.backup if to_host else copies.load)(*sides(pairs), layer, stream)
            runtime.synchronize(stream)
            expected = rig.after_tokens(before, pairs, layer, to_host=to_host)
            assert differences(rig.snapshot(), expected) == []
            rig.fill_host()


def test_copies_follow_the_stream_that_they_are_given(runtime: CudaRuntime) -> None:
    """A slow writer on the same stream is waited for, and nobody else is."""
    with token_rig(runtime, "pages of 16", PAIRS[1], 0) as rig:
        copies = rig.controller.group.anchor.token_copies()
        layers = rig.device_rows["kv"]["b0"].tensors
        rig.poison_device()
        torch.cuda.synchronize()
        stream = runtime.new_stream(0)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000_000)
            for layer in layers:
                layer.fill_(7)
        copies.backup(*sides([(3, 5)]), None, stream)
        done = runtime.record(stream)
        assert not done.query()
        done.synchronize()
        rows = rig.host_bytes("kv", "b0").reshape(len(LAYERS), -1, 384)
        assert (rows[:, 3] == 7).all()


def test_padding_and_refusals_submit_nothing(copying: CudaRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call reaches the runtime, and indices on the device are for kernels, which there are none of."""
    with token_rig(copying, "compressed", PAIRS[0], 0) as rig:
        copies = rig.controller.group.anchor.token_copies()
        stream = copying.new_stream(0)
        calls: list[object] = []
        monkeypatch.setattr(copying, "batch_copies", lambda *given: calls.append(given))
        copies.load(*sides([(-1, 3), (3, -1)]), None, stream)
        with pytest.raises(IndexRangeError):
            copies.load(*sides([(1, 2), (copies.host_tokens, 3)]), None, stream)
        on_device = torch.arange(4, device="cuda")
        with pytest.raises(UnsupportedTokensError):
            copies.load_uploaded(on_device, on_device, None, stream)
        assert calls == []
