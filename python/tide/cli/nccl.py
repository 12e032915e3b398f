"""`tide nccl install`: a private copy of NCCL for the collectives on GPUs.

torch pins an older NCCL than TIDE needs, so TIDE loads its own beside it: the library of the
`nvidia-nccl-cu13` package, unpacked into TIDE's folder. src/run/config.cc finds it there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated

import typer

from tide import _core
from tide.bench.terminal import make_console
from tide.fsdp import settings

REQUIREMENT = "nvidia-nccl-cu13>=2.31.2"
_LIBRARY = "nvidia/nccl/lib/libnccl.so.2"

nccl = typer.Typer(no_args_is_help=True, help="The private copy of NCCL that GPUs need.")


def folder() -> Path:
    """Returns where the copy is kept."""
    return settings.cache_folder() / "nccl"


def _download(target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(target), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(target.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = done.stderr.strip().splitlines() or ["no wheel came"]
        raise OSError(f"pip could not download {REQUIREMENT}: {lines[-1]}")
    return wheels[0]


def unpack(wheel: Path, target: Path) -> Path:
    """Puts the library of a wheel into the folder and returns its path.

    Raises:
        OSError: the wheel can't be read or has no library.
    """
    target.mkdir(parents=True, exist_ok=True)
    library = target / "libnccl.so.2"
    # Under its name only when whole: other processes may be looking for it.
    part = target / f".libnccl.so.2.{os.getpid()}"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_LIBRARY) as source,
            part.open("wb") as copy,
        ):
            shutil.copyfileobj(source, copy)
        part.replace(library)
    except (KeyError, zipfile.BadZipFile) as error:
        raise OSError(f"expected a wheel of {REQUIREMENT} with {_LIBRARY}, got {wheel}") from error
    finally:
        part.unlink(missing_ok=True)
    return library


@nccl.command()
def install(
    wheel: Annotated[
        Path | None, typer.Option(help="use this wheel of nvidia-nccl-cu13, download nothing")
    ] = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="do nothing if TIDE finds a usable NCCL")
    ] = False,
) -> None:
    """Downloads NCCL (about 300 MB) into TIDE's folder."""
    console = make_console(stderr=True)
    if missing and not _core.nccl()["reason"]:
        return
    try:
        with tempfile.TemporaryDirectory() as downloads:
            if wheel is None:
                console.print(f"downloading {REQUIREMENT} ...")
                wheel = _download(Path(downloads))
            library = unpack(wheel, folder())
    except OSError as error:
        console.print(f"[red]tide nccl install:[/red] {error}", highlight=False)
        raise typer.Exit(1) from None
    console.print(f"installed {library}", highlight=False)
