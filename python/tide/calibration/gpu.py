"""What tells one kind of GPU from another, as far as the speed of a sum goes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from tide import _core

_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Gpu:
    """A GPU of this process.

    Attributes:
        preset: the machine that gives the rates which nobody has measured here.
    """

    device: torch.device
    name: str
    multiprocessors: int
    driver: str
    preset: str = "h200"

    @property
    def file_name(self) -> str:
        """Of the machine file of such GPUs, for this version of the kernel."""
        words = (self.name, f"{self.multiprocessors}sm", self.driver, f"v{_core.SUM_VERSION}")
        return "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", word) for word in words) + ".json"


def driver_version(text: str) -> str | None:
    """The driver's version in what its file in /proc says."""
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", text)
    return found[1] if found else None


def _driver() -> str:
    try:
        version = driver_version(_DRIVER.read_text())
    except OSError:  # a container that hides it
        version = None
    return version or f"cuda{_core.cuda_of_driver()}"


def missing() -> str | None:
    """Why nothing can be measured here, or None."""
    if torch.cuda.device_count() == 0:
        return (
            f"no GPU: expected one that torch {torch.__version__} sees, found none; a calibration "
            "needs an NVIDIA GPU, its driver and a torch built for CUDA"
        )
    if not hasattr(_core, "TimedSum"):
        return f"no sums on GPUs: {_core.nccl()['reason']}"
    return None


def describe(device: torch.device) -> Gpu:
    """Returns what is known of a GPU."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    # Links of the fifth generation came with 10.0.
    preset = "paper-8-nodes" if properties.major >= 10 else "h200"
    return Gpu(
        torch.device("cuda", index),
        properties.name,
        properties.multi_processor_count,
        _driver(),
        preset,
    )
