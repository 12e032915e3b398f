"""Enabling and disabling TIDE for a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tide
from tide import _core
from tide.fsdp import group as groups_module
from tide.fsdp import kept_landings, patches, settings, storage
from tide.fsdp.agreement import (
    Failure,
    await_ranks,
    exchange_objects,
    find_disagreement,
    group_timeout,
    own_failure,
    share_failure,
)
from tide.fsdp.communicators import Channel, channel_for
from tide.fsdp.errors import make_error
from tide.fsdp.group import ALL_GATHER, COLLECTIVES
from tide.fsdp.handle import Handle, handle_of, remember
from tide.fsdp.members import Member, collect
from tide.fsdp.options import Options
from tide.fsdp.slots import SlotPool

# Of the groups that are resharded after forward: one in use, one prefetched.
_LANDING_SLOTS = 2
# Landings of the largest group that must be free for mode auto to choose in_place: two that it may
# hold as gradients, and as much again for what a step needs beside them.
_IN_PLACE_LANDINGS = 4


def _signature(members: list[Member], options: Options) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "tide": tide.__version__,
        "mode": options.mode,
        "strict": options.strict,
        "collectives": sorted(options.collectives, key=str),
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


def _any_enabled(members: list[Member]) -> bool:
    params = (param for member in members for param in member.group.fsdp_params)
    return any(groups_module.find(param) is not None for param in params)


def _prepare(model: nn.Module, members: list[Member], options: Options) -> Failure | None:
    """Does everything that can fail on this rank alone. Returns its failure."""
    problem = options.problem()
    if not isinstance(model, nn.Module):
        problem = f"model must be a torch.nn.Module, not {type(model).__name__}"
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


def _check_strict(members: list[Member]) -> None:
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


def _process_groups(members: list[Member]) -> list[dist.ProcessGroup]:
    """Returns the distinct process groups, in order of first use."""
    found = {id(m.process_group): m.process_group for m in members if m.process_group is not None}
    return list(found.values())


def _reserve(channel: Channel, pool: SlotPool, members: list[Member]) -> None:
    """Reserves landing slots and staging for a default FSDP2 step. Collective.

    The groups that are resharded after forward share a few slots.
    """
    own = [m.state.landing_bytes for m in members if m.kept and m.state.path(ALL_GATHER) == "tide"]
    ring = _ring(members)
    count = int(settings.number("TIDE_LANDING_SLOTS") or _LANDING_SLOTS)
    largest = max((m.state.landing_bytes for m in ring), default=0)
    sizes = own + [largest] * min(count, len(ring))
    if sizes:
        pool.reserve(sizes)
    channel.core.reserve([m.state.need() for m in members])


def _ring(members: list[Member]) -> list[Member]:
    """Returns the groups that take turns in the shared slots."""
    return [m for m in members if not m.kept and m.state.path(ALL_GATHER) == "tide"]


def _reserve_more(
    channel: Channel, pool: SlotPool, process_group: dist.ProcessGroup, members: list[Member]
) -> None:
    """Reserves slots for more of the last layers, where memory is plentiful. Collective.

    On GPUs, where the links are what limits a step. Goes without if memory does not allow them all.
    """
    ring = _ring(members)
    if channel.device.type != "cuda" or not ring or settings.number("TIDE_LANDING_SLOTS"):
        return
    largest = max((m.state for m in ring), key=lambda state: state.landing_bytes)
    free = _least_free_bytes(channel.device, process_group)
    more = kept_landings.more_slots(largest.landing_bytes, largest.packed_gradient_bytes(), free)
    more = min(more, len(ring) - _LANDING_SLOTS)
    if more > 0:
        pool.try_reserve([largest.landing_bytes] * more)


def _reuses_slots(
    process_group: dist.ProcessGroup, members: list[Member], options: Options
) -> bool:
    """Returns whether gradients move into vacated landing slots. Collective.

    Mode auto does so where memory is short after TIDE has taken its own.
    """
    device = members[0].device
    if device.type != "cuda" or options.mode == "in_place":
        return False
    if options.mode == "slot_reuse":
        return True
    largest = max(member.state.landing_bytes for member in members)
    return _least_free_bytes(device, process_group) < _IN_PLACE_LANDINGS * largest


def _least_free_bytes(device: torch.device, process_group: dist.ProcessGroup) -> int:
    """Returns what is free on the GPU of the rank where least is. Collective."""
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(exchange_objects(free + unused, process_group))


def _compute_streams(device: torch.device, members: list[Member]) -> list[int]:
    """Returns the current stream and those of FSDP2 that exist; it makes them in its first forward.

    FSDP2's hold what compute waits for.
    """
    if device.type != "cuda":
        return []
    streams = {torch.cuda.current_stream(device).cuda_stream}
    for member in members:
        for name in ("all_gather", "all_gather_copy_in", "reduce_scatter", "all_reduce"):
            stream = getattr(member.group.comm_ctx, f"{name}_stream", None)
            if stream is not None:
                streams.add(stream.cuda_stream)
    return sorted(streams)


def _grad_bytes(members: list[Member]) -> int:
    """Returns the bytes of an element of the largest group's widest gradient."""
    layouts = max((m.state.layouts for m in members), key=lambda own: sum(p.numel for p in own))
    return max(layout.dtype.itemsize for layout in layouts)


