"""Calibrations on GPUs. Skip themselves without one, or two, and without the kernels."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tide
import torch
import torch.distributed as dist
from spawn import Context, RankGroup
from tide import _core
from tide.calibration import gpu as gpus
from tide.calibration import measure, store
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

_MISSING = gpus.missing()
_FEW = "expected two GPUs" if torch.cuda.device_count() < 2 else _core.nccl()["reason"] or None

pytestmark = pytest.mark.slow


@pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))
def test_a_gpu_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_CACHE", str(tmp_path))
    described = gpus.describe(torch.device("cuda", 0))
    torch.cuda.manual_seed(3)
    random, reserved = torch.cuda.get_rng_state(), torch.cuda.memory_reserved()
    found = store.load_or_measure(
        described, lambda: measure.measure_machine(described, measure.QUICK_ROUNDS, link=False)
    )
    assert torch.equal(torch.cuda.get_rng_state(), random)
    # A workspace of cuBLAS may stay.
    assert torch.cuda.memory_reserved() - reserved <= 64 << 20
    machine = json.loads(found.text)
    for curve in machine["sum_curves"]:
        rates = [rate for _, rate in curve["points"]]
        assert all(rate > 0 for rate in rates)
    counts = [ctas for ctas, _, _ in machine["sum_added"]]
    assert counts == measure.cta_counts(described.multiprocessors)
    assert machine["sum_ctas"] in counts


def enable_says_where_the_number_is_from(context: Context, cache: str) -> None:
    os.environ["TIDE_CACHE"] = cache
    torch.cuda.set_device(context.rank)
    mesh = DeviceMesh.from_group(dist.new_group(backend="cpu:gloo,cuda:nccl"), "cuda")
    model = fully_shard(nn.Linear(64, 64, device="cuda"), mesh=mesh)
    with tide.enable(model, strict=True) as handle:
        notes = [note for note in handle.report().notes if note.startswith("a sum takes ")]
        model(torch.ones(2, 64, device="cuda")).sum().backward()
    assert len(notes) == 1 and cache in notes[0], notes
    said = [None, None]
    dist.all_gather_object(said, notes[0])
    # One measured, the other has read what it wrote.
    assert sum("measured now" in str(note) for note in said) == 1, said


@pytest.mark.skipif(_FEW is not None, reason=str(_FEW))
def test_one_rank_measures_for_both(tmp_path: Path) -> None:
    group = RankGroup(2)
    try:
        group.run(enable_says_where_the_number_is_from, str(tmp_path), limit_s=120)
    finally:
        group.stop()
