"""megalith export: writes a checkpoint as a version for `megalith serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megalith.cli.output import console, exit_on_error, progress


def export(
    checkpoint: Annotated[Path, typer.Argument(help="The directory of a run, or a checkpoint.")],
    out: Annotated[
        Path,
        typer.Argument(
            help="Output directory; versions are written to OUT/VERSION, or OUT/entry, OUT/ps_0 ..."
        ),
    ],
    name: Annotated[
        str | None, typer.Option("--model-name", help="Name in requests. Default: the kind of model.")
    ] = None,
    precision: Annotated[str, typer.Option(help="float32, float16 or int8, for the rows.")] = "float32",
    num_shards: Annotated[
        int, typer.Option(min=0, help="Number of ps parts for the rows; 0: one process holds everything.")
    ] = 0,
    version: Annotated[
        int | None, typer.Option(min=0, help="Number of the version. Default: the step of the checkpoint.")
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(min=1, help="Number of consecutive ids per part, for tables of dist_type continuous."),
    ] = None,
) -> None:
    """Write a trained model as files that servers map into memory.

    Example: megalith export runs/mine exports/movies --precision float16
    """
    from megalith.training.export import count_rows, export_run

    with exit_on_error():
        total = count_rows(checkpoint)
        done = 0
        with progress("exporting", total) as advance:

            def on_rows(rows: int) -> None:
                nonlocal done
                done += rows
                advance(done)

            export_run(
                checkpoint,
                out,
                name=name,
                precision=precision,
                num_shards=num_shards,
                version=version,
                block_size=block_size,
                on_rows=on_rows,
            )
    console().print(f"{total:,} rows in {out}", markup=False, soft_wrap=True)
