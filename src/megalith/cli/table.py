"""megalith table: shows the tables and rows of a checkpoint."""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megalith.bits import signed
from megalith.checkpoint import Manifest, read_manifest
from megalith.checkpoint.manifest import TableEntry
from megalith.cli.output import (
    AsJson,
    bar_table,
    console,
    exit_on_error,
    grid,
    plural,
    print_json,
    progress,
    show_precision,
    show_routing,
    show_segments,
)
from megalith.errors import InputError, UnknownNameError
from megalith.hashing import hash_strings
from megalith.reporting import inspection
from megalith.reporting.inspection import Ages, InspectedRow, Norms, TableSummary
from megalith.training.directory import find_checkpoint
from megalith.units import YEAR, show_bytes, show_number, show_span, show_time


def table(
    checkpoint: Annotated[
        Path, typer.Argument(help="Directory of a checkpoint or a run.", show_default=False)
    ],
    name: Annotated[
        str | None, typer.Option("--table", help="Show the norms and ages of this table.")
    ] = None,
    collection: Annotated[
        str | None,
        typer.Option(help="Collection of the table, if several collections have a table of this name."),
    ] = None,
    top: Annotated[
        int | None, typer.Option(min=0, help="Number of largest rows to show. Default: 10.")
    ] = None,
    id: Annotated[str | None, typer.Option("--id", help="Show the row of this id.")] = None,
    string: Annotated[str | None, typer.Option(help="Show the row of the id of this text.")] = None,
    now: Annotated[
        str,
        typer.Option(
            help='Reference time of ages: "clock", "newest" (the newest row of the table), or seconds.'
        ),
    ] = "clock",
    as_json: AsJson = False,
) -> None:
    """Show the tables of a checkpoint, the norms, ages and largest rows of a table, or one row.

    The exit code is 1 if the checkpoint is damaged or the id has no row.

    \b
    Example:
      megalith table runs/demo/checkpoint
      megalith table runs/demo/checkpoint --table user --top 5
      megalith table runs/demo/checkpoint --table user --id 4711
      megalith table runs/demo/checkpoint --table genre --string Comedy
    """
    with exit_on_error():
        checkpoint = find_checkpoint(checkpoint)
        manifest = read_manifest(checkpoint)
        wanted = _wanted(id, string)
        if (wanted, name, collection, top) == (None, None, None, None):
            return _show_all(manifest, as_json)
        summary, entries = inspection.find_table(manifest, name, collection)
        if wanted is not None:
            _show_row(checkpoint, summary, entries, wanted, now, as_json)
        else:
            _show_table(checkpoint, summary, entries, 10 if top is None else top, now, as_json)


# ---- the three views


def _show_all(manifest: Manifest, as_json: bool) -> None:
    tables = inspection.summarize(manifest)
    if as_json:
        about = {"id": manifest.id, "created": manifest.created, "megalith": manifest.megalith}
        return print_json({**about, "tables": [asdict(t) for t in tables]})
    out = console()
    rows, size = sum(t.rows for t in tables), sum(file.bytes for file in manifest.all_files())
    out.print(
        Text(f"checkpoint {manifest.id} of {manifest.created}: {rows:,} rows, {show_bytes(size)} on disk")
    )
    with_collections = any(t.collection for t in tables)
    words = ("collection", "table", "segments", "routing")
    names = ("collection", "table", "rows", "on disk", "dim", "segments", "routing", "step")
    table = grid(names[not with_collections :], left=words)
    for t in tables:
        where = [t.collection] if with_collections else []
        counts = f"{t.rows:,}", show_bytes(t.bytes), str(t.dim)
        cells = (*where, t.name, *counts, show_segments(t), show_routing(t.routing), f"{t.global_step:,}")
        table.add_row(*map(Text, cells))
    out.print(table)
    out.print("Show one table with --table NAME.")


def _show_table(
    root: Path, summary: TableSummary, entries: list[TableEntry], top: int, now: str, as_json: bool
) -> None:
    with progress(f"reading {summary.name}", summary.rows) as advance:
        norms = inspection.measure_norms(root, entries, top=top, on_rows=advance)
    ages = inspection.measure_ages(root, entries, now=_now(now, root, entries))
    if as_json:
        top_rows = [row._asdict() for row in norms.top]
        bins = [{"age": label, "rows": count} for label, count in ages.bins]
        numbers = {"norms": {**asdict(norms), "top": top_rows}, "ages": {**asdict(ages), "bins": bins}}
        return print_json({**asdict(summary), **numbers})
    out = console()
    _print_summary(out, summary)
    if not norms.rows:
        return out.print("The table has no rows.")
    _print_norms(out, norms)
    _print_ages(out, ages, now)


def _show_row(
    root: Path, summary: TableSummary, entries: list[TableEntry], wanted: int, now: str, as_json: bool
) -> None:
    with progress(f"searching {summary.name}", summary.rows) as advance:
        row = inspection.find_row(root, entries, wanted, on_rows=advance)
    if row is None:
        raise UnknownNameError(
            f"table {summary.name!r} has no row for id {wanted}; it has {summary.rows:,} rows of other ids"
        )
    if as_json:
        return print_json({"collection": summary.collection, "table": summary.name, **asdict(row)})
    _print_row(console(), summary, row, _now(now, root, entries))


