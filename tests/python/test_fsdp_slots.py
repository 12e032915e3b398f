"""Landing slots: never shared while live, given back, used again, refused without memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsdp_models as fm
import pytest
import tide
import torch
from spawn import Context, RankGroup
from tide.fsdp.slots import Slot, SlotState
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult

Ranks = Callable[[int], RankGroup]


class _Watcher:
    """Checks, at every all-gather and every resize, that storages in use do not overlap."""

    def __init__(self, model: nn.Module, handle: object) -> None:
        self.checks, self.live_peak = 0, 0
        self._model, self._handle = model, handle
        for module in model.modules():
            module.register_forward_pre_hook(self._check)
            module.register_forward_hook(self._check)
            module.register_full_backward_hook(self._check)

    def _check(self, *unused: object) -> None:
        ranges = []
        slots = [slot for pool in self._handle.pools for slot in pool.slots]
        for state in self._handle._states:
            for tensor in state.outputs:
                size = tensor.untyped_storage().size()
                if size:
                    start = tensor.data_ptr()
                    ranges.append((start, start + size))
                    inside = [s for s in slots if s.address <= start < s.address + s.capacity]
                    assert len(inside) == 1 and inside[0].state.value == "live"
        ranges.sort()
        for (_, end), (start, _) in zip(ranges, ranges[1:], strict=False):
            assert end <= start, "two live parameters share memory"
        self.checks += 1
        self.live_peak = max(self.live_peak, sum(s.hold.live > 0 for s in slots))


def live_slots(context: Context) -> None:
    for reshard in (None, False):
        model = fm.Setup(blocks=4, reshard=reshard).build()
        handle = tide.enable(model, strict=True)
        watcher = _Watcher(model, handle)
        slots = handle.report().memory["slots"]
        for step in range(3):
            model(fm.batch(context, step)).sum().backward()
        for block in list(model)[:-1]:
            block.unshard()
        watcher._check()
        for block in list(model)[:-1]:
            block.reshard()
        assert watcher.checks > 50
        assert watcher.live_peak == (4 if reshard is None else 5)
        if reshard is not None:
            assert handle.report().memory["slots"] == slots, "the reservation was too small"
        handle.disable()


def test_live_slots_are_never_shared(ranks: Ranks) -> None:
    ranks(2).run(live_slots)


def default_reservation(context: Context) -> None:
    for blocks in (1, 2, 6):
        model = fm.Setup(blocks=blocks).build()
        with tide.enable(model, strict=True) as handle:
            reserved = len(handle.pools[0].slots)
            assert reserved == 1 + min(2, blocks)
            for step in range(3):
                model(fm.batch(context, step)).sum().backward()
            assert len(handle.pools[0].slots) == reserved


def test_default_step_needs_no_more_than_reserved(ranks: Ranks) -> None:
    ranks(2).run(default_reservation)


def dropped_prefetch(context: Context) -> None:
    """A prefetch that no forward waits for gives its slot back."""
    model = fm.Setup(blocks=3).build()
    with tide.enable(model, strict=True) as handle:
        model[0].set_modules_to_backward_prefetch([model[2]])  # in use already: dropped later
        for step in range(4):
            model(fm.batch(context, step)).sum().backward()
        assert len(handle.pools[0].slots) <= 4


def test_dropped_prefetch_returns_its_slot(ranks: Ranks) -> None:
    ranks(2).run(dropped_prefetch)


def interrupted(context: Context) -> None:
    """An exception in forward, a prefetch pending at disable, a separate reduce-scatter group."""

    def drive(run: fm.Run) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        blocks = list(run.model)[:-1]
        blocks[0].set_modules_to_forward_prefetch(blocks[1:])
        run.enable(strict=True)
        run.steps(fm.adamw(run.model), 0, 1)
        broken = blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.model(fm.batch(context, 1))
        broken.remove()
        run.model.reset_iter_state()
        run.steps(fm.adamw(run.model), 1, 3)
        group = blocks[0]._get_fsdp_state()._fsdp_param_group
        FSDPParamGroup._prefetch_unshard(group, "forward")
        run.disable()
        run.steps(fm.adamw(run.model), 3, 4)
        run.model.set_separate_reduce_scatter_group(True)
        run.enable(strict=True)
        FSDPParamGroup._prefetch_unshard(group, "forward")
        run.steps(fm.adamw(run.model), 4, 6)

    fm.parity(context, fm.Setup(), drive)


def test_interruptions(ranks: Ranks) -> None:
    ranks(2).run(interrupted)


def reuse(context: Context) -> None:
    """Memory of earlier models serves later ones, disabled or garbage-collected."""
    import gc

    from tide.fsdp import storage
    from tide.fsdp.communicators import channel_for

    channel = None
    sizes = []
    landings = storage.landing_count()
    for turn in range(6):
        model = fm.Setup(reshard=False).build()
        handle = tide.enable(model, strict=True)
        channel = channel or channel_for(fm.mesh().get_group(), torch.device("cpu"))
        model(fm.batch(context, 0)).sum().backward()
        model(fm.batch(context, 0))  # leaves parameters unsharded
        if turn % 2:
            handle.disable()
        del handle, model
        gc.collect()
        sizes.append(sum(segment.bytes for segment in channel._segments.values()))
    assert sizes[2] == sizes[-1], sizes
    assert storage.landing_count() == landings


def test_memory_is_used_again(ranks: Ranks) -> None:
    ranks(2).run(reuse)


def _mapped() -> set[str]:
    """Returns the inodes of the landing segments that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:tide:landing" in line}


