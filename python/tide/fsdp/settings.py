"""The TIDE_* variables as the core reads them; `tide info` lists them all."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from tide import _core
from tide.fsdp.errors import make_error


def _rows() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in _core.config()}


def number(name: str) -> float | None:
    """Returns the value of a variable, or None if it is not set.

    Raises:
        tide.Error: "invalid_argument" if it is no positive number.
    """
    row = _rows()[name]
    if row["problem"]:
        raise make_error("invalid_argument", row["problem"])
    return row["number"]


def text(name: str) -> str | None:
    """Returns the value of a variable, or None if it is not set."""
    row = _rows()[name]
    return row["value"] if row["source"] == "environment" else None


def cache_folder() -> Path:
    """Returns where TIDE keeps what it can make again; src/run/config.cc looks there, too."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(text("TIDE_CACHE") or home / "tide")


def problem() -> str | None:
    """Returns what is wrong with the environment, or None."""
    return next((row["problem"] for row in _rows().values() if row["problem"]), None)


def signature() -> dict[str, str | None]:
    """Returns what ranks must have in common."""
    return {name: text(name) for name, row in _rows().items() if row["common"]}


def warn_of_unknown() -> None:
    """Warns of TIDE_* variables that TIDE does not know, a misspelt one say."""
    for warning in _core.warnings():
        warnings.warn(f"tide: {warning}", stacklevel=2)
