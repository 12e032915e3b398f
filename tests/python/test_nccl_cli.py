"""`tide nccl install`: what it unpacks, where, and what it says about other files."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from tide import _core
from tide.cli import app
from typer.testing import CliRunner


def _wheel(path: Path, member: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, b"a library")
    return path


def test_installs_the_library_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TIDE_NCCL_LIBRARY", raising=False)
    wheel = _wheel(tmp_path / "nccl.whl", "nvidia/nccl/lib/libnccl.so.2")
    result = CliRunner().invoke(app, ["nccl", "install", "--wheel", str(wheel)])
    assert result.exit_code == 0, result.output
    library = tmp_path / "cache" / "nccl" / "libnccl.so.2"
    assert library.read_bytes() == b"a library"
    assert [path.name for path in library.parent.iterdir()] == ["libnccl.so.2"]
    # The core looks there, and says what is wrong with it.
    found = _core.nccl()
    assert found["library"] == str(library)
    assert found["description"] == ""
    assert found["reason"]


def test_installs_nothing_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_CACHE", str(tmp_path))
    wheel = _wheel(tmp_path / "nccl.whl", "nvidia/nccl/lib/libnccl.so.2")
    arguments = ["nccl", "install", "--missing", "--wheel", str(wheel)]
    monkeypatch.setattr(_core, "nccl", lambda: {"reason": ""})
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert not (tmp_path / "nccl").exists()
    monkeypatch.setattr(_core, "nccl", lambda: {"reason": "expected NCCL 2.31.2 or newer"})
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert (tmp_path / "nccl" / "libnccl.so.2").is_file()


@pytest.mark.parametrize("content", ["another wheel", "no wheel"])
def test_refuses_other_files(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_CACHE", str(tmp_path / "cache"))
    wheel = tmp_path / "x.whl"
    if content == "another wheel":
        _wheel(wheel, "torch/lib.so")
    else:
        wheel.write_bytes(b"text")
    result = CliRunner().invoke(app, ["nccl", "install", "--wheel", str(wheel)])
    assert result.exit_code == 1
    assert "expected a wheel of nvidia-nccl-cu13>=2.31.2" in result.output
    assert not list((tmp_path / "cache" / "nccl").glob("*"))


def test_a_named_library_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_NCCL_LIBRARY", str(tmp_path / "libnccl.so.2"))
    found = _core.nccl()
    assert found["library"] == str(tmp_path / "libnccl.so.2")
    # A build without the fabric can only say that; any other says how to get a library.
    built = not found["reason"].startswith("this build has no nccl fabric")
    assert not built or "tide nccl install" in found["reason"]
