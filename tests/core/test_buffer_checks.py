"""Device buffers are held against the declaration before anything is allocated or registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from hicache_core.compat import Violation
from hicache_core.controller import Controller, ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.device_pool import DevicePool
from hicache_core.errors import AddressError, BufferMismatchError, HiCacheError, IncompatibleError
from hicache_core.spec import IndexSpace, PoolSpec, RowUnit
from hicache_core.testing.stand_ins import pool_spec, registry_of

Make = Callable[[int, int], torch.Tensor]
ROWS = 16
K, V = 48, 32
CONFIG = ControllerConfig(io_backend="kernel", layout="page_first", host_pages=4)


@pytest.fixture
def runtime() -> Iterator[SimRuntime]:
    """A simulator on which nothing stays registered."""
    made = SimRuntime(devices=2)
    yield made
    assert not made.memory.registrations
    assert not made.memory.host_space.regions


def _rows(runtime: SimRuntime, row_bytes: int, rows: int = ROWS, device: int = 0) -> torch.Tensor:
    return runtime.allocate(rows * row_bytes, device).view(rows, row_bytes)


def _pool(runtime: SimRuntime, spec: PoolSpec, **changes: list[torch.Tensor]) -> DevicePool:
    """A pool as declared, with the layers of some buffers replaced."""
    layers = {b.name: [_rows(runtime, b.row_bytes) for _ in spec.layer_ids] for b in spec.buffers}
    return DevicePool(spec=spec, layers={**layers, **changes})


def _open(runtime: SimRuntime, *pools: DevicePool) -> Controller:
    return Controller(CONFIG, pools, runtime, registry_of([pool.spec for pool in pools]))


def _refused(
    runtime: SimRuntime, pool: DevicePool, error: type[HiCacheError] = BufferMismatchError
) -> HiCacheError:
    """Refused as the second pool of a group whose first is right; nothing stays registered."""
    first = _pool(runtime, pool_spec(16, pool="first"))
    second = DevicePool(
        spec=pool_spec(
            *(b.row_bytes for b in pool.spec.buffers), pool="kv", anchor=False, unit=pool.spec.row_unit
        ),
        layers=pool.layers,
    )
    with pytest.raises(error) as caught:
        _open(runtime, first, second)
    assert not runtime.memory.registrations
    return caught.value


def _violations(runtime: SimRuntime, pool: DevicePool) -> list[Violation]:
    error = _refused(runtime, pool, IncompatibleError)
    assert isinstance(error, IncompatibleError)
    return [violation for violation in error.violations if isinstance(violation, Violation)]


def _accepted(runtime: SimRuntime, pool: DevicePool) -> None:
    _open(runtime, pool).close()


def test_rows_as_declared_are_accepted(runtime: SimRuntime) -> None:
    """The tests below refuse for their own reason."""
    _accepted(runtime, _pool(runtime, pool_spec(K, V)))


@pytest.mark.parametrize("row_bytes", [K - 16, K + 16, 2 * K, 1, V])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_device_row_that_differs_from_the_declared_one_is_refused(
    runtime: SimRuntime, layer: int, row_bytes: int
) -> None:
    """I13, R5: shorter or longer, in whichever layer; pool, buffer and both figures are named."""
    pool = _pool(runtime, pool_spec(K, V))
    layers = list(pool.layers["b0"])
    layers[layer] = _rows(runtime, row_bytes)
    (violation,) = _violations(runtime, _pool(runtime, pool.spec, b0=layers))
    assert (violation.id, violation.pool) == ("R5-row-bytes", "kv")
    assert "'b0'" in violation.got
    assert f" {row_bytes} bytes" in violation.got
    assert str(K) in violation.expected


def test_keys_and_values_in_each_others_place_are_refused(runtime: SimRuntime) -> None:
    """I14: row bytes are each buffer's own, so a swap is seen although the sum is right."""
    pool = _pool(runtime, pool_spec(K, V))
    swapped = _pool(runtime, pool.spec, b0=list(pool.layers["b1"]), b1=list(pool.layers["b0"]))
    assert [violation.id for violation in _violations(runtime, swapped)] == ["R5-row-bytes", "R5-row-bytes"]


def test_row_bytes_are_counted_in_bytes_not_elements(runtime: SimRuntime) -> None:
    """I13, I20: 48 elements of two bytes are no row of 48 bytes; 24 of them are."""
    spec = pool_spec(K)
    wide = [_rows(runtime, 2 * K).view(torch.bfloat16) for _ in range(3)]
    _violations(runtime, DevicePool(spec=spec, layers={"b0": wide}))
    right = [_rows(runtime, K).view(torch.bfloat16) for _ in range(3)]
    _accepted(runtime, DevicePool(spec=spec, layers={"b0": right}))


def test_a_row_may_have_several_dimensions(runtime: SimRuntime) -> None:
    """I17: heads and elements are one run of bytes."""
    layers = [_rows(runtime, K).view(ROWS, 3, 16) for _ in range(3)]
    _accepted(runtime, DevicePool(spec=pool_spec(K), layers={"b0": layers}))


@pytest.mark.parametrize("count", [0, 2, 4])
def test_wrong_count_of_layers_is_refused(runtime: SimRuntime, count: int) -> None:
    """I15: a layer that is missing or too many, both figures named."""
    error = _refused(runtime, _pool(runtime, pool_spec(K), b0=[_rows(runtime, K) for _ in range(count)]))
    assert error.code == "buffer-mismatch"
    assert str(count) in error.got
    assert "3" in error.expected


