"""Calibrations of GPUs with made-up measurements: what is kept, chosen from it, and said."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tide
import torch
from tide import _core, file_lock
from tide.calibration import gpu as gpus
from tide.calibration import measure, store
from tide.cli import app
from tide.fsdp import settings
from tide.fsdp.sum_budget import SumBudget, sum_budget
from typer.testing import CliRunner

GPU = gpus.Gpu(torch.device("cuda", 0), "NVIDIA H200", 132, "580.159.03")
MACHINE = {
    "base": "h200",
    "name": "NVIDIA H200",
    "multiprocessors": 132,
    "sum_curves": [
        {"sources": 2, "points": [[1, 90], [16, 1400], [33, 2800], [132, 3600]]},
        {"sources": 8, "points": [[1, 100], [16, 1600], [33, 3200], [132, 4100]]},
    ],
    "sum_added": [[1, 0.5, 0.02], [16, 0.5, 0.02], [33, 0.5, 0.02], [132, 0.49, 0.02]],
    "sources": {"sum_curves": "a test", "sum_added": "a test"},
}

runner = CliRunner(env={"COLUMNS": "200"})


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_CACHE", str(tmp_path / "cache"))
    for name in ("TIDE_SUM_CTAS", "TIDE_CALIBRATE", "TIDE_NODES"):
        monkeypatch.delenv(name, raising=False)


def _measured() -> dict[str, Any]:
    return dict(MACHINE)


def _never() -> dict[str, Any]:
    raise AssertionError("measured, though there is a file")


# --- The file.


def test_a_file_is_of_one_kind_of_gpu_and_kernel() -> None:
    version = _core.SUM_VERSION
    assert GPU.file_name == f"NVIDIA_H200-132sm-580.159.03-v{version}.json"
    assert store.path_of(GPU) == settings.cache_folder() / "calibration" / GPU.file_name
    odd = gpus.Gpu(GPU.device, "GPU/../x (80 GB)", 7, "1.0")
    assert odd.file_name == f"GPU_.._x_80_GB_-7sm-1.0-v{version}.json"


def test_the_driver_is_read_from_proc() -> None:
    texts = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Tue Sep  2 12:00:00 UTC 2026",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build",
    )
    for text in texts:
        assert gpus.driver_version(f"{text}\nGCC version:  gcc version 12.2.0\n") == "580.159.03"
    assert gpus.driver_version("nothing of the kind 1.2") is None


def test_a_hidden_driver_is_known_by_its_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA B200", multi_processor_count=148, major=10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(gpus, "_DRIVER", Path("/proc/no such file"))
    monkeypatch.setattr(_core, "cuda_of_driver", lambda: 13000)
    found = gpus.describe(torch.device("cuda", 3))
    expected = ("NVIDIA B200", 148, "cuda13000", "paper-8-nodes", 3)
    told = (found.name, found.multiprocessors, found.driver, found.preset, found.device.index)
    assert told == expected


def test_the_second_reads_what_the_first_measured() -> None:
    first = store.load_or_measure(GPU, _measured)
    assert (first.measured, first.rejected) == (True, "")
    second = store.load_or_measure(GPU, _never)
    assert (second.measured, second.text, second.path) == (False, first.text, first.path)
    assert first.path.read_text() == first.text
    machine = json.loads(first.text)
    assert machine["sum_ctas"] == 33
    assert machine["sources"]["sum_ctas"].startswith("1 x 2 ranks, bf16 gradients: keeps up")
    # Nothing else stays but the lock.
    names = sorted(path.name for path in first.path.parent.iterdir())
    assert names == [GPU.file_name, f"{GPU.file_name}.lock"]
    assert store.load_or_measure(GPU, _measured, force=True).measured


def test_a_file_is_a_machine_for_plan_and_sim() -> None:
    path = str(store.load_or_measure(GPU, _measured).path)
    shape = ["--preset", "tiny", "--nodes", "1", "--local", "2", "--machine", path, "--json"]
    for command in (["plan"], ["sim", "reduce-scatter"]):
        result = runner.invoke(app, [*command, *shape])
        assert result.exit_code == 0, result.output
    numbers = {row["name"]: row for row in _core.machine_numbers(Path(path).read_text())}
    assert numbers["sum_ctas"]["value"] == 33
    assert "keeps up" in numbers["sum_ctas"]["source"]


def test_the_choice_is_for_the_ranks() -> None:
    found = store.load_or_measure(GPU, _measured)
    # Eight ranks read 20 bytes for 14 that arrive, two read 8 for 2.
    assert store.choose(found.text, nodes=1, local_ranks=8)[0] == 16
    assert json.loads(store.for_ranks(found, 1, 8).text)["sum_ctas"] == 16
    assert json.loads(found.path.read_text())["sum_ctas"] == 33


def _without(field: str) -> str:
    return json.dumps({name: value for name, value in MACHINE.items() if name != field})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "machine: "),
        (json.dumps(MACHINE)[:200], "machine: "),
        ("[1, 2]", "machine: "),
        ("\xff\xfe", "can't decode"),
        (_without("sum_added"), "expected sum_curves and sum_added"),
        (_without("multiprocessors"), "multiprocessors: expected 132, got None"),
        (json.dumps({**MACHINE, "multiprocessors": 114}), "expected 132, got 114"),
        (json.dumps({**MACHINE, "sum_added": [[1, "soon", 0]]}), "sum_added[0][1]"),
        (json.dumps({**MACHINE, "sum_speed": 1}), "sum_speed"),
    ],
)
def test_other_files_are_measured_again(content: str, reason: str) -> None:
    path = store.path_of(GPU)
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode("latin-1"))
    found = store.load_or_measure(GPU, _measured)
    assert found.measured
    assert str(path) in found.rejected and reason in found.rejected
    assert not store.load_or_measure(GPU, _never).measured


def test_a_failed_measurement_leaves_no_file() -> None:
    def fails() -> dict[str, Any]:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        store.load_or_measure(GPU, fails)
    with pytest.raises(tide.Error, match="sum_added"):
        store.load_or_measure(GPU, lambda: {**MACHINE, "sum_added": []})
    assert [path.suffix for path in store.path_of(GPU).parent.iterdir()] == [".lock"]


def _process(cache: str, second_waits: Event, measured: Any) -> None:
    """Measures only when the other process is known to wait for the lock."""
    import os

    os.environ["TIDE_CACHE"] = cache
    file_lock._POLL_S = 0.001
    real_sleep = file_lock.time.sleep

    def sleep(seconds: float) -> None:
        second_waits.set()
        real_sleep(seconds)

    file_lock.time = SimpleNamespace(sleep=sleep, monotonic=file_lock.time.monotonic)

    def slow() -> dict[str, Any]:
        measured.put("once")
        if not second_waits.wait(60):
            raise RuntimeError("nobody waits for the lock")
        return dict(MACHINE)

    found = store.load_or_measure(GPU, slow)
    measured.put(found.text)


def test_one_process_measures_and_the_other_waits(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    waits, measured = spawn.Event(), spawn.Queue()
    arguments = (str(tmp_path / "both"), waits, measured)
    processes = [spawn.Process(target=_process, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    said = [measured.get(timeout=90) for _ in range(3)]
    for process in processes:
        process.join(90)
        assert process.exitcode == 0
    assert said[0] == "once"
    assert said[1] == said[2] and json.loads(said[1])["sum_ctas"] == 33
    assert measured.empty()


def test_a_lock_that_is_held_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_LOCK_S", -1.0)  # has passed at the first look
    path = store.path_of(GPU)
    path.parent.mkdir(parents=True)
    with open(path.with_name(f"{path.name}.lock"), "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="another process has held .*TIDE_CALIBRATE=off"):
            store.load_or_measure(GPU, _never)
    assert store.load_or_measure(GPU, _measured).measured


# --- What a communicator is given.


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Pretends that there is a GPU; returns the (rounds, link) of measurements."""
    asked: list[tuple[int, bool]] = []

    def measure_machine(gpu: gpus.Gpu, rounds: int, link: bool) -> dict[str, Any]:
        asked.append((rounds, link))
        return dict(MACHINE)

    monkeypatch.setattr(gpus, "describe", lambda device: GPU)
    monkeypatch.setattr(gpus, "missing", lambda: None)
    monkeypatch.setattr(measure, "measure_machine", measure_machine)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    properties = SimpleNamespace(multi_processor_count=GPU.multiprocessors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 30, 80 << 30))
    return asked


