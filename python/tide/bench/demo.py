"""Trains a byte-level transformer under FSDP2 twice, stock and through TIDE, and compares.

The two trainings take turns step by step. Peak memory is measured afterwards, one model at a time.

    python -m tide.bench.demo --ranks 4 --steps 40

Text is the Python standard library's own sources. Ranks are processes of this machine, one a GPU if
there are at least two that TIDE can serve, else on the CPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from tide.bench import demo_gpu, demo_place, demo_report, demo_worker
from tide.bench.demo_place import CPU_RANKS, CPU_SIZES, DEVICES, GPU_SIZES, Gpus, Place
from tide.bench.demo_worker import WARM_UP_STEPS, DemoConfig, MemoryConfig, Step, Training
from tide.bench.launch import LaunchError, launch
from tide.bench.terminal import make_console, make_progress
from tide.bench.text import load_text

_PLAIN_LINES = 8
_SIZES = {
    "layers": "transformer blocks",
    "width": "model width",
    "heads": "attention heads",
    "seq_len": "bytes a sequence",
    "batch": "sequences a rank",
}


def _parse(arguments: list[str] | None) -> tuple[argparse.Namespace, Place]:
    """Returns the options and where to run."""
    parser = argparse.ArgumentParser(
        prog="python -m tide.bench.demo",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    absent = argparse.SUPPRESS  # a default that depends on the device
    devices = "auto: GPUs if there are two that TIDE can serve"
    parser.add_argument("--device", default="auto", choices=DEVICES, help=devices)
    ranks = f"processes (default: {CPU_RANKS}, on GPUs one each)"
    parser.add_argument("--ranks", type=int, default=absent, help=ranks)
    parser.add_argument("--steps", type=int, default=40, help="steps of each training")
    modes = ("auto", "in_place", "slot_reuse")
    parser.add_argument("--mode", default="auto", choices=modes, help="passed to tide.enable")
    parser.add_argument("--nodes", type=int, default=1, help="virtual nodes: must divide the ranks")
    for name, what in _SIZES.items():
        flag, text = f"--{name.replace('_', '-')}", f"{what} (default: {CPU_SIZES[name]}"
        text += f", on GPUs {GPU_SIZES[name]})"
        parser.add_argument(flag, type=int, default=absent, help=text)
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="output folder")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    given = parser.parse_args(arguments)
    try:
        gpus = Gpus() if given.device == "cpu" else demo_place.find_gpus()
        place = demo_place.choose(given.device, getattr(given, "ranks", None), gpus)
    except ValueError as error:
        parser.error(str(error))
    options = argparse.Namespace(**{**place.sizes, **vars(given), "ranks": place.ranks})
    if (problem := _problem(options)) is not None:
        parser.error(problem)
    return options, place


def _problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the options, or None."""
    if options.nodes < 1 or options.ranks % options.nodes != 0:
        return f"--nodes must divide the {options.ranks} ranks, got {options.nodes}"
    if options.ranks < 2:
        return f"--ranks must be at least 2 to have something to communicate, got {options.ranks}"
    if options.steps < 2:
        return f"--steps must be at least 2, got {options.steps}"
    for name in _SIZES:
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            return f"--{flag} must be at least 1, got {getattr(options, name)}"
    if options.width % options.heads:
        return f"--width must be a multiple of --heads, got {options.width} and {options.heads}"
    return None


def _workers(place: Place) -> Any:
    """The module with the functions that the ranks run."""
    return demo_gpu if place.device == "cuda" else demo_worker


def _train(config: DemoConfig, place: Place, console: Console) -> dict[str, list[Training]]:
    """Both trainings, with a bar on a terminal and a few plain lines elsewhere."""
    every = max(1, config.steps // _PLAIN_LINES)
    with make_progress(console) as progress:
        task = progress.add_task(f"starting {place.ranks} processes", total=config.steps)

        def on_progress(payload: tuple[int, dict[str, Step]]) -> None:
            index, last = payload
            stock, ours = (1e3 * (last[name].end - last[name].start) for name in ("stock", "tide"))
            text = f"loss {last['tide'].loss:.3f}, stock {stock:.0f} ms a step, TIDE {ours:.0f} ms"
            progress.update(task, completed=index + 1, description=text)
            if not console.is_terminal and (index % every == 0 or index == config.steps - 1):
                console.print(f"{text} ({index + 1}/{config.steps})", highlight=False)

        train = _workers(place).train
        results = launch(train, place.ranks, config, on_progress, place.variables)
    return {name: [result[name] for result in results] for name in ("stock", "tide")}


def _measure_memory(
    config: DemoConfig, place: Place, console: Console
) -> dict[str, list[list[int]]]:
    """Samples of every rank, with one model at a time in the processes."""
    samples = {}
    measure = _workers(place).measure_memory
    for name, title in (("stock", "stock"), ("tide", "TIDE")):
        console.print(f"memory of {title}, in processes of its own", highlight=False)
        asked = MemoryConfig(config, name == "tide")
        passes = launch(measure, place.ranks, asked, variables=place.variables)
        samples[name] = [one.samples for one in passes]
    return samples


def _compare(options: argparse.Namespace, place: Place, console: Console) -> None:
    console.print(place.sentence, highlight=False, markup=False)
    sizes = {name: getattr(options, name) for name in _SIZES}
    demo_place.require_room(place, sizes)
    # Rank 0 of GPUs writes there.
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--out: expected a folder that can be made, got {error}") from None
    config = DemoConfig(
        steps=options.steps,
        mode=options.mode,
        nodes=options.nodes,
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        length=options.seq_len,
        batch=options.batch,
        seed=options.seed,
        text=load_text(),
        folder=str(options.out),
    )
    parameters = options.layers * 12 * options.width**2
    model: dict[str, Any] = {**sizes, "nodes": options.nodes, "mode": options.mode}
    console.print(
        f"{options.layers} blocks of width {options.width} (about {parameters / 1e6:.0f} M "
        f"parameters), {options.batch} x {options.seq_len} bytes a rank, {options.ranks} ranks "
        f"on {options.nodes} {'nodes' if options.nodes > 1 else 'node'}, mode {options.mode}, "
        f"{len(config.text) / 1e6:.1f} MB of text",
        highlight=False,
    )
    trainings = _train(config, place, console)
    memory = _measure_memory(config, place, console)
    # A run too short to leave the warm-up out still shows its last step.
    warm_up = min(WARM_UP_STEPS, options.steps - 1)
    measured = demo_report.build(trainings, memory, model, warm_up)
    report = {"device": place.device, "gpus": list(place.gpus), **measured}
    demo_report.show(report, console)
    demo_report.write(options.out, report, trainings, console.print)


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; returns the exit status."""
    options, place = _parse(arguments)
    console = make_console()
    try:
        _compare(options, place, console)
    except KeyboardInterrupt:
        console.print("interrupted; every process was ended")
        return 130
    except RuntimeError as error:
        console.print(f"demo: {error}", style="red", highlight=False, markup=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