def test_a_missing_buffer_is_refused(runtime: SimRuntime) -> None:
    """I15: everything that is declared has rows."""
    pool = _pool(runtime, pool_spec(K, V))
    _refused(runtime, DevicePool(spec=pool.spec, layers={"b0": pool.layers["b0"]}))


def test_a_buffer_that_no_declaration_covers_is_refused(runtime: SimRuntime) -> None:
    """I15: everything that has rows is declared, or it would silently stay behind."""
    extra = [_rows(runtime, 16) for _ in range(3)]
    error = _refused(runtime, _pool(runtime, pool_spec(K), scales=extra))
    assert "scales" in error.got


def test_rows_that_are_not_contiguous_are_refused(runtime: SimRuntime) -> None:
    """I17: columns, or dimensions in another order, are no run of bytes, though the shape is right."""
    transposed = [_rows(runtime, ROWS, K).t() for _ in range(3)]
    assert transposed[0].shape == (ROWS, K)
    _refused(runtime, _pool(runtime, pool_spec(K), b0=transposed))
    permuted = [_rows(runtime, K).view(ROWS, 3, 16).transpose(1, 2) for _ in range(3)]
    _refused(runtime, _pool(runtime, pool_spec(K), b0=permuted))


@pytest.mark.parametrize("stride", [0, 16, K - 1])
def test_rows_that_overlap_are_refused(runtime: SimRuntime, stride: int) -> None:
    """I17: a stride smaller than the row, or none at all, would make rows write each other."""
    layers = [torch.as_strided(_rows(runtime, K), (8, K), (stride, 1)) for _ in range(3)]
    error = _refused(runtime, _pool(runtime, pool_spec(K), b0=layers))
    assert str(stride) in error.got


def test_layers_with_strides_of_their_own_are_refused(runtime: SimRuntime) -> None:
    """I17: one stride serves a buffer; a layer that differs is not addressed by another's."""
    wide = _rows(runtime, 2 * K)[:, :K]
    _refused(runtime, _pool(runtime, pool_spec(K), b0=[_rows(runtime, K), wide, _rows(runtime, K)]))


@pytest.mark.parametrize("shape", [(), (ROWS * K,)])
def test_a_tensor_without_rows_is_refused(runtime: SimRuntime, shape: tuple[int, ...]) -> None:
    """I13, I18: no dimension, or one: where a row ends is never guessed."""
    flat = runtime.allocate(ROWS * K, 0)
    layers = [flat[0] if not shape else flat for _ in range(3)]
    _refused(runtime, _pool(runtime, pool_spec(K), b0=layers))


def test_a_tensor_of_another_device_is_refused(runtime: SimRuntime) -> None:
    """I30: rows of device 1, or of the host, for a controller of device 0; nothing stays registered."""
    for stray in (_rows(runtime, K, device=1), torch.zeros((ROWS, K), dtype=torch.uint8)):
        pool = _pool(runtime, pool_spec(K))
        _refused(runtime, _pool(runtime, pool.spec, b0=[*pool.layers["b0"][:2], stray]), AddressError)


def test_a_layer_of_no_rows_is_left_out_by_its_owner(runtime: SimRuntime) -> None:
    """I16: a layer that owns nothing is not listed; listed with no rows, it is refused early."""
    pool = _pool(runtime, pool_spec(K))
    empty = _rows(runtime, K)[:0]
    _refused(runtime, _pool(runtime, pool.spec, b0=[*pool.layers["b0"][:2], empty]), BufferMismatchError)


def test_the_shortest_layer_gives_the_pages(runtime: SimRuntime) -> None:
    """I15: a page exists where every buffer of every layer has all its rows."""
    spec = pool_spec(K, V)
    short = [_rows(runtime, V, rows) for rows in (16, 11, 16)]
    controller = _open(runtime, _pool(runtime, spec, b1=short))
    assert controller.device_pages["full"] == 11 // 4
    controller.close()


def test_slot_rows_have_pages_of_one_slot(runtime: SimRuntime) -> None:
    """I17: every row of a slot pool is a page."""
    spec = pool_spec(K, page_slots=1, unit=RowUnit.SLOT)
    controller = _open(runtime, _pool(runtime, spec))
    assert controller.group.anchor.spec.index_space == IndexSpace(name="full", page_slots=1)
    assert controller.device_pages["full"] == ROWS
    controller.close()


def test_layers_that_share_bytes_are_refused(runtime: SimRuntime) -> None:
    """Whole or in part, in one buffer or between two: what one load wrote another would lose."""
    spec = pool_spec(K, K, layer_ids=(0, 1))
    memory = _rows(runtime, K, 2 * ROWS)
    once = memory[:ROWS]
    _refused(runtime, _pool(runtime, spec, b0=[once, once]))
    _refused(runtime, _pool(runtime, spec, b0=[once, memory[2 : 2 + ROWS]]))
    _refused(runtime, _pool(runtime, spec, b0=[once, memory[ROWS:]], b1=[memory[:ROWS], _rows(runtime, K)]))


def test_layers_that_interleave_are_accepted(runtime: SimRuntime) -> None:
    """Keys and values row by row in one tensor, each in bytes of its own."""
    spec = pool_spec(K, V, layer_ids=(0, 1))
    memory = [_rows(runtime, K + V) for _ in range(2)]
    _accepted(
        runtime, _pool(runtime, spec, b0=[m[:, :K] for m in memory], b1=[m[:, K:] for m in memory])
    )
    one_off = [m[:, K - 1 : K - 1 + V] for m in memory]
    _refused(runtime, _pool(runtime, spec, b0=[m[:, :K] for m in memory], b1=one_off))
