"""`tide verify`: checks of plans before anything runs."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer

from tide.cli.tables import console, fail, table

_WIDTHS = [1, 2, 4]
_PASSES = [1, 2, 3, 4]
# With both memory modes 64 variants a pair, which the paper's counts need; it lists no variants.
_PAPER_WIDTHS = list(range(1, 33))


def _plan_rows(own: dict[str, Any], paper: dict[str, Any]) -> list[tuple[Any, ...]]:
    widths = ", ".join(map(str, _WIDTHS))
    rows = [
        (
            f"k in {{{widths}}}, in_place and slot_reuse, n_part = {passes}",
            own["variants"],
            f"{accepted:,}",
            f"{own['rejected_plans']:,}",
        )
        for passes, accepted in zip(_PASSES, own["accepted_plans"], strict=True)
    ]
    label = f"k in [1, {_PAPER_WIDTHS[-1]}], in_place and slot_reuse, n_part = 1"
    counts = (f"{paper['accepted_plans'][0]:,}", f"{paper['rejected_plans']:,}")
    return [*rows, (label, paper["variants"], *counts)]


def _exhaustive(max_nodes: int, local: int) -> None:
    from tide import Error, _core

    try:
        own = _core.verify_exhaustive(max_nodes, local, _WIDTHS, _PASSES)
        paper = _core.verify_exhaustive(max_nodes, local, _PAPER_WIDTHS, [1])
    except Error as error:
        fail("verify", error)
    out = console()
    rejected = Counter(width for _, width, _, _ in own["rejected"])
    by_width = ", ".join(f"width {width}: {rejected[width]}" for width in sorted(rejected))
    out.print(
        f"latin_square, M in [2, {max_nodes}], L = {local}, widths 1 to {local}: "
        f"{own['pairs']:,} pairs, {own['rejected_pairs']:,} rejected because two contributors of "
        f"a wave meet on one local rank{f' ({by_width})' if by_width else ''}"
    )
    for nodes, width, first, second in own["rejected"][:1]:
        out.print(f"first: M = {nodes}, width {width}: contributors {first} and {second}")
    header = ("variants", "a pair", "accepted plans", "rejected plans")
    out.print(table("Plans", header, _plan_rows(own, paper)))
    failed = own["failed_plans"] + paper["failed_plans"]
    for failure in [*own["failures"], *paper["failures"]]:
        out.print(f"failed: {failure}", markup=False)
    out.print(
        f"{failed:,} accepted plans are unsafe"
        if failed
        else "accepted plans are free of collisions and stale blocks, "
        "and their outboxes cover two consecutive rounds"
    )
    if failed:
        raise typer.Exit(1)


def verify(
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="all node counts and wave widths, without programs")
    ] = False,
    max_nodes: Annotated[int, typer.Option(min=2, help="largest M")] = 1024,
    local: Annotated[int, typer.Option(min=1, max=8, help="L")] = 8,
) -> None:
    """Checks plans: exit code 0 if they are safe, 1 if one is not."""
    if not exhaustive:
        fail("verify", "expected --exhaustive")
    _exhaustive(max_nodes, local)
