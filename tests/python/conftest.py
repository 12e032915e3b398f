"""Shared fixtures: rank processes that live for the whole session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent
for path in (_HERE, _HERE.parent.parent / "python"):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))

import fsdp_models  # noqa: E402
import gpu_models  # noqa: E402
from spawn import RankGroup  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes longer than a few seconds")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankGroup]]:
    """Returns a function from a number of ranks to their processes."""
    groups: dict[int, RankGroup] = {}

    def get(world: int) -> RankGroup:
        if fsdp_models.DEVICE == "cuda" and (reason := gpu_models.missing(world)) is not None:
            pytest.skip(reason)
        return groups.setdefault(world, RankGroup(world))

    yield get
    for group in groups.values():
        group.stop()
