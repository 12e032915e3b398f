"""What one rank alone does, or fails in, leaves no other rank waiting or on another path."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsdp_models as fm
import pytest
import tide
import torch
import torch.distributed as dist
from spawn import Context, RankFailure, RankGroup
from tide.fsdp import agreement, communicators
from tide.fsdp import enable as enable_module
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

Ranks = Callable[[int], RankGroup]


def _refusal(model: nn.Module, **options: float) -> tide.Error:
    with pytest.raises(tide.Error) as caught:
        tide.enable(model, **options)
    return caught.value


def _refusal_in_time(model: nn.Module, seconds: float) -> str:
    """The text of the timeout if other ranks do not come within so many seconds."""
    limit = enable_module._time_limit
    enable_module._time_limit = lambda *_unused: seconds
    try:
        error = _refusal(model)
    finally:
        enable_module._time_limit = limit
    assert error.code == "timeout"
    return str(error)


def alone(context: Context) -> None:
    """Ranks that enable without the others are told who is missing; then all may try again."""
    model = fm.Setup(blocks=1).build()
    if context.rank == 1:
        assert "for ranks 0, 2 to call tide.enable" in _refusal_in_time(model, 0.2)
    dist.barrier()
    tide.enable(model, strict=True).disable()
    dist.barrier()
    if context.rank != 0:
        # The first one that has waited long enough speaks for both.
        text = _refusal_in_time(model, 0.2 if context.rank == 1 else 1000.0)
        assert "for rank 0 to call tide.enable" in text
    dist.barrier()
    tide.enable(model, strict=True).disable()
    # Rounds that all have come to leave nothing in the store.
    group = fm.mesh().get_group()
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    last = f"tide/enable/{group.group_name}/0/{agreement._rounds[group] - 1}"
    assert not store.check([f"{last}/came"]) and not store.check([f"{last}/verdict"])


def test_a_rank_that_enables_alone(ranks: Ranks) -> None:
    ranks(3).run(alone)


def dying(context: Context, folder: str) -> None:
    """One rank ends between two exchanges of the others, who write what they hear."""

    def end(*_unused: object) -> None:
        os._exit(1)

    if context.rank == 2:
        enable_module.channel_for = end
    error = _refusal(fm.Setup(blocks=1).build())
    Path(folder, str(context.rank)).write_text(f"{error.code}: {error}")


def test_a_rank_that_dies_over_it(tmp_path: Path) -> None:
    group = RankGroup(3)
    try:
        with pytest.raises(RankFailure):
            group.run(dying, str(tmp_path))
    finally:
        group.stop()
    for rank in range(2):
        heard = (tmp_path / str(rank)).read_text()
        assert heard.startswith("peer_dead: one of ranks 0, 1, 2 has ended"), heard
        assert "torch says: " in heard


class _LostStore:
    """What is left of torch's store when the rank that has it is gone."""

    def check(self, _names: list[str]) -> bool:
        raise dist.DistNetworkError("Connection reset by peer")


class _Group:
    group_name = "a group"


def test_a_store_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", _LostStore)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 3])
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    with pytest.raises(tide.Error, match="one of ranks 0, 3 has ended") as caught:
        agreement.await_ranks(_Group(), 1.0)
    assert caught.value.code == "peer_dead" and caught.value.rank == 3


def dead_model(context: Context) -> None:
    """Models are cycles, so they die when each rank's garbage collection says so."""
    gc.collect()
    gc.disable()
    try:
        models = [fm.Setup(blocks=2).build() for _ in range(2)]
        handles = [tide.enable(model, strict=True, timeout=10) for model in models]
        for model in models:
            model(fm.batch(context, 0)).sum().backward()
        first = weakref.ref(models.pop(0))
        del model
        if context.rank == 0:
            gc.collect()
        assert (first() is None) == (context.rank == 0)
        handles[0].disable()
        models[0](fm.batch(context, 1)).sum().backward()
        assert handles[1].counters["all_gather"]["stock"] == 0
        again = fm.Setup(blocks=2).build()
        with tide.enable(again, strict=True, timeout=10):
            again(fm.batch(context, 2)).sum().backward()
        handles[1].disable()
    finally:
        gc.enable()


