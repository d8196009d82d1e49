"""What copies of single tokens refuse: indices, layers, declarations and ways, before a byte moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from hicache_core.controller import ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.device_pool import DevicePool
from hicache_core.errors import (
    HiCacheError,
    IndexRangeError,
    IndexTypeError,
    PairingError,
    UnsupportedTokensError,
)
from hicache_core.pool import HostPool
from hicache_core.spec import BufferSpec, PoolSpec, RowUnit, Span, layout_named, platform_named
from hicache_core.spec.capability import default_capabilities
from hicache_core.testing.rigs import DeviceOptions, Rig
from hicache_core.testing.stand_ins import pool_spec
from hicache_core.transfer.tokens import TokenCopies


def token_rig(spec: PoolSpec, *, kernels: bool = True) -> Rig[SimRuntime]:
    """A rig of 8 host pages and 6 device pages, over a simulator with or without kernels."""
    config = ControllerConfig(io_backend="direct", layout="layer_first", host_pages=8)
    runtime = SimRuntime(evolve(platform_named("cpu-sim"), has_kernels=kernels))
    return Rig([spec], config, runtime, options=DeviceOptions(pages=6))


def copies_of(rig: Rig[SimRuntime]) -> TokenCopies:
    """The token copies of the rig's pool."""
    return rig.controller.group.anchor.token_copies()


def submissions(monkeypatch: pytest.MonkeyPatch, rig: Rig[SimRuntime]) -> list[Any]:
    """All that is queued from now on; nothing of it runs."""
    queued: list[Any] = []
    monkeypatch.setattr(rig.runtime.scheduler, "submit", lambda stream, operation: queued.append(operation))
    return queued


