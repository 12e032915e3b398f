"""Times that several ranks measured with one clock: in which order, and arithmetic on them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from statistics import median

Interval = tuple[float, float]


def in_turn(names: list[str], index: int) -> list[str]:
    """The names in the order of round `index`: each comes first, second, ... equally often."""
    shift = index % len(names)
    return names[shift:] + names[:shift]


def now() -> float:
    """CLOCK_MONOTONIC in seconds: one clock for all processes of a machine."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def quantile(values: Sequence[float], fraction: float) -> float:
    """The smallest value that at least `fraction` of `values` do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def span_seconds(per_rank: Sequence[Interval]) -> float:
    """From the first rank that starts to the last one that ends."""
    return max(end for _, end in per_rank) - min(start for start, _ in per_rank)


def round_seconds(intervals: Sequence[Sequence[Interval]]) -> list[float]:
    """`intervals[rank][round]` to one span a round."""
    return [span_seconds(one_round) for one_round in zip(*intervals, strict=True)]


def wait_seconds(calls: Sequence[Sequence[Interval]]) -> list[float]:
    """For every rank, the time its calls spent before the last rank had arrived at them.

    Args:
      calls: `calls[rank][index]`, the same calls in the same order on every rank.

    Raises:
      ValueError: the ranks made different numbers of calls.
    """
    counts = {len(own) for own in calls}
    if len(counts) != 1:
        raise ValueError(f"ranks made different numbers of calls: {sorted(counts)}")
    latest = [max(start for start, _ in one_call) for one_call in zip(*calls, strict=True)]
    return [
        sum(
            min(max(last - start, 0.0), end - start)
            for (start, end), last in zip(own, latest, strict=True)
        )
        for own in calls
    ]


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of each round's ratio, which load that shifts between rounds leaves alone."""
    return median(a / b for a, b in zip(numerators, denominators, strict=True))


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """A 95 % confidence interval of the median, whatever the distribution; None below 6 values.

    Between the k-th smallest and the k-th largest value: the median lies outside if fewer than k
    of the values fall on one side of it, which is a binomial probability.
    """
    count, outside, k = len(values), 0.0, 0
    while (outside := outside + math.comb(count, k) / 2**count) <= 0.025:
        k += 1
    if k == 0:
        return None
    ordered = sorted(values)
    return ordered[k - 1], ordered[count - k]


def slowest(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """`per_rank[rank][round]` to the largest of each round."""
    return [max(one_round) for one_round in zip(*per_rank, strict=True)]


def comparison(measured: Sequence[Mapping[str, Sequence[Interval]]]) -> dict[str, float]:
    """The numbers of a bench's row from `measured[rank][contestant][round]`.

    Returns:
      tide_ms, stock_ms and, if it was measured, floor_ms (medians), speedup and over_floor
      (medians of the ratios within a round).
    """
    times = {name: round_seconds([own[name] for own in measured]) for name in measured[0]}
    contestants = [name for name in ("tide", "stock", "floor") if name in times]
    row = {f"{name}_ms": 1e3 * median(times[name]) for name in contestants}
    row["speedup"] = median_ratio(times["stock"], times["tide"])
    if "floor" in times:
        row["over_floor"] = median_ratio(times["tide"], times["floor"])
    return row
