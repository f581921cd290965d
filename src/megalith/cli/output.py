"""Output of commands that inspect: tables for terminals and pipes, progress of what takes long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from megalith.units import show_number

PATIENCE = 2.0
"""Seconds before a progress bar shows."""

_PIPED_WIDTH = 110
_BAR_WIDTH = 36


def console(*, stderr: bool = False) -> Console:
    """A console; output that is no terminal's is wide enough for tables."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else _PIPED_WIDTH)


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the amount done.

    A bar shows on stderr once two seconds have passed, if that is a terminal.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    screen = console(stderr=True)
    bar = Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)
    task = bar.add_task(label, total=total)
    begin = time.monotonic()

    def advance(done: int) -> None:
        bar.update(task, completed=done)
        if not bar.live.is_started and time.monotonic() - begin > PATIENCE:
            bar.start()

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()


def bar_table(title: str, what: str, bins: Sequence[tuple[str, int]]) -> Table:
    """Counts by label, with a bar each."""
    most = max((count for _, count in bins), default=0)
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column(what, justify="right")
    table.add_column("rows", justify="right")
    table.add_column("")
    for label, count in bins:
        width = max(1, round(_BAR_WIDTH * count / most)) if count else 0
        table.add_row(Text(label), show_number(count), Text("█" * width, style="cyan"))
    return table
