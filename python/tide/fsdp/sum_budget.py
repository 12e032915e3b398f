"""How many CTAs a sum takes on a GPU: an option, a calibration of the GPU, or the default rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tide import _core
from tide.calibration import gpu as gpus
from tide.calibration import measure, store
from tide.fsdp import settings

_NEEDED_BYTES = 2 << 30  # about twice what measuring takes


@dataclass(frozen=True)
class SumBudget:
    """The CTAs of a sum on this rank; results don't depend on them, ranks may differ.

    Attributes:
        ctas: 0 leaves them to the core: its option, or the default rule.
        note: how many, and from where; empty on CPUs.
    """

    ctas: int = 0
    note: str = ""


def _default(multiprocessors: int, why: str) -> SumBudget:
    ctas = _core.default_sum_ctas(multiprocessors)
    return SumBudget(
        0,
        f"a sum takes {ctas} CTAs, the default rule: a quarter of {multiprocessors} "
        f"multiprocessors ({why})",
    )


def _calibrated(gpu: gpus.Gpu, nodes: int, local_ranks: int, grad_bytes: int) -> SumBudget:
    if reason := gpus.missing():
        raise RuntimeError(reason)

    def measured() -> dict[str, object]:
        free, _ = torch.cuda.mem_get_info(gpu.device)
        if free < _NEEDED_BYTES:
            raise RuntimeError(
                f"expected {_NEEDED_BYTES >> 20} MiB of free memory, got {free >> 20}"
            )
        # No link: that would leave a context on another rank's GPU.
        return measure.measure_machine(gpu, measure.QUICK_ROUNDS, link=False)

    found = store.load_or_measure(gpu, measured, nodes, local_ranks)
    ctas, why = store.choose(found.text, nodes, local_ranks, grad_bytes)
    if not found.measured:
        how = f"calibrated in {found.path}"
    elif found.path is None:
        how = f"measured now, kept nowhere ({found.unwritten})"
    else:
        how = f"measured now, kept in {found.path}"
        how += f", since the file there was not valid ({found.rejected})" if found.rejected else ""
    return SumBudget(ctas, f"a sum takes {ctas} CTAs, {how}: {why}")


def sum_budget(
    device: torch.device, world: int, nodes: int | None, grad_bytes: int = store.BF16_BYTES
) -> SumBudget:
    """Returns the budget of a communicator that is about to be made.

    Measures the GPU if that has not been done: about a second, by one process of the machine.

    Args:
        device: where sums run.
        world: ranks of the communicator.
        nodes: virtual nodes; the environment's if None.
        grad_bytes: of an element of a gradient.
    """
    if device.type != "cuda":
        return SumBudget()
    if option := settings.number("TIDE_SUM_CTAS"):
        return SumBudget(0, f"a sum takes {option:g} CTAs (TIDE_SUM_CTAS)")
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    if settings.text("TIDE_CALIBRATE") == "off":
        return _default(multiprocessors, "TIDE_CALIBRATE=off")
    if torch.cuda.is_current_stream_capturing():
        return _default(multiprocessors, "nothing is measured while a graph is captured")
    of_nodes = int(nodes or settings.number("TIDE_NODES") or 1)
    try:
        gpu = gpus.describe(device)
        return _calibrated(gpu, of_nodes, max(1, world // of_nodes), grad_bytes)
    except Exception as error:  # no calibration is no reason not to train
        why = f"calibrating failed: {type(error).__name__}: {error}"
        return _default(multiprocessors, why)
