"""The ``hicache`` command: exit 0 good, 1 the answer is no, 2 misuse or unreadable input."""

from __future__ import annotations

import importlib
import sys

import click

from hicache_core import __version__
from hicache_core.errors import HiCacheError

_COMMANDS = {
    "plugins": "introspection",
    "models": "introspection",
    "describe": "introspection",
    "check": "check",
    "plan": "plan",
    "doctor": "doctor",
    "trace": "trace",
    "replay": "replay",
}
"""The module of each command; it is imported when the command is asked for, so that none waits for others."""


class _Commands(click.Group):
    """Turns every error of hicache into two lines and exit code 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the commands."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name; None where there is none."""
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"{__name__}.{_COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except HiCacheError as error:
            click.echo(f"hicache: [{error.code}] {error.who}: got {error.got}", err=True)
            click.echo(f"  expected {error.expected}. {error.remedy}", err=True)
            sys.exit(2)
        except BrokenPipeError:
            sys.exit(0)
        except OSError as error:
            # 1 would read as an answer, and that is what could not be written.
            click.echo(f"hicache: {error.filename or 'output'}: {error.strerror or error}", err=True)
            sys.exit(2)


@click.group(cls=_Commands)
@click.version_option(__version__, prog_name="hicache")
def main() -> None:
    """Host pools for a hierarchical KV cache: what is there, what works, and a replay that proves it."""
