"""`tide plan`: what a lane would reserve, submit and choose on a machine, without running it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tide.cli.request import (
    DEFAULT_MACHINE,
    PRESET_HELP,
    machine_field,
    machine_help,
    make_request,
    parse_bytes,
    reduction_options,
    refusals,
)
from tide.cli.tables import console, human_bytes, human_count, human_topology, table, words

# Row of the table of calls: label, field of a group, field of its counts.
_CALL_ROWS = (
    ("operations", "operations"),
    ("copy descriptors", "descriptors"),
    ("transfers to other nodes", "transfers"),
    ("puts, one signal each", "puts"),
    ("bytes put", "put_bytes"),
    ("signals to siblings and rails", "signals"),
    ("waits", "waits"),
    ("pieces summed", "sums"),
    ("switch landings", "landings"),
    ("blocks cleared", "zeroed_pieces"),
)


def _region_table(report: dict[str, Any]) -> Any:
    full = human_bytes(report["full_landing_bytes"])
    rows = [
        (
            row["name"],
            f"{row['bytes']:,}",
            human_bytes(row["bytes"]),
            f"{row['ns']:.3f}",
            f"{row['formula_bytes']:,}",
            f"{row['formula_ns']:.3f}",
        )
        for row in report["regions"]
    ]
    return table(
        f"Memory of one rank; NS = {full}, the largest group's unsharded parameters",
        ("region", "bytes", "", "NS", "by the formula", "NS"),
        rows,
    )


def _memory_notes(report: dict[str, Any]) -> list[str]:
    """What the sums of the table of memory are of, and whether stock takes less."""
    regions = {row["name"]: row["bytes"] for row in report["regions"]}
    notes = [
        "reduce-scatter: staging + outbox + spares + inbox + accumulator",
        "live: what a rank holds at most, in a layer's backward: landings + all-gather stage + "
        "reduce-scatter + gradients, which are the previous layer's in mode in_place",
        "live in FSDP2: the same of torch's own collectives: 2 NS of parameters, and gradients "
        "packed in fp32",
    ]
    stock = regions["live in FSDP2"]
    more = regions["live"] - stock
    if more > 0:
        notes.append(
            f"more than stock: live is {human_bytes(more)} ({100 * more / stock:.1f} %) above live "
            f"in FSDP2; --mode auto --memory-limit {stock} looks for a plan that is not"
        )
    return notes


def _call_table(report: dict[str, Any]) -> Any:
    header, columns = ["one call of one rank"], []
    for group in report["groups"]:
        header += [f"{group['name']} all-gather", f"{group['name']} reduce-scatter"]
        columns += [
            ("-", "-", group["all_gather_rounds"], group["all_gather"]),
            (group["passes"], group["waves"], group["rounds"], group["reduce_scatter"]),
        ]
    rows = [
        [label, *(column[index] for column in columns)]
        for index, label in enumerate(("passes", "waves", "rounds"))
    ]
    rows += [[label, *(f"{column[3][key]:,}" for column in columns)] for label, key in _CALL_ROWS]
    return table(f"Calls, counted in the programs of rank {report['rank']}", header, rows)


def _connection_table(report: dict[str, Any]) -> Any:
    lane = report["connections"]
    rows = [
        (
            "queue pairs to peers",
            f"{lane['queue_pairs']:,}",
            f"{lane['queue_pairs_one_communicator']:,}",
        ),
        (
            "barrier steps to connect",
            f"{lane['barrier_steps']:,}",
            f"{lane['barrier_steps_one_communicator']:,}",
        ),
        ("progress threads", lane["progress_threads"], lane["progress_threads"]),
    ]
    header = ("of one rank", "rail communicator", "one communicator over all ranks")
    title = (
        f"Connections of one lane, {lane['contexts']} contexts; each collective has its own lane"
    )
    return table(title, header, rows)


def _print(report: dict[str, Any]) -> None:
    out: Console = console()
    out.print(
        f"{human_topology(report)} = {human_count(report['ranks'], 'rank')}, "
        f"machine {report['machine']['name']}",
        markup=False,
    )
    out.print(_region_table(report))
    for note in _memory_notes(report):
        out.print(note, markup=False)
    out.print(_call_table(report))
    out.print(_connection_table(report))
    header = ("what", "value", "why")
    choices = [tuple(choice[column] for column in header) for choice in report["choices"]]
    out.print(words("Choices", header, choices))


@refusals("plan")
def plan(
    file: Annotated[
        Path | None, typer.Argument(help="JSON with groups; see docs/memory.md", show_default=False)
    ] = None,
    preset: Annotated[str | None, typer.Option(help=PRESET_HELP)] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="M")] = None,
    local: Annotated[int | None, typer.Option(min=1, help="L, ranks a node")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="N, to be checked against M * L")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="whose programs are counted")] = None,
    mode: Annotated[str | None, typer.Option(help="in_place, slot_reuse or auto")] = None,
    machine: Annotated[str | None, typer.Option(help=machine_help(DEFAULT_MACHINE))] = None,
    placement: Annotated[str | None, typer.Option(help="direct, latin_square or auto")] = None,
    wave_width: Annotated[int | None, typer.Option(help="contributors a wave")] = None,
    k: Annotated[int | None, typer.Option("-k", "--round-width", help="transfers a round")] = None,
    passes: Annotated[int | None, typer.Option(help="n_part")] = None,
    chunk: Annotated[str | None, typer.Option(help="staging slot of one peer, e.g. 8MiB")] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="of what is live in a layer's backward, e.g. 6GiB")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Prints regions, rounds, transfers, descriptors, connections and every choice with its why.

    Nothing runs. What is not asked for is chosen by the machine model and the memory limit.
    """
    from tide import _core

    options = reduction_options(mode, placement, wave_width, k, passes, chunk) | {
        "memory_limit_bytes": (
            None if memory_limit is None else parse_bytes(memory_limit, "--memory-limit")
        ),
    }
    fields = {
        "nodes": nodes,
        "local_ranks": local,
        "ranks": ranks,
        "rank": rank,
        "machine": None if machine is None else machine_field(machine),
        "options": options,
    }
    text = _core.plan_report(json.dumps(make_request(file, preset, fields)))
    if as_json:
        typer.echo(text)
    else:
        _print(json.loads(text))
