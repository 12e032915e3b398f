"""TIDE: collectives for PyTorch FSDP2 that know its layout.

What a training script adds:

    import tide
    fully_shard(...)               # as before
    handle = tide.enable(model)    # after fully_shard, on every rank
    print(handle.report())
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

try:
    from tide._core import Error
except ModuleNotFoundError:
    _NOT_BUILT = "tide._core is not built: run make"
    # Imported for a command, `tide ...` or `python -m tide...`: nobody wants a traceback.
    if sys.argv[0] == "-m" or os.path.basename(sys.argv[0]) == "tide":
        sys.exit(f"tide: {_NOT_BUILT}")
    raise ImportError(_NOT_BUILT) from None

if TYPE_CHECKING:
    import torch.nn as nn

    from tide.fsdp.handle import Handle

__version__ = "0.1.0"
__all__ = ["Error", "__version__", "disable", "enable"]

_COLLECTIVES = ("all_gather", "reduce_scatter")


def enable(
    model: nn.Module,
    mode: str = "auto",
    strict: bool = False,
    collectives: str | Sequence[str] = _COLLECTIVES,
    timeout: float | None = None,
    nodes: int | None = None,
) -> Handle:
    """Runs the collectives of every ``fully_shard`` group inside ``model`` through TIDE.

    Collective: every rank calls it at the same point of the program, before or after the first
    step. Groups that TIDE cannot serve stay on torch's path, with the reason in the report.

    On a kind of GPU that has not been calibrated the first call measures for about a second and
    keeps the result in a file (``tide calibrate``; TIDE_CALIBRATE=off).

    Args:
        model: the module that ``fully_shard`` was applied to, or one that contains such modules.
        mode: "auto", "in_place" (gradients are read where autograd left them) or "slot_reuse".
        strict: raise instead of using torch's path.
        collectives: which of "all_gather" and "reduce_scatter" to take over.
        timeout: seconds before a wait for a peer fails; the process group's own by default.
        nodes: virtual nodes to split the ranks of one machine into, node-major; must divide the
            ranks of every process group of the model. TIDE_NODES, or one node, by default.

    Returns:
        A handle with ``report()``, ``counters`` and ``disable()``.

    Raises:
        tide.Error: "invalid_argument"; "mismatch" if ranks differ in models or options;
            "out_of_memory"; "unsupported" with strict; "internal" if something else failed on a
            rank, which the message names; "timeout" if a rank has not called it within ``timeout``
            and the process group's time limit. All ranks raise the same one.
    """
    from tide.fsdp.enable import enable_model
    from tide.fsdp.options import Options

    try:
        names = (collectives,) if isinstance(collectives, str) else tuple(collectives)
    except TypeError:
        names = (collectives,)  # which the check of the options refuses
    return enable_model(model, Options(mode, strict, names, timeout, nodes))


def disable(model: nn.Module) -> None:
    """Returns ``model`` to torch's own collectives. Parameters that TIDE filled stay valid.

    Every rank calls it at the same point of the program.

    Raises:
        tide.Error: "invalid_argument" if the model is not enabled.
    """
    from tide.fsdp.enable import disable_model

    disable_model(model)
