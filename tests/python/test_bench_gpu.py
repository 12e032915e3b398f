"""The benches on GPUs, as far as a machine without one goes."""

from __future__ import annotations

import ctypes
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tide import _core, stats
from tide.bench import collectives as cpu_collectives
from tide.bench import plots
from tide.bench.gpu import (
    __main__,
    collectives,
    commands,
    contestants,
    interference,
    machine,
    report,
    sm_time,
)
from tide.bench.gpu.rank import Sample, next_spin
from tide.bench.launch import Context, LaunchError, launch
from tide.cli import app
from tide.fsdp.agreement import exchange_objects
from typer.testing import CliRunner

# Shards of one size, padded ones, and a tensor with fewer rows than ranks.
SHAPES = [(24, 16), (5, 3), (7, 1), (1, 6)]


class HostRank:
    """A rank as the contestants see it, on the host fabric and gloo."""

    def __init__(self, context: Context, stock: bool = True) -> None:
        self.rank, self.world = context.rank, context.world
        self.device = torch.device("cpu")
        exchange = partial(exchange_objects, process_group=dist.group.WORLD)
        self.comm = _core.Communicator(self.rank, self.world, exchange, 60.0)
        self.nccl = dist.group.WORLD if stock else None

    def stream_handle(self) -> None:
        return None

    def synchronize(self) -> None:
        pass

    def view(self, segment: Any) -> torch.Tensor:
        memory = (ctypes.c_char * segment.bytes).from_address(segment.address)
        return torch.frombuffer(memory, dtype=torch.bfloat16)

    def run(self, body: contestants.Body) -> None:
        body()


def _contest(context: Context, config: None) -> dict[tuple[str, bool], list[str]]:
    names = {}
    for operation, make in contestants.MAKERS.items():
        for stock in (True, False):
            rank = HostRank(context, stock)
            made = make(rank, SHAPES, "group")
            made.check()
            for body in made.bodies.values():
                rank.run(body)
            assert any("stock" in found for found in made.check()) == stock
            rank.comm.barrier()
            rank.comm.close()
            names[operation, stock] = list(made.bodies)
    return names


def _contest_with_a_wrong_gradient(context: Context, config: None) -> None:
    right = contestants.random_bf16
    rank = HostRank(context)

    def wrong_once(elems: int, *arguments: Any) -> torch.Tensor:
        contestants.random_bf16 = right
        return right(elems, *arguments) + 1

    if context.rank == 1:
        contestants.random_bf16 = wrong_once
    contestants.reduce_scatter(rank, cpu_collectives.PRESETS["tiny"], "tiny").check()


def test_contestants_agree() -> None:
    names = {
        ("all-gather", True): ["tide", "nccl", "stock", "floor"],
        ("all-gather", False): ["tide", "floor"],
        ("reduce-scatter", True): ["tide", "nccl", "nccl_bf16", "stock", "floor"],
        ("reduce-scatter", False): ["tide", "floor"],
    }
    assert launch(_contest, 3) == [names] * 3


def test_a_wrong_result_is_found() -> None:
    with pytest.raises(LaunchError, match="not close"):
        launch(_contest_with_a_wrong_gradient, 2)


def _sizes(preset: str) -> tuple[int, int]:
    shapes = cpu_collectives.PRESETS[preset]
    return len(shapes), sum(rows * columns for rows, columns in shapes)


def test_presets_are_the_layers_they_are_called() -> None:
    assert _sizes("llama70b-layer") == (9, 855_654_400)
    assert _sizes("qwen3-30b-a3b-layer") == (11, 623_120_640)
    # 4 + 4 projections, 2 of the feed-forward, their biases, 6 vectors of norms, modulation.
    square, wide, dim = 8 * 5120**2, 2 * 5120 * 13824, 5120
    assert _sizes("wan-block") == (27, square + wide + 8 * dim + 13824 + dim + 6 * dim + 6 * dim)


