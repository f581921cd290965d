"""Errors of commands: one line on stderr and exit code 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from megalith.errors import MegalithError

errors = Console(stderr=True)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Prints an expected error (MegalithError or OSError) to stderr and exits with code 1."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of the output closed it, which is not an error
    except (MegalithError, OSError) as error:
        errors.print(f"[bold red]error:[/] {_plain(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _plain(text: str) -> str:
    """Escapes text for rich."""
    return text.replace("[", r"\[")
