"""`tide sim`: how long a collective would take on a machine, and what it would wait for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tide.bench import chrome
from tide.cli.request import (
    PRESET_HELP,
    RequestError,
    machine_field,
    machine_help,
    make_request,
    read_json,
    reduction_options,
    refusals,
)
from tide.cli.tables import console, human_bytes, human_topology, table, words

sim = typer.Typer(no_args_is_help=True, help="Simulate collectives on a machine; nothing runs.")

_DEFAULT_MACHINE = "h200"
_BENCH_FILE = "a JSON file that a bench on GPUs has written with --json"
_MODES = "in_place or slot_reuse"
_PLACEMENTS = "direct or latin_square"

File = Annotated[
    Path | None, typer.Argument(help="JSON with groups; see docs/memory.md", show_default=False)
]
Preset = Annotated[str | None, typer.Option(help=PRESET_HELP)]
NodesOption = Annotated[int | None, typer.Option(min=1, help="M")]
Local = Annotated[int | None, typer.Option(min=1, help="L, ranks a node")]
Machine = Annotated[str | None, typer.Option(help=machine_help(_DEFAULT_MACHINE))]
SumCtas = Annotated[int, typer.Option(min=0, help="CTAs of a sum; 0: as the fabric chooses")]
Pacing = Annotated[bool, typer.Option(help="keep what only keeps the network from crowding")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]
Trace = Annotated[
    Path | None, typer.Option(help="write every operation to this file, for ui.perfetto.dev")
]


def _ms(value: float) -> str:
    return f"{value:.3f}"


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _summary(report: dict[str, Any]) -> Any:
    rows = [
        (
            row["group"],
            _ms(row["ms"]),
            _ms(row["first_rank_ms"]),
            _ms(row["floor_ms"]),
            row["floor_of"] or "-",
            "-" if row["over_floor"] is None else f"{row['over_floor']:.3f}",
            row["limits"][0]["name"] if row["limits"] else "-",
        )
        for row in report["rows"]
    ]
    title = f"{report['operation']}, {human_topology(report)}, machine {report['machine']}"
    header = ("group", "ms", "first rank", "wire floor", "of", "ms / floor", "limited by")
    return table(title, header, rows)


def _details(row: dict[str, Any]) -> list[Any]:
    limits = [(limit["name"], _ms(limit["ms"]), _percent(limit["part"])) for limit in row["limits"]]
    used = [
        (
            resource["name"],
            resource["rank"],
            human_bytes(round(resource["bytes"])) if resource["bytes"] else "-",
            _ms(resource["busy_ms"]),
            _percent(resource["used"]),
        )
        for resource in row["resources"]
    ]
    waits = [
        (
            wait["stream"],
            wait["rank"],
            f"{wait['longest_us']:.1f}",
            f"{wait['waited_us']:.1f}",
            wait["before"],
            wait["cause"],
        )
        for wait in row["waits"]
    ]
    return [
        table("What set the pace on the critical path", ("", "ms", "of the time"), limits),
        table("The busiest of each kind", ("", "rank", "bytes", "busy ms", "used"), used),
        "busy: while anything used it; used: of what it could have moved until the end",
        table(
            "The longest wait of each stream, on the rank that waits longest",
            ("stream", "rank", "us", "all waits", "before", "until the end of"),
            waits,
        ),
    ]


def trace_of(row: dict[str, Any]) -> dict[str, Any]:
    """The timeline of a row: a process a rank, a track a stream."""
    events: list[chrome.Event] = []
    tracks: dict[tuple[int, str], int] = {}
    for step in row["timeline"]:
        rank, stream = step["rank"], step["stream"]
        if not any(known == rank for known, _ in tracks):
            events.append(chrome.process(f"rank {rank}", rank))
        if (rank, stream) not in tracks:
            tracks[rank, stream] = sum(known == rank for known, _ in tracks)
            events.append(chrome.track(stream, tracks[rank, stream], rank))
        start, end = 1e-6 * step["start_us"], 1e-6 * step["end_us"]
        tid = tracks[rank, stream]
        events.append(chrome.span(step["what"], "simulated", tid, start, end, rank))
    return chrome.document(events)


def _write_trace(file: Path, report: dict[str, Any]) -> None:
    if len(report["rows"]) != 1:
        raise RequestError(f"--trace: expected one group, got {len(report['rows'])}")
    try:
        file.write_text(json.dumps(trace_of(report["rows"][0])) + "\n")
    except OSError as error:
        raise RequestError(f"--trace {file}: {error.strerror}") from None


def _show(ask: Callable[[], str], as_json: bool, trace: Path | None) -> None:
    """Prints what the core answers, and writes the trace."""
    report = json.loads(ask())
    if trace is not None:
        _write_trace(trace, report)
        for row in report["rows"]:
            del row["timeline"]
    if as_json:
        typer.echo(json.dumps(report, indent=1))
        return
    out = console()
    out.print(_summary(report))
    what = "step" if "compute_ms" in report else "call"
    out.print(
        "first rank: when the first rank is done, ms; wire floor: the busiest link or rail at its "
        f"full rate; ms / floor: how many times as long the {what} takes"
    )
    if "compute_ms" in report:
        out.print(
            f"{report['layers']} layers, {report['mode']}: compute alone takes "
            f"{_ms(report['compute_ms'])} ms; {report['refreshed']} layers are refreshed for the "
            "backward"
        )
    for row in report["rows"]:
        for part in _details(row):
            out.print(part)


def _run(
    operation: str,
    request: dict[str, Any],
    sum_ctas: int,
    pacing: bool,
    as_json: bool,
    trace: Path | None,
) -> None:
    from tide import _core

    arguments = (json.dumps(request), operation, sum_ctas, pacing, trace is not None)
    _show(lambda: _core.simulate(*arguments), as_json, trace)


def _fields(
    nodes: int | None, local: int | None, machine: str | None, options: dict[str, Any]
) -> dict[str, Any]:
    field = None if machine is None else machine_field(machine)
    return {"nodes": nodes, "local_ranks": local, "machine": field, "options": options}


def _request(file: Path | None, preset: str | None, fields: dict[str, Any]) -> dict[str, Any]:
    request = make_request(file, preset, fields, _DEFAULT_MACHINE)
    # Nothing is chosen here: what is left open is the fabric's default.
    for name, values in (("mode", _MODES), ("placement", _PLACEMENTS)):
        if request["options"].get(name) == "auto":
            raise RequestError(f"{name}: expected {values}, got auto; `tide plan` chooses")
    return request


@sim.command("all-gather")
@refusals("sim all-gather")
def all_gather(
    file: File = None,
    preset: Preset = None,
    nodes: NodesOption = None,
    local: Local = None,
    machine: Machine = None,
    sum_ctas: SumCtas = 0,
    pacing: Pacing = True,
    as_json: AsJson = False,
    trace: Trace = None,
) -> None:
    """All-gather into parameters, as the nccl fabric would run it."""
    fields = _fields(nodes, local, machine, {})
    request = _request(file, preset, fields)
    _run("all-gather", request, sum_ctas, pacing, as_json, trace)


@sim.command("reduce-scatter")
@refusals("sim reduce-scatter")
def reduce_scatter(
    file: File = None,
    preset: Preset = None,
    nodes: NodesOption = None,
    local: Local = None,
    machine: Machine = None,
    mode: Annotated[str | None, typer.Option(help=_MODES)] = None,
    placement: Annotated[str | None, typer.Option(help=_PLACEMENTS)] = None,
    wave_width: Annotated[int | None, typer.Option(help="contributors a wave")] = None,
    k: Annotated[int | None, typer.Option("-k", "--round-width", help="transfers a round")] = None,
    passes: Annotated[int | None, typer.Option(help="n_part")] = None,
    chunk: Annotated[str | None, typer.Option(help="staging slot at most, e.g. 128MiB")] = None,
    sum_ctas: SumCtas = 0,
    pacing: Pacing = True,
    as_json: AsJson = False,
    trace: Trace = None,
) -> None:
    """Reduce-scatter of gradients into fp32; what is not given is the nccl fabric's default."""
    options = reduction_options(mode, placement, wave_width, k, passes, chunk)
    fields = _fields(nodes, local, machine, options)
    request = _request(file, preset, fields)
    _run("reduce-scatter", request, sum_ctas, pacing, as_json, trace)


