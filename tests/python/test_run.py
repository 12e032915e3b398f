"""`python -m tide.run`: a training script that knows nothing of TIDE."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
assert __name__ == "__main__" and sys.argv[1:] == ["--steps", "2"], sys.argv
torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
for _ in range(2):
    model(torch.randn(2, 4)).sum().backward()
"""
_LATER_FALLBACK = """
model[0].unshard(async_op=True).wait()
"""
_END = """
dist.destroy_process_group()
"""
# What is registered for the exit runs, but the process ends before torch is torn down: after an
# asynchronous all-gather over gloo that aborts now and then ("terminate called without an active
# exception").
_END_AFTER_ASYNC = """
import atexit, os
dist.barrier()
atexit._run_exitfuncs()
os._exit(0)
"""


def _run_script(folder: Path, source: str, *options: str) -> str:
    """Runs a script on 2 ranks under tide.run and returns what it wrote to stderr."""
    script = folder / "train.py"
    script.write_text(source, encoding="ascii")
    python = Path(__file__).resolve().parents[2] / "python"
    environment = {**os.environ, "PYTHONPATH": str(python), "OMP_NUM_THREADS": "1"}
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", *launcher, "-m", "tide.run", *options, str(script)]
    done = subprocess.run(
        [*command, "--steps", "2"], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_run_wants_a_script(tmp_path: Path) -> None:
    missing = str(tmp_path / "no.py")
    done = subprocess.run(
        [sys.executable, "-m", "tide.run", missing], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (
        1,
        f"tide.run: expected a script, found no file {missing!r}\n",
    )


def test_run_enables_a_script(tmp_path: Path) -> None:
    written = _run_script(tmp_path, _SCRIPT + _END, "--strict")
    assert written.count("TIDE, 2 ranks") == 1
    assert "(root)" in written


def test_run_reports_again_what_fell_back_later(tmp_path: Path) -> None:
    written = _run_script(tmp_path, _SCRIPT + _LATER_FALLBACK + _END_AFTER_ASYNC)
    first, second = written.split("TIDE, 2 ranks")[1:]
    assert "asynchronous unshard" not in first
    assert "some calls of all_gather: asynchronous unshard" in second


def _run_alone(
    folder: Path, source: str, *options: str, rank: str | None = None
) -> tuple[int, str]:
    """Exit status and stderr of a script under tide.run, without a launcher."""
    script = folder / "plain.py"
    script.write_text(source, encoding="ascii")
    python = Path(__file__).resolve().parents[2] / "python"
    environment = {**os.environ, "PYTHONPATH": str(python), "OMP_NUM_THREADS": "1"}
    environment.pop("RANK", None)
    if rank is not None:
        environment["RANK"] = rank
    command = [sys.executable, "-m", "tide.run", *options, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    return done.returncode, done.stderr


def test_run_says_that_there_was_no_root(tmp_path: Path) -> None:
    said = (
        f"tide.run: {tmp_path / 'plain.py'} ran no forward of a fully_shard model; "
        "TIDE did nothing\n"
    )
    assert _run_alone(tmp_path, "x = 1\n") == (0, said)
    assert _run_alone(tmp_path, "import sys; sys.exit()\n", "--strict") == (1, said)
    assert _run_alone(tmp_path, "x = 1\n", "--strict", rank="1") == (1, "")
    assert _run_alone(tmp_path, "import sys; sys.exit(3)\n", "--strict") == (3, "")
