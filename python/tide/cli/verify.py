"""`tide verify`: checks of plans before anything runs."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tide.cli.request import PRESET_HELP, RequestError, make_request, refusals
from tide.cli.tables import console, human_bytes, table

_MODES = ("in_place", "slot_reuse")
# (nodes, local ranks) whose programs are mutated.
_MUTATED = [
    (1, 2),
    (1, 4),
    (1, 8),
    (2, 1),
    (2, 4),
    (3, 2),
    (4, 4),
    (5, 3),
    (8, 1),
    (9, 2),
    (6, 2),
    (2, 8),
]

_MOST_NODES = 1024  # of --exhaustive, as in the paper
_WIDTHS = [1, 2, 4]
_PASSES = [1, 2, 3, 4]
# A proof keeps for each operation what it knows of all ranks. Least bytes a pair of ranks, as
# measured: of the groups of `_llama_like`, and of a group of three small parameters.
_PAIR_BYTES = 17_000
_LEAST_PAIR_BYTES = 7_000
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
    from tide import _core

    own = _core.verify_exhaustive(max_nodes, local, _WIDTHS, _PASSES)
    paper = _core.verify_exhaustive(max_nodes, local, _PAPER_WIDTHS, [1])
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


def _llama_like() -> list[dict[str, Any]]:
    """Thirty parameters of a layer and a group of another size."""

    def group(name: str, shapes: list[tuple[int, int]]) -> dict[str, Any]:
        params = [
            {"name": f"p{i}", "rows": rows, "row_elems": columns, "dtype": "bf16"}
            for i, (rows, columns) in enumerate(shapes)
        ]
        return {"name": name, "params": params}

    layer = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (4096, 1)] * 6
    return [group("layer", layer), group("head", [(32001, 4096), (4096, 1)])]


def _check_memory(request: dict[str, Any], pair_bytes: int) -> None:
    """Refuses a proof that would not end but be killed.

    Raises:
        RequestError: a proof takes more memory than there is.
    """
    from tide import _core

    nodes, local = request["nodes"], request["local_ranks"]
    if not all(isinstance(number, int) and number > 0 for number in (nodes, local)):
        return  # the core says what is wrong
    ranks = nodes * local
    available, source = _core.available_memory()
    needed = pair_bytes * ranks * ranks
    if needed > available:
        raise RequestError(
            f"{nodes} nodes x {local} = {ranks:,} ranks: a proof takes about "
            f"{human_bytes(needed)} of memory or more, {human_bytes(available)} are available "
            f"({source}); try fewer nodes, since schedules repeat, or --exhaustive, which checks "
            f"all node counts up to {_MOST_NODES} without programs"
        )


def _show_proof(label: str, answer: dict[str, Any], seconds: float) -> None:
    out = console()
    for finding in answer["findings"]:
        out.print(finding, markup=False)
    verdict = "safe" if answer["ok"] else f"{len(answer['findings'])} findings"
    out.print(
        f"{label}: {verdict} ({answer['sequences']} sequences, {answer['calls']} calls, "
        f"{answer['operations']:,} operations, {answer['accesses']:,} accesses, {seconds:.1f} s)"
    )


def _prove(requests: list[tuple[str, dict[str, Any]]]) -> bool:
    """Verifies the plans of one request in several modes; returns whether all are safe.

    All-gathers, on one node refreshes among them, are the same in every mode. They are proved for
    landings of each rank's own, as on GPUs, and for one that the ranks of a node share, as on the
    host fabric.
    """
    from tide import _core

    first, request = requests[0]
    where = first.rsplit(", ", 1)[0]
    proofs = [
        (f"{where}, all-gathers, a landing a rank", request, ["all_gather"], False),
        (f"{where}, all-gathers, a landing a node", request, ["all_gather"], True),
    ]
    for label, request in requests:
        proofs += [
            (f"{label}, reduce-scatters", request, ["reduce_scatter"], False),
            (f"{label}, both lanes, a landing a rank", request, ["training"], False),
        ]
    proofs.append((f"{first}, both lanes, a landing a node", requests[0][1], ["training"], True))
    safe = True
    for label, request, lanes, node_landing in proofs:
        start = time.monotonic()
        answer = _core.verify_plans(json.dumps(request), lanes, node_landing)
        _show_proof(label, answer, time.monotonic() - start)
        safe = safe and answer["ok"]
    return safe


def _tiny_groups(ranks: int) -> list[dict[str, Any]]:
    """Two groups in which no rank and no sub-slice is empty and the last rank is padded."""

    def group(name: str, rows: list[int], row_elems: int) -> dict[str, Any]:
        params = [
            {
                "name": f"p{i}",
                "rows": count,
                "row_elems": row_elems,
                "dtype": "bf16",
                "shard_dtype": "fp32",
            }
            for i, count in enumerate(rows)
        ]
        return {"name": name, "params": params}

    return [
        group("layer", [2 * ranks - 1, ranks, 3 * ranks], 340),
        group("head", [5 * ranks - 1, 2 * ranks], 332),
    ]


def _tiny_requests(nodes: int, local: int) -> list[tuple[str, dict[str, Any]]]:
    """Every placement and mode that differs on this topology."""
    several = nodes > 1
    placements = ["direct", "latin_square"] if several and local > 1 else ["direct"]
    requests = []
    for placement in placements:
        for mode in _MODES if several else _MODES[:1]:
            options = {"placement": placement, "mode": mode}
            request = {
                "groups": _tiny_groups(nodes * local),
                "nodes": nodes,
                "local_ranks": local,
                "machine": "paper-8-nodes",
                "options": options,
            }
            requests.append((f"{nodes} x {local}, {placement}, {mode}", request))
    return requests


def _inject(requests: list[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, list[Any]]]:
    """Yields the label and the mutants of each request."""
    from tide import _core

    interrupted = threading.Event()

    # Ctrl-C reaches the main thread alone, which waits for the others before it ends.
    def give_up() -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt

    def run(entry: tuple[str, dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        label, request = entry
        # All ranks are alike but for padding, which the last one has.
        ranks = [0, request["nodes"] * request["local_ranks"] - 1]
        return label, _core.mutate_plans(json.dumps(request), ranks, give_up)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            yield from pool.map(run, requests)
        finally:
            interrupted.set()


def _mutate(topologies: list[tuple[int, int]]) -> bool:
    """Injects every mistake; returns whether each was detected or is known to be harmless."""
    requests = [r for nodes, local in topologies for r in _tiny_requests(nodes, local)]
    total: dict[str, dict[str, Any]] = {}
    error_console = Console(stderr=True, highlight=False)
    for label, rows in _inject(requests):
        injected = sum(row["injected"] for row in rows)
        error_console.print(f"{label}: {injected} mutants")
        for row in rows:
            sum_of = total.setdefault(
                row["kind"], {"injected": 0, "detected": 0, "explained": [], "undetected": []}
            )
            sum_of["injected"] += row["injected"]
            sum_of["detected"] += row["detected"]
            for key in ("explained", "undetected"):
                sum_of[key] += [f"{label}: {text}" for text in row[key]]
    out = console()
    for key in ("explained", "undetected"):
        for kind, row in total.items():
            shown = row[key] if key == "undetected" else row[key][:2]
            for text in shown:
                out.print(f"{key}: {kind}: {text}", markup=False)
            if len(row[key]) > len(shown):
                out.print(f"{key}: {kind}: {len(row[key]) - len(shown)} more of this kind")
    header = ("kind", "injected", "detected", "explained", "undetected")
    rows = [
        (kind, row["injected"], row["detected"], len(row["explained"]), len(row["undetected"]))
        for kind, row in total.items()
    ]
    sums = [sum(row[column] for row in rows) for column in range(1, 5)]
    out.print(table("Mutants", header, [*rows, ("all", *sums)]))
    return sums[-1] == 0


@refusals("verify")
def verify(
    file: Annotated[
        Path | None, typer.Argument(help="JSON file of groups, see docs/memory.md")
    ] = None,
    preset: Annotated[str | None, typer.Option(help=PRESET_HELP)] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="M")] = None,
    local: Annotated[int | None, typer.Option(min=1, help="L")] = None,
    mode: Annotated[
        str | None, typer.Option(help="in_place, slot_reuse or auto; by default both of the first")
    ] = None,
    placement: Annotated[str | None, typer.Option(help="direct or latin_square")] = None,
    k: Annotated[int | None, typer.Option("-k", "--round-width", help="transfers a round")] = None,
    passes: Annotated[int | None, typer.Option(help="n_part")] = None,
    mutate: Annotated[
        bool, typer.Option("--mutate", help="inject every mistake: can the proof fail?")
    ] = False,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="all node counts and wave widths, without programs")
    ] = False,
    max_nodes: Annotated[
        int | None,
        typer.Option(min=2, max=1 << 16, help=f"--exhaustive: largest M; default: {_MOST_NODES}"),
    ] = None,
) -> None:
    """Proves the programs of all ranks safe: exit code 0 if they are, 1 if not.

    By default a Llama-like group and one of another size on 2 nodes of 4 ranks, in both modes.
    Time and memory grow with the square of the ranks: about 15 s and 0.3 GB a mode for 16 nodes of
    8, 5 minutes or more and 4.5 GB for 64 of 8. What does not fit into memory is refused.
    --mutate without --nodes and --local goes through twelve small topologies. Detected: the proof
    fails with the mistake; explained: it does not, and it is known which operation does the work.
    """
    if exhaustive and mutate:
        raise RequestError("expected --exhaustive or --mutate, got both")
    if max_nodes is not None and not exhaustive:
        raise RequestError("--max-nodes: expected --exhaustive with it; else give --nodes")
    if exhaustive:
        _exhaustive(max_nodes or _MOST_NODES, local if local is not None else 8)
        return
    if mutate:
        one = nodes is not None or local is not None
        topologies = [(nodes or 2, local or 4)] if one else _MUTATED
        if not _mutate(topologies):
            raise typer.Exit(1)
        return
    requests = []
    for wanted in _MODES if mode is None else (mode,):
        options = {"mode": wanted, "placement": placement, "round_width": k, "passes": passes}
        fields = {"nodes": nodes, "local_ranks": local, "options": options}
        if file is None and preset is None:
            given = {name: value for name, value in options.items() if value is not None}
            request = {"groups": _llama_like(), "machine": "paper-8-nodes", "options": given}
            request |= {"nodes": nodes or 2, "local_ranks": local or 4}
        else:
            request = make_request(file, preset, fields)
        label = f"{request['nodes']} x {request['local_ranks']}, {wanted}"
        own = file is None and preset is None
        _check_memory(request, _PAIR_BYTES if own else _LEAST_PAIR_BYTES)
        requests.append((label, request))
    if not _prove(requests):
        raise typer.Exit(1)
