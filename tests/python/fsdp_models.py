"""Models and the comparison of a run on TIDE with a run on torch's own path.

On CPUs, or with TEST_DEVICE=cuda on GPUs, which ranks may share.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gpu_models
import tide
import torch
import torch.distributed as dist
from spawn import Context
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
BF16_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16_fp32": BF16_POLICY,
    "fp16_fp32": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    "bf16_params": BF16_POLICY,  # the model itself is in bf16 too
}
WIDTH = 24  # odd against 3 and 4 ranks in some of the shapes below


class Block(nn.Module):
    """Two linear layers with a residual; ``hidden`` does not divide evenly by most worlds."""

    def __init__(self, width: int = WIDTH, hidden: int = 37) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Odd(nn.Module):
    """Parameters with few rows, one element and no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.randn(5, 3))
        self.single = nn.Parameter(torch.randn(1))
        self.cube = nn.Parameter(torch.randn(3, 2, 4))
        # torch cannot reduce a gradient without elements.
        self.empty = nn.Parameter(torch.randn(0, 4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.small.sum() + self.cube.pow(2).sum() + self.empty.sum()
        return x * self.single + 0.01 * scale


@dataclass
class Setup:
    """How a test model is built and sharded."""

    blocks: int = 3
    policy: MixedPrecisionPolicy = field(default_factory=lambda: BF16_POLICY)
    dtype: torch.dtype = torch.float32
    reshard: bool | int | None = None
    shard_root: bool = True
    placement: Callable[[nn.Parameter], Any] | None = None
    edit: Callable[[nn.Sequential], None] | None = None  # before fully_shard

    def build(self) -> nn.Sequential:
        """Returns a sharded model; the same weights every time."""
        torch.manual_seed(7)
        model = nn.Sequential(*[Block() for _ in range(self.blocks)], nn.Linear(WIDTH, 11))
        model.to(DEVICE, self.dtype)
        if self.edit is not None:
            self.edit(model)
        shared: dict[str, Any] = {"mesh": mesh(), "mp_policy": self.policy}
        if self.placement is not None:
            shared["shard_placement_fn"] = self.placement
        for block in list(model)[:-1]:
            fully_shard(block, reshard_after_forward=self.reshard, **shared)
        if self.shard_root:
            fully_shard(model, **shared)
        return model


def mesh() -> DeviceMesh:
    """Returns the mesh over all ranks; the same object every time."""
    global _mesh
    if _mesh is None and DEVICE == "cpu":
        _mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    elif _mesh is None:
        _mesh = gpu_models.mesh(Context(dist.get_rank(), dist.get_world_size()))
        torch.use_deterministic_algorithms(True, warn_only=True)
    return _mesh


_mesh: DeviceMesh | None = None


def new_cpu_mesh() -> DeviceMesh:
    """Returns a mesh over all ranks that no communicator of TIDE's has seen yet."""
    return DeviceMesh.from_group(dist.new_group(), "cpu")


def batch(context: Context, step: int, rows: int = 6) -> torch.Tensor:
    """Returns this rank's input of a step."""
    generator = torch.Generator().manual_seed(1000 * step + context.rank)
    return torch.randn(rows, WIDTH, generator=generator).to(DEVICE)


def settle_shards() -> None:
    """After a write to shards behind a forward: FSDP2 waits for shards before forwards only."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the local part of a tensor."""
    inner = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return inner.detach().clone()


def snapshot(model: nn.Module, what: str) -> dict[str, torch.Tensor]:
    """Returns copies of the local gradients ("grad") or parameters ("param")."""
    if what == "param":
        return {n: local(p) for n, p in model.named_parameters()}
    return {n: local(p.grad) for n, p in model.named_parameters() if p.grad is not None}


Log = list[tuple[str, torch.Tensor]]


class Run:
    """One training run: what it logs, and the handle while TIDE is enabled."""

    def __init__(self, context: Context, model: nn.Module, use_tide: bool) -> None:
        self.context, self.model, self.use_tide = context, model, use_tide
        self.log: Log = []
        self.handle: Any = None

    def enable(self, **options: Any) -> None:
        """Enables TIDE in the run that is to use it."""
        if self.use_tide:
            self.handle = tide.enable(self.model, **options)

    def disable(self) -> None:
        """Disables TIDE in the run that uses it."""
        if self.handle is not None:
            self.handle.disable()

    def note(self, label: str, value: torch.Tensor | dict[str, torch.Tensor]) -> None:
        """Logs a tensor, or the tensors of a dict."""
        if isinstance(value, dict):
            self.log.extend((f"{label} {name}", tensor) for name, tensor in value.items())
        else:
            self.log.append((label, local(value)))

    def backward(self, step: int, scale: float = 1.0) -> None:
        """Runs forward and backward and logs the loss."""
        loss = self.model(batch(self.context, step)).float().pow(2).mean() * scale
        loss.backward()
        self.note(f"step {step} loss", loss)

    def steps(self, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        """Runs whole training steps and logs losses and gradients."""
        for step in range(first, last):
            self.backward(step)
            self.note(f"step {step} grad", snapshot(self.model, "grad"))
            optimizer.step()
            optimizer.zero_grad()


Drive = Callable[[Run], None]


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Returns the optimizer of most tests; it does not magnify rounding of gradients near zero."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **{"eps": 1e-4, **options})


def train(run: Run) -> None:
    """The default drive: enabled from the start, three AdamW steps."""
    run.enable(strict=True)
    run.steps(adamw(run.model), 0, 3)


def compare_logs(stock: Log, ours: Log, world: int) -> None:
    """Fails unless both runs logged the same; exactly at two ranks, where sums have one order."""
    assert [label for label, _ in stock] == [label for label, _ in ours]
    for (label, expected), (_, actual) in zip(stock, ours, strict=True):
        assert expected.dtype == actual.dtype, label
        if world == 2:
            assert torch.equal(expected, actual), f"{label}: {expected} is not {actual}"
        else:
            bound = 1e-5 * max(1.0, expected.float().abs().max().item() if expected.numel() else 1)
            bound = max(bound, 1e-2 if expected.dtype == torch.bfloat16 else 0.0)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=bound, msg=label)


def parity(context: Context, setup: Setup, drive: Drive = train) -> Any:
    """Runs ``drive`` on torch's path, then on TIDE, and compares. Returns TIDE's handle."""
    runs = []
    for use_tide in (False, True):
        run = Run(context, setup.build(), use_tide)
        drive(run)
        run.note("final", snapshot(run.model, "param"))
        runs.append(run)
    compare_logs(runs[0].log, runs[1].log, context.world)
    runs[1].disable()
    return runs[1].handle
