"""FSDP2 training steps on GPUs: stock, TIDE in its modes, one collective alone, and none at all.

    rows = run("moe", tokens=2048, systems=SYSTEMS, rounds=3)

All systems take turns in one process, enabled and disabled on one model, so that clocks and
placement are the same for all. ``nothing`` is TIDE with both collectives left out: the step that no
communication could beat. Overhead removed = (stock - system) / (stock - nothing).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from tide.bench.launch import Context, launch

MODELS = ("moe", "dense")
SYSTEMS = ("stock", "in_place", "slot_reuse", "all_gather", "reduce_scatter", "nothing")
_TIMED = 5
_WARM_UP = 2
_GIB = 1 << 30


@dataclass(frozen=True)
class Config:
    """What every rank is told.

    Attributes:
        model: "moe" (12 layers of 128 experts) or "dense" (6 blocks of width 8192).
        layers: 0 for the model's own number.
        tokens: tokens a GPU and step.
        systems: some of SYSTEMS.
        rounds: turns of each system; every turn times a few steps after a warm-up.
        profile: also count kernels and copies of one step of each system.
        trace: with profile, a folder for rank 0's Chrome traces, one a system; empty for none.
    """

    model: str
    layers: int
    tokens: int
    systems: tuple[str, ...]
    rounds: int
    profile: bool = False
    trace: str = ""


class _Silent:
    """A communicator whose collectives move nothing."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def all_gather(self, *args: Any, **kwargs: Any) -> None:
        """Leaves in the landing what lies there."""

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> None:
        """Leaves the output as it is."""


@contextlib.contextmanager
def _system(model: Any, name: str) -> Iterator[Any]:
    """Runs the body with the model's collectives on ``name``; yields the handle or None."""
    import tide

    if name == "stock":
        yield None
        return
    collectives = (name,) if name in ("all_gather", "reduce_scatter") else COLLECTIVES
    mode = name if name in ("in_place", "slot_reuse") else "in_place"
    strict = len(collectives) == len(COLLECTIVES)
    with tide.enable(model, mode=mode, collectives=collectives, strict=strict) as handle:
        channels = {id(c): c for c in handle.channels}.values() if name == "nothing" else ()
        cores = [(channel, channel.core) for channel in channels]
        for channel, core in cores:
            channel.core = _Silent(core)
        try:
            yield handle
        finally:
            for channel, core in cores:
                channel.core = core


COLLECTIVES = ("all_gather", "reduce_scatter")


def _step(model: Any, optimizer: Any, batch: Any) -> Any:
    loss = model(batch).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _timed_steps(step: Callable[[], Any], count: int) -> list[float]:
    """Milliseconds of each step, on the stream of the step, one synchronisation a step."""
    import torch

    times = []
    for _ in range(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times


def profile_step(step: Callable[[], Any], trace: str = "") -> dict[str, Any]:
    """Runs one step under the profiler, and writes the Chrome trace to the file ``trace``.

    Returns:
        "kernels": {name: [launches, milliseconds]} of the twenty longest, "launches" and
        "kernel_ms" in all, "copies": {name: [calls, milliseconds]}.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        step()
        torch.cuda.synchronize()
    if trace:
        profiler.export_chrome_trace(trace)
    kernels: dict[str, list[float]] = {}
    copies: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        table = copies if event.name.startswith(("Memcpy", "Memset")) else kernels
        entry = table.setdefault(event.name[:120], [0, 0.0])
        entry[0] += 1
        entry[1] += event.device_time / 1e3 if hasattr(event, "device_time") else 0.0
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:20]
    return {
        "kernels": dict(longest),
        "launches": sum(int(n) for n, _ in kernels.values()),
        "kernel_ms": sum(ms for _, ms in kernels.values()),
        "copies": copies,
    }


def _worker(context: Context, config: Config) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from tide.bench.gpu_models import build

    torch.cuda.set_device(context.rank % torch.cuda.device_count())
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    mesh = DeviceMesh.from_group(group, "cuda")
    model = build(config.model, mesh, config.layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=True)
    torch.manual_seed(context.rank)
    width = model[0].norm.weight.shape[-1]
    batch = torch.randn(config.tokens, width, device="cuda", dtype=torch.bfloat16)

    def step() -> Any:
        return _step(model, optimizer, batch)

    times: dict[str, list[float]] = {name: [] for name in config.systems}
    profiles: dict[str, Any] = {}
    reports: dict[str, Any] = {}
    for index in range(config.rounds):
        for name in config.systems:
            with _system(model, name) as handle:
                for _ in range(_WARM_UP):
                    step()
                torch.cuda.synchronize()
                dist.barrier(group)
                torch.cuda.reset_peak_memory_stats()
                times[name] += _timed_steps(step, _TIMED)
                if config.profile and index == 0:
                    wanted = config.trace and context.rank == 0
                    profiles[name] = profile_step(
                        step, f"{config.trace}/{name}.json" if wanted else ""
                    )
                if handle is not None:
                    reports[name] = handle.report().as_dict()
                torch.cuda.synchronize()
        if context.rank == 0:
            context.progress(index)
    free, total = torch.cuda.mem_get_info()
    return {
        "times": times,
        "profiles": profiles,
        "reports": reports,
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / _GIB,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / _GIB,
        "device_gib": (total - free) / _GIB,
    }


def run(
    model: str,
    tokens: int,
    systems: tuple[str, ...] = SYSTEMS,
    rounds: int = 3,
    ranks: int = 2,
    layers: int = 0,
    profile: bool = False,
    trace: str = "",
    on_progress: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    """Measures one point.

    Returns:
        A row: the configuration; "step_ms": the median of each system on the slowest rank;
        "overhead_removed" of each system if stock and nothing are among them; "samples_ms", and
        memory at the end of the process, of rank 0. Memory means something if there is one system.

    Raises:
        ValueError: an unknown model or system. LaunchError: a rank failed.
    """
    if model not in MODELS:
        raise ValueError(f"expected a model of {MODELS}, got {model!r}")
    if unknown := set(systems) - set(SYSTEMS):
        raise ValueError(f"expected systems of {SYSTEMS}, got {sorted(unknown)}")
    config = Config(model, layers, tokens, tuple(systems), rounds, profile, trace)
    results = launch(_worker, ranks, config, on_progress)
    samples = {
        name: [max(step) for step in zip(*(r["times"][name] for r in results), strict=True)]
        for name in systems
    }
    step_ms = {name: median(values) for name, values in samples.items()}
    row: dict[str, Any] = {"op": "train", "ranks": ranks, **asdict(config), "step_ms": step_ms}
    if "stock" in step_ms and "nothing" in step_ms:
        overhead = step_ms["stock"] - step_ms["nothing"]
        row["overhead_removed"] = {
            name: (step_ms["stock"] - value) / overhead for name, value in step_ms.items()
        }
    first = results[0]
    memory = ("peak_allocated_gib", "peak_reserved_gib", "device_gib")
    return {
        **row,
        "samples_ms": samples,
        **{name: first[name] for name in memory},
        "profiles": first["profiles"],
        "reports": first["reports"],
    }
