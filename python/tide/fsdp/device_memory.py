"""Memory of a GPU that torch did not allocate, as a tensor."""

from __future__ import annotations

import torch


class _Interface:
    """What torch asks of foreign memory."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def device_bytes(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Returns ``size`` bytes from ``address`` on, without a copy; the caller keeps them alive."""
    return torch.as_tensor(_Interface(address, size), device=device)
