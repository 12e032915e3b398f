"""Computations that something beside them disturbs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Body = Callable[[], Any]


def _like(device: torch.device) -> dict[str, Any]:
    return {"device": device, "dtype": torch.bfloat16}


def _gemm(rows: int, device: torch.device, scale: int) -> Body:
    rows, wide = rows // scale, 8192 // scale
    a, b = torch.randn(rows, wide, **_like(device)), torch.randn(wide, wide, **_like(device))
    out = torch.empty(rows, wide, **_like(device))
    return lambda: torch.mm(a, b, out=out)


def thin_gemm(device: torch.device, scale: int = 1) -> Body:
    """Few rows: tiles for all multiprocessors once at most, and as much memory as compute."""
    return _gemm(256, device, scale)


def square_gemm(device: torch.device, scale: int = 1) -> Body:
    """Limited by compute."""
    return _gemm(8192, device, scale)


def elementwise(device: torch.device, scale: int = 1) -> Body:
    """Limited by memory."""
    x = torch.randn((1 << 27) // scale**2, **_like(device))  # 256 MiB
    y = torch.empty_like(x)
    return lambda: torch.mul(x, 2, out=y)


def experts(device: torch.device, scale: int = 1) -> Body:
    """Every expert of a mixture on its own tokens: tiles for every multiprocessor, many times."""
    count, tokens, inner, hidden = (n // scale for n in (128, 256, 2048, 768))
    x = torch.randn(count, tokens, inner, **_like(device))
    weights = torch.randn(count, inner, hidden, **_like(device))
    out = torch.empty(count, tokens, hidden, **_like(device))
    return lambda: torch.bmm(x, weights, out=out)


# By the names in the rows of benches; each takes a device, and what its dimensions are divided by.
VICTIMS: dict[str, Callable[..., Body]] = {
    "gemm 256x8192x8192": thin_gemm,
    "gemm 8192^3": square_gemm,
    "elementwise 256 MiB": elementwise,
    "bmm 128x256x2048x768": experts,
}


def make_victims(device: torch.device, scale: int = 1) -> dict[str, Body]:
    """Returns the computations that are disturbed, by name.

    Args:
        device: where they run.
        scale: divides every dimension; for machines without a GPU.
    """
    return {name: make(device, scale) for name, make in VICTIMS.items()}
