"""FSDP2 on GPUs through TIDE: what CPU tests can't show. Skips itself without GPUs and NCCL."""

from __future__ import annotations

import copy
import gc
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tide
import torch
import torch.distributed as dist
from gpu_models import BLOCKS, MIXED, TOKENS, WIDTH, Run, missing, place
from spawn import Context, RankFailure, RankGroup
from tide.fsdp import communicators, storage
from tide.fsdp.segment_memory import LEAST
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

_STEPS = 200

pytestmark = [
    pytest.mark.skipif(missing(2) is not None, reason=str(missing(2))),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankGroup]:
    """Two processes, a GPU each if there are two."""
    group = RankGroup(2)
    yield group
    group.stop()


def _stock_losses(context: Context, policy: dict[str, Any], steps: int) -> list[float]:
    run = Run(context, policy)
    return [run.step() for _ in range(steps)]


def equal_losses(
    context: Context, mode: str, policy: dict[str, Any], steps: int, keep: str = "on"
) -> None:
    """The same bits as stock; in the middle TIDE is off, and on again, for a few steps each."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    expected = _stock_losses(context, policy, steps)
    run = Run(context, policy)
    found = []
    for start, end, through_tide in (
        (0, steps // 2, True),
        (steps // 2, steps // 2 + 5, False),
        (steps // 2 + 5, steps, True),
    ):
        if not through_tide:
            found += [run.step() for _ in range(start, end)]
            continue
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TIDE_KEEP_LANDINGS", keep)
            handle = tide.enable(run.model, mode=mode, strict=True)
        found += [run.step() for _ in range(start, end)]
        counters = handle.counters
        handle.disable()
        assert counters["all_gather"]["stock"] == counters["reduce_scatter"]["stock"] == 0
        assert counters["reduce_scatter"]["tide"] == (BLOCKS + 1) * (end - start)
    assert found == expected


@pytest.mark.parametrize(
    ("mode", "keep"), [("in_place", "on"), ("in_place", "off"), ("slot_reuse", "on")]
)
def test_losses_of_200_steps_equal_stock(two_ranks: RankGroup, mode: str, keep: str) -> None:
    two_ranks.run(equal_losses, mode, MIXED, _STEPS, keep, limit_s=300)


@pytest.mark.parametrize(
    "policy", [{}, {"param_dtype": torch.bfloat16}], ids=["all fp32", "bf16 reduction"]
)
def test_losses_in_other_precisions(two_ranks: RankGroup, policy: dict[str, Any]) -> None:
    two_ranks.run(equal_losses, "in_place", policy, 20, limit_s=120)


def _all_blocks(run: Run) -> None:
    for block in list(run.model)[:BLOCKS]:
        for parameter in block.parameters():
            parameter.to_local().data.mul_(1.25)


def _one_element_of_rank_1(run: Run) -> None:
    if dist.get_rank() == 1:
        next(run.model[BLOCKS - 1].parameters()).to_local().data.view(-1)[-1:].add_(1)


def changes_shards(
    context: Context, change: Callable[[Run], None], mode: str, policy: dict[str, Any]
) -> None:
    """What no version counter tells, between forward and backward, on all ranks or on one."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = []
    for through_tide in (False, True):
        run = Run(context, policy)
        handle = tide.enable(run.model, mode=mode, strict=True) if through_tide else None
        gradients = []
        for _ in range(2):
            batch = torch.full((TOKENS, WIDTH), 0.01 * (1 + context.rank)).cuda()
            loss = run.model(batch).float().pow(2).mean()
            change(run)
            torch.cuda.synchronize()  # FSDP2 waits for shards before the forward only
            loss.backward()
            gradients += [p.grad.to_local().clone() for p in run.model.parameters()]
            run.model.zero_grad()
        found.append(gradients)
        if handle is not None:
            groups = handle.report().groups
            handle.disable()
            refreshed = [group["refreshed"] for group in groups if group["refreshed"]]
            slots = 2
            if mode == "in_place":
                slots = 4 if policy == MIXED else 3
            assert refreshed == [2] * slots, groups
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("mode", "policy"),
    [("in_place", MIXED), ("slot_reuse", MIXED), ("in_place", {})],
    ids=["mixed", "slot_reuse", "all fp32"],
)
@pytest.mark.parametrize("change", [_all_blocks, _one_element_of_rank_1])
def test_changed_shards_are_gathered(
    two_ranks: RankGroup, change: Callable[[Run], None], mode: str, policy: dict[str, Any]
) -> None:
    two_ranks.run(changes_shards, change, mode, policy)


