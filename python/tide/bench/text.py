"""Real text that every Python installation carries: the standard library's own sources."""

from __future__ import annotations

import sysconfig
from pathlib import Path

MIN_BYTES = 10**7
_MAX_BYTES = 2**24
_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__"})


def load_text(folder: Path | None = None, minimum_bytes: int = MIN_BYTES) -> bytes:
    """Concatenates the .py files under `folder` in the order of their relative paths.

    Args:
      folder: by default the standard library of the running Python.
      minimum_bytes: what a useful corpus needs; reading stops at 16 MiB.

    Raises:
      RuntimeError: less text than `minimum_bytes`, with what was found.
    """
    root = folder if folder is not None else Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not _SKIPPED.intersection(path.relative_to(root).parts)
    )
    text = bytearray()
    for path in files:
        text += path.read_bytes()
        if len(text) >= _MAX_BYTES:
            break
    if len(text) < minimum_bytes:
        raise RuntimeError(
            f"expected at least {minimum_bytes} bytes of Python sources to train on, found "
            f"{len(text)} bytes in {len(files)} files under {root}: use a Python that comes with "
            "its standard library as .py files (a full CPython installation does)"
        )
    return bytes(text[:_MAX_BYTES])
