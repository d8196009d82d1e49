"""The ``hicache`` command: exit 0 good, 1 the answer is no, 2 misuse or unreadable input."""

from __future__ import annotations

import sys

import click

from hicache_core import __version__
from hicache_core.cli.introspection import describe, models, plugins
from hicache_core.cli.replay import replay
from hicache_core.cli.trace import trace
from hicache_core.errors import HiCacheError


class _Commands(click.Group):
    """Turns every error of hicache into two lines and exit code 2."""

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


@click.group(cls=_Commands)
@click.version_option(__version__, prog_name="hicache")
def main() -> None:
    """Host pools for a hierarchical KV cache: what is there, what works, and a replay that proves it."""


for _command in (plugins, models, describe, trace, replay):
    main.add_command(_command)
