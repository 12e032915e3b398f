"""One TIDE communicator for each process group."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tide import _core
from tide.fsdp import settings
from tide.fsdp.agreement import exchange_objects, group_timeout
from tide.fsdp.segment_memory import SegmentMemory
from tide.fsdp.slots import SlotState, align
from tide.fsdp.sum_budget import SumBudget, sum_budget

if TYPE_CHECKING:
    from tide.fsdp.slots import Slot


def _aliasing(streams: int) -> str:
    """Says what it means that so many streams share hardware queues with compute; empty for 0."""
    if streams == 0:
        return ""
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set")
    return (
        f"{streams} of TIDE's streams share a hardware queue of the GPU with a stream of compute, "
        "which stands still while they wait for other ranks; set CUDA_DEVICE_MAX_CONNECTIONS=32 "
        f"before CUDA starts (it is {connections}), or make fewer streams"
    )


class Channel:
    """A communicator, with the ranges of its segments that no slot pool uses at present."""

    share_landings = True  # among the ranks of a node; False for tests of what happens without

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        device: torch.device,
        timeout: float,
        nodes: int | None,
        mode: str,
        compute_streams: Sequence[int] = (),
        sums: SumBudget | None = None,
    ) -> None:
        self._process_group = weakref.ref(process_group)
        self.device = device
        self.ranks = dist.get_process_group_ranks(process_group)
        self.world, self.rank = process_group.size(), process_group.rank()
        self.timeout = timeout
        self.sums = sums or SumBudget()
        on_gpu = device.type == "cuda"
        self.segment_memory = SegmentMemory(device) if on_gpu else None
        self.core = _core.Communicator(
            self.rank,
            self.world,
            self._exchange,
            timeout,
            nodes=nodes or 0,
            mode=mode,
            share_segments=self.share_landings,
            fabric=_core.Fabric.NCCL if on_gpu else _core.Fabric.HOST,
            device=device.index if device.index is not None else -1,
            allocate=self.segment_memory.allocate if on_gpu else None,
            free_cached=torch.cuda.empty_cache if on_gpu else None,
            compute_streams=list(compute_streams),
            sum_ctas=self.sums.ctas,
        )
        self.aliasing = _aliasing(self.core.aliased_streams)
        self._segments: dict[int, Any] = {}
        # (capacity, segment id, offset), and the event after which the range is free; see Slot.
        self._spare: list[tuple[int, int, int]] = []
        self._vacated: dict[tuple[int, int], torch.cuda.Event | None] = {}
        self._retired: list[Slot] = []

    def warn_of_aliasing(self) -> None:
        """Warns, or raises where warnings are errors: not while other ranks wait for this one."""
        if self.aliasing:
            warnings.warn(self.aliasing, stacklevel=2)

    def _exchange(self, payload: bytes) -> list[bytes]:
        process_group = self._process_group()
        if process_group is None:
            raise RuntimeError("the process group of this communicator was destroyed")
        return exchange_objects(payload, process_group)

    def take_ranges(self, sizes: list[int], label: str) -> list[tuple[Any, int, int]]:
        """Returns (segment, offset, capacity) for each size in bytes. Collective.

        Spare ranges come first; the rest lie in one new segment.
        """
        capacities = [max(align(size), align(1)) for size in sizes]
        spare = sorted(self._spare)
        found: list[tuple[int, int, int] | None] = []
        for capacity in capacities:
            fit = next((r for r in spare if capacity <= r[0] <= 2 * capacity), None)
            if fit is not None:
                spare.remove(fit)
            found.append(fit)
        missing = sum(c for c, fit in zip(capacities, found, strict=True) if fit is None)
        kind = _core.SegmentKind.NODE_SHARED
        fresh = self.core.add_segment(missing, label, kind) if missing else None
        if fresh is not None:
            self._segments[fresh.id] = fresh
        self._spare = spare
        ranges, offset = [], 0
        for capacity, fit in zip(capacities, found, strict=True):
            if fit is not None:
                ranges.append((self._segments[fit[1]], fit[2], fit[0]))
            else:
                ranges.append((fresh, offset, capacity))
                offset += capacity
        return ranges

    def vacated(self, segment_id: int, offset: int) -> torch.cuda.Event | None:
        """Returns the event after which a range that was given back is free; None without one."""
        return self._vacated.pop((segment_id, offset), None)

    def give(self, slot: Slot) -> None:
        """Makes a free slot available to later pools; the same order on all ranks."""
        slot.hold.close()
        self._spare.append((slot.capacity, slot.segment_id, slot.offset))
        self._vacated[slot.segment_id, slot.offset] = slot.vacated

    def retire(self, slot: Slot) -> None:
        """Keeps a slot until ``reclaim`` finds it unused on all ranks."""
        self._retired.append(slot)

    def reclaim(self) -> None:
        """Takes back the retired slots that no rank uses any more. Collective.

        Tensors die when each rank's garbage collection says so; hence the exchange.
        """
        unused = {(s.segment_id, s.offset) for s in self._retired if s.hold.live == 0}
        answers = exchange_objects(unused, self._process_group())
        everywhere = set.intersection(*answers)
        kept = []
        for slot in self._retired:
            if (slot.segment_id, slot.offset) in everywhere:
                if slot.state is not SlotState.FREE:
                    slot.release()  # on a GPU, what reads or writes it may still be under way
                self.give(slot)
            else:
                kept.append(slot)
        self._retired = kept


_Key = tuple[str, torch.device, int | None, str]
_channels: dict[_Key, tuple[weakref.ref[dist.ProcessGroup], Channel]] = {}


def _close_orphans(process_group: dist.ProcessGroup, device: torch.device) -> None:
    """Closes communicators whose process groups were destroyed. Collective if ``device`` is a GPU.

    Closing one on CPUs is local: nobody can call it. On GPUs its ranks leave together, and when
    each notices that a process group is gone depends on its garbage collection.
    """
    orphans = [key for key, (owner, _) in _channels.items() if owner() is None]
    ranks = dist.get_process_group_ranks(process_group)
    gone = [key for key in orphans if _channels[key][1].device.type == "cpu"]
    if device.type == "cuda":
        # Each rank has a GPU of its own, so that is no part of what they have in common.
        mine = {
            (name, nodes, mode): (name, where, nodes, mode)
            for name, where, nodes, mode in orphans
            if where.type == "cuda" and _channels[name, where, nodes, mode][1].ranks == ranks
        }
        everywhere = set.intersection(*exchange_objects(set(mine), process_group))
        gone += [mine[common] for common in sorted(everywhere, key=str)]
    for key in gone:
        _channels.pop(key)[1].core.close()


def channel_for(
    process_group: dist.ProcessGroup,
    device: torch.device,
    timeout: float | None = None,
    nodes: int | None = None,
    mode: str = "in_place",
    compute_streams: Sequence[int] = (),
    grad_bytes: int = 2,
) -> Channel:
    """Returns the process group's channel, creating it at the first call. Collective.

    Args:
        process_group: the ranks.
        device: where the parameters lie; a GPU's communicator uses the nccl fabric.
        timeout: seconds; the environment's or the process group's if None.
        nodes: virtual nodes; the environment's if None.
        mode: "in_place" or "slot_reuse".
        compute_streams: those of a GPU that must not stand still while TIDE waits for other ranks;
            looked at when the channel is created.
        grad_bytes: of an element of a gradient, for the CTAs of a sum.

    Raises:
        tide.Error: "unsupported" if its ranks do not share memory, or their GPUs or NCCL lack
            something; "invalid_argument" if nodes do not divide them.
    """
    _close_orphans(process_group, device)
    key = (process_group.group_name, device, nodes, mode)
    known = _channels.get(key)
    same = known is not None and known[0]() is process_group
    # One rank's failed call makes the communicator useless to all.
    if same and not any(exchange_objects(known[1].core.poisoned, process_group)):
        return known[1]
    if known is not None:
        # Failed, or of an earlier process group of that name.
        del _channels[key]
        known[1].core.close()
    seconds = timeout or settings.number("TIDE_TIMEOUT") or group_timeout(process_group, device)
    sums = sum_budget(device, process_group.size(), nodes, grad_bytes)
    channel = Channel(process_group, device, seconds, nodes, mode, compute_streams, sums)
    _channels[key] = (weakref.ref(process_group), channel)
    return channel


def open_cores() -> list[_core.Communicator]:
    """Returns the communicators in use, for tracing."""
    return [channel.core for _, channel in _channels.values()]