@sim.command("step")
@refusals("sim step")
def step(
    file: File = None,
    preset: Preset = None,
    nodes: NodesOption = None,
    local: Local = None,
    machine: Machine = None,
    layers: Annotated[
        int, typer.Option(min=1, max=10_000, help="equal layers, each the group")
    ] = 12,
    forward_ms: Annotated[float, typer.Option(help="compute of a layer")] = 1.0,
    backward_ms: Annotated[float, typer.Option(help="compute of a layer")] = 2.0,
    optimizer_ms: Annotated[float, typer.Option(help="of all layers")] = 0.0,
    compute_gb_per_s: Annotated[
        float, typer.Option(help="memory traffic of compute; 0: nothing slows it down")
    ] = 0.0,
    mode: Annotated[str | None, typer.Option(help=_MODES)] = None,
    early: Annotated[
        bool | None,
        typer.Option("--early/--no-early", help="in_place: gather layer l - 2 behind reduce l"),
    ] = None,
    kept: Annotated[
        bool,
        typer.Option(
            "--kept/--no-kept",
            help="one node: the backward refreshes the layers that the forward leaves in the slots",
        ),
    ] = True,
    slots: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=10_000,
            help="landings, each of a layer; by default 4 in mode in_place on one node, else 2",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    trace: Trace = None,
) -> None:
    """A training step of FSDP2 with its default prefetch: gathers, computes, reduces."""
    from tide import _core

    fields = _fields(nodes, local, machine, {"mode": mode})
    request = _request(file, preset, fields)
    if early is not None and request["options"].get("mode") == "slot_reuse":
        raise RequestError("--early, --no-early: expected mode in_place, got slot_reuse")
    if slots is None:  # as the adapter takes of bf16 parameters that are reduced in fp32
        in_place = request["options"].get("mode") != "slot_reuse"
        slots = 4 if in_place and request["nodes"] == 1 else 2
    times = (layers, forward_ms, backward_ms, optimizer_ms, compute_gb_per_s)
    arguments = (json.dumps(request), *times, early is not False, kept, slots)
    _show(lambda: _core.simulate_step(*arguments, trace is not None), as_json, trace)


