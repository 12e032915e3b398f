"""What `tide plan`, `verify` and `sim` ask the core for: groups, topology and options."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tide import Error, _core
from tide.bench.collectives import PRESETS
from tide.bench.predict import group
from tide.cli.tables import fail

DEFAULT_MACHINE = "paper-8-nodes"
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


PRESET_HELP = f"one group of a known model instead of the file: {', '.join(PRESETS)}"


def machine_help(default: str) -> str:
    """What --machine takes; `default` in words."""
    # No brackets: rich takes them for markup.
    presets = ", ".join(_core.machine_presets())
    return f"a JSON file of rates, or one of {presets}; default: {default}"


class RequestError(ValueError):
    """What is asked for can't be read; the message says what was expected."""


class _NotFiniteError(Exception):
    """A number in JSON that is none; its text."""


@contextmanager
def refusals(command: str) -> Iterator[None]:
    """Ends the program with the command's message where its request is refused."""
    try:
        yield
    except (Error, RequestError) as error:
        fail(command, error)


def parse_bytes(text: str, option: str) -> int:
    """Reads `64MiB`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise RequestError(
            f"{option}: expected bytes such as 67108864, 64MiB or 1.5GiB, got {text!r}"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def reduction_options(
    mode: str | None,
    placement: str | None,
    wave_width: int | None,
    round_width: int | None,
    passes: int | None,
    chunk: str | None,
) -> dict[str, Any]:
    """The options of a reduce-scatter as a request has them; None leaves the choice to the core."""
    return {
        "mode": mode,
        "placement": placement,
        "wave_width": wave_width,
        "round_width": round_width,
        "passes": passes,
        "chunk_bytes": None if chunk is None else parse_bytes(chunk, "--chunk"),
    }


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _NotFiniteError(text)
    return value


def read_json(path: Path) -> Any:
    """What a file holds; numbers are finite, as the core's JSON has them.

    Raises:
        RequestError: it can't be read; the message names the file.
    """
    try:
        return json.loads(path.read_text(), parse_float=_finite, parse_constant=_finite)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None
    except _NotFiniteError as error:
        raise RequestError(f"{path}: expected finite numbers, got {error}") from None
    except UnicodeDecodeError:
        raise RequestError(f"{path}: expected JSON in UTF-8") from None
    except json.JSONDecodeError as error:
        raise RequestError(
            f"{path}: line {error.lineno} column {error.colno}: {error.msg}"
        ) from None
    except RecursionError:
        message = f"{path}: expected a few levels of brackets, got too many to read"
        raise RequestError(message) from None


def preset_groups(name: str) -> list[dict[str, Any]]:
    """The group of a preset of the bench, in bf16."""
    if name not in PRESETS:
        raise RequestError(f"--preset: expected one of {', '.join(PRESETS)}, got {name!r}")
    return [group(name, PRESETS[name])]


def machine_field(name: str) -> Any:
    """A preset's name, or what a file holds."""
    path = Path(name)
    return read_json(path) if path.suffix == ".json" or path.is_file() else name


def make_request(
    file: Path | None,
    preset: str | None,
    fields: dict[str, Any],
    default_machine: str = DEFAULT_MACHINE,
) -> dict[str, Any]:
    """A file or a preset with the command line's options on top.

    Raises:
        RequestError: they can't be read, or something is missing.
    """
    if (file is None) == (preset is None):
        got = "neither" if file is None else f"both {file} and --preset {preset}"
        raise RequestError(f"expected either a file of groups or --preset, got {got}")
    request = {"groups": preset_groups(preset)} if preset is not None else read_json(file)
    if not isinstance(request, dict) or "groups" not in request:
        raise RequestError(
            f"{file}: expected an object with the field 'groups', see docs/memory.md"
        )
    known = _core.request_fields()
    for name in request:
        if name not in known:
            raise RequestError(f"{file}: {name}: unknown field; expected one of {', '.join(known)}")
    options = request.get("options", {})
    if not isinstance(options, dict):
        raise RequestError(f"{file}: options: expected an object, got {json.dumps(options)}")
    given = {name: value for name, value in fields.pop("options").items() if value is not None}
    request["options"] = options | given
    request |= {name: value for name, value in fields.items() if value is not None}
    for name, option in (("nodes", "--nodes"), ("local_ranks", "--local")):
        if name not in request:
            raise RequestError(f"{name}: missing; give {option} or the field in the file")
    request.setdefault("machine", default_machine)
    return request
