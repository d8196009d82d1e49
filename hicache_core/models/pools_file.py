"""Hand-made groups of pools: a TOML file for what no model file describes yet."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from attrs import frozen

from hicache_core.errors import PoolsFileError, SpecError
from hicache_core.models.entries import FULL_SPACE
from hicache_core.models.fields import Node
from hicache_core.spec import IndexSpace, PoolGeometry, Reuse

MOST_LAYERS = 1 << 16
_REQUIRED = ("pool", "family", "page_slots")
_OPTIONAL = ("layers", "layer_ids", "index_space", "reuse", "window_slots", "anchor", "geometry")


@frozen(kw_only=True)
class HandMadePool:
    """One ``[[pools]]`` of a file.

    Args:
        geometry: what its family is asked to declare.
        node: its place in the file.
    """

    geometry: PoolGeometry
    node: Node

    def check_figures(self, known: Sequence[str]) -> None:
        """Refuse a figure of the geometry that is not in the schema of its family.

        Raises:
            PoolsFileError: names the file, the key and the figures that there are.
        """
        for figure in self.geometry.params:
            if figure not in known:
                self.node.child(f"geometry.{figure}", None).refuse(
                    got=f"the unknown figure '{figure}'",
                    expected=f"figures of family '{self.geometry.family}': {', '.join(known) or 'none'}",
                    remedy="Correct or remove it.",
                )

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Turn what a family refuses about the figures into an error that names the file and the pool."""
        try:
            yield
        except SpecError as error:
            self.node.refuse(
                got=error.got, expected=error.expected, remedy="Correct the figures of this pool."
            )


def load_pools(path: str | Path) -> tuple[HandMadePool, ...]:
    """The pools of a TOML file, in its order.

    Each ``[[pools]]`` has ``pool``, ``family`` and ``page_slots``; its layers, as ``layers = N`` (0 to N-1)
    or as ``layer_ids``; and perhaps ``index_space`` ("full" where left out), ``reuse`` ("all_pages"),
    ``window_slots`` (with "trailing_pages" only), ``anchor`` (false) and a table ``[pools.geometry]`` with
    the figures of its family.

    Raises:
        PoolsFileError: the file cannot be read or breaks one of these rules; names the file and the key.
    """
    title = str(path)
    try:
        with Path(path).open("rb") as file:
            value = tomllib.load(file)
    except OSError as error:
        _unreadable(title, error, f"{type(error).__name__}: {error.strerror}", "a file that can be read")
    except (ValueError, RecursionError) as error:
        _unreadable(title, error, f"{type(error).__name__}: {error}", "a TOML document in UTF-8")
    root = Node(file=title, path="", value=value, error=PoolsFileError)
    nodes = root.record(required=("pools",))["pools"].items()
    if not nodes:
        root.child("pools", []).refuse(got="no pool", expected="at least one", remedy="Add a [[pools]].")
    pools = tuple(HandMadePool(geometry=_geometry(node), node=node) for node in nodes)
    _check_names(pools)
    return pools


def _check_names(pools: Sequence[HandMadePool]) -> None:
    seen: set[str] = set()
    for entry in pools:
        name = entry.geometry.pool
        if name in seen:
            entry.node.child("pool", name).refuse(
                got=f"'{name}' twice", expected="a name once", remedy="Rename one of the pools."
            )
        seen.add(name)


def _unreadable(title: str, error: Exception, got: str, expected: str) -> NoReturn:
    raise PoolsFileError(
        who=title, got=got, expected=expected, remedy="Correct the file or give another with --pools."
    ) from error


def _geometry(node: Node) -> PoolGeometry:
    keys = node.record(required=_REQUIRED, optional=_OPTIONAL)
    return PoolGeometry(
        pool=keys["pool"].text(),
        family=keys["family"].text(),
        index_space=_index_space(node, keys),
        layer_ids=_layer_ids(node, keys),
        params=keys["geometry"].free() if "geometry" in keys else {},
        anchor=keys["anchor"].flag() if "anchor" in keys else False,
    )


def _index_space(node: Node, keys: Mapping[str, Node]) -> IndexSpace:
    reuse = Reuse(keys["reuse"].choice([r.value for r in Reuse])) if "reuse" in keys else Reuse.ALL_PAGES
    if (reuse is Reuse.TRAILING_PAGES) != ("window_slots" in keys):
        node.refuse(
            got=f"reuse '{reuse.value}' {'with' if 'window_slots' in keys else 'without'} window_slots",
            expected=f"window_slots with reuse '{Reuse.TRAILING_PAGES.value}', and only there",
            remedy="Give window_slots, the slots that must be covered, or remove it.",
        )
    return IndexSpace(
        name=keys["index_space"].text() if "index_space" in keys else FULL_SPACE,
        page_slots=keys["page_slots"].number(1),
        reuse=reuse,
        window_slots=keys["window_slots"].number(1) if "window_slots" in keys else None,
    )


def _layer_ids(node: Node, keys: Mapping[str, Node]) -> tuple[int, ...]:
    if ("layers" in keys) == ("layer_ids" in keys):
        node.refuse(
            got=f"{'both' if 'layers' in keys else 'neither'} of layers and layer_ids",
            expected="one of the two",
            remedy="Give layers, a number, or layer_ids, a list.",
        )
    if "layers" in keys:
        layers = keys["layers"].number(0)
        if layers > MOST_LAYERS:
            # Before it is written out: a slip in a count must not fill memory.
            keys["layers"].refuse(
                got=f"{layers} layers", expected=f"at most {MOST_LAYERS}", remedy="Correct the number."
            )
        return tuple(range(layers))
    found = [(item, item.number(0)) for item in keys["layer_ids"].items()]
    for (_, before), (item, layer) in itertools.pairwise(found):
        if layer <= before:
            item.refuse(
                got=f"layer {layer} after {before}",
                expected="layers in ascending order, each once",
                remedy="Sort them.",
            )
    return tuple(layer for _, layer in found)
