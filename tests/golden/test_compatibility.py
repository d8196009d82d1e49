"""Every cell of the golden file: as the solver answers it, and as the rules stated a second time say."""

from __future__ import annotations

import difflib
import itertools
import subprocess
import sys
from typing import NamedTuple

import pytest

from hicache_core.compat import answer
from hicache_core.spec import IO_BACKENDS, LAYOUTS, PLATFORMS, supported
from tests.core.compat_queries import pool, query
from tests.golden import rules, statement
from tests.golden.statement import Cell, Pool, Refusal
from tools import golden_compatibility as golden

SHIPPED = statement.shipped()
NONE = "-"
SHOWN_LINES = 40


class Line(NamedTuple):
    """A cell of the golden file."""

    model: str
    variant: str
    cell: Cell
    outcome: str
    refused: set[Refusal]
    nearest: str
    ways: dict[str, str]


def _refusals(text: str) -> set[Refusal]:
    named = (part.partition(":") for part in text.split() if part != NONE)
    return {Refusal(rule, name) for rule, _, names in named for name in names.split(",")}


def _ways(text: str) -> dict[str, str]:
    parts = (part.split(": ") for part in text.split("; ") if ": " in part)
    return {name: how for how, names in parts for name in names.split(",")}


def _line(text: str) -> Line:
    model, variant, platform, io_backend, layout, option, outcome, refused, nearest, ways = text.split("\t")
    cell = Cell(platform, io_backend, layout, option == "allowed")
    return Line(model, variant, cell, outcome, _refusals(refused), nearest, _ways(ways))


TEXT = golden.GOLDEN.read_text(encoding="utf-8").splitlines()
LINES = [_line(text) for text in TEXT[1:]]


def _platforms(variant: str) -> set[str]:
    return rules.VARIANT_PLATFORMS.get(variant, rules.EVERYWHERE)


def test_the_solver_answers_as_the_golden_file_says() -> None:
    """A change of an answer is a change of the file, to be read in review."""
    found = golden.lines()
    if found != TEXT:
        changes = list(difflib.unified_diff(TEXT, found, "golden", "solver", lineterm="", n=0))
        more = f"\n... and {len(changes) - SHOWN_LINES} lines" if len(changes) > SHOWN_LINES else ""
        shown = "\n".join(changes[:SHOWN_LINES])
        pytest.fail(f"{shown}{more}\n\nIf this is meant: {golden.UPDATE}", pytrace=False)


def test_the_golden_file_has_every_cell_once() -> None:
    """30 variants, 8 platforms, 6 pairs, and kernel + layer_first a second time with its option."""
    pairs = [(*pair, False) for pair in itertools.product(("kernel", "direct"), LAYOUTS)]
    asked = [*pairs, ("kernel", "layer_first", True)]
    assert len(asked) == 7
    assert sorted((line.model, line.variant, *line.cell) for line in LINES) == sorted(
        (*variant, platform, *pair)
        for variant, platform, pair in itertools.product(SHIPPED, rules.PLATFORMS, asked)
    )
    assert len(set(TEXT)) == len(TEXT) == 1 + 30 * 8 * 7
    assert set(rules.PLATFORMS) == set(PLATFORMS)


@pytest.mark.parametrize("variant", SHIPPED, ids="/".join)
def test_the_golden_file_follows_from_the_rules(variant: tuple[str, str]) -> None:
    """Outcome, rules and pools of each cell, and how each pool moves where it does."""
    pools = SHIPPED[variant]
    lines = [line for line in LINES if (line.model, line.variant) == variant]
    assert len(lines) == 56
    for line in lines:
        refused = statement.refusals(line.cell, pools, _platforms(line.variant))
        moving = [one for one in pools if one.rows and not refused]
        ways = {one.name: statement.way(line.cell, one) for one in moving}
        expected = line._replace(outcome=statement.outcome(line.cell, refused), refused=refused, ways=ways)
        assert line == expected


