"""Rows that benches on GPUs have measured, beside what the simulator says of the same calls.

for row in compare(Path("bench/results/h200x2-all-gather.json")):
    print(row["measured_ms"], row["predicted_ms"])
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tide.bench.collectives import OPERATIONS, PRESETS

# The model of a machine, by a part of what its GPUs call themselves.
_MODELS = {"H200": "h200"}
_PREFIX = "TIDE_"


def group(preset: str) -> dict[str, Any]:
    """The group of a preset in bf16, as the core's requests have it."""
    params = [
        {"name": f"p{i}", "rows": rows, "row_elems": columns, "dtype": "bf16"}
        for i, (rows, columns) in enumerate(PRESETS[preset])
    ]
    return {"name": preset, "params": params}


@contextmanager
def _variables(recorded: Mapping[str, str]) -> Iterator[None]:
    """The TIDE_* variables that a row was measured with, and no others."""
    before = {name: value for name, value in os.environ.items() if name.startswith(_PREFIX)}
    wanted = {name: value for name, value in recorded.items() if name.startswith(_PREFIX)}
    try:
        for name in before:
            del os.environ[name]
        os.environ.update(wanted)
        yield
    finally:
        for name in wanted:
            os.environ.pop(name, None)
        os.environ.update(before)


def model_of(environment: Mapping[str, Any]) -> str:
    """The machine model of the GPUs that a file was measured on.

    Raises:
        ValueError: there is none.
    """
    names = {gpu["name"] for gpu in environment["gpus"]}
    for part, model in _MODELS.items():
        if names and all(part in name for name in names):
            return model
    raise ValueError(f"no model of {', '.join(sorted(names)) or 'no GPU'}; give --machine")


def predict(row: Mapping[str, Any], machine: Any) -> dict[str, Any]:
    """Simulates the call of a row with the options of the environment; a row of `tide sim`."""
    from tide import _core

    request = {
        "groups": [group(row["preset"])],
        "nodes": row["nodes"],
        "local_ranks": row["ranks"] // row["nodes"],
        "machine": machine,
    }
    return json.loads(_core.simulate(json.dumps(request), row["op"]))["rows"][0]


def compare(file: Path, machine: Any = None) -> list[dict[str, Any]]:
    """Predicts every collective in a file of a bench on GPUs.

    Args:
        file: as `python -m tide.bench.gpu ... --json` writes it. Rows of other benches, and other
            files, are left out.
        machine: a preset's name or a model as a dict; by default that of the file's GPUs.

    Returns:
        One row a call: measured and predicted milliseconds and predicted / measured; None and a
        reason where ranks share a GPU, which the simulator does not model.

    Raises:
        ValueError: not JSON, or no model of the GPUs.
        tide.Error: the machine is no model.
    """
    content = json.loads(file.read_text())
    if not isinstance(content, dict) or not {"environment", "rows"} <= content.keys():
        return []
    rows = [row for row in content["rows"] if row["op"] in OPERATIONS]
    if rows and machine is None:
        machine = model_of(content["environment"])
    compared = []
    for row in rows:
        made = {name: row[name] for name in ("op", "preset", "ranks", "nodes")}
        made |= {"measured_ms": row["tide_ms"], "predicted_ms": None, "over_measured": None}
        if row["gpus"] < row["ranks"]:
            made["limited_by"] = f"not simulated: {row['ranks']} ranks share {row['gpus']} GPUs"
        else:
            with _variables(content["environment"]["variables"]):
                said = predict(row, machine)
            made["predicted_ms"] = said["ms"]
            made["over_measured"] = said["ms"] / row["tide_ms"]
            made["limited_by"] = said["limits"][0]["name"]
        compared.append(made)
    return compared
