"""Training on TIDE gives what training on torch's own path gives: dtypes, shapes, optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import fsdp_models as fm
import pytest
import torch
from spawn import Context, RankGroup
from torch import nn
from torch.distributed.fsdp import FSDPModule

Ranks = Callable[[int], RankGroup]


def policy(context: Context, name: str, reshard: bool | None) -> None:
    dtype = torch.bfloat16 if name == "bf16_params" else torch.float32
    setup = fm.Setup(policy=fm.POLICIES[name], dtype=dtype, reshard=reshard)
    counters = fm.parity(context, setup).counters
    assert counters["all_gather"]["tide"] > 0 and counters["all_gather"]["stock"] == 0
    assert counters["reduce_scatter"]["tide"] == 12 and counters["reduce_scatter"]["stock"] == 0


# torch sums bf16 in bf16, TIDE in fp32: the same for two ranks, and only there.
@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize(
    ("world", "name"),
    [(2, name) for name in fm.POLICIES] + [(3, "fp32"), (3, "bf16_fp32"), (4, "bf16_fp32")],
)
def test_policy(ranks: Ranks, world: int, name: str, reshard: bool | None) -> None:
    ranks(world).run(policy, name, reshard)


def _insert_odd(model: nn.Sequential) -> None:
    torch.manual_seed(3)
    model[0].odd = fm.Odd()
    model[0].register_forward_hook(lambda module, _, output: module.odd(output))


def odd_shapes(context: Context) -> None:
    setup = fm.Setup(edit=_insert_odd)
    fm.parity(context, setup)
    fm.parity(context, replace(setup, policy=fm.POLICIES["fp32"]))


@pytest.mark.parametrize("world", [2, 3])
def test_uneven_tiny_and_empty_parameters(ranks: Ranks, world: int) -> None:
    ranks(world).run(odd_shapes)


def optimizers(context: Context) -> None:
    def drive(kind: type, **options: object) -> fm.Drive:
        def run_steps(run: fm.Run) -> None:
            run.enable(strict=True)
            run.steps(kind(run.model.parameters(), lr=1e-2, **options), 0, 3)

        return run_steps

    for kind in (torch.optim.AdamW, torch.optim.SGD):
        for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
            if kind is torch.optim.SGD and "fused" in options:
                continue  # DTensor has no strategy for it
            fm.parity(context, fm.Setup(blocks=1), drive(kind, **options))


def test_optimizers(ranks: Ranks) -> None:
    ranks(2).run(optimizers)


def _freeze(model: nn.Sequential) -> None:
    model[0].up.weight.requires_grad_(False)
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)


def _unused(model: nn.Sequential) -> None:
    torch.manual_seed(5)
    model[0].spare = nn.Linear(5, 3)


def _tie(model: nn.Sequential) -> None:
    model[1].norm_again = model[1].norm
    model[1].down_again = nn.Linear(37, fm.WIDTH)
    model[1].down_again.weight = model[1].down.weight
    model[1].register_forward_hook(lambda m, _, y: y + m.down_again(m.up(m.norm_again(y))))


def edited(context: Context, name: str) -> None:
    edit = {"frozen": _freeze, "unused": _unused, "tied": _tie}[name]
    fm.parity(context, fm.Setup(edit=edit))


@pytest.mark.parametrize("name", ["frozen", "unused", "tied"])
def test_parameter_kinds(ranks: Ranks, name: str) -> None:
    ranks(2).run(edited, name)


def unused_zeros(context: Context) -> None:
    def drive(run: fm.Run) -> None:
        run.model.set_reduce_scatter_unused_params(True, recurse=True)
        fm.train(run)

    fm.parity(context, fm.Setup(edit=_unused), drive)


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="expected torch 2.13"
)
def test_zero_gradients_of_unused_parameters(ranks: Ranks) -> None:
    ranks(2).run(unused_zeros)


def toggled(context: Context) -> None:
    def drive(run: fm.Run) -> None:
        run.enable(strict=True)
        optimizer = fm.adamw(run.model)
        run.steps(optimizer, 0, 2)
        run.model[1].up.weight.requires_grad_(False)
        run.steps(optimizer, 2, 4)

    fm.parity(context, fm.Setup(), drive)


def test_requires_grad_toggled_after_sharding(ranks: Ranks) -> None:
    ranks(2).run(toggled)


def shard_one(context: Context) -> None:
    from torch.distributed.tensor import Shard

    def placement(parameter: nn.Parameter) -> Shard | None:
        even = parameter.ndim > 1 and parameter.shape[1] % context.world == 0
        return Shard(1) if even else None

    def drive(run: fm.Run) -> None:
        run.enable()
        run.steps(fm.adamw(run.model), 0, 3)

    handle = fm.parity(context, fm.Setup(placement=placement), drive)
    counters = handle.counters
    assert counters["reduce_scatter"]["stock"] == 0 and counters["all_gather"]["tide"] == 0
    assert "sharded on dimension 1" in str(handle.report())


@pytest.mark.parametrize("world", [2, 3])
def test_shard_on_second_dimension(ranks: Ranks, world: int) -> None:
    ranks(world).run(shard_one)


def train_blocks(run: fm.Run) -> None:
    run.enable(strict=True)
    for parameter in run.model[-1].parameters():  # not sharded, so nobody averages its gradient
        parameter.requires_grad_(False)
    blocks = [p for block in list(run.model)[:-1] for p in block.parameters()]
    run.steps(torch.optim.AdamW(blocks, lr=1e-2), 0, 3)


def no_root(context: Context) -> None:
    fm.parity(context, fm.Setup(shard_root=False, policy=fm.POLICIES["fp32"]), train_blocks)


def test_several_roots_in_one_model(ranks: Ranks) -> None:
    ranks(2).run(no_root)


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = fm.Block()
        self.outer = nn.Linear(fm.WIDTH, fm.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(self.outer(x)))


class _NestedSetup(fm.Setup):
    def build(self) -> nn.Sequential:
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(7)
        model = nn.Sequential(_Nested(), _Nested(), nn.Linear(fm.WIDTH, 11))
        for module in (model[0].inner, model[1].inner, model[0], model[1], model):
            fully_shard(module, mesh=fm.mesh(), mp_policy=self.policy)
        return model


def nested(context: Context) -> None:
    fm.parity(context, _NestedSetup())


def test_nested_groups(ranks: Ranks) -> None:
    ranks(2).run(nested)


class _GroupedSetup(fm.Setup):
    def build(self) -> nn.Sequential:
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(7)
        model = nn.Sequential(*[fm.Block() for _ in range(4)], nn.Linear(fm.WIDTH, 11))
        fully_shard([model[0], model[1]], mesh=fm.mesh(), mp_policy=self.policy)
        fully_shard([model[2], model[3]], mesh=fm.mesh(), mp_policy=self.policy)
        fully_shard(model, mesh=fm.mesh(), mp_policy=self.policy)
        return model


def grouped(context: Context) -> None:
    fm.parity(context, _GroupedSetup())


def test_groups_of_several_modules(ranks: Ranks) -> None:
    ranks(2).run(grouped)
