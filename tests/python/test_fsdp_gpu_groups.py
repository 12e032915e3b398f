"""FSDP2 on GPUs over virtual nodes and over several process groups; ranks may share a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tide
import torch
import torch.distributed as dist
from gpu_models import MIXED, Run, missing, place
from spawn import Context, RankGroup
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

_RANKS = 4
_STEPS = 3

pytestmark = [
    pytest.mark.skipif(missing(_RANKS) is not None, reason=str(missing(_RANKS))),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankGroup]:
    """Four processes on as many GPUs as there are."""
    group = RankGroup(_RANKS)
    yield group
    group.stop()


_groups: dict[tuple[int, ...], Any] = {}


def _mesh(context: Context, *subgroups: tuple[int, ...]) -> DeviceMesh:
    """The one of these disjoint groups that has the rank. Collective over all ranks."""
    place(context)
    for ranks in subgroups:
        if ranks not in _groups:
            _groups[ranks] = dist.new_group(ranks, backend="cpu:gloo,cuda:nccl")
    mine = next(ranks for ranks in subgroups if context.rank in ranks)
    return DeviceMesh.from_group(_groups[mine], "cuda")


class _Weighted(nn.Module):
    """Its gradients are the weights of the rank's loss: whole numbers, so that sums are exact."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(96, 37)
        self.bias = nn.Parameter(torch.zeros(5, 3))
        self.inner = inner

    def forward(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        loss = torch.zeros((), device="cuda")
        for parameter in (self.linear.weight, self.linear.bias, self.bias):
            weights = torch.randint(-100, 101, parameter.shape, generator=generator)
            loss = loss + (parameter.float() * weights.cuda()).sum()
        return loss if self.inner is None else loss + self.inner(rank + 10)


def _gradients(model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    model(rank).backward()
    found = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def _compare(model: nn.Module, context: Context, **options: Any) -> None:
    """Several steps through TIDE give stock's gradients, and all of their calls are TIDE's."""
    expected = _gradients(model, context.rank)
    with tide.enable(model, strict=True, **options) as handle:
        for step in range(_STEPS):
            for name, gradient in _gradients(model, context.rank).items():
                assert torch.equal(gradient, expected[name]), (step, name)
        counters = handle.counters
    for counted in counters.values():
        assert counted["tide"] > 0 and counted["stock"] == 0, counters


def on_nodes(context: Context, nodes: int, mode: str) -> None:
    """A chain of three groups on virtual nodes."""
    torch.manual_seed(7)
    mesh = _mesh(context, tuple(range(context.world)))
    policy = MixedPrecisionPolicy(**MIXED)
    with torch.device("cuda"):
        model = _Weighted(_Weighted(_Weighted()))
    for module in (model.inner.inner, model.inner, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    _compare(model, context, nodes=nodes, mode=mode)


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("mode", ["in_place", "slot_reuse"])
def test_gradients_on_virtual_nodes(four_ranks: RankGroup, nodes: int, mode: str) -> None:
    four_ranks.run(on_nodes, nodes, mode, limit_s=120)


def with_experts(context: Context, mode: str) -> None:
    """Experts are sharded over two ranks, which hold other experts than the two beside them."""
    torch.manual_seed(7 + context.rank // 2)
    everyone = _mesh(context, tuple(range(context.world)))
    pairs = [(rank, rank + 1) for rank in range(0, context.world, 2)]
    policy = MixedPrecisionPolicy(**MIXED)
    with torch.device("cuda"):
        experts = _Weighted(_Weighted())
        model = _Weighted(_Weighted(experts))
    for module in (experts.inner, experts):
        fully_shard(module, mesh=_mesh(context, *pairs), mp_policy=policy)
    for module in (model.inner, model):
        fully_shard(module, mesh=everyone, mp_policy=policy)
    _compare(model, context, mode=mode)


@pytest.mark.parametrize("mode", ["in_place", "slot_reuse"])
def test_gradients_with_experts(four_ranks: RankGroup, mode: str) -> None:
    four_ranks.run(with_experts, mode, limit_s=120)


def losses(context: Context) -> None:
    """Training on two virtual nodes, twice: the same bits, and stock's losses but for rounding."""
    found = []
    for nodes in (0, 2, 2):
        run = Run(context, MIXED)
        if nodes == 0:
            found.append([run.step() for _ in range(20)])
            continue
        with tide.enable(run.model, strict=True, nodes=nodes):
            found.append([run.step() for _ in range(20)])
    stock, first, second = found
    assert first == second
    torch.testing.assert_close(torch.tensor(first), torch.tensor(stock), rtol=1e-2, atol=1e-4)


def test_losses_on_virtual_nodes(four_ranks: RankGroup) -> None:
    four_ranks.run(losses, limit_s=120)
