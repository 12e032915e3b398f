"""The TIDE_* variables that the adapter obeys; `tide info` lists them all."""

from __future__ import annotations

import math
import os

_NUMBERS = ("TIDE_TIMEOUT", "TIDE_STAGING_SLOT")


def number(name: str) -> float | None:
    """Returns the value of a variable, or None if it is not set.

    Raises:
        ValueError: it is no positive number.
    """
    text = os.environ.get(name)
    if not text:
        return None
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(text)
    return value


def problem() -> str | None:
    """Returns what is wrong with the environment, or None."""
    for name in _NUMBERS:
        try:
            number(name)
        except ValueError:
            return f"{name} must be a positive number, not {os.environ[name]!r}"
    return None


def signature() -> dict[str, str | None]:
    """Returns what ranks must have in common."""
    return {name: os.environ.get(name) for name in _NUMBERS}
