"""Kernels and copies of one step, by name, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LONGEST = 20  # kernels listed by name


def profile(step: Callable[[], Any], trace: str = "") -> dict[str, Any]:
    """Runs one step under the profiler and writes the Chrome trace to the file ``trace``, if any.

    Returns:
        "launches" and "kernel_ms" of all kernels, "kernels": {name: [launches, milliseconds]} of
        the longest, "copies": the same of all copies and fills.
    """
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler_of

    torch.cuda.synchronize()
    with profiler_of(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        step()
        torch.cuda.synchronize()
    if trace:
        profiler.export_chrome_trace(trace)
    kernels: dict[str, list[float]] = {}
    copies: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        if event.name.startswith(("FSDP::", "Optimizer.", "nccl:", "record_param_comms")):
            continue  # spans of what the host called, drawn on the device
        table = copies if event.name.startswith(("Memcpy", "Memset")) else kernels
        entry = table.setdefault(event.name[:120], [0, 0.0])
        entry[0] += 1
        entry[1] += event.device_time / 1e3
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:_LONGEST]
    return {
        "launches": sum(int(count) for count, _ in kernels.values()),
        "kernel_ms": sum(ms for _, ms in kernels.values()),
        "kernels": dict(longest),
        "copies": copies,
    }
