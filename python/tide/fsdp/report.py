"""What runs where, and why: the report of an enabled model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tide._core import format_bytes

_REGIONS = ("stage", "staging", "outbox", "spare", "inbox", "accumulator")


def format_table(header: list[str], rows: list[list[str]]) -> str:
    """Returns left-aligned columns separated by two spaces."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


@dataclass(frozen=True)
class Report:
    """The state of an enabled model on this rank.

    Attributes:
        groups: one dict for each FSDP2 group: "name", "all_gather" and "reduce_scatter" with
            "tide" or "stock", "reason" (empty if every call ran on TIDE), "landing_bytes", "calls",
            and "refreshed": how many of the all-gathers on TIDE found their result in place.
        mode: the mode that was asked for.
        notes: sentences about choices that differ from what was asked for.
        memory: bytes by use: "landing" and, of each communicator's temporary regions, "stage",
            "staging", "outbox", "spare", "inbox" and "accumulator" a rank; "slots" is a number.
        world: ranks of the first group.
        landing_owner: "node" if the ranks of a node share their landings, else "rank"; the notes
            then say why.
    """

    groups: list[dict[str, Any]]
    mode: str
    notes: list[str]
    memory: dict[str, int]
    world: int
    landing_owner: str

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as plain values."""
        return {
            "mode": self.mode,
            "world": self.world,
            "groups": self.groups,
            "memory": self.memory,
            "landing_owner": self.landing_owner,
            "notes": self.notes,
        }

    def __str__(self) -> str:
        header = ["group", "all-gather", "reduce-scatter", "landing", "calls on TIDE"]
        header += ["refreshed", "reason"]
        rows = []
        for group in self.groups:
            calls = [group["calls"][c] for c in ("all_gather", "reduce_scatter")]
            ran = "  ".join(f"{c['tide']}/{c['tide'] + c['stock']}" for c in calls)
            cells = [group["name"], group["all_gather"], group["reduce_scatter"]]
            cells += [format_bytes(group["landing_bytes"]), ran, str(group["refreshed"])]
            rows.append([*cells, group["reason"] or "-"])
        title = f"TIDE, {self.world} ranks, mode {self.mode}"
        landing = format_bytes(self.memory["landing"])
        legend = "calls on TIDE: of all calls so far, all-gathers then reduce-scatters"
        memory = [f"{self.memory['slots']} landing slots, {landing} a {self.landing_owner}"]
        regions = [(name, self.memory[name]) for name in _REGIONS if self.memory.get(name)]
        if regions:
            sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in regions)
            memory.append(f"temporary regions a rank: {sizes}")
        return "\n".join([title, format_table(header, rows), legend, *memory, *self.notes])
