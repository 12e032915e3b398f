"""Runs the C++ and the Python tests and closes with one line, `N passed, N failed`.

Every test binary and every Python test file is a process group of its own with a hard time limit.
A hang or a crash therefore fails by the name of the test that was running, is killed with all its
children, and the rest goes on. Cases that a dead process left unrun count as failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GTEST_RUN = re.compile(r"^\[ RUN      \] (\S+)", re.MULTILINE)
GTEST_END = re.compile(r"^\[ +(OK|FAILED|SKIPPED) +\] ([^\s,]+)", re.MULTILINE)
PYTEST_BEGIN = re.compile(r"^(tests/\S+::.+?) (?=PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS|$)", re.M)
PYTEST_END = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b", re.M)
PYTEST_NO_TESTS = 5
TAIL_LINES = 60


@dataclasses.dataclass
class Outcome:
    """What one process reported. `failed` holds (test name, reason)."""

    passed: int = 0
    skipped: int = 0
    failed: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    log: str = ""


@dataclasses.dataclass
class Process:
    """A finished process: its exit code, negative for a signal, None after the time limit."""

    code: int | None
    log: str

    def reason(self, limit_s: float) -> str:
        """Why the process counts as dead, in words."""
        if self.code is None:
            return f"still running after {limit_s:.0f} s"
        if self.code < 0:
            return f"killed by {signal.Signals(-self.code).name}"
        return f"exit code {self.code}"


def run_process(command: list[str], limit_s: float, env: dict[str, str] | None = None) -> Process:
    """Runs command in its own process group, which is killed at the end, children included."""
    with tempfile.TemporaryFile() as out:  # not a pipe: a surviving child would keep it open
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            child.wait()
        out.seek(0)
        return Process(code, out.read().decode(errors="replace"))


def list_gtests(binary: str, test_filter: str) -> list[str]:
    """Names of the cases that the binary would run, disabled ones left out."""
    listing = run_process([binary, "--gtest_list_tests", test_filter], limit_s=30)
    if listing.code != 0:
        raise RuntimeError(f"{binary} --gtest_list_tests: {listing.reason(30)}\n{listing.log}")
    names, suite = [], ""
    for line in listing.log.splitlines():
        name = line.split("#")[0].rstrip()
        if name.startswith("  "):
            names.append(suite + name.strip())
        elif name.endswith("."):
            suite = name
    return [name for name in names if "DISABLED_" not in name]


def read_gtest_json(path: Path) -> Outcome:
    """Counts of a complete run."""
    outcome = Outcome()
    for suite in json.loads(path.read_text())["testsuites"]:
        for case in suite["testsuite"]:
            name = f"{suite['name']}.{case['name']}"
            if case.get("failures"):
                outcome.failed.append((name, "failed"))
            elif case["result"] == "SKIPPED":
                outcome.skipped += 1
            elif case["result"] == "COMPLETED":
                outcome.passed += 1
    return outcome


def read_dead_gtest(process: Process, names: list[str], limit_s: float) -> Outcome:
    """Counts of a run that ended early: by the progress lines, the rest failed."""
    outcome = Outcome()
    ends = {name: word for word, name in GTEST_END.findall(process.log)}
    started = set(GTEST_RUN.findall(process.log))
    for name in names:
        if ends.get(name) == "OK":
            outcome.passed += 1
        elif ends.get(name) == "SKIPPED":
            outcome.skipped += 1
        elif name in ends:
            outcome.failed.append((name, "failed"))
        else:
            why = process.reason(limit_s) if name in started else "not run: an earlier test died"
            outcome.failed.append((name, why))
    if not outcome.failed:  # died after the last case, in a destructor say
        outcome.failed.append(("(exit of the binary)", process.reason(limit_s)))
    return outcome


# Tests left out by tier; `--all` leaves out none.
GTEST_FILTERS = {"fast": "-*Slow*:*FullProduct*", "test": "-*FullProduct*", "all": "*"}


def run_gtest(binary: str, limit_s: float, tier: str) -> Outcome:
    """Runs one C++ test binary."""
    test_filter = f"--gtest_filter={GTEST_FILTERS[tier]}"
    try:
        names = list_gtests(binary, test_filter)
    except (OSError, RuntimeError) as error:
        return Outcome(failed=[("(listing of the tests)", str(error))])
    if not names:
        return Outcome()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        process = run_process([binary, test_filter, f"--gtest_output=json:{report}"], limit_s)
        complete = process.code in (0, 1) and report.exists()
        outcome = read_gtest_json(report) if complete else read_dead_gtest(process, names, limit_s)
    if process.code != 0 and not outcome.failed:
        outcome.failed.append(("(exit of the binary)", process.reason(limit_s)))
    outcome.log = process.log
    return outcome


def read_junit(path: Path) -> Outcome:
    """Counts of a pytest run; a case with several entries (a failing teardown) counts once."""
    worst: dict[str, str] = {}
    order = ["passed", "skipped", "failed"]
    for case in ET.parse(path).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = case.find("failure") is not None or case.find("error") is not None
        state = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        worst[name] = max(worst.get(name, "passed"), state, key=order.index)
    states = list(worst.values())
    return Outcome(
        states.count("passed"),
        states.count("skipped"),
        [(name, "failed") for name, state in worst.items() if state == "failed"],
    )


def read_dead_pytest(process: Process, limit_s: float) -> Outcome:
    """Counts of a pytest process that ended without a report, by its progress lines."""
    ends = dict(PYTEST_END.findall(process.log))
    words = list(ends.values())
    outcome = Outcome(words.count("PASSED"), words.count("SKIPPED"))
    outcome.failed = [
        (name, "failed") for name, word in ends.items() if word in ("FAILED", "ERROR")
    ]
    running = [name for name in PYTEST_BEGIN.findall(process.log) if name not in ends]
    culprit = running[-1] if running else "(before the first or after the last test)"
    outcome.failed.append((culprit, f"{process.reason(limit_s)}; later tests did not run"))
    return outcome


def run_pytest(path: Path, limit_s: float, tier: str) -> Outcome:
    """Runs one Python test file."""
    env = dict(os.environ, PYTHONUNBUFFERED="1", COLUMNS="200")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        name = path.relative_to(ROOT).as_posix()
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", name]
        # The stacks of a hanging test are printed halfway to the time limit.
        command += [f"--junitxml={report}", "-o", f"faulthandler_timeout={0.5 * limit_s:.1f}"]
        process = run_process(
            command + (["-m", "not slow"] if tier == "fast" else []), limit_s, env
        )
        if process.code == PYTEST_NO_TESTS:
            return Outcome(log=process.log)
        complete = process.code is not None and report.exists()
        outcome = read_junit(report) if complete else read_dead_pytest(process, limit_s)
    if process.code != 0 and not outcome.failed:
        outcome.failed.append(("(exit of pytest)", process.reason(limit_s)))
    outcome.log = process.log
    return outcome


def find_gtests(build: Path) -> list[tuple[str, str, float]]:
    """(name, binary, limit in seconds) of every test that ctest knows in the build folder."""
    listing = subprocess.run(
        ["ctest", "--test-dir", str(build), "--show-only=json-v1"],
        check=True,
        capture_output=True,
        text=True,
    )
    found = []
    for test in json.loads(listing.stdout)["tests"]:
        properties = {entry["name"]: entry["value"] for entry in test.get("properties", [])}
        command = test.get("command", ["(not built)"])
        found.append((test["name"], command[0], float(properties.get("TIMEOUT", 120))))
    return found


def show(name: str, outcome: Outcome, seconds: float) -> None:
    """Prints the line of one process, and the end of its output if something failed."""
    if outcome.failed:
        print("\n".join(outcome.log.splitlines()[-TAIL_LINES:]))
    word = "FAIL" if outcome.failed else "ok  "
    counts = f"{outcome.passed:4d} passed"
    counts += f", {len(outcome.failed)} failed" if outcome.failed else ""
    counts += f", {outcome.skipped} skipped" if outcome.skipped else ""
    print(f"{word} {name:<44} {seconds:6.1f} s  {counts}", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="CMake build folder")
    parser.add_argument("--fast", action="store_true", help="leave out *Slow* and marker slow")
    parser.add_argument("--all", action="store_true", help="also *FullProduct*, which takes hours")
    parser.add_argument("--cpp-only", action="store_true", help="no Python tests")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one Python file")
    parser.add_argument("--scale", type=float, default=1, help="factor on every time limit")
    parser.add_argument("only", nargs="*", help="run what has one of these words in its name")
    return parser.parse_args()


def main() -> int:
    """Runs everything; 0 if at least one test ran and none failed."""
    arguments = parse_arguments()
    tier = "fast" if arguments.fast else "all" if arguments.all else "test"
    jobs = []
    for name, binary, limit_s in find_gtests(arguments.build):
        jobs.append((name, run_gtest, binary, limit_s))
    if not arguments.cpp_only:
        for path in sorted((ROOT / "tests" / "python").glob("**/test_*.py")):
            jobs.append((path.relative_to(ROOT).as_posix(), run_pytest, path, arguments.limit))
    passed, skipped, failed = 0, 0, []
    for name, run, target, limit_s in jobs:
        if arguments.only and not any(word in name for word in arguments.only):
            continue
        start = time.monotonic()
        outcome = run(target, limit_s * arguments.scale, tier)
        show(name, outcome, time.monotonic() - start)
        passed += outcome.passed
        skipped += outcome.skipped
        failed += [(name, *entry) for entry in outcome.failed]
    for name, case, reason in failed:
        print(f"FAILED {name}: {case}: {reason}")
    if skipped:
        print(f"skipped: {skipped}")
    if passed + len(failed) == 0:
        print("no test ran: expected at least one; is the build folder the right one?")
    print(f"{passed} passed, {len(failed)} failed")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
