"""Segments out of torch's allocator: what is asked for, refused, and given back without Python."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tide import _core
from tide.fsdp import segment_memory, storage
from tide.fsdp.segment_memory import LEAST, SegmentMemory

_CPU = torch.device("cpu")


class _Pool:
    """A torch.cuda.MemPool without a GPU."""

    alive = 0

    def __init__(self, allocator: object) -> None:
        assert allocator == "allocator of NCCL's memory"
        self.id = (0, 7)
        _Pool.alive += 1

    def __del__(self) -> None:
        _Pool.alive -= 1


class _Torch:
    """What SegmentMemory uses of torch.cuda, on the memory of CPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.emptied = 0
        self.unaccounted = 0  # bytes of an allocation beyond those that were asked for
        self._inside: _Pool | None = None
        self._sizes: dict[int, int] = {}
        source = type("Source", (), {"allocator": lambda _: "allocator of NCCL's memory"})()
        monkeypatch.setattr(segment_memory, "_source", lambda: source)
        monkeypatch.setattr(torch.cuda, "MemPool", _Pool)
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "use_mem_pool", self._use)
        monkeypatch.setattr(torch.cuda, "empty_cache", self._empty)
        monkeypatch.setattr(torch, "UntypedStorage", self._allocate)
        monkeypatch.setattr(_core, "nccl_allocation_bytes", self._bytes, raising=False)

    @contextlib.contextmanager
    def _use(self, pool: _Pool) -> Iterator[None]:
        self._inside = pool
        yield
        self._inside = None

    def _empty(self) -> None:
        self.emptied += 1

    def _allocate(self, size: int, device: torch.device) -> torch.UntypedStorage:
        assert self._inside is not None, "memory that is not out of the pool"
        memory = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        self._sizes[memory.data_ptr()] = size
        return memory

    def _bytes(self, address: int) -> int:
        return self._sizes[address] + self.unaccounted


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> _Torch:
    """Torch's allocator, as a fake, where nothing registers segments."""
    for name in (*segment_memory._HOOK_VARIABLES, "TORCH_DIST_USE_NCCL2"):
        monkeypatch.delenv(name, raising=False)
    return _Torch(monkeypatch)


def _release(segment: tuple[int, int, int]) -> None:
    """What the last share of a segment does, in C++."""
    _, context, function = segment
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(context)


def test_a_segment_outlives_pool_and_source(fake: _Torch) -> None:
    segments = storage.segment_count()
    memory = SegmentMemory(_CPU)
    segment = memory.allocate(LEAST)
    assert segment is not None and memory.reason is None and memory.counted == LEAST
    assert storage.segment_count() == segments + 1
    del memory
    gc.collect()
    assert _Pool.alive == 0, "something in Python holds the pool"
    ctypes.memset(segment[0], 1, LEAST)  # still there, all of it
    assert storage.segment_count() == segments + 1
    _release(segment)
    assert storage.segment_count() == segments
    assert fake.emptied == 0


def test_small_segments_are_nccls(fake: _Torch) -> None:
    memory = SegmentMemory(_CPU)
    assert memory.allocate(LEAST - (2 << 20)) is None
    assert fake.emptied == 1, "what torch keeps unused is not NCCL's to take"
    assert memory.reason is None and memory.counted == 0


def test_a_part_of_an_allocation_is_refused(fake: _Torch) -> None:
    segments = storage.segment_count()
    fake.unaccounted = 2 << 20
    memory = SegmentMemory(_CPU)
    assert memory.allocate(LEAST) is None
    assert memory.reason == (
        f"expected {LEAST} bytes of NCCL's from torch's allocator, got {LEAST + (2 << 20)}"
    )
    fake.unaccounted = 0
    assert memory.allocate(LEAST) is None, "a reason stays"
    assert fake.emptied == 2 and _Pool.alive == 0 and storage.segment_count() == segments


def test_no_memory_is_said_to_be_so(fake: _Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(size: int, device: torch.device) -> None:
        raise torch.OutOfMemoryError(f"no {size} bytes on {device}")

    monkeypatch.setattr(torch, "UntypedStorage", full)
    memory = SegmentMemory(_CPU)
    with pytest.raises(MemoryError, match="bytes on cpu"):
        memory.allocate(LEAST)
    assert memory.reason is None, "the next one may fit"


def test_an_allocator_without_pools_is_a_reason(
    fake: _Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(allocator: object) -> None:
        raise RuntimeError("cudaMallocAsync has no pools")

    monkeypatch.setattr(torch.cuda, "MemPool", unsupported)
    memory = SegmentMemory(_CPU)
    assert memory.allocate(LEAST) is None
    assert memory.reason == "its pool failed: cudaMallocAsync has no pools"


@pytest.mark.parametrize("name", segment_memory._HOOK_VARIABLES)
def test_what_torch_registers_stays_outside(
    fake: _Torch, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for value in ("1", "TRUE", "y"):
        monkeypatch.setenv(name, value)
        memory = SegmentMemory(_CPU)
        assert memory.reason == f"torch registers it, too: {name}"
        assert memory.allocate(LEAST) is None
    for value in ("0", "false"):
        monkeypatch.setenv(name, value)
        assert SegmentMemory(_CPU).reason is None


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ("cpu:gloo,cuda:nccl", None),
        ("cpu:gloo,cuda:nccl2", "backend nccl2"),
        ("cuda:nccl-lazy", "backend nccl-lazy"),
    ],
)
def test_backends_that_register_are_noticed(
    fake: _Torch, monkeypatch: pytest.MonkeyPatch, config: str, found: str | None
) -> None:
    world = type("World", (), {"pg_backend_config": {"group": config}})()
    monkeypatch.setattr(dist.distributed_c10d, "_world", world)
    assert segment_memory.registered_by_torch() == found
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "1")
    assert segment_memory.registered_by_torch() == "TORCH_DIST_USE_NCCL2"
