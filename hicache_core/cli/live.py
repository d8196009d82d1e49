"""``hicache describe --live``: a running controller, for people and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hicache_core.cli.output import print_json, print_table
from hicache_core.live import read_live


def show_live(path: Path, as_json: bool) -> None:
    """Print what the controller that serves on ``path`` is, and what it has decided so far."""
    found = read_live(path)
    if as_json:
        print_json(found.pop("schema"), **found)
        return
    click.echo(
        f"process {found['process']}: {found['io_backend']} + {found['layout']} on {found['platform']}, "
        f"device {found['device']}, probe {'on' if found['probe'] else 'off'}"
    )
    for condition in found["conditions"]:
        click.echo(f"  proved at start: {condition}")
    print_table(
        "index spaces",
        ["space", "slots of a page", "host pages", "free"],
        [(n, s["page_slots"], s["pages"], s["free_pages"]) for n, s in found["spaces"].items()],
    )
    columns = [
        "pool",
        "family",
        "space",
        "layers",
        "host bytes",
        "registrations",
        "backup",
        "load",
        "indices",
    ]
    print_table("pools", columns, [_pool_row(pool) for pool in found["pools"]])
    noes = [
        (pool["pool"], name, can["code"], can["text"])
        for pool in found["pools"]
        for name, can in pool["capabilities"].items()
        if can["verdict"] == "unsupported"
    ]
    print_table("what pools cannot do", ["pool", "capability", "code", "reason"], noes)
    print_table(
        "decisions",
        ["times", "code", "pool", "reason"],
        [(d["count"], d["code"], d["pool"], d["reason"]) for d in found["decisions"]],
    )
    click.echo(f"index tensors copied from an accelerator: {found['index_synchronisations']}")


def _pool_row(pool: dict[str, Any]) -> tuple[object, ...]:
    moves = pool["moves"] or {}
    staged = " (staged write-back)" if moves.get("staged") else ""
    places = f"{moves['backup_host_indices']}, {moves['load_host_indices']}" if moves else ""
    return (
        pool["pool"] + (" (anchor)" if pool["anchor"] else ""),
        pool["family"],
        pool["index_space"],
        pool["layers"],
        f"{pool['host_bytes']:,}",
        pool["registrations"],
        moves.get("backup", "none") + staged,
        moves.get("load", "none"),
        places,
    )
