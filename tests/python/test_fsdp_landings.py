"""Landings that the ranks of a node share: a rank's own changes stay its own, sharing or not."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path

import fsdp_models as fm
import pytest
import tide
import torch
from spawn import Context, RankGroup
from test_fsdp_adapter import between, survivors
from test_fsdp_slots import live_slots, reuse
from tide.fsdp import storage
from torch import nn

Ranks = Callable[[int], RankGroup]


def switch_sharing_off(context: Context) -> None:
    from tide.fsdp.communicators import Channel

    Channel.share_landings = False


@pytest.fixture(scope="module")
def unshared() -> Iterator[RankGroup]:
    """Two ranks that behave as on a system that cannot share landings."""
    group = RankGroup(2)
    group.run(switch_sharing_off)
    yield group
    group.stop()


def changed_in_place(context: Context) -> None:
    """Each rank scales an unsharded parameter its own way; parity says it stays its own.

    The next all-gather must undo it: with reshard=False the change is live until after backward.
    """

    def scale(module: nn.Linear, inputs: object) -> None:
        with torch.no_grad():
            module.weight.mul_(1 + 0.5 * context.rank)

    def drive(run: fm.Run) -> None:
        run.model[1].up.register_forward_pre_hook(scale)
        fm.train(run)

    for reshard in (None, False):
        fm.parity(context, fm.Setup(reshard=reshard), drive)


def test_in_place_change_stays_with_its_rank(ranks: Ranks) -> None:
    ranks(2).run(changed_in_place)


@pytest.mark.slow
@pytest.mark.parametrize("body", [changed_in_place, between, survivors, live_slots, reuse])
def test_without_sharing(unshared: RankGroup, body: Callable[[Context], None]) -> None:
    unshared.run(body)


def survives_with_change(context: Context) -> None:
    """A landed tensor keeps this rank's change after disable, whatever others gather later."""
    model = fm.Setup().build()
    handle = tide.enable(model, strict=True)
    model[0].unshard()
    weight = model[0].up.weight.data
    weight.add_(context.rank + 1)
    expected = weight.clone()
    handle.disable()
    again = fm.Setup().build()
    with tide.enable(again, strict=True):
        again(fm.batch(context, 1)).sum().backward()
    assert torch.equal(weight, expected)


def test_landed_tensor_keeps_its_change(ranks: Ranks) -> None:
    ranks(2).run(survives_with_change)


def owner(context: Context, expected: str) -> None:
    with tide.enable(fm.Setup().build()) as handle:
        report = handle.report()
        assert report.landing_owner == expected
        note = "every rank has landings of its own (rank 0: switched off)"
        assert (note in report.notes) == (expected == "rank")
        assert f" a {expected}\n" in f"{report}\n"


def test_report_names_the_owner(ranks: Ranks, unshared: RankGroup) -> None:
    ranks(2).run(owner, "node")
    unshared.run(owner, "rank")


def test_a_compiler_that_hangs_has_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_COMPILE_S", 0.2)
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nexec sleep 100\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(RuntimeError, match=rf"within 0.2 s\ncommand: {compiler}"):
        storage._build_in(tmp_path, storage.source_path())
    with open(tmp_path / "lock", "a", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="has held .*lock for 0.2 s; end it, or remove "):
            storage._build_in(tmp_path, storage.source_path())
