"""The benches on GPUs by name, for both command lines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tide.bench.gpu import collectives, interference, machine, report, sm_time, train
from tide.bench.launch import check_output

PRESET = "llama70b-layer"


@dataclass(frozen=True)
class Request:
    """What the user asked for; None and 0 stand for each bench's own."""

    ranks: int | None = None
    nodes: int = 0
    preset: str = PRESET
    rounds: int = 0
    json_file: Path | None = None
    # Of train alone, whose preset is a model.
    tokens: tuple[int, ...] = ()
    systems: tuple[str, ...] = ()
    trace: str = ""


def _collective(operation: str, request: Request) -> Callable[..., list[dict[str, Any]]]:
    rounds = request.rounds or 20
    return partial(collectives.run, operation, request.ranks, request.preset, rounds, request.nodes)


def _interference(request: Request) -> Callable[..., list[dict[str, Any]]]:
    return partial(interference.run, request.ranks, request.preset, request.rounds or 15)


def _sm_time(request: Request) -> Callable[..., list[dict[str, Any]]]:
    return partial(sm_time.run, request.ranks, request.preset)


def _train(request: Request) -> Callable[..., list[dict[str, Any]]]:
    model = "moe" if request.preset == PRESET else request.preset
    wanted = (request.tokens, request.systems, request.rounds or 2, request.trace)
    return partial(train.run, request.ranks, model, *wanted)


COMMANDS: dict[str, Callable[[Request], Callable[..., list[dict[str, Any]]]]] = {
    "all-gather": partial(_collective, "all-gather"),
    "reduce-scatter": partial(_collective, "reduce-scatter"),
    "interference": _interference,
    "sm-time": _sm_time,
    "train": _train,
}


def run(name: str, request: Request) -> list[dict[str, Any]]:
    """Runs a bench, prints its rows and writes them to the request's file.

    Raises:
        ValueError: arguments that don't fit.
        LaunchError: no GPU, or a rank failed.
    """
    file = request.json_file
    check_output(file)
    print(f"{name}, {request.preset} ...", file=sys.stderr, flush=True)
    rows = COMMANDS[name](request)()
    print(report.as_text(rows), flush=True)
    if file is not None:
        gpus = machine.count_gpus()
        ranks = request.ranks or machine.default_ranks(gpus)
        environment = machine.describe(machine.variables(ranks, gpus))
        report.write(file, environment, rows)
    return rows
