"""megalith bench: measure this machine. `comm` is about collectives between ranks."""

from __future__ import annotations

import json
import os
import platform
import re
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rich.text import Text

from megalith.cli.console import exit_on_error
from megalith.cli.output import console, progress
from megalith.distributed.comm_bench import PATTERNS, CommSettings, Measurement
from megalith.distributed.comm_bench_ranks import measure_launched, measure_local
from megalith.distributed.launcher_environment import Launch, LaunchWarning, read_launch
from megalith.errors import InputError
from megalith.reporting import charts
from megalith.reporting.charts import Axis, Series, line_chart
from megalith.units import show_bytes

app = typer.Typer(no_args_is_help=True, help="Measure this machine.")

DEFAULTS = CommSettings()
NAMES = {
    "all_reduce": "all-reduce",
    "even": "all-to-all, even",
    "uneven": "all-to-all, uneven",
    "ids": "all-to-all, ids",
    "rows": "all-to-all, rows",
}
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_STYLE = (
    ":root{color-scheme:light dark} h1{font-size:20px} body{margin:24px auto;max-width:1100px;padding:0 16px;"
    "font:15px/1.5 system-ui,'DejaVu Sans',sans-serif} table{border-collapse:collapse;margin-top:24px}"
    ".plots{display:grid;gap:20px;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr))}"
    "th,td{padding:2px 16px 2px 0;text-align:right;font-size:13px;white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left} main{overflow-x:auto}"
)


