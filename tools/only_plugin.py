"""only_plugin.py SITE DISTRIBUTION: fails unless hicache comes from SITE and registers that plugin alone."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path

import hicache_core
from hicache_core.plugins import load_plugins


def main(site: str, distribution: str) -> str | None:
    """What is wrong, or None."""
    origin = Path(str(hicache_core.__file__)).resolve()
    if not origin.is_relative_to(Path(site).resolve()):
        return f"hicache_core comes from {origin}, expected it under {site}"
    found = sorted({point.dist.name for point in entry_points(group="hicache.pools") if point.dist})
    if found != [distribution]:
        return f"plugins found: {found}, expected {distribution} alone"
    load_plugins(strict=True)
    return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
