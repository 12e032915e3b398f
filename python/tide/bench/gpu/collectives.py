"""All-gather and reduce-scatter on GPUs: all contestants in turn, in every round.

    rows = run("all-gather", ranks=2, preset="llama70b-layer", rounds=20)

A call is timed by events on its stream, behind a spin that its enqueueing fits into and a small
collective that lets all ranks start together. A round counts its slowest rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from tide.bench.collectives import OPERATIONS, PRESETS
from tide.bench.gpu import machine
from tide.bench.gpu.contestants import MAKERS, wire_bytes
from tide.bench.gpu.rank import Rank, Sample, Stopwatch
from tide.bench.launch import Context, launch
from tide.stats import in_turn, median_interval, slowest

_WARM_UP = 3


@dataclass(frozen=True)
class Config:
    """What every rank is told; `nodes` 0 is TIDE_NODES, or one."""

    operation: str
    preset: str
    rounds: int
    nodes: int
    gpus: int


def check_request(preset: str, ranks: int, rounds: int, nodes: int) -> None:
    """Raises ValueError for what no bench on GPUs can run."""
    if preset not in PRESETS:
        raise ValueError(f"expected a preset of {sorted(PRESETS)}, got {preset!r}")
    if ranks < 2 or rounds < 1:
        raise ValueError(f"expected ranks >= 2 and rounds >= 1, got {ranks} and {rounds}")
    if nodes < 0 or (nodes > 0 and ranks % nodes != 0):
        raise ValueError(f"expected nodes to divide {ranks} ranks, got {nodes}")


def _worker(context: Context, config: Config) -> dict[str, Any]:
    rank = Rank(context, config.gpus, config.nodes)
    make = MAKERS[config.operation]
    collective = make(rank, PRESETS[config.preset], config.preset)
    collective.check()
    for body in collective.bodies.values():
        rank.run(body)
    watches = {name: Stopwatch(rank, body) for name, body in collective.bodies.items()}
    samples: dict[str, list[Sample]] = {name: [] for name in watches}
    for index in range(_WARM_UP + config.rounds):
        for name in in_turn(list(watches), index):
            sample = watches[name].measure()
            if index >= _WARM_UP:
                samples[name].append(sample)
        if context.rank == 0:
            context.progress(index)
    checks, nodes = collective.check(), rank.comm.nodes
    rank.close()
    return {"samples": samples, "checks": checks, "nodes": nodes}


def ratio(numerators: list[float], denominators: list[float], name: str) -> dict[str, Any]:
    """The median of each round's ratio, and its 95 % interval (None below 6 rounds)."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    return {name: median(ratios), f"{name}_95": median_interval(ratios)}


def compare(measured: list[dict[str, list[Sample]]]) -> dict[str, Any]:
    """The numbers of a row from `measured[rank][contestant][round]`."""
    rounds = {
        name: slowest([[sample.gpu_ms for sample in own[name]] for own in measured])
        for name in measured[0]
    }
    row: dict[str, Any] = {f"{name}_ms": median(times) for name, times in rounds.items()}
    for name in rounds:
        if name == "floor":
            row |= ratio(rounds["tide"], rounds[name], "tide_over_floor")
        elif name != "tide":
            row |= ratio(rounds[name], rounds["tide"], f"{name}_over_tide")
    for name in ("tide", "stock"):
        if name in rounds:
            host = [sample.host_ms for own in measured for sample in own[name]]
            row[f"{name}_host_ms"] = median(host)
    # Times in which the GPU waited for the host.
    samples = [sample for own in measured for series in own.values() for sample in series]
    row["not_hidden"] = sum(not sample.hidden for sample in samples)
    row["rounds_ms"] = rounds
    return row


def run(
    operation: str,
    ranks: int | None,
    preset: str,
    rounds: int = 20,
    nodes: int = 0,
    on_progress: Callable[[Any], None] | None = None,
) -> list[dict[str, Any]]:
    """Measures one operation.

    Args:
        operation: "all-gather" or "reduce-scatter".
        ranks: processes; by default one a GPU, at least two.
        preset: a key of PRESETS; all tensors are bf16.
        rounds: how often each contestant runs, warm-up apart.
        nodes: virtual nodes that the ranks are split into; 0: TIDE_NODES, or one.
        on_progress: called after every round.

    Returns:
        One row; without torch's contestants where ranks share a GPU, without the floor where
        there are several nodes.

    Raises:
        ValueError: an unknown operation or preset, or numbers that don't fit.
        LaunchError: no GPU, or a rank failed, also when TIDE's result was wrong.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"expected one of {OPERATIONS}, got {operation!r}")
    check_request(preset, ranks if ranks is not None else 2, rounds, nodes)
    gpus = machine.count_gpus()
    ranks = machine.default_ranks(gpus) if ranks is None else ranks
    check_request(preset, ranks, rounds, nodes)
    config = Config(operation, preset, rounds, nodes, gpus)
    results = launch(_worker, ranks, config, on_progress, machine.variables(ranks, gpus))
    shapes = PRESETS[preset]
    numbers = compare([result["samples"] for result in results])
    nodes = results[0]["nodes"]
    gbps = wire_bytes(shapes, ranks) / numbers["tide_ms"] / 1e6 if nodes == 1 else None
    return [
        {
            "op": operation,
            "preset": preset,
            "ranks": ranks,
            "gpus": min(ranks, gpus),
            "nodes": nodes,
            "tensors": len(shapes),
            "elements": sum(rows * columns for rows, columns in shapes),
            "tide_wire_gbps": gbps,
            "checks": results[0]["checks"],
            **numbers,
        }
    ]
