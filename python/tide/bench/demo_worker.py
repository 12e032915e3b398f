"""One rank of the demo: trains the byte-level transformer twice, stock and through TIDE.

Both trainings live in the same processes and take turns step by step, so that what else happens on
the machine hits both alike. They share nothing: each has its model, optimizer and random numbers.
Stock's calls pass TIDE's dispatchers, which adds microseconds to milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tide
from tide.bench.launch import Context
from tide.bench.models import ByteTransformer, cpu_mesh, shard
from tide.bench.probe import Call, CallRecorder, pss_bytes
from tide.fsdp.communicators import open_cores
from tide.stats import now

WARM_UP_STEPS = 3
MEMORY_STEPS = 2
# For models up to this width. Wider ones take smaller steps: Adam moves every weight alike, and the
# sums are longer.
_LEARNING_RATE, _WIDTH = 3e-4, 1024


@dataclass(frozen=True)
class DemoConfig:
    """What every rank is told. `text` is the corpus, `folder` is where traces of GPUs go."""

    steps: int
    mode: str
    nodes: int
    layers: int
    width: int
    heads: int
    length: int
    batch: int
    seed: int
    text: bytes
    folder: str = ""


@dataclass
class Step:
    """One step on one rank; CLOCK_MONOTONIC seconds. The loss is the mean over ranks."""

    start: float
    forward_end: float
    backward_end: float
    end: float
    calls: list[Call]
    loss: float = float("nan")


@dataclass
class Training:
    """What one rank sends back of one training.

    Attributes:
      steps: all steps in order, warm-up included.
      parameters: elements of the whole model.
      groups: FSDP2's groups with the path of each collective.
      traced: one more step, with TIDE's own operations in `operations`; None for stock and on GPUs.
      trace: name of the file with torch's trace of one more step, if there is one.
    """

    steps: list[Step]
    parameters: int
    groups: list[dict[str, Any]] = field(default_factory=list)
    traced: Step | None = None
    operations: list[dict[str, Any]] = field(default_factory=list)
    trace: str = ""


class Clock:
    """Times of a step on the CPU, where a call has done its work when it returns."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def start(self) -> None:
        """Begins a step."""
        self._times = [now()]

    def mark(self) -> None:
        """Notes the end of a part."""
        self._times.append(now())

    def stop(self) -> list[float]:
        """Returns the start, the marks and the end, in seconds of `now`."""
        return [*self._times, now()]


class Trainer:
    """A sharded model with its optimizer and its share of the text."""

    def __init__(
        self, rank: int, config: DemoConfig, through_tide: bool, mesh: DeviceMesh, clock: Clock
    ) -> None:
        # Same seed on all ranks: fully_shard keeps each rank's rows of one common model.
        torch.manual_seed(config.seed)
        self._device = mesh.device_type
        with torch.device(self._device):
            model = ByteTransformer(config.layers, config.width, config.heads, config.length)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.model: nn.Module = shard(model, mesh=mesh)
        self.handle = (
            tide.enable(self.model, mode=config.mode, nodes=config.nodes) if through_tide else None
        )
        rate = _LEARNING_RATE * min(1.0, _WIDTH / config.width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, fused=True)
        self.memory_samples: list[int] | None = None
        self._config, self._clock = config, clock
        self._text = torch.frombuffer(bytearray(config.text), dtype=torch.uint8)
        self._generator = torch.Generator().manual_seed(config.seed * 1009 + rank)

    def _batch(self) -> torch.Tensor:
        """Returns (batch, length + 1) int64, drawn from anywhere in the text."""
        length = self._config.length + 1
        limit = self._text.numel() - length
        starts = torch.randint(0, limit, (self._config.batch,), generator=self._generator)
        rows = torch.stack([self._text[i : i + length] for i in starts.tolist()])
        return rows.long().to(self._device)

    def sample_memory(self) -> None:
        """Notes this process's memory during the memory pass; does nothing outside it."""
        if self.memory_samples is None:
            return
        # Nobody moves on while others are read: the sum over ranks is of one moment.
        dist.barrier()
        self.memory_samples.append(pss_bytes())
        dist.barrier()

    def step(self, recorder: CallRecorder) -> Step:
        """Trains on one batch. Exchanging the loss lies outside the timed part."""
        batch = self._batch()
        recorder.take()
        dist.barrier()
        self._clock.start()
        logits = self.model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        self._clock.mark()
        self.sample_memory()
        loss.backward()
        self._clock.mark()
        self.optimizer.step()
        self.optimizer.zero_grad()
        step = Step(*self._clock.stop(), recorder.take())
        mean = loss.detach().to("cpu", copy=True)
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        step.loss = mean.item() / dist.get_world_size()
        return step

    def traced_step(self, recorder: CallRecorder) -> tuple[Step, list[dict[str, Any]]]:
        """Runs one untimed step with TIDE's operations recorded."""
        cores = open_cores()
        for core in cores:
            core.trace(True)
        step = self.step(recorder)
        operations = [operation for core in cores for operation in core.take_trace()]
        for core in cores:
            core.trace(False)
        return step, operations