def ended_communicator(context: Context) -> None:
    """A landing outlives its communicator, and then takes its segment along."""
    import gc

    from tide.fsdp import communicators

    mesh = fm.new_cpu_mesh()
    model = fully_shard(nn.Linear(fm.WIDTH, 6), mesh=mesh)
    before = _mapped()
    with tide.enable(model, strict=True) as handle:
        model.unshard()
    weight = model.weight.data
    expected = weight.clone()
    (channel,) = handle.channels
    for key in [key for key, (_, c) in communicators._channels.items() if c is channel]:
        communicators._channels.pop(key)[1].core.close()
    del handle, channel
    gc.collect()
    assert len(_mapped() - before) == 1
    assert torch.equal(weight, expected)
    model.reshard()
    assert _mapped() - before == set(), "nothing lies in the segment any more"


def test_a_landing_outlives_its_communicator(ranks: Ranks) -> None:
    ranks(2).run(ended_communicator)


class _Group:
    """An FSDPParamGroup that has dropped its all-gather."""

    _all_gather_result = None


@pytest.mark.parametrize("begin", [Slot.start, Slot.refresh])
def test_a_dropped_all_gather_holds_its_slot(
    monkeypatch: pytest.MonkeyPatch, begin: Callable[[Slot, Any], None]
) -> None:
    stream = SimpleNamespace(record_event=lambda: "read by compute")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    segment = SimpleNamespace(id=0, address=0, lease=lambda: (0, 0))
    slot = Slot(0, segment, 0, 64, torch.device("cuda", 0))
    group = _Group()
    gathered = AllGatherResult(torch.empty(0), "gathered", None, [], [], [])

    begin(slot, group)
    slot.promise(gathered)
    slot.settle()
    assert slot.state is SlotState.FREE
    assert slot.vacated == "gathered", "compute has not waited for it"

    begin(slot, group)
    slot.promise(gathered)
    slot.land()
    slot.settle()
    assert slot.state is SlotState.FREE and slot.vacated == "read by compute"


def no_memory(context: Context) -> None:
    from tide.fsdp.communicators import Channel

    def drive(run: fm.Run) -> None:
        run.enable()
        refuse = Channel.take_ranges
        Channel.take_ranges = _refuse
        try:
            for block in list(run.model)[:-1]:
                block.unshard()
            run.steps(fm.adamw(run.model), 0, 2)
        finally:
            Channel.take_ranges = refuse

    handle = fm.parity(context, fm.Setup(blocks=5), drive)
    reasons = handle.counters["all_gather"]["reasons"]
    assert reasons == {"no memory for another landing slot": 3}, reasons
    assert handle.counters["all_gather"]["tide"] > 0


def _refuse(*unused: object) -> None:
    error = tide.Error("no memory")
    error.code = "out_of_memory"
    raise error


def test_growth_refused_for_memory(ranks: Ranks) -> None:
    ranks(2).run(no_memory)
