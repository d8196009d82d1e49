"""``hicache trace``: make traces and look at them."""

from __future__ import annotations

from pathlib import Path

import click

from hicache_core.cli.output import json_option, print_json, print_table, written_for
from hicache_core.replay.generate import generate_conversation, write_trace
from hicache_core.replay.statistics import inspect_trace


@click.group()
def trace() -> None:
    """Generate and inspect prefix-hash traces."""


@trace.command()
@click.option("--requests", type=click.IntRange(min=1), default=1000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
def generate(requests: int, seed: int, out: Path) -> None:
    """Write a trace with the statistics of a published conversation trace, in Mooncake's schema."""
    with written_for("--out"):
        out.parent.mkdir(parents=True, exist_ok=True)
    written = write_trace(out, generate_conversation(requests, seed))
    click.echo(f"{written} requests in {out}")


@trace.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="TRACE")
@click.option(
    "--lru",
    "capacities",
    type=click.IntRange(min=1),
    multiple=True,
    help="Also the block hit ratio of an LRU of so many blocks; may be given again.",
)
@json_option
def inspect(path: Path, capacities: tuple[int, ...], as_json: bool) -> None:
    """Print the statistics of TRACE (Mooncake or Claude Code, plain or gzip)."""
    statistics = inspect_trace(path, lru_capacities=capacities).to_json_dict()
    if as_json:
        print_json("hicache.trace/1", trace=str(path), **statistics)
        return
    print_table(
        str(path),
        ["figure", "value"],
        [
            (name, _shown(part))
            for name, value in statistics.items()
            for part in (value if isinstance(value, list) else [value])
        ],
    )


def _shown(value: object) -> object:
    return ", ".join(f"{key} {part}" for key, part in value.items()) if isinstance(value, dict) else value
