"""Enabling and disabling TIDE for a model."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

import tide
from tide import _core
from tide.fsdp import group as groups_module
from tide.fsdp import patches, settings, storage
from tide.fsdp.all_gather import TideAllGatherResult
from tide.fsdp.communicators import Channel, channel_for, check_agreement
from tide.fsdp.errors import make_error
from tide.fsdp.group import ALL_GATHER, COLLECTIVES, REDUCE_SCATTER, GroupState
from tide.fsdp.report import Report
from tide.fsdp.slots import SlotPool

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

_MODES = ("auto", "in_place", "slot_reuse")
_MOST_SECONDS = 1e9  # 31 years; the core counts nanoseconds in 64 bits


def _is_timeout(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 < value <= _MOST_SECONDS


def _is_count(value: object) -> bool:
    """Whether the core can take ``value`` as a number of things: it fits into an int."""
    return type(value) is int and 0 < value < 2**31


@dataclass(frozen=True)
class Options:
    """What the caller of ``tide.enable`` asked for; see there."""

    mode: str = "auto"
    strict: bool = False
    collectives: tuple[str, ...] = COLLECTIVES
    timeout: float | None = None
    nodes: int | None = None

    def problem(self) -> str | None:
        """Returns what is wrong with the options, or None."""
        if self.mode not in _MODES:
            return f"mode must be one of {', '.join(_MODES)}, not {self.mode!r}"
        unknown = sorted(set(self.collectives) - set(COLLECTIVES))
        if unknown or not self.collectives:
            wanted = ", ".join(COLLECTIVES)
            return f"collectives must be some of {wanted}, not {list(self.collectives)!r}"
        if self.timeout is not None and not _is_timeout(self.timeout):
            return (
                f"timeout must be a positive number of seconds, at most {_MOST_SECONDS:g}, "
                f"not {self.timeout!r}"
            )
        if self.nodes is not None and not _is_count(self.nodes):
            return f"nodes must be a positive whole number, not {self.nodes!r}"
        return settings.problem()

    def lane_mode(self) -> str:
        """Returns the mode that decides how deep the outbox is."""
        return "in_place" if self.mode == "auto" else self.mode


@dataclass
class _Member:
    """One FSDPParamGroup inside the model, before it is enabled."""

    group: FSDPParamGroup
    state: GroupState
    kept: bool  # stays unsharded between forward and backward

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that the group is sharded over, or None if there is nothing to share."""
        info = self.group.mesh_info
        if not isinstance(info, FSDPMeshInfo) or info.shard_mesh_size == 1:
            return None
        return info.shard_process_group


def _fsdp_states(model: nn.Module) -> list[tuple[FSDPState, str, bool]]:
    """Returns (state, module name, is outermost) in the order of ``named_modules``."""
    found: dict[FSDPState, tuple[str, bool]] = {}
    outer: list[str] = []
    for name, module in model.named_modules():
        state = _get_module_fsdp_state(module)
        if state is None or state in found:
            continue
        outermost = not any(prefix == "" or name.startswith(f"{prefix}.") for prefix in outer)
        if outermost:
            outer.append(name)
        found[state] = (name or "(root)", outermost)
    return [(state, name, outermost) for state, (name, outermost) in found.items()]


def _collect(model: nn.Module) -> list[_Member]:
    """Describes every FSDPParamGroup inside ``model``."""
    prefixes = {id(module): name for name, module in model.named_modules()}
    members = []
    for state, name, outermost in _fsdp_states(model):
        for i, group in enumerate(state._fsdp_param_groups):
            label = name if len(state._fsdp_param_groups) == 1 else f"{name}#{i}"
            world = getattr(group.mesh_info, "shard_mesh_size", 1)
            layouts = []
            for param in group.fsdp_params:
                info = param._module_info
                prefix = prefixes.get(id(info.module), "")
                full = f"{prefix}.{info.param_name}" if prefix else info.param_name
                layouts.append(groups_module.describe_param(param, full, world))
            becomes_kept = outermost and bool(state._auto_reshard_after_forward)
            kept = group.post_forward_mesh_info is None or becomes_kept
            members.append(_Member(group, GroupState(group, label, layouts), kept))
    return members


def _signature(members: list[_Member], options: Options) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "tide": tide.__version__,
        "mode": options.mode,
        "strict": options.strict,
        "collectives": sorted(options.collectives),
        "timeout": options.timeout,
        "nodes": options.nodes,
        "environment": settings.signature(),
        "groups": [
            {
                "name": member.state.name,
                "world": member.state.world,
                "params": [layout.signature() for layout in member.state.layouts],
                "stock": member.state.reasons,
            }
            for member in members
        ],
    }


def _any_enabled(members: list[_Member]) -> bool:
    params = (param for member in members for param in member.group.fsdp_params)
    return any(groups_module.find(param) is not None for param in params)


def _prepare(model: nn.Module, members: list[_Member], options: Options) -> tuple[str, str] | None:
    """Does everything that can fail on this rank alone. Returns (code, message) of a failure."""
    problem = options.problem()
    if problem is None and not members:
        problem = "the model has no fully_shard group; call fully_shard before tide.enable"
    if problem is None and _any_enabled(members):
        problem = "a group of the model is enabled already; call tide.disable first"
    if problem is not None:
        return "invalid_argument", problem
    try:
        unknown = patches.unknown_torch()
        for member in members:
            state = member.state
            state.strict = options.strict
            state.reasons = groups_module.static_reasons(
                member.group, state.layouts, options.collectives
            )
            if unknown is not None:
                state.reasons = {name: state.reasons.get(name, unknown) for name in COLLECTIVES}
        storage.library()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        return "internal", f"{type(error).__name__}: {error}"
    return None


