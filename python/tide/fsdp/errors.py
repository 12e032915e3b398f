"""Construction of ``tide.Error`` from Python."""

from __future__ import annotations

from tide._core import Error


def make_error(code: str, message: str, rank: int = -1, group: str = "", operation: str = ""):
    """Returns a ``tide.Error`` with its attributes set; the caller raises it."""
    error = Error(message)
    error.code, error.rank, error.peer = code, rank, -1
    error.group, error.operation = group, operation
    return error
