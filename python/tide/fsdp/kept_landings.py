"""Backward all-gathers that need not run: the parameters still lie where the forward has left them.

FSDP2 frees the unsharded parameters after a layer's forward and gathers them again for its
backward. Their landing slot stays, and for the last layers nothing else is gathered there in
between: with two slots, the first two all-gathers of a backward move nothing.

Off unless ``TIDE_KEEP_LANDINGS=on``, since it asks something of the training: between a layer's
forward and its backward nothing may write to its parameters, in the forward itself neither. FSDP2
would gather new values of a shard, and drop what was written to an unsharded parameter.

What gives such writes away makes the parameters be gathered: the turns of slots, steps of torch's
optimizers of sharded parameters, and version counters, which in-place operations raise. Then all
ranks must have written, or they are found to be in different calls. Some writes raise no counter:
through ``.data`` or a detached local tensor, by c10d's collectives (``dcp.load`` is one of them),
by torch's private foreach functions. Inference tensors have none, and are gathered.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from tide.fsdp import settings
from tide.fsdp.slots import SlotState

if TYPE_CHECKING:
    import torch

    from tide.fsdp.group import GroupState
    from tide.fsdp.slots import Slot


Versions = tuple[tuple[int, ...], ...]

_optimizer_steps = [0]  # of the process's optimizers of sharded parameters


def _count_step(optimizer: Optimizer, *_args: Any) -> None:
    # One of other parameters may be this rank's alone.
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        _optimizer_steps[0] += 1


@functools.cache
def _count_steps() -> None:
    register_optimizer_step_post_hook(_count_step)


@dataclass(frozen=True)
class Landed:
    """An all-gather that came to its end, with what it must still be true of to be used again."""

    slot: Slot
    turn: int  # of the slot
    shards: Versions
    outputs: Versions  # identity and version of each unsharded parameter
    event: torch.cuda.Event | None  # on a GPU: its end


def shard_versions(state: GroupState, params: list[Any]) -> Versions | None:
    """Returns the address and the versions of each shard that an all-gather reads, and the steps.

    None if landings are not kept, or a shard has no version.

    An operation on a DTensor raises the version of the DTensor, one on its local tensor that one's;
    the steps of optimizers raise neither, and are counted.
    """
    if not state.keeps_landings or any(p.sharded_param.is_inference() for p in params):
        return None
    shards = (
        (
            param._sharded_param_data.data_ptr(),
            param.sharded_param._version,
            param.sharded_param._local_tensor._version,
        )
        for param in params
    )
    return (*shards, (_optimizer_steps[0],))


def _output_versions(state: GroupState) -> Versions:
    return tuple((id(output), output._version) for output in state.outputs)


def note(
    state: GroupState,
    slot: Slot,
    shards: Versions | None,
    event: torch.cuda.Event | None,
) -> None:
    """Notes that the group's parameters lie in ``slot``; without versions, where none are known."""
    if shards is None or any(output.is_inference() for output in state.outputs):
        state.landed = None
    else:
        state.landed = Landed(slot, slot.turn, shards, _output_versions(state), event)


def enabled() -> bool:
    """Returns whether landings are used again; steps of optimizers count from then on."""
    keeps = settings.text("TIDE_KEEP_LANDINGS") == "on"
    if keeps:
        _count_steps()
    return keeps


def find(state: GroupState, params: list[Any]) -> Landed | None:
    """Returns where the parameters lie that a backward of the group is about to gather, or None."""
    landed, group = state.landed, state.group_ref()
    if landed is None or group is None:
        return None
    if group._training_state is not TrainingState.PRE_BACKWARD:
        return None
    landed.slot.settle()
    if landed.slot.state is not SlotState.FREE or landed.slot.turn != landed.turn:
        return None
    same = (
        shard_versions(state, params) == landed.shards and _output_versions(state) == landed.outputs
    )
    return landed if same else None
