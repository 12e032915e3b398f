"""Records the collective calls of FSDP2, and samples memory inside them.

The same outermost wrapper serves stock FSDP2 and TIDE, so both are measured by the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tide.stats import now

# Those in which a rank needs the others; the copy-out between them is its own affair.
COLLECTIVES = ("foreach_all_gather", "foreach_reduce")
NAMES = (*COLLECTIVES, "foreach_all_gather_copy_out")


class Call(NamedTuple):
    """One call of one of NAMES; CLOCK_MONOTONIC seconds."""

    name: str
    start: float
    end: float


class CallRecorder:
    """Wraps the names that FSDP2's parameter groups look up. Install it after TIDE."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.after_reduce: Callable[[], None] | None = None

    def install(self) -> None:
        """Puts the wrappers on. They stay outermost as long as nobody patches later."""
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as target

        for name in NAMES:
            setattr(target, name, self._wrapped(name, getattr(target, name)))

    def take(self) -> list[Call]:
        """Returns the calls since the last `take`."""
        calls, self.calls = self.calls, []
        return calls

    def _wrapped(self, name: str, original: Any) -> Any:
        reduces = name == "foreach_reduce"

        def call(*args: Any, **kwargs: Any) -> Any:
            start = now()
            result = original(*args, **kwargs)
            self.calls.append(Call(name, start, now()))
            # Sampled while the result still holds the buffers of the reduction.
            if reduces and self.after_reduce is not None:
                self.after_reduce()
            return result

        return call


def pss_bytes() -> int:
    """Proportional set size of this process: summed over processes, shared pages count once."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/smaps_rollup has no Pss line; this needs Linux 4.14 or newer")
