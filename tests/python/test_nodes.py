"""Several virtual nodes: FSDP2 trains as on torch's own path, and failures are named."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fsdp_models as fm
import pytest
import tide
import torch
import torch.distributed as dist
from spawn import Context, RankGroup
from test_processes import LIMIT_S, _answer, _start, _wait_until_running
from tide import _core
from tide.fsdp import communicators
from torch import nn
from torch.distributed.fsdp import fully_shard

Ranks = Callable[[int], RankGroup]
Environment = dict[str, str]


@contextlib.contextmanager
def _fresh(environment: Environment) -> Iterator[None]:
    """Sets variables for communicators made inside, and uses no earlier one."""
    communicators._channels.clear()
    os.environ.update(environment)
    try:
        yield
    finally:
        for name in environment:
            del os.environ[name]
        communicators._channels.clear()


def parity(context: Context, options: dict[str, Any], environment: Environment) -> None:
    def drive(run: fm.Run) -> None:
        run.enable(strict=True, **options)
        run.steps(fm.adamw(run.model), 0, 3)

    with _fresh(environment):
        for name in ("bf16_fp32", "fp32"):
            handle = fm.parity(context, fm.Setup(policy=fm.POLICIES[name]), drive)
            nodes = options.get("nodes") or int(environment["TIDE_NODES"])
            assert [core.nodes for core in communicators.open_cores()] == [nodes]
            for counters in handle.counters.values():
                assert counters["tide"] > 0 and counters["stock"] == 0, str(handle.report())


@pytest.mark.parametrize(
    ("world", "options", "environment"),
    [
        (4, {"nodes": 2}, {"TIDE_ROUND_WIDTH": "2147483647"}),  # no round is wider than M - 1
        (4, {"nodes": 4}, {}),
        (4, {"nodes": 2, "mode": "slot_reuse"}, {"TIDE_PLACEMENT": "latin_square"}),
        (4, {"nodes": 4, "mode": "slot_reuse"}, {"TIDE_ROUND_WIDTH": "3"}),
        (4, {}, {"TIDE_NODES": "2", "TIDE_PASSES": "3"}),
        pytest.param(6, {"nodes": 3}, {}, marks=pytest.mark.slow),
        pytest.param(
            6,
            {"nodes": 3, "mode": "slot_reuse"},
            {"TIDE_PLACEMENT": "latin_square", "TIDE_PASSES": "3", "TIDE_ROUND_WIDTH": "3"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_training_is_stock(
    ranks: Ranks, world: int, options: dict[str, Any], environment: Environment
) -> None:
    ranks(world).run(parity, options, environment)


class _Weighted(nn.Module):
    """Its gradients are the weights of this rank's loss: whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 37)
        self.outer = nn.Linear(5, 3)

    def forward(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        loss = torch.zeros(())
        for parameter in self.parameters():
            weights = torch.randint(-100, 101, parameter.shape, generator=generator)
            loss = loss + (parameter.float() * weights).sum()
        return loss


def _weighted_gradients(context: Context, name: str, options: dict[str, Any] | None) -> Any:
    torch.manual_seed(7)
    model = _Weighted()
    fully_shard(model, mesh=fm.mesh(), mp_policy=fm.POLICIES[name])
    handle = tide.enable(model, strict=True, **options) if options is not None else None
    model(context.rank).backward()
    gradients = fm.snapshot(model, "grad")
    if handle is not None:
        handle.disable()
    return gradients


def whole_numbers(context: Context, options: dict[str, Any]) -> None:
    for name in ("bf16_fp32", "fp32"):
        stock = _weighted_gradients(context, name, None)
        for parameter, gradient in _weighted_gradients(context, name, options).items():
            assert torch.equal(gradient, stock[parameter]), parameter


# The divisor, 4, is a power of two: every sum and its quotient are exact.
@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("mode", ["in_place", "slot_reuse"])
def test_whole_gradients_are_equal(ranks: Ranks, nodes: int, mode: str) -> None:
    ranks(4).run(whole_numbers, {"nodes": nodes, "mode": mode})


def uneven_nodes(context: Context) -> None:
    model = fm.Setup().build()
    with pytest.raises(tide.Error) as caught:
        tide.enable(model, nodes=3)
    texts: list[Any] = [None] * context.world
    dist.all_gather_object(texts, (caught.value.code, str(caught.value)))
    assert set(texts) == {texts[0]}
    code, text = texts[0]
    assert code == "invalid_argument" and "expected a divisor of 4 ranks" in text
    tide.enable(model, nodes=2).disable()


def test_nodes_that_do_not_divide_the_ranks(ranks: Ranks) -> None:
    ranks(4).run(uneven_nodes)


SHAPES = [("weight", 37, 24), ("bias", 5, 1)]


def _make_calls(comm: Any) -> Callable[[], bytes]:
    """Returns a function that gathers and reduces; what it returns holds both results.

    The values depend on nothing but the rank.
    """
    generator = torch.Generator().manual_seed(17 + comm.rank)
    group = comm.register_group("g", [(*shape, _core.BF16) for shape in SHAPES])
    segment = comm.add_segment(comm.landing_bytes(group), "landing")
    rows = [-(-count // comm.world) for _, count, _ in SHAPES]
    columns = [row_elems for _, _, row_elems in SHAPES]
    shards = [torch.randn(r, k, generator=generator) for r, k in zip(rows, columns, strict=True)]
    gradients = [torch.randn(count, k, generator=generator) for _, count, k in SHAPES]
    output = torch.zeros(sum(shard.numel() for shard in shards))
    dtypes = [_core.F32] * len(SHAPES)

    def call() -> bytes:
        sources = [shard.data_ptr() for shard in shards]
        comm.all_gather(group, sources, dtypes, segment.id, 0)
        sources = [gradient.data_ptr() for gradient in gradients]
        comm.reduce_scatter(
            group, [0, 1], sources, dtypes, output.data_ptr(), _core.F32, 0.25, False
        )
        result = output.numpy().tobytes()
        for offset, shard in zip(comm.landing_offsets(group), shards, strict=True):
            gathered = comm.world * shard.numel() * 2
            result += ctypes.string_at(segment.address + offset, gathered)
        return result

    return call


def _result_hash(comm: Any) -> str:
    call = _make_calls(comm)
    return hashlib.sha256(b"".join(call() for _ in range(3))).hexdigest()


def process_hash(context: Context, nodes: int, folder: str) -> None:
    def exchange(mine: bytes) -> list[bytes]:
        answers: list[Any] = [None] * context.world
        dist.all_gather_object(answers, mine)
        return answers

    comm = _core.Communicator(context.rank, context.world, exchange, LIMIT_S, nodes)
    Path(folder, str(context.rank)).write_text(_result_hash(comm))
    dist.barrier()
    comm.close()


def _thread_hashes(world: int, nodes: int) -> list[str]:
    barrier = threading.Barrier(world)
    box: list[bytes] = [b""] * world
    hashes = [""] * world

    def run(rank: int) -> None:
        def exchange(mine: bytes) -> list[bytes]:
            box[rank] = mine
            barrier.wait(LIMIT_S)
            answers = list(box)
            barrier.wait(LIMIT_S)
            return answers

        comm = _core.Communicator(rank, world, exchange, LIMIT_S, nodes)
        hashes[rank] = _result_hash(comm)
        barrier.wait(LIMIT_S)
        comm.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return hashes


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_threads_and_processes_give_the_same_bits(ranks: Ranks, tmp_path: Path, nodes: int) -> None:
    ranks(4).run(process_hash, nodes, str(tmp_path))
    processes = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    assert len(set(processes)) == 4, "every rank has results of its own"
    assert _thread_hashes(4, nodes) == processes


def _endless_collectives(comm: Any, pipe: Connection) -> None:
    call = _make_calls(comm)
    first = call()
    pipe.send("running")
    while True:
        assert call() == first


# Rank 2 shares a node with 3 and a rail with 0; rank 1 can only hear of it.
@pytest.mark.parametrize("nodes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_killed_rank_is_named_on_all_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    monkeypatch.setenv("TIDE_NODES", str(nodes))
    processes, pipes = _start(_endless_collectives, 4, tmp_path, timeout=LIMIT_S)
    _wait_until_running(pipes)
    os.kill(processes[2].pid, signal.SIGKILL)
    for rank in (0, 1, 3):
        code, text, peer, _ = _answer(pipes[rank])
        assert (code, peer) == ("peer_dead", 2), text
        assert "rank 2 has exited" in text
    for process in processes:
        process.join(LIMIT_S)
        assert process.exitcode is not None
