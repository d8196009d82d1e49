"""The layer-by-layer door: converts once for a load, follows changes in place, moves one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from hicache_core.device.sim import SimRuntime
from hicache_core.device.sim.faults import Faults
from hicache_core.errors import (
    HiCacheError,
    IndexRangeError,
    IndexTypeError,
    PageContractError,
    PairingError,
    TransferError,
    UnknownNameError,
)
from hicache_core.pool import HostPool
from hicache_core.spec import BufferSpec, layout_named
from hicache_core.testing.oracle import PagePair
from hicache_core.testing.rigs import Rig, Snapshot, differences
from hicache_core.testing.stand_ins import pool_spec

MakeRig = Callable[..., Rig[SimRuntime]]
LAYERS = 4
CHANGED_AT = 2
FIRST: list[PagePair] = [(5, 3), (0, 9), (7, 1)]
LATER: list[PagePair] = [(2, 8), (6, 0), (1, 11)]
WAYS = [
    ("cuda", ("kernel", "page_first")),
    ("cuda", ("kernel", "layer_first")),
    ("rocm-mi355x", ("kernel", "page_first")),
    ("cuda", ("direct", "layer_first")),
    ("cuda", ("direct", "page_first_direct")),
]


def _loaded(make_rig: MakeRig, *, platform: str = "cpu-sim", **options: Any) -> Rig[SimRuntime]:
    """Four layers of two buffers, all host pages allocated and filled."""
    specs = [pool_spec(48, 32, layer_ids=(1, 2, 4, 7))]
    rig = make_rig(*specs, platform=platform, seed=11, **options)
    rig.allocate(8)
    rig.fill_host()
    return rig


def _pool(rig: Rig[SimRuntime]) -> HostPool:
    return rig.controller.group.anchor


def _slots(rig: Rig[SimRuntime], pairs: Sequence[PagePair]) -> tuple[np.ndarray, np.ndarray]:
    return rig.slots(host for host, _ in pairs), rig.slots(device for _, device in pairs)


def _expected(rig: Rig[SimRuntime], before: Snapshot, moved: Sequence[Sequence[PagePair]]) -> Snapshot:
    """The oracle's bytes, where layer i moved the pairs ``moved[i]``."""
    after = {key: taken.copy() for key, taken in before.items()}
    for layer, pairs in enumerate(moved):
        whole = rig.after_load(before, pairs)
        for key, rows in after.items():
            if key[0] == "device" and layer < len(rows):
                rows[layer] = whole[key][layer]
    return after


def _in_inference(array: np.ndarray) -> torch.Tensor:
    with torch.inference_mode():
        return torch.tensor(array)


def _shared(array: np.ndarray) -> torch.Tensor:
    tensor = torch.tensor(array)
    tensor.share_memory_()
    return tensor


def _assign(indices: Any, values: np.ndarray) -> None:
    indices[:] = values if isinstance(indices, np.ndarray) else torch.tensor(values)


def _assign_in_inference(indices: torch.Tensor, values: np.ndarray) -> None:
    with torch.inference_mode():
        indices.copy_(torch.tensor(values))


def _assign_by_numpy(indices: torch.Tensor, values: np.ndarray) -> None:
    indices.numpy()[:] = values


def _move_elsewhere(indices: torch.Tensor, values: np.ndarray) -> None:
    indices.data = torch.tensor(values)


Make = Callable[[np.ndarray], Any]
Assign = Callable[[Any, np.ndarray], None]
CHANGES: dict[str, tuple[Make, Assign]] = {
    "tensor": (torch.tensor, _assign),
    "tensor, within inference mode": (torch.tensor, _assign_in_inference),
    "tensor, to other memory": (torch.tensor, _move_elsewhere),
    "inference-mode tensor": (_in_inference, _assign_in_inference),
    "numpy array": (np.copy, _assign),
    "tensor of numpy memory": (lambda array: torch.from_numpy(array.copy()), _assign_by_numpy),
    "tensor that numpy sees later": (torch.tensor, _assign_by_numpy),
    "tensor in shared memory": (_shared, _assign_by_numpy),
}


