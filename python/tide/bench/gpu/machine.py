"""What a run on GPUs is made with: the devices, the variables of the ranks, the versions."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping

import torch

import tide
from tide import _core
from tide.bench.launch import LaunchError

# NVLS and torch's multicast are left out on all sides; one hardware queue would make a stream that
# waits for a peer hold up compute.
_VARIABLES = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
_SHOWN = ("CUDA_", "NCCL_", "TIDE_", "TORCH_")
_QUERY = (
    "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
)


def count_gpus() -> int:
    """Returns the number of GPUs.

    Raises:
      LaunchError: there is none, or nothing to reach it with.
    """
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise LaunchError(
            f"no GPU: expected at least one that torch {torch.__version__} sees, found none; this "
            "bench needs an NVIDIA GPU, its driver and a torch built for CUDA"
        )
    if reason := _core.nccl()["reason"]:
        raise LaunchError(f"no collectives on GPUs: {reason}")
    return gpus


def default_ranks(gpus: int) -> int:
    """A rank a GPU; two ranks share a single one."""
    return max(2, gpus)


def variables(ranks: int, gpus: int) -> dict[str, str]:
    """Returns the environment variables that every rank gets."""
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if ranks > gpus else {}
    return {**_VARIABLES, **shared}


def query_gpus() -> list[dict[str, str]]:
    """Returns what nvidia-smi says of each GPU; nothing where it is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_query(answer.stdout)


def parse_query(text: str) -> list[dict[str, str]]:
    """Returns a dictionary for each line of nvidia-smi's answer."""
    lines = [line.split(",") for line in text.splitlines() if line.strip()]
    return [{k: v.strip() for k, v in zip(_QUERY.split(","), line, strict=False)} for line in lines]


def describe(ranks_environment: Mapping[str, str]) -> dict[str, object]:
    """Returns hardware, versions, variables and command of this run, for its file."""
    nccl = _core.nccl()
    cuda = torch.version.cuda
    seen = {**os.environ, **ranks_environment}
    return {
        "command": " ".join(sys.orig_argv),
        "gpus": query_gpus(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "tide": tide.__version__,
        "torch": torch.__version__,
        "cuda": cuda,
        "torch_nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "tide_nccl": nccl["description"] or nccl["reason"],
        "variables": {k: seen[k] for k in sorted(seen) if k.startswith(_SHOWN)},
    }
