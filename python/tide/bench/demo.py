"""Trains a byte-level transformer under FSDP2 twice, stock and through TIDE, and compares.

The two trainings take turns step by step. Peak memory is measured afterwards, one model at a time.

    python -m tide.bench.demo --ranks 4 --steps 40

Text is the Python standard library's own sources. Everything runs on CPU processes of this machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from tide.bench import demo_report
from tide.bench.demo_worker import (
    WARM_UP_STEPS,
    DemoConfig,
    MemoryConfig,
    Step,
    Training,
    measure_memory,
    train,
)
from tide.bench.launch import launch, require_memory
from tide.bench.terminal import make_console, make_progress
from tide.bench.text import load_text

_PLAIN_LINES = 8
# Shards, their gradients and moments, in fp32, of two models over all ranks.
_SHARDED_BYTES = 32
# On every rank: weights before sharding, unsharded gradients, the buffers of stock's collectives.
_RANK_BYTES = 12
_BYTES_PER_PROCESS = 300 << 20


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tide.bench.demo",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=4, help="processes")
    parser.add_argument("--steps", type=int, default=40, help="steps of each training")
    modes = ("auto", "in_place", "slot_reuse")
    parser.add_argument("--mode", default="auto", choices=modes, help="passed to tide.enable")
    parser.add_argument("--nodes", type=int, default=1, help="virtual nodes: must divide the ranks")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks")
    parser.add_argument("--width", type=int, default=1024, help="model width")
    parser.add_argument("--heads", type=int, default=16, help="attention heads")
    parser.add_argument("--seq-len", type=int, default=64, help="bytes a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences a rank")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="output folder")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    options = parser.parse_args(arguments)
    if (problem := _problem(options)) is not None:
        parser.error(problem)
    return options


def _problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the options, or None."""
    if options.nodes < 1 or options.ranks % options.nodes != 0:
        return f"--nodes must divide the {options.ranks} ranks, got {options.nodes}"
    if options.ranks < 2:
        return f"--ranks must be at least 2 to have something to communicate, got {options.ranks}"
    if options.steps < 2:
        return f"--steps must be at least 2, got {options.steps}"
    for name in ("layers", "width", "heads", "seq_len", "batch"):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            return f"--{flag} must be at least 1, got {getattr(options, name)}"
    if options.width % options.heads:
        return f"--width must be a multiple of --heads, got {options.width} and {options.heads}"
    return None


def _train(config: DemoConfig, ranks: int, console: Console) -> dict[str, list[Training]]:
    """Both trainings, with a bar on a terminal and a few plain lines elsewhere."""
    every = max(1, config.steps // _PLAIN_LINES)
    with make_progress(console) as progress:
        task = progress.add_task(f"starting {ranks} processes", total=config.steps)

        def on_progress(payload: tuple[int, dict[str, Step]]) -> None:
            index, last = payload
            stock, ours = (1e3 * (last[name].end - last[name].start) for name in ("stock", "tide"))
            text = f"loss {last['tide'].loss:.3f}, stock {stock:.0f} ms a step, TIDE {ours:.0f} ms"
            progress.update(task, completed=index + 1, description=text)
            if not console.is_terminal and (index % every == 0 or index == config.steps - 1):
                console.print(f"{text} ({index + 1}/{config.steps})", highlight=False)

        results = launch(train, ranks, config, on_progress)
    return {name: [result[name] for result in results] for name in ("stock", "tide")}


def _measure_memory(config: DemoConfig, ranks: int, console: Console) -> dict[str, list[list[int]]]:
    """Samples of every rank, with one model at a time in the processes."""
    samples = {}
    for name, title in (("stock", "stock"), ("tide", "TIDE")):
        console.print(f"memory of {title}, in processes of its own", highlight=False)
        passes = launch(measure_memory, ranks, MemoryConfig(config, name == "tide"))
        samples[name] = [one.samples for one in passes]
    return samples


def _compare(options: argparse.Namespace, console: Console) -> None:
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
    )
    parameters = options.layers * 12 * options.width**2
    needed = options.ranks * (parameters * _RANK_BYTES + _BYTES_PER_PROCESS)
    needed += parameters * _SHARDED_BYTES
    require_memory(needed, f"the demo on {options.ranks} ranks")
    model: dict[str, Any] = {
        "layers": options.layers,
        "width": options.width,
        "heads": options.heads,
        "seq_len": options.seq_len,
        "batch": options.batch,
        "nodes": options.nodes,
        "mode": options.mode,
    }
    console.print(
        f"{options.layers} blocks of width {options.width} (about {parameters / 1e6:.0f} M "
        f"parameters), {options.batch} x {options.seq_len} bytes a rank, {options.ranks} ranks "
        f"on {options.nodes} {'nodes' if options.nodes > 1 else 'node'}, mode {options.mode}, "
        f"{len(config.text) / 1e6:.1f} MB of text",
        highlight=False,
    )
    trainings = _train(config, options.ranks, console)
    memory = _measure_memory(config, options.ranks, console)
    # A run too short to leave the warm-up out still shows its last step.
    warm_up = min(WARM_UP_STEPS, options.steps - 1)
    report = demo_report.build(trainings, memory, model, warm_up)
    demo_report.show(report, console)
    demo_report.write(options.out, report, trainings, console.print)


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; returns the exit status."""
    options = _parse(arguments)
    console = make_console()
    try:
        _compare(options, console)
    except KeyboardInterrupt:
        console.print("interrupted; every process was ended")
        return 130
    except RuntimeError as error:
        console.print(f"demo: {error}", style="red", highlight=False, markup=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
