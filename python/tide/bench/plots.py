"""Draws files of the benches on GPUs as SVG; needs matplotlib."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_COLORS = {
    "tide": "#1668a8",
    "stock": "#c8553d",
    "nccl": "#e0a458",
    "nccl_bf16": "#c9b79c",
    "floor": "#8a8f98",
}
_AXES = {"interference": "ms added by a call", "sm-time": "SM-ms a call"}
_BAR_WIDTH = 0.8  # of the place of a group


Bar = tuple[float, float, float]  # value, lower and upper end


def _added(row: Row) -> Bar:
    value = row["added_ms_a_call"]
    low, high = row["added_ms_a_call_95"] or (value, value)
    return value, low, high


def bars(rows: Sequence[Row]) -> dict[str, dict[str, Bar]]:
    """Returns bars by group and contestant.

    Raises:
        ValueError: no rows of a bench on GPUs.
    """
    groups: dict[str, dict[str, Bar]] = {}
    for row in rows:
        if row["op"] == "interference":
            group = groups.setdefault(f"{row['victim']}\n{row['collective']}", {})
            group[row["path"]] = _added(row)
        elif row["op"] == "sm-time":
            group = groups.setdefault(f"{row['collective']}\n{row['tensors']} tensors", {})
            group[row["path"]] = (row["sm_ms"],) * 3
        elif "rounds_ms" in row:
            times = {c: row[f"{c}_ms"] for c in _COLORS if f"{c}_ms" in row}
            groups[f"{row['op']}\n{row['preset']}"] = {c: (ms,) * 3 for c, ms in times.items()}
    if not groups:
        raise ValueError("expected rows of a bench on GPUs, found none")
    return groups


def _add_bars(axes: Any, contestant: str, groups: Sequence[dict[str, Bar]], offset: float) -> None:
    there = [
        (place, group[contestant]) for place, group in enumerate(groups) if contestant in group
    ]
    axes.bar(
        [place + offset for place, _ in there],
        [value for _, (value, _, _) in there],
        _BAR_WIDTH / len(_COLORS),
        yerr=[
            [value - low for _, (value, low, _) in there],
            [high - value for _, (value, _, high) in there],
        ],
        label=contestant,
        color=_COLORS[contestant],
        error_kw={"linewidth": 0.8},
    )


def draw(file: Path) -> Path:
    """Writes an SVG beside a file that a bench on GPUs wrote, and returns its path.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: the file holds no such rows.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("expected matplotlib: pip install 'tide[plot]'") from None
    content = json.loads(file.read_text())
    if not isinstance(content, dict) or "rows" not in content:
        raise ValueError(f"{file}: expected an object with rows, as a bench on GPUs writes it")
    groups = bars(content["rows"])
    contestants = [c for c in _COLORS if any(c in group for group in groups.values())]
    figure = Figure(figsize=(max(4.0, 1.5 * len(groups)), 4.0), layout="constrained")
    axes = figure.add_subplot()
    for i, contestant in enumerate(contestants):
        offset = (i - (len(contestants) - 1) / 2) * _BAR_WIDTH / len(_COLORS)
        _add_bars(axes, contestant, list(groups.values()), offset)
    axes.set_xticks(range(len(groups)), list(groups), fontsize=7)
    axes.set_ylabel(_AXES.get(content["rows"][0]["op"], "ms, median of the slowest rank"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    target = file.with_suffix(".svg")
    figure.savefig(target)
    return target
