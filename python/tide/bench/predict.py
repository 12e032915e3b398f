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
_MODES = ("in_place", "slot_reuse")
# Memory traffic of compute, GB/s: none, or all that an elementwise kernel reaches on an H200.
_COMPUTE = (0.0, 4100.0)
# Layers, and shapes of the tensors of one, of tide.bench.gpu.models.
STEP_MODELS: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "moe": (12, [(2048, 1), *[(2048, 2048)] * 2, (128, 2048 * 1536), (128, 768 * 2048)]),
    "dense": (6, [(8192, 1), *[(8192, 8192)] * 2, *[(28672, 8192)] * 2, (8192, 28672)]),
}


def group(name: str, shapes: list[tuple[int, int]], shard_dtype: str = "bf16") -> dict[str, Any]:
    """A group gathered in bf16, as the core's requests have it."""
    params = [
        {
            "name": f"p{i}",
            "rows": rows,
            "row_elems": columns,
            "dtype": "bf16",
            "shard_dtype": shard_dtype,
        }
        for i, (rows, columns) in enumerate(shapes)
    ]
    return {"name": name, "params": params}


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
        "groups": [group(row["preset"], PRESETS[row["preset"]])],
        "nodes": row["nodes"],
        "local_ranks": row["ranks"] // row["nodes"],
        "machine": machine,
    }
    return json.loads(_core.simulate(json.dumps(request), row["op"]))["rows"][0]


def _optimizer_ms(row: Mapping[str, Any]) -> float:
    """The optimizer's kernels in the step without collectives."""
    kernels = row["profiles"]["nothing"]["kernels"]
    return sum(ms for name, (_, ms) in kernels.items() if "multi_tensor_apply" in name)


def predict_step(
    row: Mapping[str, Any], mode: str, compute_gb_per_s: float, machine: Any
) -> dict[str, Any]:
    """Simulates the step of a row; compute is the step without collectives, a third of it forward.

    Args:
        row: of the bench of training steps, with the system "nothing" and its profile.
        mode: "in_place" or "slot_reuse".
        compute_gb_per_s: memory traffic by which collectives slow compute down.
        machine: a preset's name or a model as a dict.
    """
    from tide import _core

    layers, shapes = STEP_MODELS[row["model"]]
    request = {
        "groups": [group(row["model"], shapes, "fp32")],
        "nodes": 1,
        "local_ranks": row["ranks"],
        "machine": machine,
        "options": {"mode": mode},
    }
    optimizer = _optimizer_ms(row)
    layer = (row["nothing_ms"] - optimizer) / layers
    times = (layers, layer / 3, layer * 2 / 3, optimizer, compute_gb_per_s)
    return json.loads(_core.simulate_step(json.dumps(request), *times))["rows"][0]


def _beside(measured_ms: float, said: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "measured_ms": measured_ms,
        "predicted_ms": said["ms"],
        "over_measured": said["ms"] / measured_ms,
        "limited_by": said["limits"][0]["name"],
    }


def _collective(row: Mapping[str, Any], machine: Any) -> list[dict[str, Any]]:
    made = {name: row[name] for name in ("op", "preset", "ranks", "nodes")}
    if row["gpus"] < row["ranks"]:
        why = f"not simulated: {row['ranks']} ranks share {row['gpus']} GPUs"
        missing = {"predicted_ms": None, "over_measured": None, "limited_by": why}
        return [made | {"measured_ms": row["tide_ms"]} | missing]
    return [made | _beside(row["tide_ms"], predict(row, machine))]


def _steps(row: Mapping[str, Any], machine: Any) -> list[dict[str, Any]]:
    made = {"preset": f"{row['model']}, {row['tokens']} tokens", "ranks": row["ranks"], "nodes": 1}
    return [
        {"op": f"step, {mode}"}
        | made
        | _beside(row[f"{mode}_ms"], predict_step(row, mode, traffic, machine))
        | {"compute_gb_per_s": traffic}
        for mode in _MODES
        if f"{mode}_ms" in row and "nothing_ms" in row
        for traffic in _COMPUTE
    ]


def compare(file: Path, machine: Any = None) -> list[dict[str, Any]]:
    """Predicts every collective and training step in a file of a bench on GPUs.

    Args:
        file: as `python -m tide.bench.gpu ... --json` writes it. Rows of other benches, and other
            files, are left out.
        machine: a preset's name or a model as a dict; by default that of the file's GPUs.

    Returns:
        One row a call: measured and predicted milliseconds and predicted / measured; None and a
        reason where ranks share a GPU, which the simulator does not model. Two rows a step: nothing
        slows compute down, or it is all memory traffic.

    Raises:
        ValueError: not JSON, or no model of the GPUs.
        tide.Error: the machine is no model.
    """
    content = json.loads(file.read_text())
    if not isinstance(content, dict) or not {"environment", "rows"} <= content.keys():
        return []
    kinds = {**dict.fromkeys(OPERATIONS, _collective), "train": _steps}
    rows = [row for row in content["rows"] if row["op"] in kinds]
    if rows and machine is None:
        machine = model_of(content["environment"])
    with _variables(content["environment"].get("variables", {})):
        return [made for row in rows for made in kinds[row["op"]](row, machine)]
