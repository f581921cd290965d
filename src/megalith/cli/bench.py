"""megalith bench: measures this machine. `comm` measures collectives between ranks."""

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

from megalith.cli.config_options import config_options
from megalith.cli.output import AsJson, console, exit_on_error, grid, progress
from megalith.distributed.comm_bench import (
    PATTERNS,
    TRANSPORTS,
    CommSettings,
    Measurement,
    measure_launched,
    measure_local,
)
from megalith.distributed.launcher_environment import Launch, LaunchWarning, read_launch
from megalith.errors import InputError
from megalith.reporting import charts
from megalith.reporting.charts import Axis, Series, line_chart
from megalith.units import show_bytes

app = typer.Typer(no_args_is_help=True, help="Measure this machine.")

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@app.command()
@config_options("settings", CommSettings, omit=("patterns", "transports", "sizes"))
def comm(
    ranks: Annotated[
        int | None,
        typer.Option(min=2, help="Number of local processes to start. Default: 2, or the launcher's ranks."),
    ] = None,
    pattern: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(PATTERNS)}. May be repeated. Default: all."),
    ] = None,
    transport: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(TRANSPORTS)}. May be repeated. Default: both."),
    ] = None,
    sizes: Annotated[
        str, typer.Option(help="Bytes that a rank contributes to an exchange, comma-separated: 512,64KiB,1M.")
    ] = "1KiB,8KiB,64KiB,512KiB,4MiB,32MiB",
    *,
    settings: dict[str, Any],
    plot: Annotated[
        Path | None, typer.Option(help="Write a page with plots and the table to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure collectives between ranks: latency and goodput by size, over gloo and through shared memory.

    Started directly, it measures processes of this machine; under torchrun, the ranks of torchrun. Tables use
    shared memory if all ranks are on one host, and gloo otherwise; all-reduce uses gloo only. Latency is
    the median time of a call on its slowest rank. Goodput is the number of bytes that leave a rank per second
    (all-reduce: the bytes of the buffer).

    \b
    Patterns:
      all_reduce  float32
      even        all-to-all of float32 in equal parts
      uneven      ... in parts of 1, 1/2, 1/3, ...: rank 0 receives most
      ids         ... of int64 in small pieces, concatenated before and split after
      rows        ... of float32 rows, --dim wide

    \b
    Example:
      megalith bench comm
      megalith bench comm --ranks 4 --pattern rows --transport shared_memory
      megalith bench comm --ranks 4 --pattern rows --sizes 64KiB,1M --plot comm.html
      torchrun --nproc-per-node 2 -m megalith bench comm --json
    """
    with exit_on_error():
        chosen = CommSettings(
            patterns=tuple(pattern or PATTERNS),
            transports=tuple(transport or TRANSPORTS),
            sizes=tuple(map(_bytes, sizes.split(","))),
            **settings,
        )
        if plot is not None and not plot.parent.is_dir():
            raise InputError(f"--plot: {plot.parent} is not a directory")
        launch = _launch(ranks)
        num_ranks = launch.size if launch.launcher else ranks or 2
        stream = measure_launched(chosen, launch) if launch.launcher else measure_local(chosen, num_ranks)
        if launch.rank > 0:
            deque(stream, maxlen=0)
            return
        found = []
        with progress("measuring", chosen.num_points) as advance:
            for measurement in stream:
                found.append(measurement)
                advance(len(found))
        if plot is not None:
            try:
                plot.write_text(_page(num_ranks, found), encoding="utf-8")
            except OSError as error:
                raise InputError(f"--plot: {plot} cannot be written: {error.strerror}") from None
    left_out = chosen.num_points - len(found)
    if as_json:
        about = {"ranks": num_ranks, "machine": _machine(), "settings": asdict(chosen)}
        results = [asdict(measurement) for measurement in found]
        typer.echo(json.dumps({**about, "results": results, "left_out": left_out}, indent=1))
        return
    out = console()
    out.print(_grid(num_ranks, found))
    if left_out:
        alone = launch.local_size < launch.size and not any(m.transport == "shared_memory" for m in found)
        reason = "the ranks are on several hosts or --budget" if alone else "--budget"
        out.print(Text(f"not measured: {left_out} of {chosen.num_points}, because {reason} was used up"))
    if plot is not None:
        out.print(Text(f"plots: {plot}"))


def _launch(ranks: int | None) -> Launch:
    """The launcher's ranks, if there is a launcher. Raises InputError if their number is not `ranks`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no launcher", LaunchWarning)
        launch = read_launch()
    if launch.launcher and (launch.size < 2 or ranks not in (None, launch.size)):
        raise InputError(
            f"{launch.launcher} started {launch.size} rank(s), but {ranks or 'at least two'} are needed: "
            "start that number of ranks, or run the command without a launcher"
        )
    return launch


def _bytes(text: str) -> int:
    found = re.fullmatch(r"\s*([0-9]{1,12})\s*([kmg]?)(?:i?b)?\s*", text, re.IGNORECASE)
    if found is None:
        raise InputError(f"--sizes: {text!r} is not a number of bytes such as 512, 64KiB or 1M")
    return int(found[1]) * _UNITS[found[2].lower()]


def _grid(ranks: int, found: Sequence[Measurement]) -> Table:
    table = grid(_HEAD, left=("pattern", "transport"), title=_title(ranks))
    for before, each in zip([None, *found], found, strict=False):
        same = before is not None and before.pattern == each.pattern
        if before is not None and not same:
            table.add_section()
        table.add_row("" if same else _PATTERN_NAMES[each.pattern], *_cells(each))
    return table


# ---- the results as table cells, and as one HTML page with two plots

_HEAD = ("pattern", "transport", "bytes per rank", "latency", "best", "goodput", "calls")
_PATTERN_NAMES = {
    "all_reduce": "all-reduce",
    "even": "all-to-all, even",
    "uneven": "all-to-all, uneven",
    "ids": "all-to-all, ids",
    "rows": "all-to-all, rows",
}
_TRANSPORT_NAMES = {"gloo": "gloo", "shared_memory": "shared memory"}
_STYLE = (
    ":root{color-scheme:light dark} h1{font-size:20px} body{margin:24px auto;max-width:1100px;padding:0 16px;"
    "font:15px/1.5 system-ui,'DejaVu Sans',sans-serif} table{border-collapse:collapse;margin-top:24px}"
    ".plots{display:grid;gap:20px;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr))}"
    "th,td{padding:2px 16px 2px 0;text-align:right;font-size:13px;white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left} main{overflow-x:auto}"
)


def _machine() -> dict[str, Any]:
    """Return the machine and versions that a result belongs to."""
    return {
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": "gloo",
    }


def _title(ranks: int) -> str:
    """Return the title of a result measured on this machine with this number of ranks."""
    found = _machine()
    return f"{ranks} ranks, gloo and shared memory, {found['cores']} cores, torch {found['torch']}"


def _cells(measurement: Measurement) -> list[str]:
    """Return the columns of _HEAD after the pattern."""
    return [
        _TRANSPORT_NAMES[measurement.transport],
        show_bytes(measurement.size),
        _span(measurement.latency),
        _span(measurement.best),
        f"{show_bytes(measurement.goodput)}/s",
        str(measurement.calls),
    ]


def _page(ranks: int, found: Sequence[Measurement]) -> str:
    """Return a self-contained HTML page with plots of latency and goodput and a table."""
    x = Axis("bytes per rank", log=True)
    plots = []
    for transport in dict.fromkeys(m.transport for m in found):
        own, name = [m for m in found if m.transport == transport], _TRANSPORT_NAMES[transport]
        latency, goodput = _series(own, "latency", 1e6), _series(own, "goodput", 1e-6)
        plots += [
            line_chart(f"Latency by size, {name}", latency, x, Axis("latency, us", log=True)),
            line_chart(f"Goodput by size, {name}", goodput, x, Axis("goodput, MB/s", log=True)),
        ]
    rows = [f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in _HEAD)}</tr>"]
    for each in found:
        texts = (_PATTERN_NAMES[each.pattern], *_cells(each))
        rows.append(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>")
    heading = f"Communication: {_title(ranks)}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(heading)}</title>'
        f"<style>{_STYLE}{charts.STYLE}</style></head><body><h1>{escape(heading)}</h1>"
        f'<div class="plots">{"".join(plots)}</div><main><table>{"".join(rows)}</table></main>'
        "</body></html>\n"
    )


def _span(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"


def _series(found: Sequence[Measurement], field: str, scale: float) -> list[Series]:
    return [
        Series(
            _PATTERN_NAMES[pattern],
            [(float(m.size), getattr(m, field) * scale) for m in found if m.pattern == pattern],
            "line and points",
            colour=list(_PATTERN_NAMES).index(pattern),
        )
        for pattern in dict.fromkeys(m.pattern for m in found)
    ]
