"""All-gather and reduce-scatter beside what FSDP2 pays today and beside the memory's own speed.

    rows = run("all-gather", ranks=4, preset="small", rounds=20)

Three things alternate in every round, by the same processes: TIDE, the floor (the same copies and
sums with all waiting removed, into memory of each rank's own), and stock (gloo with FSDP2's packing
and unpacking). Each is timed barrier to barrier, on the slowest rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tide.bench.launch import Context, launch, require_memory
from tide.stats import Interval, comparison, in_turn, now

OPERATIONS = ("all-gather", "reduce-scatter")

# q, k, v, o with their biases, and the norms of q and k.
_WAN_ATTENTION = [*[(5120, 5120), (5120, 1)] * 4, (5120, 1), (5120, 1)]

# Shapes of one group, (rows, columns) a tensor.
PRESETS: dict[str, list[tuple[int, int]]] = {
    "tiny": [(24, 16), (5, 3), (7, 1)],
    "small": [(1024, 512)] * 16,
    "llama8b-layer": [
        (4096, 4096),
        (1024, 4096),
        (1024, 4096),
        (4096, 4096),
        (14336, 4096),
        (14336, 4096),
        (4096, 14336),
        (4096, 1),
        (4096, 1),
    ],
    "llama70b-layer": [
        (8192, 8192),
        (1024, 8192),
        (1024, 8192),
        (8192, 8192),
        (28672, 8192),
        (28672, 8192),
        (8192, 28672),
        (8192, 1),
        (8192, 1),
    ],
    # The experts are two grouped tensors, one row an expert.
    "qwen3-30b-a3b-layer": [
        (4096, 2048),
        (512, 2048),
        (512, 2048),
        (2048, 4096),
        (128, 1),
        (128, 1),
        (128, 2048),
        (128, 2 * 768 * 2048),
        (128, 2048 * 768),
        (2048, 1),
        (2048, 1),
    ],
    # A block of the Wan2.2 14B transformer, 27 tensors.
    "wan-block": [
        *_WAN_ATTENTION,  # self-attention
        *_WAN_ATTENTION,  # cross-attention
        (5120, 1),  # its norm, affine
        (5120, 1),
        (13824, 5120),
        (13824, 1),
        (5120, 13824),
        (5120, 1),
        (1, 6 * 5120),  # modulation: one row, on rank 0 alone
    ],
}
_WARM_UP = 3
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Config:
    """What every rank is told."""

    operation: str
    preset: str
    rounds: int
    nodes: int = 1


@dataclass
class Bodies:
    """One call of each contestant on this rank, and a check that TIDE's result is right."""

    tide: Callable[[], None]
    floor: Callable[[], None]
    stock: Callable[[], None]
    check: Callable[[], None]


def shard_elems(shape: tuple[int, int], ranks: int) -> int:
    """Elements of one rank's padded shard."""
    return math.ceil(shape[0] / ranks) * shape[1]


def _communicator(context: Context, nodes: int) -> Any:
    import torch.distributed as dist

    from tide import _core
    from tide.fsdp.agreement import exchange_objects

    exchange = partial(exchange_objects, process_group=dist.group.WORLD)
    return _core.Communicator(context.rank, context.world, exchange, _TIMEOUT_S, nodes=nodes)


def _register(comm: Any, shapes: list[tuple[int, int]]) -> int:
    from tide import _core

    return comm.register_group("bench", [(f"p{i}", *s, _core.BF16) for i, s in enumerate(shapes)])


def _random_bf16(rank: int, shapes: list[Any]) -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def _all_gather(context: Context, comm: Any, shapes: list[tuple[int, int]]) -> Bodies:
    import ctypes

    import torch
    import torch.distributed as dist

    from tide import _core

    world, rank = context.world, context.rank
    sizes = [shard_elems(shape, world) for shape in shapes]
    shards = _random_bf16(rank, sizes)
    group = _register(comm, shapes)
    size = comm.landing_bytes(group)
    segment = comm.add_segment(size, "landing", _core.SegmentKind.NODE_SHARED)
    # The floor's ranks write every rank's copy; TIDE's share one, and may be faster than the floor.
    apart = comm.add_segment(size, "landing of the floor", _core.SegmentKind.PER_RANK)
    sources = (group, [t.data_ptr() for t in shards], [_core.BF16] * len(shards))
    arguments, floor_arguments = (*sources, segment.id, 0), (*sources, apart.id, 0)

    parameters = [torch.empty(world * n, dtype=torch.bfloat16) for n in sizes]

    def stock() -> None:
        # FSDP2 takes the flat buffer and the unsharded storages anew at every call; a reshard
        # (outside the collective, but cheap) gives them back.
        for parameter in parameters:
            parameter.untyped_storage().resize_(0)
        flat = torch.empty(world * sum(sizes), dtype=torch.bfloat16)
        own = flat.narrow(0, rank * sum(sizes), sum(sizes))
        torch._foreach_copy_(torch.split(own, sizes), shards)
        dist.all_gather_single(flat, own)
        for parameter in parameters:
            parameter.untyped_storage().resize_(2 * parameter.numel())
        views = [p.view(world, -1) for p in parameters]
        torch.split_with_sizes_copy(flat.view(world, -1), sizes, dim=1, out=views)

    def check() -> None:
        stock()
        comm.all_gather(*arguments)
        for offset, parameter in zip(comm.landing_offsets(group), parameters, strict=True):
            size = parameter.numel() * 2
            landed = ctypes.string_at(segment.address + offset, size)
            if landed != ctypes.string_at(parameter.data_ptr(), size):
                raise AssertionError("all-gather: TIDE's bytes differ from stock's")

    return Bodies(
        tide=lambda: comm.all_gather(*arguments),
        floor=lambda: comm.unsynchronised_all_gather(*floor_arguments),
        stock=stock,
        check=check,
    )


