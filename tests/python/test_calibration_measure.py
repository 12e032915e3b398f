"""What a calibration measures, on a fake GPU whose streams have clocks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest
import torch
from tide import _core
from tide.calibration import gpu as gpus
from tide.calibration import measure, store


class _Stream:
    def __init__(self, *unused: object, **named: object) -> None:
        self.clock = 0.0
        self.cuda_stream = id(self)
        _Stream.known[self.cuda_stream] = self

    known: dict[int, _Stream] = {}

    def wait_event(self, event: _Event) -> None:
        self.clock = max(self.clock, event.clock)


class _FakeGpu:
    """A sum of `bytes` takes bytes / (100 GB/s a CTA, 3000 at most); two runs share nothing.

    A victim's run takes 0.1 ms, and compute 0.25 ms more for every launch beside it, less a part
    for each CTA.
    """

    def __init__(self) -> None:
        self.compute = _Stream()
        self.current = self.compute
        self.launched: list[int] = []

    def rate(self, ctas: int) -> float:
        return min(100.0 * ctas, 3000.0)

    def launch(self, moved: int, ctas: int, stream: _Stream) -> None:
        stream.clock += moved / self.rate(ctas) * 1e-6
        self.launched.append(ctas)

    def run_victim(self) -> None:
        self.compute.clock += 0.1 + sum(0.25 - ctas / 1000 for ctas in self.launched)
        self.launched = []


class _Event:
    gpu: _FakeGpu

    def __init__(self, *unused: object, **named: object) -> None:
        self.clock = 0.0

    def record(self) -> None:
        self.clock = _Event.gpu.current.clock

    def synchronize(self) -> None:
        _Event.gpu.launched = []

    def elapsed_time(self, end: _Event) -> float:
        return end.clock - self.clock


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> _FakeGpu:
    gpu = _Event.gpu = _FakeGpu()

    class TimedSum:
        def __init__(self, sources: int, elems: int, src_dtype: int, dst_dtype: int) -> None:
            item = {_core.F32: 4, _core.BF16: 2}
            self.moved = elems * (sources * item[src_dtype] + item[dst_dtype])
            self.operands = sources + 1

        def launch(self, addresses: list[int], ctas: int, stream: int) -> None:
            assert len(set(addresses)) == self.operands
            gpu.launch(self.moved, ctas, _Stream.known[stream])

    @contextlib.contextmanager
    def on(stream: _Stream) -> Iterator[None]:
        before, gpu.current = gpu.current, stream
        yield
        gpu.current = before

    monkeypatch.setattr(_core, "TimedSum", TimedSum, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu.compute)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(measure, "_copy_rate", lambda memory, stream: 2000.0)
    monkeypatch.setattr(measure, "_LAUNCH_BYTES", 1 << 20)
    monkeypatch.setattr(measure, "_RATE_MS", 0.05)
    monkeypatch.setattr(
        measure, "VICTIMS", {name: lambda device: gpu.run_victim for name in measure._VICTIMS}
    )
    return gpu


def test_what_a_fake_gpu_does_is_measured(fake_gpu: _FakeGpu) -> None:
    described = gpus.Gpu(torch.device("cpu"), "a fake", 32, "1.0")
    measured = measure._measure(described, rounds=7, link=False)
    counts = [1, 2, 4, 8, 12, 16, 32]
    assert measure.cta_counts(32) == counts
    for sources in (1, 2, 8):
        assert list(measured.rates[sources]) == counts
        for ctas, rate in measured.rates[sources].items():
            assert rate == pytest.approx(fake_gpu.rate(ctas))
    for times in measured.added.values():
        for ctas, (ms, noise) in times.items():
            assert ms == pytest.approx(8 * (0.25 - ctas / 1000))
            assert noise == pytest.approx(0, abs=1e-9)
    machine = measure.as_machine(measured, described)
    assert machine["sum_added"][0] == [1, 1.992, 0.0]
    assert "nvlink_gb_per_s" not in machine
    # 32 CTAs are the only ones that reach 2346 GB/s.
    assert json.loads(store.finish(machine, 1, 2))["sum_ctas"] == 32


def test_few_ctas_sum_less_and_count_as_much() -> None:
    assert measure.scaled_launches(0.1, 5.0) == 8
    assert measure.scaled_launches(0.5, 5.0) == 5
    assert measure.scaled_launches(2.9, 5.0) == 1
    rounds = [(1.0, 1.1), (1.0, 1.2), (1.0, 1.3)]
    assert measure.summarise_added(rounds, launches=8) == pytest.approx((0.2, 0.1))
    assert measure.summarise_added(rounds, launches=2) == pytest.approx((0.8, 0.4))
