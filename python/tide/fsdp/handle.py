"""An enabled model: its report, its counters, and the way back to torch's collectives."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tide._core import format_bytes
from tide.fsdp import group as groups_module
from tide.fsdp import patches
from tide.fsdp.all_gather import TideAllGatherResult
from tide.fsdp.group import ALL_GATHER, REDUCE_SCATTER, GroupState
from tide.fsdp.members import named_groups
from tide.fsdp.options import Options
from tide.fsdp.report import Report
from tide.fsdp.segment_memory import LEAST
from tide.fsdp.slots import SlotPool

if TYPE_CHECKING:
    from tide.fsdp.communicators import Channel


def _reasons(state: GroupState) -> set[str]:
    """Returns why the group, or some of its calls so far, run on torch's path."""
    reasons = set(state.reasons.values())
    if len(state.reasons) == 1:
        reasons = {f"{name}: {reason}" for name, reason in state.reasons.items()}
    for collective, reason in state.counters.reasons:
        if reason != state.reasons.get(collective):
            reasons.add(f"some calls of {collective}: {reason}")
    return reasons


class Handle:
    """An enabled model. Disabled by ``disable()`` or ``tide.disable(model)``."""

    def __init__(
        self, model: nn.Module, options: Options, states: list[GroupState], pools: list[SlotPool]
    ) -> None:
        self._model = weakref.ref(model)
        self._options, self._states, self._pools = options, states, pools
        self._enabled = True
        # A module that merely contains the groups must not die before them: they live on enabled.
        for state in states:
            state.group_ref()._tide_model = model
        # The model may die enabled; nothing in the program's order follows from that.
        self._at_death = weakref.finalize(model, _abandon, states, pools)
        self._at_death.atexit = False

    @property
    def counters(self) -> dict[str, dict[str, Any]]:
        """Calls of all groups: {collective: {"tide", "stock", "reasons": {reason: calls}}}."""
        total = groups_module.CallCounters()
        for state in self._states:
            total.calls.update(state.counters.calls)
            total.reasons.update(state.counters.reasons)
        return total.as_dict()

    @property
    def pools(self) -> tuple[SlotPool, ...]:
        """The landing slots, one pool for each process group."""
        return tuple(self._pools)

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The communicators in use, one for each process group."""
        found = {id(s.channel): s.channel for s in self._states if s.channel is not None}
        return tuple(found.values())

    def _timeout_notes(self) -> set[str]:
        """Says if a communicator made earlier keeps another time limit than was asked for."""
        asked = self._options.timeout
        return {
            f"the communicator was made earlier with a timeout of {channel.timeout:g} s"
            for channel in self.channels
            if asked is not None and channel.timeout != asked
        }

    def _unshared_notes(self) -> set[str]:
        """Says why ranks of a node do not share their landings, if so."""
        reasons = {pool.unshared_reason for pool in self._pools}
        return {f"every rank has landings of its own ({why})" for why in reasons if why}

    def _unwatched_notes(self) -> set[str]:
        """Says why other calls and ended processes are noticed late, if so."""
        reasons = {channel.core.unwatched_reason for channel in self.channels}
        return {
            f"a rank that ends or makes other calls may be noticed at the deadline only ({why})"
            for why in reasons
            if why
        }

    def _node_notes(self) -> set[str]:
        """Says how ranks are split into virtual nodes, if they are."""
        cores = [channel.core for channel in self.channels]
        return {
            f"{core.nodes} virtual nodes of {core.local_ranks} ranks"
            for core in cores
            if core.nodes > 1
        }

    def _multicast_notes(self) -> set[str]:
        """Says on GPUs how copies reach the ranks of a node."""
        reasons = {c.core.unicast_reason for c in self.channels if c.device.type == "cuda"}
        return {
            f"copies go to each GPU of a node by itself ({why})"
            if why
            else "copies to all GPUs of a node are multicast by the switch"
            for why in reasons
        }

    def _segment_notes(self) -> list[str]:
        """Says on GPUs whether torch's memory accounting has TIDE's segments."""
        memories = [c.segment_memory for c in self.channels if c.segment_memory is not None]
        reasons = {
            f"torch does not count TIDE's segments ({m.reason})" for m in memories if m.reason
        }
        least = format_bytes(LEAST)
        counted = f"torch's memory accounting has TIDE's segments of {least} and more"
        return [*sorted(reasons), *([counted] if any(m.counted for m in memories) else [])]

    def _mode_notes(self) -> list[str]:
        """Says what mode auto chose on GPUs, and what mode slot_reuse could not do."""
        reuses = any(state.reuse_slots for state in self._states)
        if self._options.mode == "auto" and any(c.device.type == "cuda" for c in self.channels):
            if not reuses:
                return ["mode auto: in_place, since four landings of the largest group are free"]
            return ["mode auto: slot_reuse, since memory is short", *self._in_place_notes()]
        if self._options.mode != "slot_reuse":
            return []
        if not reuses:
            several = any(channel.core.nodes > 1 for channel in self.channels)
            outbox = "the outbox between nodes is partial; " if several else ""
            return [
                f"mode slot_reuse: {outbox}gradients are read where autograd left them, because on "
                "CPU they are consumed inside the call"
            ]
        return self._in_place_notes()

    def _in_place_notes(self) -> list[str]:
        reasons = {reason for state in self._states for reason in state.in_place}
        return [f"mode slot_reuse: some calls ran in place: {why}" for why in sorted(reasons)]

    def _kept_notes(self) -> list[str]:
        """Says what is done where an all-gather finds its result in place."""
        if not any(state.counters.refreshed for state in self._states):
            return []
        return [
            "refreshed: all-gathers of the backward compared their shards with what the forward "
            "had left in the landing, and moved what differed (TIDE_KEEP_LANDINGS=off gathers all)"
        ]

    def _late_notes(self) -> list[str]:
        """Names the groups that fully_shard has made since."""
        model = self._model()
        if model is None or not self._enabled:
            return []
        late = [
            name
            for name, group, _ in named_groups(model)
            if group.fsdp_params and groups_module.state_of(group) is None
        ]
        if not late:
            return []
        return [
            f"on torch's path, since fully_shard came after tide.enable: {', '.join(late)} "
            "(tide.disable, then tide.enable, takes them in)"
        ]

    def report(self) -> Report:
        """Returns which collective of which group runs where, and why."""
        rows = []
        for state in self._states:
            rows.append(
                {
                    "name": state.name,
                    "all_gather": state.path(ALL_GATHER),
                    "reduce_scatter": state.path(REDUCE_SCATTER),
                    "reason": "; ".join(sorted(_reasons(state))),
                    "landing_bytes": state.landing_bytes if ALL_GATHER not in state.reasons else 0,
                    "calls": state.counters.as_dict(),
                    "refreshed": state.counters.refreshed,
                }
            )
        unshared = self._unshared_notes()
        notes = [*self._timeout_notes(), *self._node_notes(), *unshared, *self._segment_notes()]
        notes += sorted(self._multicast_notes())
        notes += sorted({channel.sums.note for channel in self.channels if channel.sums.note})
        notes += sorted(self._unwatched_notes())
        notes += sorted({channel.aliasing for channel in self.channels if channel.aliasing})
        notes += [*self._mode_notes(), *self._kept_notes(), *self._late_notes()]
        if not self._enabled:
            notes.append("disabled")
        regions: Counter[str] = Counter()
        for channel in self.channels:
            regions.update(channel.core.regions)
        memory = {
            "landing": sum(pool.bytes for pool in self._pools),
            "slots": sum(len(pool.slots) for pool in self._pools),
            **regions,
        }
        world = max((state.world for state in self._states), default=1)
        owner = "rank" if unshared else "node"
        return Report(rows, self._options.mode, notes, memory, world, owner)

    def disable(self) -> None:
        """Returns the model to torch's collectives; a second call does nothing.

        To be called at the same point of the program on all ranks.
        """
        if not self._enabled:
            return
        self._enabled = False
        if self._at_death.detach() is None:
            return  # the model has died, on this rank, and that has done all of it
        for state in self._states:
            group = state.group_ref()
            if group is not None:
                # A prefetch that nobody waited for is gathered again by torch when needed.
                pending = group._all_gather_result
                if isinstance(pending, TideAllGatherResult):
                    if pending.all_gather_event is not None:
                        torch.cuda.current_stream().wait_event(pending.all_gather_event)
                    group._all_gather_result = None
                groups_module.forget_params(group.fsdp_params)
                del group._tide_model
            state.detach()
        for pool in self._pools:
            pool.close()
        patches.remove()
        model = self._model()
        if model is not None:
            _handles.pop(model, None)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *unused: object) -> None:
        self.disable()


def _abandon(states: list[GroupState], pools: list[SlotPool]) -> None:
    """Cleans up after a model that was garbage-collected while enabled."""
    for state in states:
        state.detach()
    for pool in pools:
        pool.close()
    patches.remove()


_handles: weakref.WeakKeyDictionary[nn.Module, Handle] = weakref.WeakKeyDictionary()


def remember(model: nn.Module, handle: Handle) -> None:
    """Makes ``handle_of`` know the handle of an enabled model."""
    _handles[model] = handle


def handle_of(model: nn.Module) -> Handle | None:
    """Returns the handle of an enabled model."""
    return _handles.get(model) if isinstance(model, nn.Module) else None