def test_the_first_communicator_measures_once(on_a_gpu: list[tuple[int, bool]]) -> None:
    first = sum_budget(GPU.device, world=2, nodes=None)
    assert first.ctas == 33
    assert first.note.startswith(f"a sum takes 33 CTAs, measured now, kept in {store.path_of(GPU)}")
    second = sum_budget(GPU.device, world=8, nodes=None)
    assert second.ctas == 16
    assert second.note.startswith(f"a sum takes 16 CTAs, calibrated in {store.path_of(GPU)}: keeps")
    # A copy to another GPU would leave a context there.
    assert on_a_gpu == [(measure.QUICK_ROUNDS, False)]


def test_nodes_are_the_callers_or_the_environments(
    on_a_gpu: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "of links" in sum_budget(GPU.device, 8, None).note
    assert "of rail, equation 13" in sum_budget(GPU.device, 8, 2).note
    monkeypatch.setenv("TIDE_NODES", "2")
    assert "of rail, equation 13" in sum_budget(GPU.device, 8, None).note
    assert "of links" in sum_budget(GPU.device, 8, 1).note


def test_wider_gradients_ask_for_another_rate(on_a_gpu: list[tuple[int, bool]]) -> None:
    # 391 GB/s of links, 1.5 for skew: 8/2 or 12/4 bytes for each that arrives.
    assert "2346 GB/s of sums" in sum_budget(GPU.device, 2, None, grad_bytes=2).note
    assert "1760 GB/s of sums" in sum_budget(GPU.device, 2, None, grad_bytes=4).note


def test_the_option_and_the_default_rule_measure_nothing(
    on_a_gpu: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sum_budget(torch.device("cpu"), 2, None) == SumBudget(0, "")
    monkeypatch.setenv("TIDE_SUM_CTAS", "24")
    option = sum_budget(GPU.device, 2, None)
    assert option == SumBudget(0, "a sum takes 24 CTAs (TIDE_SUM_CTAS)")
    monkeypatch.delenv("TIDE_SUM_CTAS")
    store.load_or_measure(GPU, _measured)  # not looked at
    monkeypatch.setenv("TIDE_CALIBRATE", "off")
    default = "a sum takes 33 CTAs, the default rule: a quarter of 132 multiprocessors"
    off = sum_budget(GPU.device, 8, None)
    assert off == SumBudget(0, f"{default} (TIDE_CALIBRATE=off)")
    monkeypatch.delenv("TIDE_CALIBRATE")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = sum_budget(GPU.device, 8, None)
    assert captured.note == f"{default} (nothing is measured while a graph is captured)"
    assert (captured.ctas, on_a_gpu) == (0, [])


def test_a_folder_that_is_not_writable_is_no_reason_not_to_measure(
    on_a_gpu: list[tuple[int, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TIDE_CACHE", str(tmp_path / "file"))
    budget = sum_budget(GPU.device, 2, None)
    assert budget.ctas == 33 and len(on_a_gpu) == 1
    assert "measured now, kept nowhere (NotADirectoryError: " in budget.note


@pytest.mark.parametrize("cause", ["measurement", "memory", "device", "build"])
def test_a_failure_is_told_and_the_default_rule_stays(
    cause: str, on_a_gpu: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*unused: object, **named: object) -> None:
        raise torch.cuda.OutOfMemoryError("no 256 MiB left")

    expected = "OutOfMemoryError: no 256 MiB left"
    if cause == "measurement":
        monkeypatch.setattr(measure, "measure_machine", fails)
    elif cause == "memory":
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 80 << 30))
        expected = "RuntimeError: expected 2048 MiB of free memory, got 1024"
    elif cause == "device":
        monkeypatch.setattr(gpus, "describe", fails)
    else:
        monkeypatch.setattr(gpus, "missing", lambda: "no sums on GPUs")
        expected = "RuntimeError: no sums on GPUs"
    budget = sum_budget(GPU.device, 2, None)
    assert budget.ctas == 0
    assert budget.note.startswith("a sum takes 33 CTAs, the default rule")
    assert f"(calibrating failed: {expected}" in budget.note


def test_a_file_that_is_not_valid_is_told(on_a_gpu: list[tuple[int, bool]]) -> None:
    store.load_or_measure(GPU, _measured)
    store.path_of(GPU).write_text("{")
    budget = sum_budget(GPU.device, 2, None)
    assert budget.ctas == 33
    assert ", since the file there was not valid (" in budget.note and "line 1" in budget.note


def test_calibrate_is_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_CALIBRATE", "never")
    assert settings.problem() == "TIDE_CALIBRATE must be on or off, not 'never'"
    monkeypatch.setenv("TIDE_CALIBRATE", "off")
    assert settings.problem() is None
    assert settings.signature()["TIDE_CALIBRATE"] == "off"


# --- The command.


def test_the_command_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = runner.invoke(app, ["calibrate"])
    assert result.exit_code == 1
    assert result.output.startswith("calibrate: no GPU: expected one that torch")
    assert len(result.output.splitlines()) == 1
    assert not settings.cache_folder().exists()


def test_the_command_measures_and_prints(on_a_gpu: list[tuple[int, bool]]) -> None:
    result = runner.invoke(app, ["calibrate"])
    assert result.exit_code == 0, result.output
    assert on_a_gpu == [(measure.ROUNDS, True)]
    path = store.path_of(GPU)
    for said in ("33 *", "2800", "0.490", "1 x 2 ranks", f"written: {path}"):
        assert said in result.output
    before = path.read_text()
    # Read the second time, and chosen for other ranks.
    result = runner.invoke(app, ["calibrate", "--local", "8"])
    for said in ("16 *", "1 x 8 ranks", f"read: {path}"):
        assert said in result.output
    assert path.read_text() == before
    result = runner.invoke(app, ["calibrate", "--json"])
    assert json.loads(result.stdout)["sum_ctas"] == 33
    assert len(on_a_gpu) == 1
    assert runner.invoke(app, ["calibrate", "--force"]).exit_code == 0
    assert len(on_a_gpu) == 2


def test_the_command_writes_elsewhere(on_a_gpu: list[tuple[int, bool]], tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    result = runner.invoke(app, ["calibrate", "--output", str(file)])
    assert result.exit_code == 0, result.output
    assert json.loads(file.read_text())["sum_ctas"] == 33
    assert not store.path_of(GPU).exists()
    result = runner.invoke(app, ["calibrate", "--output", str(tmp_path / "no" / "machine.json")])
    assert result.exit_code == 1
    assert "--output: expected an existing folder" in result.output
    assert len(on_a_gpu) == 1
