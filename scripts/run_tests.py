"""Runs the C++ and the Python tests and closes with one line, `N passed, N failed`.

Every test binary is a process group of its own with a hard time limit, and so are the Python tests
together: importing torch takes longer than most of them. A hang or a crash therefore fails by the
name of the test that was running, is killed with all its children, and the rest goes on. C++ cases
that a dead process left unrun count as failed, Python files behind it run in another process.
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
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GTEST_RUN = re.compile(r"^\[ RUN      \] (\S+)", re.MULTILINE)
GTEST_END = re.compile(r"^\[ +(OK|FAILED|SKIPPED) +\] ([^\s,]+)", re.MULTILINE)
# Python's faulthandler goes on in the line of the test.
PYTEST_BEGIN = re.compile(
    r"^(tests/\S+::.+?) "
    r"(?=PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS|Fatal Python error|Timeout \(|$)",
    re.M,
)
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
    seconds: float = 0


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


def wait(child: subprocess.Popen[bytes], limit_s: float, log: int | None) -> int | None:
    """Returns the exit code, None after the limit, which begins anew whenever the log grows."""
    if log is None:
        try:
            return child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
    size, deadline = 0, time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            return child.wait(1)
        except subprocess.TimeoutExpired:
            grown = os.fstat(log).st_size
            if grown > size:
                size, deadline = grown, time.monotonic() + limit_s
    return None


def run_process(
    command: list[str], limit_s: float, env: dict[str, str] | None = None, progress: bool = False
) -> Process:
    """Runs command in its own process group, which is killed at the end, children included.

    The limit is of all of it or, with ``progress``, of the time in which it writes nothing.
    """
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
            code = wait(child, limit_s, out.fileno() if progress else None)
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


def read_junit(path: Path, files: list[str]) -> dict[str, Outcome]:
    """Counts of a pytest run, by file; a case with several entries counts once, as the worst.

    A failing teardown is such an entry. The log of a file has what its failed cases said.
    """
    worst: dict[tuple[str, str], str] = {}
    outcomes = {file: Outcome() for file in files}
    order = ["passed", "skipped", "failed"]
    for case in ET.parse(path).iter("testcase"):
        # "tests.python.test_run" and perhaps a class; of a file that can't be collected the name.
        module = case.get("classname") or case.get("name", "")
        words = module.split(".")
        known = ("/".join(words[: i + 1]) + ".py" for i in range(len(words)))
        file = next((name for name in known if name in outcomes), files[-1])
        outcome = outcomes[file]
        bad = [word for kind in ("failure", "error") for word in case.findall(kind)]
        state = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        name = (file, case.get("name", ""))
        worst[name] = max(worst.get(name, "passed"), state, key=order.index)
        outcome.seconds += float(case.get("time", 0))
        for word in bad:
            outcome.log += f"--- {name[1]}\n{word.text}\n"
    for (file, name), state in worst.items():
        outcome = outcomes[file]
        outcome.passed += state == "passed"
        outcome.skipped += state == "skipped"
        if state == "failed":
            outcome.failed.append((name, "failed"))
    return outcomes


def read_dead_pytest(process: Process, paths: list[str], limit_s: float) -> dict[str, Outcome]:
    """Counts of a pytest process that ended without a report, by file, by its progress lines.

    Only of the files that it came to.
    """
    words = dict(PYTEST_END.findall(process.log))
    begun = [*dict.fromkeys(PYTEST_BEGIN.findall(process.log))]
    last = begun[-1].split("::")[0] if begun else paths[0]
    outcomes = {path: Outcome() for path in paths[: paths.index(last) + 1]}
    for name in begun:
        outcome = outcomes[name.split("::")[0]]
        word = words.get(name)
        outcome.passed += word == "PASSED"
        outcome.skipped += word == "SKIPPED"
        if word in ("FAILED", "ERROR"):
            outcome.failed.append((name, "failed"))
    running = [name for name in begun if name not in words]
    culprit = running[-1] if running else "(before the first or after the last test)"
    why = f"{process.reason(limit_s)}; later tests of the file did not run"
    outcomes[last].failed.append((culprit, why))
    outcomes[last].log = process.log
    return outcomes


def run_pytest(paths: list[str], limit_s: float, tier: str) -> dict[str, Outcome]:
    """Runs Python test files in one process, up to the first that ends or holds it up.

    The limit is of the time between two lines of progress.
    """
    env = dict(os.environ, PYTHONUNBUFFERED="1", COLUMNS="200")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *paths]
        command += ["--continue-on-collection-errors"]
        # The stacks of a hanging test are printed halfway to the time limit.
        command += [f"--junitxml={report}", "-o", f"faulthandler_timeout={0.5 * limit_s:.1f}"]
        command += ["-m", "not slow"] if tier == "fast" else []
        process = run_process(command, limit_s, env, progress=True)
        if process.code is None or not report.exists():
            return read_dead_pytest(process, paths, limit_s)
        outcomes = read_junit(report, paths)
    expected = (0, 1, PYTEST_NO_TESTS)
    if process.code not in expected or (
        process.code == 1 and not any(outcome.failed for outcome in outcomes.values())
    ):
        outcomes[paths[-1]].failed.append(("(exit of pytest)", process.reason(limit_s)))
        outcomes[paths[-1]].log += process.log
    return outcomes


def run_python(paths: list[str], limit_s: float, tier: str) -> Iterator[tuple[str, Outcome]]:
    """Runs Python test files: those behind one that ends or holds up its process in another."""
    while paths:
        print(f"     Python tests, {len(paths)} files", flush=True)
        outcomes = run_pytest(paths, limit_s, tier)
        yield from outcomes.items()
        paths = [path for path in paths if path not in outcomes]


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


def show(name: str, outcome: Outcome) -> None:
    """Prints the line of one process, and the end of its output if something failed."""
    if outcome.failed:
        print("\n".join(outcome.log.splitlines()[-TAIL_LINES:]))
    word = "FAIL" if outcome.failed else "ok  "
    counts = f"{outcome.passed:4d} passed"
    counts += f", {len(outcome.failed)} failed" if outcome.failed else ""
    counts += f", {outcome.skipped} skipped" if outcome.skipped else ""
    print(f"{word} {name:<44} {outcome.seconds:6.1f} s  {counts}", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="CMake build folder")
    parser.add_argument("--fast", action="store_true", help="leave out *Slow* and marker slow")
    parser.add_argument("--all", action="store_true", help="also *FullProduct*, which takes hours")
    parser.add_argument("--cpp-only", action="store_true", help="no Python tests")
    parser.add_argument(
        "--limit", type=float, default=600, help="seconds without progress of Python tests"
    )
    parser.add_argument("--scale", type=float, default=1, help="factor on every time limit")
    parser.add_argument("only", nargs="*", help="run what has one of these words in its name")
    return parser.parse_args()


def run_all(arguments: argparse.Namespace, tier: str) -> Iterator[tuple[str, Outcome]]:
    """Runs what was asked for, one after the other."""

    def wanted(name: str) -> bool:
        return not arguments.only or any(word in name for word in arguments.only)

    for name, binary, limit_s in find_gtests(arguments.build):
        if wanted(name):
            start = time.monotonic()
            outcome = run_gtest(binary, limit_s * arguments.scale, tier)
            outcome.seconds = time.monotonic() - start
            yield name, outcome
    if not arguments.cpp_only:
        found = sorted((ROOT / "tests" / "python").glob("**/test_*.py"))
        paths = [path.relative_to(ROOT).as_posix() for path in found]
        paths = [path for path in paths if wanted(path)]
        yield from run_python(paths, arguments.limit * arguments.scale, tier)


def main() -> int:
    """Runs everything; 0 if at least one test ran and none failed."""
    arguments = parse_arguments()
    tier = "fast" if arguments.fast else "all" if arguments.all else "test"
    passed, skipped, failed = 0, 0, []
    for name, outcome in run_all(arguments, tier):
        show(name, outcome)
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
