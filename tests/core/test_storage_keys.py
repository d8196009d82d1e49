"""Names of stored pages: the format says what flat bytes follow from, the key tells pages apart."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from hicache_core.errors import SpecError
from hicache_core.spec import (
    LAYOUTS,
    BufferSpec,
    IndexSpace,
    PoolSpec,
    RowUnit,
    StorageKey,
    layout_named,
    page_format,
)
from hicache_core.testing.oracle import first_difference
from hicache_core.testing.stand_ins import pool_spec
from tests.core.host_pages import ROWS, flat_page, host_copy, host_pool

SPEC = pool_spec(48, 32, page_slots=4, layer_ids=(0, 1))
KEY = StorageKey(
    model="deepseek-v4",
    variant="fp8",
    pool="kv",
    page_format="rows",
    rank=1,
    rank_count=8,
    namespace="tenant",
    block_hash="00ff",
)


def _format(spec: PoolSpec, layout: str = "page_first") -> str:
    return page_format(spec, layout_named(layout))


def _buffers(*row_bytes: int, **facts: Any) -> list[BufferSpec]:
    return [BufferSpec(name=f"b{i}", row_bytes=n, **facts) for i, n in enumerate(row_bytes)]


OTHERS = {
    "family": evolve(SPEC, family="other"),
    "unit": pool_spec(48, 32, page_slots=4, layer_ids=(0, 1), unit=RowUnit.PAGE),
    "page": pool_spec(48, 32, page_slots=8, layer_ids=(0, 1)),
    "page of as many bytes": pool_spec(24, 16, page_slots=8, layer_ids=(0, 1)),
    "page row of as many bytes": pool_spec(192, 128, page_slots=4, layer_ids=(0, 1), unit=RowUnit.PAGE),
    "page row for more slots": pool_spec(192, 128, page_slots=8, layer_ids=(0, 1), unit=RowUnit.PAGE),
    "layers": pool_spec(48, 32, page_slots=4, layer_ids=(0, 1, 2)),
    "other layers": pool_spec(48, 32, page_slots=4, layer_ids=(0, 2)),
    "row bytes": evolve(SPEC, buffers=_buffers(48, 48)),
    "order": evolve(SPEC, buffers=_buffers(48, 32)[::-1]),
    "buffer": evolve(SPEC, buffers=_buffers(48)),
    "one buffer of as many bytes": evolve(SPEC, buffers=_buffers(80)),
    "no layers": evolve(SPEC, buffers=_buffers(48, 32, per_layer=False)),
    "name": evolve(SPEC, buffers=[BufferSpec(name="k", row_bytes=48), BufferSpec(name="v", row_bytes=32)]),
    "a name like the separators": evolve(SPEC, buffers=[BufferSpec(name='b0",2,4,48],["b1', row_bytes=32)]),
}


def test_pools_of_different_pages_have_different_formats() -> None:
    """I41: whatever the flat bytes follow from tells two pools apart, layouts with the rest."""
    formats = [_format(spec, layout) for spec in (SPEC, *OTHERS.values()) for layout in LAYOUTS]
    assert len(set(formats)) == len(formats) == 3 * (1 + len(OTHERS))


def test_the_format_is_the_same_in_every_release() -> None:
    """I41: a string that changes makes every stored page a miss; the version is to change with it."""
    assert _format(ROWS["slots"]) == (
        '{"version":1,"layout":"page_first","family":"rows","row_unit":"slot","page_slots":1,'
        '"layer_ids":[0,2,5],'
        '"buffers":[["temporal",3,1,192],["conv_0",3,1,80],["side",1,1,48]]}'
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pools_of_one_format_exchange_pages(layout: str) -> None:
    """What one stored, another of other pages, registrations, name and space restores to the same rows."""
    spec = evolve(
        SPEC, pool="other", anchor=False, index_space=IndexSpace(name="own", page_slots=SPEC.page_rows)
    )
    one = host_pool(SPEC, layout, pages=3)
    other = host_pool(spec, layout, pages=200, limit=1)
    assert one.storage.page_format == other.storage.page_format == _format(SPEC, layout)
    other.storage.set_pages(np.array([150, 0]), one.storage.get_pages(np.array([2, 1])))
    hosts, others = host_copy(one), host_copy(other)
    for page, source in ((150, 2), (0, 1)):
        assert (
            first_difference(flat_page(other, layout, others, page), flat_page(one, layout, hosts, source))
            == ""
        )
    one.destroy()
    other.destroy()


def test_every_fact_of_a_key_is_in_its_digest() -> None:
    """I41: model, format, rank and namespace tell pages of one hash apart."""
    keys = [
        KEY,
        evolve(KEY, model="other"),
        evolve(KEY, variant="bf16"),
        evolve(KEY, pool="swa"),
        evolve(KEY, page_format="other"),
        evolve(KEY, rank=2),
        evolve(KEY, rank_count=4),
        evolve(KEY, namespace=""),
        evolve(KEY, block_hash="00fe"),
        evolve(KEY, model="deepseek-v4fp8", variant="f"),
        evolve(KEY, model='deepseek-v4","fp8', variant="kv"),
    ]
    assert all(one != other for one, other in itertools.combinations(keys, 2))
    assert len({key.digest for key in keys}) == len(keys)


def test_a_digest_is_the_same_in_every_process_and_release() -> None:
    """I41: what one process stored, another finds."""
    assert evolve(KEY).digest == KEY.digest
    assert KEY.digest == "f40b77ef718e569e30b9cdf233e4d4ca35022aafb070828d0340cc5cd0d0f790"


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 8},
        {"rank": -1},
        {"rank_count": 0},
        {"model": ""},
        {"block_hash": b"00ff"},
        {"namespace": None},
    ],
    ids=str,
)
def test_a_key_that_names_nothing_is_refused(wrong: dict[str, Any]) -> None:
    """Ranks count from 0, and names are strings."""
    with pytest.raises((SpecError, TypeError)):
        evolve(KEY, **wrong)
