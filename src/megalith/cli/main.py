"""The command line: `megalith COMMAND` or `python -m megalith COMMAND`."""

from __future__ import annotations

from typing import Annotated

import typer

from megalith import __version__
from megalith.cli import bench, checkpoint, gather, servers
from megalith.cli.evaluate import evaluate, predict
from megalith.cli.export import export, versions
from megalith.cli.plan import plan
from megalith.cli.report import report
from megalith.cli.serve import serve
from megalith.cli.servers import workers
from megalith.cli.table import table
from megalith.cli.train import TrainCommand, train

app = typer.Typer(
    name="megalith",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda token: token.replace("_", "-"),  # --dist_type is --dist-type
    },
    help="Recommender models whose embedding tables grow with the data.",
    epilog="Example: megalith train --data movielens --run runs/demo",
)

app.command(name="train", cls=TrainCommand)(train)
for command, name in (
    (evaluate, "eval"),
    (predict, "predict"),
    (report, "report"),
    (table, "table"),
    (plan, "plan"),
    (export, "export"),
    (serve, "serve"),
    (versions, "versions"),
    (workers, "workers"),
):
    app.command(name=name)(command)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(bench.app, name="bench")
app.add_typer(gather.app, name="gather")
app.add_typer(servers.app, name="servers")


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
