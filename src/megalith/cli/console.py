"""Errors and warnings of commands: one line on stderr, and exit code 1 after an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

from megalith.errors import MegalithError

errors = Console(stderr=True)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Prints an expected error (MegalithError or OSError) to stderr and exits with code 1."""
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
                errors.print(text, highlight=False, soft_wrap=True)

            warnings.showwarning = print_warning  # type: ignore[assignment]  # never called by keyword
            yield
    except BrokenPipeError:
        raise  # the reader of the output closed it, which is not an error
    except (MegalithError, OSError) as error:
        errors.print(f"[bold red]error:[/] {_plain(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _plain(text: str) -> str:
    """Escapes text for rich."""
    return text.replace("[", r"\[")
