"""The command line: `tide info`, `plan`, `verify`, `sim`, `calibrate`, `bench ...`, `nccl ...`."""

from __future__ import annotations

import functools
import json
import platform
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tide.bench.terminal import make_console, make_progress
from tide.cli.calibrate import calibrate
from tide.cli.nccl import nccl
from tide.cli.plan import plan
from tide.cli.sim import sim
from tide.cli.tables import console, words
from tide.cli.verify import verify


class BenchFabric(str, Enum):
    """Where a bench runs."""

    HOST = "host"
    NCCL = "nccl"


app = typer.Typer(no_args_is_help=True, add_completion=False)
bench = typer.Typer(no_args_is_help=True, help="Measure TIDE beside stock FSDP2, in one run.")
app.add_typer(bench, name="bench")
app.add_typer(nccl, name="nccl")
app.add_typer(sim, name="sim")
app.command()(plan)
app.command()(verify)
app.command()(calibrate)

Ranks = Annotated[int, typer.Option(min=2, help="processes of this machine")]
Nodes = Annotated[int, typer.Option(min=1, help="virtual nodes; must divide the ranks")]
Rounds = Annotated[int, typer.Option(min=1, help="measured rounds, warm-up apart")]
RanksOfFabric = Annotated[
    int | None, typer.Option(min=2, help="processes; default: 4 on the host, one a GPU on nccl")
]
PresetOfFabric = Annotated[
    str | None, typer.Option(help="shapes; default: small on the host, llama70b-layer on nccl")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="also write the rows to this file")]


