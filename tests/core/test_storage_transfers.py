"""Storage behind a controller: what a backup left is what a page holds, what is set is what a load brings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hicache_core.testing.oracle import Bytes, PagePair, distinct_bytes, first_difference
from hicache_core.testing.rigs import Rig, Snapshot, differences, host_shape
from tests.core.host_pages import ROWS, cut_pages, host_copy, page_rows, pages_at_cuts, write_flat_page

MakeRig = Callable[..., Rig]
PAIRS = (("kernel", "page_first"), ("direct", "layer_first"), ("direct", "page_first_direct"))
TRAVELLERS = ("page rows", "k and v", "slots")


def _rig_and_pairs(make_rig: MakeRig, rows: str, pair: tuple[str, str]) -> tuple[Rig, list[PagePair]]:
    """A rig whose buffers lie in several registrations, and page pairs on either side of their ends."""
    pages = cut_pages(ROWS[rows], pair[1])
    rig = make_rig(ROWS[rows], platform="rocm-mi355x", pair=pair, host_pages=pages, max_registration_bytes=1)
    rig.allocate(pages)
    pool = rig.controller.group.anchor
    assert min(len(b.memory.segments) for b in pool.buffers) >= 2
    hosts = pages_at_cuts(pool)[-12:]
    return rig, list(zip(hosts, (5, 2, 7, 0, 1, 9, 3, 4, 11, 10, 8, 6), strict=False))


def _device_page(rig: Rig, taken: Snapshot, page: int) -> Bytes:
    """The flat bytes of a device page, row by row."""
    pool = rig.controller.group.anchor
    spec = pool.spec
    parts = []
    for buffer in spec.buffers:
        rows = rig.device_rows["kv"][buffer.name].rows_in(taken["device", "kv", buffer.name])
        parts += [
            rows[layer][page * spec.page_rows + row]
            for layer, row in page_rows(rig.layout, host_shape(pool, buffer))
        ]
    return np.concatenate(parts)


@pytest.mark.parametrize("rows", TRAVELLERS)
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_a_page_that_was_backed_up_is_stored_whole(
    make_rig: MakeRig, pair: tuple[str, str], rows: str
) -> None:
    """I42: where aliases are not CPU addresses, storage reads what the device wrote."""
    rig, pairs = _rig_and_pairs(make_rig, rows, pair)
    before = rig.snapshot()
    rig.controller.backup(rig.slots(h for h, _ in pairs), rig.slots(d for _, d in pairs)).wait()
    storage = rig.controller.group.anchor.storage
    for host, device in pairs:
        assert first_difference(storage.get_page(host), _device_page(rig, before, device)) == ""


@pytest.mark.parametrize("rows", TRAVELLERS)
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_a_page_that_was_restored_is_loaded_whole(
    make_rig: MakeRig, pair: tuple[str, str], rows: str
) -> None:
    """I42: bytes from storage arrive on the device, and no other byte of either side changes."""
    rig, pairs = _rig_and_pairs(make_rig, rows, pair)
    rig.fill_host()
    pool = rig.controller.group.anchor
    hosts = host_copy(pool)
    flats = {host: distinct_bytes("stored", host, nbytes=pool.spec.page_bytes) for host, _ in pairs}
    for host, flat in flats.items():
        pool.storage.set_page(host, flat)
        write_flat_page(pool, rig.layout, hosts, host, flat)
    before = rig.snapshot()
    for buffer, host_bytes in zip(pool.spec.buffers, hosts, strict=True):
        assert first_difference(before["host", "kv", buffer.name], host_bytes) == ""
    rig.controller.load(rig.slots(h for h, _ in pairs), rig.slots(d for _, d in pairs)).wait()
    after = rig.snapshot()
    assert differences(after, rig.after_load(before, pairs)) == []
    for host, device in pairs:
        assert first_difference(_device_page(rig, after, device), flats[host]) == ""
