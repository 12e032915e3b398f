"""Segments of the nccl fabric out of torch's allocator.

So torch counts them (``torch.cuda.memory_reserved`` and all that follows from it), and frees what
it keeps unused when one needs the room. Each is all of one allocation of TIDE's NCCL, and has a
``torch.cuda.MemPool`` to itself: no other request can share or inherit it. The pool's Python object
ends with the request; the segment and what is left of the pool end without Python, when the last
tensor in it does.
"""

from __future__ import annotations

import functools
import os

import torch
import torch.distributed as dist

from tide import _core
from tide.fsdp import storage

# Bytes. Of 20 MiB a smaller request would get a part.
LEAST = 10 << 20

_HOOK_VARIABLES = (
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
)
_NO = ("", "0", "n", "no", "f", "false", "off")
# Backends of torch 2.14 and newer that follow what its allocator does.
_REGISTERING = ("nccl2", "nccl-lazy")


def registered_by_torch() -> str | None:
    """Returns what makes torch register every segment with its own communicators; None if nothing.

    That may be collective, at a time that nobody else knows of, and its NCCL is another one.
    """
    for name in _HOOK_VARIABLES:
        if os.environ.get(name, "").lower() not in _NO:
            return name
    if os.environ.get("TORCH_DIST_USE_NCCL2") == "1":
        return "TORCH_DIST_USE_NCCL2"
    configs = dist.distributed_c10d._world.pg_backend_config.values()
    for backend in _REGISTERING:
        if any(f":{backend}" in config for config in configs):
            return f"backend {backend}"
    return None


@functools.cache
def _source() -> torch.cuda.memory.CUDAPluggableAllocator:
    return torch.cuda.memory.CUDAPluggableAllocator(
        _core.__file__, "TideNcclAllocate", "TideNcclFree"
    )


class SegmentMemory:
    """Gives segments of one GPU to a communicator.

    Attributes:
        reason: why segments lie outside torch's accounting; None as long as they need not.
        counted: bytes of the segments that torch has counted, now and earlier.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.counted = 0
        registering = registered_by_torch()
        self.reason = None if registering is None else f"torch registers it, too: {registering}"

    def allocate(self, size: int) -> tuple[int, int, int] | None:
        """Returns (address, context, address of the release function) of ``size`` bytes.

        None leaves the segment to NCCL.

        Raises:
            MemoryError: it does not fit.
        """
        if self.reason is None and size >= LEAST:
            memory = self._from_pool(size)
            if memory is not None:
                self.counted += size
                return memory
        torch.cuda.empty_cache()  # what torch keeps unused, NCCL can't take
        return None

    def _from_pool(self, size: int) -> tuple[int, int, int] | None:
        try:
            with torch.cuda.device(self._device):
                pool = torch.cuda.MemPool(_source().allocator())
                with torch.cuda.use_mem_pool(pool):
                    # Not a tensor, which torch might fill.
                    memory = torch.UntypedStorage(size, device=self._device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        except (AttributeError, OSError, RuntimeError, TypeError) as error:
            self.reason = f"its pool failed: {error}"
            return None
        address = memory.data_ptr()
        if (whole := _core.nccl_allocation_bytes(address)) != size:
            self.reason = f"expected {size} bytes of NCCL's from torch's allocator, got {whole}"
            return None
        return address, *storage.take_segment(memory, pool.id)
