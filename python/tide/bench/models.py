"""The models of the demo and of the benchmarks, and how FSDP2 is applied to them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

VOCABULARY = 256


class Block(nn.Module):
    """Pre-norm transformer block; maps (batch, length, width) to the same shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the shape of `x`."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm_mlp(x))))


class ByteTransformer(nn.Module):
    """Predicts the next byte: (batch, length) int64 to (batch, length, 256) logits."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns logits for the byte after each position."""
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Mlp(nn.Module):
    """Blocks of Linear, GELU, Linear; maps (tokens, width) to the same shape."""

    def __init__(self, blocks: int = 4, width: int = 512, hidden: int = 2048) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the shape of `x`."""
        for block in self.blocks:
            x = block(x)
        return x


def cpu_mesh() -> DeviceMesh:
    """All ranks on CPU, also where torch would rather take an accelerator."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shard(
    model: nn.Module,
    param_dtype: torch.dtype | None = torch.bfloat16,
    mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Applies `fully_shard` to every entry of `model.blocks`, then to the root; reduces in fp32.

    Without a mesh it is `cpu_mesh`.
    """
    mesh = cpu_mesh() if mesh is None else mesh
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)