TOKEN_ROWS = pool_spec(64, 48, page_slots=16, layer_ids=(1, 4))
REFUSED: dict[str, tuple[Any, Any, Any, type[HiCacheError]]] = {
    "unequal lengths": (np.arange(3), np.arange(2), None, PairingError),
    "int32": (np.arange(2, dtype=np.int32), np.arange(2), None, IndexTypeError),
    "two axes": (np.arange(4).reshape(2, 2), np.arange(4), None, IndexTypeError),
    "a list": ([1, 2], np.arange(2), None, IndexTypeError),
    "past the host side": (np.array([1, 128]), np.arange(2), None, IndexRangeError),
    "past the device side": (np.arange(2), np.array([1, 96]), None, IndexRangeError),
    "one destination twice": (np.array([5, 6, 5]), np.array([7, 8, 7]), None, PairingError),
    "layer 2 of 2": (np.arange(2), np.arange(2), 2, IndexRangeError),
    "layer -1": (np.arange(2), np.arange(2), -1, IndexRangeError),
    "a layer by name": (np.arange(2), np.arange(2), "0", IndexRangeError),
}


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "copies"])
@pytest.mark.parametrize("what", ["load", "backup"])
@pytest.mark.parametrize("case", REFUSED)
def test_wrong_indices_are_refused_before_a_byte_moves(
    case: str, what: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By class; nothing has been submitted."""
    host, device, layer, error = REFUSED[case]
    with token_rig(TOKEN_ROWS, kernels=kernels) as rig:
        submitted = submissions(monkeypatch, rig)
        with pytest.raises(error) as caught:
            getattr(copies_of(rig), what)(host, device, layer, rig.runtime.new_stream(0))
        assert caught.value.code == error.code
        assert submitted == []


def _int64(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


UPLOADED: dict[str, tuple[Any, Any, Any, type[HiCacheError]]] = {
    "unequal lengths": (_int64(1, 2), _int64(1), None, PairingError),
    "int32": (_int64(1), _int64(1).int(), None, IndexTypeError),
    "two axes": (_int64(1, 2).view(1, 2), _int64(1), None, IndexTypeError),
    "not contiguous": (_int64(1, 2, 3, 4)[::2], _int64(1, 2), None, IndexTypeError),
    "numpy": (np.arange(2), _int64(1, 2), None, IndexTypeError),
    "layer 2 of 2": (_int64(1), _int64(1), 2, IndexRangeError),
}


@pytest.mark.parametrize("what", ["load_uploaded", "backup_uploaded"])
@pytest.mark.parametrize("case", UPLOADED)
def test_wrong_uploaded_indices_are_refused_by_their_shape(
    case: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can be seen without their values is; nothing has been submitted."""
    host, device, layer, error = UPLOADED[case]
    with token_rig(TOKEN_ROWS) as rig:
        submitted = submissions(monkeypatch, rig)
        with pytest.raises(error):
            getattr(copies_of(rig), what)(host, device, layer, rig.runtime.new_stream(0))
        assert submitted == []


@pytest.mark.parametrize("what", ["load_uploaded", "backup_uploaded"])
def test_uploaded_indices_need_kernels(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are made from CPU indices, and a hidden synchronisation is no remedy."""
    with token_rig(TOKEN_ROWS, kernels=False) as rig:
        submitted = submissions(monkeypatch, rig)
        with pytest.raises(UnsupportedTokensError) as caught:
            getattr(copies_of(rig), what)(_int64(1), _int64(1), None, rig.runtime.new_stream(0))
        assert (caught.value.code, caught.value.reason) == ("unsupported-tokens", "no-kernel")
        assert submitted == []


HALVES = [Span(offset=0, stride=24, nbytes=24)]
DECLARATIONS: dict[str, tuple[RowUnit, Sequence[BufferSpec]]] = {
    "no-spans": (
        RowUnit.PAGE,
        [BufferSpec(name="a", row_bytes=48, spans=HALVES, row_tokens=2), BufferSpec(name="b", row_bytes=48)],
    ),
    "not-per-layer": (
        RowUnit.TOKEN,
        [BufferSpec(name="a", row_bytes=48), BufferSpec(name="b", row_bytes=48, per_layer=False)],
    ),
    "unequal-row-tokens": (
        RowUnit.TOKEN,
        [BufferSpec(name="a", row_bytes=48, spans=HALVES, row_tokens=2), BufferSpec(name="b", row_bytes=48)],
    ),
    "not-applicable": (RowUnit.PAGE, []),
}


@pytest.mark.parametrize("reason", DECLARATIONS)
def test_a_pool_whose_tokens_are_not_declared_is_refused_at_construction(reason: str) -> None:
    """One buffer is enough; the capability says the same."""
    unit, buffers = DECLARATIONS[reason]
    spec = evolve(pool_spec(page_slots=4, unit=unit), buffers=buffers)
    can = default_capabilities(spec, platform_named("cpu-sim")).token_granular
    assert not can
    assert reason in (can.code, can.verdict.value)
    with token_rig(spec) as rig, pytest.raises(UnsupportedTokensError) as caught:
        copies_of(rig)
    assert (caught.value.code, caught.value.reason) == ("unsupported-tokens", reason)
    assert "kv" in caught.value.who


def test_a_pool_without_tables_is_refused() -> None:
    """One that no controller has taken yet."""
    runtime = SimRuntime()
    layers = [runtime.allocate(8 * 48, 0).view(8, 48) for _ in range(3)]
    device_pool = DevicePool(spec=pool_spec(48), layers={"b0": layers})
    pool = HostPool(device_pool, layout_named("page_first"), 4, runtime)
    with pytest.raises(UnsupportedTokensError) as caught:
        pool.token_copies()
    assert caught.value.reason == "no-tables"
    pool.destroy()


def test_rows_without_spans_hold_one_token_whatever_is_said_of_them() -> None:
    """Tokens of a row count where spans name them."""
    spec = evolve(pool_spec(48), buffers=[BufferSpec(name="b0", row_bytes=48, row_tokens=4)])
    assert spec.row_tokens(spec.buffers[0]) == 1
    with token_rig(spec) as rig:
        assert copies_of(rig).host_tokens == 8 * 4
