"""Output of commands: a console for terminals and pipes, tables, JSON, progress bars, errors and warnings.

An expected error is one line on stderr and exit code 1; a warning for the user is one line on stderr.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from megalith.checkpoint.manifest import Routing
from megalith.errors import MegalithError
from megalith.reporting.inspection import SegmentSummary, TableSummary
from megalith.units import show_number

error_console = Console(stderr=True)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Print an expected error (MegalithError or OSError) to stderr and exit with code 1."""
    # Warnings for the user are printed as a line too, without the place in the sources.
    try:
        with warnings.catch_warnings():
            show = warnings.showwarning

            def print_warning(
                message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any
            ) -> None:
                if category is not UserWarning:
                    return show(message, category, filename, lineno, *more)
                text = f"[bold yellow]warning:[/] {_plain(str(message))}"
                error_console.print(text, highlight=False, soft_wrap=True)

            warnings.showwarning = print_warning  # type: ignore[assignment]  # never called by keyword
            yield
    except BrokenPipeError:
        raise  # the reader of the output closed it, which is not an error
    except (MegalithError, OSError) as error:
        error_console.print(f"[bold red]error:[/] {_plain(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
"""The option of commands that can print JSON."""
PATIENCE = 2.0
"""Seconds before a progress bar appears."""
_START_SECONDS = 2.0
"""Seconds that the end of a command waits for a bar that is just being drawn."""

_PIPED_WIDTH = 110
_BAR_WIDTH = 36


def console(*, stderr: bool = False) -> Console:
    """Return a console that is wide enough for tables if the output is not a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else _PIPED_WIDTH)


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr after two seconds if it is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    screen = console(stderr=True)
    bar = Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)
    task = bar.add_task(label, total=total)
    begin = time.monotonic()

    def advance(done: int) -> None:
        bar.update(task, completed=done)
        if time.monotonic() - begin > PATIENCE:
            bar.start()

    # The bar also appears if the first amount takes longer than that.
    alarm = threading.Timer(PATIENCE, bar.start)
    alarm.daemon = True
    alarm.start()
    try:
        yield advance
    finally:
        alarm.cancel()
        alarm.join(_START_SECONDS)
        # A terminal that is paused (Ctrl-S) blocks the thread that starts the bar: then nothing has started.
        if not alarm.is_alive() and bar.live.is_started:
            bar.stop()


def grid(columns: Sequence[str], *, left: Collection[str], title: str = "", **options: Any) -> Table:
    """Return an empty table; columns are numbers, except those on the left."""
    table = Table(title=Text(title) if title else None, title_justify="left", title_style="bold", **options)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return table


def bar_table(title: str, what: str, bins: Sequence[tuple[str, int]]) -> Table:
    most = max((count for _, count in bins), default=0)
    table = grid((what, "rows", ""), left=("",), title=title, box=None, pad_edge=False)
    for label, count in bins:
        width = max(1, round(_BAR_WIDTH * count / most)) if count else 0
        table.add_row(Text(label), show_number(count), Text("█" * width, style="cyan"))
    return table


def show_routing(routing: Routing) -> str:
    block = f", blocks of {routing.block_size:,}" if routing.block_size else ""
    return f"{routing.dist_type}, {plural(routing.num_shards, 'shard')}{block}" + (
        ", first shard empty" if routing.skip_first else ""
    )


def show_segments(table: TableSummary) -> str:
    return " + ".join(
        f"{s.dim} {s.optimizer}" + ("" if s.precision == "float32" else f" {show_precision(s)}")
        for s in table.segments
    )


def show_precision(segment: SegmentSummary) -> str:
    """Return the precision of a segment, with its rounding and serving precision if unusual."""
    rounding = "" if segment.rounding == "nearest" else f" {segment.rounding}"
    serving = "" if segment.serving is None else f", served as {segment.serving}"
    return segment.precision + rounding + serving


def plural(number: int, thing: str) -> str:
    """Return "1 row" or "2 rows"."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def skipped_lines(
    skipped: Mapping[str, int], *, of: str = "", first: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Return a line for each reason for which rows were skipped."""
    where = f" of the {of}" if of else ""
    return [
        f"skipped {plural(count, 'row')}{where}: {reason}"
        + (f"; first: {first[reason]}" if reason in first else "")
        for reason, count in skipped.items()
    ]


def print_line(text: str) -> None:
    console().print(Text(text), soft_wrap=True)


def print_json(data: Any) -> None:
    """Print JSON to stdout. NaN and infinity become null."""
    typer.echo(json.dumps(_finite(data), indent=1, allow_nan=False))


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not abs(data) < float("inf") else data