def _reduce_scatter(context: Context, comm: Any, shapes: list[tuple[int, int]]) -> Bodies:
    import torch
    import torch.distributed as dist

    from tide import _core

    world = context.world
    sizes = [shard_elems(shape, world) for shape in shapes]
    gradients = _random_bf16(context.rank, shapes)
    group = _register(comm, shapes)
    indices, dtypes = list(range(len(shapes))), [_core.BF16] * len(shapes)
    comm.reserve([(group, indices, dtypes, _core.F32)])
    output = torch.empty(sum(sizes))
    arguments = (group, indices, [t.data_ptr() for t in gradients], dtypes, output.data_ptr())
    arguments += (_core.F32, 1.0 / world, False)
    stock_output = torch.empty(sum(sizes))

    def stock() -> None:
        packed = torch.empty(world * sum(sizes))
        torch._chunk_cat(gradients, 0, world, out=packed.view(world, -1))
        dist.reduce_scatter_single(stock_output, packed, op=dist.ReduceOp.AVG)

    def check() -> None:
        stock()
        comm.reduce_scatter(*arguments)
        torch.testing.assert_close(output, stock_output, rtol=1e-5, atol=1e-5)

    return Bodies(
        tide=lambda: comm.reduce_scatter(*arguments),
        floor=lambda: comm.unsynchronised_reduce_scatter(*arguments),
        stock=stock,
        check=check,
    )


def _worker(context: Context, config: Config) -> dict[str, list[Interval]]:
    comm = _communicator(context, config.nodes)
    make = _all_gather if config.operation == "all-gather" else _reduce_scatter
    bodies = make(context, comm, PRESETS[config.preset])
    bodies.check()
    times: dict[str, list[Interval]] = {"tide": [], "floor": [], "stock": []}
    for index in range(_WARM_UP + config.rounds):
        for name in in_turn(list(times), index):
            body = getattr(bodies, name)
            comm.barrier()
            start = now()
            body()
            end = now()
            comm.barrier()
            if index >= _WARM_UP:
                times[name].append((start, end))
        if context.rank == 0:
            context.progress(index)
    bodies.check()
    comm.close()
    return times


def memory_need(preset: str, ranks: int) -> int:
    """Bytes that a run holds at its peak, over all ranks."""
    elems = sum(shard_elems(shape, ranks) for shape in PRESETS[preset]) * ranks
    # Gradients or two copies of the parameters in bf16, gloo's fp32 buffers, torch itself.
    return ranks * (elems * 16 + (200 << 20))


def run(
    operation: str,
    ranks: int,
    preset: str,
    rounds: int = 20,
    on_progress: Callable[[Any], None] | None = None,
    nodes: int = 1,
) -> dict[str, Any]:
    """Measures one operation.

    Args:
        operation: "all-gather" or "reduce-scatter".
        ranks: processes of this machine.
        preset: a key of PRESETS; all tensors are bf16.
        rounds: how often each contestant runs, warm-up apart.
        on_progress: called after every round.
        nodes: virtual nodes that the ranks are split into.

    Returns:
        A row: op, ranks, nodes, tensors, elements, and the numbers of `stats.comparison`.

    Raises:
        ValueError: an unknown operation or preset, ranks < 2, rounds < 1, or nodes that do not
            divide the ranks.
        LaunchError: a rank failed, also when TIDE's result was wrong.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"expected one of {OPERATIONS}, got {operation!r}")
    if preset not in PRESETS:
        raise ValueError(f"expected a preset of {sorted(PRESETS)}, got {preset!r}")
    if ranks < 2 or rounds < 1:
        raise ValueError(f"expected ranks >= 2 and rounds >= 1, got {ranks} and {rounds}")
    if nodes < 1 or ranks % nodes != 0:
        raise ValueError(f"expected nodes to divide {ranks} ranks, got {nodes}")
    require_memory(memory_need(preset, ranks), f"the bench {preset} on {ranks} ranks")
    results = launch(_worker, ranks, Config(operation, preset, rounds, nodes), on_progress)
    shapes = PRESETS[preset]
    return {
        "op": operation,
        "ranks": ranks,
        "nodes": nodes,
        "tensors": len(shapes),
        "elements": sum(rows * columns for rows, columns in shapes),
        **comparison(results),
    }