def _connect(
    process_group: dist.ProcessGroup, members: list[Member], options: Options
) -> SlotPool | None:
    """Creates what the groups on one process group need. Collective.

    Returns None if none of them runs on TIDE.
    """
    served = [m for m in members if any(m.state.path(c) == "tide" for c in COLLECTIVES)]
    if not served:
        return None
    try:
        device = served[0].device
        channel = channel_for(
            process_group,
            device,
            options.timeout,
            options.nodes,
            options.lane_mode(),
            _compute_streams(device, served),
            _grad_bytes(served),
        )
    except _core.Error as error:
        if error.code != "unsupported":
            raise
        reason = str(error) if device.type == "cuda" else f"not one node: {error}"
        for member in served:
            for collective in COLLECTIVES:
                member.state.reasons.setdefault(collective, reason)
        _check_strict(served)
        return None
    channel.reclaim()
    pool = SlotPool(channel, "landing")
    try:
        for member in served:
            member.state.register(channel, pool)
        _reserve(channel, pool, served)
        reuse = _reuses_slots(process_group, served, options)
        keeps = kept_landings.enabled(channel)
        if keeps and not reuse:
            _reserve_more(channel, pool, process_group, served)
        for member in served:
            member.state.keeps_landings = keeps
            member.state.reuse_slots = reuse
            member.state.early_all_gather = device.type == "cuda" and not reuse
    except BaseException:
        pool.close()
        raise
    return pool


def _time_limit(process_group: dist.ProcessGroup, members: list[Member], options: Options) -> float:
    """Returns how many seconds the other ranks may take to call ``tide.enable``, too.

    As long as a collective of torch's would wait for them, or as TIDE's calls are to wait.
    """
    device = next(m.device for m in members if m.process_group is process_group)
    asked = None
    if options.problem() is None and settings.problem() is None:
        asked = options.timeout or settings.number("TIDE_TIMEOUT")
    return max(asked or 0.0, group_timeout(process_group, device))


def _connect_all(
    process_groups: list[dist.ProcessGroup], members: list[Member], options: Options
) -> list[SlotPool]:
    """Connects one process group after the other, all or none. Collective.

    A rank that fails tells those of its other process groups in place of connecting to them.
    """
    pools: list[SlotPool] = []
    error: Exception | None = None
    failure: Failure | None = None
    try:
        for process_group in process_groups:
            failure = share_failure(failure, process_group)
            if failure is not None:
                continue
            mine = [m for m in members if m.process_group is process_group]
            try:
                pool = _connect(process_group, mine, options)
            except Exception as raised:
                error = raised
                code = raised.code if isinstance(raised, _core.Error) else "internal"
                failure = own_failure((code, str(raised)))
            else:
                pools += [pool] if pool is not None else []
        for process_group in process_groups:
            failure = share_failure(failure, process_group)
        if failure is not None:
            if isinstance(error, _core.Error):
                raise error
            raise make_error(*failure, dist.get_rank(), operation="enable") from error
    except BaseException:
        for pool in pools:
            pool.close()
        raise
    return pools


def enable_model(model: nn.Module, options: Options) -> Handle:
    """Implements ``tide.enable``."""
    members = collect(model) if isinstance(model, nn.Module) else []
    failure = _prepare(model, members, options)
    signature = _signature(members, options)
    process_groups = _process_groups(members)
    if failure is not None and process_groups:
        failure = own_failure(failure)
    for process_group in process_groups:
        await_ranks(process_group, _time_limit(process_group, members, options))
        failure = share_failure(failure, process_group)
        failure = failure or find_disagreement(signature, process_group)
    if failure is not None:
        rank = dist.get_rank() if process_groups else -1
        raise make_error(*failure, rank, operation="enable")
    _check_strict(members)
    pools = _connect_all(process_groups, members, options)
    for member in members:
        groups_module.register_params(member.state, member.group.fsdp_params)
    patches.install()
    handle = Handle(model, options, [member.state for member in members], pools)
    remember(model, handle)
    # Warnings may be errors, and of one rank: everything collective is over.
    for channel in handle.channels:
        channel.warn_of_aliasing()
    if dist.get_rank() == 0:
        settings.warn_of_unknown()
    return handle


def is_enabled(model: nn.Module) -> bool:
    """Returns whether a group of ``model`` runs through TIDE already."""
    return _any_enabled(collect(model))


def disable_model(model: nn.Module) -> None:
    """Implements ``tide.disable``."""
    handle = handle_of(model)
    if handle is None:
        problem = (
            "the model is not enabled: tide.enable was not called, or tide.disable was already"
        )
        raise make_error("invalid_argument", problem, operation="disable")
    handle.disable()