def _print_version(asked: bool) -> None:
    if asked:
        from tide import __version__

        typer.echo(f"tide {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Collectives for FSDP2 that know its layout."""


@app.command()
def info() -> None:
    """Prints versions, the CPU target and every option with its value."""
    import torch

    import tide
    from tide import _core

    out = console()
    say = functools.partial(out.print, markup=False, soft_wrap=True)
    say(f"tide {tide.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    say(f"CPU target: {_core.target()}")
    config = _core.config()
    found = _core.nccl()
    gpus = found["description"] or f"no collectives on GPUs: {found['reason']}"
    say(f"GPUs: {gpus}")
    rows = [tuple(row[key] for key in ("name", "type", "value", "source", "doc")) for row in config]
    out.print(words("Variables", ("variable", "type", "value", "from", "meaning"), rows))
    for warning in [*_core.warnings(), *(row["problem"] for row in config)]:
        if warning:
            say(f"warning: {warning}")


def _measure(
    rounds: int,
    title: str,
    json_file: Path | None,
    body: Callable[[Callable[[Any], None]], dict[str, Any]],
) -> None:
    """Runs a bench with a progress bar on stderr, prints its row and writes it to the file."""
    from tide.bench.launch import LaunchError, check_output

    console = make_console(stderr=True)
    try:
        check_output(json_file)
        with make_progress(console) as progress:
            task = progress.add_task(title, total=rounds)
            row = body(lambda _: progress.advance(task))
    except (LaunchError, ValueError) as error:
        console.print(f"[red]{title}:[/red] {error}", highlight=False)
        raise typer.Exit(1) from None
    caption = "times are medians; speedup and over_floor are medians of the ratios within a round"
    table = Table(*row, caption=caption)
    table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    make_console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps([row], indent=1) + "\n")


def _collective(
    operation: str, ranks: int, nodes: int, preset: str, rounds: int, json_file: Path | None
) -> None:
    from tide.bench import collectives

    title = f"{operation}, {ranks} ranks, {preset}"
    run = functools.partial(collectives.run, operation, ranks, preset, rounds, nodes=nodes)
    _measure(rounds, title, json_file, run)


def _on_gpus(name: str, **wanted: Any) -> None:
    """Runs a bench on GPUs; what is None is left to it."""
    from tide.bench.gpu import commands
    from tide.bench.launch import LaunchError

    request = commands.Request(**{k: v for k, v in wanted.items() if v is not None})
    try:
        commands.run(name, request)
    except (LaunchError, ValueError) as error:
        make_console(stderr=True).print(f"{name}: {error}", markup=False, highlight=False)
        raise typer.Exit(1) from None


def _on_fabric(
    operation: str,
    fabric: BenchFabric,
    ranks: int | None,
    nodes: int,
    preset: str | None,
    rounds: int,
    json_file: Path | None,
) -> None:
    if fabric is BenchFabric.HOST:
        return _collective(operation, ranks or 4, nodes, preset or "small", rounds, json_file)
    wanted = {"ranks": ranks, "preset": preset, "rounds": rounds, "json_file": json_file}
    return _on_gpus(operation, nodes=nodes, **wanted)


@bench.command("all-gather")
def all_gather(
    fabric: BenchFabric = BenchFabric.HOST,
    ranks: RanksOfFabric = None,
    nodes: Nodes = 1,
    preset: PresetOfFabric = None,
    rounds: Rounds = 20,
    json_file: JsonFile = None,
) -> None:
    """All-gather into parameters: TIDE, its floor, and gloo or NCCL with FSDP2's copies."""
    _on_fabric("all-gather", fabric, ranks, nodes, preset, rounds, json_file)


@bench.command("reduce-scatter")
def reduce_scatter(
    fabric: BenchFabric = BenchFabric.HOST,
    ranks: RanksOfFabric = None,
    nodes: Nodes = 1,
    preset: PresetOfFabric = None,
    rounds: Rounds = 20,
    json_file: JsonFile = None,
) -> None:
    """Reduce-scatter of bf16 gradients into fp32: TIDE, its floor, gloo or NCCL with packing."""
    _on_fabric("reduce-scatter", fabric, ranks, nodes, preset, rounds, json_file)


@bench.command("interference")
def interference(
    ranks: RanksOfFabric = None,
    preset: PresetOfFabric = None,
    rounds: Rounds = 15,
    json_file: JsonFile = None,
) -> None:
    """On GPUs: compute time that a collective beside it adds."""
    _on_gpus("interference", ranks=ranks, preset=preset, rounds=rounds, json_file=json_file)


@bench.command("sm-time")
def sm_time(
    ranks: RanksOfFabric = None, preset: PresetOfFabric = None, json_file: JsonFile = None
) -> None:
    """On GPUs: kernels, copies, API calls and time on multiprocessors of a call."""
    _on_gpus("sm-time", ranks=ranks, preset=preset, json_file=json_file)


@bench.command("train")
def train(
    model: str = "moe",
    tokens: Annotated[str, typer.Option(help="tokens a GPU and step, comma-separated")] = "",
    systems: Annotated[str, typer.Option(help="stock, in_place, ..., comma-separated")] = "",
    ranks: RanksOfFabric = None,
    rounds: Rounds = 2,
    json_file: JsonFile = None,
) -> None:
    """On GPUs: training steps of FSDP2, stock beside TIDE in both modes."""
    try:
        counts = tuple(int(count) for count in tokens.split(",") if count)
    except ValueError:
        raise typer.BadParameter(
            f"expected numbers, got {tokens!r}", param_hint="--tokens"
        ) from None
    names = tuple(name for name in systems.split(",") if name)
    wanted = {"ranks": ranks, "rounds": rounds, "json_file": json_file}
    _on_gpus("train", preset=model, tokens=counts, systems=names, **wanted)


@bench.command("plot")
def plot(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False)],
) -> None:
    """Draws the rows of benches on GPUs: an SVG beside each file."""
    from tide.bench import plots

    try:
        for file in files:
            print(plots.draw(file))
    except (ImportError, ValueError, KeyError) as error:
        make_console(stderr=True).print(f"plot: {file}: {error}", markup=False, highlight=False)
        raise typer.Exit(1) from None


@bench.command("mlp")
def mlp(
    ranks: Ranks = 4,
    blocks: Annotated[int, typer.Option(min=1, help="blocks of the model")] = 4,
    width: Annotated[int, typer.Option(min=1, help="width of the model")] = 512,
    rounds: Rounds = 10,
    json_file: JsonFile = None,
) -> None:
    """Forward and backward of an MLP under FSDP2, stock and TIDE alternating."""
    from tide.bench import mlp as bench_mlp

    run = functools.partial(bench_mlp.run, ranks, blocks, width, rounds)
    _measure(rounds, f"mlp, {ranks} ranks", json_file, run)


def main() -> None:
    """Entry point of the `tide` script."""
    app(prog_name="tide")


if __name__ == "__main__":
    sys.exit(main())
