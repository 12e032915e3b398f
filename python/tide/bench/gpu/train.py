"""FSDP2 training steps on GPUs: stock, TIDE in its modes, one collective alone, and none at all.

All systems take turns in one process, enabled and disabled on one model, so that clocks and
placement are the same for all. ``nothing`` is TIDE with both collectives left out: the step that no
communication could beat. Overhead removed = (stock - system) / (stock - nothing).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tide.bench.gpu import machine, profiling
from tide.bench.launch import Context, launch

# Tokens a GPU and step.
TOKENS = {"moe": (2048, 4096, 16384), "dense": (1024, 2048, 4096, 8192)}
SYSTEMS = ("stock", "in_place", "slot_reuse", "all_gather", "reduce_scatter", "nothing")
_COLLECTIVES = ("all_gather", "reduce_scatter")
_MODES = ("in_place", "slot_reuse")
_TIMED = 5
_WARM_UP = 2
_GIB = 1 << 30


@dataclass(frozen=True)
class Config:
    """What every rank is told.

    Attributes:
        model: "moe" (12 layers of 128 experts) or "dense" (6 blocks of width 8192).
        tokens: tokens a GPU and step; one point each.
        systems: some of SYSTEMS.
        rounds: turns of each system that count; every turn times a few steps after a warm-up. One
            more turn goes before them: in its first steps torch's allocator is still growing.
        trace: a folder for rank 0's Chrome traces of the first point, one a system; or empty.
        layers: 0 for the model's own number.
    """

    model: str
    tokens: tuple[int, ...]
    systems: tuple[str, ...]
    rounds: int
    trace: str = ""
    layers: int = 0


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
    collectives = (name,) if name in _COLLECTIVES else _COLLECTIVES
    mode = name if name in _MODES else "in_place"
    strict = len(collectives) == len(_COLLECTIVES)
    with tide.enable(model, mode=mode, collectives=collectives, strict=strict) as handle:
        cores = [(channel, channel.core) for channel in handle.channels if name == "nothing"]
        for channel, core in cores:
            channel.core = _Silent(core)
        try:
            yield handle
        finally:
            for channel, core in cores:
                channel.core = core


def _timed_steps(step: Callable[[], Any], count: int) -> list[float]:
    """Milliseconds of each step on its stream, with one synchronisation a step."""
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


class _Trainer:
    """One rank's model, optimizer and batches."""

    def __init__(self, context: Context, config: Config) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        from tide.bench.gpu.models import build

        torch.cuda.set_device(context.rank % torch.cuda.device_count())
        self._group = dist.new_group(backend="cpu:gloo,cuda:nccl")
        mesh = DeviceMesh.from_group(self._group, "cuda")
        self.model = build(config.model, mesh, config.layers)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, foreach=True)
        self._seed = context.rank
        self._batch: Any = None

    def take_batch(self, tokens: int) -> None:
        """Makes the batch of the steps that follow."""
        import torch

        torch.manual_seed(self._seed)
        width = self.model[0].norm.weight.shape[-1]
        self._batch = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)

    def step(self) -> None:
        """Forward, backward, optimizer."""
        self.model(self._batch).float().pow(2).mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def turn(self) -> list[float]:
        """Milliseconds of a few steps, after a warm-up. Collective."""
        import torch
        import torch.distributed as dist

        for _ in range(_WARM_UP):
            self.step()
        torch.cuda.synchronize()
        dist.barrier(self._group)
        return _timed_steps(self.step, _TIMED)


def _memory() -> dict[str, float]:
    """GiB of this process' device: torch's peaks, and all that is in use now.

    Torch's numbers have TIDE's segments, as far as ``handle.report()`` does not say otherwise, and
    are part of the device's: none is to be added to another.
    """
    import torch

    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.max_memory_allocated() / _GIB,
        "reserved": torch.cuda.max_memory_reserved() / _GIB,
        "device": (total - free) / _GIB,
    }


def _worker(context: Context, config: Config) -> list[dict[str, Any]]:
    import torch

    trainer = _Trainer(context, config)
    points = []
    for tokens in config.tokens:
        trainer.take_batch(tokens)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        times: dict[str, list[float]] = {name: [] for name in config.systems}
        profiles, reports = {}, {}
        for index in range(config.rounds + 1):
            for name in config.systems:
                with _system(trainer.model, name) as handle:
                    turn = trainer.turn()
                    if index > 0:
                        times[name] += turn
                    else:
                        wanted = bool(config.trace) and context.rank == 0 and not points
                        file = f"{config.trace}/{name}.json" if wanted else ""
                        profiles[name] = profiling.profile(trainer.step, file)
                    if handle is not None:
                        reports[name] = handle.report().as_dict()
                    torch.cuda.synchronize()
        points.append(
            {"times": times, "profiles": profiles, "reports": reports, "memory": _memory()}
        )
    return points


def _row(config: Config, tokens: int, per_rank: Sequence[dict[str, Any]]) -> dict[str, Any]:
    samples = {
        name: [max(step) for step in zip(*(r["times"][name] for r in per_rank), strict=True)]
        for name in config.systems
    }
    ms = {name: median(values) for name, values in samples.items()}
    row: dict[str, Any] = {"op": "train", "model": config.model, "tokens": tokens}
    row |= {"ranks": len(per_rank), **{f"{name}_ms": value for name, value in ms.items()}}
    if "stock" in ms and "nothing" in ms:
        overhead = ms["stock"] - ms["nothing"]
        for name in set(_MODES) & set(ms):
            row[f"{name}_removed"] = (ms["stock"] - ms[name]) / overhead
    if "stock" in ms:
        for name in set(_MODES) & set(ms):
            row[f"{name}_below_stock"] = 1 - ms[name] / ms["stock"]
    first = per_rank[0]
    row |= {f"{name}_gib": value for name, value in first["memory"].items()}
    return {**row, **{name: first[name] for name in ("profiles", "reports")}, "samples_ms": samples}


def run(
    ranks: int | None,
    model: str,
    tokens: Sequence[int] = (),
    systems: Sequence[str] = (),
    rounds: int = 1,
    trace: str = "",
    layers: int = 0,
) -> list[dict[str, Any]]:
    """Measures a model.

    Returns:
        A row a number of tokens: the median step of each system on the slowest rank, what the modes
        remove, memory of rank 0 (of a single system only if there was one), kernels and copies of
        one step by system, and every sample.

    Raises:
        ValueError: an unknown model or system. LaunchError: no GPU, or a rank failed.
    """
    if model not in TOKENS:
        raise ValueError(f"expected a model of {sorted(TOKENS)}, got {model!r}")
    if unknown := set(systems) - set(SYSTEMS):
        raise ValueError(f"expected systems of {SYSTEMS}, got {sorted(unknown)}")
    if any(count < 128 or count % 128 for count in tokens):
        raise ValueError(f"expected multiples of 128 tokens, got {list(tokens)}")
    gpus = machine.count_gpus()
    ranks = ranks or machine.default_ranks(gpus)
    if ranks > gpus:
        raise ValueError(f"expected a GPU for each of {ranks} ranks, found {gpus}")
    wanted = tuple(tokens) or TOKENS[model]
    config = Config(model, wanted, tuple(systems) or SYSTEMS, rounds, trace, layers)
    results = launch(_worker, ranks, config, variables=machine.variables(ranks, gpus))
    return [_row(config, count, point) for count, *point in zip(wanted, *results, strict=True)]
