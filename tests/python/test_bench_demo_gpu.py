"""The demo on GPUs, as far as a machine without one goes: where it runs, and what it reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tide import _core
from tide.bench import demo, demo_gpu, demo_place, demo_report
from tide.bench.demo_place import CPU_SIZES, GPU_SIZES, Gpus
from tide.bench.demo_worker import Clock, DemoConfig, MemoryConfig
from tide.bench.launch import Context, LaunchError, launch
from tide.bench.models import cpu_mesh
from tide.bench.terminal import make_console

_GIB = 1 << 30
TWO = Gpus(("NVIDIA H200", "NVIDIA H200"), 140 * _GIB)
EIGHT = Gpus(("NVIDIA H100",) * 8, 80 * _GIB)
WITHOUT_NCCL = Gpus(TWO.names, TWO.bytes, "no NCCL was found: run `tide nccl install`")


def _use(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_place, "find_gpus", lambda: gpus)


def test_two_gpus_are_used_unasked(monkeypatch) -> None:
    _use(TWO, monkeypatch)
    options, place = demo._parse([])
    assert (place.device, options.ranks) == ("cuda", 2)
    assert place.sentence == "runs on 2 GPUs: 2 x NVIDIA H200"
    assert {name: getattr(options, name) for name in GPU_SIZES} == GPU_SIZES
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in place.variables


def test_some_of_the_gpus(monkeypatch) -> None:
    _use(EIGHT, monkeypatch)
    options, place = demo._parse(["--device", "cuda", "--ranks", "4", "--width", "2048"])
    assert (options.ranks, options.width, options.layers) == (4, 2048, GPU_SIZES["layers"])
    assert place.sentence == "runs on 4 of 8 GPUs: 4 x NVIDIA H100"


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        (Gpus(), f"runs on the CPU: torch {torch.__version__} sees no GPU"),
        (Gpus(("NVIDIA H200",), _GIB), "runs on the CPU: torch sees 1 GPU, and 2 are needed"),
        (WITHOUT_NCCL, "torch sees 2 GPUs, but TIDE cannot use them: no NCCL was found: run `tide"),
    ],
)
def test_elsewhere_it_stays_on_the_cpu_and_says_why(gpus: Gpus, words: str, monkeypatch) -> None:
    _use(gpus, monkeypatch)
    options, place = demo._parse([])
    assert (place.device, options.ranks, place.variables) == ("cpu", 4, {})
    assert {name: getattr(options, name) for name in CPU_SIZES} == CPU_SIZES
    assert words in place.sentence
    with pytest.raises(ValueError, match="--device cuda cannot be had: torch"):
        demo_place.choose("cuda", None, gpus)


def test_the_cpu_is_used_where_it_is_asked_for(monkeypatch) -> None:
    def look() -> Gpus:
        raise AssertionError("nobody asked for GPUs")

    monkeypatch.setattr(demo_place, "find_gpus", look)
    options, place = demo._parse(["--device", "cpu", "--ranks", "3"])
    assert (place.device, options.ranks, place.sentence) == ("cpu", 3, "runs on the CPU")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "3"], "at most the 2 GPUs, got 3"),
        (["--ranks", "1"], "at least 2"),
        (["--ranks", "0"], "at least 2"),
        (["--nodes", "3"], "must divide the 2 ranks"),
    ],
)
def test_gpus_refuse(arguments: list[str], message: str, monkeypatch, capsys) -> None:
    _use(TWO, monkeypatch)
    with pytest.raises(SystemExit):
        demo.main(arguments)
    assert message in capsys.readouterr().err


def test_small_gpus_get_a_narrower_model() -> None:
    place = demo_place.choose("auto", None, Gpus(("NVIDIA L4",) * 2, 24 * _GIB))
    assert place.sizes == {**GPU_SIZES, "width": 2048, "heads": 16}
    demo_place.require_room(place, place.sizes)
    with pytest.raises(LaunchError, match="2 GPUs needs about .* the smallest has 24 GiB"):
        demo_place.require_room(place, GPU_SIZES)


class _Properties:
    def __init__(self, name: str, total_memory: int) -> None:
        self.name, self.total_memory = name, total_memory


def _fail(index: int) -> None:
    raise RuntimeError("CUDA error: no\nmore lines")


def test_what_torch_sees(monkeypatch) -> None:
    found = [_Properties("a", 7), _Properties("b", 5)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)
    monkeypatch.setattr(_core, "nccl", lambda: {"reason": "why not"})
    assert demo_place.find_gpus() == Gpus(("a", "b"), 5, "why not")
    monkeypatch.setattr(torch.cuda, "get_device_properties", _fail)
    assert demo_place.find_gpus().reason == "CUDA error: no"
    # A driver that counts GPUs which this torch cannot use.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert demo_place.find_gpus() == Gpus()


class _Event:
    """Records 1 ms after the one before."""

    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms = 0

    def record(self) -> None:
        _Event.made += 1
        self.at_ms = _Event.made

    def elapsed_time(self, later: _Event) -> int:
        return later.at_ms - self.at_ms


def test_a_stream_times_the_parts_and_the_host_the_whole(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    host = iter([10.0, 11.0])
    monkeypatch.setattr(demo_gpu, "now", lambda: next(host))
    clock = demo_gpu.StreamClock()
    clock.start()
    clock.mark()
    clock.mark()
    assert clock.stop() == pytest.approx([10.0, 10.001, 10.002, 11.0])


def _without_gpus() -> None:
    """Lets demo_gpu's workers run on this rank's CPU; torch has 5 bytes of a GPU, others 7."""
    demo_gpu._mesh = lambda rank: cpu_mesh()
    demo_gpu.StreamClock = Clock
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(torch.cuda, name, lambda: None)
    torch.cuda.mem_get_info = lambda: (88, 100)
    torch.cuda.memory_reserved = lambda: 5
    torch.cuda.max_memory_reserved = lambda: 9


def _train(context: Context, config: DemoConfig) -> Any:
    _without_gpus()
    return demo_gpu.train(context, config)


def _measure(context: Context, config: MemoryConfig) -> Any:
    _without_gpus()
    return demo_gpu.measure_memory(context, config)


@pytest.mark.slow
def test_what_gpus_report(tmp_path: Path, capsys) -> None:
    sizes = {"layers": 2, "width": 32, "heads": 2, "length": 16, "batch": 1, "seed": 0}
    text = bytes(range(256)) * 8
    config = DemoConfig(steps=3, mode="auto", nodes=1, **sizes, text=text, folder=str(tmp_path))
    results = launch(_train, 2, config)
    trainings = {name: [result[name] for result in results] for name in ("stock", "tide")}
    assert {group["all_gather"] for group in trainings["tide"][0].groups} == {"tide"}
    passes = launch(_measure, 2, MemoryConfig(config, through_tide=True))
    assert [one.samples for one in passes] == [[16], [16]]
    memory = {name: [one.samples for one in passes] for name in trainings}
    measured = demo_report.build(trainings, memory, {"nodes": 1}, warm_up=0)
    report = {"device": "cuda", "gpus": ["a", "b"], **measured}
    parts = {"step_ms_median", "step_ms_p90", "forward_ms", "backward_ms", "peak_mib"}
    assert set(report["stock"]) == set(report["tide"]) == parts
    demo_report.show(report, make_console())
    demo_report.write(tmp_path, report, trainings, print)
    shown = capsys.readouterr().out
    assert "waiting for ranks" not in shown and "lies outside torch" in shown
    assert "trace-stock.json and trace-tide.json (for ui.perfetto.dev)" in shown
    assert not (tmp_path / "trace.json").exists()
    for name in ("stock", "tide"):
        assert json.loads((tmp_path / f"trace-{name}.json").read_text())["traceEvents"]
