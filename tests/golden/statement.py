"""What the tables of :mod:`tests.golden.rules` say of a cell. It shares no code with the solver."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hicache_core.models
from tests.golden import rules
from tests.golden.rules import Facts, Pair

MODEL_FILES = Path(hicache_core.models.__file__).parent / "data"
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}


class Pool(NamedTuple):
    """A pool as far as the rules are concerned: bytes of the rows of its buffers, none for a logical one."""

    name: str
    rows: tuple[int, ...]
    pairs: frozenset[Pair]


class Cell(NamedTuple):
    """What is asked."""

    platform: str
    io_backend: str
    layout: str
    allowed: bool = False

    @property
    def pair(self) -> Pair:
        """The (io_backend, layout) pair."""
        return self.io_backend, self.layout

    @property
    def facts(self) -> Facts:
        """What is known of the platform."""
        return rules.PLATFORMS[self.platform]


class Refusal(NamedTuple):
    """A rule that is broken, and by which pool; by none where the combination breaks it."""

    rule: str
    pool: str = ""


def _rows(entry: Mapping[str, Any]) -> tuple[int, ...]:
    """The rows of the buffers that the row of a pool is made up of."""
    whole, figures = entry["row_bytes"], entry["geometry"]
    if entry["family"] in rules.LOGICAL_FAMILIES:
        return ()
    if entry["family"] == "mha":
        keys = whole * figures["k_head_dim"] // (figures["k_head_dim"] + figures["v_head_dim"])
        return keys, whole - keys
    if entry["family"] == "mamba":
        temporal = math.prod(figures["temporal_shape"]) * ELEMENT_BYTES[figures["temporal_dtype"]]
        return temporal, whole - temporal
    return (whole,)


def shipped() -> dict[tuple[str, str], list[Pool]]:
    """The pools of each variant, read from the model files."""
    found: dict[tuple[str, str], list[Pool]] = {}
    for file in sorted(MODEL_FILES.glob("*.json")):
        model = json.loads(file.read_text(encoding="utf-8"))
        for name, variant in model["variants"].items():
            found[model["id"], name] = [
                Pool(
                    entry["pool"],
                    _rows(entry),
                    frozenset(rules.FAMILY_PAIRS.get(entry["family"], rules.SERVED)),
                )
                for entry in variant["pools"]
            ]
    return found


def _multiple(pool: Pool, of: int) -> bool:
    return all(row % of == 0 for row in pool.rows)


def _by_kernel(cell: Cell, pool: Pool) -> bool:
    return cell.facts.kernels and _multiple(pool, rules.KERNEL_MULTIPLE)


def _can_move(cell: Cell, pool: Pool) -> bool:
    """Copies carry any row; kernel + layer_first takes a kernel, page_first one where it is not staged."""
    staged = _multiple(pool, rules.STAGED_MULTIPLE)
    return {
        rules.KERNEL_LAYER_FIRST: _by_kernel(cell, pool),
        rules.KERNEL_PAGE_FIRST: staged or _by_kernel(cell, pool),
    }.get(cell.pair, True)


def _of_pool(cell: Cell, pool: Pool) -> Iterator[Refusal]:
    if cell.pair not in pool.pairs:
        yield Refusal("R1-served-pair", pool.name)
    elif (
        cell.pair == rules.KERNEL_PAGE_FIRST
        and cell.facts.page_first_is_staged
        and not _multiple(pool, rules.STAGED_MULTIPLE)
    ):
        yield Refusal("R2-staged-write-back", pool.name)
    elif not _can_move(cell, pool):
        yield Refusal("R5-no-way" if cell.facts.kernels else "R9-no-kernel", pool.name)


def _on_request(cell: Cell) -> bool:
    return cell.pair == rules.KERNEL_LAYER_FIRST and cell.facts.layer_first_by_kernel == "on request"


def refusals(cell: Cell, pools: Iterable[Pool], platforms: Iterable[str] | None = None) -> set[Refusal]:
    """Every rule that a cell breaks.

    Args:
        cell: what is asked.
        pools: the pools of the group.
        platforms: where the variant exists; None where that is not asked.
    """
    found: set[Refusal] = set()
    if platforms is not None and cell.platform not in platforms:
        found.add(Refusal("R7-variant-platform"))
    if cell.pair not in rules.SERVED:
        return found | {Refusal("R1-served-pair")}
    if _on_request(cell) and not cell.allowed:
        found.add(Refusal("R3-not-opted-in"))
    return found | {refusal for pool in pools if pool.rows for refusal in _of_pool(cell, pool)}


def outcome(cell: Cell, refused: set[Refusal]) -> str:
    """The answer in a word."""
    return "no" if refused else "yes-if-probed" if _on_request(cell) else "yes"


def way(cell: Cell, pool: Pool) -> str:
    """How a pool moves in a cell that works: backup, load, staged or not, and what tables hold."""
    staged = cell.pair == rules.KERNEL_PAGE_FIRST and _multiple(pool, rules.STAGED_MULTIPLE)
    places = {"kernel": "kernel(device/device)", "copies": "copies(cpu/cpu)", "staged": "staged(cpu/device)"}
    backup = load = "copies"
    if cell.pair == rules.KERNEL_LAYER_FIRST:
        backup = load = "kernel"
    elif cell.pair == rules.KERNEL_PAGE_FIRST:
        relaid = "staged" if cell.facts.relayout and cell.facts.kernels else "copies"
        backup = relaid if staged else "kernel"
        load = cell.facts.page_first_loads if _by_kernel(cell, pool) else "copies"
    domain = "device" if cell.facts.registers else "raw"
    return f"{places[backup]} {places[load]} {'staged' if staged else 'unstaged'} {domain}"


def neighbours(cell: Cell) -> Sequence[Cell]:
    """What could be chosen instead, nearest first: no new option, then the backend, then the order.

    Page-first layouts are one order, whoever serves them. The option goes with the pair that asks for it.
    """

    def distance(other: Cell) -> tuple[bool, bool, bool]:
        order, asked_order = (one.layout.startswith("page_first") for one in (other, cell))
        return other.allowed and not cell.allowed, other.io_backend != cell.io_backend, order != asked_order

    pairs = (cell._replace(io_backend=pair[0], layout=pair[1]) for pair in sorted(rules.SERVED))
    others = (other._replace(allowed=_on_request(other)) for other in pairs)
    return sorted(others, key=distance)
