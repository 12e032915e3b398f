"""The early all-gather of mode in_place on GPUs (paper, section 5.3).

FSDP2 gathers a layer when the backward of the layer after it begins: by then its streams wait for
an earlier reduce-scatter. In mode in_place the landing slot is free as soon as the gradients of the
layer two further on have been computed, so the all-gather is issued right behind the enqueuing of
their reduce-scatter. Only where FSDP2 would prefetch by itself, and the same group, a little later:
the group between must be about to run its backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tide.fsdp import patches
from tide.fsdp.group import ALL_GATHER, GroupState, state_of

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def _has_gradients(group: FSDPParamGroup) -> bool:
    return any(param.sharded_param.requires_grad for param in group.fsdp_params)


def dispatch_backward_prefetch(group: FSDPParamGroup) -> None:
    """Takes the place of ``FSDPParamGroup._backward_prefetch``, which only default prefetch calls.

    Notes which of the group's forwards this backward belongs to: a group that ran several times has
    several places in the order.
    """
    place = group._post_forward_indices[-1] if group._post_forward_indices else None
    patches.original("_backward_prefetch")(group)
    state = state_of(group)
    if state is not None and state.early_all_gather:
        state.place = place


def issue_early(state: GroupState) -> None:
    """Issues the all-gather of the group two before ``state`` in the order of the forward.

    Called behind the reduce-scatter of ``state``, at the same point of the program on all ranks.
    """
    group, place = state.group_ref(), state.place
    state.place = None
    if group is None or place is None or place < 2 or getattr(group, "_num_param_groups", 1) > 1:
        return
    order = group.comm_ctx.post_forward_order
    target = order[place - 2] if place - 2 < len(order) else None
    if target is None or place - 2 not in target._post_forward_indices:
        return  # its backward is over: the root's comes last, say
    between = order[place - 1]
    if between._all_gather_result is None or not _has_gradients(between):
        return  # FSDP2 would not come to prefetch the target: evaluation forwards, frozen layers
    wanted = state_of(target)
    if wanted is None or ALL_GATHER in wanted.reasons or wanted.pool is not state.pool:
        return
    if target.is_unsharded or target._all_gather_result is not None:
        return
    if wanted.pool.has_room(wanted.landing_bytes):
        group._prefetch_unshard(target, "backward")
