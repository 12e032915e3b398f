"""`tide calibrate`: measures a GPU for the CTAs of a sum, and keeps the machine file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tide import Error
from tide.bench.terminal import make_console
from tide.cli.tables import console, table

if TYPE_CHECKING:
    from tide.calibration.store import Calibration


def _say(message: str) -> None:
    make_console(stderr=True).print(f"calibrate: {message}", markup=False, highlight=False)


def _rows(machine: dict[str, Any]) -> list[tuple[str, ...]]:
    rates = [{ctas: rate for ctas, rate in curve["points"]} for curve in machine["sum_curves"]]
    return [
        (
            f"{ctas} *" if ctas == machine["sum_ctas"] else str(ctas),
            *(f"{rate[ctas]:.0f}" if ctas in rate else "-" for rate in rates),
            f"{ms:.3f}",
            f"{noise:.3f}",
        )
        for ctas, ms, noise in machine["sum_added"]
    ]


def _show(found: Calibration) -> None:
    machine = json.loads(found.text)
    sources = [f"sum of {curve['sources']}" for curve in machine["sum_curves"]]
    header = ("CTAs", *(f"{name}, GB/s" for name in sources), "adds, ms", "noise, ms")
    out = console()
    out.print(table(f"{machine['name']}: sums and what they add", header, _rows(machine)))
    out.print(f"* {machine['sources']['sum_ctas']}", markup=False)
    out.print(f"adds: {machine['sources']['sum_added']}", markup=False)
    where = f"{'written' if found.measured else 'read'}: {found.path}"
    out.print(where if found.path else f"not written: {found.unwritten}", markup=False)


def _calibrate(output: Path | None, force: bool, nodes: int, local: int | None) -> Calibration:
    import torch

    from tide.calibration import gpu as gpus
    from tide.calibration import measure, store

    if reason := gpus.missing():
        raise RuntimeError(reason)
    gpu = gpus.describe(torch.device("cuda", 0))
    ranks = local or max(2, torch.cuda.device_count())

    def measured() -> dict[str, Any]:
        return measure.measure_machine(gpu, measure.ROUNDS, link=True)

    if output is not None:
        found = store.Calibration(store.finish(measured(), nodes, ranks), output, measured=True)
        store.write(output, found.text)
        return found
    found = store.load_or_measure(gpu, measured, nodes, ranks, force)
    if found.rejected:
        _say(f"measured again, since a file was not valid: {found.rejected}")
    # What was kept may have been chosen for other ranks.
    return found if found.measured else store.for_ranks(found, nodes, ranks)


def calibrate(
    as_json: Annotated[
        bool, typer.Option("--json", help="print the machine file instead of a table")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="measure, and write the machine file here instead of TIDE's folder"),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="measure again where it has been done")
    ] = False,
    nodes: Annotated[int, typer.Option(min=1, help="M, nodes that the choice is for")] = 1,
    local: Annotated[
        int | None,
        typer.Option(min=1, help="L, ranks a node that the choice is for; default: one a GPU"),
    ] = None,
) -> None:
    """Measures the first visible GPU in a few seconds and chooses the CTAs of a sum.

    The machine file is what --machine of `tide plan` and `tide sim` takes; trainings on such GPUs
    find it in TIDE's folder.
    """
    from tide.bench.launch import check_output

    try:
        check_output(output, "--output")
        found = _calibrate(output, force, nodes, local)
    except (Error, OSError, RuntimeError, ValueError) as error:
        _say(str(error))
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(found.text, nl=False)
    else:
        _show(found)
