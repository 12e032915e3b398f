"""Compute time that a collective adds: a burst alone, then with calls beside it, in turn.

    rows = run(ranks=2, preset="llama70b-layer", rounds=15)

The burst is timed by events on its own stream. Bursts and calls start together on all ranks; a
round counts its slowest rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from tide.bench.collectives import OPERATIONS, PRESETS
from tide.bench.gpu import machine
from tide.bench.gpu.collectives import check_request
from tide.bench.gpu.contestants import MAKERS, Body
from tide.bench.gpu.rank import Rank, next_spin
from tide.bench.launch import Context, launch
from tide.calibration.victims import make_victims
from tide.stats import median_interval, slowest

BURST_MS = 22.0
CALLS = 2  # beside one burst
_PATHS = ("tide", "nccl", "stock")
_WARM_UP = 2
_FIRST_SPIN_MS = 10.0
_CALIBRATION_RUNS = 10


@dataclass(frozen=True)
class Config:
    """What every rank is told."""

    preset: str
    rounds: int
    gpus: int


@dataclass
class Burst:
    """A victim, `count` times in a row."""

    body: Body
    count: int

    def run(self) -> None:
        """Enqueues the burst on the current stream."""
        for _ in range(self.count):
            self.body()


def burst_count(run_ms: float) -> int:
    """How many runs of `run_ms` make a burst."""
    return max(1, round(BURST_MS / run_ms))


class _Meter:
    """Times bursts on one rank."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._compute = torch.cuda.Stream()
        self._spin_ms = _FIRST_SPIN_MS
        self.not_hidden = 0

    def burst(self, body: Body) -> Burst:
        """Returns a burst of the same number of runs on all ranks. Collective."""
        runs = Burst(body, _CALIBRATION_RUNS)
        self.measure(runs, None)
        return Burst(body, self._rank.agree(burst_count(self.measure(runs, None) / runs.count)))

    def measure(self, burst: Burst, beside: Body | None) -> float:
        """Milliseconds of the burst, with CALLS calls beside it if there is a body. Collective."""
        rank, compute = self._rank, self._compute
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin = time.perf_counter()
        with torch.cuda.stream(compute):
            rank.spin(self._spin_ms)
            rank.align()
        rank.stream.wait_stream(compute)
        with torch.cuda.stream(rank.stream):
            for _ in range(CALLS if beside is not None else 0):
                beside()
        with torch.cuda.stream(compute):
            start.record()
            burst.run()
            end.record()
        enqueue_ms = 1e3 * (time.perf_counter() - begin)
        rank.synchronize()
        hidden, self._spin_ms = next_spin(self._spin_ms, enqueue_ms)
        self.not_hidden += not hidden
        return start.elapsed_time(end)


def _measure_victim(
    rank: Rank, meter: _Meter, body: Body, bodies: dict[str, Body], rounds: int
) -> dict[str, Any]:
    burst = meter.burst(body)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in bodies}
    for index in range(_WARM_UP + rounds):
        if index == _WARM_UP:
            meter.not_hidden = 0
        for name, beside in bodies.items():
            pair = meter.measure(burst, None), meter.measure(burst, beside)
            if index >= _WARM_UP:
                times[name].append(pair)
    return {"count": burst.count, "not_hidden": meter.not_hidden, "times": times}


def _worker(context: Context, config: Config) -> dict[str, Any]:
    rank = Rank(context, config.gpus, nodes=1)
    bodies: dict[str, Body] = {}
    for operation in OPERATIONS:
        collective = MAKERS[operation](rank, PRESETS[config.preset], operation)
        collective.check()
        bodies |= {
            f"{operation} {path}": body
            for path, body in collective.bodies.items()
            if path in _PATHS
        }
    for body in bodies.values():
        rank.run(body)
    meter = _Meter(rank)
    results = {}
    victims = make_victims(rank.device)
    rank.synchronize()
    for victim, body in victims.items():
        results[victim] = _measure_victim(rank, meter, body, bodies, config.rounds)
        if context.rank == 0:
            context.progress(victim)
    rank.close()
    return results


def added(measured: list[list[tuple[float, float]]]) -> dict[str, Any]:
    """The numbers of a row from `measured[rank][round]`, pairs of (alone, beside) in ms."""
    alone = slowest([[pair[0] for pair in own] for own in measured])
    beside = slowest([[pair[1] for pair in own] for own in measured])
    a_call = [(b - a) / CALLS for a, b in zip(alone, beside, strict=True)]
    percent = [100 * more / a for more, a in zip(a_call, alone, strict=True)]
    return {
        "alone_ms": median(alone),
        "beside_ms": median(beside),
        "added_ms_a_call": median(a_call),
        "added_ms_a_call_95": median_interval(a_call),
        "added_percent_a_call": median(percent),
        "added_percent_a_call_95": median_interval(percent),
        "rounds_ms": {"alone": alone, "beside": beside},
    }


def run(
    ranks: int | None,
    preset: str = "llama70b-layer",
    rounds: int = 15,
    on_progress: Callable[[Any], None] | None = None,
) -> list[dict[str, Any]]:
    """Measures what calls on one preset add to each victim.

    Args:
        ranks: processes; by default one a GPU, at least two.
        preset: a key of PRESETS.
        rounds: measured pairs for each victim and contestant.
        on_progress: called after every victim.

    Returns:
        A row for each victim, collective and contestant.

    Raises:
        ValueError: an unknown preset, or numbers that don't fit.
        LaunchError: no GPU, or a rank failed.
    """
    check_request(preset, ranks if ranks is not None else 2, rounds, nodes=1)
    gpus = machine.count_gpus()
    ranks = machine.default_ranks(gpus) if ranks is None else ranks
    variables = machine.variables(ranks, gpus)
    results = launch(_worker, ranks, Config(preset, rounds, gpus), on_progress, variables)
    rows = []
    for victim, measured in results[0].items():
        for name in measured["times"]:
            operation, path = name.split(" ")
            numbers = added([result[victim]["times"][name] for result in results])
            rows.append(
                {
                    "op": "interference",
                    "victim": victim,
                    "collective": operation,
                    "path": path,
                    "preset": preset,
                    "ranks": ranks,
                    "gpus": min(ranks, gpus),
                    "runs": measured["count"],
                    "calls": CALLS,
                    "not_hidden": sum(result[victim]["not_hidden"] for result in results),
                    **numbers,
                }
            )
    return rows
