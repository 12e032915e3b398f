"""Backward all-gathers that find their parameters where the forward has left them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fsdp_models as fm
import pytest
import tide
import torch
import torch.distributed as dist
from spawn import Context, RankGroup
from tide.fsdp import group as groups_module
from tide.fsdp import kept_landings
from tide.fsdp.slots import SlotState
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

Ranks = Callable[[int], RankGroup]
_BLOCKS = 4
# Of the two slots, when the backward begins: the root's parameters stay in one of their own.
_KEPT_A_STEP = 2


def _enable(run: fm.Run, variables: dict[str, str] | None = None, **options: Any) -> None:
    """Enables with some variables set."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in (variables or {}).items():
            environment.setenv(name, value)
        run.enable(strict=True, **options)


def _refreshed(handle: Any) -> int:
    return sum(state.counters.refreshed for state in handle._states)


def last_layers(
    context: Context, variables: dict[str, str], a_step: int, options: dict[str, Any]
) -> None:
    """Each step refreshes so many landings, and nothing else changes."""
    handle = fm.parity(
        context,
        fm.Setup(blocks=_BLOCKS),
        lambda run: (
            _enable(run, variables, **options),
            run.steps(fm.adamw(run.model), 0, 3),
        ),
    )
    assert _refreshed(handle) == 3 * a_step
    gathers = {row["name"]: row["calls"]["all_gather"]["tide"] for row in handle.report().groups}
    assert gathers == {"(root)": 3, **{str(i): 6 for i in range(_BLOCKS)}}
    refreshed = {row["name"]: row["refreshed"] for row in handle.report().groups}
    assert refreshed == {str(i): 3 * (i >= _BLOCKS - a_step) for i in range(_BLOCKS)} | {
        "(root)": 0
    }
    assert ("all-gathers of the backward compared" in str(handle.report())) == (a_step > 0)


def test_the_last_layers_are_refreshed(ranks: Ranks) -> None:
    ranks(2).run(last_layers, {}, _KEPT_A_STEP, {})


def test_as_many_as_there_are_slots(ranks: Ranks) -> None:
    ranks(2).run(last_layers, {"TIDE_LANDING_SLOTS": "3"}, 3, {})


@pytest.mark.parametrize("nodes", [1, 2])
def test_off_or_several_nodes(ranks: Ranks, nodes: int) -> None:
    variables = {"TIDE_KEEP_LANDINGS": "off"} if nodes == 1 else {}
    ranks(4).run(last_layers, variables, 0, {"nodes": nodes})


