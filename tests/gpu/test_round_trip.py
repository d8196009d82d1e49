"""Every byte of both sides after a backup and a load on a CUDA device, for each pair that a runtime has."""

from __future__ import annotations

import itertools
import math
import mmap
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hicache_core.controller import ControllerConfig
from hicache_core.device.cuda import CudaRuntime
from hicache_core.errors import AddressError, IncompatibleError
from hicache_core.memory.options import MemoryOptions
from hicache_core.plugins import load_plugins
from hicache_core.spec import IndexSpace, PoolGeometry, PoolSpec
from hicache_core.testing.rigs import DeviceOptions, Rig, differences
from hicache_core.testing.stand_ins import pool_spec

PAIRS = (
    ("launching", "kernel", "layer_first"),
    ("launching", "kernel", "page_first"),
    ("copying", "kernel", "page_first"),
    ("cuda", "direct", "layer_first"),
    ("cuda", "direct", "page_first_direct"),
)
DEVICE_PAGES, HOST_PAGES = 10, 14
MHA = {"kv_heads": 1, "k_head_dim": 192, "v_head_dim": 128, "dtype": "bfloat16"}
LATENT = {"latent_dim": 512, "rope_dim": 64, "row_format": "fp8_scaled"}
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "mha in pages of 1": ("mha", MHA, 1),
    "mha in pages of 16": ("mha", MHA, 16),
    "mla in pages of 64": ("mla", LATENT, 64),
    "k_only of 16 bytes": ("k_only", {"kv_heads": 1, "k_head_dim": 8, "dtype": "bfloat16"}, 16),
    "paged 37440": ("dsv4_paged", {"compress_ratio": 4, "row_format": "v4"}, 256),
    "paged 1728": ("dsv4_paged", {"compress_ratio": 128, "row_format": "v4"}, 256),
    "paged 65536": ("dsv4_paged", {"compress_ratio": 4, "row_format": "unified_bf16"}, 256),
    "paged 8448": ("dsv4_paged", {"compress_ratio": 4, "row_format": "index_fp8"}, 256),
}
PAGE_LISTS: dict[str, tuple[list[int], list[int], list[int]]] = {
    # host pages by position in what was allocated, device pages to back up, device pages to load into
    "none": ([], [], []),
    "first": ([0], [0], [3]),
    "last": ([HOST_PAGES - 1], [DEVICE_PAGES - 1], [0]),
    "neighbours": ([2, 3, 4, 5], [1, 2, 3, 4], [5, 6, 7, 8]),
    "out of order": ([9, 1, 2, 7], [4, 5, 6, 0], [9, 2, 3, 1]),
    "all": (list(range(DEVICE_PAGES)), list(range(DEVICE_PAGES)), list(range(DEVICE_PAGES))[::-1]),
}
LAYOUTS_OF_ROWS = (
    DeviceOptions(pages=DEVICE_PAGES, slab=True),
    DeviceOptions(pages=DEVICE_PAGES, slab=False, dtype=torch.bfloat16),
    DeviceOptions(pages=DEVICE_PAGES, slab=True, gap_bytes=64, dtype=torch.float8_e4m3fn),
)


@pytest.fixture(params=PAIRS, ids=" + ".join)
def served(request: pytest.FixtureRequest) -> tuple[CudaRuntime, str, str]:
    """A runtime, and an io_backend and layout that it serves."""
    runtime, io_backend, layout = request.param
    return request.getfixturevalue(runtime), io_backend, layout


def declared(rows: str, layer_ids: Sequence[int] = (0, 2, 3, 5, 8)) -> PoolSpec:
    """The declaration of one of the families."""
    family, params, page_slots = FAMILIES[rows]
    geometry = PoolGeometry(
        pool="rows",
        family=family,
        index_space=IndexSpace(name="full", page_slots=page_slots),
        layer_ids=layer_ids,
        params=params,
        anchor=True,
    )
    return load_plugins(required=["mha_mla", "dsv4_paged"]).spec(geometry)


