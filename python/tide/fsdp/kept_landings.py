"""Backward all-gathers whose parameters still lie where the forward has left them.

FSDP2 frees the unsharded parameters after a layer's forward and gathers them again for its
backward. Their landing slot stays, and for the last layers, as many as there are slots, nothing
else is gathered there in between. Those all-gathers only *refresh* the landing: every rank compares
its shards with its own part of its own landing, in bits, and writes to the landings of all ranks
what differs. So whatever wrote to shards in between, on all ranks or on one, the result is that of
an all-gather; usually nothing crosses the links.

A forward that writes to its *unsharded* parameters is another matter: FSDP2 drops that. On CPUs the
comparison finds it: every rank looks at the landings of all, or they are one and changed pages are
taken back. On GPUs no other rank would notice it. Version counters tell of it there, and the group
is gathered in full; all ranks must then have written, or they are found to be in different calls.
A write that raises no counter (through ``.data``) stays until the backward is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from tide.fsdp import settings
from tide.fsdp.slots import SlotState

if TYPE_CHECKING:
    from tide.fsdp.communicators import Channel
    from tide.fsdp.group import GroupState
    from tide.fsdp.slots import Slot


# More slots take at most this part of what is free.
_SHARE_OF_FREE = 8


@dataclass(frozen=True)
class Landed:
    """An all-gather that came to its end, with what must still be true for a refresh."""

    slot: Slot
    turn: int  # of the slot
    outputs: tuple[int, ...]  # on a GPU: version of each unsharded parameter


def enabled(channel: Channel) -> bool:
    """Returns whether landings are used again: on one node, unless TIDE_KEEP_LANDINGS=off."""
    return channel.core.nodes == 1 and settings.text("TIDE_KEEP_LANDINGS") != "off"


def more_slots(landing_bytes: int, packed_bytes: int, free_bytes: int) -> int:
    """Returns how many landing slots beyond two mode in_place takes on GPUs, to keep more layers.

    As many as the copy of the gradients that torch's reduce-scatter packs, and TIDE's does not,
    would fill, and only where memory is plentiful.

    Args:
        landing_bytes: of the largest group's unsharded parameters.
        packed_bytes: of its gradients in the dtype of the reduction.
        free_bytes: on the GPU where least is, with optimizer state and activations still to come.
    """
    if landing_bytes == 0:
        return 0
    # Rounded: landings have a little padding.
    return min(round(packed_bytes / landing_bytes), free_bytes // _SHARE_OF_FREE // landing_bytes)


def _output_versions(state: GroupState) -> tuple[int, ...]:
    if state.channel.device.type != "cuda":
        return ()
    return tuple(output._version for output in state.outputs)


def note(state: GroupState, slot: Slot) -> None:
    """Notes that the group's parameters lie in ``slot``."""
    known = state.keeps_landings and not any(output.is_inference() for output in state.outputs)
    state.landed = Landed(slot, slot.turn, _output_versions(state)) if known else None


def find(state: GroupState) -> Slot | None:
    """Returns the free slot with the parameters that a backward is about to gather, or None."""
    landed, group = state.landed, state.group_ref()
    if landed is None or group is None:
        return None
    if group._training_state is not TrainingState.PRE_BACKWARD:
        return None
    landed.slot.settle()
    if landed.slot.state is not SlotState.FREE or landed.slot.turn != landed.turn:
        return None
    return landed.slot if _output_versions(state) == landed.outputs else None
