"""Backward all-gathers that find their parameters where the forward has left them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import fsdp_models as fm
import pytest
import tide
import torch
from spawn import Context, RankGroup
from tide.fsdp import group as groups_module
from torch import nn
from torch.distributed.fsdp import fully_shard

Ranks = Callable[[int], RankGroup]
_BLOCKS = 4
# Of the two slots, when the backward begins: the root's parameters stay in one of their own.
_KEPT_A_STEP = 2


@contextlib.contextmanager
def _variable(keep: str = "on") -> Iterator[None]:
    """Sets it for what is enabled inside."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TIDE_KEEP_LANDINGS", keep)
        yield


def _enable(run: fm.Run, keep: str = "on", **options: Any) -> None:
    with _variable(keep):
        run.enable(strict=True, **options)


def _kept(handle: Any) -> int:
    return sum(state.counters.kept for state in handle._states)


def last_layers(context: Context, nodes: int) -> None:
    """Each step leaves out two all-gathers, and nothing else changes."""
    handle = fm.parity(
        context,
        fm.Setup(blocks=_BLOCKS),
        lambda run: (
            _enable(run, nodes=nodes),
            run.steps(fm.adamw(run.model), 0, 3),
        ),
    )
    assert _kept(handle) == 3 * _KEPT_A_STEP
    gathers = {row["name"]: row["calls"]["all_gather"]["tide"] for row in handle.report().groups}
    assert gathers == {"(root)": 3, **{str(i): 6 for i in range(_BLOCKS)}}
    assert "6 all-gathers of the backward moved nothing" in str(handle.report())


def test_the_last_layers_are_not_gathered_again(ranks: Ranks) -> None:
    ranks(2).run(last_layers, 1)


def test_on_two_nodes(ranks: Ranks) -> None:
    ranks(4).run(last_layers, 2)


def switched_off(context: Context) -> None:
    """Without the variable, and with off, everything is gathered."""
    assert _kept(fm.parity(context, fm.Setup(blocks=_BLOCKS))) == 0

    def drive(run: fm.Run) -> None:
        _enable(run, keep="off")
        run.steps(fm.adamw(run.model), 0, 2)

    assert _kept(fm.parity(context, fm.Setup(blocks=_BLOCKS), drive)) == 0


def test_off(ranks: Ranks) -> None:
    ranks(2).run(switched_off)


