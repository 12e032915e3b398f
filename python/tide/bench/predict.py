"""Rows that benches on GPUs have measured, beside what the simulator says of the same calls.

content = json.loads(Path("bench/results/h200x2-all-gather.json").read_text())
for row in compare(content):
    print(row["measured_ms"], row["predicted_ms"])
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    try:
        names = {str(gpu["name"]) for gpu in environment["gpus"]}
    except (KeyError, TypeError):
        raise ValueError("environment.gpus: expected a list of objects with a name") from None
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
    kept = _kept_landings(row, mode)
    said = _core.simulate_step(json.dumps(request), *times, kept=kept > 0, slots=max(kept, 2))
    return json.loads(said)["rows"][0]


def _kept_landings(row: Mapping[str, Any], mode: str) -> int:
    """Of how many layers the backward of the measured steps found the landings; 0 in older rows."""
    groups = row.get("reports", {}).get(mode, {}).get("groups", [])
    return sum(1 for group in groups if group.get("refreshed"))


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


# What a row of each kind must hold.
_COLLECTIVE_FIELDS = {"preset": str, "ranks": int, "nodes": int, "gpus": int, "tide_ms": float}
_STEP_FIELDS = {"model": str, "tokens": int, "ranks": int}
_STEP_TIMES = ("nothing_ms", *(f"{mode}_ms" for mode in _MODES))
_WANTED = {str: "a string", int: "a positive integer", float: "positive milliseconds"}
_MOST = 1e9  # of any number in a row


def _check_field(row: Mapping[str, Any], name: str, kind: type) -> None:
    value = row.get(name)
    if kind is str:
        good = isinstance(value, str)
    else:
        # JSON has whole milliseconds, too; a bool is an int in Python.
        kinds = (int, float) if kind is float else int
        good = isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < _MOST
    if not good:
        raise ValueError(f"{name}: expected {_WANTED[kind]}, got {json.dumps(value)}")


def _check_name(row: Mapping[str, Any], name: str, known: Mapping[str, Any]) -> None:
    if row[name] not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {row[name]!r}")


def _check_collective(row: Mapping[str, Any]) -> None:
    for name, kind in _COLLECTIVE_FIELDS.items():
        _check_field(row, name, kind)
    _check_name(row, "preset", PRESETS)
    if row["ranks"] % row["nodes"] != 0:
        raise ValueError(f"nodes: expected a divisor of {row['ranks']} ranks, got {row['nodes']}")


def _check_steps(row: Mapping[str, Any]) -> None:
    for name, kind in _STEP_FIELDS.items():
        _check_field(row, name, kind)
    _check_name(row, "model", STEP_MODELS)
    for name in _STEP_TIMES:
        if name in row:
            _check_field(row, name, float)
    try:
        if "nothing_ms" in row:
            _optimizer_ms(row)
    except (KeyError, TypeError, ValueError, AttributeError):
        wanted = "the kernels of the system 'nothing', as the bench writes them"
        raise ValueError(f"profiles: expected {wanted}") from None


# By what a bench calls itself: the check of a row, and what is made of it.
_KINDS = dict.fromkeys(OPERATIONS, (_check_collective, _collective))
_KINDS |= {"train": (_check_steps, _steps)}


def _rows_of(content: Any) -> list[Mapping[str, Any]]:
    """The checked rows that can be compared; none of what no bench on GPUs has written."""
    if not isinstance(content, dict) or not {"environment", "rows"} <= content.keys():
        return []
    rows, place = content["rows"], content["environment"]
    if not isinstance(rows, list) or not isinstance(place, dict):
        raise ValueError("expected a list 'rows' and an object 'environment'")
    variables = place.get("variables", {})
    if not isinstance(variables, dict) or not all(isinstance(v, str) for v in variables.values()):
        raise ValueError("environment.variables: expected an object of strings")
    checked = []
    for index, row in enumerate(rows):
        kind = row.get("op") if isinstance(row, dict) else None
        if not isinstance(kind, str):
            raise ValueError(f"rows[{index}]: expected an object with the field 'op'")
        if kind not in _KINDS:
            continue
        try:
            _KINDS[kind][0](row)
        except ValueError as error:
            raise ValueError(f"rows[{index}].{error}") from None
        checked.append(row)
    return checked


def compare(content: Any, machine: Any = None) -> list[dict[str, Any]]:
    """Predicts every collective and training step in a file of a bench on GPUs.

    Args:
        content: of the file that `python -m tide.bench.gpu ... --json` writes. Rows of other
            benches, and other files, are left out.
        machine: a preset's name or a model as a dict; by default that of the file's GPUs.

    Returns:
        One row a call: measured and predicted milliseconds and predicted / measured; None and a
        reason where ranks share a GPU, which the simulator does not model. Two rows a step: nothing
        slows compute down, or it is all memory traffic.

    Raises:
        ValueError: a row lacks what the bench writes, or there is no model of the GPUs.
        tide.Error: the machine is no model.
    """
    rows = _rows_of(content)
    if not rows:
        return []
    if machine is None:
        machine = model_of(content["environment"])
    with _variables(content["environment"].get("variables", {})):
        return [made for row in rows for made in _KINDS[row["op"]][1](row, machine)]
