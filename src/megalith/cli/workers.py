"""megalith workers: changes the number of workers of a run that trains on parameter servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megalith.cli.console import exit_on_error
from megalith.cli.output import console, plural
from megalith.training.run_servers import ask_for_workers


def workers(
    run: Annotated[Path, typer.Argument(help="Directory of the run.")],
    count: Annotated[int, typer.Argument(help="The number of workers.")],
) -> None:
    """Change the number of workers of a run that trains on parameter servers (megalith train --servers).

    Workers join and leave while the run trains. One that leaves first ends its batch, and another one reads
    the rest of its share of the data.

    Example: megalith workers runs/servers 4
    """
    with exit_on_error():
        ask_for_workers(run, count)
        console().print(f"{run} will have {plural(count, 'worker')} after its next batches", markup=False)
