"""What a communicator on GPUs is given and says, with the core replaced."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tide import _core
from tide.fsdp.communicators import Channel


class _Core:
    """A core that found so many streams in hardware queues of compute."""

    asked: dict[str, Any]
    aliased_streams = 0

    def __init__(self, *args: object, **options: Any) -> None:
        _Core.asked = options


class _Group:
    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


def _channel(monkeypatch: pytest.MonkeyPatch, aliased: int) -> Channel:
    monkeypatch.setattr(_core, "Communicator", _Core)
    monkeypatch.setattr(_Core, "aliased_streams", aliased)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    device = torch.device("cuda", 0)
    return Channel(_Group(), device, 5.0, None, "in_place", compute_streams=[0, 7])


def test_streams_and_memory_are_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        channel = _channel(monkeypatch, 0)
    assert _Core.asked["compute_streams"] == [0, 7]
    assert _Core.asked["allocate"] == channel.segment_memory.allocate
    assert channel.aliasing == ""


def test_aliases_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "2")
    with pytest.warns(UserWarning, match=r"CUDA_DEVICE_MAX_CONNECTIONS=32 .* \(it is 2\)"):
        channel = _channel(monkeypatch, 3)
    assert channel.aliasing.startswith("3 of TIDE's streams share a hardware queue")