@pytest.mark.parametrize(("platform", "pair"), WAYS)
def test_layers_move_one_by_one(make_rig: MakeRig, platform: str, pair: tuple[str, str]) -> None:
    """After each layer its rows are there, those of later layers are not, and no other byte has changed."""
    rig = _loaded(make_rig, platform=platform, pair=pair)
    stream = rig.runtime.new_stream(0)
    before = rig.snapshot()
    for layer in range(LAYERS):
        _pool(rig).load_layer(*_slots(rig, FIRST), layer, stream)
        rig.runtime.synchronize(stream)
        assert differences(rig.snapshot(), _expected(rig, before, [FIRST] * (layer + 1))) == []


@pytest.mark.parametrize(("platform", "pair"), WAYS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("sides", ["host", "device", "both"])
def test_a_change_in_place_moves_the_new_rows_from_the_next_layer_on(
    make_rig: MakeRig, platform: str, pair: tuple[str, str], change: str, sides: str
) -> None:
    """I25: layers 0 and 1 move the old rows, 2 and 3 the new ones, even where nothing has run yet."""
    make, assign = CHANGES[change]
    rig = _loaded(make_rig, platform=platform, pair=pair)
    stream = rig.runtime.new_stream(0)
    host, device = map(make, _slots(rig, FIRST))
    new_host, new_device = _slots(rig, LATER)
    later = [
        (new[0] if sides != "device" else old[0], new[1] if sides != "host" else old[1])
        for old, new in zip(FIRST, LATER, strict=True)
    ]
    before = rig.snapshot()
    for layer in range(LAYERS):
        if layer == CHANGED_AT and sides != "device":
            assign(host, new_host)
        if layer == CHANGED_AT and sides != "host":
            assign(device, new_device)
        _pool(rig).load_layer(host, device, layer, stream)
    rig.runtime.synchronize(stream)
    moved = [FIRST] * CHANGED_AT + [later] * (LAYERS - CHANGED_AT)
    assert differences(rig.snapshot(), _expected(rig, before, moved)) == []


def _conversions(rig: Rig[SimRuntime], host: Any, device: Any) -> list[int]:
    """The count after each layer of a load."""
    stream = rig.runtime.new_stream(0)
    counts = []
    for layer in range(LAYERS):
        _pool(rig).load_layer(host, device, layer, stream)
        counts.append(_pool(rig).load_indices.conversions)
    rig.runtime.synchronize(stream)
    return counts


def test_a_load_converts_once_for_all_layers(make_rig: MakeRig) -> None:
    """Also with another load's tensors after it, and with those of the first again, which are not kept."""
    rig = _loaded(make_rig)
    first, later = ([torch.tensor(a) for a in _slots(rig, pairs)] for pairs in (FIRST, LATER))
    assert _conversions(rig, *first) == [1, 1, 1, 1]
    assert _conversions(rig, *first) == [1, 1, 1, 1]
    assert _conversions(rig, *later) == [2, 2, 2, 2]
    assert _conversions(rig, *first) == [3, 3, 3, 3]


@pytest.mark.parametrize("make", [_in_inference, np.copy, torch.from_numpy, _shared])
@pytest.mark.parametrize("side", [0, 1])
def test_indices_that_may_change_unseen_are_converted_each_time(
    make_rig: MakeRig, make: Make, side: int
) -> None:
    """One such side is enough."""
    rig = _loaded(make_rig)
    slots: list[Any] = [torch.tensor(array) for array in _slots(rig, FIRST)]
    slots[side] = make(_slots(rig, FIRST)[side])
    assert _conversions(rig, *slots) == [1, 2, 3, 4]


@pytest.mark.parametrize("side", [0, 1])
def test_an_equal_tensor_at_another_address_is_converted_again(make_rig: MakeRig, side: int) -> None:
    """Identity counts, not content: a new object, and an object that was given other memory."""
    rig = _loaded(make_rig)
    slots = [torch.tensor(array) for array in _slots(rig, FIRST)]
    assert _conversions(rig, *slots)[-1] == 1
    slots[side] = slots[side].clone()
    assert _conversions(rig, *slots)[-1] == 2
    slots[side].data = slots[side].clone()
    assert _conversions(rig, *slots)[-1] == 3


def test_a_new_tensor_is_never_taken_for_one_that_is_gone(make_rig: MakeRig) -> None:
    """One address, one version, and identities that come again: each load gets its own pages all the same."""
    rig = _loaded(make_rig)
    stream = rig.runtime.new_stream(0)
    memory, device = torch.tensor(rig.slots([0])), torch.tensor(rig.slots([3]))
    identities: set[int] = set()
    number = 0
    # An identity comes again when the allocator likes; without that this proves nothing.
    while (len(identities) == number and number < 20_000) or number < 64:
        memory.data[:] = torch.tensor(rig.slots([number % 8]))
        host = memory.data
        identities.add(id(host))
        assert (host.data_ptr(), host._version) == (memory.data_ptr(), 0)
        pairs = _pool(rig).load_indices.pairs(host, device, stream)
        assert (pairs.host_pages.tolist(), pairs.device_pages.tolist()) == ([number % 8], [3])
        del host
        number += 1
    if len(identities) == number:
        pytest.skip("this interpreter gave no identity twice")


@pytest.mark.parametrize("make", [torch.tensor, _in_inference, np.copy])
def test_indices_of_the_caller_are_not_changed(make_rig: MakeRig, make: Make) -> None:
    """I25: equal, unsorted, of the same version, and a tensor may still be resized."""
    rig = _loaded(make_rig)
    kept = _slots(rig, FIRST)
    slots = [make(array) for array in kept]
    _conversions(rig, *slots)
    for indices, before in zip(slots, kept, strict=True):
        assert indices.tolist() == before.tolist()
        if isinstance(indices, torch.Tensor):
            assert indices.is_inference() or indices._version == 0
            assert indices.untyped_storage().resizable()


def test_layers_on_two_streams_share_a_conversion(make_rig: MakeRig) -> None:
    """The second stream does not wait for what was uploaded on the first, which has not run."""
    rig = _loaded(make_rig, platform="cuda", faults=Faults(slow_streams={3}))
    slow, fast = rig.runtime.new_stream(0), rig.runtime.new_stream(0)
    assert rig.runtime.scheduler.streams[3] is slow
    host, device = (torch.tensor(array) for array in _slots(rig, FIRST))
    before = rig.snapshot()
    _pool(rig).load_layer(host, device, 0, slow)
    _pool(rig).load_layer(host, device, 1, fast)
    rig.runtime.synchronize(fast)
    assert _pool(rig).load_indices.conversions == 1
    assert differences(rig.snapshot(), _expected(rig, before, [[], FIRST])) == []
    rig.runtime.synchronize(slow)
    assert differences(rig.snapshot(), _expected(rig, before, [FIRST, FIRST])) == []


def test_rows_that_are_no_layers_go_with_the_first(make_rig: MakeRig) -> None:
    """A buffer without a layer axis moves once in a load."""
    spec = pool_spec(48, layer_ids=range(LAYERS))
    flat = BufferSpec(name="flat", row_bytes=32, per_layer=False)
    rig = make_rig(evolve(spec, buffers=[*spec.buffers, flat]))
    rig.allocate(8)
    rig.fill_host()
    stream = rig.runtime.new_stream(0)
    before = rig.snapshot()
    for layer in range(LAYERS):
        _pool(rig).load_layer(*_slots(rig, FIRST if layer == 0 else LATER), layer, stream)
    rig.runtime.synchronize(stream)
    assert differences(rig.snapshot(), _expected(rig, before, [FIRST, LATER, LATER, LATER])) == []


@pytest.mark.parametrize("layer", [-1, LAYERS, 7, 1.0, "0", None])
def test_a_layer_that_the_pool_does_not_have_is_refused(make_rig: MakeRig, layer: Any) -> None:
    """The pool's own layers are numbered; the model's layer 7 is its fourth."""
    rig = _loaded(make_rig)
    with pytest.raises(UnknownNameError) as caught:
        _pool(rig).load_layer(*_slots(rig, FIRST), layer, rig.runtime.new_stream(0))
    assert caught.value.code == "unknown-name"
    assert repr(layer) in caught.value.got
    assert "0 to 3" in caught.value.expected
    assert _pool(rig).load_indices.conversions == 0


def test_a_pool_that_is_not_bound_is_refused(make_rig: MakeRig) -> None:
    """Before a controller has bound it, and after its memory is gone."""
    rig = _loaded(make_rig)
    bound = _pool(rig)
    pool = HostPool(bound.device_pool, layout_named("page_first"), 8, rig.runtime)
    stream = rig.runtime.new_stream(0)
    rig.controller.close()
    for one in (pool, bound):
        with pytest.raises(TransferError) as caught:
            one.load_layer(*_slots(rig, FIRST), 0, stream)
        assert caught.value.code == "transfer"
    pool.destroy()


def test_a_pool_without_bytes_has_no_layer_to_load(make_rig: MakeRig) -> None:
    """I45: a logical anchor says so."""
    rig = make_rig(pool_spec(layer_ids=(), pool="names"), pool_spec(48, anchor=False))
    with pytest.raises(UnknownNameError) as caught:
        rig.controller.group.anchor.load_layer(rig.slots([]), rig.slots([]), 0, rig.runtime.new_stream(0))
    assert caught.value.expected == "no layer"


P = 4
WRONG: dict[str, tuple[Any, type[HiCacheError]]] = {
    "int32": (np.arange(P, dtype=np.int32), IndexTypeError),
    "list": (list(range(P)), IndexTypeError),
    "meta tensor": (torch.zeros(P, dtype=torch.int64, device="meta"), IndexTypeError),
    "misaligned": (np.arange(1, 1 + P), PageContractError),
    "past the end": (np.arange(12 * P, 13 * P), IndexRangeError),
    "one page more": (np.arange(2 * P), PairingError),
}


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_indices_are_refused(make_rig: MakeRig, side: int, wrong: str) -> None:
    """I23, I24: either side; nothing moves, and the pool is named."""
    indices, error = WRONG[wrong]
    rig = _loaded(make_rig)
    stream = rig.runtime.new_stream(0)
    host, device = (indices, rig.slots([2])) if side == 0 else (rig.slots([1]), indices)
    before = rig.snapshot()
    with pytest.raises(error) as caught:
        _pool(rig).load_layer(host, device, 0, stream)
    assert type(caught.value) is error
    assert "kv" in caught.value.who
    rig.runtime.synchronize(stream)
    assert differences(rig.snapshot(), before) == []


def test_a_device_page_twice_is_refused(make_rig: MakeRig) -> None:
    """I26: two host pages for one device page have no order; one host page twice is right."""
    rig = _loaded(make_rig)
    stream = rig.runtime.new_stream(0)
    with pytest.raises(PairingError):
        _pool(rig).load_layer(rig.slots([1, 2]), rig.slots([3, 3]), 0, stream)
    before = rig.snapshot()
    _pool(rig).load_layer(rig.slots([1, 1]), rig.slots([3, 4]), 0, stream)
    rig.runtime.synchronize(stream)
    assert differences(rig.snapshot(), _expected(rig, before, [[(1, 3), (1, 4)]])) == []


@pytest.mark.parametrize("empty", [np.empty(0, np.int64), torch.empty(0, dtype=torch.int64)])
def test_no_slots_submit_nothing(make_rig: MakeRig, empty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """I24: no copy, no launch, no upload."""
    rig = _loaded(make_rig)
    submitted: list[Any] = []
    monkeypatch.setattr(rig.runtime.scheduler, "submit", lambda *given: submitted.append(given))
    _pool(rig).load_layer(empty, empty, 0, rig.runtime.new_stream(0))
    assert submitted == []
