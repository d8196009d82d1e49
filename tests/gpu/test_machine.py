"""What the machine of a CUDA device is, asked of the device itself."""

from __future__ import annotations

from hicache_core.controller import ControllerConfig
from hicache_core.device.cuda import CudaRuntime
from hicache_core.device.probe import probed
from hicache_core.memory.ledger import Ledger
from hicache_core.memory.options import MemoryOptions
from hicache_core.spec import PLATFORMS, Platform
from hicache_core.testing.rigs import Rig
from hicache_core.testing.stand_ins import pool_spec


def test_the_platform_is_found_by_asking_and_by_moving_bytes(cuda: CudaRuntime) -> None:
    """A profile of CUDA, the kinds of copy proved."""
    found = probed(cuda)
    assert found.vendor == "cuda"
    assert found.copy_accepts_host_address == PLATFORMS[found.name].copy_accepts_host_address
    assert Platform.probe().name == found.name


def test_memory_of_the_node_near_the_device_is_pinned_booked_and_given_back(cuda: CudaRuntime) -> None:
    """The node is a number or unknown; either way every byte arrives, and the books are empty at the end."""
    node = cuda.numa_node(0)
    assert node is None or node >= 0
    ledger = Ledger()
    config = ControllerConfig(
        io_backend="direct", layout="page_first_direct", host_pages=64, memory=MemoryOptions(numa_node=node)
    )
    with Rig([pool_spec(1024, page_slots=16)], config, cuda, ledger=ledger) as rig:
        assert ledger.total() == rig.controller.group.anchor.nbytes
        rig.there_and_back()
    assert ledger.snapshot() == ()
