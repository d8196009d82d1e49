"""``hicache check``: whether a whole group works on a platform, before the machine is there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import click

from hicache_core.assembly import PoolGroup
from hicache_core.cli.groups import (
    Asked,
    answer_data,
    group_options,
    plan_data,
    platform_option,
    pool_data,
    print_refusal,
)
from hicache_core.cli.output import json_option, print_json, print_table
from hicache_core.compat import Answer, Outcome, Plan, PoolPlan, answer
from hicache_core.plugins import PluginRegistry, load_plugins
from hicache_core.spec import IO_BACKENDS, LAYOUTS, Platform, PoolSpec, platform_named

_IN_A_CELL = {Outcome.YES: "yes", Outcome.IF_PROBED: "if probed"}


@click.command()
@group_options
@platform_option(required=False)
@click.option("--io-backend", type=click.Choice(IO_BACKENDS))
@click.option("--layout", type=click.Choice(list(LAYOUTS)))
@click.option(
    "--matrix", is_flag=True, help="All io_backend x layout pairs, of every platform without --platform."
)
@json_option
def check(
    platform_name: str | None,
    io_backend: str | None,
    layout: str | None,
    matrix: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Say whether a group of pools works on a platform: yes, no, or yes if the start-up probe passes.

    The group is a MODEL's, all pools of it, or that of a FILE.toml with tables [[pools]]: pool, family and
    page_slots; layers (a number) or layer_ids (a list); and perhaps index_space ("full"), reuse ("all_pages",
    "trailing_pages" with window_slots, or "leaf"), anchor (true for exactly one pool) and [pools.geometry],
    the figures of the family that `hicache describe FAMILY` lists.

    Exit 0 for yes and for yes if probed, 1 for no; with --matrix, 0 if any cell is a yes.
    """
    choices = Asked(**asked)
    if matrix:
        if io_backend or layout:
            raise click.UsageError("--matrix asks about every pair; leave --io-backend and --layout out.")
        _matrix(choices, platform_name, as_json)
        return
    if platform_name is None or io_backend is None or layout is None:
        raise click.UsageError("Give --platform, --io-backend and --layout, or --matrix.")
    registry = load_plugins()
    platform = platform_named(platform_name, registry.platforms)
    group = choices.group(platform, registry)
    asked_pair = {"io_backend": io_backend, "layout": layout, **choices.choices}
    solved = answer(group.query(registry, platform, **asked_pair))
    if as_json:
        _print_json(group, platform, asked_pair, solved)
    else:
        click.echo(f"{group.title} on {platform.name}, {io_backend} + {layout}: {solved.outcome.value}")
        if solved.plan is None:
            print_refusal(solved)
        else:
            _print_plan(group, solved.plan)
    sys.exit(1 if solved.outcome is Outcome.NO else 0)


def _print_json(group: PoolGroup, platform: Platform, asked: dict[str, Any], solved: Answer) -> None:
    plans = solved.plan.pools if solved.plan else {}
    print_json(
        "hicache.check/1",
        group=group.title,
        platform=platform.name,
        **asked,
        **answer_data(solved),
        staging_bytes=solved.plan.staging_bytes if solved.plan else None,
        pools=[
            {**pool_data(spec), "plan": plan_data(plans[spec.pool]) if spec.pool in plans else None}
            for spec in group.specs
        ],
    )


_COLUMNS = "pool|backup|load|staged|host indices|device indices|pointers|staging bytes|choices"


def _print_plan(group: PoolGroup, plan: Plan) -> None:
    for condition in plan.conditions:
        proof = f"[{condition.rule}-{condition.code}]: {condition.text}"
        click.echo(f"to be proved by the start-up probe {proof}")
    print_table(
        "pools (where two are given: backup, load)",
        _COLUMNS.split("|"),
        [_pool_row(spec, plan.pools.get(spec.pool)) for spec in group.specs],
    )


def _pool_row(spec: PoolSpec, plan: PoolPlan | None) -> list[object]:
    if plan is None:
        return [spec.pool, *["no bytes"] * 2, *[""] * 6]
    return [
        spec.pool,
        plan.backup.value,
        plan.load.value,
        "yes" if plan.staged else "no",
        f"{plan.backup_host_indices.value}, {plan.load_host_indices.value}",
        f"{plan.backup.device_indices.value}, {plan.load.device_indices.value}",
        plan.pointer_domain.value,
        f"{plan.staging_bytes:,}",
        "; ".join(f"{choice.code}: {choice.text}" for choice in plan.choices),
    ]


def _cells(choices: Asked, platform: Platform, registry: PluginRegistry) -> Iterator[dict[str, Any]]:
    group = choices.group(platform, registry)
    for io_backend in IO_BACKENDS:
        for layout in LAYOUTS:
            query = group.query(registry, platform, io_backend=io_backend, layout=layout, **choices.choices)
            solved = answer(query)
            yield {
                "platform": platform.name,
                "group": group.title,
                "io_backend": io_backend,
                "layout": layout,
                "answer": solved.outcome.value,
                "violations": list(dict.fromkeys(violation.id for violation in solved.violations)),
                "shown": _IN_A_CELL.get(solved.outcome),
            }


def _matrix(choices: Asked, platform_name: str | None, as_json: bool) -> None:
    registry = load_plugins()
    platforms = registry.platforms
    asked = [platform_named(platform_name, platforms)] if platform_name else list(platforms.values())
    cells = [cell for platform in asked for cell in _cells(choices, platform, registry)]
    shown = [cell.pop("shown") or ", ".join(cell["violations"]) for cell in cells]
    if as_json:
        print_json("hicache.check-matrix/1", **choices.choices, cells=cells)
    else:
        step = len(LAYOUTS)
        rows = [
            [cells[at]["platform"], cells[at]["group"], cells[at]["io_backend"], *shown[at : at + step]]
            for at in range(0, len(cells), step)
        ]
        print_table("what works", ["platform", "group", "io_backend", *LAYOUTS], rows)
    sys.exit(0 if any(cell["answer"] != Outcome.NO.value for cell in cells) else 1)