def test_a_model_that_has_died_on_one_rank(ranks: Ranks) -> None:
    ranks(2).run(dead_model)


class _Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def dropped_wrapper(context: Context) -> None:
    inner = fm.Setup(blocks=2).build()
    handle = tide.enable(_Wrapper(inner), strict=True)
    gc.collect()
    inner(fm.batch(context, 0)).sum().backward()
    assert handle.counters["all_gather"]["tide"] > 0
    handle.disable()


def test_a_wrapper_that_dies_before_its_groups(ranks: Ranks) -> None:
    ranks(2).run(dropped_wrapper)


def failing_pair(context: Context) -> None:
    """Two of four ranks fail for one of their process groups; nobody is left enabled."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = DeviceMesh.from_group(pairs[context.rank // 2], "cpu")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[0], mesh=pair)
    fully_shard(model, mesh=fm.mesh())
    connect = enable_module.channel_for

    def refuse(process_group: dist.ProcessGroup, *options: object) -> object:
        if process_group.size() == 2 and context.rank < 2:
            raise tide.fsdp.errors.make_error("out_of_memory", "no room")
        return connect(process_group, *options)

    enable_module.channel_for = refuse
    try:
        error = _refusal(model)
    finally:
        enable_module.channel_for = connect
    assert error.code == "out_of_memory" and "no room" in str(error)
    assert ("rank 0: no room" in str(error)) == (context.rank >= 2)
    with tide.enable(model, strict=True) as handle:
        model(torch.ones(4, 8)).sum().backward()
        assert handle.counters["all_gather"]["stock"] == 0


def test_a_failure_of_some_ranks_is_one_of_all(ranks: Ranks) -> None:
    ranks(4).run(failing_pair)


class _Poisoned:
    """A core whose last call has failed; a closed one answers nothing."""

    def __init__(self, core: Any) -> None:
        self._core, self._closed, self.regions = core, False, {}

    @property
    def poisoned(self) -> bool:
        assert not self._closed
        return True

    def close(self) -> None:
        self._core.close()
        self._closed = True


def recreated(_context: Context) -> None:
    """A communicator that could not be replaced once is tried again."""
    mesh = fm.new_cpu_mesh()
    model = fully_shard(nn.Linear(8, 8), mesh=mesh)
    tide.enable(model, strict=True).disable()
    make = communicators.Channel
    (known,) = [c for owner, c in communicators._channels.values() if owner() is mesh.get_group()]
    known.core = _Poisoned(known.core)

    def refuse(*_unused: object) -> None:
        raise tide.fsdp.errors.make_error("out_of_memory", "no room now")

    communicators.Channel = refuse
    try:
        assert _refusal(model).code == "out_of_memory"
    finally:
        communicators.Channel = make
    tide.enable(model, strict=True).disable()


def test_a_communicator_is_made_again(ranks: Ranks) -> None:
    ranks(2).run(recreated)


def test_orphans_of_several_gpus_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 knows the communicator under its own GPU."""
    closed = []
    device = torch.device("cuda", 1)
    core = SimpleNamespace(close=lambda: closed.append(True))
    channel = SimpleNamespace(device=device, ranks=[0, 1], core=core)
    channels = {("name", device, None, "in_place"): (lambda: None, channel)}
    monkeypatch.setattr(communicators, "_channels", channels)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    of_rank_0 = {("name", None, "in_place")}
    monkeypatch.setattr(communicators, "exchange_objects", lambda value, _: [of_rank_0, value])
    communicators._close_orphans(None, device)
    assert closed == [True] and not channels
