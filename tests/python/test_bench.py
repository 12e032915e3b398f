"""The benchmarks and the demo: their numbers' definitions, their rows and their files."""

from __future__ import annotations

import json
import os
import runpy

import pytest
from tide import stats
from tide.bench import collectives, demo, demo_report, demo_worker, mlp
from tide.bench import launch as bench_launch
from tide.bench.demo_worker import DemoConfig, Step, Training
from tide.bench.launch import Context, LaunchError, launch
from tide.bench.probe import Call
from tide.bench.text import load_text

ROW_KEYS = {
    "op",
    "ranks",
    "nodes",
    "tensors",
    "elements",
    "tide_ms",
    "stock_ms",
    "floor_ms",
    "speedup",
    "over_floor",
}
RUN_KEYS = {
    "step_ms_median",
    "step_ms_p90",
    "forward_ms",
    "backward_ms",
    "collective_ms",
    "wait_ms",
    "transfer_ms",
    "peak_mib",
}
DEMO_ARGUMENTS = [
    "--device",
    "cpu",
    "--ranks",
    "2",
    "--steps",
    "5",
    "--layers",
    "2",
    "--width",
    "32",
    "--heads",
    "2",
    "--seq-len",
    "16",
]


def _pid(context: Context, config: None) -> int:
    return os.getpid()


def _fail_on_rank_1(context: Context, config: None) -> None:
    import torch.distributed as dist

    if context.rank == 1:
        raise ValueError("rank 1 had enough")
    dist.barrier()


def _die_on_rank_0(context: Context, config: None) -> None:
    if context.rank == 0:
        os._exit(7)


def test_wait_ends_when_the_last_rank_arrives() -> None:
    calls = [[(0.0, 5.0), (6.0, 7.0)], [(3.0, 5.0), (8.0, 9.0)]]
    # Rank 0 waits 3 s in its first call and all of its second; rank 1 is last both times.
    assert stats.wait_seconds(calls) == [4.0, 0.0]


def test_wait_refuses_ranks_with_different_calls() -> None:
    with pytest.raises(ValueError, match="different numbers of calls"):
        stats.wait_seconds([[(0.0, 1.0)], []])


def test_round_is_first_start_to_last_end() -> None:
    assert stats.round_seconds([[(0.0, 2.0)], [(1.0, 4.0)]]) == [4.0]


def test_quantile_and_ratio() -> None:
    assert stats.quantile([5, 1, 3, 2, 4, 6, 7, 8, 9, 10], 0.9) == 9
    assert stats.median_ratio([2.0, 9.0, 8.0], [1.0, 3.0, 2.0]) == 3.0


def test_text_is_deterministic_and_large() -> None:
    text = load_text()
    assert len(text) >= 10**7
    assert text == load_text()


