"""From the values of a model file to a Model, with every rule of the schema checked.

The schema is the docstrings of :mod:`hicache_core.models.entries`; two notations are the file's own:

- ``layer_ids`` is a list of layers and of runs ``{"first": f, "step": s, "count": n}``, which stand for the n
  layers f, f+s, f+2s, ...
- an index space ``{}`` takes the page size of the model, or the operator's where the model has none;
  ``{"page_slots": n}`` fixes it.
"""

from __future__ import annotations

from collections.abc import Mapping

from hicache_core.models.entries import FULL_SPACE, Figure, Model, PoolEntry, Variant
from hicache_core.models.fields import Node, shown
from hicache_core.spec import PLATFORMS, Reuse

SCHEMA = 1
STATUSES = ("read", "derived", "uncertain")
_SIMULATED = tuple(name for name, platform in PLATFORMS.items() if platform.vendor == "sim")
"""A simulator has no vendor whose row formats it could lack, so every variant exists on it."""


_MOST_LAYERS = 1 << 16


def parse_model(root: Node) -> Model:
    """The model of a file; raises ModelFileError at the first rule that is broken."""
    _check_schema(root)
    keys = root.record(
        required=("schema", "id", "name", "layer_count", "page_slots", "default_variant", "variants"),
        optional=("page_slots_default", "notes", "config"),
    )
    open_pages = keys["page_slots"].value is None
    page_slots = None if open_pages else keys["page_slots"].number(1)
    if "page_slots_default" in keys and not open_pages:
        keys["page_slots_default"].refuse(
            got="a default beside a fixed page_slots", expected="one of the two", remedy="Remove one."
        )
    default = keys["page_slots_default"].number(1) if "page_slots_default" in keys else page_slots or 1
    model_id = keys["id"].text()
    layer_count = keys["layer_count"].number(1)
    if layer_count > _MOST_LAYERS:
        keys["layer_count"].refuse(
            got=f"{layer_count} layers", expected=f"at most {_MOST_LAYERS}", remedy="Correct layer_count."
        )
    variants = {
        name: _variant(node, model_id, name, layer_count, page_slots, default)
        for name, node in keys["variants"].mapping().items()
    }
    return Model(
        id=model_id,
        name=keys["name"].text(),
        layer_count=layer_count,
        page_slots=page_slots,
        page_slots_default=default,
        default_variant=_defaults(keys["default_variant"], variants),
        config={name: _figure(node) for name, node in keys["config"].mapping().items()}
        if "config" in keys
        else {},
        variants=variants,
        notes=_notes(keys),
    )


def _check_schema(root: Node) -> None:
    """First of all, since another schema may have other keys."""
    schema = root.value.get("schema", SCHEMA) if isinstance(root.value, dict) else SCHEMA
    if type(schema) is not int or schema != SCHEMA:
        root.child("schema", schema).refuse(
            got=shown(schema),
            expected=str(SCHEMA),
            remedy="Write the file for this schema, or install a release that reads it.",
        )


def _notes(keys: Mapping[str, Node]) -> str:
    return keys["notes"].text() if "notes" in keys else ""


def _figure(node: Node) -> Figure:
    keys = node.record(required=("value", "status", "source"), optional=("notes",))
    return Figure(
        value=keys["value"].value,
        status=keys["status"].choice(STATUSES),
        source=keys["source"].text(),
        notes=_notes(keys),
    )


def _platform(node: Node, name: str) -> str:
    if name not in PLATFORMS:
        node.refuse(
            got=f"platform '{name}'",
            expected=f"platforms among {', '.join(PLATFORMS)}",
            remedy="Correct the name.",
        )
    return name


def _defaults(node: Node, variants: Mapping[str, Variant]) -> dict[str, str]:
    defaults: dict[str, str] = {}
    for platform, choice in node.mapping().items():
        name = choice.choice(tuple(variants))
        if _platform(choice, platform) not in variants[name].platforms:
            choice.refuse(
                got=f"variant '{name}' as the default on {platform}",
                expected=f"a variant that lists {platform}",
                remedy=f"Choose another, or add {platform} to the platforms of '{name}'.",
            )
        defaults[platform] = name
    return defaults


def _variant(
    node: Node, model: str, name: str, layer_count: int, page_slots: int | None, default: int
) -> Variant:
    keys = node.record(required=("platforms", "index_spaces", "pools"), optional=("notes",))
    listed = [_platform(item, item.text()) for item in keys["platforms"].items()]
    spaces = {
        space: _page_slots(space_node, page_slots)
        for space, space_node in keys["index_spaces"].mapping().items()
    }
    nodes = keys["pools"].items()
    pools = tuple(_pool(pool_node, tuple(spaces), layer_count) for pool_node in nodes)
    _check_names(nodes, pools)
    _check_owners(keys["pools"], pools, spaces)
    return Variant(
        model=model,
        name=name,
        platforms=tuple(dict.fromkeys((*listed, *_SIMULATED))),
        index_spaces=spaces,
        page_slots_default=default,
        pools=pools,
        notes=_notes(keys),
    )


def _page_slots(node: Node, page_slots: int | None) -> int | None:
    keys = node.record(required=(), optional=("page_slots",))
    return keys["page_slots"].number(1) if keys else page_slots


