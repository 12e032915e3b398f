"""What a call makes the GPU and the driver do, as torch's profiler sees it on rank 0.

    rows = run(ranks=2, preset="llama70b-layer")

SM time of a call: the sum over its kernels of duration x min(blocks of the grid, multiprocessors).
A kernel that waits for a peer holds its multiprocessors, too. The profiler sees CUDA's runtime and
the driver's launches, not the driver's memory operations.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tide.bench.collectives import OPERATIONS, PRESETS
from tide.bench.gpu import machine
from tide.bench.gpu.collectives import check_request
from tide.bench.gpu.contestants import MAKERS, Body, split_rows
from tide.bench.gpu.rank import Rank
from tide.bench.launch import Context, launch

PARTS = (1, 10)  # each tensor of the preset as it is, and cut in ten
CALLS = 10
_PATHS = ("tide", "nccl", "stock")
_WARM_UP = 3
_MARK = "one call"
_SPIN_MS = 20.0
_SPIN_KERNEL = "spin_kernel"  # of torch.cuda._sleep
# TIDE's kernels compute; none of them only moves data.
_COMPUTING = ("tide_sum", "tide_land", "tide_zero")

Events = list[dict[str, Any]]


@dataclass(frozen=True)
class Config:
    """What every rank is told."""

    preset: str
    gpus: int


def _calls_of_host(events: Events) -> list[str]:
    """Names of the API calls inside the marks, of the thread that set them."""
    marks = [e for e in events if e.get("cat") == "user_annotation" and e.get("name") == _MARK]
    inside = [
        e
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver")
        and any(mark["ts"] <= e["ts"] < mark["ts"] + mark["dur"] for mark in marks)
    ]
    threads = {mark["tid"] for mark in marks}
    own = [e for e in inside if e["tid"] in threads]
    # Some versions number threads of API calls in another way: then all threads count.
    return [e["name"] for e in own or inside]


def _kernel_blocks(kernel: dict[str, Any]) -> int:
    return math.prod(kernel["args"]["grid"])


def _short(name: str) -> str:
    """A kernel's name without template arguments and parameters."""
    head = name.removeprefix("void ").replace("(anonymous namespace)", "{anonymous}")
    return head.split("<")[0].split("(")[0]


def summarise(events: Events, calls: int, multiprocessors: int) -> dict[str, Any]:
    """The numbers of a row from the events of a trace in which `calls` calls were made."""
    device = [e for e in events if _SPIN_KERNEL not in e.get("name", "")]
    kernels = [e for e in device if e.get("cat") == "kernel"]
    copies = [e["name"] for e in device if e.get("cat") == "gpu_memcpy"]
    by_name = Counter(_short(kernel["name"]) for kernel in kernels)
    api = Counter(_calls_of_host(events))
    if not api:
        raise RuntimeError(
            "the profiler saw no call of CUDA's API, where every contestant makes some: expected "
            "a torch with CUPTI, and no other profiler on this process"
        )
    others = [k for k in kernels if not any(name in k["name"] for name in _COMPUTING)]
    sm_us = sum(k["dur"] * min(_kernel_blocks(k), multiprocessors) for k in kernels)
    return {
        "sm_ms": sm_us / 1e3 / calls,
        "kernel_ms": sum(k["dur"] for k in kernels) / 1e3 / calls,
        "kernels": len(kernels) / calls,
        "other_kernels": len(others) / calls,
        "copies": len(copies) / calls,
        "copies_from_host": sum("HtoD" in name for name in copies) / calls,
        "synchronisations": sum(n for name, n in api.items() if "Synchronize" in name) / calls,
        "api_calls": sum(api.values()) / calls,
        "api_calls_by_name": {name: n / calls for name, n in sorted(api.items())},
        "kernels_by_name": {name: n / calls for name, n in sorted(by_name.items())},
    }


def _trace(rank: Rank, body: Body) -> Events:
    """Events of CALLS calls, behind a spin. The other ranks make theirs at the same time."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        _make_calls(rank, body)
    with tempfile.TemporaryDirectory(prefix="tide-") as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return json.loads(file.read_text())["traceEvents"]


def _make_calls(rank: Rank, body: Body) -> None:
    # The profiler takes its time to start; then all ranks go on together.
    rank.comm.barrier()
    with torch.cuda.stream(rank.stream):
        rank.spin(_SPIN_MS)
        for _ in range(CALLS):
            with record_function(_MARK):
                body()
    rank.synchronize()


def _profile(rank: Rank, body: Body, multiprocessors: int) -> dict[str, Any] | None:
    for _ in range(_WARM_UP):
        rank.run(body)
    if rank.rank != 0:
        _make_calls(rank, body)
        return None
    return summarise(_trace(rank, body), CALLS, multiprocessors)


def _worker(context: Context, config: Config) -> list[dict[str, Any]]:
    rank = Rank(context, config.gpus, nodes=1)
    multiprocessors = torch.cuda.get_device_properties(rank.device).multi_processor_count
    rows = []
    for parts in PARTS:
        shapes = split_rows(PRESETS[config.preset], parts)
        for operation in OPERATIONS:
            collective = MAKERS[operation](rank, shapes, f"{operation} of {len(shapes)}")
            collective.check()
            for path in _PATHS:
                if path not in collective.bodies:
                    continue
                numbers = _profile(rank, collective.bodies[path], multiprocessors)
                about = {"op": "sm-time", "collective": operation, "path": path}
                rows.append({**about, "tensors": len(shapes), **(numbers or {})})
    rank.close()
    return rows


def run(
    ranks: int | None,
    preset: str = "llama70b-layer",
    on_progress: Callable[[Any], None] | None = None,
) -> list[dict[str, Any]]:
    """Profiles every contestant on the preset and on the preset with its tensors cut in ten.

    Args:
        ranks: processes; by default one a GPU, at least two.
        preset: a key of PRESETS.
        on_progress: not used: nothing is repeated.

    Returns:
        A row for each number of tensors, collective and contestant; numbers are per call.

    Raises:
        ValueError: an unknown preset, or too few ranks.
        LaunchError: no GPU, or a rank failed.
    """
    check_request(preset, ranks if ranks is not None else 2, rounds=1, nodes=1)
    gpus = machine.count_gpus()
    ranks = machine.default_ranks(gpus) if ranks is None else ranks
    variables = machine.variables(ranks, gpus)
    rows = launch(_worker, ranks, Config(preset, gpus), on_progress, variables)[0]
    where = {"preset": preset, "ranks": ranks, "gpus": min(ranks, gpus)}
    return [{**row, **where} for row in rows]