def slots_are_reused(context: Context) -> None:
    """In slot_reuse the gradients lie in the slot that the group left, and report says the rest."""
    run = Run(context, MIXED)
    with tide.enable(run.model, mode="slot_reuse", strict=True) as handle:
        run.step()
        notes = handle.report().notes
    assert not any("ran in place" in note for note in notes), notes
    run = Run(context, {})
    run.model.set_reshard_after_backward(False)
    with tide.enable(run.model, mode="slot_reuse", strict=True) as handle:
        run.step()
        notes = handle.report().notes
    assert any("was not vacated" in note for note in notes), notes


def test_slot_reuse(two_ranks: RankGroup) -> None:
    two_ranks.run(slots_are_reused)


def accumulates(context: Context) -> None:
    """Gradient accumulation with and without synchronisation, and a checkpoint in between."""
    losses = []
    for through_tide in (False, True):
        run = Run(context, MIXED)
        handle = tide.enable(run.model, strict=True) if through_tide else None
        for step in range(6):
            run.model.set_requires_gradient_sync(step % 3 == 2)
            batch = torch.full((TOKENS, WIDTH), 0.01 * (step + 1 + context.rank)).cuda()
            run.model(batch).float().pow(2).mean().backward()
        state = copy.deepcopy(run.model.state_dict())
        losses.append(run.step())
        run.model.load_state_dict(state)
        losses.append(run.step())
        if handle is not None:
            handle.disable()
    assert losses[:2] == losses[2:]


def test_accumulation_and_checkpoints(two_ranks: RankGroup) -> None:
    two_ranks.run(accumulates)


def stalls(context: Any, _config: None) -> None:
    """Rank 1 stops answering in the middle of training."""
    run = Run(context, MIXED)
    with tide.enable(run.model, strict=True, timeout=5):
        for _ in range(3):
            run.step()
        if context.rank == 1:
            time.sleep(120)
        run.step()
        torch.cuda.synchronize()


def test_a_stalled_peer_is_reported_in_time(capfd: pytest.CaptureFixture[str]) -> None:
    from tide.bench.launch import LaunchError, launch

    start = time.monotonic()
    with pytest.raises(LaunchError, match="rank 0 ended with exit status 87"):
        launch(stalls, 2)
    assert time.monotonic() - start < 60
    words = capfd.readouterr().err
    for word in ("rank 0", "all_gather of group", "lane all_gather", "waits for"):
        assert word in words, words


def killed(context: Context) -> None:
    """Rank 1 is killed in the middle of training."""
    run = Run(context, MIXED)
    with tide.enable(run.model, strict=True, timeout=600):
        for _ in range(3):
            run.step()
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        run.step()


def differs(context: Context) -> None:
    """Rank 1 leaves its gradients unreduced in one step."""
    run = Run(context, MIXED)
    with tide.enable(run.model, strict=True, timeout=600):
        for _ in range(3):
            run.step()
        run.model.set_requires_gradient_sync(context.rank == 0)
        for _ in range(2):
            run.step()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (killed, ["rank 0: rank 1 has ended without a word", "waits for", "of rank 1 to reach"]),
        (
            differs,
            [
                "rank 0 entered reduce_scatter of group",
                "rank 1 entered refreshing all_gather of group",
                "rank 1 last enqueued call",
            ],
        ),
    ],
)
def test_a_rank_that_goes_astray_ends_the_others(
    body: Callable[[Context], None], words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    group = RankGroup(2)  # its ranks have ten seconds once one has failed, TIDE has ten minutes
    try:
        with pytest.raises(RankFailure, match=r"--- rank 0 ---\nprocess died with exit code 87"):
            group.run(body, limit_s=120)
    finally:
        group.stop()
    err = capfd.readouterr().err
    for word in words:
        assert word in err, err


def no_copies(context: Context) -> None:
    """FSDP2's own packing and unpacking is gone from a step, and so are NCCL's kernels."""
    from tide.bench.gpu.profiling import profile

    run = Run(context, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32})
    with tide.enable(run.model, strict=True):
        for _ in range(3):
            run.step()
        step = profile(run.step)
    names = " ".join(step["kernels"])
    for word in ("chunk_cat", "split_with_sizes", "ncclDevKernel"):
        assert word not in names, names


def test_a_step_packs_nothing(two_ranks: RankGroup) -> None:
    two_ranks.run(no_copies)


_WIDE = 2048
_LANDING = 2 * _WIDE * _WIDE * 2  # bytes; more than 10 MiB, so that torch counts it
_BUSY_CYCLES = 1 << 29  # of the GPU; about a quarter of a second


class _Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDE, 2 * _WIDE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x)[:, :_WIDE]


