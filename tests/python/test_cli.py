"""The `tide` command."""

from __future__ import annotations

import json

import pytest
import tide
from tide import _core
from tide.cli import app
from typer.testing import CliRunner

# Narrower than the tables: into a pipe they are written whole all the same.
runner = CliRunner(env={"COLUMNS": "40"})


def test_info_shows_versions_and_every_option() -> None:
    result = runner.invoke(app, ["info"])
    assert result.exit_code == 0, result.output
    assert tide.__version__ in result.output
    assert _core.target() in result.output
    for row in _core.config():
        assert row["name"] in result.output and row["doc"] in result.output


def test_info_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_TIMOUT", "3")
    monkeypatch.setenv("TIDE_STAGING_SLOT", "small")
    output = runner.invoke(app, ["info"]).output
    assert "unknown variable TIDE_TIMOUT" in output
    assert "TIDE_STAGING_SLOT must be a positive whole number of bytes, not 'small'" in output


def test_bench_prints_and_writes_the_row(tmp_path) -> None:
    file = tmp_path / "row.json"
    command = ["bench", "all-gather", "--ranks", "2", "--preset", "tiny", "--rounds", "2", "--json"]
    result = runner.invoke(app, [*command, str(file)])
    assert result.exit_code == 0, result.output
    assert "speedup" in result.output and "over_floor" in result.output
    (row,) = json.loads(file.read_text())
    assert (row["op"], row["ranks"]) == ("all-gather", 2)


def test_bench_names_the_presets_it_knows() -> None:
    result = runner.invoke(app, ["bench", "reduce-scatter", "--preset", "huge"])
    assert result.exit_code == 1
    assert "llama8b-layer" in result.output


def test_bench_refuses_one_rank() -> None:
    assert runner.invoke(app, ["bench", "all-gather", "--ranks", "1"]).exit_code != 0
