"""The contestants of both collectives: what each one enqueues for one call.

tide       the collective, on tensors as FSDP2 has them
nccl       torch's collective alone, on flat buffers; a reduce-scatter of fp32
nccl_bf16  for the record: the reduce-scatter with bf16 on the wire, which FSDP2 does not use when
           it reduces in fp32
stock      FSDP2's path: copy-in, collective, copy-out; packing into fp32, collective
floor      the bytes that the wire needs, one copy a peer without any synchronisation

FSDP2 copies out and packs on the stream of compute; here everything of a contestant is on one
stream beside compute, which is better for stock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tide import _core
from tide.bench.collectives import shard_elems

Shape = tuple[int, int]  # rows, columns
Body = Callable[[], None]

_BF16 = torch.bfloat16
# fp32 sums in another order, of values near 1.
_TOLERANCE = 1e-5


@dataclass
class Collective:
    """The bodies of one collective by contestant, and the check of TIDE's result.

    `check` returns what it found true and raises AssertionError for the rest. Collective.
    """

    bodies: dict[str, Body]
    check: Callable[[], list[str]]


def random_bf16(elems: int, rank: int, index: int, device: torch.device) -> torch.Tensor:
    """Returns what tensor `index` of `rank` holds; every rank can make every other's."""
    generator = torch.Generator(device=device).manual_seed(1 + rank * 10_007 + index)
    return torch.randn(elems, generator=generator, device=device, dtype=_BF16)


