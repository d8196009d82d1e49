"""What the commands share: tables for people, JSON with a schema for machines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON with a versioned schema.")


def print_json(schema: str, **content: Any) -> None:
    """Print a JSON object that names its schema first."""
    click.echo(json.dumps({"schema": schema, **content}, indent=1))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; cells are shown as text, without markup."""
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console = Console(markup=False, highlight=False)
    # A pipe has no width of its own: lines there are as long as they need to be.
    console.print(table, width=None if console.is_terminal else 200)
