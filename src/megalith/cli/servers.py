"""megalith servers, megalith workers: parameter servers on a Ray cluster, and the workers of a run."""

from __future__ import annotations

import time as clock
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from megalith.cli.output import AsJson, console, exit_on_error, plural, print_json, print_line
from megalith.ps.status import prometheus_text, quantile, server_status
from megalith.training.ps import ask_for_workers
from megalith.units import show_bytes

app = typer.Typer(help="Parameter servers that run on a Ray cluster.", no_args_is_help=True)


@app.callback()
def servers() -> None:
    """Parameter servers that run on a Ray cluster."""


@app.command()
def status(
    address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster; default: the one on this machine.")
    ] = None,
    json: AsJson = False,
    prometheus: Annotated[bool, typer.Option("--prometheus", help="Print Prometheus's text format.")] = False,
) -> None:
    """Show memory, rows, queue, calls per second, staleness and last checkpoint of each server.

    Example: megalith servers status --address 10.0.0.1:6379
    """
    with exit_on_error():
        numbers = server_status(address)
        if json:
            print_json(numbers)
        elif prometheus:
            print_line(prometheus_text(numbers).rstrip("\n"))
        elif not numbers:
            print_line("no servers with tables")
        else:
            _print_status(numbers)


def _print_status(numbers: Sequence[Mapping[str, Any]]) -> None:
    columns = (
        *("tables", "server", "pid", "rows", "memory", "queue", "calls/s", "lookup p50, p99 (ms)"),
        *("staleness", "step", "workers", "last checkpoint"),
    )
    shown = Table(*columns, box=None, pad_edge=False)
    for each in numbers:
        if "error" in each:
            shown.add_row(each["group"], str(each["server"]), f"does not answer: {each['error']}")
            continue
        saved = each["last_checkpoint"]
        shown.add_row(
            each["name"],
            str(each["server"]),
            str(each["pid"]),
            f"{sum(each['rows'].values()):,}",
            show_bytes(sum(each["bytes"].values())),
            str(each["waiting"]),
            f"{each['requests_per_second']:.1f}",
            ", ".join(_milliseconds(each, part) for part in (0.5, 0.99)),
            str(each["staleness"]),
            str(each["step"]),
            str(len(each["workers"])),
            "none" if saved is None else f"{max(0.0, clock.time() - saved):.0f} s ago",
        )
    console().print(shown)


def _milliseconds(each: Mapping[str, Any], part: float) -> str:
    bound = quantile(each["lookup_seconds"], part)
    if bound is None:
        return "-"
    return "> 5000" if bound == float("inf") else f"<= {bound * 1e3:g}"


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
