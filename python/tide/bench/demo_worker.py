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

import tide
from tide.bench.launch import Context
from tide.bench.models import ByteTransformer, shard
from tide.bench.probe import Call, CallRecorder, pss_bytes
from tide.bench.stats import now
from tide.fsdp.communicators import open_cores

WARM_UP_STEPS = 3
_MEMORY_STEPS = 2
_LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class DemoConfig:
    """What every rank is told. `text` is the corpus."""

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
      traced: one more step, with TIDE's own operations in `operations`; None for stock.
    """

    steps: list[Step]
    parameters: int
    groups: list[dict[str, Any]] = field(default_factory=list)
    traced: Step | None = None
    operations: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """A sharded model with its optimizer and its share of the text."""

    def __init__(self, rank: int, config: DemoConfig, through_tide: bool) -> None:
        # Same seed on all ranks: fully_shard keeps each rank's rows of one common model.
        torch.manual_seed(config.seed)
        model = ByteTransformer(config.layers, config.width, config.heads, config.length)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.model: nn.Module = shard(model)
        self.handle = (
            tide.enable(self.model, mode=config.mode, nodes=config.nodes) if through_tide else None
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE, fused=True)
        self.memory_samples: list[int] | None = None
        self._config = config
        self._text = torch.frombuffer(bytearray(config.text), dtype=torch.uint8)
        self._generator = torch.Generator().manual_seed(config.seed * 1009 + rank)

    def _batch(self) -> torch.Tensor:
        """Returns (batch, length + 1) int64, drawn from anywhere in the text."""
        length = self._config.length + 1
        limit = self._text.numel() - length
        starts = torch.randint(0, limit, (self._config.batch,), generator=self._generator)
        return torch.stack([self._text[i : i + length] for i in starts.tolist()]).long()

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
        start = now()
        logits = self.model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        forward_end = now()
        self.sample_memory()
        loss.backward()
        backward_end = now()
        self.optimizer.step()
        self.optimizer.zero_grad()
        step = Step(start, forward_end, backward_end, now(), recorder.take())
        mean = loss.detach().clone()
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


def train(context: Context, config: DemoConfig) -> dict[str, Training]:
    """Trains `config.steps` steps each, "stock" and "tide", and traces one more step of TIDE's."""
    trainers = {name: Trainer(context.rank, config, name == "tide") for name in ("stock", "tide")}
    recorder = CallRecorder()
    recorder.install()
    trainings = {name: Training([], trainer.parameters) for name, trainer in trainers.items()}
    for index in range(config.steps):
        last = {name: trainer.step(recorder) for name, trainer in trainers.items()}
        for name, step in last.items():
            trainings[name].steps.append(step)
        if context.rank == 0:
            context.progress((index, last))
    ours, handle = trainings["tide"], trainers["tide"].handle
    keys = ("name", "all_gather", "reduce_scatter", "reason")
    ours.groups = [{k: g[k] for k in keys} for g in handle.report().groups]
    ours.traced, ours.operations = trainers["tide"].traced_step(recorder)
    return trainings


@dataclass(frozen=True)
class MemoryConfig:
    """What every rank of a memory pass is told."""

    demo: DemoConfig
    through_tide: bool


@dataclass
class MemoryPass:
    """What one rank sends back: proportional set sizes at all sampled points, losses of all steps.

    The losses are those of the first steps of `train`.
    """

    samples: list[int]
    losses: list[float]


def measure_memory(context: Context, config: MemoryConfig) -> MemoryPass:
    """Trains one model alone, a few steps: memory at the end of forward and in every reduction."""
    trainer = Trainer(context.rank, config.demo, config.through_tide)
    recorder = CallRecorder()
    recorder.install()
    # The first steps allocate what stays: optimizer state, landing slots, the heap's holes.
    losses = [trainer.step(recorder).loss for _ in range(WARM_UP_STEPS)]
    trainer.memory_samples = []
    recorder.after_reduce = trainer.sample_memory
    losses += [trainer.step(recorder).loss for _ in range(_MEMORY_STEPS)]
    return MemoryPass(trainer.memory_samples, losses)