def three_segments(spec: PoolSpec, layout: str) -> int:
    """A largest registration that cuts the smallest buffer in about three."""
    sizes = []
    for buffer in spec.buffers:
        row = spec.page_rows * buffer.row_bytes
        unit = row if layout == "layer_first" else row * spec.layer_count
        cut = math.lcm(unit, mmap.PAGESIZE)
        sizes.append(max(HOST_PAGES * row * spec.layer_count // 3 // cut, 1) * cut)
    return min(sizes)


@pytest.mark.parametrize("rows", FAMILIES)
@pytest.mark.parametrize("segments", [1, 3])
def test_every_byte_goes_out_and_comes_back(
    served: tuple[CudaRuntime, str, str], rows: str, segments: int
) -> None:
    """Backup and load equal the oracle, guards, gaps and untouched pages included, for every page list."""
    runtime, io_backend, layout = served
    spec = declared(rows)
    limit = three_segments(spec, layout) if segments == 3 else 1 << 36
    for options, (name, (hosts, sources, targets)) in itertools.product(LAYOUTS_OF_ROWS, PAGE_LISTS.items()):
        config = ControllerConfig(
            io_backend=io_backend,
            layout=layout,
            host_pages=HOST_PAGES,
            memory=MemoryOptions(max_registration_bytes=limit),
        )
        with Rig([spec], config, runtime, options=options) as rig:
            every = rig.allocate(HOST_PAGES)
            host = [every[i] for i in hosts]
            rig.fill_host()
            before = rig.snapshot()
            expected = rig.after_backup(before, list(zip(host, sources, strict=True)))
            rig.controller.backup(rig.slots(host), rig.slots(sources)).wait()
            assert not differences(rig.snapshot(), expected), name
            rig.poison_device()
            before = rig.snapshot()
            expected = rig.after_load(before, list(zip(host, targets, strict=True)))
            torch.cuda.synchronize()
            rig.controller.load(rig.slots(host), rig.slots(targets)).wait()
            assert not differences(rig.snapshot(), expected), name


def test_several_pools_move_together(served: tuple[CudaRuntime, str, str]) -> None:
    """A group of an anchor and two pools that ride on it, with layers of their own."""
    runtime, io_backend, layout = served
    specs = [
        pool_spec(2048, 1024, page_slots=16, layer_ids=range(7)),
        pool_spec(8448, page_slots=16, layer_ids=[1, 4], pool="index", anchor=False),
    ]
    config = ControllerConfig(io_backend=io_backend, layout=layout, host_pages=HOST_PAGES)
    with Rig(specs, config, runtime, options=DeviceOptions(pages=DEVICE_PAGES, slab=True)) as rig:
        host = rig.allocate(4)
        expected = rig.after_backup(rig.snapshot(), list(zip(host, [3, 4, 5, 1], strict=True)))
        rig.controller.backup(rig.slots(host), rig.slots([3, 4, 5, 1])).wait()
        assert not differences(rig.snapshot(), expected)


def test_random_pages_of_a_large_pool(cuda: CudaRuntime) -> None:
    """Sixty layers and shuffled lists of up to 64 pages, many times over."""
    spec = declared("paged 8448", layer_ids=range(60))
    config = ControllerConfig(io_backend="kernel", layout="page_first", host_pages=96)
    draw = random.Random(0)
    with Rig([spec], config, cuda, options=DeviceOptions(pages=80, slab=True)) as rig:
        every = rig.allocate(96)
        for count in (1, 17, 64):
            host, device = draw.sample(every, count), draw.sample(range(80), count)
            expected = rig.after_backup(rig.snapshot(), list(zip(host, device, strict=True)))
            rig.controller.backup(rig.slots(host), rig.slots(device)).wait()
            assert not differences(rig.snapshot(), expected)


def test_a_pair_that_needs_a_kernel_is_refused_at_construction(copying: CudaRuntime) -> None:
    """kernel + layer_first has no way without kernels, and construction says so."""
    config = ControllerConfig(io_backend="kernel", layout="layer_first", host_pages=4)
    with pytest.raises(IncompatibleError) as caught:
        Rig([pool_spec(64)], config, copying)
    assert [v.id for v in caught.value.violations] == ["R9-no-kernel"]


def test_a_tensor_of_the_host_is_refused(cuda: CudaRuntime) -> None:
    """A pool whose tensors lie in host memory is no device pool."""
    tensor = torch.zeros(8, 64, dtype=torch.uint8)
    with pytest.raises(AddressError):
        cuda.device_range(tensor, 0)
