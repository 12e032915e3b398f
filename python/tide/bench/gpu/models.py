"""The models of the training bench: large enough that a GPU's time goes where theirs would."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class DenseBlock(nn.Module):
    """A feed-forward block with two square projections; (tokens, width) to the same shape."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the shape of ``x``."""
        x = x + self.out(self.query(self.norm(x)))
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class ExpertLayer(nn.Module):
    """All experts of a layer, each with an equal share of the tokens; no routing."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.norm = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * hidden) * 0.01)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * 0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (tokens, width) to the same shape; tokens must be a multiple of the experts."""
        x = x + self.out(self.query(self.norm(x)))
        y = self.norm(x).view(self.experts, -1, x.shape[-1])
        gate, up = torch.bmm(y, self.up).chunk(2, -1)
        return x + torch.bmm(nn.functional.silu(gate) * up, self.down).reshape(x.shape)


def build(name: str, mesh: Any, layers: int = 0) -> nn.Module:
    """Returns a model on the current GPU, the same on every rank, each layer an FSDP2 group.

    Args:
        name: "moe" or "dense".
        mesh: the ranks to shard over.
        layers: how many; 0 for 12 (moe) or 6 (dense).
    """
    torch.manual_seed(0)
    with torch.device("cuda"):
        if name == "moe":
            blocks: list[nn.Module] = [ExpertLayer(2048, 768, 128) for _ in range(layers or 12)]
        else:
            blocks = [DenseBlock(8192, 28672) for _ in range(layers or 6)]
    model = nn.Sequential(*blocks)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)
