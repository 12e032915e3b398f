"""Traces in the Chrome format, which ui.perfetto.dev and chrome://tracing show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Event = dict[str, Any]


def track(name: str, tid: int, pid: int = 0) -> Event:
    """Names a track; tracks of one pid stand together."""
    named = {"name": name}
    return {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": named}


def process(name: str, pid: int) -> Event:
    """Names what the tracks of one pid have in common."""
    return {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}


def span(name: str, category: str, tid: int, start_s: float, end_s: float, pid: int = 0) -> Event:
    """One complete event."""
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": 1e6 * start_s,
        "dur": 1e6 * (end_s - start_s),
    }


def document(events: Sequence[Event]) -> dict[str, Any]:
    """What the file holds."""
    return {"traceEvents": list(events), "displayTimeUnit": "ms"}
