"""The all-gather: shards land where FSDP2 wants the unsharded parameters, so nothing is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult, DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from tide.fsdp import kept_landings, patches
from tide.fsdp.group import ALL_GATHER, CORE_DTYPES, GroupState, find, state_of

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from tide.fsdp.slots import Slot

_ISSUE_NAMES = patches.parameter_names("foreach_all_gather")
_COPY_OUT_NAMES = patches.parameter_names("foreach_all_gather_copy_out")


class TideAllGatherResult(AllGatherResult):
    """What the group holds between issue and copy-out. The tuple's own tensors are empty."""

    state: GroupState
    slot: Slot


def _call_reason(state: GroupState, call: dict[str, Any]) -> str | None:
    """Returns why this call must run on torch's path; rank-invariant."""
    if ALL_GATHER in state.reasons:
        return state.reasons[ALL_GATHER]
    if call["async_op"]:
        return "asynchronous unshard"
    if type(call["all_gather_comm"]) is not DefaultAllGather:
        return f"custom all-gather {type(call['all_gather_comm']).__name__}"
    if call["group"].size() != state.world:
        return "post-forward mesh"
    if (reason := patches.untraceable()) is not None:
        return reason
    params = call["fsdp_params"]
    if len(params) != len(state.layouts):
        return "a part of the group"
    for param, layout in zip(params, state.layouts, strict=True):
        if param.sharded_state is not ShardedState.SHARDED:
            return "post-forward mesh"
        shard = param._sharded_param_data
        if type(shard) is not torch.Tensor or shard.dtype not in CORE_DTYPES:
            return f"shard of {layout.name} is {type(shard).__name__} of {shard.dtype}"
        wanted = shard.dtype if param.param_dtype is None else param.param_dtype
        if wanted != layout.dtype:
            return f"{layout.name} changed its dtype from {layout.dtype} to {wanted}"
    return None


def _issue(
    state: GroupState, slot: Slot, call: dict[str, Any], *, refresh: bool
) -> TideAllGatherResult:
    """Runs the collective into ``slot``; on a GPU, enqueues it.

    FSDP2 has made both of its streams wait for the shards. The one for copy-in holds no earlier
    all-gather, so shards are cast while the one before is still on its way.
    """
    on_gpu = state.channel.device.type == "cuda"
    ready, stream = call["all_gather_copy_in_stream"], call["all_gather_stream"]
    if slot.vacated is not None:
        ready.wait_event(slot.vacated)
    params = call["fsdp_params"]
    shards = [param._sharded_param_data for param in params]
    try:
        state.channel.core.all_gather(
            state.gid,
            [shard.data_ptr() for shard in shards],
            [CORE_DTYPES[shard.dtype] for shard in shards],
            slot.segment_id,
            slot.offset,
            stream=stream.cuda_stream if on_gpu else None,
            ready_stream=ready.cuda_stream if on_gpu else None,
            refresh=refresh,
        )
    except BaseException:
        slot.release()
        raise
    event = stream.record_event() if on_gpu else None
    result = TideAllGatherResult(torch.empty(0), event, None, [], [], [])
    result.state, result.slot = state, slot
    slot.promise(result)
    return result


def _take_slot(state: GroupState, group: Any) -> tuple[Slot | None, bool]:
    """Returns a slot for the group's all-gather, and whether its parameters lie there already."""
    kept = kept_landings.find(state)
    if kept is None:
        return state.pool.acquire(state.landing_bytes, group), False
    kept.refresh(group)
    return kept, True


def dispatch_issue(*args: Any, **kwargs: Any) -> Any:
    """Takes the place of ``foreach_all_gather``."""
    stock = patches.original("foreach_all_gather")
    call = {**dict(zip(_ISSUE_NAMES, args, strict=False)), **kwargs}
    params = call["fsdp_params"]
    entry = find(params[0]) if params else None
    if entry is None:
        return stock(*args, **kwargs)
    state = entry[0]
    reason = _call_reason(state, call)
    group = state.group_ref()
    slot, refresh = None, False
    with torch.no_grad():
        if reason is None:
            reason = state.attach(group)
        if reason is None:
            slot, refresh = _take_slot(state, group)
        if slot is None:
            state.fall_back(ALL_GATHER, reason or "no memory for another landing slot")
            return stock(*args, **kwargs)
        result = _issue(state, slot, call, refresh=refresh)
    state.counters.tide(ALL_GATHER)
    state.counters.refreshed += refresh
    return result


def land(result: TideAllGatherResult, params: list[Any]) -> None:
    """Gives the unsharded storages their places in the slot.

    The bytes are there already. Version counters stay as they are, as in FSDP2's own copy-out.
    """
    state, slot = result.state, result.slot
    if state.landings is None:
        raise RuntimeError(f"TIDE was disabled while an all-gather of {state.name} was pending")
    state.landings.free()
    state.slot, state.vacated, state.place = slot, None, None
    state.landings.bind(slot.address, slot.hold)
    try:
        for param in params:
            param.alloc_all_gather_outputs()
    finally:
        state.landings.unbind()
        slot.land()
    kept_landings.note(state, slot)


def dispatch_copy_out(*args: Any, **kwargs: Any) -> None:
    """Takes the place of ``foreach_all_gather_copy_out``."""
    call = {**dict(zip(_COPY_OUT_NAMES, args, strict=False)), **kwargs}
    result = call["all_gather_result"]
    if isinstance(result, TideAllGatherResult):
        if result.all_gather_event is not None:
            torch.cuda.current_stream().wait_event(result.all_gather_event)
        land(result, call["fsdp_params"])
        return
    patches.original("foreach_all_gather_copy_out")(*args, **kwargs)


def _vacate(group: FSDPParamGroup) -> None:
    """Frees the group's slot if nothing lies in it any more, as early as that is known."""
    state = state_of(group)
    if state is None or state.slot is None:
        return
    state.slot.settle()
    state.vacated = (state.slot, state.slot.turn)
    state.slot = None


def dispatch_to_sharded(group: FSDPParamGroup) -> None:
    """Takes the place of ``FSDPParamGroup._to_sharded``."""
    patches.original("_to_sharded")(group)
    _vacate(group)


def dispatch_to_sharded_post_forward(group: FSDPParamGroup) -> None:
    """Takes the place of ``FSDPParamGroup._to_sharded_post_forward``."""
    patches.original("_to_sharded_post_forward")(group)
    _vacate(group)