def test_wire_bytes_count_padding() -> None:
    # 3 rows on 2 ranks: shards of 2 rows.
    assert contestants.wire_bytes([(3, 5)], ranks=2) == 2 * 2 * 5
    assert contestants.wire_bytes([(4, 1), (8, 2)], ranks=4) == 2 * 3 * (1 + 4)


def test_split_rows_keeps_every_row() -> None:
    assert (
        contestants.split_rows([(25, 3), (2, 7)], 10) == [(3, 3)] * 5 + [(2, 3)] * 5 + [(1, 7)] * 2
    )
    layer = cpu_collectives.PRESETS["llama70b-layer"]
    assert contestants.split_rows(layer, 1) == layer
    assert len(contestants.split_rows(layer, 10)) == 90


def test_median_interval_is_the_binomial_one() -> None:
    assert stats.median_interval(range(5)) is None
    assert stats.median_interval(range(6)) == (0, 5)  # 1 - 2 / 64 = 0.969
    # Tables: of 20 values the 6th and the 15th (0.959), of 25 the 8th and the 18th (0.957).
    assert stats.median_interval(range(1, 21)) == (6, 15)
    assert stats.median_interval([-v for v in range(1, 26)]) == (-18, -8)


def test_slowest_rank_counts() -> None:
    assert stats.slowest([[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]


def test_contestants_take_every_place_in_turn() -> None:
    orders = [stats.in_turn(["a", "b", "c"], index) for index in range(4)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_a_spin_grows_until_it_hides_the_host() -> None:
    assert next_spin(5.0, 4.0) == (True, 5.0)
    assert next_spin(5.0, 6.0) == (False, 12.0)
    assert next_spin(5.0, 1e6) == (False, 50.0)


def _samples(*gpu_ms: float, hidden: bool = True) -> list[Sample]:
    return [Sample(ms, 0.25, hidden) for ms in gpu_ms]


def test_row_of_a_collective() -> None:
    measured = [
        {
            "tide": _samples(2.0, 2.0, 4.0),
            "stock": _samples(6.0, 6.0, 4.0),
            "floor": _samples(1.0, 1.0, 1.0, hidden=False),
        },
        {
            "tide": _samples(1.0, 3.0, 1.0),
            "stock": _samples(1.0, 1.0, 1.0),
            "floor": _samples(1.0, 2.0, 4.0),
        },
    ]
    row = collectives.compare(measured)
    assert row["rounds_ms"]["tide"] == [2.0, 3.0, 4.0]
    assert (row["tide_ms"], row["stock_ms"], row["floor_ms"]) == (3.0, 6.0, 2.0)
    assert row["stock_over_tide"] == 2.0  # of 3, 2 and 1
    assert row["tide_over_floor"] == 1.5  # of 2, 1.5 and 1
    assert row["stock_over_tide_95"] is None
    assert (row["not_hidden"], row["tide_host_ms"], row["stock_host_ms"]) == (3, 0.25, 0.25)


def test_added_time_is_a_call_s() -> None:
    # Two calls beside a burst; the slowest rank counts on both sides.
    ranks = [[(20.0, 22.0)] * 6, [(19.0, 24.0)] * 6]
    row = interference.added(ranks)
    assert (row["alone_ms"], row["beside_ms"], row["added_ms_a_call"]) == (20.0, 24.0, 2.0)
    assert row["added_ms_a_call_95"] == (2.0, 2.0)
    assert row["added_percent_a_call"] == 10.0


def test_a_burst_lasts_about_as_long_on_every_machine() -> None:
    assert interference.burst_count(interference.BURST_MS / 400) == 400
    assert interference.burst_count(1000.0) == 1


def test_victims_run() -> None:
    victims = interference.make_victims(torch.device("cpu"), scale=64)
    assert len(victims) == 4
    for body in victims.values():
        interference.Burst(body, 2).run()


def _kernel(name: str, dur: float, grid: list[int]) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": 50, "dur": dur, "tid": 7, "args": {"grid": grid}}


def _api(name: str, ts: float, tid: int = 1) -> dict[str, Any]:
    return {"cat": "cuda_runtime", "name": name, "ts": ts, "dur": 1, "tid": tid}


def _mark(ts: float) -> dict[str, Any]:
    return {"cat": "user_annotation", "name": "one call", "ts": ts, "dur": 10, "tid": 1}


def test_trace_of_two_calls() -> None:
    events = [
        {"name": "process_name", "ph": "M"},
        _mark(100),
        _mark(200),
        _api("cudaMemcpyBatchAsync", 101),
        _api("cudaMemcpyBatchAsync", 205),
        _api("cudaStreamSynchronize", 209),
        _api("cudaEventQuery", 105, tid=2),  # of a watchdog
        _api("cudaDeviceSynchronize", 300),  # after the calls
        _kernel("at::cuda::(anonymous namespace)::spin_kernel(long)", 9e6, [1, 1, 1]),
        _kernel("void tide::(anonymous namespace)::tide_sum_bulk<true, 8>(P)", 1000, [66, 1, 1]),
        _kernel("void copy<4>(float*)", 500, [10, 20, 1]),
        {"cat": "gpu_memcpy", "name": "Memcpy PtoP (Device -> Device)", "ts": 1, "dur": 1},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "ts": 1, "dur": 1},
    ]
    row = sm_time.summarise(events, calls=2, multiprocessors=132)
    assert row["sm_ms"] == (1000 * 66 + 500 * 132) / 1e3 / 2
    assert (row["kernels"], row["other_kernels"]) == (1.0, 0.5)
    assert (row["copies"], row["copies_from_host"], row["synchronisations"]) == (1.0, 0.5, 0.5)
    assert row["api_calls_by_name"] == {"cudaMemcpyBatchAsync": 1.0, "cudaStreamSynchronize": 0.5}
    assert row["kernels_by_name"] == {"copy": 0.5, "tide::{anonymous}::tide_sum_bulk": 0.5}


def test_trace_whose_threads_are_numbered_apart() -> None:
    events = [_mark(100), _api("cudaLaunchKernel", 101, tid=99)]
    row = sm_time.summarise(events, calls=1, multiprocessors=132)
    assert row["api_calls_by_name"] == {"cudaLaunchKernel": 1.0}


def test_trace_without_the_gpu_is_refused() -> None:
    with pytest.raises(RuntimeError, match="expected a torch with CUPTI"):
        sm_time.summarise([_mark(100)], calls=1, multiprocessors=132)


def test_query_of_nvidia_smi() -> None:
    (gpu,) = machine.parse_query(
        "NVIDIA H200, 580.159.03, 1980 MHz, 1980 MHz, 3201 MHz, 120.00 W, 700.00 W, 31\n"
    )
    assert (gpu["name"], gpu["clocks.max.sm"]) == ("NVIDIA H200", "1980 MHz")
    assert machine.parse_query("") == []


def test_ranks_that_share_a_gpu_tell_nccl() -> None:
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in machine.variables(2, 2)
    assert machine.variables(3, 2)["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert machine.variables(2, 2)["NCCL_NVLS_ENABLE"] == "0"
    assert (machine.default_ranks(1), machine.default_ranks(8)) == (2, 8)


def test_environment_goes_into_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_STAGING_SLOT", "4096")
    monkeypatch.setenv("SECRET", "word")
    environment = machine.describe({"NCCL_NVLS_ENABLE": "0"})
    rows = [{"op": "x", "tide_ms": 1.5, "tide_95": (1.0, 2.0), "rounds_ms": {"tide": [1.5]}}]
    report.write(tmp_path / "x.json", environment, rows)
    written = json.loads((tmp_path / "x.json").read_text())
    assert written["rows"] == [{**rows[0], "tide_95": [1.0, 2.0]}]
    assert set(written["environment"]) == {
        "command",
        "gpus",
        "cpus",
        "python",
        "tide",
        "torch",
        "cuda",
        "torch_nccl",
        "tide_nccl",
        "variables",
    }
    variables = written["environment"]["variables"]
    assert (variables["TIDE_STAGING_SLOT"], variables["NCCL_NVLS_ENABLE"]) == ("4096", "0")
    assert "SECRET" not in variables


def test_text_has_every_number_but_no_series() -> None:
    row = {"op": "x", "tide_ms": 1.5, "tide_95": (1.0, 2.0), "none": None, "rounds_ms": {"a": [7]}}
    shown = ["op", "x", "tide_ms", "1.5", "tide_95", "1..2", "none", "-"]
    assert report.as_text([row]).split() == shown
    assert report.as_text([{"a": 1}, {"b": 123.4}]).split() == ["a", "b", "1", "-", "-", "123"]


@pytest.mark.parametrize("bench", sorted(commands.COMMANDS))
def test_without_a_gpu_it_says_so(bench: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert __main__.main([bench]) == 1
    assert "no GPU: expected at least one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all-gather", "--preset", "huge"], "expected a preset of"),
        (["sm-time", "--preset", "huge"], "expected a preset of"),
        (["interference", "--ranks", "1"], "expected ranks >= 2"),
        (["reduce-scatter", "--ranks", "4", "--nodes", "3"], "expected nodes to divide 4 ranks"),
        (["reduce-scatter", "--rounds", "-1"], "rounds >= 1"),
        (["sm-time", "--json", "/nowhere/x.json"], "expected an existing folder, got /nowhere"),
    ],
)
def test_arguments_that_do_not_fit(arguments: list[str], message: str, capsys) -> None:
    assert __main__.main(arguments) == 1
    assert message in capsys.readouterr().err


