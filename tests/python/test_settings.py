"""The TIDE_* variables: read, checked, and equal on all ranks."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tide
import torch
from spawn import Context, RankGroup
from tide.fsdp import settings, storage
from torch import nn
from torch.distributed.fsdp import fully_shard


def test_numbers_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.problem() is None
    assert settings.number("TIDE_TIMEOUT") is None
    monkeypatch.setenv("TIDE_TIMEOUT", "2.5")
    assert settings.number("TIDE_TIMEOUT") == 2.5
    monkeypatch.setenv("TIDE_TIMEOUT", "1e10")
    assert settings.number("TIDE_TIMEOUT") == 1e9
    for bad in ("soon", "-1", "0", "inf"):
        monkeypatch.setenv("TIDE_TIMEOUT", bad)
        assert "TIDE_TIMEOUT must be a positive number" in settings.problem()
        with pytest.raises(tide.Error, match="TIDE_TIMEOUT must be a positive number"):
            settings.number("TIDE_TIMEOUT")


@pytest.mark.parametrize("collectives", [None, 3, (), ("all_gather", None), [["all_gather"]]])
def test_collectives_are_names(collectives: object) -> None:
    with pytest.raises(tide.Error, match="collectives must be some of all_gather, reduce_scatter"):
        tide.enable(nn.Linear(8, 8), collectives=collectives)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"mode": None}, "mode must be one of auto, in_place, slot_reuse, not None"),
        ({"mode": np.array(["auto", "in_place"])}, "mode must be one of"),
        ({"strict": "no"}, "strict must be True or False, not 'no'"),
        ({"strict": None}, "strict must be True or False, not None"),
        ({"collectives": [np.array(["all_gather", "b"])]}, "collectives must be some of"),
        ({"timeout": [1]}, "timeout must be a positive number of seconds"),
        ({"nodes": 2.0}, "nodes must be a positive whole number, not 2.0"),
        ({"model": None}, "model must be a torch.nn.Module, not NoneType"),
        ({"model": [nn.Linear(8, 8)]}, "model must be a torch.nn.Module, not list"),
    ],
)
def test_wrong_types_are_invalid_arguments(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(tide.Error, match=re.escape(problem)) as caught:
        tide.enable(**{"model": nn.Linear(8, 8)} | options)
    assert caught.value.code == "invalid_argument"


@pytest.mark.parametrize("model", [None, "model", nn.Linear(8, 8)])
def test_disabling_what_is_not_enabled_is_an_invalid_argument(model: object) -> None:
    with pytest.raises(tide.Error, match="the model is not enabled"):
        tide.disable(model)


def test_the_cache_moves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(storage, "_checkout", lambda: None)
    monkeypatch.setenv("TIDE_CACHE", str(tmp_path))
    (folder,) = storage._candidates(Path(__file__))
    assert folder.parent == tmp_path


def _misspelt(context: Context) -> None:
    os.environ["TIDE_TIMOUT"] = "3"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tide.enable(fully_shard(nn.Linear(8, 8))).disable()
        found = [
            str(warning.message) for warning in caught if "TIDE_TIMOUT" in str(warning.message)
        ]
        assert len(found) == (context.rank == 0)
    finally:
        del os.environ["TIDE_TIMOUT"]


def test_an_unknown_variable_warns_once(ranks: Callable[[int], RankGroup]) -> None:
    ranks(2).run(_misspelt)


def _one_rank_differs(context: Context) -> None:
    os.environ["TIDE_STAGING_SLOT"] = str(4096 << context.rank)
    try:
        with pytest.raises(
            tide.Error, match="TIDE_STAGING_SLOT.*'4096' on rank 0, '8192' on rank 1"
        ):
            tide.enable(fully_shard(nn.Linear(8, 8)))
    finally:
        del os.environ["TIDE_STAGING_SLOT"]


def test_ranks_must_agree(ranks: Callable[[int], RankGroup]) -> None:
    ranks(2).run(_one_rank_differs)


def _train_in_chunks(context: Context) -> None:
    """A small slot cuts every reduce-scatter into chunks; gradients stay equal to stock's."""
    import torch.distributed as dist

    os.environ["TIDE_STAGING_SLOT"] = "256"
    try:
        group = dist.new_group([0, 1])
        mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
        grads = []
        for through_tide in (False, True):
            torch.manual_seed(0)
            model = fully_shard(nn.Linear(33, 17), mesh=mesh)
            if through_tide:
                tide.enable(model, strict=True)
            torch.manual_seed(context.rank)
            model(torch.randn(4, 33)).square().sum().backward()
            grads.append([p.grad.to_local().clone() for p in model.parameters()])
            if through_tide:
                tide.disable(model)
        for stock, ours in zip(*grads, strict=True):
            assert torch.equal(stock, ours)
    finally:
        del os.environ["TIDE_STAGING_SLOT"]


def test_chunks_do_not_change_gradients(ranks: Callable[[int], RankGroup]) -> None:
    ranks(2).run(_train_in_chunks)


def _enable_after_a_failed_call(context: Context) -> None:
    import torch.distributed as dist

    mesh = dist.device_mesh.DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")
    first = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    for layer in first:
        fully_shard(layer, mesh=mesh)
    tide.enable(first)
    with pytest.raises(tide.Error, match="'0'.*'1'"):
        first[context.rank](torch.randn(2, 8))
    tide.disable(first)
    second = fully_shard(nn.Linear(8, 8), mesh=mesh)
    tide.enable(second, strict=True)
    second(torch.randn(2, 8)).sum().backward()
    tide.disable(second)


def test_enable_makes_a_new_communicator_after_a_failure(ranks: Callable[[int], RankGroup]) -> None:
    ranks(2).run(_enable_after_a_failed_call)