def _on_parameters(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.mul_(1.5)


def _on_local_tensors(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.to_local().mul_(1.5)


def _by_an_optimizer(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(module.parameters(), lr=0.1, foreach=True).step()
    for parameter in module.parameters():
        parameter.grad = None


def new_shards(context: Context, change: Callable[[nn.Module], None]) -> None:
    """Shards that change between forward and backward are gathered, as FSDP2 does."""

    def drive(run: fm.Run) -> None:
        _enable(run)
        for step in range(2):
            loss = run.model(fm.batch(context, step)).float().pow(2).mean()
            with torch.no_grad():
                change(run.model[_BLOCKS - 1])
            loss.backward()
            run.note(f"step {step} grad", fm.snapshot(run.model, "grad"))
            run.model.zero_grad()

    handle = fm.parity(context, fm.Setup(blocks=_BLOCKS), drive)
    assert _kept(handle) == 0  # the last block took the slot of the one before


@pytest.mark.parametrize("change", [_on_parameters, _on_local_tensors, _by_an_optimizer])
def test_changed_shards_are_gathered(ranks: Ranks, change: Callable[[nn.Module], None]) -> None:
    ranks(2).run(new_shards, change)


class _Moving(nn.Module):
    """Changes its unsharded parameter in every forward; FSDP2 drops that."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.shift
        with torch.no_grad():
            self.shift.add_(1)
        return y


class _Chain(nn.Module):
    """Reads, in a recomputation in the backward, what the forward has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.moving = _Moving()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.moving, x, use_reentrant=False).pow(2).sum()


def _moving_gradient(through_tide: bool) -> tuple[torch.Tensor, int]:
    torch.manual_seed(3)
    model = _Chain()
    fully_shard(model.moving, mesh=fm.cpu_mesh())
    handle = None
    if through_tide:
        with _variable():
            handle = tide.enable(model, strict=True)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(8, 4)).backward()
    kept = 0
    if handle is not None:
        kept = _kept(handle)
        handle.disable()
    return model.moving.shift.grad.to_local().clone(), kept


def changed_parameters(_context: Context) -> None:
    """An unsharded parameter that the forward changes in place is gathered again."""
    expected, _ = _moving_gradient(through_tide=False)
    found, kept = _moving_gradient(through_tide=True)
    assert torch.equal(found, expected) and kept == 0


def test_changed_parameters_are_gathered(ranks: Ranks) -> None:
    ranks(2).run(changed_parameters)


def accumulation(context: Context) -> None:
    """Forwards gather always, also right after a backward that has left the first layers."""

    def drive(run: fm.Run) -> None:
        _enable(run)
        for step in range(4):
            run.model.set_requires_gradient_sync(step % 2 == 1)
            run.backward(step)
        run.note("grad", fm.snapshot(run.model, "grad"))

    handle = fm.parity(context, fm.Setup(blocks=_BLOCKS), drive)
    assert _kept(handle) == 4 * _KEPT_A_STEP


def test_accumulation(ranks: Ranks) -> None:
    ranks(2).run(accumulation)


def dropped(context: Context) -> None:
    """A kept landing that nobody comes to use is free again, and the next step is right."""

    def drive(run: fm.Run) -> None:
        _enable(run)
        for step in range(2):
            loss = run.model(fm.batch(context, step)).float().pow(2).mean()
            if run.use_tide:
                block = run.model[_BLOCKS - 2]
                state = groups_module.state_of(block._get_fsdp_state()._fsdp_param_group)
                group = state.group_ref()
                group._prefetch_unshard(group, "backward")
                assert state.counters.kept == 2 * step + 1
                group._all_gather_result = None
            loss.backward()
            run.note(f"step {step} grad", fm.snapshot(run.model, "grad"))
            run.model.zero_grad()

    fm.parity(context, fm.Setup(blocks=_BLOCKS), drive)


def test_a_dropped_one(ranks: Ranks) -> None:
    ranks(2).run(dropped)


def _probe_steps_on_rank_0(run: fm.Run) -> None:
    """An optimizer of other parameters between forward and backward, on one rank only."""
    _enable(run)
    probe = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([probe], lr=0.1)
    loss = run.model(fm.batch(run.context, 0)).float().pow(2).mean()
    if run.context.rank == 0:
        probe.grad = torch.ones(3)
        optimizer.step()
    loss.backward()
    run.note("grad", fm.snapshot(run.model, "grad"))


def other_optimizers(context: Context) -> None:
    handle = fm.parity(context, fm.Setup(blocks=_BLOCKS), _probe_steps_on_rank_0)
    assert _kept(handle) == _KEPT_A_STEP


def test_optimizers_of_other_parameters_do_not_count(ranks: Ranks) -> None:
    ranks(2).run(other_optimizers)


def inference_first(context: Context, keep: str) -> None:
    """The first forward makes the unsharded parameters, here as inference tensors."""

    def drive(run: fm.Run) -> None:
        _enable(run, keep=keep)
        with torch.inference_mode():
            run.note("inference", run.model(fm.batch(context, 0)))
            run.note("again", run.model(fm.batch(context, 1)))

    assert _kept(fm.parity(context, fm.Setup(blocks=_BLOCKS), drive)) == 0


@pytest.mark.parametrize("keep", ["on", "off"])
def test_inference_first(ranks: Ranks, keep: str) -> None:
    ranks(2).run(inference_first, keep)
