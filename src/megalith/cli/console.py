"""What commands share: one console, errors as one line, a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megalith.errors import MegalithError

console = Console()
errors = Console(stderr=True)


@contextmanager
def told() -> Iterator[None]:
    """Turns an expected error into a message and exit code 1."""
    try:
        yield
    except MegalithError as error:
        errors.print(f"[bold red]error:[/] {_plain(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


@contextmanager
def bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar; yields what to call with the amount done so far."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total, note="")
        yield lambda done: progress.update(task, completed=done)


def _plain(text: str) -> str:
    """Text in which rich finds no markup."""
    return text.replace("[", r"\[")