def _wide_model(mesh: DeviceMesh) -> nn.Module:
    with torch.device("cuda"):
        model = nn.Sequential(*(_Wide() for _ in range(3)))
    mixed = MixedPrecisionPolicy(**MIXED)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=mixed)
    return fully_shard(model, mesh=mesh, mp_policy=mixed)


def _reserved() -> int:
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _step(model: nn.Module, rank: int) -> None:
    model(torch.full((TOKENS, _WIDE), 0.01 * (rank + 1), device="cuda")).sum().backward()
    model.zero_grad()


def _grown(before: int, memory: int, when: str) -> None:
    """Asserts that torch has reserved ``memory`` bytes more than ``before``."""
    grown = _reserved() - before
    assert abs(grown - memory) < LEAST, f"{when}: torch has {grown} bytes more, expected {memory}"


def _segments(expected: int, when: str) -> None:
    """Asserts how many segments torch's allocator has out."""
    found = storage.segment_count()
    assert found == expected, f"{when}: {found} segments, expected {expected}"


def torch_counts_segments(context: Context) -> None:
    """Torch's numbers grow by TIDE's segments, once, and shrink when the communicator ends."""
    place(context)
    mesh = DeviceMesh.from_group(dist.new_group(backend="cpu:gloo,cuda:nccl"), "cuda")
    model = _wide_model(mesh)
    _step(model, context.rank)
    before, segments = _reserved(), storage.segment_count()
    counted = []
    for _ in range(3):
        with tide.enable(model, mode="in_place", strict=True) as handle:
            report = handle.report()
            (channel,) = handle.channels
            memory = channel.segment_memory
            assert memory.reason is None, memory.reason
            counted.append(memory.counted)
            landing = report.memory["landing"]
            assert memory.counted >= landing >= 2 * _LANDING, (memory.counted, landing, _LANDING)
            assert any("torch's memory accounting has" in note for note in report.notes)
            assert sum(note.startswith("copies ") for note in report.notes) == 1
            _grown(before, memory.counted, "enabled")
            _step(model, context.rank)
        _grown(before, memory.counted, "kept for the next enable")
    assert counted == 3 * counted[:1], f"a later enable took more: {counted}"
    with tide.enable(model, mode="in_place", strict=True):
        model[0].unshard()
    landed = model[0].layer.weight
    expected = landed.detach().clone()
    known = weakref.ref(channel)
    for key in [key for key, (_, c) in communicators._channels.items() if c is channel]:
        communicators._channels.pop(key)[1].core.close()
    del handle, channel, memory
    gc.collect()
    assert known() is None, "a cycle holds the communicator and its segments"
    _segments(segments + 1, "only the landing is still needed")
    assert torch.equal(landed.detach(), expected)
    # Freed while a kernel that reads it is still to run, as FSDP2 does after every forward.
    torch.cuda._sleep(_BUSY_CYCLES)
    late = landed.detach().clone()
    model[0].reshard()
    _segments(segments, "the landing was resharded")
    assert torch.equal(late, expected)
    del landed, late, expected
    _grown(before, 0, "all is over")


def test_torch_counts_segments(two_ranks: RankGroup) -> None:
    two_ranks.run(torch_counts_segments)


def frees_what_torch_keeps(context: Context) -> None:
    """A segment takes the room of blocks that torch keeps unused, as any allocation does."""
    place(context)
    mesh = DeviceMesh.from_group(dist.new_group(backend="cpu:gloo,cuda:nccl"), "cuda")
    model = _wide_model(mesh)
    free, total = torch.cuda.mem_get_info()
    limit = torch.cuda.memory_reserved() + (1 << 30)
    assert free > 2 << 30
    hoard = [torch.empty(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(16)]
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        del hoard
        with tide.enable(model, strict=True) as handle:
            _step(model, context.rank)
            (channel,) = handle.channels
            assert channel.segment_memory.reason is None
            assert channel.segment_memory.counted > 0
            assert torch.cuda.memory_reserved() <= limit
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_segments_take_what_torch_keeps_unused(two_ranks: RankGroup) -> None:
    two_ranks.run(frees_what_torch_keeps)


def captured_beside(context: Context) -> None:
    """A graph that other work captures while calls are under way, and watched, stays valid."""
    run = Run(context, MIXED)
    with tide.enable(run.model, strict=True):
        run.step()
        batch = torch.randn(TOKENS, WIDTH, device="cuda")
        x = torch.zeros(1024, device="cuda")
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        torch.cuda._sleep(4 * _BUSY_CYCLES)
        run.model(batch)
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="global")
            x += 1
            time.sleep(0.5)  # the watchdog looks ten times a second
            graph.capture_end()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(x, torch.ones_like(x))


def test_capturing_beside_calls(two_ranks: RankGroup) -> None:
    two_ranks.run(captured_beside)
