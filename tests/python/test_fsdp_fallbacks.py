"""What TIDE cannot serve: it trains on torch's own path, and the report says why."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import fsdp_models as fm
import pytest
import tide
import torch
import torch.utils._pytree as pytree
from spawn import Context, RankGroup
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

Ranks = Callable[[int], RankGroup]
_CLONE_NEWNET = 0x40000000


class Bf16Gather(torch.Tensor):
    """Fp32 shards that travel as bf16: an extension of FSDP2's all-gather, as for fp8."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Bf16Gather:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype
        )

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(cls, lambda x: x._data, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func is torch.ops.aten.mm.default:
            return out
        return pytree.tree_map_only(torch.Tensor, cls, out)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        return (self._data.to(torch.bfloat16),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: None, dtype: Any, *, out: Any = None
    ) -> Any:
        (gathered,) = outputs
        if out is not None:  # the unsharded parameter, a view of what was gathered
            assert out.untyped_storage().data_ptr() == gathered.untyped_storage().data_ptr()
            return None
        return gathered, (gathered,)


def _falls_back(context: Context, build: Callable[[], nn.Module], reason: str) -> None:
    """Both collectives stay stock, the training is stock's, and strict refuses."""

    def drive(run: fm.Run) -> None:
        run.enable()
        run.steps(fm.adamw(run.model), 0, 2)

    runs = []
    for use_tide in (False, True):
        torch.manual_seed(7)
        run = fm.Run(context, build(), use_tide)
        drive(run)
        runs.append(run)
    for (label, expected), (_, actual) in zip(runs[0].log, runs[1].log, strict=True):
        assert torch.equal(expected, actual), label
    handle = runs[1].handle
    for group in handle.report().groups:
        assert group["all_gather"] == group["reduce_scatter"] == "stock"
        assert reason in group["reason"], group["reason"]
    assert reason in str(handle.report())
    counters = handle.counters
    assert counters["all_gather"]["tide"] == counters["reduce_scatter"]["tide"] == 0
    assert counters["all_gather"]["stock"] > 0 and counters["reduce_scatter"]["stock"] > 0
    handle.disable()
    with pytest.raises(tide.Error) as caught:
        tide.enable(build(), strict=True)
    assert caught.value.code == "unsupported" and reason in str(caught.value)


def extension(context: Context) -> None:
    def build() -> nn.Module:
        model = nn.Linear(fm.WIDTH, 6, bias=False)
        model.weight = nn.Parameter(Bf16Gather(model.weight.detach()))
        return fully_shard(model, mesh=fm.mesh(), mp_policy=fm.BF16_POLICY)

    _falls_back(context, build, "tensor extension on weight")


def test_tensor_extensions(ranks: Ranks) -> None:
    ranks(2).run(extension)


def tensor_parallel(context: Context) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(fm.WIDTH, 8), nn.Linear(8, 6))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        return fully_shard(parallelize_module(model, mesh["tensor"], plan), mesh=mesh["shard"])

    _falls_back(context, build, "DTensor parameter 0.weight")


def test_tensor_parallelism(ranks: Ranks) -> None:
    ranks(4).run(tensor_parallel)


def _linear(mesh: DeviceMesh) -> nn.Module:
    return fully_shard(nn.Linear(fm.WIDTH, 6), mesh=mesh)


def another_machine(context: Context) -> None:
    """Rank 1 in a network of its own, where it hears no Unix socket; gloo is connected already."""
    if context.rank == 1 and ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    build = functools.partial(_linear, fm.mesh())
    _falls_back(context, build, "not one node: ranks 0 and 1 do not share one machine's memory")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a network namespace")
def test_ranks_in_two_network_namespaces() -> None:
    group = RankGroup(2)  # of its own: rank 1 does not come back
    try:
        group.run(another_machine)
    finally:
        group.stop()


def unreachable_name(context: Context) -> None:
    """The same without root: rank 1 hears of a socket that is not there."""
    from tide.fsdp import communicators

    exchange = communicators.exchange_objects

    def misled(value: object, process_group: Any) -> list[Any]:
        answers = exchange(value, process_group)
        named = isinstance(value, bytes) and value.startswith(b"tide-") and context.rank == 1
        return [b"tide-elsewhere"] * len(answers) if named else answers

    # The ranks that an earlier test connected stay connected.
    build = functools.partial(_linear, fm.new_cpu_mesh())
    communicators.exchange_objects = misled
    try:
        _falls_back(context, build, "not one node: ranks 0 and 1 do not share")
    finally:
        communicators.exchange_objects = exchange
    with tide.enable(build(), strict=True):
        pass


def test_ranks_that_do_not_reach_each_other(ranks: Ranks) -> None:
    ranks(2).run(unreachable_name)
