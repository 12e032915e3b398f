"""The command line: `tide info`, `tide plan`, `tide verify`, `tide bench ...`."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from tide.cli.plan import plan
from tide.cli.verify import verify

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Collectives for FSDP2 that know its layout."
)
bench = typer.Typer(no_args_is_help=True, help="Measure TIDE beside stock FSDP2, in one run.")
app.add_typer(bench, name="bench")
app.command()(plan)
app.command()(verify)

Ranks = Annotated[int, typer.Option(min=2, help="processes of this machine")]
Rounds = Annotated[int, typer.Option(min=1, help="measured rounds, warm-up apart")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="also write the rows to this file")]


@app.command()
def info() -> None:
    """Prints versions, the CPU target and every option with its value."""
    import torch

    import tide
    from tide import _core

    console = Console()
    console.print(
        f"tide {tide.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    console.print(f"CPU target: {_core.target()}")
    table = Table("variable", "type", "value", "from", "meaning")
    for row in _core.config():
        table.add_row(row["name"], row["type"], row["value"], row["source"], row["doc"])
    console.print(table)
    for warning in _core.warnings():
        console.print(f"warning: {warning}")


def _measure(
    rounds: int, title: str, body: Callable[[Callable[[Any], None]], dict[str, Any]]
) -> dict[str, Any]:
    """Runs a bench with a progress bar on stderr, none where stderr is no terminal."""
    from tide.bench.launch import LaunchError

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task(title, total=rounds)
            return body(lambda _: progress.advance(task))
    except (LaunchError, ValueError) as error:
        console.print(f"[red]{title}:[/red] {error}", highlight=False)
        raise typer.Exit(1) from None


def _show(rows: list[dict[str, Any]], json_file: Path | None) -> None:
    caption = "times are medians; speedup and over_floor are medians of the ratios within a round"
    table = Table(*rows[0], caption=caption)
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=1) + "\n")


def _collective(
    operation: str, ranks: int, preset: str, rounds: int, json_file: Path | None
) -> None:
    from tide.bench import collectives

    row = _measure(
        rounds,
        f"{operation}, {ranks} ranks, {preset}",
        lambda report: collectives.run(operation, ranks, preset, rounds, report),
    )
    _show([row], json_file)


@bench.command("all-gather")
def all_gather(
    ranks: Ranks = 4, preset: str = "small", rounds: Rounds = 20, json_file: JsonFile = None
) -> None:
    """All-gather into parameters: TIDE, its floor, and gloo with FSDP2's copies."""
    _collective("all-gather", ranks, preset, rounds, json_file)


@bench.command("reduce-scatter")
def reduce_scatter(
    ranks: Ranks = 4, preset: str = "small", rounds: Rounds = 20, json_file: JsonFile = None
) -> None:
    """Reduce-scatter of bf16 gradients into fp32: TIDE, its floor, and gloo with packing."""
    _collective("reduce-scatter", ranks, preset, rounds, json_file)


@bench.command("mlp")
def mlp(
    ranks: Ranks = 4,
    blocks: int = 4,
    width: int = 512,
    rounds: Rounds = 10,
    json_file: JsonFile = None,
) -> None:
    """Forward and backward of an MLP under FSDP2, stock and TIDE alternating."""
    from tide.bench import mlp as bench_mlp

    row = _measure(
        rounds,
        f"mlp, {ranks} ranks",
        lambda report: bench_mlp.run(ranks, blocks, width, rounds, report),
    )
    _show([row], json_file)


def main() -> None:
    """Entry point of the `tide` script."""
    app(prog_name="tide")


if __name__ == "__main__":
    sys.exit(main())
