"""One TIDE communicator for each process group, and the checks that all ranks agree."""

from __future__ import annotations

import json
import os
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tide import _core
from tide.fsdp import settings
from tide.fsdp.errors import make_error
from tide.fsdp.segment_memory import SegmentMemory
from tide.fsdp.slots import SlotState, align
from tide.fsdp.sum_budget import SumBudget, sum_budget

if TYPE_CHECKING:
    from tide.fsdp.slots import Slot

_DEFAULT_TIMEOUT_S = 1800.0


def exchange_objects(value: object, process_group: dist.ProcessGroup) -> list[Any]:
    """Returns the value of every rank of the process group, in rank order. Collective."""
    values: list[Any] = [None] * process_group.size()
    dist.all_gather_object(values, value, group=process_group)
    return values


def group_timeout(process_group: dist.ProcessGroup, device: torch.device) -> float:
    """Returns the time limit in seconds of the process group's backend for ``device``."""
    try:
        backend = process_group._get_backend(device)
        return backend.options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return _DEFAULT_TIMEOUT_S


def first_difference(expected: Any, actual: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Returns (path, expected value, actual value) where two JSON values first differ."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in sorted(expected.keys() | actual.keys()):
            inner = f"{path}.{key}" if path else key
            if found := first_difference(expected.get(key), actual.get(key), inner):
                return found
        return None
    if isinstance(expected, list) and isinstance(actual, list):
        for i, (left, right) in enumerate(zip(expected, actual, strict=False)):
            if found := first_difference(left, right, f"{path}[{i}]"):
                return found
        if len(expected) != len(actual):
            return f"len({path})", len(expected), len(actual)
        return None
    return None if expected == actual else (path, expected, actual)


_LONGEST_PAUSE_S = 0.1
_arrivals: Counter[str] = Counter()  # calls of await_ranks, by group


def await_ranks(process_group: dist.ProcessGroup, seconds: float) -> None:
    """Waits until all ranks of the group have called this as often as this one. Collective.

    Through torch's store, which tells who is missing; without one nobody waits here.

    Raises:
        tide.Error: "timeout", with the missing ranks.
    """
    try:
        store = dist.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):
        return
    ranks = dist.get_process_group_ranks(process_group)
    name = f"{process_group.group_name}/{ranks[0]}"  # disjoint groups may have one name
    _arrivals[name] += 1
    key = f"tide/enable/{name}/{_arrivals[name]}"
    store.set(f"{key}/{dist.get_rank()}", "")
    if store.add(key, 1) == len(ranks):
        store.set(f"{key}/all", "")
    deadline, pause = time.monotonic() + seconds, 0.001
    while not store.check([f"{key}/all"]):
        if time.monotonic() > deadline:
            # Did not call, so that all may try again: unless the last one came just now.
            if store.add(key, -1) == len(ranks) - 1:
                store.add(key, 1)
                return
            missing = [rank for rank in ranks if not store.check([f"{key}/{rank}"])]
            store.delete_key(f"{key}/{dist.get_rank()}")
            _arrivals[name] -= 1
            raise make_error(
                "timeout",
                f"waited {seconds:g} s for {_names(missing)} to call tide.enable: every rank calls "
                "it, and tide.disable, at the same point of the program",
                dist.get_rank(),
                operation="enable",
            )
        time.sleep(pause)  # the store's own wait can't be interrupted, and warns
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _names(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


# (code, message): why ranks cannot go on.
Failure = tuple[str, str]


def own_failure(failure: Failure) -> Failure:
    """Returns a failure of this rank as the others are to read it."""
    return failure[0], f"rank {dist.get_rank()}: {failure[1]}"


def share_failure(failure: Failure | None, process_group: dist.ProcessGroup) -> Failure | None:
    """Returns the failure of the first rank of the process group that has one. Collective."""
    return next((f for f in exchange_objects(failure, process_group) if f is not None), None)


def find_disagreement(
    signature: dict[str, Any], process_group: dist.ProcessGroup
) -> Failure | None:
    """Compares what every rank is about to enable; the same answer on all of them. Collective.

    Args:
        signature: JSON-like description of the model and the options on this rank.
        process_group: the ranks to compare.
    """
    # An option of a wrong type must not end this rank before the others hear of it.
    text = json.dumps(signature, sort_keys=True, default=repr)
    answers = exchange_objects(text, process_group)
    ranks = dist.get_process_group_ranks(process_group)
    expected = json.loads(answers[0])
    for rank, other in zip(ranks, answers, strict=True):
        if found := first_difference(expected, json.loads(other)):
            path, left, right = found
            return (
                "mismatch",
                "tide.enable expects the same model and options on all ranks, but they differ at "
                f"{path}: {left!r} on rank {ranks[0]}, {right!r} on rank {rank}; "
                "build the model and call tide.enable alike on every rank",
            )
    return None


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
        """Warns, or raises where warnings are errors: not before the channel is registered."""
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
    channel.warn_of_aliasing()
    return channel


def open_cores() -> list[_core.Communicator]:
    """Returns the communicators in use, for tracing."""
    return [channel.core for _, channel in _channels.values()]
