"""Measures a GPU: rates of sums by CTAs, of copies, and the compute time that sums add.

Takes the current stream of the GPU, and 0.8 GB of its memory at most. Sums move as many bytes on
any number of CTAs: those of a reduce-scatter on 2 and 8 ranks, and a cast as the sum of one source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch

from tide import _core
from tide.calibration.gpu import Gpu
from tide.calibration.victims import VICTIMS, Body
from tide.stats import median_interval

# Measured rounds: of the command, and of a training that finds nothing measured.
ROUNDS, QUICK_ROUNDS = 21, 7

SOURCES = (1, 2, 8)
# Read and written by one launch: more than caches hold.
_LAUNCH_BYTES = 256 << 20
# What "added" is of: this many launches, fewer where they take longer than half a burst.
_LAUNCHES = 8
_PARTS = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 1)
_VICTIMS = ("gemm 256x8192x8192", "elementwise 256 MiB")
_BURST_MS = 5.0
_RATE_MS, _RATE_REPETITIONS = 1.0, 3
# About half a millisecond: what is enqueued meanwhile starts together.
_SPIN_CYCLES = 1_000_000
_WARM_UP_RUNS = 10


def cta_counts(multiprocessors: int) -> list[int]:
    """The numbers of CTAs that are measured."""
    return sorted({1, *(max(1, int(part * multiprocessors)) for part in _PARTS)})


class _Sum:
    """A sum over parts of `memory`, as many bytes whatever the number of sources."""

    def __init__(self, memory: torch.Tensor, sources: int) -> None:
        # One source is a cast of fp32 shards; more are bf16 gradients that become fp32.
        source, output = (_core.F32, _core.BF16) if sources == 1 else (_core.BF16, _core.F32)
        source_bytes, output_bytes = (4, 2) if sources == 1 else (2, 4)
        elem_bytes = sources * source_bytes + output_bytes
        elems = _LAUNCH_BYTES // elem_bytes // 1024 * 1024
        self.bytes = elems * elem_bytes
        self._kernel = _core.TimedSum(sources, elems, source, output)
        first = memory.data_ptr()
        rest = first + elems * output_bytes
        self._addresses = [first, *(rest + i * elems * source_bytes for i in range(sources))]

    def launch(self, ctas: int, stream: torch.cuda.Stream) -> None:
        """Enqueues it."""
        self._kernel.launch(self._addresses, ctas, stream.cuda_stream)


def timing_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Returns two events that times lie between."""
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _time(body: Body, stream: torch.cuda.Stream, runs: int) -> float:
    """Milliseconds of a run, of `runs` in a row."""
    start, end = timing_events()
    with torch.cuda.stream(stream):
        start.record()
        for _ in range(runs):
            body()
        end.record()
    end.synchronize()
    return start.elapsed_time(end) / runs


def _median_time(body: Body, stream: torch.cuda.Stream) -> float:
    _time(body, stream, 1)
    runs = max(1, math.ceil(_RATE_MS / _time(body, stream, 1)))
    return median(_time(body, stream, runs) for _ in range(_RATE_REPETITIONS))


def scaled_launches(launch_ms: float, burst_ms: float) -> int:
    """How many launches of so many milliseconds are put beside a burst: half of it at most."""
    return min(_LAUNCHES, max(1, int(burst_ms / 2 / launch_ms)))


def summarise_added(rounds: Sequence[tuple[float, float]], launches: int) -> tuple[float, float]:
    """Milliseconds that all launches add, and the noise, from (alone, beside) of each round."""
    scale = _LAUNCHES / launches
    added = [scale * (beside - alone) for alone, beside in rounds]
    interval = median_interval(added)
    low, high = interval if interval is not None else (min(added), max(added))
    return median(added), (high - low) / 2


class _Bursts:
    """Times bursts of a victim on the current stream, alone and with sums on another one."""

    def __init__(self, device: torch.device, two: _Sum, sums: torch.cuda.Stream) -> None:
        self._device, self._two, self._sums = device, two, sums
        self._compute = torch.cuda.current_stream(device)

    def _measure(self, body: Body, runs: int, ctas: int, launches: int) -> float:
        start, end = timing_events()
        with torch.cuda.stream(self._compute):
            torch.cuda._sleep(_SPIN_CYCLES)
            start.record()
        self._sums.wait_event(start)
        for _ in range(launches):
            self._two.launch(ctas, self._sums)
        with torch.cuda.stream(self._compute):
            for _ in range(runs):
                body()
            end.record()
        torch.cuda.synchronize(self._device)
        return start.elapsed_time(end)

    def added(
        self, body: Body, launch_ms: dict[int, float], rounds: int
    ) -> dict[int, tuple[float, float]]:
        """Milliseconds that the sums add to a burst, and the noise, by CTAs."""
        burst_ms = max(_BURST_MS, 1.6 * max(launch_ms.values()))
        _time(body, self._compute, _WARM_UP_RUNS)
        runs = max(1, round(burst_ms / _time(body, self._compute, _WARM_UP_RUNS)))
        launches = {ctas: scaled_launches(ms, burst_ms) for ctas, ms in launch_ms.items()}
        times: dict[int, list[tuple[float, float]]] = {ctas: [] for ctas in launch_ms}
        for index in range(rounds):
            alone = self._measure(body, runs, ctas=1, launches=0)
            # In turns from both ends: a clock that rises or falls favours none.
            for ctas in sorted(launch_ms, reverse=index % 2 == 1):
                times[ctas].append((alone, self._measure(body, runs, ctas, launches[ctas])))
        return {ctas: summarise_added(pairs, launches[ctas]) for ctas, pairs in times.items()}


