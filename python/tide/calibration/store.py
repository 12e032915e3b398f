"""Machine files in TIDE's cache folder: one a kind of GPU, measured once by one process.

    found = load_or_measure(gpu, lambda: measure_machine(gpu, QUICK_ROUNDS, link=False))
    ctas, why = choose(found.text, nodes=1, local_ranks=8)

Everything here runs without a GPU.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tide import Error, _core
from tide.calibration.gpu import Gpu
from tide.file_lock import locked
from tide.fsdp import settings

# A measurement takes seconds; whoever holds the lock for longer hangs.
_LOCK_S = 60.0
BF16_BYTES = 2


@dataclass(frozen=True)
class Calibration:
    """A machine file.

    Attributes:
        text: its JSON.
        path: where it lies; None if it could not be written.
        measured: whether this process has just measured it.
        rejected: why an earlier file was not used; empty without one.
        unwritten: why there is no file.
    """

    text: str
    path: Path | None
    measured: bool
    rejected: str = ""
    unwritten: str = ""


def path_of(gpu: Gpu) -> Path:
    """Returns where the machine file of such GPUs is kept."""
    return settings.cache_folder() / "calibration" / gpu.file_name


def choose(
    text: str, nodes: int, local_ranks: int, grad_bytes: int = BF16_BYTES
) -> tuple[int, str]:
    """Returns the CTAs of a sum on a machine in JSON, and why.

    Args:
        text: the machine, with curves and added times.
        nodes: M.
        local_ranks: L.
        grad_bytes: of an element of a gradient.

    Raises:
        tide.Error: "invalid_argument" if it is no such machine.
    """
    return _core.choose_sum_ctas(text, nodes, local_ranks, grad_bytes)


def _problem(text: str, gpu: Gpu) -> str:
    """What is wrong with a file's content; empty if nothing is."""
    try:
        choose(text, nodes=1, local_ranks=2)
        # The core takes a preset's number where a file has none.
        found = json.loads(text).get("multiprocessors")
    except (Error, ValueError, RecursionError) as error:
        return str(error)
    if found != gpu.multiprocessors:
        return f"multiprocessors: expected {gpu.multiprocessors}, got {found}"
    return ""


def read(path: Path, gpu: Gpu) -> tuple[str | None, str]:
    """Returns a file's content and "", or None and why it is not used; no reason without a file."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None, ""
    except (OSError, UnicodeDecodeError) as error:
        return None, f"{path}: {error}"
    problem = _problem(text, gpu)
    return (None, f"{path}: {problem}") if problem else (text, "")


def write(path: Path, text: str) -> None:
    """Writes a file, under its name only when whole: other processes may be reading it."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as part:
            part.write(text)
        os.chmod(name, 0o644)  # mkstemp's is for its owner alone; a folder may be shared
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def finish(machine: dict[str, Any], nodes: int, local_ranks: int) -> str:
    """Returns the file of a machine that was measured, with the choice for these ranks."""
    ctas, why = choose(json.dumps(machine), nodes, local_ranks)
    ranks = f"{nodes} x {local_ranks} ranks, bf16 gradients: {why}"
    sources = {**machine.get("sources", {}), "sum_ctas": ranks}
    return json.dumps({**machine, "sum_ctas": ctas, "sources": sources}, indent=1) + "\n"


def for_ranks(found: Calibration, nodes: int, local_ranks: int) -> Calibration:
    """Returns what was found with the choice for other ranks; the file stays."""
    return replace(found, text=finish(json.loads(found.text), nodes, local_ranks))


def load_or_measure(
    gpu: Gpu,
    measure: Callable[[], dict[str, Any]],
    nodes: int = 1,
    local_ranks: int = 2,
    force: bool = False,
) -> Calibration:
    """Returns the machine file of such GPUs; measures and writes it if there is no valid one.

    One process of a machine measures, the others wait for it and read.

    Args:
        gpu: the GPU.
        measure: returns the machine, but for the choice.
        nodes: M, of the choice in a new file.
        local_ranks: L, as well.
        force: measure in any case.

    Raises:
        OSError: another process holds the lock for too long; with `force`, also a folder that is
            not writable or has no locks, where otherwise this process measures for itself.
        tide.Error: what was measured is no machine. Whatever `measure` raises.
    """
    path = path_of(gpu)
    text, rejected = read(path, gpu)
    if text is not None and not force:
        return Calibration(text, path, measured=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f"{path.name}.lock")
        with locked(lock, _LOCK_S, "set TIDE_CALIBRATE=off"):
            if not force:
                text, rejected = read(path, gpu)
                if text is not None:
                    return Calibration(text, path, measured=False)
            text = finish(measure(), nodes, local_ranks)
            write(path, text)
    except OSError as error:  # a folder that is not writable, or has no locks
        if isinstance(error, TimeoutError) or force:
            raise
        text = text or finish(measure(), nodes, local_ranks)
        return Calibration(text, None, True, rejected, f"{type(error).__name__}: {error}")
    return Calibration(text, path, True, rejected)