def make_trainers(
    context: Context, config: DemoConfig, mesh: DeviceMesh, clock: Clock
) -> dict[str, Trainer]:
    """Returns the trainers of both trainings, "stock" and "tide", with the same weights."""
    return {
        name: Trainer(context.rank, config, name == "tide", mesh, clock)
        for name in ("stock", "tide")
    }


def take_turns(
    context: Context, config: DemoConfig, trainers: dict[str, Trainer], recorder: CallRecorder
) -> dict[str, Training]:
    """Trains `config.steps` steps each, and notes where TIDE's collectives ran."""
    trainings = {name: Training([], trainer.parameters) for name, trainer in trainers.items()}
    for index in range(config.steps):
        last = {name: trainer.step(recorder) for name, trainer in trainers.items()}
        for name, step in last.items():
            trainings[name].steps.append(step)
        if context.rank == 0:
            context.progress((index, last))
    keys = ("name", "all_gather", "reduce_scatter", "reason")
    groups = trainers["tide"].handle.report().groups
    trainings["tide"].groups = [{k: g[k] for k in keys} for g in groups]
    return trainings


def train(context: Context, config: DemoConfig) -> dict[str, Training]:
    """Trains `config.steps` steps each, "stock" and "tide", and traces one more step of TIDE's."""
    trainers = make_trainers(context, config, cpu_mesh(), Clock())
    recorder = CallRecorder()
    recorder.install()
    trainings = take_turns(context, config, trainers, recorder)
    ours = trainings["tide"]
    ours.traced, ours.operations = trainers["tide"].traced_step(recorder)
    return trainings


@dataclass(frozen=True)
class MemoryConfig:
    """What every rank of a memory pass is told."""

    demo: DemoConfig
    through_tide: bool


@dataclass
class MemoryPass:
    """What one rank sends back: bytes at all sampled points, losses of all steps.

    The losses are those of the first steps of `train`.
    """

    samples: list[int]
    losses: list[float]


def measure_memory(context: Context, config: MemoryConfig) -> MemoryPass:
    """Trains one model alone, a few steps.

    Samples are proportional set sizes at the end of forward and in every reduction.
    """
    trainer = Trainer(context.rank, config.demo, config.through_tide, cpu_mesh(), Clock())
    recorder = CallRecorder()
    recorder.install()
    # The first steps allocate what stays: optimizer state, landing slots, the heap's holes.
    losses = [trainer.step(recorder).loss for _ in range(WARM_UP_STEPS)]
    trainer.memory_samples = []
    recorder.after_reduce = trainer.sample_memory
    losses += [trainer.step(recorder).loss for _ in range(MEMORY_STEPS)]
    return MemoryPass(trainer.memory_samples, losses)
