"""Where the demo runs: on GPUs if torch sees two that TIDE can serve, else on the CPU.

Nothing here allocates on a GPU: the memory of each is to be that of its rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from tide import _core
from tide.bench.gpu import machine
from tide.bench.launch import LaunchError, require_memory

DEVICES = ("auto", "cpu", "cuda")
CPU_RANKS = 4
CPU_SIZES = {"layers": 4, "width": 1024, "heads": 16, "seq_len": 64, "batch": 1}
# Large enough for a step to be compute and bandwidth, not launches.
GPU_SIZES = {"layers": 8, "width": 4096, "heads": 32, "seq_len": 1024, "batch": 2}
_GPU_WIDTHS = (4096, 2048, 1024)
_LEAST_GPUS = 2
# Shards, their gradients and moments, in fp32, of two models over all ranks.
_SHARDED_BYTES = 32
# On every rank: weights before sharding, unsharded gradients, the buffers of stock's collectives.
_RANK_BYTES = 12
_BYTES_PER_PROCESS = 300 << 20
# On every GPU: weights before sharding; bf16 kept for backward, a layer and element of its input;
# weights, gradients and buffers of the blocks in flight; contexts, NCCL and TIDE.
_GPU_WHOLE_BYTES = 4
_ACTIVATION_BYTES = 40
_BLOCKS_IN_FLIGHT, _IN_FLIGHT_BYTES = 3, 12
_BYTES_PER_GPU = 4 << 30


@dataclass(frozen=True)
class Gpus:
    """The GPUs of this machine.

    Attributes:
        names: one a GPU.
        bytes: memory of the smallest.
        reason: why TIDE cannot serve them; empty if it can.
    """

    names: tuple[str, ...] = ()
    bytes: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Place:
    """Where the ranks run.

    Attributes:
        device: "cpu" or "cuda".
        ranks: processes; on GPUs one each.
        sentence: where that is, and why it is not elsewhere.
        sizes: of the model and the batch, unless the command line has others.
        gpus: their names, rank by rank.
        gpu_bytes: memory of the smallest GPU.
        variables: environment variables that the ranks get.
    """

    device: str
    ranks: int
    sentence: str
    sizes: Mapping[str, int]
    gpus: tuple[str, ...] = ()
    gpu_bytes: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)


def find_gpus() -> Gpus:
    """Returns the GPUs that torch can use."""
    # The count alone may come from a driver that this torch cannot work with.
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return Gpus()
    try:
        found = [torch.cuda.get_device_properties(i) for i in range(count)]
    except RuntimeError as error:
        return Gpus(("unknown",) * count, reason=str(error).partition("\n")[0])
    names = tuple(gpu.name for gpu in found)
    return Gpus(names, min(gpu.total_memory for gpu in found), _core.nccl()["reason"])


def _counted(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number} GPUs"


def _why_not(gpus: Gpus) -> str:
    """Why the demo cannot run on the GPUs; empty if it can."""
    count = len(gpus.names)
    if count == 0:
        return f"torch {torch.__version__} sees no GPU"
    if count < _LEAST_GPUS:
        return f"torch sees {_counted(count)}, and {_LEAST_GPUS} are needed to train there"
    if gpus.reason:
        return f"torch sees {_counted(count)}, but TIDE cannot use them: {gpus.reason}"
    return ""


def _gpu_bytes(sizes: Mapping[str, int], ranks: int) -> int:
    """About what the demo takes of every GPU."""
    block = 12 * sizes["width"] ** 2
    parameters = sizes["layers"] * block
    elements = sizes["layers"] * sizes["batch"] * sizes["seq_len"] * sizes["width"]
    needed = parameters * _SHARDED_BYTES // ranks + parameters * _GPU_WHOLE_BYTES
    needed += elements * _ACTIVATION_BYTES
    return needed + _BLOCKS_IN_FLIGHT * block * _IN_FLIGHT_BYTES + _BYTES_PER_GPU


def _gpu_sizes(ranks: int, gpu_bytes: int) -> dict[str, int]:
    """GPU_SIZES, narrower if the GPUs are small; heads stay as wide."""
    head = GPU_SIZES["width"] // GPU_SIZES["heads"]
    choices = [GPU_SIZES | {"width": width, "heads": width // head} for width in _GPU_WIDTHS]
    fitting = [sizes for sizes in choices if _gpu_bytes(sizes, ranks) <= gpu_bytes]
    return (fitting or choices[-1:])[0]


def choose(asked: str, ranks: int | None, gpus: Gpus) -> Place:
    """Returns where to run.

    Args:
        asked: one of DEVICES.
        ranks: what the command line says; None for the place's own number.
        gpus: those of this machine.

    Raises:
        ValueError: GPUs were asked for and cannot be used, or there are fewer than ranks.
    """
    why_not = "" if asked == "cpu" else _why_not(gpus)
    if asked == "cuda" and why_not:
        raise ValueError(f"--device cuda cannot be had: {why_not}")
    if asked == "cpu" or why_not:
        sentence = f"runs on the CPU: {why_not}" if why_not else "runs on the CPU"
        return Place("cpu", CPU_RANKS if ranks is None else ranks, sentence, CPU_SIZES)
    count = len(gpus.names)
    ranks = count if ranks is None else ranks
    if ranks > count:
        raise ValueError(
            f"--ranks must be at most the {count} GPUs, got {ranks}: a rank needs one of its own; "
            "--device cpu has no such limit"
        )
    names = gpus.names[:ranks]
    number = _counted(ranks) if ranks == count else f"{ranks} of {_counted(count)}"
    listed = ", ".join(f"{many} x {name}" for name, many in Counter(names).items())
    variables = machine.variables(ranks, count)
    sizes = _gpu_sizes(max(ranks, _LEAST_GPUS), gpus.bytes)
    sentence = f"runs on {number}: {listed}"
    return Place("cuda", ranks, sentence, sizes, names, gpus.bytes, variables)


def require_room(place: Place, sizes: Mapping[str, int]) -> None:
    """Raises LaunchError if a demo of these sizes does not fit into the place's memory."""
    if place.device == "cpu":
        parameters = sizes["layers"] * 12 * sizes["width"] ** 2
        needed = place.ranks * (parameters * _RANK_BYTES + _BYTES_PER_PROCESS)
        needed += parameters * _SHARDED_BYTES
        require_memory(needed, f"the demo on {place.ranks} ranks")
        return
    needed = _gpu_bytes(sizes, place.ranks)
    if place.gpu_bytes < needed:
        raise LaunchError(
            f"the demo on {_counted(place.ranks)} needs about {_core.format_bytes(needed)} of "
            f"each, the smallest has {_core.format_bytes(place.gpu_bytes)}: use a smaller model"
        )
