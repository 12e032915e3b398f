"""The early all-gather of mode in_place, on CPUs, where its order shows without streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsdp_models as fm
import pytest
import tide
import torch
from spawn import Context, RankGroup
from tide.fsdp import contract
from tide.fsdp import group as groups_module
from torch.distributed.fsdp import FSDPModule

Ranks = Callable[[int], RankGroup]


class _Recorder:
    """A communicator that notes its collectives."""

    def __init__(self, core: Any, names: dict[int, str], calls: list[tuple[str, str]]) -> None:
        self._core, self._names, self._calls = core, names, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def all_gather(self, gid: int, *args: Any, **kwargs: Any) -> None:
        self._calls.append(("AG", self._names[gid]))
        self._core.all_gather(gid, *args, **kwargs)

    def reduce_scatter(self, gid: int, *args: Any, **kwargs: Any) -> None:
        self._calls.append(("RS", self._names[gid]))
        self._core.reduce_scatter(gid, *args, **kwargs)


def _states(model: torch.nn.Module) -> dict[str, groups_module.GroupState]:
    found = {}
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for one in contract.param_groups(module._get_fsdp_state()):
            if one.fsdp_params and (entry := groups_module.find(one.fsdp_params[0])):
                found[entry[0].name] = entry[0]
    return found


def _note_backward(state: groups_module.GroupState, calls: list[tuple[str, str]]) -> None:
    group = state.group_ref()
    before = group.pre_backward

    def noting(*args: Any) -> None:
        calls.append(("backward", state.name))
        before(*args)

    group.pre_backward = noting


def _backward(context: Context, early: bool, nodes: int) -> tuple[list[tuple[str, str]], list[Any]]:
    """The collectives of one backward, in order, and the gradients."""
    model = fm.Setup(blocks=4).build()
    calls: list[tuple[str, str]] = []
    with tide.enable(model, strict=True, nodes=nodes) as handle:
        states = _states(model)
        for state in states.values():
            state.early_all_gather = early
            _note_backward(state, calls)
        for channel in handle.channels:
            names = {state.gid: name for name, state in states.items()}
            channel.core = _Recorder(channel.core, names, calls)
        for _ in range(2):
            loss = model(fm.batch(context, 0)).sum()
            calls.clear()
            loss.backward()
        for channel in handle.channels:
            channel.core = channel.core._core
    return calls, [parameter.grad.to_local().clone() for parameter in model.parameters()]


def order(context: Context, nodes: int) -> None:
    """RS(l) is followed by AG(l - 2), before the backward of l - 1 begins; nothing else changes."""
    stock, expected = _backward(context, early=False, nodes=nodes)
    calls, grads = _backward(context, early=True, nodes=nodes)
    assert sorted(calls) == sorted(stock)
    for layer in (3, 2):
        at = calls.index(("RS", str(layer)))
        behind = [("AG", str(layer - 2)), ("backward", str(layer - 1))]
        assert calls[at + 1 : at + 3] == behind, calls
        at = stock.index(("RS", str(layer)))
        assert stock[at + 1 : at + 3] == behind[::-1], stock
    for ours, theirs in zip(grads, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_order_of_enqueues(ranks: Ranks) -> None:
    ranks(2).run(order, 1)


@pytest.mark.slow
def test_order_of_enqueues_on_two_nodes(ranks: Ranks) -> None:
    ranks(4).run(order, 2)
