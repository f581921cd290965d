"""megalith export, megalith versions: write versions for `megalith serve`, and set labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from megalith.cli.output import console, exit_on_error, print_line, progress
from megalith.errors import InputError
from megalith.serving.server.versions import read_labels, versions_of, write_labels


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
    compile: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Also write the dense part as a library for this CPU and this torch, for serve --compiled.",
        ),
    ] = False,
) -> None:
    """Write a trained model as files that servers map into memory.

    Example: megalith export runs/mine exports/movies --precision float16
    """
    from megalith.training.export import count_rows, describe_dense, export_run

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
                compile=compile,
                on_rows=on_rows,
            )
        print_line(f"{total:,} rows in {out}")
        if note := describe_dense(checkpoint):
            print_line(note)


def versions(
    directory: Annotated[Path, typer.Argument(help="The directory of a model's versions.")],
    label: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VERSION: add a label, or move it. NAME= removes it. May be repeated."),
    ] = None,
) -> None:
    """Show the versions of an export, and set their labels; servers follow within a second.

    Example: megalith versions exports/movies --label stable=3 --label canary=4
    """
    with exit_on_error():
        found = sorted(versions_of(directory), reverse=True)
        if not found:
            raise InputError(f"{directory} has no versions: give the directory that holds them")
        labels = read_labels(directory)
        if label:
            labels = _changed(labels, label, found)
            write_labels(directory, labels)
    for number in sorted({*found, *labels.values()}, reverse=True):
        names = ", ".join(name for name, labelled in labels.items() if labelled == number)
        missing = "" if number in found else "  (no such version)"
        console().print(f"{number}{f'  {names}' if names else ''}{missing}", markup=False, soft_wrap=True)


def _changed(labels: dict[str, int], given: Sequence[str], found: Sequence[int]) -> dict[str, int]:
    for each in given:
        name, _, number = each.partition("=")
        if not number and each.endswith("="):
            labels.pop(name, None)
        elif number.isascii() and number.isdecimal() and int(number) in found:
            labels[name] = int(number)
        else:
            raise InputError(
                f"--label {each}: write NAME=VERSION, with one of {', '.join(map(str, found[:20]))}"
            )
    return labels
