"""The `tide` command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import tide
from tide import _core
from tide.cli import app
from typer.testing import CliRunner

# Narrower than the tables: into a pipe they are written whole all the same.
runner = CliRunner(env={"COLUMNS": "40"})


def test_info_shows_versions_and_every_option() -> None:
    result = runner.invoke(app, ["info"], env={"COLUMNS": "400"})  # no cell wraps
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


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"tide {tide.__version__}\n")


def _without_core(argv: list[str], statement: str) -> tuple[int, str]:
    """Exit code and stderr of a Python in which the core is missing."""
    hidden = "sys.modules['tide._core'] = None"  # as if no such module were found
    code = f"import sys; {hidden}; sys.argv = {argv!r}; {statement}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stderr


def test_commands_say_in_a_line_that_nothing_is_built() -> None:
    said = (1, "tide: tide._core is not built: run make\n")
    assert _without_core(["/usr/bin/tide", "--help"], "from tide.cli import main; main()") == said
    module = "import runpy; runpy.run_module('tide', run_name='__main__', alter_sys=True)"
    assert _without_core(["-m", "--help"], module) == said
    code, text = _without_core(["train.py"], "import tide")
    assert code == 1
    assert text.count("Traceback") == 1
    assert text.endswith("ImportError: tide._core is not built: run make\n")


def test_run_refuses_a_folder_without_main(tmp_path) -> None:
    command = [sys.executable, "-m", "tide.run", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    missing = str(tmp_path / "__main__.py")
    assert (done.returncode, done.stderr) == (
        1,
        f"tide.run: expected a script, found no file {missing!r}\n",
    )
