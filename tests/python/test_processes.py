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


def test_memory_limit_is_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_MEMORY_LIMIT", str(100 << 20))
    dense, experts = (_core.Communicator(0, 1, lambda mine: [mine], LIMIT_S) for _ in range(2))
    landing = dense.add_segment(64 << 20, "landing")
    expected = "needs 64 MiB .* 36.* MiB is available .* 100 MiB, of which 64.* MiB is reserved"
    with pytest.raises(_core.Error, match=expected):
        experts.add_segment(64 << 20, "landing")
    del landing
    dense.close()
    experts.add_segment(64 << 20, "landing")
    experts.close()


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


def _hold_shared_memory(comm: Any, pipe: Connection) -> None:
    comm.add_segment(512 << 20, "landing", _core.SegmentKind.NODE_SHARED)
    pipe.send("running")
    time.sleep(LIMIT_S)


@pytest.mark.parametrize("body", [_hold_memory, _hold_shared_memory])
def test_nothing_is_left_after_sigkill(tmp_path: Path, body: Any) -> None:
    before = _shared_kib()
    processes, pipes = _start(body, 2, tmp_path)
    _wait_until_running(pipes)
    assert _shared_kib() > before + (400 << 10)
    names = set(os.listdir("/dev/shm"))
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        process.join(LIMIT_S)
    assert _shared_kib() < before + (100 << 10)
    assert not [name for name in names if "tide" in name]


SHARED_BYTES = 32 << 20


def _gather_shared(comm: Any, value: int) -> Any:
    """Returns a node-shared segment that rank r has filled its part of with ``value + r``."""
    segment = comm.add_segment(SHARED_BYTES, "landing", _core.SegmentKind.NODE_SHARED)
    group = comm.register_group("g", [("p", SHARED_BYTES, 1, _core.U8)])
    shard = bytes([value + comm.rank]) * (SHARED_BYTES // comm.world)
    address = ctypes.cast(ctypes.c_char_p(shard), ctypes.c_void_p).value
    comm.all_gather(group, [address], [_core.U8], segment.id, 0)
    return segment


def _landing_pss_kib() -> int:
    """Proportional set size of this process's mappings of landings."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            inside = "memfd:tide:landing" in line
        elif inside and fields[0] == "Pss:":
            total += int(fields[1])
    return total


def _report_landing_memory(comm: Any, pipe: Connection) -> None:
    segment = _gather_shared(comm, 1)
    if comm.rank == 0:
        ctypes.memset(segment.address, 9, 1 << 20)  # 1 MiB becomes this rank's own
    values = set(ctypes.string_at(segment.address, segment.bytes))
    assert values == {*range(1, comm.world + 1), *([9] if comm.rank == 0 else [])}
    comm.barrier()
    pipe.send((segment.kind == _core.SegmentKind.NODE_SHARED, _landing_pss_kib()))
    comm.barrier()


def test_shared_landing_is_in_memory_once(tmp_path: Path) -> None:
    _, pipes = _start(_report_landing_memory, 4, tmp_path)
    answers = [_answer(pipe) for pipe in pipes]
    assert [_answer(pipe)[0] for pipe in pipes] == ["ok"] * 4
    if not all(shared for shared, _ in answers):
        pytest.skip("this system cannot share landings")
    total = sum(kib for _, kib in answers)
    assert abs(total - ((SHARED_BYTES + (1 << 20)) >> 10)) < 1 << 10


def _fork_a_reader(comm: Any, pipe: Connection) -> None:
    """A child, such as a worker of a DataLoader, sees what its parent sees; its changes are its."""
    segment = _gather_shared(comm, 1)
    last = segment.bytes - 1
    view = (ctypes.c_char * segment.bytes).from_address(segment.address)
    mine = bytes([100 + comm.rank])
    view[0] = mine
    child = os.fork()
    if child == 0:
        seen = view[0] == mine and view[last] == bytes([comm.world])
        view[0] = view[last] = b"\xff"
        os._exit(0 if seen else 1)
    _, status = os.waitpid(child, 0)
    comm.barrier()
    assert os.waitstatus_to_exitcode(status) == 0
    pipe.send((view[0], view[last]))
    comm.barrier()


def test_forked_child_reads_the_landing(tmp_path: Path) -> None:
    _, pipes = _start(_fork_a_reader, 2, tmp_path)
    for rank, pipe in enumerate(pipes):
        assert _answer(pipe) == (bytes([100 + rank]), b"\x02")
        assert _answer(pipe)[0] == "ok"


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


def _fork_and_go_on(comm: Any, pipe: Connection) -> None:
    comm.barrier()
    child = os.fork()
    if child == 0:
        signal.alarm(int(LIMIT_S))
        comm.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    comm.barrier()  # neither this rank nor its peers have lost it


def test_a_forked_child_ends_nothing(tmp_path: Path) -> None:
    processes, pipes = _start(_fork_and_go_on, 2, tmp_path)
    for pipe in pipes:
        assert _answer(pipe)[0] == "ok"
    for process in processes:
        process.join(LIMIT_S)
