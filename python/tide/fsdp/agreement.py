"""How ranks agree before anything collective begins: who is there, who failed, what differs."""

from __future__ import annotations

import json
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

from tide import Error
from tide.fsdp.errors import make_error

_DEFAULT_TIMEOUT_S = 1800.0


def _lost(process_group: dist.ProcessGroup, error: RuntimeError) -> Error:
    """What torch says when it loses a rank, with the ranks that it may be."""
    late = "timed out" in str(error).lower()
    what = "has not answered in time" if late else "has ended"
    ranks = ", ".join(map(str, dist.get_process_group_ranks(process_group)))
    return make_error(
        "timeout" if late else "peer_dead",
        f"one of ranks {ranks} {what} while they were setting TIDE up; look at what each of them "
        f"printed, and restart the job. torch says: {error}",
        dist.get_rank(),
    )


def exchange_objects(value: object, process_group: dist.ProcessGroup) -> list[Any]:
    """Returns the value of every rank of the process group, in rank order. Collective.

    Raises:
        tide.Error: "peer_dead" or "timeout", torch has lost a rank.
    """
    values: list[Any] = [None] * process_group.size()
    try:
        dist.all_gather_object(values, value, group=process_group)
    except RuntimeError as error:
        # Gloo's have no type of their own; a GPU that is out of memory has one.
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise
        raise _lost(process_group, error) from error
    return values


def group_timeout(process_group: dist.ProcessGroup, device: torch.device) -> float:
    """Returns the time limit in seconds of the process group's backend for ``device``."""
    try:
        backend = process_group._get_backend(device)
        return backend.options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return _DEFAULT_TIMEOUT_S


def first_difference(expected: Any, actual: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Returns (path, expected value, actual value) where two JSON values first differ."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in sorted(expected.keys() | actual.keys()):
            inner = f"{path}.{key}" if path else key
            if found := first_difference(expected.get(key), actual.get(key), inner):
                return found
        return None
    if isinstance(expected, list) and isinstance(actual, list):
        for i, (left, right) in enumerate(zip(expected, actual, strict=False)):
            if found := first_difference(left, right, f"{path}[{i}]"):
                return found
        if len(expected) != len(actual):
            return f"len({path})", len(expected), len(actual)
        return None
    return None if expected == actual else (path, expected, actual)


_LONGEST_PAUSE_S = 0.1
# The verdict on a round is of all ranks; it comes at once after whoever decides says so.
_VERDICT_S = 30.0
# The next round of each process group. Groups are made anew by all of their ranks.
_rounds: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class _Round:
    """One meeting of the ranks of a process group in torch's store.

    It ends once, for all of them: all have come, or the first one has given up. Whoever comes
    after that goes on to the next round.
    """

    def __init__(self, process_group: dist.ProcessGroup, store: dist.Store) -> None:
        self.ranks = dist.get_process_group_ranks(process_group)
        self._store = store
        # Disjoint groups may have one name.
        group = f"tide/enable/{process_group.group_name}/{self.ranks[0]}"
        number = _rounds.get(process_group, 0)
        while store.check([f"{group}/{number}/verdict"]):
            number += 1
        _rounds[process_group] = number + 1
        self._key = f"{group}/{number}"
        store.set(self._of(dist.get_rank()), "")
        if store.add(f"{self._key}/came", 1) == len(self.ranks):
            self.decide("all")

    def _of(self, rank: int) -> str:
        return f"{self._key}/{rank}"

    def decide(self, verdict: str) -> None:
        """Gives the verdict, "all" or "late", unless another rank has."""
        if self._store.add(f"{self._key}/decisions", 1) == 1:
            self._store.set(f"{self._key}/verdict", verdict)

    def verdict(self) -> str:
        """Returns what was decided; empty if nothing is."""
        name = f"{self._key}/verdict"
        return self._store.get(name).decode() if self._store.check([name]) else ""

    def missing(self) -> list[int]:
        """Returns the ranks that have not come."""
        return [rank for rank in self.ranks if not self._store.check([self._of(rank)])]

    def leave(self) -> None:
        """Forgets a round that all have come to; the last one that leaves removes it."""
        if self._store.add(f"{self._key}/left", 1) == len(self.ranks):
            names = ["came", "decisions", "verdict", "left", *map(str, self.ranks)]
            for name in names:
                self._store.delete_key(f"{self._key}/{name}")


def _wait(meeting: _Round, seconds: float) -> str:
    """Returns the verdict on a round; that of a rank which waits for longer is "late"."""
    pause, deadline = 0.001, time.monotonic() + seconds
    gave_up = False
    while not (verdict := meeting.verdict()):
        if time.monotonic() > deadline:
            if gave_up:
                return "late"  # whoever decided has died over it
            meeting.decide("late")
            gave_up, deadline = True, time.monotonic() + _VERDICT_S
        time.sleep(pause)  # the store's own wait can't be interrupted, and warns
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return verdict


def _meet(meeting: _Round, seconds: float) -> list[int] | None:
    """Returns None if all ranks have come to a round, else those that are missing in the end."""
    try:
        verdict = _wait(meeting, seconds)
    except dist.DistError:
        raise  # the store is gone
    except BaseException:
        meeting.decide("late")
        raise
    if verdict == "all":
        meeting.leave()
        return None
    return meeting.missing()


def await_ranks(process_group: dist.ProcessGroup, seconds: float) -> None:
    """Waits until all ranks of the process group have called this. Collective.

    Through torch's store, which tells who is missing; without one nobody waits here.

    Raises:
        tide.Error: "timeout", with the missing ranks, on all that have come: one of them has waited
            for ``seconds``, or was interrupted. "peer_dead": the rank with the store has ended.
    """
    try:
        store = dist.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):
        return
    try:
        missing = _meet(_Round(process_group, store), seconds)
    except dist.DistError as error:
        raise _lost(process_group, error) from error
    if missing is None:
        return
    who = f"{_names(missing)} to call" if missing else "ranks that came too late to"
    raise make_error(
        "timeout",
        f"waited {seconds:g} s, or another rank did, for {who} tide.enable: every rank calls it, "
        "and tide.disable, at the same point of the program",
        dist.get_rank(),
        operation="enable",
    )


def _names(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


# (code, message): why ranks cannot go on.
Failure = tuple[str, str]


def own_failure(failure: Failure) -> Failure:
    """Returns a failure of this rank as the others are to read it."""
    return failure[0], f"rank {dist.get_rank()}: {failure[1]}"


def share_failure(failure: Failure | None, process_group: dist.ProcessGroup) -> Failure | None:
    """Returns the failure of the first rank of the process group that has one. Collective."""
    return next((f for f in exchange_objects(failure, process_group) if f is not None), None)


def find_disagreement(
    signature: dict[str, Any], process_group: dist.ProcessGroup
) -> Failure | None:
    """Compares what every rank is about to enable; the same answer on all of them. Collective.

    Args:
        signature: JSON-like description of the model and the options on this rank.
        process_group: the ranks to compare.
    """
    # An option of a wrong type must not end this rank before the others hear of it.
    text = json.dumps(signature, sort_keys=True, default=repr)
    answers = exchange_objects(text, process_group)
    ranks = dist.get_process_group_ranks(process_group)
    expected = json.loads(answers[0])
    for rank, other in zip(ranks, answers, strict=True):
        if found := first_difference(expected, json.loads(other)):
            path, left, right = found
            return (
                "mismatch",
                "tide.enable expects the same model and options on all ranks, but they differ at "
                f"{path}: {left!r} on rank {ranks[0]}, {right!r} on rank {rank}; "
                "build the model and call tide.enable alike on every rank",
            )
    return None