def test_every_answer_is_found_among_the_shipped_models() -> None:
    """A table of one answer would prove little: these are in it."""
    assert {line.outcome for line in LINES} == {"yes", "yes-if-probed", "no"}
    assert {refusal.rule for line in LINES for refusal in line.refused} == {
        "R1-served-pair",
        "R3-not-opted-in",
        "R7-variant-platform",
        "R9-no-kernel",
    }


def _shown(cell: Cell) -> str:
    return f"{cell.io_backend} + {cell.layout}{' with --allow-kernel-layer-first' if cell.allowed else ''}"


@pytest.mark.parametrize("variant", SHIPPED, ids="/".join)
def test_the_nearest_combination_is_the_first_neighbour_that_works(variant: tuple[str, str]) -> None:
    """By the statement's own order of neighbours; none where none works, and none where the answer is yes."""
    for line in (line for line in LINES if (line.model, line.variant) == variant):
        works = (
            other
            for other in statement.neighbours(line.cell)
            if not statement.refusals(other, SHIPPED[variant], _platforms(line.variant))
        )
        nearest = next((_shown(other) for other in works), NONE) if line.outcome == "no" else NONE
        assert line.nearest == nearest


ROWS = (48, 24, 17)
"""A multiple of 16, of 8 alone, and of neither: no shipped model has the latter two."""


@pytest.mark.parametrize("platform", rules.PLATFORMS)
@pytest.mark.parametrize("first", ROWS)
@pytest.mark.parametrize("second", ROWS)
@pytest.mark.parametrize("slots", [False, True])
def test_rows_of_any_multiple_come_out_as_the_rules_say(
    platform: str, first: int, second: int, slots: bool
) -> None:
    """Pools of 16, 8 and 1 side by side, the second of a family that serves all pairs or fewer."""
    pairs = frozenset(rules.FAMILY_PAIRS["mamba"] if slots else rules.SERVED)
    stated = [Pool("kv", (48, first), frozenset(rules.SERVED)), Pool("side", (second,), pairs)]
    asked = [pool(48, first), pool(second, name="side", served_pairs=supported(pairs))]
    for io_backend, layout, allowed in itertools.product(IO_BACKENDS, LAYOUTS, (False, True)):
        cell = Cell(platform, io_backend, layout, allowed)
        solved = answer(query(platform, io_backend, layout, *asked, allow_kernel_layer_first=allowed))
        refused = statement.refusals(cell, stated)
        ways = {} if refused else {one.name: statement.way(cell, one) for one in stated}
        works = (o for o in statement.neighbours(cell) if not statement.refusals(o, stated))
        assert {Refusal(v.rule + "-" + v.code, v.pool) for v in solved.violations} == refused
        assert solved.outcome.value == statement.outcome(cell, refused)
        assert _ways(golden.paths(solved)) == ways
        assert str(solved.nearest) == (_shown(next(works)) if refused else "None")


@pytest.mark.parametrize("variant", ["bf16", "tp2_fp8kv_bf16state_mtp1"])
@pytest.mark.parametrize("platform", ["rocm", "rocm-mi355x"])
def test_states_beside_keys_and_values_are_staged_on_rocm(platform: str, variant: str) -> None:
    """R2: kernel + page_first serves the published hybrid, whose states have a staged write-back too."""
    cell = Cell(platform, "kernel", "page_first")
    (line,) = (one for one in LINES if one[:3] == ("qwen3.5-397b-a17b", variant, cell))
    staged = "staged(cpu/device) copies(cpu/cpu) staged device"
    assert (line.outcome, line.ways) == ("yes", {"kv": staged, "mamba": staged})


def test_no_answer_takes_torch() -> None:
    """All cells, with the plugins that declare their pools, in a process of its own."""
    program = (
        "import sys; from tools.golden_compatibility import lines; count = len(lines()); "
        "print(count, *sorted({'torch', 'triton'} & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=golden.ROOT)
    assert (told.returncode, told.stdout.split()) == (0, [str(len(TEXT))]), told.stderr
