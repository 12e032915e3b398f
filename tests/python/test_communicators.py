"""What a communicator on GPUs is given and says, with the core replaced."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from tide import _core
from tide.fsdp.communicators import Channel
from tide.fsdp.handle import Handle
from tide.fsdp.sum_budget import SumBudget


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
    sums = SumBudget(24, "a sum takes 24 CTAs")
    return Channel(_Group(), device, 5.0, None, "in_place", compute_streams=[0, 7], sums=sums)


def test_streams_and_memory_are_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        channel = _channel(monkeypatch, 0)
        channel.warn_of_aliasing()
    assert _Core.asked["compute_streams"] == [0, 7]
    assert _Core.asked["allocate"] == channel.segment_memory.allocate
    assert channel.aliasing == ""
    assert _Core.asked["sum_ctas"] == 24


def test_aliases_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "2")
    channel = _channel(monkeypatch, 3)
    with pytest.warns(UserWarning, match=r"CUDA_DEVICE_MAX_CONNECTIONS=32 .* \(it is 2\)"):
        channel.warn_of_aliasing()
    assert channel.aliasing.startswith("3 of TIDE's streams share a hardware queue")


def _multicast_notes(*reasons: str, device: str = "cuda") -> set[str]:
    cores = [SimpleNamespace(unicast_reason=reason) for reason in reasons]
    channels = [SimpleNamespace(core=core, device=torch.device(device)) for core in cores]
    return Handle._multicast_notes(cast("Handle", SimpleNamespace(channels=channels)))


def test_the_report_says_how_copies_reach_a_node() -> None:
    why = "multicast inside a node: switched off by NCCL_NVLS_ENABLE=0"
    assert _multicast_notes(why, why) == {f"copies go to each GPU of a node by itself ({why})"}
    assert _multicast_notes("") == {"copies to all GPUs of a node are multicast by the switch"}
    assert _multicast_notes("only GPUs have multicast", device="cpu") == set()
