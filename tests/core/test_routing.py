"""Host indices in one group: on the CPU for what the host issues, on the device for what a kernel moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from attrs import field, frozen

from hicache_core.compat import PoolPlan
from hicache_core.controller import ControllerConfig
from hicache_core.device.base import BatchCopies, GatherUnits, Int64Array, MoveRows, StridedCopies
from hicache_core.device.sim import SimRuntime
from hicache_core.spec import (
    Capabilities,
    IndexPlace,
    Platform,
    PoolSpec,
    default_capabilities,
    platform_named,
    unsupported,
)
from hicache_core.testing.rigs import Rig, differences
from hicache_core.testing.stand_ins import pool_spec, registry_of

HOST, DEVICE = [5, 0, 7, 2], [3, 9, 1, 10]
"""Pages out of order, the two lists without a page in common."""
PAIRS = list(zip(HOST, DEVICE, strict=True))
STAGED, PLAIN = "staged", "plain"
ROW_BYTES = 48
SHAPES = [
    ("kernel", "page_first"),
    ("kernel", "layer_first"),
    ("direct", "layer_first"),
    ("direct", "page_first_direct"),
]


@frozen(kw_only=True)
class Seen:
    """What reached the runtime and its kernels since the last look.

    Args:
        uploads: the tensors of the device that were made, with what they were made of.
        moves, gathers: the launches.
        copies: the copies that the host issued.
    """

    uploads: list[tuple[torch.Tensor, Int64Array]] = field(factory=list)
    moves: list[MoveRows] = field(factory=list)
    gathers: list[GatherUnits] = field(factory=list)
    copies: list[BatchCopies | StridedCopies] = field(factory=list)

    def uploaded(self, tensor: torch.Tensor) -> list[int]:
        """What a tensor of the device was made of; a tensor that was never uploaded is an error."""
        (values,) = (values for made, values in self.uploads if made is tensor)
        return [int(value) for value in values]


class RecordingRuntime(SimRuntime):
    """A simulator that keeps what it is asked for."""

    seen: Seen

    def watch(self) -> Seen:
        """Keep what comes from now on."""
        self.seen = Seen()
        kernels = self.kernels
        assert kernels is not None
        wrapped: Any = kernels
        for name, kept in (("move_rows", self.seen.moves), ("gather_units", self.seen.gathers)):
            setattr(wrapped, name, _kept(getattr(type(kernels), name).__get__(kernels), kept))
        return self.seen

    def upload(self, values: Int64Array, device: int, stream: Any) -> torch.Tensor:
        """As the simulator does, and kept."""
        made = super().upload(values, device, stream)
        self.seen.uploads.append((made, values.copy()))
        return made

    def batch_copies(self, copies: BatchCopies, stream: Any) -> None:
        """As the simulator does, and kept."""
        self.seen.copies.append(copies)
        super().batch_copies(copies, stream)

    def strided_copies(self, copies: StridedCopies, stream: Any) -> None:
        """As the simulator does, and kept."""
        self.seen.copies.append(copies)
        super().strided_copies(copies, stream)


def _kept(call: Callable[..., None], kept: list[Any]) -> Callable[..., None]:
    def record(launch: Any, stream: Any) -> None:
        kept.append(launch)
        call(launch, stream)

    return record


def _declare(spec: PoolSpec, platform: Platform) -> Capabilities:
    """Staged write-back for every pool but the plain one."""
    default = default_capabilities(spec, platform)
    if spec.pool != PLAIN:
        return default
    return default.amended({"staged_write_back": unsupported("for-tests", "not this pool", "none")})


MakeRouted = Callable[..., Rig[RecordingRuntime]]


@pytest.fixture
def make_routed() -> Iterator[MakeRouted]:
    """Makes rigs on the cuda profile whose pools ``plain`` have no staged write-back, and closes them."""
    made: list[Rig[RecordingRuntime]] = []

    def make(*pools: str, pair: tuple[str, str] = SHAPES[0]) -> Rig[RecordingRuntime]:
        specs = [
            pool_spec(ROW_BYTES, pool=name, anchor=number == 0, layer_ids=(0, 1, 2 + number))
            for number, name in enumerate(pools)
        ]
        config = ControllerConfig(
            io_backend=pair[0], layout=pair[1], host_pages=8, ring_bytes=4096, probe=False
        )
        registry = registry_of(specs, hicache_declare_capabilities=_declare)
        rig = Rig(specs, config, RecordingRuntime(platform_named("cpu-sim"), seed=5), registry=registry)
        rig.allocate(8)
        rig.poison_host()
        made.append(rig)
        return rig

    yield make
    for rig in made:
        rig.controller.close()


def _host_span(rig: Rig[RecordingRuntime], pool: str) -> tuple[int, int]:
    view = rig.host_bytes(pool, "b0")
    return view.ctypes.data, view.ctypes.data + view.size


def _move(rig: Rig[RecordingRuntime], move: str, host: Any, device: Any) -> Seen:
    """One transfer, its bytes held against the oracle; what it asked of the runtime."""
    before = rig.snapshot()
    seen = rig.runtime.watch()
    getattr(rig.controller, move)(host, device).wait()
    assert differences(rig.snapshot(), getattr(rig, f"after_{move}")(before, PAIRS)) == []
    return seen


def _bases(rig: Rig[RecordingRuntime], pool: str) -> Any:
    """The kernel's table of a pool's host rows."""
    (owner,) = (p for p in rig.controller.group.pools if p.spec.pool == pool)
    return owner.tables[0].host_kernel


@pytest.mark.parametrize("pools", [(STAGED, PLAIN), (PLAIN, STAGED)], ids="-".join)
def test_one_backup_routes_host_indices_pool_by_pool(make_routed: MakeRouted, pools: tuple[str, str]) -> None:
    """I25, I44: the plain pool's kernel reads uploaded host pages, the other's copies are numbers."""
    rig = make_routed(*pools)
    plans = rig.controller.plan.pools
    assert {name: (plan.staged, plan.backup_host_indices) for name, plan in plans.items()} == {
        STAGED: (True, IndexPlace.CPU),
        PLAIN: (False, IndexPlace.DEVICE),
    }
    seen = _move(rig, "backup", rig.slots(HOST), rig.slots(DEVICE))
    (launch,) = seen.moves
    assert launch.target is _bases(rig, PLAIN)
    assert seen.uploaded(launch.target_pages) == sorted(HOST)
    assert seen.uploaded(launch.source_pages) == [page for _, page in sorted(PAIRS)]
    assert all(seen.uploaded(gather.pages) == [page for _, page in sorted(PAIRS)] for gather in seen.gathers)
    first, stop = _host_span(rig, STAGED)
    assert seen.copies
    for copies in seen.copies:
        assert isinstance(copies.targets, np.ndarray)
        assert copies.targets.dtype == np.int64
        assert all(first <= address < stop for address in copies.targets.tolist())
    assert len(seen.uploads) == 2


def test_host_indices_of_staged_pools_never_reach_the_device(make_routed: MakeRouted) -> None:
    """A group of staged pools alone uploads device pages, once, and nothing else."""
    rig = make_routed(STAGED, "also_staged")
    seen = _move(rig, "backup", rig.slots(HOST), rig.slots(DEVICE))
    assert [values.tolist() for _, values in seen.uploads] == [[page for _, page in sorted(PAIRS)]]
    assert seen.moves == []


@pytest.mark.parametrize("move", ["backup", "load"])
@pytest.mark.parametrize("pair", SHAPES, ids=" + ".join)
@pytest.mark.parametrize("pool", [STAGED, PLAIN])
def test_host_indices_are_where_the_plan_says(
    make_routed: MakeRouted, move: str, pair: tuple[str, str], pool: str
) -> None:
    """I44: each pool alone, each served pair, each direction: what solve says is what happens."""
    rig = make_routed(pool, pair=pair)
    plan: PoolPlan = rig.controller.plan.pools[pool]
    seen = _move(rig, move, rig.slots(HOST), rig.slots(DEVICE))
    uploaded = [values.tolist() for _, values in seen.uploads]
    place = getattr(plan, f"{move}_host_indices")
    assert (sorted(HOST) in uploaded) is (place is IndexPlace.DEVICE)
    assert bool(seen.moves) is (place is IndexPlace.DEVICE)
    assert bool(seen.copies) is (place is IndexPlace.CPU)
    if pair[0] == "direct":
        assert uploaded == []


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("move", ["backup", "load"])
def test_indices_of_the_caller_are_not_changed(make_routed: MakeRouted, kind: str, move: str) -> None:
    """I25: equal before and after, in the order that the caller gave; nothing was written to them."""
    rig = make_routed(STAGED, PLAIN)
    host, device = rig.slots(HOST), rig.slots(DEVICE)
    kept = host.copy(), device.copy()
    if kind == "numpy":
        for array in (host, device):
            array.setflags(write=False)
        _move(rig, move, host, device)
    else:
        tensors = torch.tensor(host), torch.tensor(device)
        versions = [tensor._version for tensor in tensors]
        _move(rig, move, *tensors)
        host, device = (tensor.numpy() for tensor in tensors)
        assert [tensor._version for tensor in tensors] == versions
    assert np.array_equal(host, kept[0])
    assert np.array_equal(device, kept[1])