@app.command()
def comm(
    ranks: Annotated[
        int | None,
        typer.Option(min=2, help="Local processes to start, 2 if not given; a launcher brings its own."),
    ] = None,
    pattern: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(PATTERNS)}; may be repeated. All if not given."),
    ] = None,
    sizes: Annotated[
        str, typer.Option(help="Bytes a rank puts into an exchange, by commas: 512,64KiB,1M.")
    ] = "1KiB,8KiB,64KiB,512KiB,4MiB,32MiB",
    dim: Annotated[int, typer.Option(min=1, help="Width of a row, of rows.")] = DEFAULTS.dim,
    pieces: Annotated[int, typer.Option(min=1, help="Pieces for each rank, of ids.")] = DEFAULTS.pieces,
    seconds: Annotated[float, typer.Option(help="How long to measure each size.")] = DEFAULTS.seconds,
    max_calls: Annotated[
        int, typer.Option(min=1, help="At most so many calls of a size.")
    ] = DEFAULTS.max_calls,
    budget: Annotated[
        float, typer.Option(help="Seconds for everything; what is not begun by then is left out.")
    ] = DEFAULTS.budget,
    plot: Annotated[Path | None, typer.Option(help="Write a page with plots and the table here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measures collectives between ranks over gloo: latency and goodput by size.

    By itself it measures among processes of this machine, under torchrun among its ranks. Latency is the
    median of a call on its slowest rank; goodput the bytes that leave a rank in a second (all-reduce: those
    of the buffer).

    \b
    Patterns:
      all_reduce  float32
      even        all-to-all of float32 in equal parts
      uneven      ... in parts of 1, 1/2, 1/3, ...: rank 0 is sent most
      ids         ... of int64 in small pieces, joined before, cut apart after
      rows        ... of float32 rows, --dim wide

    \b
    Example:
      megalith bench comm
      megalith bench comm --ranks 4 --pattern rows --sizes 64KiB,1M --plot comm.html
      torchrun --nproc-per-node 2 -m megalith bench comm --json
    """
    with exit_on_error():
        settings = CommSettings(
            patterns=tuple(pattern or PATTERNS),
            sizes=tuple(map(_bytes, sizes.split(","))),
            dim=dim,
            pieces=pieces,
            seconds=seconds,
            max_calls=max_calls,
            budget=budget,
        )
        if plot is not None and not plot.parent.is_dir():
            raise InputError(f"--plot: {plot.parent} is no directory")
        launch = _launch(ranks)
        num_ranks = launch.size if launch.launcher else ranks or 2
        stream = measure_launched(settings, launch) if launch.launcher else measure_local(settings, num_ranks)
        if launch.rank > 0:
            deque(stream, maxlen=0)
            return
        found = []
        with progress("measuring", settings.num_points) as advance:
            for measurement in stream:
                found.append(measurement)
                advance(len(found))
        _tell(settings, num_ranks, found, plot, as_json)


def _launch(ranks: int | None) -> Launch:
    """The launcher's ranks, if there is one. Raises InputError if they are not those asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no launcher", LaunchWarning)
        launch = read_launch()
    if launch.launcher and (launch.size < 2 or ranks not in (None, launch.size)):
        raise InputError(
            f"{launch.launcher} started {launch.size} rank(s), but {ranks or 'at least two'} are needed: "
            "start as many by it, or run the command by itself"
        )
    return launch


def _bytes(text: str) -> int:
    found = re.fullmatch(r"\s*([0-9]{1,12})\s*([kmg]?)(?:i?b)?\s*", text, re.IGNORECASE)
    if found is None:
        raise InputError(f"--sizes: {text!r} is no number of bytes such as 512, 64KiB or 1M")
    return int(found[1]) * _UNITS[found[2].lower()]


# ---- output


def _tell(
    settings: CommSettings, ranks: int, found: Sequence[Measurement], plot: Path | None, as_json: bool
) -> None:
    left_out = settings.num_points - len(found)
    if plot is not None:
        try:
            plot.write_text(_page(ranks, found), encoding="utf-8")
        except OSError as error:
            raise InputError(f"--plot: {plot} cannot be written: {error.strerror}") from None
    if as_json:
        results = [asdict(measurement) for measurement in found]
        about = {"ranks": ranks, "machine": _machine(), "settings": asdict(settings)}
        typer.echo(json.dumps({**about, "results": results, "left_out": left_out}, indent=1))
        return
    out = console()
    grid = Table(title=_title(ranks), title_justify="left", title_style="bold")
    for number, name in enumerate(_HEAD):
        grid.add_column(name, justify="right" if number else "left")
    for before, each in zip([None, *found], found, strict=False):
        if before is not None and before.pattern != each.pattern:
            grid.add_section()
        same = before is not None and before.pattern == each.pattern
        grid.add_row("" if same else NAMES[each.pattern], *_cells(each))
    out.print(grid)
    if left_out:
        out.print(Text(f"left out: {left_out} of {settings.num_points}, as --budget was spent"))
    if plot is not None:
        out.print(Text(f"plots: {plot}"))


_HEAD = ("pattern", "bytes a rank", "latency", "best", "goodput", "calls")


def _cells(each: Measurement) -> list[str]:
    speed = f"{show_bytes(each.goodput)}/s"
    return [show_bytes(each.size), _span(each.latency), _span(each.best), speed, str(each.calls)]


def _span(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"


def _title(ranks: int) -> str:
    machine = _machine()
    return f"{ranks} ranks, gloo, {machine['cores']} cores, torch {machine['torch']}"


def _machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": "gloo",
    }


def _page(ranks: int, found: Sequence[Measurement]) -> str:
    """One page that needs nothing from outside: two plots and the table."""
    x = Axis("bytes a rank puts in", log=True)
    latency = line_chart("Latency by size", _series(found, "latency", 1e6), x, Axis("latency, us", log=True))
    goodput = line_chart(
        "Goodput by size", _series(found, "goodput", 1e-6), x, Axis("goodput, MB/s", log=True)
    )
    rows = [f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in _HEAD)}</tr>"]
    for each in found:
        cells = (NAMES[each.pattern], *_cells(each))
        rows.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    title = f"Communication: {_title(ranks)}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}{charts.STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f'<div class="plots">{latency}{goodput}</div><main><table>{"".join(rows)}</table></main>'
        "</body></html>\n"
    )


def _series(found: Sequence[Measurement], field: str, scale: float) -> list[Series]:
    return [
        Series(
            NAMES[pattern],
            [(float(m.size), getattr(m, field) * scale) for m in found if m.pattern == pattern],
            "line and points",
        )
        for pattern in dict.fromkeys(m.pattern for m in found)
    ]
