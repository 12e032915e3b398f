"""`python -m tide.bench.gpu BENCH`: the benches of `tide bench` on GPUs, without typer and rich."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tide.bench.gpu import commands
from tide.bench.launch import LaunchError


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in _words(text))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tide.bench.gpu",
        description="Measures TIDE beside NCCL and stock FSDP2 on the GPUs of this machine.",
        epilog="TIDE_STAGING_SLOT, TIDE_PLACEMENT, ... apply; see `tide info`.",
    )
    parser.add_argument("bench", choices=tuple(commands.COMMANDS))
    parser.add_argument("--ranks", type=int, help="processes; default: one a GPU, at least 2")
    parser.add_argument("--nodes", type=int, default=0, help="virtual nodes of the collectives")
    parser.add_argument(
        "--preset", default=commands.PRESET, help="shapes, or for train: moe, dense"
    )
    parser.add_argument("--rounds", type=int, default=0, help="measured rounds, warm-up apart")
    parser.add_argument("--tokens", type=_numbers, default=(), help="train: 2048,4096,...")
    parser.add_argument("--systems", type=_words, default=(), help="train: stock,in_place,...")
    parser.add_argument("--trace", default="", help="train: a folder for Chrome traces")
    parser.add_argument("--json", type=Path, dest="json_file", help="also write the rows here")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    options = vars(_parse(arguments))
    bench = options.pop("bench")
    try:
        commands.run(bench, commands.Request(**options))
    except (LaunchError, ValueError) as error:
        print(f"{bench}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
