"""From what the ranks measured to the demo's table and files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from tide.bench import chrome
from tide.bench.demo_worker import Step, Training
from tide.bench.probe import COLLECTIVES
from tide.stats import median_ratio, quantile, span_seconds, wait_seconds

_ROWS = (
    ("step, median", "step_ms_median", "ms"),
    ("step, 90th percentile", "step_ms_p90", "ms"),
    ("forward", "forward_ms", "ms"),
    ("backward", "backward_ms", "ms"),
    ("collectives", "collective_ms", "ms"),
    ("  of it waiting for ranks", "wait_ms", "ms"),
    ("  of it transfer", "transfer_ms", "ms"),
    ("peak memory, all ranks", "peak_mib", "MiB"),
)
_ON_GPUS = (
    "memory: the peak that torch reserved on each GPU, TIDE's segments with it, and all that lies "
    "outside torch there (CUDA contexts, NCCL); collectives run beside compute: see the traces of "
    "rank 0"
)


def _step_milliseconds(ranks: tuple[Step, ...]) -> dict[str, float]:
    """One step of all ranks: the span of the step, and means over ranks of its parts."""
    calls = [[call.end - call.start for call in step.calls] for step in ranks]
    # Nobody waits for anybody in the copy-out.
    met = [[(c.start, c.end) for c in step.calls if c.name in COLLECTIVES] for step in ranks]
    seconds = {
        "step": span_seconds([(step.start, step.end) for step in ranks]),
        "forward": mean(step.forward_end - step.start for step in ranks),
        "backward": mean(step.backward_end - step.forward_end for step in ranks),
        "collective": mean(sum(own) for own in calls),
        "wait": mean(wait_seconds(met)),
    }
    return {name: 1e3 * value for name, value in seconds.items()}


def _timed_steps(trainings: list[Training], warm_up: int) -> list[tuple[Step, ...]]:
    """The steps that count, each as one entry a rank."""
    return list(zip(*(training.steps for training in trainings), strict=True))[warm_up:]


def summarise(trainings: list[Training], memory: list[list[int]], warm_up: int) -> dict[str, float]:
    """Medians over the timed steps, and the peak of the memory summed over ranks.

    Args:
      trainings: one a rank.
      memory: bytes at every sampled point, one list a rank.
      warm_up: how many steps at the start are left out of the times.

    Returns:
      step_ms_median, step_ms_p90: from the first rank's start to the last one's end;
      forward_ms, backward_ms: means over ranks; collective_ms: wall time inside FSDP2's all-gather,
      copy-out and reduce calls, mean over ranks; wait_ms: the part of it before the last rank had
      come to the same all-gather or reduce; transfer_ms: the rest of it; peak_mib.
      The three of collectives are missing if no calls were recorded, as on GPUs.

    Raises:
      ValueError: the ranks made different numbers of calls or of memory samples.
    """
    rows = [_step_milliseconds(step) for step in _timed_steps(trainings, warm_up)]
    column = {name: [row[name] for row in rows] for name in rows[0]}
    called = any(step.calls for training in trainings for step in training.steps)
    parts = ("forward", "backward", *(("collective", "wait") if called else ()))
    summary = {
        "step_ms_median": median(column["step"]),
        "step_ms_p90": quantile(column["step"], 0.9),
        **{f"{name}_ms": median(column[name]) for name in parts},
    }
    if called:
        # Not a median of its own: the two parts are to make up the whole.
        summary["transfer_ms"] = summary["collective_ms"] - summary["wait_ms"]
    summary["peak_mib"] = max(sum(s) for s in zip(*memory, strict=True)) / 2**20
    return summary


def build(
    trainings: dict[str, list[Training]],
    memory: dict[str, list[list[int]]],
    model: dict[str, Any],
    warm_up: int,
) -> dict[str, Any]:
    """What was measured, for report.json. Both dicts have "stock" and "tide", one entry a rank."""
    stock, ours = trainings["stock"], trainings["tide"]
    spans = [
        [span_seconds([(s.start, s.end) for s in step]) for step in _timed_steps(ranks, warm_up)]
        for ranks in (stock, ours)
    ]
    stock_losses, tide_losses = losses(stock), losses(ours)
    pairs = zip(stock_losses, tide_losses, strict=True)
    return {
        "ranks": len(stock),
        "steps": len(stock_losses),
        "warm_up_steps": warm_up,
        "model": {"parameters": stock[0].parameters, **model},
        "stock": summarise(stock, memory["stock"], warm_up),
        "tide": summarise(ours, memory["tide"], warm_up),
        "speedup": median_ratio(*spans),
        "loss_first": tide_losses[0],
        "loss_last": tide_losses[-1],
        "loss_max_rel_diff": max(abs(a - b) / abs(a) for a, b in pairs),
        "groups": ours[0].groups,
    }


def losses(trainings: list[Training]) -> list[float]:
    """The loss of every step, equal on all ranks."""
    return [step.loss for step in trainings[0].steps]


def show(report: dict[str, Any], console: Console) -> None:
    """Prints the table, the losses and the path of every group."""
    table = Table(
        title=f"FSDP2, {report['ranks']} ranks, {report['model']['nodes']} node(s), "
        f"{report['steps']} steps, the first {report['warm_up_steps']} not timed"
    )
    table.add_column("")
    for name in ("stock", "TIDE", "stock / TIDE"):
        table.add_column(name, justify="right")
    for title, key, unit in (row for row in _ROWS if row[1] in report["stock"]):
        stock, ours = report["stock"][key], report["tide"][key]
        ratio = f"{stock / ours:.2f}" if ours > 0 else "-"
        table.add_row(title, f"{stock:.1f} {unit}", f"{ours:.1f} {unit}", ratio)
    console.print(table)
    if report["device"] == "cuda":
        console.print(_ON_GPUS, highlight=False)
    console.print(
        f"speedup {report['speedup']:.2f}, median over pairs of steps; "
        f"loss {report['loss_first']:.3f} to {report['loss_last']:.3f}, "
        f"largest relative difference to stock {report['loss_max_rel_diff']:.2e}",
        highlight=False,
    )
    groups = Table("group", "all-gather", "reduce-scatter", "reason")
    for group in report["groups"]:
        cells = (group["name"], group["all_gather"], group["reduce_scatter"], group["reason"])
        groups.add_row(*cells)
    console.print(groups)


def trace_events(results: list[Training]) -> dict[str, Any]:
    """One traced step as a Chrome trace, one track a rank, time 0 where the first rank starts."""
    zero = min(result.traced.start for result in results)
    events: list[dict[str, Any]] = []
    for rank, result in enumerate(results):
        step = result.traced
        events.append(chrome.track(f"rank {rank}", rank))
        spans = [
            ("forward", "step", step.start, step.forward_end),
            ("backward", "step", step.forward_end, step.backward_end),
            ("optimizer", "step", step.backward_end, step.end),
            *((call.name, "collective", call.start, call.end) for call in step.calls),
            *((op["name"], "operation", op["start_s"], op["end_s"]) for op in result.operations),
        ]
        events += [chrome.span(name, cat, rank, a - zero, b - zero) for name, cat, a, b in spans]
    return chrome.document(events)


def _bars(summary: dict[str, float]) -> dict[str, float]:
    """What makes up the median step, in the order of the bars."""
    if "transfer_ms" in summary:
        parts = {"collectives: transfer": "transfer_ms", "collectives: wait": "wait_ms"}
    else:
        parts = {"forward": "forward_ms", "backward": "backward_ms"}
    known = {title: summary[key] for title, key in parts.items()}
    return {"everything else": summary["step_ms_median"] - sum(known.values()), **known}


def _plot(report: dict[str, Any], curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(curves["stock"], label="stock", linewidth=4, alpha=0.4)
    left.plot(curves["tide"], label="TIDE", linewidth=1.5)
    left.set(xlabel="step", ylabel="loss (nats a byte)", title="The same training")
    left.legend()
    bars = [_bars(report[name]) for name in ("stock", "tide")]
    below = [0.0, 0.0]
    for title in bars[0]:
        heights = [bar[title] for bar in bars]
        right.bar(("stock", "TIDE"), heights, bottom=below, label=title)
        below = [sum(pair) for pair in zip(below, heights, strict=True)]
    right.set(ylabel="ms a step", title=f"{report['speedup']:.2f} times faster")
    right.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write(
    folder: Path,
    report: dict[str, Any],
    trainings: dict[str, list[Training]],
    say: Callable[[str], None],
) -> None:
    """Writes report.json, losses.json, trace.json and, if matplotlib is there, demo.png.

    On GPUs rank 0 has written a trace of each training instead of trace.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    curves = {name: losses(ranks) for name, ranks in trainings.items()}
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "losses.json").write_text(json.dumps(curves, indent=1) + "\n")
    traces = [ranks[0].trace for ranks in trainings.values() if ranks[0].trace]
    if trainings["tide"][0].traced is not None:
        traces = ["trace.json"]
        (folder / traces[0]).write_text(json.dumps(trace_events(trainings["tide"])) + "\n")
    written = ["report.json", "losses.json", f"{' and '.join(traces)} (for ui.perfetto.dev)"]
    try:
        _plot(report, curves, folder / "demo.png")
        written.append("demo.png")
    except ImportError:
        say("no demo.png: matplotlib is not installed (pip install matplotlib)")
    say(f"wrote {', '.join(written)} to {folder}")
