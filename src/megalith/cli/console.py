"""Errors of commands: one line that says what to do, and exit code 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from megalith.errors import MegalithError

errors = Console(stderr=True)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Turns an expected error into a message and exit code 1."""
    try:
        yield
    except BrokenPipeError:
        raise  # whoever read our output has seen enough, which is no error
    except (MegalithError, OSError) as error:
        errors.print(f"[bold red]error:[/] {_plain(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _plain(text: str) -> str:
    """Text in which rich finds no markup."""
    return text.replace("[", r"\[")
