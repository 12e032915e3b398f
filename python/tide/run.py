"""Runs a training script with TIDE enabled for every ``fully_shard`` root in it.

    python -m tide.run [options] train.py arguments...
    torchrun --nproc-per-node 4 -m tide.run train.py arguments...

A root is enabled when its first forward begins, unless the script did it. Rank 0 prints the
report to stderr after the first backward, and at exit if a path or a reason changed since. It says
so at exit if there was no root; with ``--strict`` that is an error.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import os
import runpy
import sys
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from tide.fsdp.enable import enable_model, is_enabled
from tide.fsdp.group import COLLECTIVES
from tide.fsdp.handle import Handle
from tide.fsdp.options import MODES, Options
from tide.fsdp.report import Report


def _paths(report: Report) -> tuple[Any, ...]:
    """Returns what makes a report worth printing again: no sizes, no numbers of calls."""
    return [(group["name"], group["reason"]) for group in report.groups], report.notes


class _Reporter:
    """Prints the reports of all enabled roots on rank 0."""

    def __init__(self) -> None:
        self._handles: list[Handle] = []
        self._printed: list[tuple[Any, ...]] = []
        self._stepped = False
        self._rank = 0
        self.found_root = False  # enabled here or by the script

    def add(self, handle: Handle) -> None:
        """Remembers a handle; keeps it alive until the end of the process."""
        self._handles.append(handle)
        self._rank = dist.get_rank()

    def after_backward(self) -> None:
        """Prints all reports after the first backward."""
        if not self._stepped:
            self._stepped = True
            self.show()

    def show(self) -> None:
        """Prints all reports unless nothing but numbers changed since they were printed."""
        if self._rank != 0:
            return
        reports = [handle.report() for handle in self._handles]
        paths = [_paths(report) for report in reports]
        if paths != self._printed:
            self._printed = paths
            for report in reports:
                print(report, file=sys.stderr, flush=True)


def hook_roots(options: Options) -> _Reporter:
    """Enables every FSDP2 root at the end of its lazy initialization."""
    reporter = _Reporter()
    lazy_init, final_callback = FSDPState._lazy_init, FSDPState._root_post_backward_final_callback

    @functools.wraps(lazy_init)
    def enabling_lazy_init(self: FSDPState) -> Any:
        fresh = self._is_root is None
        result = lazy_init(self)
        if fresh and self._is_root:
            reporter.found_root = True
            if not is_enabled(self._modules[0]):
                reporter.add(enable_model(self._modules[0], options))
        return result

    @functools.wraps(final_callback)
    def reporting_final_callback(self: FSDPState) -> Any:
        result = final_callback(self)
        reporter.after_backward()
        return result

    FSDPState._lazy_init = enabling_lazy_init
    FSDPState._root_post_backward_final_callback = reporting_final_callback
    atexit.register(reporter.show)
    return reporter


def _run_script(script: str, reporter: _Reporter, strict: bool) -> None:
    """Runs the script; says so if nothing in it was for TIDE, unless it failed."""
    failed = False
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        failed = end.code not in (None, 0)
        raise
    except BaseException:
        failed = True
        raise
    finally:
        if not failed and not reporter.found_root:
            if os.environ.get("RANK", "0") == "0":
                message = f"{script} ran no forward of a fully_shard model; TIDE did nothing"
                print(f"tide.run: {message}", file=sys.stderr, flush=True)
            if strict:
                sys.exit(1)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tide.run", description=__doc__.split("\n")[0])
    parser.add_argument("--strict", action="store_true", help="fail instead of using torch's path")
    parser.add_argument("--mode", default="auto", choices=MODES)
    parser.add_argument("--timeout", type=float, help="seconds before a wait for a peer fails")
    parser.add_argument("--nodes", type=int, help="virtual nodes to split the ranks into")
    parser.add_argument(
        "--collectives",
        default=",".join(COLLECTIVES),
        help="comma-separated: all_gather, reduce_scatter",
    )
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Parses the options before the script, then runs the script as ``__main__``."""
    parsed = _parse(sys.argv[1:] if arguments is None else arguments)
    collectives = tuple(name for name in parsed.collectives.split(",") if name)
    options = Options(parsed.mode, parsed.strict, collectives, parsed.timeout, parsed.nodes)
    if (problem := options.problem()) is not None:
        sys.exit(f"tide.run: {problem}")
    if not os.path.exists(parsed.script):
        sys.exit(f"tide.run: expected a script, found no file {parsed.script!r}")
    main_file = os.path.join(parsed.script, "__main__.py")
    if os.path.isdir(parsed.script) and not os.path.exists(main_file):
        sys.exit(f"tide.run: expected a script, found no file {main_file!r}")
    reporter = hook_roots(options)
    # Before CUDA starts: with few hardware queues, streams that wait for peers hold up others.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    sys.argv = [parsed.script, *parsed.arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(parsed.script))
    _run_script(parsed.script, reporter, parsed.strict)


if __name__ == "__main__":
    main()
