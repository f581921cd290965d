"""The command line: `megalith COMMAND` or `python -m megalith COMMAND`.

A command is imported when it is called, so that `megalith --help` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from megalith import __version__

COMMANDS = {
    "train": "Train a model, evaluate it on held-out data, save a checkpoint and write report.html.",
    "eval": "Evaluate a trained model: AUC, log loss and calibration. Nothing is written.",
    "predict": "Predict the probability of each row of a file, in the order of the file.",
    "report": "Write report.html of a run: loss, AUC, calibration, table growth, id frequencies and row "
    "ages.",
    "table": "Show the tables of a checkpoint, the norms, ages and largest rows of a table, or one row.",
    "plan": "Show rows and traffic per rank in each routing mode, with warnings about skew and the remedy.",
    "export": "Write a trained model as files that servers map into memory.",
    "serve": "Answer requests over gRPC and REST until SIGTERM or SIGINT.",
    "versions": "Show the versions of an export, and set their labels; servers follow within a second.",
    "workers": "Change the number of workers of a run that trains on parameter servers.",
    "checkpoint": "List, verify, compare and rewrite checkpoints.",
    "bench": "Measure this machine, side by side with the libraries that are installed.",
    "gather": "Gather the updates of peers: run ranks, inspect windows, simulate a run.",
    "servers": "Parameter servers that run on a Ray cluster.",
}
"""Command -> the first sentence of its help."""

_PLACES = {
    "train": "train:command",
    "eval": "evaluate:evaluate",
    "predict": "evaluate:predict",
    "versions": "export:versions",
    "workers": "servers:workers",
    **{group: f"{group}:app" for group in ("checkpoint", "bench", "gather", "servers")},
}
"""Command -> module and name of its function, or of its app with further commands, if it is not its own."""


def import_command(name: str) -> Any:
    """Import a command."""
    module, _, attribute = _PLACES.get(name, f"{name}:{name}").partition(":")
    found = getattr(importlib.import_module(f"megalith.cli.{module}"), attribute)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(pretty_exceptions_enable=False, add_completion=False)
        found.command(name)(function)
    command = get_group(found) if attribute == "app" else get_command(found)
    command.name = name
    return command


class Commands(TyperGroup):
    """The commands; those in `commands` are stand-ins with the help that `megalith --help` prints."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, summary in COMMANDS.items():
            self.add_command(TyperCommand(name, help=summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, None if command is None or name is None else import_command(name), rest


app = typer.Typer(
    name="megalith",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda token: token.replace("_", "-"),  # --dist_type is --dist-type
    },
    help="Recommender models whose embedding tables grow with the data.",
    epilog="Example: megalith train --data movielens --run runs/demo",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megalith {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Recommender models whose embedding tables grow with the data."""
