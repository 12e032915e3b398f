"""What tests of FSDP2 on GPUs train, and where; ranks may share a GPU."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
import torch.distributed as dist
from spawn import Context
from tide import _core
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WIDTH, BLOCKS, TOKENS = 256, 4, 64
MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
# Rank processes inherit it, and NCCL reads it when they make their first communicator.
os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
# The first NCCL that lets several ranks of a communicator share a GPU, asked to.
_SHARED_GPU_NCCL = (2, 31, 0)


def _nccl_version() -> tuple[int, ...]:
    """Returns the version of the NCCL that torch runs, which may not be the one of its build."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):  # linked into torch
        return torch.cuda.nccl.version()
    major, rest = divmod(version.value, 10_000)
    return (major, *divmod(rest, 100))


def missing(ranks: int) -> str | None:
    """Returns what this machine lacks for so many ranks that train stock and through TIDE."""
    gpus = torch.cuda.device_count()
    if gpus == 0:
        return f"expected a GPU for {ranks} ranks, found none"
    if reason := _core.nccl()["reason"]:
        return reason
    own = _nccl_version()
    if ranks > gpus and own < _SHARED_GPU_NCCL:
        return f"expected {ranks} GPUs, or NCCL 2.31 preloaded for torch, found {gpus} and {own}"
    return None


def place(context: Context) -> None:
    """Makes the rank's GPU the current one."""
    torch.cuda.set_device(context.rank % torch.cuda.device_count())


_groups: list[Any] = []


def mesh(context: Context) -> DeviceMesh:
    """All ranks, over torch's NCCL; the same mesh at every call."""
    place(context)
    if not _groups:
        _groups.append(dist.new_group(backend="cpu:gloo,cuda:nccl"))
    return DeviceMesh.from_group(_groups[0], "cuda")


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)  # uneven over two ranks
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def _build(ranks: DeviceMesh, policy: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(*(_Block(WIDTH) for _ in range(BLOCKS)), nn.Linear(WIDTH, 8))
    mixed = MixedPrecisionPolicy(**policy)
    for block in list(model)[:-1]:
        fully_shard(block, mesh=ranks, mp_policy=mixed)
    return fully_shard(model, mesh=ranks, mp_policy=mixed)


class Run:
    """A model with its optimizer; every step returns the loss's bits."""

    def __init__(self, context: Context, policy: dict[str, Any]) -> None:
        self.model = _build(mesh(context), policy)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._generator = torch.Generator().manual_seed(context.rank)

    def step(self) -> float:
        """Forward, backward, optimizer."""
        batch = torch.randn(TOKENS, WIDTH, generator=self._generator).cuda()
        loss = self.model(batch).float().pow(2).mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()
