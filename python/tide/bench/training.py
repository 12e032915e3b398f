"""One training run of the demo's byte-level transformer, stock or through TIDE, fully measured.

Every rank returns plain numbers; `tide.bench.demo` compares two such runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tide.bench.launch import Context
from tide.bench.probe import Call, CallRecorder, pss_bytes
from tide.bench.stats import now

_MEMORY_STEPS = 2


@dataclass(frozen=True)
class Config:
    """The run's options; equal on all ranks."""

    tide: bool
    mode: str
    steps: int
    warm_up: int
    layers: int
    width: int
    heads: int
    length: int
    batch: int
    seed: int


@dataclass
class Step:
    """CLOCK_MONOTONIC seconds of one step on one rank, and the calls inside it."""

    start: float
    forward_end: float
    backward_end: float
    end: float
    calls: list[Call] = field(default_factory=list)


@dataclass
class Result:
    """What one rank measured. `losses` are means over ranks; `spans` come from the traced step."""

    parameters: int
    losses: list[float]
    steps: list[Step]
    pss_samples: list[int]
    groups: list[dict[str, Any]]
    traced: Step
    spans: list[dict[str, Any]]


class _Trainer:
    def __init__(self, context: Context, config: Config) -> None:
        import torch

        from tide.bench.models import ByteTransformer, shard
        from tide.bench.text import load_text

        self.context, self.config = context, config
        self.text = torch.frombuffer(bytearray(load_text()), dtype=torch.uint8)
        torch.manual_seed(config.seed)
        model = ByteTransformer(config.layers, config.width, config.heads, config.length)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.model = shard(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.random = torch.Generator().manual_seed(config.seed * 1000 + context.rank)
        self.recorder = CallRecorder()
        self.after_forward: Callable[[], None] = lambda: None

    def batch(self) -> tuple[Any, Any]:
        import torch

        length = self.config.length
        starts = torch.randint(
            len(self.text) - length - 1, (self.config.batch,), generator=self.random
        ).tolist()
        rows = torch.stack([self.text[s : s + length + 1] for s in starts]).long()
        return rows[:, :-1], rows[:, 1:]

    def step(self) -> tuple[Step, float]:
        """One step; returns its times and the mean loss over ranks."""
        import torch.distributed as dist
        import torch.nn.functional as F

        inputs, targets = self.batch()
        self.recorder.take()
        dist.barrier()
        start = now()
        logits = self.model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        forward_end = now()
        self.after_forward()
        loss.backward()
        backward_end = now()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end = now()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        step = Step(start, forward_end, backward_end, end, self.recorder.take())
        return step, mean.item() / self.context.world

    def sample_memory(self) -> list[int]:
        """PSS of this rank at the end of every forward and at every post_backward, in bytes."""
        import torch.distributed as dist

        samples: list[int] = []

        def sample() -> None:
            # Nobody moves on while others are read: the sum is of one moment.
            dist.barrier()
            samples.append(pss_bytes())
            dist.barrier()

        self.after_forward = self.recorder.after_reduce = sample
        for _ in range(_MEMORY_STEPS):
            self.step()
        self.after_forward, self.recorder.after_reduce = (lambda: None), None
        return samples


def _cores() -> list[Any]:
    from tide.fsdp import communicators

    return communicators.open_cores()


def _traced_step(trainer: _Trainer) -> tuple[Step, list[dict[str, Any]]]:
    cores = _cores() if trainer.config.tide else []
    for core in cores:
        core.trace(True)
    step, _ = trainer.step()
    spans = [span for core in cores for span in core.take_trace()]
    for core in cores:
        core.trace(False)
    return step, spans


def train(context: Context, config: Config) -> Result:
    """Runs on every rank of `launch`; progress payloads are (step, loss, seconds)."""
    trainer = _Trainer(context, config)
    handle = None
    if config.tide:
        import tide

        handle = tide.enable(trainer.model, mode=config.mode)
    trainer.recorder.install()
    steps, losses = [], []
    for index in range(config.warm_up + config.steps):
        step, loss = trainer.step()
        losses.append(loss)
        if index >= config.warm_up:
            steps.append(step)
        if context.rank == 0:
            context.progress((index, loss, step.end - step.start))
    traced, spans = _traced_step(trainer)
    samples = trainer.sample_memory()
    trainer.recorder.uninstall()
    groups = handle.report().groups if handle is not None else []
    return Result(trainer.parameters, losses, steps, samples, groups, traced, spans)
