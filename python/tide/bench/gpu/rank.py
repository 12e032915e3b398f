"""A rank of a bench on GPUs: its device, its communicators, its stream and its clock."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tide import _core
from tide.bench.launch import Context
from tide.calibration.measure import timing_events
from tide.fsdp.agreement import exchange_objects
from tide.fsdp.device_memory import device_bytes
from tide.fsdp.sum_budget import sum_budget

_TIMEOUT_S = 60.0
_FIRST_SPIN_MS = 5.0
_LONGEST_SPIN_MS = 50.0
_CALIBRATION_CYCLES = 10_000_000


class Sample(NamedTuple):
    """One timed body; milliseconds."""

    gpu_ms: float  # between two events around it
    host_ms: float  # that enqueueing it took
    hidden: bool  # all of it was enqueued before the GPU came to it


class Rank:
    """What the contestants of one rank share.

    `nccl` is torch's own group over all ranks, or None where several ranks share a GPU, between
    which it does not work. Bodies enqueue on torch's current stream.
    """

    def __init__(self, context: Context, gpus: int, nodes: int) -> None:
        self.rank, self.world = context.rank, context.world
        self.device = torch.device("cuda", context.rank % gpus)
        torch.cuda.set_device(self.device)
        self.comm = _core.Communicator(
            self.rank,
            self.world,
            partial(exchange_objects, process_group=dist.group.WORLD),
            _TIMEOUT_S,
            nodes=nodes,
            fabric=_core.Fabric.NCCL,
            device=self.device.index,
            sum_ctas=sum_budget(self.device, self.world, nodes).ctas,
        )
        self.nccl: Any = None
        if self.world <= gpus:
            limit = datetime.timedelta(seconds=_TIMEOUT_S)
            self.nccl = dist.new_group(backend="nccl", timeout=limit)
        # High, as FSDP2's streams for collectives.
        self.stream = torch.cuda.Stream(priority=-1)
        self._cycles_per_ms = _measure_clock()
        self._aligning = self._prepare_align()

    def close(self) -> None:
        """Ends the communicator; collective."""
        torch.cuda.synchronize()
        self.comm.close()

    def stream_handle(self) -> int:
        """The current stream, as the communicator takes it."""
        return torch.cuda.current_stream().cuda_stream

    def synchronize(self) -> None:
        """Waits for everything that was enqueued on the GPU."""
        torch.cuda.synchronize()

    def view(self, segment: Any) -> torch.Tensor:
        """The whole segment as bf16."""
        size = segment.bytes // 2 * 2
        return device_bytes(segment.address, size, self.device).view(torch.bfloat16)

    def agree(self, value: Any) -> Any:
        """Returns rank 0's value on every rank. Collective."""
        return exchange_objects(value, dist.group.WORLD)[0]

    def spin(self, milliseconds: float) -> None:
        """Keeps the current stream busy, so that what is enqueued meanwhile waits together."""
        torch.cuda._sleep(int(milliseconds * self._cycles_per_ms))

    def align(self) -> None:
        """Holds the current stream until those of all ranks came here."""
        self.comm.all_gather(*self._aligning, stream=self.stream_handle())

    def run(self, body: Callable[[], None]) -> None:
        """Runs a body once, after everything that was enqueued before, to its end."""
        self.synchronize()
        with torch.cuda.stream(self.stream):
            body()
        self.synchronize()

    def _prepare_align(self) -> tuple[Any, ...]:
        elems = 64
        self._flag = torch.zeros(elems, dtype=torch.bfloat16, device=self.device)
        group = self.comm.register_group("align", [("flag", self.world, elems, _core.BF16)])
        segment = self.comm.add_segment(self.comm.landing_bytes(group), "align")
        return group, [self._flag.data_ptr()], [_core.BF16], segment.id, 0


class Stopwatch:
    """Times one body again and again, with a spin that its enqueueing fits into."""

    def __init__(self, rank: Rank, body: Callable[[], None]) -> None:
        self._rank, self._body = rank, body
        self._spin_ms = _FIRST_SPIN_MS

    def measure(self) -> Sample:
        """Times the body on the rank's stream, all ranks starting together. Collective."""
        start, end = timing_events()
        with torch.cuda.stream(self._rank.stream):
            begin = time.perf_counter()
            self._rank.spin(self._spin_ms)
            self._rank.align()
            start.record()
            first = time.perf_counter()
            self._body()
            last = time.perf_counter()
            end.record()
        end.synchronize()
        hidden, self._spin_ms = next_spin(self._spin_ms, 1e3 * (last - begin))
        return Sample(start.elapsed_time(end), 1e3 * (last - first), hidden)


def next_spin(spin_ms: float, enqueue_ms: float) -> tuple[bool, float]:
    """Returns whether the spin hid the enqueueing, and the next spin: longer if it did not."""
    if enqueue_ms < spin_ms:
        return True, spin_ms
    return False, min(2 * enqueue_ms, _LONGEST_SPIN_MS)


def _measure_clock() -> float:
    """Cycles of torch's spin a millisecond; of the second spin, when the clock has gone up."""
    for _ in range(2):
        start, end = timing_events()
        start.record()
        torch.cuda._sleep(_CALIBRATION_CYCLES)
        end.record()
        end.synchronize()
    return _CALIBRATION_CYCLES / start.elapsed_time(end)
