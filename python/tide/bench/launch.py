"""Runs a function on N local processes joined by a gloo process group.

    results = launch(worker, ranks=4, config=cfg, on_progress=print)

`worker(ctx, config)` runs on every rank with `torch.distributed` initialised; its return value is
sent back. The first rank that fails ends all of them, and so does Ctrl-C.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tide._core import format_bytes

_PR_SET_PDEATHSIG = 1
_JOIN_SECONDS = 10.0
_STORE = "store"
_CONFIG = "config.pickle"


class LaunchError(RuntimeError):
    """A rank failed; the message holds the rank and its error."""


@dataclass
class Context:
    """What a worker knows about its place. `progress` reaches the parent's `on_progress`."""

    rank: int
    world: int
    pipe: Any

    def progress(self, payload: Any) -> None:
        """Sends one picklable payload to the parent; meant for rank 0."""
        self.pipe.send(("progress", payload))


def _die_with_parent() -> None:
    """Asks Linux to end this process when its parent ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _entry(
    worker: Callable[[Context, Any], Any], rank: int, world: int, folder: Path, pipe: Any
) -> None:
    _die_with_parent()
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        store = f"file://{folder / _STORE}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        config = pickle.loads((folder / _CONFIG).read_bytes())
        result = worker(Context(rank, world, pipe), config)
        # Nobody tears down connections while a sibling still talks.
        dist.barrier()
        pipe.send(("result", result))
        dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001 - the parent decides what to show
        pipe.send(("error", (f"{type(error).__name__}: {error}", traceback.format_exc())))
        os._exit(1)


@contextlib.contextmanager
def _child_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """One thread a rank, loopback for gloo, Ctrl-C left to the parent: for what starts inside."""
    wanted = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    in_main_thread = threading.current_thread() is threading.main_thread()
    # A disposition of "ignore" survives exec, so no child prints its own KeyboardInterrupt.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main_thread else None
    try:
        yield
    finally:
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _start(
    worker: Callable[[Context, Any], Any], ranks: int, folder: Path, variables: Mapping[str, str]
) -> tuple:
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    with _child_environment(variables):
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_entry, args=(worker, rank, ranks, folder, theirs), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
    return processes, pipes


def _stop(processes: list) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join(_JOIN_SECONDS)


def _collect(processes: list, pipes: list, on_progress: Callable[[Any], None] | None) -> list:
    """Reads messages until every rank delivered. Raises LaunchError for the first error."""
    results: dict[int, Any] = {}
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    while open_pipes:
        for pipe in connection.wait(list(open_pipes)):
            rank = open_pipes[pipe]
            try:
                kind, payload = pipe.recv()
            except EOFError:
                if rank not in results:
                    processes[rank].join(_JOIN_SECONDS)
                    raise LaunchError(
                        f"rank {rank} ended with exit status {processes[rank].exitcode} before it "
                        "delivered a result (a negative status is a signal; -9 is often the "
                        "kernel's answer to a lack of memory: try fewer ranks or a smaller model)"
                    ) from None
                del open_pipes[pipe]
                continue
            if kind == "progress":
                if on_progress is not None:
                    on_progress(payload)
            elif kind == "result":
                results[rank] = payload
            else:
                summary, trace = payload
                raise LaunchError(f"rank {rank} failed: {summary}\n\n{trace}")
    return [results[rank] for rank in range(len(pipes))]


def launch(
    worker: Callable[[Context, Any], Any],
    ranks: int,
    config: Any = None,
    on_progress: Callable[[Any], None] | None = None,
    variables: Mapping[str, str] | None = None,
) -> list[Any]:
    """Runs `worker` on `ranks` new processes and returns their results in rank order.

    Args:
      worker: a module-level function `(Context, config) -> picklable`.
      ranks: number of processes, at least 1.
      config: picklable, the same for every rank.
      on_progress: called in this process with what `Context.progress` sent.
      variables: environment variables that the new processes get beside this one's.

    Raises:
      LaunchError: the first error of any rank. No process is left behind.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    with tempfile.TemporaryDirectory(prefix="tide-") as name:
        folder = Path(name)
        # Not an argument of the process: `start` blocks until a child has read its arguments once
        # they exceed a pipe, for ever if the child died before.
        (folder / _CONFIG).write_bytes(pickle.dumps(config))
        processes, pipes = _start(worker, ranks, folder, variables or {})
        try:
            return _collect(processes, pipes, on_progress)
        finally:
            _stop(processes)


def check_output(file: Path | None, option: str = "--json") -> None:
    """Raises ValueError, before anything is measured, if the file can't be written."""
    if file is None:
        return
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{option}: expected an existing folder, got {file.parent}")
    if file.is_dir():
        raise ValueError(f"{option}: expected a file, got the folder {file}")


def available_bytes() -> int | None:
    """Memory that new processes can use (MemAvailable), or None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def require_memory(needed_bytes: int, what: str) -> None:
    """Raises LaunchError if the machine has less than `needed_bytes` available."""
    have = available_bytes()
    if have is not None and have < needed_bytes:
        raise LaunchError(
            f"{what} needs about {format_bytes(needed_bytes)} of memory, {format_bytes(have)} "
            "is available: use fewer ranks or a smaller model"
        )
