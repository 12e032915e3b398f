"""Ranks as processes, killed, stopped or short of memory: what the others hear, what is left."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from tide import _core

LIMIT_S = 60.0


def _exchange(folder: str, rank: int, world: int) -> Callable[[bytes], list[bytes]]:
    """An all-gather of bytes over files: all that a communicator needs to start."""
    step = 0

    def all_gather(mine: bytes) -> list[bytes]:
        nonlocal step
        step += 1
        part = Path(folder, f"{step}.{rank}.part")
        part.write_bytes(mine)
        part.rename(part.with_suffix(""))
        end = time.monotonic() + LIMIT_S
        paths = [Path(folder, f"{step}.{peer}") for peer in range(world)]
        while not all(path.exists() for path in paths):
            assert time.monotonic() < end, "a rank did not start"
            time.sleep(0.001)
        return [path.read_bytes() for path in paths]

    return all_gather


def _rank(body: Any, folder: str, rank: int, world: int, timeout: float, pipe: Connection) -> None:
    started = time.monotonic()
    try:
        comm = _core.Communicator(rank, world, _exchange(folder, rank, world), timeout)
        started = time.monotonic()
        body(comm, pipe)
        pipe.send(("ok", "", -1, 0.0))
    except _core.Error as error:
        pipe.send((error.code, str(error), error.peer, time.monotonic() - started))
    os._exit(0)


def _start(
    body: Any, world: int, folder: Path, timeout: float = 30.0
) -> tuple[list[Any], list[Connection]]:
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_rank, args=(body, str(folder), rank, world, timeout, theirs), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    return processes, pipes


def _answer(pipe: Connection) -> Any:
    assert pipe.poll(LIMIT_S), "a rank hangs"
    return pipe.recv()


def _endless_barriers(comm: Any, pipe: Connection) -> None:
    comm.barrier()
    pipe.send("running")
    while True:
        comm.barrier()


def _wait_until_running(pipes: list[Connection]) -> None:
    for pipe in pipes:
        assert _answer(pipe) == "running"


def test_killed_rank_is_named_at_once(tmp_path: Path) -> None:
    processes, pipes = _start(_endless_barriers, 4, tmp_path, timeout=LIMIT_S)
    _wait_until_running(pipes)
    os.kill(processes[2].pid, signal.SIGKILL)
    for rank in (0, 1, 3):
        code, text, peer, _ = _answer(pipes[rank])
        assert (code, peer) == ("peer_dead", 2), text
        assert "rank 2 has exited" in text and "barrier" in text
    for process in processes:
        process.join(LIMIT_S)
        assert process.exitcode is not None


def test_stopped_rank_is_named_after_the_deadline(tmp_path: Path) -> None:
    processes, pipes = _start(_endless_barriers, 3, tmp_path, timeout=1.0)
    _wait_until_running(pipes)
    os.kill(processes[1].pid, signal.SIGSTOP)
    for rank in (0, 2):
        code, text, peer, _ = _answer(pipes[rank])
        assert (code, peer) == ("timeout", 1), text
        assert "for rank 1's" in text
    processes[1].kill()


def _reserve(comm: Any, pipe: Connection) -> None:
    comm.add_segment(64 << 20, "landing of 'layers.0'")


def test_memory_limit_is_an_error_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDE_MEMORY_LIMIT", str(100 << 20))
    _, pipes = _start(_reserve, 2, tmp_path)
    answers = [_answer(pipe) for pipe in pipes]
    assert answers[0][:2] == answers[1][:2]
    code, text = answers[0][:2]
    assert code == "out_of_memory"
    assert "64 MiB on each of 2 ranks" in text and "TIDE_MEMORY_LIMIT" in text


def test_small_amounts_of_memory_have_a_small_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_MEMORY_LIMIT", "1000")
    with pytest.raises(_core.Error, match="control page needs .* KiB .* only 1000 B is available"):
        _core.Communicator(0, 1, lambda mine: [mine], 1.0)


def _shared_kib() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1])
    raise AssertionError("no Shmem in /proc/meminfo")


def _hold_memory(comm: Any, pipe: Connection) -> None:
    segment = comm.add_segment(256 << 20, "landing")
    ctypes.memset(segment.address, 1, segment.bytes)
    pipe.send("running")
    time.sleep(LIMIT_S)


def test_nothing_is_left_after_sigkill(tmp_path: Path) -> None:
    before = _shared_kib()
    processes, pipes = _start(_hold_memory, 2, tmp_path)
    _wait_until_running(pipes)
    assert _shared_kib() > before + (400 << 10)
    names = set(os.listdir("/dev/shm"))
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        process.join(LIMIT_S)
    assert _shared_kib() < before + (100 << 10)
    assert not [name for name in names if "tide" in name]


def test_a_failed_set_up_leaves_no_thread_waiting(tmp_path: Path) -> None:
    with pytest.raises(_core.Error, match="one entry a rank"):
        _core.Communicator(0, 2, lambda mine: [mine], 1.0)


def _wait_for_the_sleeper(comm: Any, pipe: Connection) -> None:
    pipe.send("running")
    if comm.rank == 1:
        time.sleep(LIMIT_S)
    try:
        comm.barrier()
    except KeyboardInterrupt:
        pipe.send("interrupted")


def test_ctrl_c_ends_a_wait_and_the_others_hear_of_it(tmp_path: Path) -> None:
    processes, pipes = _start(_wait_for_the_sleeper, 3, tmp_path, timeout=LIMIT_S)
    _wait_until_running(pipes)
    time.sleep(0.2)  # into the barrier; earlier the signal would hit the pipe
    os.kill(processes[0].pid, signal.SIGINT)
    assert _answer(pipes[0]) == "interrupted"
    code, text, peer, _ = _answer(pipes[2])
    assert (code, peer) == ("peer_dead", 0), text
    assert "rank 0 was interrupted in barrier" in text
    processes[1].kill()
