"""`tide verify`: proofs and mutants from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tide.cli import app
from typer.testing import CliRunner


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and everything printed."""
    result = CliRunner().invoke(app, ["verify", *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize(("nodes", "local"), [(1, 4), (3, 2), (5, 1)])
def test_plans_are_safe(nodes: int, local: int) -> None:
    code, text = run("--nodes", str(nodes), "--local", str(local))
    assert code == 0, text
    for landing in ("rank", "node"):
        assert f"{nodes} x {local}, all-gathers, a landing a {landing}: safe" in text
    for mode in ("in_place", "slot_reuse"):
        assert f"{nodes} x {local}, {mode}, reduce-scatters: safe" in text
        assert f"{nodes} x {local}, {mode}, both lanes, a landing a rank: safe" in text


def test_options_and_files(tmp_path: Path) -> None:
    params = [{"name": "w", "rows": 33, "row_elems": 70, "dtype": "bf16", "shard_dtype": "fp32"}]
    file = tmp_path / "groups.json"
    file.write_text(json.dumps({"groups": [{"name": "g", "params": params}]}))
    code, text = run(
        str(file), "--nodes", "4", "--local", "2", "--placement", "latin_square",
        "--passes", "2", "-k", "3", "--mode", "slot_reuse",
    )  # fmt: skip
    assert code == 0, text
    assert "4 x 2, slot_reuse, both lanes, a landing a node: safe" in text


def test_impossible_plans_name_the_rule() -> None:
    code, text = run("--nodes", "2", "--local", "2", "-k", "0")
    assert code == 2
    assert "k" in text and "at least 1" in text


def test_mutants_are_detected_or_explained() -> None:
    code, text = run("--mutate", "--nodes", "3", "--local", "2")
    assert code == 0, text
    totals = next(line for line in text.splitlines() if " all " in line)
    injected, detected, explained, undetected = (
        int(cell) for cell in totals.replace("│", " ").split()[1:]
    )
    assert injected > 500
    assert undetected == 0
    assert detected + explained == injected