def split_rows(shapes: list[Shape], parts: int) -> list[Shape]:
    """Cuts every tensor along its rows into `parts`, as even as they go, or fewer: one a row."""
    return [
        (rows // parts + (part < rows % parts), columns)
        for rows, columns in shapes
        for part in range(min(parts, rows))
    ]


def wire_bytes(shapes: list[Shape], ranks: int) -> int:
    """Bytes that a rank sends in either collective, bf16, one node."""
    return 2 * (ranks - 1) * sum(shard_elems(shape, ranks) for shape in shapes)


def _register(comm: Any, name: str, shapes: list[Shape]) -> int:
    return comm.register_group(name, [(f"p{i}", *s, _core.BF16) for i, s in enumerate(shapes)])


def _floor(rank: Any, elems: int, name: str) -> dict[str, Body]:
    """A group of one tensor: one copy of a rank's shard to each peer, and one beside to itself."""
    comm = rank.comm
    if comm.nodes > 1:  # between nodes there is no such copy
        return {}
    group = comm.register_group(f"floor {name}", [("flat", rank.world, elems, _core.BF16)])
    segment = comm.add_segment(comm.landing_bytes(group), f"floor {name}")
    source = torch.zeros(elems, dtype=_BF16, device=rank.device)

    def body() -> None:
        comm.unsynchronised_all_gather(
            group, [source.data_ptr()], [_core.BF16], segment.id, 0, stream=rank.stream_handle()
        )

    return {"floor": body}


def _expect_equal(what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(actual, expected):
        raise AssertionError(f"{what}: the bytes differ")


class _StockAllGather:
    """FSDP2's buffers of one group; made once, as its allocator ends up with."""

    def __init__(self, rank: Any, sizes: list[int], shards: list[torch.Tensor]) -> None:
        elems, world = sum(sizes), rank.world
        self._sizes, self._shards, self._group = sizes, shards, rank.nccl
        self._flat = torch.empty(world * elems, dtype=_BF16, device=rank.device)
        self._own = self._flat.narrow(0, rank.rank * elems, elems)
        self._packed = torch.split(self._own, sizes)
        self._rows = self._flat.view(world, -1)
        self.parameters = [torch.empty(world * n, dtype=_BF16, device=rank.device) for n in sizes]
        self._views = [parameter.view(world, -1) for parameter in self.parameters]

    def gather(self) -> None:
        dist.all_gather_into_tensor(self._flat, self._own, group=self._group)

    def path(self) -> None:
        torch._foreach_copy_(self._packed, self._shards)
        self.gather()
        torch.split_with_sizes_copy(self._rows, self._sizes, dim=1, out=self._views)


def all_gather(rank: Any, shapes: list[Shape], name: str) -> Collective:
    """All-gather of bf16 shards into parameters."""
    world, comm = rank.world, rank.comm
    sizes = [shard_elems(shape, world) for shape in shapes]
    shards = [random_bf16(n, rank.rank, i, rank.device) for i, n in enumerate(sizes)]
    group = _register(comm, name, shapes)
    segment = comm.add_segment(comm.landing_bytes(group), f"landing of {name}")
    landing, offsets = rank.view(segment), comm.landing_offsets(group)
    sources = [shard.data_ptr() for shard in shards]
    dtypes = [_core.BF16] * len(shards)

    def tide() -> None:
        assert shards  # kept: the call has their addresses only
        comm.all_gather(group, sources, dtypes, segment.id, 0, stream=rank.stream_handle())

    stock = None if rank.nccl is None else _StockAllGather(rank, sizes, shards)
    bodies: dict[str, Body] = {"tide": tide}
    if stock is not None:
        bodies |= {"nccl": stock.gather, "stock": stock.path}
    bodies |= _floor(rank, sum(sizes), name)

    def check() -> list[str]:
        landing.zero_()
        rank.synchronize()
        comm.barrier()  # nobody clears what a peer has written already
        rank.run(tide)
        if stock is not None:
            rank.run(stock.path)
        for index, (offset, elems) in enumerate(zip(offsets, sizes, strict=True)):
            landed = landing.narrow(0, offset // 2, world * elems)
            shards_of_all = [random_bf16(elems, r, index, rank.device) for r in range(world)]
            _expect_equal(f"all-gather, tensor {index}", landed, torch.cat(shards_of_all))
            if stock is not None:
                parameter = stock.parameters[index]
                _expect_equal(f"all-gather beside stock, tensor {index}", landed, parameter)
        return ["equal to the shards of all ranks"] + ["equal to stock"] * (stock is not None)

    return Collective(bodies, check)


class _StockReduceScatter:
    """FSDP2's buffers of one group's gradients; and bf16 ones, for the record."""

    def __init__(self, rank: Any, elems: int, gradients: list[torch.Tensor]) -> None:
        world, device = rank.world, rank.device
        self._world, self._group, self._gradients = world, rank.nccl, gradients
        self._packed = torch.zeros(world * elems, device=device)
        self._rows = self._packed.view(world, -1)
        self.output = torch.empty(elems, device=device)
        self._narrow = torch.zeros(world * elems, dtype=_BF16, device=device)
        self._narrow_output = torch.empty(elems, dtype=_BF16, device=device)

    def _reduce(self, output: torch.Tensor, packed: torch.Tensor) -> None:
        average = dist.ReduceOp.AVG
        dist.reduce_scatter_tensor(output, packed, op=average, group=self._group)

    def reduce(self) -> None:
        self._reduce(self.output, self._packed)

    def reduce_bf16(self) -> None:
        self._reduce(self._narrow_output, self._narrow)

    def path(self) -> None:
        torch._chunk_cat(self._gradients, dim=0, num_chunks=self._world, out=self._rows)
        self.reduce()


def _mean_shard(rank: Any, shape: Shape, index: int) -> torch.Tensor:
    """Returns this rank's padded shard of the mean over all ranks' gradients of one tensor."""
    rows, columns = shape
    elems = shard_elems(shape, rank.world)
    total = torch.zeros(rank.world * elems, device=rank.device)
    for other in range(rank.world):
        total[: rows * columns] += random_bf16(rows * columns, other, index, rank.device)
    return total.narrow(0, rank.rank * elems, elems) / rank.world


def reduce_scatter(rank: Any, shapes: list[Shape], name: str) -> Collective:
    """Reduce-scatter of bf16 gradients into fp32 means."""
    world, comm = rank.world, rank.comm
    sizes = [shard_elems(shape, world) for shape in shapes]
    gradients = [
        random_bf16(rows * columns, rank.rank, i, rank.device).view(rows, columns)
        for i, (rows, columns) in enumerate(shapes)
    ]
    group = _register(comm, name, shapes)
    indices, dtypes = list(range(len(shapes))), [_core.BF16] * len(shapes)
    comm.reserve([(group, indices, dtypes, _core.F32)])
    output = torch.empty(sum(sizes), device=rank.device)
    sources = [gradient.data_ptr() for gradient in gradients]
    arguments = (group, indices, sources, dtypes, output.data_ptr(), _core.F32, 1.0 / world, False)

    def tide() -> None:
        assert gradients  # kept: the call has their addresses only
        comm.reduce_scatter(*arguments, stream=rank.stream_handle())

    stock = None if rank.nccl is None else _StockReduceScatter(rank, sum(sizes), gradients)
    bodies: dict[str, Body] = {"tide": tide}
    if stock is not None:
        bodies |= {"nccl": stock.reduce, "nccl_bf16": stock.reduce_bf16, "stock": stock.path}
    bodies |= _floor(rank, sum(sizes), name)

    def check() -> list[str]:
        rank.run(tide)
        first = output.clone()
        output.zero_()
        rank.synchronize()
        rank.run(tide)
        _expect_equal("reduce-scatter, repeated", output, first)
        for index, shard in enumerate(torch.split(output, sizes)):
            mean = _mean_shard(rank, shapes[index], index)
            torch.testing.assert_close(shard, mean, rtol=_TOLERANCE, atol=_TOLERANCE)
        if stock is not None:
            rank.run(stock.path)
            torch.testing.assert_close(output, stock.output, rtol=_TOLERANCE, atol=_TOLERANCE)
        close = [f"within {_TOLERANCE:g} of the mean"]
        return ["repeatable to the bit", *close] + ["and of stock"] * (stock is not None)

    return Collective(bodies, check)


MAKERS = {"all-gather": all_gather, "reduce-scatter": reduce_scatter}