@sim.command("compare")
@refusals("sim compare")
def compare(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False)],
    machine: Annotated[str | None, typer.Option(help=machine_help("that of the GPUs"))] = None,
    as_json: AsJson = False,
) -> None:
    """Collectives and steps that benches on GPUs have measured, beside what is simulated."""
    from tide import Error
    from tide.bench import predict

    model = None if machine is None else machine_field(machine)
    rows = []
    nothing = []
    for file in files:
        try:
            content = read_json(file)
        except RequestError as error:
            raise RequestError(f"{error}; expected {_BENCH_FILE}") from None
        try:
            made = predict.compare(content, model)
        except (Error, ValueError) as error:
            raise RequestError(f"{file}: {error}") from None
        rows += [{"file": file.name} | row for row in made]
        if not made:
            nothing.append(str(file))
    if nothing:
        where = ", ".join(nothing)
        if not rows:
            raise RequestError(
                f"expected a collective or a training step on GPUs, found none in {where}; "
                f"give {_BENCH_FILE}"
            )
        typer.echo(f"tide sim compare: nothing to compare in {where}", err=True)
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    cells = [
        (
            row["file"],
            row["op"],
            row["preset"],
            f"{row['nodes']} x {row['ranks'] // row['nodes']}",
            f"{row['compute_gb_per_s']:g}" if row.get("compute_gb_per_s") else "-",
            _ms(row["measured_ms"]),
            "-" if row["predicted_ms"] is None else _ms(row["predicted_ms"]),
            "-" if row["over_measured"] is None else f"{row['over_measured']:.3f}",
            row["limited_by"],
        )
        for row in rows
    ]
    header = ("file", "op", "preset", "nodes", "compute GB/s", "measured ms", "simulated ms")
    header += ("ratio", "limited by")
    console().print(table("Simulated / measured", header, cells))


@sim.command("machine")
@refusals("sim machine")
def machine(
    name: Annotated[
        str, typer.Argument(help=machine_help(_DEFAULT_MACHINE), show_default=False)
    ] = _DEFAULT_MACHINE,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the model as a file for --machine")
    ] = False,
) -> None:
    """Prints every number of a machine model with its unit and where it comes from."""
    from tide import _core

    field = machine_field(name)
    text = _core.machine_json(field) if isinstance(field, str) else json.dumps(field)
    numbers = _core.machine_numbers(text)
    if as_json:
        typer.echo(text)
        return
    rows = [
        (n["name"], f"{n['value']:g} {n['unit']}".strip(), n["meaning"], n["source"])
        for n in numbers
    ]
    console().print(words(f"Machine {name}", ("number", "value", "meaning", "source"), rows))
