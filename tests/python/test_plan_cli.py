"""`tide plan` and `tide verify`: the numbers of the paper, and what they say to bad input."""

from __future__ import annotations

import json

import pytest
from tide.bench.collectives import PRESETS
from tide.cli import app
from typer.testing import CliRunner

runner = CliRunner(env={"COLUMNS": "80"})

GROUPS = {
    "groups": [
        {
            "name": "layer",
            "params": [
                {"name": "weight", "rows": 4096, "row_elems": 1024, "dtype": "bf16"},
                {"name": "bias", "rows": 4096, "row_elems": 1, "dtype": "bf16"},
            ],
        }
    ]
}


def plan(*arguments: str) -> dict:
    result = runner.invoke(app, ["plan", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def region(report: dict, name: str) -> dict:
    (row,) = (row for row in report["regions"] if row["name"] == name)
    return row


def refusal(*arguments: str) -> str:
    result = runner.invoke(app, ["plan", *arguments])
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    return result.stderr


@pytest.mark.parametrize(
    ("mode", "staging", "live"), [("in_place", 0.594, 3.72), ("slot_reuse", 0.164, 2.29)]
)
def test_memory_of_64_nodes_is_what_the_paper_prints(mode, staging, live) -> None:
    report = plan("--preset", "llama70b-layer", "--nodes", "64", "--local", "8", "--mode", mode)
    assert (report["options"]["round_width"], report["options"]["generations"]) == (4, 2)
    assert round(region(report, "reduce-scatter")["formula_ns"], 3) == staging
    assert round(region(report, "live")["formula_ns"], 2) == live
    for name in ("staging", "reduce-scatter", "live"):
        assert region(report, name)["bytes"] < region(report, name)["formula_bytes"]


@pytest.mark.parametrize("fp32_mib", [32, 128])
def test_eight_nodes_of_the_paper(tmp_path, fp32_mib) -> None:
    params = [{"name": "w", "rows": 64, "row_elems": fp32_mib << 18, "dtype": "bf16"}]
    file = tmp_path / "groups.json"
    file.write_text(json.dumps({"groups": [{"name": "g", "params": params}]}))
    report = plan(str(file), "--nodes", "8", "--local", "8", "--machine", "paper-8-nodes")
    options = report["options"]
    assert report["groups"][0]["fp32_bytes"] == fp32_mib << 20
    assert (options["round_width"], options["sum_ctas"], options["landing_ctas"]) == (4, 4, 4)


def test_counts_of_1024_nodes() -> None:
    report = plan("--preset", "llama70b-layer", "--nodes", "1024", "--local", "8")
    (group,) = report["groups"]
    assert group["reduce_scatter"]["transfers"] == 1023
    assert group["all_gather_rounds"] == 10
    assert report["connections"]["queue_pairs"] == 2 * 4 * 1023
    assert report["connections"]["queue_pairs_one_communicator"] == 2 * 4 * 8191


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("topology", [(1, 4), (3, 2), (8, 1), (9, 8)])
def test_every_preset_plans(preset, topology) -> None:
    report = plan("--preset", preset, "--nodes", str(topology[0]), "--local", str(topology[1]))
    assert report["groups"][0]["params"] == len(PRESETS[preset])
    assert all(choice["why"] for choice in report["choices"])


def test_tables_are_not_cut_without_a_terminal() -> None:
    command = ["plan", "--preset", "small", "--nodes", "9", "--local", "8"]
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "…" not in result.output
    report = plan(*command[1:])
    for choice in report["choices"]:
        assert choice["what"] in result.output
        assert choice["why"].split()[-1] in result.output
    assert f"{region(report, 'live')['bytes']:,}" in result.output


def _shown(columns: int, *arguments: str) -> str:
    result = runner.invoke(app, ["plan", *arguments], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= columns
    return result.output


def _reasons(text: str) -> str:
    """The words of the last column of the last table, in their order."""
    cells = [line.split("│")[3] for line in text.splitlines() if line.count("│") == 4]
    return " ".join(" ".join(cells).split())


@pytest.mark.parametrize("columns", [80, 120])
def test_reasons_wrap_at_the_width_of_the_terminal(columns: int) -> None:
    command = ("--preset", "llama70b-layer", "--nodes", "64", "--local", "8")
    shown = _reasons(_shown(columns, *command))
    assert all(" ".join(c["why"].split()) in shown for c in plan(*command)["choices"])


def test_sums_are_explained_and_compared_with_stock() -> None:
    preset = ("--preset", "llama70b-layer", "--local", "8", "--mode", "in_place")
    for nodes, more in (("8", True), ("64", False)):
        report = plan(*preset, "--nodes", nodes)
        bytes_of = {row["name"]: row["bytes"] for row in report["regions"]}
        parts = ("staging", "outbox", "spares", "inbox", "accumulator")
        assert bytes_of["reduce-scatter"] == sum(bytes_of[part] for part in parts)
        parts = ("landings", "all-gather stage", "reduce-scatter", "gradients")
        assert bytes_of["live"] == sum(bytes_of[part] for part in parts)
        text = " ".join(_shown(100, *preset, "--nodes", nodes).split())
        assert "reduce-scatter: staging + outbox + spares + inbox + accumulator" in text
        assert "landings + all-gather stage + reduce-scatter + gradients" in text
        stock = bytes_of["live in FSDP2"]
        warned = "more than stock: live is 127.5 MiB (2.0 %) above" in text
        assert warned is more is (bytes_of["live"] > stock)
        assert (f"--mode auto --memory-limit {stock} looks" in text) is more
    options = ("--mode", "auto", "--memory-limit", str(stock), "--nodes", "8")
    report = plan(*preset[:4], *options)
    assert region(report, "live")["bytes"] <= stock


def test_the_file_may_hold_everything_and_options_override_it(tmp_path) -> None:
    file = tmp_path / "groups.json"
    whole = GROUPS | {"nodes": 9, "local_ranks": 8, "options": {"mode": "slot_reuse", "passes": 2}}
    file.write_text(json.dumps(whole))
    report = plan(str(file))
    assert (report["options"]["mode"], report["options"]["passes"]) == ("slot_reuse", 2)
    report = plan(str(file), "--mode", "in_place", "--nodes", "4")
    assert (report["options"]["mode"], report["options"]["passes"]) == ("in_place", 2)
    assert report["nodes"] == 4


def test_a_machine_file(tmp_path) -> None:
    command = ["--preset", "small", "--nodes", "4", "--local", "4"]
    machine = plan(*command)["machine"] | {"name": "unicast", "multicast_reduction": False}
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(machine))
    report = plan(*command, "--machine", str(file))
    assert report["options"]["placement"] == "direct"
    assert report["machine"] == machine


def test_impossible_plans_name_the_rule() -> None:
    command = ["--preset", "small", "--nodes", "9", "--local", "8"]
    assert "allowed: 1, 2, 4, 8" in refusal(*command, "--wave-width", "3")
    assert "round width k: expected at least 1, got 0" in refusal(*command, "-k", "0")
    assert "round width k: expected at most max(1, M-1) = 8, got 9" in refusal(*command, "-k", "9")
    one = ["--preset", "small", "--nodes", "1", "--local", "8"]
    assert "max(1, M-1) = 1, got 2; allowed: 1 to 1" in refusal(*one, "-k", "2")
    assert "memory limit 1 MiB" in refusal(*command, "--memory-limit", "1MiB")
    assert "nodes * local_ranks = 9 * 8 = 72" in refusal(*command, "--ranks", "64")
    assert "rank: expected an integer in [0, 71]" in refusal(*command, "--rank", "72")
    assert "in_place, slot_reuse or auto" in refusal(*command, "--mode", "fast")
    assert "paper-8-nodes" in refusal(*command, "--machine", "laptop")
    assert "llama8b-layer" in refusal("--preset", "huge", "--nodes", "2", "--local", "2")
    assert "--memory-limit: expected bytes" in refusal(*command, "--memory-limit", "lots")
    assert "give --nodes" in refusal("--preset", "small", "--local", "2")
    assert "either a file of groups or --preset" in refusal("--nodes", "2", "--local", "2")


def test_malformed_files_name_the_field(tmp_path) -> None:
    file = tmp_path / "groups.json"
    command = [str(file), "--nodes", "2", "--local", "2"]
    assert "No such file" in refusal(*command)
    file.write_text('{"groups": [}')
    assert "line 1 column 13" in refusal(*command)
    file.write_bytes(b"\xff\xfe")
    assert "UTF-8" in refusal(*command)
    file.write_text("[" * 100_000 + "]" * 100_000)
    assert "levels of brackets" in refusal(*command)
    file.write_text("[]")
    assert "expected an object" in refusal(*command)
    file.write_text(json.dumps(GROUPS | {"options": 3}))
    assert "options: expected an object, got 3" in refusal(*command)
    broken = json.loads(json.dumps(GROUPS))
    broken["groups"][0]["params"][1]["rows"] = "4096"
    file.write_text(json.dumps(broken))
    assert "groups[0].params[1].rows: expected an integer" in refusal(*command)


def test_verify_exhaustive_prints_both_counts() -> None:
    result = runner.invoke(app, ["verify", "--exhaustive"])
    assert result.exit_code == 0, result.output
    for number in ("8,184", "1,023", "42,966", "6,138", "458,304", "65,472"):
        assert number in result.output
    assert "width 3: 127" in result.output


def test_refuses_files_that_are_none_of_groups(tmp_path) -> None:
    file = tmp_path / "report.json"
    wanted = f"tide plan: {file}: expected an object with the field 'groups', see docs/memory.md\n"
    for content in ('{"rows": []}', "[]", "3"):
        file.write_text(content)
        assert refusal(str(file)) == wanted
    file.write_text('{"groups": [], "nods": 2}')
    assert refusal(str(file)).startswith(f"tide plan: {file}: nods: unknown field; expected one of")