def _pool(node: Node, spaces: tuple[str, ...], layer_count: int) -> PoolEntry:
    keys = node.record(
        required=(
            "pool",
            "family",
            "index_space",
            "anchor",
            "layer_ids",
            "geometry",
            "reuse",
            "row_bytes",
            "status",
            "source",
        ),
        optional=("derive_from", "draft_layers", "window_slots", "notes"),
    )
    draft_layers = keys["draft_layers"].number(1) if "draft_layers" in keys else 0
    reuse = Reuse(keys["reuse"].choice([r.value for r in Reuse]))
    if (reuse is Reuse.TRAILING_PAGES) != ("window_slots" in keys):
        node.refuse(
            got=f"reuse '{reuse.value}' {'with' if 'window_slots' in keys else 'without'} window_slots",
            expected=f"window_slots with reuse '{Reuse.TRAILING_PAGES.value}', and only there",
            remedy="Give window_slots, the slots that must be covered, or remove it.",
        )
    return PoolEntry(
        pool=keys["pool"].text(),
        family=keys["family"].text(),
        index_space=keys["index_space"].choice(spaces),
        anchor=keys["anchor"].flag(),
        layer_ids=_layer_ids(keys["layer_ids"], layer_count, draft_layers),
        params=keys["geometry"].free(),
        reuse=reuse,
        window_slots=keys["window_slots"].number(1) if "window_slots" in keys else None,
        derive_from=keys["derive_from"].text() if "derive_from" in keys else None,
        draft_layers=draft_layers,
        row_bytes=keys["row_bytes"].number(0),
        status=keys["status"].choice(STATUSES),
        source=keys["source"].text(),
        notes=_notes(keys),
    )


def _layer_ids(node: Node, layer_count: int, draft_layers: int) -> tuple[int, ...]:
    """The layers of a pool, runs written out; draft layers are the last and follow the target's."""
    end = layer_count + draft_layers
    layers: list[int] = []
    for item in node.items():
        run = _run(item)
        # Before it is written out: a slip in a count must not fill memory.
        if run[-1] >= end:
            item.refuse(
                got=f"layer {run[-1]}",
                expected=f"layers below {end} ({layer_count} layers, {draft_layers} of a draft)",
                remedy="Correct the layers, layer_count or draft_layers.",
            )
        if layers and run[0] <= layers[-1]:
            item.refuse(
                got=f"layer {run[0]} after {layers[-1]}",
                expected="layers in ascending order, each once",
                remedy="Sort them.",
            )
        layers.extend(run)
    drafts = sum(layer >= layer_count for layer in layers)
    if drafts != draft_layers:
        node.refuse(
            got=f"{drafts} layers from {layer_count} up, and draft_layers={draft_layers}",
            expected="the two equal: draft layers take the ids after the last target layer",
            remedy="Correct the layers or draft_layers.",
        )
    return tuple(layers)


def _run(node: Node) -> range:
    if not isinstance(node.value, dict):
        first = node.number(0)
        return range(first, first + 1)
    keys = node.record(required=("first", "step", "count"))
    first, step, count = keys["first"].number(0), keys["step"].number(1), keys["count"].number(1)
    return range(first, first + step * count, step)


def _check_names(nodes: list[Node], pools: tuple[PoolEntry, ...]) -> None:
    """Names once; each derived pool rides on a pool of its own space that owns its slots."""
    owners = {entry.pool: entry for entry in pools if entry.owns_slots}
    seen: set[str] = set()
    for node, entry in zip(nodes, pools, strict=True):
        if entry.pool in seen:
            node.child("pool", None).refuse(
                got=f"'{entry.pool}' twice", expected="a name once", remedy="Rename one of the pools."
            )
        seen.add(entry.pool)
        source = owners.get(entry.derive_from) if entry.derive_from is not None else None
        if entry.derive_from is not None and (source is None or source.index_space != entry.index_space):
            node.child("derive_from", None).refuse(
                got=f"'{entry.derive_from}'",
                expected=f"a pool of index space '{entry.index_space}' that owns its slots",
                remedy="Name such a pool, or leave derive_from out where the pool owns its slots.",
            )
        rule = entry.reuse, entry.window_slots
        if source is not None and rule != (source.reuse, source.window_slots):
            node.child("reuse", None).refuse(
                got=f"reuse '{entry.reuse.value}' (window_slots {entry.window_slots})",
                expected=f"what '{source.pool}' has: the pages of a space are needed together",
                remedy="Give both pools one rule, or an index space each.",
            )


def _check_owners(node: Node, pools: tuple[PoolEntry, ...], spaces: Mapping[str, int | None]) -> None:
    """One anchor, in the full space; one owner of the slots of each space."""
    anchors = [entry for entry in pools if entry.anchor]
    if len(anchors) != 1 or anchors[0].index_space != FULL_SPACE or not anchors[0].owns_slots:
        found = [f"{entry.pool} (space '{entry.index_space}')" for entry in anchors]
        node.refuse(
            got=f"the anchors {', '.join(found) or 'none'}",
            expected=f"one anchor, in index space '{FULL_SPACE}', that owns its slots",
            remedy="Set anchor on the pool whose slots name the pages, and on no other.",
        )
    for space in spaces:
        owners = [entry.pool for entry in pools if entry.index_space == space and entry.owns_slots]
        if len(owners) != 1:
            node.refuse(
                got=f"index space '{space}' with the owners {', '.join(owners) or 'none'}",
                expected="one pool without derive_from in each index space",
                remedy="Add derive_from to the pools that ride on another, or remove the space.",
            )
