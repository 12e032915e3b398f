"""One rank of the demo on a GPU: the trainings of demo_worker, with the clock of a stream.

A GPU runs what the host has enqueued, collectives beside compute. So the host's calls of FSDP2 say
nothing about transfers, and TIDE's own operations are commands for streams: instead of both there
is torch's trace of one step of each training.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tide.bench.demo_worker import (
    MEMORY_STEPS,
    WARM_UP_STEPS,
    Clock,
    DemoConfig,
    MemoryConfig,
    MemoryPass,
    Trainer,
    Training,
    make_trainers,
    take_turns,
)
from tide.bench.gpu import profiling
from tide.bench.launch import Context
from tide.bench.probe import CallRecorder
from tide.stats import now


class StreamClock(Clock):
    """Times of a step on the current stream: nothing waits between its parts."""

    def __init__(self) -> None:
        self._start = 0.0
        self._events: list[torch.cuda.Event] = []

    def start(self) -> None:
        """Begins a step when the GPU has nothing left to do."""
        torch.cuda.synchronize()
        self._start = now()
        self._events = []
        self.mark()

    def mark(self) -> None:
        """Notes the end of a part."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def stop(self) -> list[float]:
        """Returns the start, the marks and the end, when the GPU has done all its work."""
        torch.cuda.synchronize()
        end = now()
        first, *marks = self._events
        return [self._start, *(self._start + 1e-3 * first.elapsed_time(m) for m in marks), end]


def _mesh(rank: int) -> DeviceMesh:
    """All ranks, each with the GPU of its number. Collective."""
    torch.cuda.set_device(rank)
    return DeviceMesh.from_group(dist.new_group(backend="cpu:gloo,cuda:nccl"), "cuda")


def _write_trace(rank: int, folder: str, name: str, trainer: Trainer) -> str:
    """Runs one untimed step and, on rank 0, writes its trace. Returns the file's name, or ""."""
    step = partial(trainer.step, CallRecorder())
    if rank != 0:
        step()
        return ""
    file = f"trace-{name}.json"
    profiling.profile(step, str(Path(folder) / file))
    return file


def train(context: Context, config: DemoConfig) -> dict[str, Training]:
    """Trains `config.steps` steps each, "stock" and "tide", and traces one more step of each."""
    trainers = make_trainers(context, config, _mesh(context.rank), StreamClock())
    # Not installed: it would time how long the host takes to enqueue.
    trainings = take_turns(context, config, trainers, CallRecorder())
    for name, trainer in trainers.items():
        trainings[name].trace = _write_trace(context.rank, config.folder, name, trainer)
    _finish(trainers["tide"])
    return trainings


def measure_memory(context: Context, config: MemoryConfig) -> MemoryPass:
    """Trains one model alone, a few steps.

    The one sample is what this rank's GPU must have: torch's peak, and what lies outside torch,
    which only grows: the context, NCCL's buffers, and TIDE's segments as far as they are not out of
    torch's allocator (``handle.report()`` says).
    """
    mesh = _mesh(context.rank)
    trainer = Trainer(context.rank, config.demo, config.through_tide, mesh, StreamClock())
    # The whole model lay there before it was sharded.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    recorder = CallRecorder()
    losses = [trainer.step(recorder).loss for _ in range(WARM_UP_STEPS + MEMORY_STEPS)]
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    sample = torch.cuda.max_memory_reserved() + outside
    _finish(trainer)
    return MemoryPass([sample], losses)


def _finish(trainer: Trainer) -> None:
    """Takes TIDE off the model, if it is on, while no rank has left. Collective."""
    torch.cuda.synchronize()
    dist.barrier()
    if trainer.handle is not None:
        trainer.handle.disable()
