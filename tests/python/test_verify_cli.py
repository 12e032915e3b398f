"""`tide verify`: proofs and mutants from the command line."""

from __future__ import annotations

import json
import signal
import types
from pathlib import Path

import pytest
from tide import _core
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
    code, text = run("--nodes", "2", "--local", "2", "-k", "2")
    assert code == 2
    assert "round width k: expected at most max(1, M-1) = 1, got 2" in text


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


def _request(nodes: int, local: int, rows: int = 4096, **options: int) -> str:
    params = [{"name": "w", "rows": rows, "row_elems": 64, "dtype": "bf16"}]
    return json.dumps(
        {
            "groups": [{"name": "g", "params": params}],
            "nodes": nodes,
            "local_ranks": local,
            "machine": "paper-8-nodes",
            "options": options,
        }
    )


_LONG = {
    "a proof": lambda: _core.verify_plans(_request(64, 8), ["training"]),
    "all plans": lambda: _core.verify_exhaustive(1 << 16, 8, [1, 2, 4], [1, 2, 3, 4]),
    "a plan": lambda: _core.plan_report(_request(1, 2, rows=1 << 20, chunk_bytes=64)),
    "a simulation": lambda: _core.simulate(
        _request(1, 2, rows=1 << 20, chunk_bytes=64), "reduce-scatter"
    ),
}


@pytest.mark.parametrize("what", _LONG)
def test_signals_stop(what: str) -> None:
    """A handler runs while the core is at work, not only once it has returned."""
    runs: list[int] = []

    def handler(_signum: int, frame: types.FrameType | None) -> None:
        # After a call that does not look for signals the handler runs there once: they coalesce.
        runs.append(frame.f_lasti if frame else -1)
        if len(runs) > 1 and runs[-1] == runs[-2]:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        with pytest.raises(KeyboardInterrupt):
            _LONG[what]()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_mutation_gives_up_when_asked() -> None:
    class Enough(Exception):
        pass

    asked = 0

    def give_up() -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise Enough

    with pytest.raises(Enough):
        _core.mutate_plans(_request(3, 2), [0], give_up)
    assert asked == 3


def test_errors_name_the_command() -> None:
    code, text = run("--preset", "huge", "--nodes", "2", "--local", "2")
    assert code == 2
    assert text.startswith("tide verify: --preset: expected one of tiny")


def test_refuses_what_it_would_ignore() -> None:
    code, text = run("--max-nodes", "16")
    assert (code, text) == (
        2,
        "tide verify: --max-nodes: expected --exhaustive with it; else give --nodes\n",
    )
    code, text = run("--mutate", "--exhaustive")
    assert (code, text) == (2, "tide verify: expected --exhaustive or --mutate, got both\n")


@pytest.mark.parametrize(
    ("source", "needed"), [([], "91.2 GiB"), (["--preset", "tiny"], "37.55 GiB")]
)
def test_refuses_what_does_not_fit_into_memory(
    source: list[str], needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_core, "available_memory", lambda: (24 * 2**30, "a limit"))
    code, text = run(*source, "--nodes", "300", "--local", "8")
    assert (code, text) == (
        2,
        f"tide verify: 300 nodes x 8 = 2,400 ranks: a proof takes about {needed} of memory or "
        "more, 24 GiB are available (a limit); try fewer nodes, since schedules repeat, or "
        "--exhaustive, which checks all node counts up to 1024 without programs\n",
    )


def test_available_memory_and_what_limits_it() -> None:
    available, source = _core.available_memory()
    assert available > 2**20
    assert source


def test_exhaustive_up_to_a_number_of_nodes() -> None:
    code, text = run("--exhaustive", "--max-nodes", "16")
    assert code == 0, text
    assert "M in [2, 16], L = 8" in text
    code, text = run("--exhaustive", "--max-nodes", "1000000000000")
    assert code == 2 and "65536" in text
