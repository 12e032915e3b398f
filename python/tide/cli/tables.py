"""How the commands print: whole cells, also where the output is no terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

# Columns where nobody says how wide a line may be.
_WIDTH = 160


def console() -> Console:
    """A console for results: as wide as the terminal, or as COLUMNS says; see _WIDTH."""
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if known else _WIDTH, highlight=False)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table whose cells wrap and are never shortened; numbers stand right of the first column."""
    made = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        made.add_column(name, overflow="fold", justify="left" if index == 0 else "right")
    for row in rows:
        made.add_row(*(str(cell) for cell in row))
    return made


def words(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table of text: all columns stand left."""
    made = table(title, header, rows)
    for column in made.columns:
        column.justify = "left"
    return made


def human_count(count: int, one: str) -> str:
    """`1 node`, `8 nodes`."""
    return f"{count} {one}{'' if count == 1 else 's'}"


def human_topology(report: dict[str, Any]) -> str:
    """`2 nodes x 8 ranks`."""
    nodes, local = report["nodes"], report["local_ranks"]
    return f"{human_count(nodes, 'node')} x {human_count(local, 'rank')}"


def human_bytes(count: int) -> str:
    """`12.5 MiB`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.4g} {unit}"


def fail(command: str, message: object) -> NoReturn:
    """Says what is wrong on stderr and ends with exit code 2, as typer does for a bad option."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"tide {command}: {message}", markup=False
    )
    raise typer.Exit(2)