def _copy_rate(memory: torch.Tensor, stream: torch.cuda.Stream) -> float:
    half = memory.numel() // 2
    source, target = memory[:half], memory[half : 2 * half]
    ms = _median_time(lambda: target.copy_(source, non_blocking=True), stream)
    return half * memory.itemsize / ms * 1e-6


def _link_rate(memory: torch.Tensor, stream: torch.cuda.Stream) -> float | None:
    """GB/s to another visible GPU that can be reached, one way; None without one.

    Makes a context there.
    """
    own = memory.device.index
    for peer in range(torch.cuda.device_count()):
        if peer == own or not torch.cuda.can_device_access_peer(own, peer):
            continue
        target = torch.empty_like(memory, device=torch.device("cuda", peer))
        ms = _median_time(lambda to=target: to.copy_(memory, non_blocking=True), stream)
        return memory.numel() * memory.itemsize / ms * 1e-6
    return None


@dataclass(frozen=True)
class Measured:
    """What a calibration has found. Rates in GB/s, bytes read plus written for sums."""

    rates: dict[int, dict[int, float]]  # by sources, by CTAs
    local_copy: float
    link: float | None
    # By victim, by CTAs: (ms, noise).
    added: dict[str, dict[int, tuple[float, float]]]
    rounds: int


def _measure(gpu: Gpu, rounds: int, link: bool) -> Measured:
    device = gpu.device
    memory = torch.empty(_LAUNCH_BYTES // 2, device=device, dtype=torch.bfloat16)
    stream = torch.cuda.Stream(device, priority=-1)  # as the fabric's: before compute
    rates: dict[int, dict[int, float]] = {}
    launch_ms: dict[int, float] = {}
    for sources in SOURCES:
        memory.normal_()  # zeros would be faster than data
        torch.cuda.synchronize(device)
        one = _Sum(memory, sources)
        rates[sources] = {}
        for ctas in cta_counts(gpu.multiprocessors):
            ms = _median_time(lambda sums=one, n=ctas: sums.launch(n, stream), stream)
            rates[sources][ctas] = one.bytes / ms * 1e-6
            if sources == 2:
                launch_ms[ctas] = ms
    local_copy = _copy_rate(memory, stream)
    link_rate = _link_rate(memory, stream) if link else None
    memory.normal_()
    bursts = _Bursts(device, _Sum(memory, 2), stream)
    # One victim's memory at a time.
    added = {name: bursts.added(VICTIMS[name](device), launch_ms, rounds) for name in _VICTIMS}
    return Measured(rates, local_copy, link_rate, added, rounds)


def as_machine(measured: Measured, gpu: Gpu) -> dict[str, Any]:
    """The machine file, but for the choice: what differs from the preset, and where it is from."""
    how = f"tide calibrate, {gpu.name}, driver {gpu.driver}"
    two = measured.rates[2]
    of_victims = [
        f"{name}: {', '.join(f'{ms:.3f}' for ms, _ in times.values())}"
        for name, times in measured.added.items()
    ]
    numbers = {
        "multiprocessors": (gpu.multiprocessors, how),
        "hbm_gb_per_s": (max(max(rate.values()) for rate in measured.rates.values()), how),
        "local_copy_gb_per_s": (measured.local_copy, f"{how}: a copy by torch"),
        "sum_gb_per_s": (two[min(two)], f"{how}: a sum of 2"),
    }
    if measured.link is not None:
        numbers["nvlink_gb_per_s"] = (measured.link, f"{how}: a copy by torch, one way")
    added = []
    for ctas in two:
        times = [victim[ctas] for victim in measured.added.values()]
        # Of a mean of independent medians.
        noise = math.hypot(*(noise for _, noise in times)) / len(times)
        added.append([ctas, round(mean(ms for ms, _ in times), 4), round(noise, 4)])
    return {
        "base": gpu.preset,
        "name": gpu.name,
        **{name: round(value, 1) for name, (value, _) in numbers.items()},
        "sum_curves": [
            {"sources": sources, "points": [[ctas, round(rate, 1)] for ctas, rate in rates.items()]}
            for sources, rates in measured.rates.items()
        ],
        "sum_added": added,
        "sources": {
            **{name: source for name, (_, source) in numbers.items()},
            "sum_curves": how,
            "sum_added": f"{how}: sums of 2 that read and write {_LAUNCHES * _LAUNCH_BYTES >> 20} "
            f"MiB, beside bursts; {measured.rounds} rounds; the mean of {'; '.join(of_victims)}",
        },
    }


def measure_machine(gpu: Gpu, rounds: int, link: bool) -> dict[str, Any]:
    """Measures the GPU and returns its machine file, but for the choice.

    Leaves random numbers as they were, and no memory taken; torch's peak statistics may rise by
    what it takes in between, about 0.8 GB, and unused blocks that torch had cached are freed.

    Args:
        gpu: which one; its current stream is used.
        rounds: measured pairs for each number of CTAs and each victim.
        link: also copy to another visible GPU, which makes a context there.

    Raises:
        RuntimeError: out of memory, say.
    """
    random = torch.random.fork_rng(devices=[gpu.device.index], device_type="cuda")
    try:
        with torch.cuda.device(gpu.device), torch.no_grad(), random:
            torch.cuda.synchronize()  # what is under way would be measured, too
            return as_machine(_measure(gpu, rounds, link), gpu)
    finally:
        torch.cuda.empty_cache()
