"""Running ``hicache`` in tests: in this process, or in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from hicache_core.cli import main
from hicache_core.hookspecs import ENTRY_POINT_GROUP
from hicache_core.plugins import PluginRegistry, load_plugins
from hicache_core.replay.generate import generate_conversation, write_trace

COMMAND = [sys.executable, "-c", "from hicache_core.cli import main; main(prog_name='hicache')"]
# What tells rich that a pipe is a terminal, or how wide one is.
FORCED = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES")
REPLAY = {
    "--model": "llama-3.1-8b",
    "--platform": "cpu-sim",
    "--io-backend": "kernel",
    "--layout": "page_first",
    "--device-blocks": "60",
    "--host-blocks": "200",
    "--page-size": "4",
    "--policy": "write_through",
    "--layers": "1",
    "--tokens-per-block": "4",
}


def hicache(*arguments: object) -> Result:
    """Run the command in this process; an exception that it lets out fails the test."""
    environment = dict.fromkeys(FORCED)
    result = CliRunner(env=environment).invoke(main, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def printed_json(*arguments: object) -> dict[str, Any]:
    """The JSON object that a command that succeeds prints."""
    result = hicache(*arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def environment(**changes: str) -> dict[str, str]:
    """The environment of this process without what forces terminals."""
    kept = {name: value for name, value in os.environ.items() if name not in FORCED}
    return {**kept, **changes}


def process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment(),
        timeout=60,
        **options,
    )


def replay_options(**changes: object) -> list[str]:
    """The options of a small replay; ``layout="x"`` stands for ``--layout x``, None leaves one out."""
    options = {**REPLAY, **{f"--{name.replace('_', '-')}": value for name, value in changes.items()}}
    return [str(part) for pair in options.items() if pair[1] is not None for part in pair]


def generated(path: Path, requests: int = 40, seed: int = 1) -> Path:
    """A trace of our own generator."""
    write_trace(path, generate_conversation(requests, seed))
    return path


def registry_without(plugin: str) -> PluginRegistry:
    """The installed plugins but for one."""
    return load_plugins(found=[e for e in entry_points(group=ENTRY_POINT_GROUP) if e.name != plugin])