def _on_parameters(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.mul_(1.5)


def _on_local_tensors(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.to_local().mul_(1.5)


def _on_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.to_local().data.mul_(1.5)


def _on_one_element_of_rank_1(module: nn.Module) -> None:
    if dist.get_rank() == 1:
        next(module.parameters()).to_local().data.view(-1)[-1:].add_(1)


def _from_another_rank(module: nn.Module) -> None:
    for parameter in module.parameters():
        # What every rank has; a broadcast may fill what is beyond that with anything.
        rows = len(parameter) // dist.get_world_size()
        dist.broadcast(parameter.to_local()[:rows], src=1)


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
            fm.settle_shards()
            loss.backward()
            run.note(f"step {step} grad", fm.snapshot(run.model, "grad"))
            run.model.zero_grad()

    handle = fm.parity(context, fm.Setup(blocks=_BLOCKS), drive)
    assert _refreshed(handle) == 2 * _KEPT_A_STEP


@pytest.mark.parametrize(
    "change",
    [
        _on_parameters,
        _on_local_tensors,
        _on_data,
        _on_one_element_of_rank_1,
        _from_another_rank,
        _by_an_optimizer,
    ],
)
def test_changed_shards_are_refreshed(ranks: Ranks, change: Callable[[nn.Module], None]) -> None:
    ranks(2).run(new_shards, change)


class _Moving(nn.Module):
    """Changes its unsharded parameter in every forward of some ranks; FSDP2 drops that."""

    def __init__(self, hidden: bool, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.hidden = hidden  # from version counters
        self.ranks = ranks
        self.shift = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.shift
        if dist.get_rank() in self.ranks:
            with torch.no_grad():
                (self.shift.data if self.hidden else self.shift).add_(1)
        return y


class _Chain(nn.Module):
    """Reads, in a recomputation in the backward, what the forward has changed."""

    def __init__(self, hidden: bool, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.moving = _Moving(hidden, ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.moving, x, use_reentrant=False).pow(2).sum()


def _moving_gradient(
    through_tide: bool, hidden: bool, ranks: tuple[int, ...]
) -> tuple[torch.Tensor, int]:
    torch.manual_seed(3)
    model = _Chain(hidden, ranks)
    fully_shard(model.moving, mesh=fm.mesh(), reshard_after_forward=True)
    handle = None
    if through_tide:
        handle = tide.enable(model, strict=True)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(8, 4)).backward()
    refreshed = 0
    if handle is not None:
        refreshed = _refreshed(handle)
        handle.disable()
    return model.moving.shift.grad.to_local().clone(), refreshed


def changed_parameters(_context: Context, hidden: bool, who: tuple[int, ...]) -> None:
    """An unsharded parameter that the forward changes in place is found by the comparison.

    On GPUs it is gathered if version counters tell.
    """
    expected, _ = _moving_gradient(through_tide=False, hidden=hidden, ranks=who)
    found, refreshed = _moving_gradient(through_tide=True, hidden=hidden, ranks=who)
    assert torch.equal(found, expected)
    assert refreshed == (0 if fm.DEVICE == "cuda" and not hidden else 2)


@pytest.mark.parametrize("who", [(0, 1), (1,)], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("hidden", [False, True])
def test_changed_parameters_are_refreshed(ranks: Ranks, hidden: bool, who: tuple[int, ...]) -> None:
    if fm.DEVICE == "cuda" and len(who) == 1 and not hidden:
        pytest.skip("on GPUs all ranks must write")
    ranks(2).run(changed_parameters, hidden, who)


class _Watched(SimpleNamespace):
    """A group's state as far as it is looked at for a landing."""

    keeps_landings = True

    def group_ref(self) -> Any:
        return SimpleNamespace(_training_state=TrainingState.PRE_BACKWARD)


@pytest.mark.parametrize(("device", "found"), [("cpu", True), ("cuda", False)])
def test_on_gpus_a_counted_write_to_parameters_is_gathered(device: str, found: bool) -> None:
    slot = SimpleNamespace(state=SlotState.FREE, turn=3, settle=lambda: None)
    channel = SimpleNamespace(device=torch.device(device))
    state = _Watched(channel=channel, outputs=[torch.zeros(4)], landed=None)
    assert kept_landings.find(state) is None
    kept_landings.note(state, slot)
    assert kept_landings.find(state) is slot
    state.outputs[0].add_(1)
    assert (kept_landings.find(state) is slot) == found
    kept_landings.note(state, slot)
    slot.turn += 1
    assert kept_landings.find(state) is None


def accumulation(context: Context) -> None:
    """Forwards gather always, also right after a backward that has left the first layers."""

    def drive(run: fm.Run) -> None:
        _enable(run)
        for step in range(4):
            run.model.set_requires_gradient_sync(step % 2 == 1)
            run.backward(step)
        run.note("grad", fm.snapshot(run.model, "grad"))

    handle = fm.parity(context, fm.Setup(blocks=_BLOCKS), drive)
    assert _refreshed(handle) == 4 * _KEPT_A_STEP


def test_accumulation(ranks: Ranks) -> None:
    ranks(2).run(accumulation)


def dropped(context: Context) -> None:
    """A refreshed landing that nobody comes to use is free again, and the next step is right."""

    def drive(run: fm.Run) -> None:
        _enable(run)
        for step in range(2):
            loss = run.model(fm.batch(context, step)).float().pow(2).mean()
            if run.use_tide:
                block = run.model[_BLOCKS - 2]
                state = groups_module.state_of(block._get_fsdp_state()._fsdp_param_group)
                group = state.group_ref()
                group._prefetch_unshard(group, "backward")
                assert state.counters.refreshed == 2 * step + 1
                group._all_gather_result = None
            loss.backward()
            run.note(f"step {step} grad", fm.snapshot(run.model, "grad"))
            run.model.zero_grad()

    fm.parity(context, fm.Setup(blocks=_BLOCKS), drive)


def test_a_dropped_one(ranks: Ranks) -> None:
    ranks(2).run(dropped)


def inference_first(context: Context) -> None:
    """The first forward makes the unsharded parameters, here as inference tensors."""

    def drive(run: fm.Run) -> None:
        _enable(run)
        with torch.inference_mode():
            run.note("inference", run.model(fm.batch(context, 0)))
            run.note("again", run.model(fm.batch(context, 1)))

    assert _refreshed(fm.parity(context, fm.Setup(blocks=_BLOCKS), drive)) == 0


def test_inference_first(ranks: Ranks) -> None:
    ranks(2).run(inference_first)


def test_more_slots_where_memory_is_plentiful() -> None:
    gib = 1 << 30
    assert kept_landings.more_slots(gib, 2 * gib, 100 * gib) == 2  # bf16, reduced in fp32
    assert kept_landings.more_slots(gib + 256, 2 * gib, 100 * gib) == 2
    assert kept_landings.more_slots(gib, gib, 100 * gib) == 1  # reduced as they are
    assert kept_landings.more_slots(gib, 2 * gib, 15 * gib) == 1
    assert kept_landings.more_slots(gib, 2 * gib, 7 * gib) == 0
    assert kept_landings.more_slots(gib, 0, 100 * gib) == 0  # frozen, or not reduced by TIDE
    assert kept_landings.more_slots(0, 0, gib) == 0
