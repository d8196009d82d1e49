"""``hicache plugins``, ``hicache models`` and ``hicache describe``: what is installed and what it can do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from hicache_core.cli.live import show_live
from hicache_core.cli.output import json_option, print_json, print_table
from hicache_core.models import Model, load_model, model_names
from hicache_core.plugins import PluginRegistry, load_plugins
from hicache_core.spec import PLATFORMS, PoolSpec, platform_named


@click.command()
@json_option
def plugins(as_json: bool) -> None:
    """List plugins, their distributions and what they bring, and why any was refused."""
    registry = load_plugins()
    loaded: list[dict[str, Any]] = [
        {
            "plugin": plugin.name,
            "distribution": plugin.distribution,
            "state": "loaded",
            "families": [f.name for f in plugin.families],
            "platforms": [platform.name for platform in plugin.platforms],
            "allocators": sorted(plugin.allocators),
            "api": sorted({f.api for f in plugin.families}),
        }
        for plugin in registry.plugins
    ]
    refused: list[dict[str, Any]] = [
        {"plugin": r.name, "distribution": r.distribution, "state": "refused", "reason": str(r.error)}
        for r in registry.refused
    ]
    if as_json:
        print_json("hicache.plugins/1", plugins=loaded + refused)
        return
    print_table(
        "plugins",
        ["plugin", "distribution", "state", "hook API", "brings"],
        [
            (
                p["plugin"],
                p["distribution"],
                p["state"],
                ", ".join(f"{low} to {high}" for low, high in p.get("api", [])),
                p.get("reason") or _brought(p),
            )
            for p in (*loaded, *refused)
        ],
    )


def _brought(plugin: dict[str, Any]) -> str:
    platforms = [f"platform {name}" for name in plugin["platforms"]]
    allocators = [f"allocator {name}" for name in plugin["allocators"]]
    return ", ".join([*plugin["families"], *platforms, *allocators])


def _model_rows(model: Model) -> Iterator[dict[str, Any]]:
    for variant in model.variants.values():
        for pool in variant.pools:
            yield {
                "model": model.id,
                "variant": variant.name,
                "platforms": list(variant.platforms),
                "pool": pool.pool,
                "family": pool.family,
                "index_space": pool.index_space,
                "layers": len(pool.layer_ids),
                "row_bytes": pool.row_bytes,
                "status": pool.status,
                "source": pool.source,
            }


@click.command()
@click.argument("model", required=False)
@json_option
def models(model: str | None, as_json: bool) -> None:
    """List the models that are known, or every pool of MODEL with its rows and sources."""
    found = [load_model(name) for name in ([model] if model else model_names())]
    if as_json:
        print_json("hicache.models/1", pools=[row for one in found for row in _model_rows(one)])
    elif model:
        columns = ["variant", "pool", "family", "index_space", "layers", "row_bytes", "status", "source"]
        rows = [[row[column] for column in columns] for row in _model_rows(found[0])]
        print_table(f"{found[0].id} ({found[0].name})", columns, rows)
    else:
        print_table(
            "models",
            ["model", "layers", "page", "variants"],
            [(m.id, m.layer_count, m.page_slots or "open", ", ".join(m.variants)) for m in found],
        )


def _specs_of(family: str, registry: PluginRegistry) -> dict[str, PoolSpec]:
    """One declaration for each distinct row of the family in the models, by where it was first met."""
    found: dict[str, PoolSpec] = {}
    seen = set()
    for model in map(load_model, model_names()):
        for variant in model.variants.values():
            for geometry in variant.geometries():
                if geometry.family != family:
                    continue
                spec = registry.spec(geometry)
                rows = (spec.buffers, spec.page_rows)
                if rows not in seen:
                    seen.add(rows)
                    found[f"{model.id}/{variant.name}/{spec.pool}"] = spec
    return found


@click.command()
@click.argument("family", required=False)
@click.option(
    "--live", type=click.Path(path_type=Path), help="Describe the controller that serves on this socket."
)
@click.option(
    "--platform",
    default="cpu-sim",
    show_default=True,
    help=f"One of {', '.join(PLATFORMS)}, or what a plugin brings.",
)
@json_option
def describe(family: str | None, live: Path | None, platform: str, as_json: bool) -> None:
    """Show what FAMILY declares and can do on a platform, or what a running controller is and has decided."""
    if (family is None) == (live is None):
        raise click.UsageError("Give either FAMILY or --live SOCKET.")
    if live is not None:
        show_live(live, as_json)
    else:
        _describe_family(str(family), platform, as_json)


def _describe_family(family: str, platform: str, as_json: bool) -> None:
    registry = load_plugins()
    owner = registry.owner(family)
    facts = platform_named(platform, registry.platforms)
    about = registry.families[family]
    pools: dict[str, dict[str, Any]] = {
        place: {
            "row_bytes": {b.name: b.row_bytes for b in spec.buffers},
            "row_unit": spec.row_unit.value,
            "capabilities": {name: can.as_data() for name, can in registry.capabilities(spec, facts)},
        }
        for place, spec in _specs_of(family, registry).items()
    }
    if as_json:
        print_json(
            "hicache.describe/1",
            family=family,
            plugin=owner.title,
            description=about.description,
            geometry=about.geometry,
            platform=platform,
            pools=pools,
        )
        return
    click.echo(f"{family}, by {owner.title}: {about.description}")
    for name, meaning in about.geometry.items():
        click.echo(f"  {name}: {meaning}")
    if not pools:
        click.echo(
            f"no model has a pool of {family}; of one in a file, `hicache check --pools` says what works"
        )
        return
    print_table(
        f"capabilities on {platform}",
        ["pool", "rows", "capability", "verdict", "value or reason"],
        [
            (
                place,
                ", ".join(f"{name} {size}" for name, size in pool["row_bytes"].items()) or "no bytes",
                name,
                can["verdict"],
                can.get("text") or _shown(can["value"]),
            )
            for place, pool in pools.items()
            for name, can in pool["capabilities"].items()
        ],
    )


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return "" if value is None else str(value)