def _check_strict(members: list[_Member]) -> None:
    """Raises if a collective that was asked for stays on torch's path."""
    for member in members:
        for collective, reason in member.state.reasons.items():
            if member.state.strict and reason != "not requested":
                raise make_error(
                    "unsupported",
                    f"group {member.state.name}: {collective} cannot run on TIDE ({reason}); "
                    "pass strict=False to let it run on torch's path",
                    group=member.state.name,
                    operation=collective,
                )


def _process_groups(members: list[_Member]) -> list[dist.ProcessGroup]:
    """Returns the distinct process groups, in order of first use."""
    found = {id(m.process_group): m.process_group for m in members if m.process_group is not None}
    return list(found.values())


def _reserve(channel: Channel, pool: SlotPool, members: list[_Member]) -> None:
    """Reserves landing slots and staging for a default FSDP2 step. Collective.

    Two slots serve the groups that are resharded after forward: one in use, one prefetched.
    """
    gathered = [m for m in members if m.state.path(ALL_GATHER) == "tide"]
    kept = [m.state.landing_bytes for m in gathered if m.kept]
    ring = [m.state.landing_bytes for m in gathered if not m.kept]
    sizes = kept + [max(ring, default=0)] * min(2, len(ring))
    if sizes:
        pool.reserve(sizes)
    channel.core.reserve([m.state.need() for m in members])


def _connect(
    process_group: dist.ProcessGroup, members: list[_Member], options: Options
) -> SlotPool | None:
    """Creates what the groups on one process group need. Collective.

    Returns None if none of them runs on TIDE.
    """
    served = [m for m in members if any(m.state.path(c) == "tide" for c in COLLECTIVES)]
    if not served:
        return None
    try:
        channel = channel_for(process_group, options.timeout, options.nodes, options.lane_mode())
    except _core.Error as error:
        if error.code != "unsupported":
            raise
        for member in served:
            for collective in COLLECTIVES:
                member.state.reasons.setdefault(collective, f"not one node: {error}")
        _check_strict(served)
        return None
    channel.reclaim()
    pool = SlotPool(channel, "landing")
    try:
        for member in served:
            member.state.register(channel, pool)
        _reserve(channel, pool, served)
    except BaseException:
        pool.close()
        raise
    return pool


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

    def _timeout_notes(self) -> set[str]:
        """Says if a communicator made earlier keeps another time limit than was asked for."""
        asked = self._options.timeout
        channels = [state.channel for state in self._states if state.channel is not None]
        return {
            f"the communicator was made earlier with a timeout of {channel.timeout:g} s"
            for channel in channels
            if asked is not None and channel.timeout != asked
        }

    def _unshared_notes(self) -> set[str]:
        """Says why ranks of a node do not share their landings, if so."""
        reasons = {pool.unshared_reason for pool in self._pools}
        return {f"every rank has landings of its own ({why})" for why in reasons if why}

    def _node_notes(self) -> set[str]:
        """Says how ranks are split into virtual nodes, if they are."""
        cores = [state.channel.core for state in self._states if state.channel is not None]
        return {
            f"{core.nodes} virtual nodes of {core.local_ranks} ranks"
            for core in cores
            if core.nodes > 1
        }

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
                }
            )
        unshared = self._unshared_notes()
        notes = [*self._timeout_notes(), *self._node_notes(), *unshared]
        if self._options.mode == "slot_reuse":
            notes.append(
                "mode slot_reuse: the outbox between nodes is partial; gradients are read where "
                "autograd left them, because on CPU they are consumed inside the call"
            )
        if not self._enabled:
            notes.append("disabled")
        memory = {
            "landing": sum(pool.bytes for pool in self._pools),
            "slots": sum(len(pool.slots) for pool in self._pools),
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
        self._at_death.detach()
        for state in self._states:
            group = state.group_ref()
            if group is not None:
                # A prefetch that nobody waited for is gathered again by torch when needed.
                if isinstance(group._all_gather_result, TideAllGatherResult):
                    group._all_gather_result = None
                groups_module.forget_params(group.fsdp_params)
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
        pool.abandon()
    patches.remove()


_handles: weakref.WeakKeyDictionary[nn.Module, Handle] = weakref.WeakKeyDictionary()


def enable_model(model: nn.Module, options: Options) -> Handle:
    """Implements ``tide.enable``."""
    members = _collect(model)
    failure = _prepare(model, members, options)
    signature = _signature(members, options)
    process_groups = _process_groups(members)
    for process_group in process_groups:
        check_agreement(signature, failure, process_group)
    if failure is not None:
        raise make_error(*failure, operation="enable")
    _check_strict(members)
    pools = []
    try:
        for process_group in process_groups:
            mine = [m for m in members if m.process_group is process_group]
            if (pool := _connect(process_group, mine, options)) is not None:
                pools.append(pool)
    except BaseException:
        for pool in pools:
            pool.close()
        raise
    for member in members:
        groups_module.register_params(member.state, member.group.fsdp_params)
    patches.install()
    if dist.get_rank() == 0:
        settings.warn_of_unknown()
    handle = Handle(model, options, [member.state for member in members], pools)
    _handles[model] = handle
    return handle


def is_enabled(model: nn.Module) -> bool:
    """Returns whether a group of ``model`` runs through TIDE already."""
    return _any_enabled(_collect(model))


def disable_model(model: nn.Module) -> None:
    """Implements ``tide.disable``."""
    handle = _handles.get(model)
    if handle is None:
        raise make_error("invalid_argument", "the model is not enabled", operation="disable")
    handle.disable()
