"""Groups of rank processes that stay up for many tests, since starting one costs seconds.

For example:

    def body(context, argument): ...           # in an importable module
    ranks = RankGroup(2); ranks.run(body, 3)   # raises in the parent if any rank raised
"""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

START_LIMIT_S = 120.0
DEADLINE_S = 60.0  # of the process group: shorter than a hang is patient, longer than any step


@dataclass(frozen=True)
class Context:
    """What a test body learns about its rank."""

    rank: int
    world: int


class RankFailure(AssertionError):
    """A rank raised, died or ran out of time."""


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    """Runs bodies named by the parent until it closes the pipe."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    deadline = datetime.timedelta(seconds=DEADLINE_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=deadline
    )
    pipe.send(None)
    while True:
        try:
            module, name, arguments = pipe.recv()
        except EOFError:
            break
        try:
            body = getattr(importlib.import_module(module), name)
            body(Context(rank, world), *arguments)
            dist.barrier()
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc(limit=-8))
    os._exit(0)


class RankGroup:
    """``world`` processes on this machine that share one gloo process group."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = os.path.join(tempfile.mkdtemp(prefix="ranks"), "store")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world, store, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._collect(START_LIMIT_S, "start")

    def _collect(self, limit_s: float, what: str) -> None:
        """Waits for one answer of each rank; stops all ranks if one is bad or missing."""
        import time

        end = time.monotonic() + limit_s
        waiting = dict(zip(self._pipes, range(self.world), strict=True))
        failures: dict[int, str] = {}
        while waiting and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                rank = waiting.pop(pipe)
                try:
                    answer = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(5)
                    answer = f"process died with exit code {self._processes[rank].exitcode}"
                if answer is not None:
                    failures[rank] = answer
                    end = min(end, time.monotonic() + 10)  # the others may hang now
        if not failures and not waiting:
            return
        self.stop()
        for rank in waiting.values():
            failures.setdefault(rank, f"no answer within {limit_s:.0f} s")
        texts = [f"--- rank {rank} ---\n{failures[rank]}" for rank in sorted(failures)]
        raise RankFailure(f"{what} failed on ranks {sorted(failures)}\n" + "\n".join(texts))

    def run(self, body: Callable[..., None], *arguments: Any, limit_s: float = 60.0) -> None:
        """Runs ``body(context, *arguments)`` on every rank.

        Raises:
            RankFailure: with the traceback of every rank that failed. The ranks are then replaced.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((body.__module__, body.__name__, arguments))
        self._collect(limit_s, f"{body.__name__}{arguments}")

    def stop(self) -> None:
        """Ends the processes; the next ``run`` starts new ones."""
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []


if __name__ == "__main__":
    sys.exit("spawn is a library of the tests")