def _interference_row(path: str, interval: tuple[float, float] | None) -> dict[str, Any]:
    row = {"op": "interference", "victim": "gemm", "collective": "all-gather", "path": path}
    return {**row, "added_ms_a_call": 1.0, "added_ms_a_call_95": interval}


def test_bars_of_each_bench() -> None:
    added = [_interference_row("tide", (0.5, 1.25)), _interference_row("stock", None)]
    assert plots.bars(added) == {
        "gemm\nall-gather": {"tide": (1.0, 0.5, 1.25), "stock": (1.0, 1.0, 1.0)}
    }
    held = {"op": "sm-time", "collective": "all-gather", "tensors": 9, "path": "nccl", "sm_ms": 3.0}
    assert plots.bars([held]) == {"all-gather\n9 tensors": {"nccl": (3.0, 3.0, 3.0)}}
    timed = {"op": "all-gather", "preset": "tiny", "tide_ms": 2.0, "rounds_ms": {}}
    assert plots.bars([timed]) == {"all-gather\ntiny": {"tide": (2.0, 2.0, 2.0)}}
    with pytest.raises(ValueError, match="found none"):
        plots.bars([{"op": "mlp"}])


def test_plot_is_written_beside_the_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "x.json"
    rows = [_interference_row("tide", (0.5, 1.25)), _interference_row("stock", None)]
    report.write(file, {}, rows)
    result = CliRunner().invoke(app, ["bench", "plot", str(file)])
    assert result.exit_code == 0, result.output
    assert "<svg" in (tmp_path / "x.svg").read_text()
    file.write_text("[]")
    assert (
        "expected an object with rows"
        in CliRunner().invoke(app, ["bench", "plot", str(file)]).output
    )


def test_command_line_reaches_the_benches_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(commands, "run", lambda name, request: asked.append((name, request)))
    for command in (
        ["all-gather", "--fabric", "nccl", "--ranks", "3", "--rounds", "5"],
        ["interference", "--preset", "wan-block"],
        ["sm-time"],
    ):
        assert CliRunner().invoke(app, ["bench", *command]).exit_code == 0
    assert asked == [
        ("all-gather", commands.Request(ranks=3, nodes=1, rounds=5)),
        ("interference", commands.Request(preset="wan-block", rounds=15)),
        ("sm-time", commands.Request()),
    ]


def test_command_line_says_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = CliRunner().invoke(app, ["bench", "reduce-scatter", "--fabric", "nccl"])
    assert result.exit_code == 1
    assert "no GPU: expected at least one" in result.output
