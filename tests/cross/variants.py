"""Whole variants as rigs: every pool with its exact rows, every index space with host pages of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hicache_core.controller import ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.device.sim.faults import Faults
from hicache_core.models import PoolEntry, Variant, load_model, model_names
from hicache_core.plugins import load_plugins
from hicache_core.spec import PoolSpec, platform_named
from hicache_core.testing.oracle import POISON, PagePair
from hicache_core.testing.rigs import DeviceOptions, Rig, Snapshot, differences

REGISTRY = load_plugins(strict=True)
VARIANTS = {
    (model, variant.name): variant
    for model in model_names()
    for variant in load_model(model).variants.values()
}
SERVED = (
    ("kernel", "page_first"),
    ("kernel", "layer_first"),
    ("direct", "layer_first"),
    ("direct", "page_first_direct"),
)
UNSERVED = (("kernel", "page_first_direct"), ("direct", "page_first"))

OPEN_PAGE_SLOTS = 4
"""Slots of a page where the model leaves them open."""
HOST_PAGES, DEVICE_PAGES = 5, 6
"""Pages of the anchor's index space."""
OTHER_HOST_PAGES, OTHER_DEVICE_PAGES = 3, 4
"""Pages of every other index space, whose rows are large."""
LARGE_ROW_BYTES = 500_000
"""From here on one layer of a pool is kept, else two."""

SpacePairs = Mapping[str, Sequence[PagePair]]
"""(host page, device page) of each index space that takes part."""


def declared(
    entries: Sequence[PoolEntry], page_slots: Mapping[str, int], layers: int | None = None
) -> list[PoolSpec]:
    """What the plugins declare for some pools.

    Args:
        entries: the pools.
        page_slots: slots of a page of each index space.
        layers: keep the first so many layers of each pool; None keeps all.
    """
    return [REGISTRY.spec(entry.geometry(page_slots[entry.index_space], layers)) for entry in entries]


def page_slots_of(variant: Variant) -> dict[str, int]:
    """Slots of a page of each index space; small ones where the model leaves them open."""
    return {space: fixed or OPEN_PAGE_SLOTS for space, fixed in variant.index_spaces.items()}


def specs_of(model: str, variant: str, layers: int = 2) -> list[PoolSpec]:
    """The pools of a variant with the first layers of each, one where rows are large."""
    chosen = VARIANTS[model, variant]
    kept = [(entry, 1 if entry.row_bytes >= LARGE_ROW_BYTES else layers) for entry in chosen.pools]
    return [spec for entry, count in kept for spec in declared([entry], page_slots_of(chosen), count)]


def hybrid_of_all() -> list[PoolSpec]:
    """Compressed pages, window, rings and state slots in one group of three index spaces: no model has it."""
    state = next(pool for pool in VARIANTS["jamba-v0.1", "bf16"].pools if pool.index_space == "state")
    return [*specs_of("deepseek-v4-flash", "cuda_v4"), *declared([state], {"state": 1}, 1)]


def other_spaces(specs: Sequence[PoolSpec]) -> list[str]:
    """The index spaces beside the anchor's, in the order of the pools."""
    names = {spec.index_space.name: spec.anchor for spec in sorted(specs, key=lambda spec: not spec.anchor)}
    return list(names)[1:]


def opened(
    specs: Sequence[PoolSpec],
    platform: str,
    pair: tuple[str, str],
    *,
    faults: Faults | None = None,
    options: Mapping[str, Any] | None = None,
    **config: Any,
) -> Rig[SimRuntime]:
    """A rig of some pools; close it, or use it as a context.

    Args:
        specs: the pools.
        platform: name of the platform.
        pair: io_backend and layout.
        faults: what goes wrong.
        options: how the device rows lie, where that is not as in ``DeviceOptions``.
        config: further choices of the operator.
    """
    others = other_spaces(specs)
    choices: dict[str, Any] = {
        "host_pages": HOST_PAGES,
        "other_host_pages": dict.fromkeys(others, OTHER_HOST_PAGES),
        **config,
    }
    lie: dict[str, Any] = {
        "pages": DEVICE_PAGES,
        "other_pages": dict.fromkeys(others, OTHER_DEVICE_PAGES),
        **(options or {}),
    }
    return Rig(
        specs,
        ControllerConfig(io_backend=pair[0], layout=pair[1], **choices),
        SimRuntime(platform_named(platform), seed=7, faults=faults),
        options=DeviceOptions(**lie),
        registry=REGISTRY,
    )


def filled(rig: Rig[SimRuntime]) -> Snapshot:
    """Own every host page and give it distinct bytes; every byte of both sides after that."""
    for name, allocator in rig.controller.group.allocators.items():
        rig.allocate(allocator.pages, name)
    rig.fill_host()
    return rig.snapshot()


def refill(rig: Rig[SimRuntime], snapshot: Snapshot) -> None:
    """Give every byte of both sides the value that it has in ``snapshot``."""
    for (side, pool, buffer), data in snapshot.items():
        if side == "host":
            rig.host_bytes(pool, buffer)[...] = data
        else:
            for memory, layer in zip(rig.device_rows[pool][buffer].memory, data, strict=True):
                memory.copy_(torch.from_numpy(layer))


def go_out_and_come_back(
    rig: Rig[SimRuntime], before: Snapshot, out: SpacePairs, back: SpacePairs
) -> tuple[int, int]:
    """Back up ``out``, poison the device, load ``back``; the oracle says every byte of both sides.

    Args:
        rig: the rig, whose host pages are owned.
        before: every byte of it, all distinct.
        out, back: the pages of each index space, the anchor's among them.

    Returns:
        Bytes of the backup and of the load, as their tickets count them.
    """
    backup, load = rig.controller.backup, rig.controller.load
    (pairs, others), (back_pairs, back_others) = _split(rig, out), _split(rig, back)
    there = backup(*rig.sides(pairs), others={name: rig.sides(mine, name) for name, mine in others.items()})
    there.wait()
    expected = rig.after_backup(before, pairs, others)
    assert differences(rig.snapshot(), expected) == []
    rig.poison_device()
    poisoned = {key: np.full_like(data, POISON) for key, data in expected.items() if key[0] == "device"}
    expected = rig.after_load({**expected, **poisoned}, back_pairs, back_others)
    again = load(
        *rig.sides(back_pairs), others={name: rig.sides(mine, name) for name, mine in back_others.items()}
    )
    again.wait()
    assert differences(rig.snapshot(), expected) == []
    return there.nbytes, again.nbytes


def _split(rig: Rig[SimRuntime], pairs: SpacePairs) -> tuple[Sequence[PagePair], SpacePairs]:
    anchor = rig.anchor_space
    return pairs[anchor], {name: mine for name, mine in pairs.items() if name != anchor}


def moved_bytes(specs: Sequence[PoolSpec], pairs: SpacePairs) -> int:
    """Bytes of all rows of all pools that some pages name, by the figures of their declarations."""
    return sum(
        len(pairs.get(spec.index_space.name, ()))
        * buffer.row_bytes
        * (len(spec.layer_ids) if buffer.per_layer else 1)
        * (spec.index_space.page_slots if spec.row_unit.value == "token" else 1)
        for spec in specs
        for buffer in spec.buffers
    )
