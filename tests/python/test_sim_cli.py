"""`tide sim`: what it prints, writes and refuses, and how far it is from what was measured."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tide import _core
from tide.bench import predict
from tide.bench.collectives import PRESETS
from tide.cli import app
from typer.testing import CliRunner

runner = CliRunner(env={"COLUMNS": "160"})
RESULTS = Path(__file__).parents[2] / "bench" / "results"
PAIR = ("--preset", "llama70b-layer", "--nodes", "1", "--local", "2")


def sim(*arguments: str) -> dict:
    result = runner.invoke(app, ["sim", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(*arguments: str) -> str:
    result = runner.invoke(app, ["sim", *arguments])
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    return result.stderr


def compared(file: Path) -> list[dict]:
    return predict.compare(json.loads(file.read_text()))


def write(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize("name", ["all-gather", "reduce-scatter"])
def test_simulated_is_within_3_percent_of_two_h200s(name: str) -> None:
    (row,) = compared(RESULTS / f"h200x2-{name}.json")
    assert (row["ranks"], row["nodes"], row["limited_by"]) == (2, 1, "NVLink out")
    assert row["over_measured"] == pytest.approx(1, abs=0.03)


def test_floor_is_the_wire() -> None:
    (row,) = sim("all-gather", *PAIR)["rows"]
    # Half of 855.7 M parameters in bf16 at 391 GB/s.
    assert row["floor_ms"] == pytest.approx(855.7e6 / 391e9 * 1e3, rel=1e-3)
    assert row["floor_of"] == "NVLink out"
    assert row["over_floor"] == pytest.approx(row["ms"] / row["floor_ms"])
    assert sum(limit["ms"] for limit in row["limits"]) == pytest.approx(row["ms"])


def test_options_reach_the_plan() -> None:
    nodes = ("--preset", "wan-block", "--nodes", "4", "--local", "2", "--machine", "h200-400g")
    reduction = (*nodes, "-k", "1")
    default = sim("reduce-scatter", *reduction)["rows"]
    for option in (
        ("-k", "3"),
        ("--chunk", "1MiB"),
        ("--placement", "latin_square"),
        ("--mode", "slot_reuse"),
        ("--passes", "2"),
        ("--sum-ctas", "2"),
    ):
        assert sim("reduce-scatter", *reduction, *option)["rows"] != default, option
    paced, free = (
        sim("all-gather", *nodes, option)["rows"][0]["ms"] for option in ("--pacing", "--no-pacing")
    )
    assert free < paced


def test_defaults_are_those_of_the_fabric(monkeypatch) -> None:
    one_chunk = sim("reduce-scatter", *PAIR, "--chunk", "4GiB")["rows"][0]["ms"]
    assert sim("reduce-scatter", *PAIR)["rows"][0]["ms"] < one_chunk
    monkeypatch.setenv("TIDE_STAGING_SLOT", str(4 << 30))
    assert sim("reduce-scatter", *PAIR)["rows"][0]["ms"] == one_chunk


def test_machine_in_a_file(tmp_path) -> None:
    half = write(tmp_path / "half.json", {"base": "h200", "nvlink_gb_per_s": 391 / 2})
    whole = sim("all-gather", *PAIR)["rows"][0]["floor_ms"]
    assert sim("all-gather", *PAIR, "--machine", half)["rows"][0]["floor_ms"] == 2 * whole
    printed = runner.invoke(app, ["sim", "machine", "h200", "--json"]).stdout
    (tmp_path / "same.json").write_text(printed)
    same = sim("all-gather", *PAIR, "--machine", str(tmp_path / "same.json"))
    assert same["rows"][0]["floor_ms"] == whole


def test_every_number_has_its_source() -> None:
    shown = runner.invoke(app, ["sim", "machine", "paper-8-nodes"]).stdout
    assert "assumed: 900 nominal" in shown and "paper, appendix G" in shown


def test_tables_say_what_limits() -> None:
    shown = runner.invoke(app, ["sim", "all-gather", *PAIR]).stdout
    for part in ("2.188", "NVLink out", "memory operations", "all_gather: main, own copies"):
        assert part in shown


def test_trace_has_a_process_a_rank_and_a_track_a_stream(tmp_path) -> None:
    file = tmp_path / "trace.json"
    report = sim(
        "all-gather", "--preset", "tiny", "--nodes", "2", "--local", "2", "--trace", str(file)
    )
    assert "timeline" not in report["rows"][0]
    events = json.loads(file.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {pid for pid, _ in names} == {0, 1, 2, 3}
    assert {(span["pid"], span["tid"]) for span in spans} == set(names)
    assert "all_gather: rounds" in names.values()
    last = max(span["ts"] + span["dur"] for span in spans)
    assert last == pytest.approx(1e3 * report["rows"][0]["ms"])
    for track in names:  # a stream is in order
        own = [span for span in spans if (span["pid"], span["tid"]) == track]
        assert [span["ts"] for span in own] == sorted(span["ts"] for span in own)


def row(**fields: object) -> dict:
    known = {
        "op": "all-gather",
        "preset": "tiny",
        "ranks": 4,
        "gpus": 4,
        "nodes": 1,
        "tide_ms": 1.0,
    }
    return known | fields


def environment(gpu: str = "NVIDIA H200", **variables: str) -> dict:
    return {"gpus": [{"name": gpu}], "variables": variables}


def test_compare_takes_any_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TIDE_SUM_CTAS", "1")
    rows = [row(), row(op="interference"), row(nodes=2), row(gpus=2), row(op="reduce-scatter")]
    content = {"environment": environment(), "rows": rows}
    found = compared(Path(write(tmp_path / "four.json", content)))
    assert [made["nodes"] for made in found] == [1, 2, 1, 1]
    assert [made["predicted_ms"] is None for made in found] == [False, False, True, False]
    assert found[2]["limited_by"] == "not simulated: 4 ranks share 2 GPUs"
    assert os.environ["TIDE_SUM_CTAS"] == "1"
    content["environment"] = environment(TIDE_SUM_CTAS="1")
    slower = compared(Path(write(tmp_path / "one.json", content)))
    assert slower[3]["predicted_ms"] > found[3]["predicted_ms"]
    assert slower[0]["predicted_ms"] == found[0]["predicted_ms"]


def test_refuses(tmp_path) -> None:
    assert "expected one of tiny" in refusal("all-gather", "--preset", "x")
    assert "nodes: missing" in refusal("all-gather", "--preset", "tiny")
    assert "direct, latin_square" in refusal("reduce-scatter", *PAIR, "--placement", "x")
    assert "expected a JSON file or one of h200" in refusal("machine", "nope")
    slow = write(tmp_path / "m.json", {"base": "h200", "hbm_gb_per_s": 0})
    assert "expected rates of NVLink" in refusal("all-gather", *PAIR, "--machine", slow)
    other = write(tmp_path / "x.json", {"environment": environment("NVIDIA B200"), "rows": [row()]})
    assert "no model of NVIDIA B200; give --machine" in refusal("compare", other)
    nothing = write(tmp_path / "y.json", [])
    assert f"training step on GPUs, found none in {nothing}" in refusal("compare", nothing)


def test_a_step_beside_what_was_measured() -> None:
    files = RESULTS.glob("h200x2-train-*.json")
    rows = [made for file in files for made in compared(file)]
    assert len(rows) == 2 * 74
    for made in rows:
        # Nothing slows compute down, or it is all memory traffic: the truth lies between, but where
        # it was measured before casts ran beside the all-gather before. Experts wait for the host
        # without collectives, which is taken for compute.
        most = 1.16 if made["preset"].startswith("moe") else 1.05
        low, high = (0.78, 1) if made["compute_gb_per_s"] == 0 else (0.94, most)
        assert low < made["over_measured"] < high, made


def test_step_models_are_those_of_the_bench() -> None:
    torch = pytest.importorskip("torch")
    from tide.bench.gpu import models

    with torch.device("meta"):
        made = {"moe": models.ExpertLayer(2048, 768, 128), "dense": models.DenseBlock(8192, 28672)}
    for name, module in made.items():
        shapes = sorted((p.shape[0], p[0].numel()) for p in module.parameters())
        assert shapes == sorted(predict.STEP_MODELS[name][1]), name


def test_step_shows_compute_and_collectives(tmp_path) -> None:
    file = tmp_path / "step.json"
    compute = ("--layers", "3", "--forward-ms", "5", "--backward-ms", "10", "--optimizer-ms", "1")
    report = sim("step", *PAIR, *compute, "--no-kept", "--trace", str(file))
    assert report["compute_ms"] == pytest.approx(46)
    # Compute hides all but the first all-gather and the last reduce-scatter.
    ends = sum(sim(name, *PAIR)["rows"][0]["ms"] for name in ("all-gather", "reduce-scatter"))
    assert report["rows"][0]["ms"] == pytest.approx(46 + ends, abs=0.05)
    spans = [e["name"] for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
    assert spans.count("backward 2") == 2  # ranks
    shown = runner.invoke(app, ["sim", "step", *PAIR, *compute, "--mode", "slot_reuse"]).stdout
    assert "slot_reuse: compute alone takes 46.000 ms" in shown


def test_more_slots_keep_more_layers() -> None:
    step = ("step", *PAIR, "--layers", "6", "--forward-ms", "0", "--backward-ms", "0")
    gathered = sim(*step, "--no-kept")["rows"][0]["ms"]
    two, four = (sim(*step, "--slots", n)["rows"][0]["ms"] for n in ("2", "4"))
    assert sim(*step)["rows"][0]["ms"] == four
    assert sim(*step)["refreshed"] == 4 and sim(*step, "--no-kept")["refreshed"] == 0
    reuse = (*step, "--mode", "slot_reuse")
    assert sim(*reuse)["rows"] == sim(*reuse, "--slots", "2")["rows"]
    assert four < two < gathered
    nodes = ("step", "--preset", "tiny", "--nodes", "2", "--local", "2")
    assert sim(*nodes)["rows"] == sim(*nodes, "--no-kept")["rows"]  # landings of one node only


def test_rows_say_how_many_landings_were_kept() -> None:
    def kept(*refreshed: int) -> int:
        report = {"groups": [{"refreshed": calls} for calls in refreshed]}
        return predict._kept_landings({"reports": {"in_place": report}}, "in_place")

    assert kept(0, 0, 7, 7, 7) == 3
    assert kept(0, 0) == 0
    assert predict._kept_landings({"reports": {"in_place": {"groups": [{}]}}}, "in_place") == 0
    assert predict._kept_landings({}, "in_place") == 0


def test_sizes_and_times_have_bounds() -> None:
    assert "expected 0 to 1e+06 ms, got inf" in refusal("step", *PAIR, "--forward-ms", "inf")
    assert "got 1e+300" in refusal("step", *PAIR, "--backward-ms", "1e300")
    assert "optimizer: expected" in refusal("step", *PAIR, "--optimizer-ms", "nan")
    assert "GB/s, got -1" in refusal("step", *PAIR, "--compute-gb-per-s", "-1")
    assert "10000" in refusal("step", *PAIR, "--layers", "10001")
    assert "'--slots'" in refusal("step", *PAIR, "--slots", "1")
    few = ("--preset", "tiny", "--nodes", "2", "--local", "2")
    assert "chunk: expected at least 64 bytes" in refusal("reduce-scatter", *few, "--chunk", "1")
    many = ("--preset", "tiny", "--nodes", "8192", "--local", "8")
    assert "at most 1024 ranks to simulate" in refusal("all-gather", *many)


def test_errors_name_the_command() -> None:
    for name in ("all-gather", "reduce-scatter", "step"):
        assert refusal(name).startswith(f"tide sim {name}: expected either a file")
    assert "got neither" in refusal("step")
    both = refusal("step", "groups.json", *PAIR)
    assert "got both groups.json and --preset llama70b-layer" in both
    assert refusal("machine", "nope").startswith("tide sim machine: ")
    chunk = refusal("reduce-scatter", *PAIR, "--chunk", "x")
    assert chunk.startswith("tide sim reduce-scatter: --chunk: expected bytes")


def test_compare_names_the_file(tmp_path) -> None:
    good = str(RESULTS / "h200x2-all-gather.json")
    file = tmp_path / "odd.json"
    for content, problem in (
        (b"{", "line 1 column 2"),
        (b"# TIDE", "expected a JSON file that a bench on GPUs has written with --json"),
        (b"\xff\xfe", "UTF-8"),
        (b'{"rows": [NaN]}', "finite numbers, got NaN"),
        (b'{"rows": 3, "environment": {}}', "a list 'rows'"),
    ):
        file.write_bytes(content)
        shown = refusal("compare", good, str(file))
        assert shown.startswith(f"tide sim compare: {file}: ") and problem in shown, content


def test_compare_names_the_damaged_field(tmp_path) -> None:
    path = tmp_path / "odd.json"
    without = row()
    del without["preset"]
    step = {"op": "train", "model": "moe", "tokens": 1, "ranks": 2, "nothing_ms": 1.0}
    for damaged, problem in (
        (without, "rows[1].preset: expected a string, got null"),
        (row(preset="huge"), "rows[1].preset: expected one of tiny"),
        (row(ranks="two"), 'rows[1].ranks: expected a positive integer, got "two"'),
        (row(nodes=3), "rows[1].nodes: expected a divisor of 4 ranks, got 3"),
        (row(tide_ms=0), "rows[1].tide_ms: expected positive milliseconds, got 0"),
        (3, "rows[1]: expected an object with the field 'op'"),
        (step, "rows[1].profiles: expected the kernels"),
    ):
        write(path, {"environment": environment(), "rows": [row(), damaged]})
        assert f"tide sim compare: {path}: {problem}" in refusal("compare", str(path))
    write(path, {"environment": {}, "rows": [row()]})
    assert f"{path}: environment.gpus: expected a list" in refusal("compare", str(path))


def test_compare_says_what_held_nothing(tmp_path) -> None:
    empty = write(tmp_path / "empty.json", {"rows": []})
    result = runner.invoke(app, ["sim", "compare", str(RESULTS / "h200x2-all-gather.json"), empty])
    assert result.exit_code == 0, result.output
    assert result.stderr == f"tide sim compare: nothing to compare in {empty}\n"


def test_numbers_of_a_machine_file_are_finite(tmp_path) -> None:
    file = tmp_path / "machine.json"
    for number in ("NaN", "-Infinity", "1e999"):
        file.write_text(f'{{"base": "h200", "hbm_gb_per_s": {number}}}')
        problem = f"tide sim all-gather: {file}: expected finite numbers, got {number}"
        assert problem in refusal("all-gather", *PAIR, "--machine", str(file))


def test_refuses_what_plan_refuses(tmp_path) -> None:
    nodes = ("--preset", "tiny", "--nodes", "9", "--local", "8")
    for odd in (
        ("--wave-width", "0"),
        ("--wave-width", "10"),
        ("--wave-width", "3", "--placement", "latin_square"),
        ("-k", "0"),
        ("-k", "9"),
        ("-k", "100000"),
        ("--passes", "65"),
        ("--passes", "100000"),
        ("--chunk", "1"),
    ):
        # On a machine that reduces through the switch both have the placement to themselves.
        machine = ("--machine", "paper-8-nodes")
        placed = odd if "--placement" in odd else (*odd, "--placement", "direct")
        refused = refusal("reduce-scatter", *nodes, *machine, *placed)
        planned = runner.invoke(app, ["plan", *nodes, *machine, *placed]).stderr
        assert refused.removeprefix("tide sim reduce-scatter") == planned.removeprefix("tide plan")
    assert "at most 64, got 100000" in refusal("reduce-scatter", *nodes, "--passes", "100000")
    param = {"name": "w", "rows": 64, "row_elems": 8, "dtype": "bf16", "grad_dtype": "fp32"}
    wide = write(tmp_path / "wide.json", {"groups": [{"name": "g", "params": [param]}]})
    reuse = ("--nodes", "2", "--local", "2", "--mode", "slot_reuse")
    assert "mode slot_reuse: needs gradients" in refusal("reduce-scatter", wide, *reuse)


def test_refuses_what_it_would_ignore() -> None:
    for option in ("--mode", "--placement"):
        refused = refusal("reduce-scatter", *PAIR, option, "auto")
        assert "got auto; `tide plan` chooses" in refused
    early = refusal("step", *PAIR, "--mode", "slot_reuse", "--early")
    assert "--early, --no-early: expected mode in_place, got slot_reuse" in early
    for ctas in ("133", "99999999999"):
        refused = refusal("reduce-scatter", *PAIR, "--sum-ctas", ctas)
        assert "sum CTAs: expected 0 to 132, the multiprocessors of machine 'h200'" in refused


@pytest.mark.parametrize(
    ("command", "default"),
    [
        ("sim compare", "that of the GPUs"),
        ("sim all-gather", "h200"),
        ("sim machine", "h200"),
        ("plan", "paper-8-nodes"),
    ],
)
def test_help_lists_machines(command: str, default: str) -> None:
    shown = runner.invoke(app, [*command.split(), "--help"]).stdout
    text = " ".join(shown.replace("│", " ").split())
    assert f"one of {', '.join(_core.machine_presets())}; default: {default} " in text


@pytest.mark.parametrize("command", ["sim step", "plan", "verify"])
def test_help_lists_presets(command: str) -> None:
    shown = runner.invoke(app, [*command.split(), "--help"]).stdout
    assert all(name in shown for name in PRESETS)


def test_tables_explain_their_columns() -> None:
    shown = runner.invoke(app, ["sim", "all-gather", *PAIR]).stdout
    assert "all-gather, 1 node x 2 ranks, machine h200" in shown
    for part in ("first rank: when", "ms / floor: how many", "busy: while", "used: of what"):
        assert part in shown
    planned = runner.invoke(app, ["plan", *PAIR]).stdout
    assert planned.startswith("1 node x 2 ranks = 2 ranks, machine paper-8-nodes")


def test_compute_without_traffic_is_a_dash() -> None:
    file = str(next(RESULTS.glob("h200x2-train-*.json")))
    shown = runner.invoke(app, ["sim", "compare", file]).stdout
    column = [line.split("│")[5].strip() for line in shown.splitlines() if "step, " in line]
    assert set(column) == {"-", "4100"}
