"""The rows of a bench on GPUs: as text, and in a file beside what they were made with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    if isinstance(value, tuple):  # an interval
        return "..".join(_cell(item) for item in value)
    if isinstance(value, list):
        return ", ".join(_cell(item) for item in value)
    return "-" if value is None else str(value)


def cells(row: Row) -> dict[str, str]:
    """The row as a table shows it: without series and counts by name, which the file has."""
    return {name: _cell(value) for name, value in row.items() if not isinstance(value, Mapping)}


def as_text(rows: Sequence[Row]) -> str:
    """The rows one after the other, a number a line: many columns fit into no terminal."""
    if len(rows) == 1:
        shown = cells(rows[0])
        width = max(map(len, shown))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in shown.items())
    shown = [cells(row) for row in rows]
    names = list(dict.fromkeys(name for row in shown for name in row))
    lines = [names, *([row.get(name, "-") for name in names] for row in shown)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    aligned = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(line.rstrip() for line in aligned)


def write(file: Path, environment: Mapping[str, object], rows: Sequence[Row]) -> None:
    """Writes {"environment": ..., "rows": [...]}."""
    content = {"environment": environment, "rows": rows}
    file.write_text(json.dumps(content, indent=1) + "\n")
