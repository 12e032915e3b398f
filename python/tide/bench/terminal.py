"""How the benches and the command line write: tables, and a bar while something runs."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

# Wider than any table; rich would cut cells at 80 columns where it does not know the width.
_FILE_COLUMNS = 10_000


def make_console(stderr: bool = False) -> Console:
    """Returns a console as wide as the terminal; files and pipes get whole lines."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=_FILE_COLUMNS)


def make_progress(console: Console) -> Progress:
    """Returns a bar with a count, which shows nothing where the console is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)
