"""What a declaration may say of its buffers, and what each rule refuses."""

from __future__ import annotations

import pytest

from hicache_core.controller import ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.errors import SpecError
from hicache_core.spec import (
    BufferSpec,
    IndexSpace,
    PoolGeometry,
    PoolSpec,
    Reuse,
    RowUnit,
    Span,
    default_capabilities,
    platform_named,
)
from hicache_core.testing.rigs import Rig, differences

C4 = BufferSpec(
    name="kv",
    row_bytes=96,
    spans=[Span(offset=0, stride=20, nbytes=20), Span(offset=80, stride=4, nbytes=4)],
    row_tokens=4,
)


def states(*, layer_ids: tuple[int, ...] = (1, 4)) -> PoolSpec:
    """A pool of checkpoints: two buffers per layer, and one that all layers share."""
    return PoolSpec(
        pool="states",
        family="rows",
        index_space=IndexSpace(name="full", page_slots=1),
        row_unit=RowUnit.SLOT,
        layer_ids=layer_ids,
        buffers=[
            BufferSpec(name="temporal", row_bytes=64),
            BufferSpec(name="side", row_bytes=48, per_layer=False),
            BufferSpec(name="conv", row_bytes=32),
        ],
        anchor=True,
    )


def test_a_buffer_without_layers_counts_once() -> None:
    """Its bytes are counted once a page, whatever the layers."""
    assert states().page_bytes == 2 * (64 + 32) + 48
    assert states(layer_ids=()).page_bytes == 0


@pytest.mark.parametrize(
    "pair",
    [("kernel", "page_first"), ("direct", "layer_first"), ("direct", "page_first_direct")],
    ids=" + ".join,
)
@pytest.mark.parametrize("platform", ["cpu-sim", "cuda", "rocm-mi355x"])
def test_a_buffer_without_layers_follows_its_slot(platform: str, pair: tuple[str, str]) -> None:
    """It goes out with the pages and comes back with the first layer, also where loads go in groups."""
    config = ControllerConfig(io_backend=pair[0], layout=pair[1], host_pages=6, ring_bytes=100)
    with Rig([states()], config, SimRuntime(platform_named(platform), seed=3)) as rig:
        host = rig.allocate(3)
        rig.fill_host()
        pairs = list(zip(host, [3, 4, 7], strict=True))
        expected = rig.after_backup(rig.snapshot(), pairs)
        ticket = rig.controller.backup(rig.slots(host), rig.slots([3, 4, 7]))
        ticket.wait()
        assert ticket.nbytes == 3 * states().page_bytes
        assert not differences(rig.snapshot(), expected)
        rig.poison_device()
        pairs = list(zip(host, [8, 0, 2], strict=True))
        expected = rig.after_load(rig.snapshot(), pairs)
        rig.controller.load(rig.slots(host), rig.slots([8, 0, 2])).wait()
        assert not differences(rig.snapshot(), expected)


@pytest.mark.parametrize(
    "spans",
    [
        [Span(offset=0, stride=20, nbytes=24)],
        [Span(offset=84, stride=4, nbytes=4)],
    ],
    ids=["tokens that overlap", "a token past the row"],
)
def test_spans_lie_inside_the_row(spans: list[Span]) -> None:
    """Each token has bytes of its own, all inside the row."""
    with pytest.raises(SpecError):
        BufferSpec(name="kv", row_bytes=96, spans=spans, row_tokens=4)


@pytest.mark.parametrize(
    ("unit", "buffer", "ranges"),
    [
        (RowUnit.PAGE, C4, 2),
        (RowUnit.TOKEN, BufferSpec(name="k", row_bytes=24), 1),
        (RowUnit.PAGE, BufferSpec(name="kv", row_bytes=24), None),
    ],
)
def test_single_tokens_move_where_their_bytes_are_known(
    unit: RowUnit, buffer: BufferSpec, ranges: int | None
) -> None:
    """Token rows always, page rows where spans say where a token lies."""
    spec = PoolSpec(
        pool="kv",
        family="rows",
        index_space=IndexSpace(name="full", page_slots=4),
        row_unit=unit,
        layer_ids=[0],
        buffers=[buffer],
        anchor=True,
    )
    can = default_capabilities(spec, platform_named("cuda")).token_granular
    assert (can.value if can else None) == ranges


@pytest.mark.parametrize(("reuse", "window"), [(Reuse.TRAILING_PAGES, None), (Reuse.LEAF, 128)])
def test_a_window_belongs_to_trailing_pages(reuse: Reuse, window: int | None) -> None:
    """A window without trailing pages, and trailing pages without a window, are refused."""
    with pytest.raises(SpecError):
        IndexSpace(name="swa", page_slots=4, reuse=reuse, window_slots=window)


def test_a_family_adds_rows_to_what_the_model_says() -> None:
    """Names, space, layers and anchor are the geometry's; unit and buffers are the family's."""
    space = IndexSpace(name="swa", page_slots=4, reuse=Reuse.TRAILING_PAGES, window_slots=8)
    geometry = PoolGeometry(pool="c4", family="rows", index_space=space, layer_ids=[1, 4], anchor=True)
    assert geometry.declared(RowUnit.PAGE, [C4]) == PoolSpec(
        pool="c4",
        family="rows",
        index_space=space,
        row_unit=RowUnit.PAGE,
        layer_ids=(1, 4),
        buffers=(C4,),
        anchor=True,
    )


def test_a_family_refuses_a_geometry_by_the_name_of_its_pool() -> None:
    """Pool, family, what was got and what was expected; the remedy points at the model file."""
    space = IndexSpace(name="full", page_slots=4)
    geometry = PoolGeometry(pool="c4", family="rows", index_space=space, layer_ids=())
    error = geometry.refusal("ratio", "4", where=" here")
    assert (error.code, error.who, error.got, error.expected) == (
        "spec",
        "pool 'c4' (rows)",
        "geometry ratio=None here",
        "4",
    )
    assert "model file" in error.remedy
