"""megalith plan: forecasts the load of each rank in each routing mode."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megalith.cli.output import AsJson, console, exit_on_error, grid, plural
from megalith.reporting.planning import Forecast, Load, ModeForecast, Sample, forecast, read_sample
from megalith.units import show_bytes

_MAX_LISTED = 16
_ID_BYTES, _WEIGHT_BYTES = 8, 4


def plan(
    source: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint; a Parquet, CSV or TSV file or a directory of them; or a text file with "
            "one id or text per line.",
            show_default=False,
        ),
    ],
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks.", show_default=False)],
    column: Annotated[
        str | None, typer.Option("--column", "--feature", help="Column of ids in data files.")
    ] = None,
    table: Annotated[str | None, typer.Option(help="Table of the checkpoint.")] = None,
    block_size: Annotated[
        int | None,
        typer.Option(min=1, help="Block size of mode continuous. Default: computed from the ids."),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Ids per batch. An id is sent once per batch.")
    ] = 8192,
    sample: Annotated[int, typer.Option(min=1, help="Number of ids to sample.")] = 1_000_000,
    dim: Annotated[int | None, typer.Option(min=1, help="Dimension of a row, to show bytes.")] = None,
    hash: Annotated[bool, typer.Option("--hash", help="Hash integers as text, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show rows and traffic per rank in each routing mode, with warnings about skew and the remedy.

    Rows are distinct ids, traffic is occurrences, and sent counts an id once per batch. Imbalance is
    (max - min) / mean.

    \b
    Example:
      megalith plan clicks.parquet --column user_id --ranks 8
      megalith plan runs/demo/checkpoint --table user --ranks 4 --dim 16
      megalith plan ids.txt --ranks 8 --block-size 100000
    """
    with exit_on_error():
        found = read_sample(source, size=sample, column=column, table=table, hash=hash or None)
        result = forecast(
            found.ids,
            ranks=ranks,
            counts=found.counts,
            distinct=found.distinct,
            block_size=block_size,
            batch_size=None if found.distinct or found.counts is not None else batch_size,
        )
    if as_json:
        typer.echo(json.dumps(_as_dict(found, result), indent=1))
    else:
        _print(console(), found, result, dim)


def _print(out: Console, found: Sample, result: Forecast, dim: int | None) -> None:
    seen = f"{result.num_distinct:,} distinct ids"
    if result.occurrences is not None:
        seen += f" in {result.occurrences:,} occurrences"
    out.print(Text(f"{found.source}: {seen}, over {plural(result.ranks, 'rank')}"))
    out.print(_summary(result, dim))
    if result.ranks <= _MAX_LISTED:
        out.print(_per_rank(result))
    if result.hottest and result.hottest[0].occurrences > 1:
        listed = ", ".join(f"{hot.id} ({hot.share:.2%})" for hot in result.hottest[:5])
        share = sum(hot.share for hot in result.hottest)
        out.print(
            Text(f"hottest ids: {listed}; the top {len(result.hottest)} have {share:.1%} of the traffic")
        )
    for advice in result.advice:
        style = "bold yellow" if advice.is_warning else "bold"
        out.print(Text.assemble(("warning: " if advice.is_warning else "note: ", style), advice.text))
    how = "the default"
    if result.recommended != "roundrobin":
        how = f'TableConfig(..., dist_type="{result.recommended}"); load(..., reroute=True) moves saved rows'
    out.print(Text.assemble(("use: ", "bold green"), f"{result.recommended} ({how})"))


def _summary(result: Forecast, dim: int | None) -> Table:
    names = ("mode / block size", "load", "mean per rank", "min", "max", "max/mean", "imbalance")
    sized = () if dim is None else ("max, bytes",)
    table = grid((*names, *sized), left=names[:2], title="max/mean and imbalance by mode")
    for forecasted in result.modes.values():
        name = forecasted.mode
        if forecasted.block_size is not None:
            name += f" / {forecasted.block_size:,}"
        for what, load in _loads(forecasted):
            cells = [name if what == "rows" else "", what, *_numbers(load)]
            if dim is not None:
                cells.append(_bytes(what, load, dim))
            table.add_row(*cells)
        table.add_section()
    return table


def _per_rank(result: Forecast) -> Table:
    table = grid(("rank", *result.modes), left=(), title="rows per rank (and traffic)")
    for rank in range(result.ranks):
        cells = []
        for forecasted in result.modes.values():
            traffic = "" if forecasted.traffic is None else f" ({forecasted.traffic.per_rank[rank]:,})"
            cells.append(f"{forecasted.rows.per_rank[rank]:,}{traffic}")
        table.add_row(str(rank), *cells)
    return table


def _loads(forecasted: ModeForecast) -> list[tuple[str, Load]]:
    named = [("rows", forecasted.rows), ("traffic", forecasted.traffic), ("sent", forecasted.sent)]
    return [(what, load) for what, load in named if load is not None]


def _numbers(load: Load) -> list[str]:
    least, most = min(load.per_rank), max(load.per_rank)
    return [f"{load.mean:,.0f}", f"{least:,}", f"{most:,}", f"{load.peak:.2f}", f"{load.imbalance:.2f}"]


def _bytes(what: str, load: Load, dim: int) -> str:
    """Bytes of the weights of rows; for sent ids, of the ids and the rows in return."""
    each = dim * _WEIGHT_BYTES + (0 if what == "rows" else _ID_BYTES)
    return "" if what == "traffic" else show_bytes(max(load.per_rank) * each)


def _as_dict(found: Sample, result: Forecast) -> dict[str, Any]:
    modes = {
        mode: {
            "block_size": forecasted.block_size,
            **{
                what: {"per_rank": load.per_rank, "imbalance": load.imbalance, "max_over_mean": load.peak}
                for what, load in _loads(forecasted)
            },
        }
        for mode, forecasted in result.modes.items()
    }
    return {
        "source": found.source,
        "ranks": result.ranks,
        "num_distinct": result.num_distinct,
        "occurrences": result.occurrences,
        "batch_size": result.batch_size,
        "modes": modes,
        "hottest": [hot._asdict() for hot in result.hottest],
        "advice": [asdict(advice) for advice in result.advice],
        "recommended": result.recommended,
    }
