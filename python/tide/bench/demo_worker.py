"""One rank of the demo: trains the byte-level transformer and returns what it measured."""

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
    """What every rank is told. `text` is the corpus; `through_tide` chooses the run."""

    steps: int
    mode: str
    layers: int
    width: int
    heads: int
    length: int
    batch: int
    seed: int
    text: bytes
    through_tide: bool


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
class RankResult:
    """What one rank sends back.

    Attributes:
      steps: all steps in order, warm-up included.
      memory_bytes: proportional set size at every sampled point of the memory pass.
      parameters: elements of the whole model.
      groups: FSDP2's groups with the path of each collective.
      traced: one more step, with TIDE's own operations in `operations`; None for stock.
    """

    steps: list[Step]
    memory_bytes: list[int]
    parameters: int
    groups: list[dict[str, Any]] = field(default_factory=list)
    traced: Step | None = None
    operations: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """A sharded model with its optimizer, its share of the text and the recorder of its calls."""

    def __init__(self, rank: int, config: DemoConfig) -> None:
        # Same seed on all ranks: fully_shard keeps each rank's rows of one common model.
        torch.manual_seed(config.seed)
        model = ByteTransformer(config.layers, config.width, config.heads, config.length)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.model: nn.Module = shard(model)
        self.handle = tide.enable(self.model, mode=config.mode) if config.through_tide else None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE, fused=True)
        self.recorder = CallRecorder()
        self.recorder.install()
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

    def step(self) -> Step:
        """Trains on one batch. Exchanging the loss lies outside the timed part."""
        batch = self._batch()
        self.recorder.take()
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
        step = Step(start, forward_end, backward_end, now(), self.recorder.take())
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        step.loss = mean.item() / dist.get_world_size()
        return step

    def memory_pass(self) -> list[int]:
        """Runs untimed steps that sample memory at the end of forward and in every reduction."""
        self.memory_samples = []
        self.recorder.after_reduce = self.sample_memory
        for _ in range(_MEMORY_STEPS):
            self.step()
        samples, self.memory_samples = self.memory_samples, None
        self.recorder.after_reduce = None
        return samples

    def traced_step(self) -> tuple[Step, list[dict[str, Any]]]:
        """Runs one untimed step with TIDE's operations recorded."""
        cores = open_cores()
        for core in cores:
            core.trace(True)
        step = self.step()
        operations = [operation for core in cores for operation in core.take_trace()]
        for core in cores:
            core.trace(False)
        return step, operations


def work(context: Context, config: DemoConfig) -> RankResult:
    """Trains `config.steps` steps, then measures memory and, with TIDE, traces one step."""
    trainer = Trainer(context.rank, config)
    steps = []
    for index in range(config.steps):
        steps.append(trainer.step())
        if context.rank == 0:
            last = steps[-1]
            context.progress((index, last.loss, 1e3 * (last.end - last.start)))
    result = RankResult(steps, trainer.memory_pass(), trainer.parameters)
    if trainer.handle is not None:
        keys = ("name", "all_gather", "reduce_scatter", "reason")
        result.groups = [{k: g[k] for k in keys} for g in trainer.handle.report().groups]
        result.traced, result.operations = trainer.traced_step()
    return result
