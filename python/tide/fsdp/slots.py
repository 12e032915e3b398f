"""Landing slots: memory that all-gathers write unsharded parameters to.

A slot is a range of a symmetric segment. All ranks must choose the same slot for a call, so the
choice depends only on what every rank does in the same order: issues of all-gathers, and resizes
of unsharded storages to zero. Garbage collection takes no part in it while the model lives.
"""

from __future__ import annotations

import enum
import itertools
import mmap
import weakref
from typing import TYPE_CHECKING, Any

import torch

from tide._core import Error
from tide.fsdp.device_memory import device_bytes
from tide.fsdp.storage import SlotHold

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult

    from tide.fsdp.communicators import Channel

# Bytes. A page belongs to one slot, because ranks take back their changes of a slot page by page.
ALIGNMENT = mmap.PAGESIZE


_frees = itertools.count(1)


def align(size: int) -> int:
    """Rounds a number of bytes up to the alignment of slots."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class SlotState(enum.Enum):
    """Life of a slot: free, then gathering from issue to copy-out, then live until reshard."""

    FREE = "free"
    GATHERING = "gathering"
    LIVE = "live"


class Slot:
    """One range of a segment: ``capacity`` bytes at ``offset``, mapped at ``address``.

    On CPUs the ranks of a node share the memory. What a rank changes in place there stays its own,
    until the next all-gather to the slot.

    On GPUs ``vacated`` is reached when the work that read the slot has run; None if nothing did.
    ``turn`` counts what has replaced what lay there, and ``freed`` orders slots by when they were
    freed.
    """

    __slots__ = (
        "_device",
        "_group",
        "_result",
        "address",
        "capacity",
        "freed",
        "hold",
        "index",
        "offset",
        "segment_id",
        "state",
        "turn",
        "vacated",
    )

    def __init__(
        self, index: int, segment: Any, offset: int, capacity: int, device: torch.device
    ) -> None:
        self.index = index
        self._device = device
        self.segment_id: int = segment.id
        self.offset, self.capacity = offset, capacity
        self.address: int = segment.address + offset
        self.hold = SlotHold(segment.lease())
        self.state = SlotState.FREE
        self._group: weakref.ref[Any] | None = None
        self._result: AllGatherResult | None = None
        self.vacated: torch.cuda.Event | None = None
        self.turn, self.freed = 0, 0

    def bytes(self) -> torch.Tensor:
        """Returns the slot's memory on a GPU as ``capacity`` bytes."""
        return device_bytes(self.address, self.capacity, self._device)

    def start(self, group: Any) -> None:
        """Marks an all-gather of ``group``, an FSDPParamGroup, as under way."""
        self.turn += 1
        self.refresh(group)

    def refresh(self, group: Any) -> None:
        """As ``start``, of an all-gather whose result lies there already."""
        self.state, self._group, self._result = SlotState.GATHERING, weakref.ref(group), None

    def promise(self, result: AllGatherResult) -> None:
        """Records the result that the group holds while the slot is gathering."""
        self._result = result

    def land(self) -> None:
        """Marks the slot as owned by the storages that now lie in it."""
        self.state, self._result = SlotState.LIVE, None

    def release(self) -> None:
        """Marks the slot as free once the current stream has run what it holds.

        Nobody has waited for an all-gather that was dropped: the slot is free when that has run.
        """
        dropped = self._result
        self.state, self._group, self._result = SlotState.FREE, None, None
        self.freed = next(_frees)
        if self._device.type != "cuda":
            return
        self.vacate_after(torch.cuda.current_stream(self._device))
        if dropped is not None:
            self.vacated = dropped.all_gather_event

    def overwrite(self) -> None:
        """Marks what lies in the free slot as something else than what was gathered there."""
        self.turn += 1

    def vacate_after(self, stream: torch.cuda.Stream) -> None:
        """Lets the next all-gather to the free slot wait for what ``stream`` holds."""
        self.vacated = stream.record_event()
        self.freed = next(_frees)

    def settle(self) -> None:
        """Frees the slot if its all-gather was dropped or its last storage was resized to zero."""
        if self.state is SlotState.GATHERING:
            group = self._group() if self._group is not None else None
            if group is None or group._all_gather_result is not self._result:
                self.release()
        elif self.state is SlotState.LIVE and self.hold.live == 0:
            self.release()


class SlotPool:
    """The slots of one enabled model on one communicator."""

    def __init__(self, channel: Channel, label: str) -> None:
        self._channel = channel
        self._label = label
        self.unshared_reason: str = channel.core.unshared_reason  # empty if landings are shared
        self.slots: list[Slot] = []
        self._refused: int | None = None  # smallest growth that memory did not allow

    @property
    def bytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.capacity for slot in self.slots)

    def reserve(self, sizes: list[int]) -> None:
        """Adds one slot for each size in bytes. Collective.

        Raises:
            tide.Error: "out_of_memory", on all ranks.
        """
        for segment, offset, capacity in self._channel.take_ranges(sizes, self._label):
            slot = Slot(len(self.slots), segment, offset, capacity, self._channel.device)
            slot.vacated = self._channel.vacated(segment.id, offset)
            self.slots.append(slot)

    def try_reserve(self, sizes: list[int]) -> bool:
        """As ``reserve``; returns False if memory does not allow it. Collective."""
        try:
            self.reserve(sizes)
        except Error as error:
            if error.code != "out_of_memory":
                raise
            return False
        return True

    def _fitting(self, size: int) -> list[Slot]:
        for slot in self.slots:
            slot.settle()
        return [s for s in self.slots if s.state is SlotState.FREE and s.capacity >= size]

    def has_room(self, size: int) -> bool:
        """Returns whether ``acquire`` finds a slot without growing."""
        return bool(self._fitting(size))

    def acquire(self, size: int, group: Any) -> Slot | None:
        """Returns the smallest free slot of at least ``size`` bytes, growing if there is none.

        Among equals, the one that was freed first: on a GPU the work that reads the others may not
        have run yet, and what lies there is needed again sooner. Collective when it grows, which
        all ranks do at the same call. Returns None if memory does not allow it.
        """
        fitting = self._fitting(size)
        if fitting:
            slot = min(fitting, key=lambda s: (s.capacity, s.freed, s.index))
        elif self._grow(size):
            slot = self.slots[-1]
        else:
            return None
        slot.start(group)
        return slot

    def _grow(self, size: int) -> bool:
        if self._refused is not None and size >= self._refused:
            return False
        if self.try_reserve([size]):
            return True
        self._refused = size
        return False

    def close(self) -> None:
        """Returns the slots to the communicator, which takes them back when all ranks are done.

        Not at the same point of the program on all ranks: garbage collection may end the pool.
        """
        for slot in self.slots:
            self._channel.retire(slot)
        self.slots = []