# ---- arguments


def _wanted(id: str | None, string: str | None) -> int | None:
    if id is not None and string is not None:
        raise InputError("use either --id or --string, not both")
    if string is not None:
        return int(hash_strings([string])[0])
    if id is None:
        return None
    try:
        value = int(id, 0)
    except ValueError:
        raise InputError(f"--id must be an integer, got {id!r}; use --string for text") from None
    if not -(2**63) <= value < 2**64:
        raise InputError(f"--id must fit in 64 bits, got {id}")
    return signed(value)


def _now(now: str, root: Path, entries: list[TableEntry]) -> int:
    if now == "clock":
        return int(time.time())
    if now == "newest":
        return inspection.newest_time(root, entries) or 0
    if not now.isdecimal() or len(now) > 18:
        raise InputError(f'--now must be "clock", "newest" or seconds since 1970, got {now!r}')
    return int(now)


# ---- text


def _print_summary(out: Console, t: TableSummary) -> None:
    facts = Table.grid(padding=(0, 2))
    where = f" of collection {t.collection}" if t.collection else ""
    out.print(Text.assemble((f"table {t.name}", "bold"), where))
    facts.add_row("rows", f"{t.rows:,}")
    per_row = f", {show_bytes(t.bytes / t.rows)} per row" if t.rows else ""
    facts.add_row("on disk", f"{show_bytes(t.bytes)} in {plural(t.num_files, 'file')}{per_row}")
    parts = ", ".join(f"{name} {show_bytes(size)}" for name, size in t.memory_parts.items() if size)
    total = sum(t.memory_parts.values())
    facts.add_row("in memory", f"about {show_bytes(total)} when loaded: {parts}" if total else "no rows")
    if t.pending:
        facts.add_row("pending", f"{t.pending:,} ids without a row are counted")
    for number, s in enumerate(t.segments):
        text = f"dim {s.dim}, {show_precision(s)}, {s.settings}, {s.initializer}"
        facts.add_row(f"segment {number}", Text(text))
    facts.add_row("routing", Text(show_routing(t.routing)))
    facts.add_row("policies", Text(t.policies))
    facts.add_row("step", f"{t.global_step:,}")
    out.print(facts)


def _print_norms(out: Console, norms: Norms) -> None:
    if norms.num_nonfinite:
        out.print(f"\n[bold red]{norms.num_nonfinite:,} rows contain NaN or infinity[/]")
    if norms.minimum is None or norms.median is None or norms.maximum is None:
        return
    spread = f"min {norms.minimum:.4g}, median {norms.median:.4g}, max {norms.maximum:.4g}"
    zeros = f", {norms.num_zero:,} rows of zeros" if norms.num_zero else ""
    edges = norms.histogram.edges
    labels = [f"{a:.4g} to {b:.4g}" for a, b in pairwise(edges)]
    out.print()
    bins = list(zip(labels, norms.histogram.counts, strict=True))
    out.print(bar_table(f"norms: {spread}{zeros}", "norm", bins))
    if not norms.top:
        return
    table = grid(("id", "norm"), left=(), title="largest rows", box=None, pad_edge=False)
    for row in norms.top:
        table.add_row(str(row.id), f"{row.norm:.6g}")
    out.print()
    out.print(table)


def _print_ages(out: Console, ages: Ages, now: str) -> None:
    if ages.newest is None or ages.oldest is None or ages.median is None:
        return
    out.print()
    out.print(bar_table(f"age of rows: median {show_span(ages.median)}", "last updated", ages.bins))
    out.print(f"from {show_time(ages.oldest)} to {show_time(ages.newest)}, relative to {show_time(ages.now)}")
    if now == "clock" and ages.now - ages.newest > YEAR:
        out.print("The times are those of the data: --now newest shows ages relative to the newest row.")


def _print_row(out: Console, t: TableSummary, row: InspectedRow, now: int) -> None:
    out.print(Text.assemble((f"id {row.id}", "bold"), f" of table {t.name}"))
    facts = Table.grid(padding=(0, 2))
    begin = 0
    for number, s in enumerate(t.segments):
        part = row.weights[begin : begin + s.dim]
        facts.add_row("weights" if len(t.segments) == 1 else f"weights {number}", _numbers(part))
        begin += s.dim
    for key, values in row.state.items():
        facts.add_row(Text(f"state {key}"), _numbers(values))
    facts.add_row("norm", f"{row.norm:.6g}")
    age = now - row.time
    ago = f"{show_span(age)} ago" if age >= 0 else f"{show_span(-age)} in the future"
    facts.add_row("last update", f"{show_time(row.time)} ({ago})")
    if row.count is not None:
        facts.add_row("updates", show_number(row.count))
    out.print(facts)


def _numbers(values: list[float]) -> str:
    return " ".join(f"{value:.6g}" for value in values)
