"""What the caller of ``tide.enable`` asked for."""

from __future__ import annotations

from dataclasses import dataclass

from tide.fsdp import settings
from tide.fsdp.group import COLLECTIVES

MODES = ("auto", "in_place", "slot_reuse")
_MOST_SECONDS = 1e9  # 31 years; the core counts nanoseconds in 64 bits


def _is_timeout(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value <= _MOST_SECONDS


def _is_one_of(value: object, words: tuple[str, ...]) -> bool:
    """Whether ``value`` is one of them; it may be what words can't be compared with."""
    return isinstance(value, str) and value in words


def _is_count(value: object) -> bool:
    """Whether the core can take ``value`` as a number of things: it fits into an int."""
    return type(value) is int and 0 < value < 2**31


@dataclass(frozen=True)
class Options:
    """What the caller of ``tide.enable`` asked for; see there."""

    mode: str = "auto"
    strict: bool = False
    collectives: tuple[str, ...] = COLLECTIVES
    timeout: float | None = None
    nodes: int | None = None

    def problem(self) -> str | None:
        """Returns what is wrong with the options, or None."""
        if not _is_one_of(self.mode, MODES):
            return f"mode must be one of {', '.join(MODES)}, not {self.mode!r}"
        if not isinstance(self.strict, bool):
            return f"strict must be True or False, not {self.strict!r}"
        known = all(_is_one_of(name, COLLECTIVES) for name in self.collectives)
        if not known or not self.collectives:
            wanted = ", ".join(COLLECTIVES)
            return f"collectives must be some of {wanted}, not {list(self.collectives)!r}"
        if self.timeout is not None and not _is_timeout(self.timeout):
            return (
                f"timeout must be a positive number of seconds, at most {_MOST_SECONDS:g}, "
                f"not {self.timeout!r}"
            )
        if self.nodes is not None and not _is_count(self.nodes):
            return f"nodes must be a positive whole number, not {self.nodes!r}"
        return settings.problem()

    def lane_mode(self) -> str:
        """Returns the mode that decides how deep the outbox is."""
        return "in_place" if self.mode == "auto" else self.mode
