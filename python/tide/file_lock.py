"""A lock that processes of one host take in turn, with a deadline."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.02


@contextmanager
def locked(path: Path, limit: float, advice: str) -> Iterator[None]:
    """Holds the lock file at ``path``, which is made if there is none.

    Args:
        path: of the lock file; it stays.
        limit: seconds after which whoever holds it is taken to hang.
        advice: what else the user can do then, besides ending that process.

    Raises:
        TimeoutError: another process has held it for ``limit`` seconds.
    """
    deadline = time.monotonic() + limit
    with open(path, "a", encoding="ascii") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process has held {lock.name} for {limit:g} s; end it, or {advice}"
                    ) from None
                time.sleep(_POLL_S)
        yield
