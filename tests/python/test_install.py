"""`cmake --install`, and a project outside of the tree that builds and runs against it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_a_project_builds_against_the_install(tmp_path: Path) -> None:
    installed, moved, source = (tmp_path / name for name in ("installed", "moved", "source"))
    _run("cmake", "--install", ROOT / os.environ.get("BUILD", "build"), "--prefix", installed)
    files = [path.relative_to(installed).as_posix() for path in installed.rglob("*")]
    assert "include/tide/communicator.h" in files
    assert not [name for name in files if name.endswith(".so") or name.startswith("tide/")]
    # Neither the checkout nor the place of the installation is needed later.
    installed.rename(moved)
    assert str(ROOT) not in "".join(path.read_text() for path in moved.rglob("*.cmake"))
    shutil.copytree(ROOT / "examples" / "cpp", source)
    build = tmp_path / "build"
    _run("cmake", "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={moved}")
    _run("cmake", "--build", build)
    assert _run(build / "all_gather") == "4 ranks gathered 2 parameters\n"