def test_text_says_what_it_found(tmp_path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(RuntimeError, match="found 6 bytes in 1 files"):
        load_text(tmp_path)


def test_launch_returns_in_rank_order_and_leaves_nothing() -> None:
    pids = launch(_pid, 2)
    assert len(set(pids)) == 2
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_launch_shows_the_first_error_of_a_rank() -> None:
    with pytest.raises(LaunchError, match="rank 1 failed: ValueError: rank 1 had enough"):
        launch(_fail_on_rank_1, 2)


def test_launch_notices_ranks_that_never_come_up(monkeypatch) -> None:
    # The children cannot import this interpreter's modules, and the configuration exceeds a pipe.
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    with pytest.raises(LaunchError, match="ended with exit status 1"):
        launch(_pid, 2, bytes(2**20))


def test_launch_notices_a_rank_that_dies() -> None:
    with pytest.raises(LaunchError, match="rank 0 ended with exit status 7"):
        launch(_die_on_rank_0, 2)


def test_missing_memory_is_said_in_a_fitting_unit(monkeypatch) -> None:
    monkeypatch.setattr(bench_launch, "available_bytes", lambda: 3 << 19)
    with pytest.raises(LaunchError, match="about 2 GiB of memory, 1.5 MiB is available"):
        bench_launch.require_memory(2 << 30, "the demo")


@pytest.mark.parametrize("operation", collectives.OPERATIONS)
def test_collective_row(operation: str) -> None:
    row = collectives.run(operation, ranks=2, preset="tiny", rounds=3)
    assert set(row) == ROW_KEYS
    assert (row["op"], row["ranks"], row["tensors"]) == (operation, 2, 3)
    assert all(row[k] > 0 for k in ("tide_ms", "stock_ms", "floor_ms", "speedup", "over_floor"))


def test_collective_presets() -> None:
    elements = {k: sum(r * c for r, c in v) for k, v in collectives.PRESETS.items()}
    assert (len(collectives.PRESETS["small"]), elements["small"]) == (16, 8_388_608)
    assert (len(collectives.PRESETS["llama8b-layer"]), elements["llama8b-layer"]) == (
        9,
        218_112_000,
    )


def test_the_standard_set_calls_every_bench_as_it_is_defined(monkeypatch) -> None:
    asked = []
    row = {"op": "x", "speedup": 1.0}

    def record_collective(operation, ranks, preset, rounds, on_progress=None, nodes=1):
        asked.append((operation, ranks, nodes, preset, rounds))
        return row

    monkeypatch.setattr(collectives, "run", record_collective)
    monkeypatch.setattr(mlp, "run", lambda ranks, *_: asked.append(("mlp", ranks)) or row)
    runpy.run_module("tide.bench", run_name="__main__")
    assert asked[:2] == [(op, 2, 1, "small", 20) for op in collectives.OPERATIONS]
    assert len(asked) == 5 and asked[-1] == ("mlp", 4)


def test_collective_refuses_unknown_names() -> None:
    with pytest.raises(ValueError, match="expected a preset of"):
        collectives.run("all-gather", ranks=2, preset="huge")


@pytest.mark.slow
def test_mlp_row() -> None:
    row = mlp.run(ranks=2, blocks=2, width=32, rounds=1)
    assert row["speedup"] > 0
    assert row["groups"] >= 2


def _tiny_demo(steps: int) -> DemoConfig:
    return DemoConfig(
        steps=steps,
        mode="auto",
        nodes=1,
        layers=2,
        width=32,
        heads=2,
        length=16,
        batch=1,
        seed=0,
        text=bytes(range(256)) * 8,
    )


@pytest.mark.slow
def test_taking_turns_changes_no_loss() -> None:
    config = _tiny_demo(steps=5)
    together = launch(demo_worker.train, 2, config)[0]
    for name, training in together.items():
        memory = demo_worker.MemoryConfig(config, name == "tide")
        alone = launch(demo_worker.measure_memory, 2, memory)[0]
        assert [step.loss for step in training.steps] == alone.losses
        assert len(alone.samples) > 2
    assert {group["all_gather"] for group in together["tide"].groups} == {"tide"}


def _step(start: float, calls: list[tuple[str, float, float]]) -> Step:
    recorded = [Call(name, start + begin, start + end) for name, begin, end in calls]
    return Step(start, start + 4, start + 8, start + 10, recorded, loss=1.0)


def test_parts_of_a_step_are_what_they_are_called() -> None:
    gather, copy_out, reduce = "foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce"
    # Rank 1 comes 1 s later to the gather; its later copy-out keeps nobody waiting.
    calls = [
        [(gather, 0.0, 2.0), (copy_out, 2.0, 3.0), (reduce, 5.0, 7.0)],
        [(gather, 1.0, 2.0), (copy_out, 4.0, 5.0), (reduce, 5.0, 7.0)],
    ]
    trainings = [Training([_step(0.0, own)], parameters=1) for own in calls]
    summary = demo_report.summarise(trainings, [[1 << 20, 3 << 20], [1 << 20, 2 << 20]], 0)
    assert summary == {
        "step_ms_median": 10e3,
        "step_ms_p90": 10e3,
        "forward_ms": 4e3,
        "backward_ms": 4e3,
        "collective_ms": 4.5e3,
        "wait_ms": 0.5e3,
        "transfer_ms": 4e3,
        "peak_mib": 5.0,
    }


@pytest.mark.slow
def test_demo_writes_its_files(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert demo.main([*DEMO_ARGUMENTS, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("runs on the CPU\n")
    assert "of it waiting for ranks" in shown and "stock / TIDE" in shown
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["stock"]) == set(report["tide"]) == RUN_KEYS
    assert set(report) == {
        "device",
        "gpus",
        "ranks",
        "steps",
        "warm_up_steps",
        "model",
        "stock",
        "tide",
        "speedup",
        "loss_first",
        "loss_last",
        "loss_max_rel_diff",
        "groups",
    }
    assert report["warm_up_steps"] == 3
    assert report["loss_last"] < report["loss_first"]
    assert report["loss_max_rel_diff"] < 1e-2
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert len(losses["stock"]) == len(losses["tide"]) == report["steps"] == 5
    tracks = {e["tid"] for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert tracks == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "4", "--nodes", "3"], "must divide the 4 ranks"),
        (["--ranks", "1"], "at least 2"),
        (["--width", "30", "--heads", "4"], "multiple of --heads"),
    ],
)
def test_demo_refuses(arguments: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--device", "cpu", *arguments])
    assert message in capsys.readouterr().err
