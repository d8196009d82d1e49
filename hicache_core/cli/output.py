"""What the commands share: tables for people, JSON with a schema for machines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

_PIPE_COLUMNS = 200

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON with a versioned schema.")


def print_json(schema: str, **content: Any) -> None:
    """Print a JSON object that names its schema first."""
    click.echo(json.dumps({"schema": schema, **content}, indent=1))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; cells are shown as text, without markup."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        # A pipe has no width of its own, and 80 columns would fold most cells.
        console.width = _PIPE_COLUMNS
    console.print(table)


@contextmanager
def written_for(option: str) -> Iterator[None]:
    """Report as misuse of ``option`` that its file, or the folder of it, cannot be written."""
    try:
        yield
    except OSError as error:
        raise click.BadParameter(f"{error.filename}: {error.strerror}", param_hint=option) from error
