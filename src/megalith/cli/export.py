"""megalith export, megalith versions: write versions for `megalith serve`, and set labels and shares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from megalith.cli.output import console, exit_on_error, progress
from megalith.errors import InputError
from megalith.serving.server.versions import VersionRules, versions_of


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


def versions(
    directory: Annotated[Path, typer.Argument(help="The directory of a model's versions.")],
    label: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VERSION: add a label, or move it. NAME= removes it. May be repeated."),
    ] = None,
    traffic: Annotated[
        list[str] | None,
        typer.Option(
            help="LABEL=PERCENT or VERSION=PERCENT of the requests that name no version; together 100. "
            "Replaces the split. May be repeated."
        ),
    ] = None,
    newest: Annotated[
        bool, typer.Option("--newest", help="Remove the split: the newest version gets all requests.")
    ] = False,
) -> None:
    """Show the versions of an export, and set their labels and shares; servers follow within a second.

    Example: megalith versions exports/movies --label canary=4 --traffic 3=90 --traffic canary=10
    """
    with exit_on_error():
        found = sorted(versions_of(directory), reverse=True)
        if not found:
            raise InputError(f"{directory} has no versions: give the directory that holds them")
        if newest and traffic:
            raise InputError("give either --newest or --traffic")
        rules = VersionRules.read(directory)
        if label or traffic or newest:
            rules = VersionRules(
                _labels(rules, label or (), found),
                _shares(traffic) if traffic else {} if newest else rules.traffic,
            )
            rules.write(directory)
        _print(found, rules)


def _labels(rules: VersionRules, given: Sequence[str], found: Sequence[int]) -> dict[str, int]:
    labels = dict(rules.labels)
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


def _shares(given: Sequence[str]) -> dict[str, float]:
    shares = {}
    for each in given:
        name, _, percent = each.partition("=")
        try:
            shares[name] = float(percent)
        except ValueError:
            raise InputError(f"--traffic {each}: write LABEL=PERCENT") from None
    return shares


def _print(found: Sequence[int], rules: VersionRules) -> None:
    screen = console()
    shares = dict(rules.shares) or {found[0]: 100.0}
    for number in sorted({*found, *rules.labels.values(), *shares}, reverse=True):
        names = ", ".join(name for name, labelled in rules.labels.items() if labelled == number)
        missing = "" if number in found else "  (no such version)"
        text = f"{number}  {shares.get(number, 0.0):g} %{f'  {names}' if names else ''}{missing}"
        screen.print(text, markup=False, soft_wrap=True)
