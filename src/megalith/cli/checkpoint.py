"""megalith checkpoint: list, verify, compare and rewrite checkpoints. No model is needed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from megalith import checkpoint
from megalith.checkpoint import Difference, ListedCheckpoint, Manifest
from megalith.checkpoint.compare import Change
from megalith.checkpoint.listing import is_checkpoint
from megalith.checkpoint.manifest import Save
from megalith.cli.console import exit_on_error
from megalith.cli.output import console, print_json, progress, show_routing
from megalith.errors import CheckpointError, InputError
from megalith.reporting.inspection import TableSummary, summarize
from megalith.units import show_bytes, show_number

app = typer.Typer(no_args_is_help=True, help="List, verify, compare and rewrite checkpoints.")

_LONGEST = 60

Place = Annotated[
    str,
    typer.Argument(help="A checkpoint: a directory, or an address like s3://bucket/x.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def ls(
    path: Annotated[
        str, typer.Argument(help="A checkpoint, or a directory or address of several.", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Shows what a checkpoint is made of, or all checkpoints of a directory, a line each.

    Only manifests are read. A directory is searched three folders deep; checkpoints that are incomplete or
    damaged are marked.

    \b
    Example:
      megalith checkpoint ls runs/demo/checkpoint
      megalith checkpoint ls runs
      megalith checkpoint ls s3://bucket/models --json
    """
    with exit_on_error():
        found = checkpoint.find_checkpoints(path)
    if as_json:
        print_json({"checkpoints": [_as_dict(each) for each in found]})
    elif len(found) == 1 and found[0].manifest is not None:
        _print_one(found[0], found[0].manifest)
    else:
        _print_several(path, found)


@app.command()
def verify(path: Place, as_json: AsJson = False) -> None:
    """Reads a whole checkpoint and lists all that is wrong with it; exits with 1 if anything is.

    Looked at: the manifest and its chain of deltas, length and checksum of every file, rows against the
    manifest, ids that are there twice, rows on another shard than the recorded routing says.

    \b
    Example:
      megalith checkpoint verify runs/demo/checkpoint
    """
    with exit_on_error(), progress("verifying", _bytes_of(path)) as advance:
        result = checkpoint.verify(path, on_bytes=advance)
    if as_json:
        print_json({"path": path, "ok": not result.problems, **asdict(result)})
    else:
        out = console()
        for problem in result.problems:
            out.print(Text.assemble(("wrong: ", "bold red"), problem), soft_wrap=True)
        seen = (
            f"{_count(result.files, 'file')}, {show_bytes(result.bytes)}, {_count(result.rows, 'row')} read"
        )
        end = _count(len(result.problems), "problem") if result.problems else "all is well"
        out.print(f"{end}: {seen}")
    if result.problems:
        raise typer.Exit(1)


@app.command()
def diff(
    before: Annotated[str, typer.Argument(help="A checkpoint.", show_default=False)],
    after: Annotated[str, typer.Argument(help="Another one.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Shows what differs between two checkpoints: rows, the largest change, dense weights, steps, settings.

    Every row of both is read. Memory is about 60 bytes for each row of the two tables at hand, and 256 MiB.
    Exits with 0 whether they differ or not; --json says "same".

    \b
    Example:
      megalith checkpoint diff runs/monday/checkpoint runs/tuesday/checkpoint
    """
    with exit_on_error():
        total = sum(_rows_of(path) for path in (before, after))
        with progress("comparing", total) as advance:
            found = checkpoint.diff(before, after, on_rows=advance)
    if as_json:
        print_json({"before": before, "after": after, "same": found.same, **asdict(found)})
    else:
        _print_difference(found)


@app.command()
def reshard(
    path: Place,
    to: Annotated[str, typer.Argument(help="Where to write it: another place.", show_default=False)],
    ranks: Annotated[int, typer.Option(min=1, help="How many ranks it will be for.", show_default=False)],
    dist_type: Annotated[
        str | None,
        typer.Option(help="continuous, roundrobin or hash_roundrobin; as each table has it if not given."),
    ] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Rows of a rank, of mode continuous.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the checkpoint that is there.")] = False,
) -> None:
    """Writes a checkpoint as that many ranks would have saved it, deltas merged.

    Loading never needs this: any number of ranks loads any checkpoint. It makes loading faster, as each rank
    then reads its own files only, and changes the routing once for all.

    \b
    Example:
      megalith checkpoint reshard runs/demo/checkpoint demo-on-8 --ranks 8
      megalith checkpoint reshard s3://bucket/a s3://bucket/b --ranks 8 --dist-type hash_roundrobin
    """
    with exit_on_error():
        if block_size is not None and dist_type not in (None, "continuous"):
            raise InputError(f"--block-size is for --dist-type continuous, not {dist_type}")
        if is_checkpoint(to) and not replace:
            raise InputError(f"{to} holds a checkpoint already: name another place, or give --replace")
        with progress("resharding", _rows_of(path)) as advance:
            written = checkpoint.reshard(
                path, to, num_shards=ranks, dist_type=dist_type, block_size=block_size, on_rows=advance
            )
    count = sum(entries[-1].live for entries in written.tables().values())
    _say(f"{_count(count, 'row')} for {_count(ranks, 'rank')} in {to}")


@app.command()
def compact(path: Place) -> None:
    """Merges a checkpoint's deltas into its base, in place: it loads faster and takes less room.

    Until that is done the checkpoint is as it was. A model may go on adding deltas afterwards.

    \b
    Example:
      megalith checkpoint compact runs/demo/checkpoint
    """
    with exit_on_error():
        before = checkpoint.read_manifest(path)
        with progress("merging", _rows_of(path)) as advance:
            after = checkpoint.compact(path, on_rows=advance)
    if not before.deltas:
        return _say(f"{path} has no deltas: nothing to merge")
    sizes = [show_bytes(sum(file.bytes for file in m.all_files())) for m in (before, after)]
    _say(f"{_count(len(before.deltas), 'delta')} merged: {sizes[0]} before, {sizes[1]} now")


@app.command()
def export(
    path: Place,
    out: Annotated[
        str,
        typer.Argument(
            help="A directory or address for a file of each table, or NAME.parquet for one table.",
            show_default=False,
        ),
    ],
    table: Annotated[
        list[str] | None, typer.Option("--table", help="Only this table; may be repeated. All if not given.")
    ] = None,
    state: Annotated[bool, typer.Option("--state/--no-state", help="With the optimizers' state.")] = True,
) -> None:
    """Writes tables of a checkpoint as Parquet: id, weights, optimizer state, time of the last update.

    \b
    Example:
      megalith checkpoint export runs/demo/checkpoint tables
      megalith checkpoint export runs/demo/checkpoint user.parquet --table user --no-state
    """
    with exit_on_error(), progress("exporting", _rows_of(path)) as advance:
        written = checkpoint.export(path, out, tables=table or None, state=state, on_rows=advance)
    for name, count in written.items():
        _say(f"{_count(count, 'row')} in {name}")


# ---- amounts


def _rows_of(path: str) -> int:
    """Rows of all files, for a bar."""
    manifest = checkpoint.read_manifest(path)
    return sum(entry.rows for entries in manifest.tables().values() for entry in entries)


def _bytes_of(path: str) -> int | None:
    try:
        return sum(file.bytes for file in checkpoint.read_manifest(path).all_files())
    except CheckpointError:
        return None


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def _say(text: str) -> None:
    console().print(Text(text), soft_wrap=True)


# ---- ls


def _grid(*columns: str, title: str = "", right: tuple[str, ...] = ()) -> Table:
    grid = Table(title=Text(title) if title else None, title_justify="left", title_style="bold")
    for column in columns:
        grid.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return grid


def _print_one(found: ListedCheckpoint, manifest: Manifest) -> None:
    out = console()
    out.print(Text.assemble("checkpoint ", (found.path, "bold")), soft_wrap=True)
    saved = f"saved {manifest.latest.created} by megalith {manifest.megalith}"
    out.print(Text(f"{found.rows:,} rows, {show_bytes(found.bytes)}, {saved}"))
    numbers = ("rows", "removed", "bytes", "step", "dim")
    saves = _grid("save", "kind", "created", "rows", "removed", "bytes", "step", right=numbers)
    for save in manifest.saves:
        each = _save(save, manifest)
        saves.add_row(
            save.id,
            each["kind"],
            save.created,
            f"{each['rows']:,}",
            f"{each['removed']:,}",
            show_bytes(each["bytes"]),
            _steps(each["steps"]),
        )
    out.print(saves)
    tables = _grid("table", "rows", "bytes", "dim", "segments", "routing", right=numbers)
    for t in summarize(manifest):
        cells = [
            _name(t),
            f"{t.rows:,}",
            show_bytes(t.bytes),
            str(t.dim),
            _segments(t),
            show_routing(t.routing),
        ]
        tables.add_row(*(Text(cell) for cell in cells))
    out.print(tables)
    for folder in found.leftovers:
        out.print(f"{folder} is of a save that is under way or was cut off; the next save deletes it")


def _print_several(path: str, found: list[ListedCheckpoint]) -> None:
    numbers = ("rows", "bytes", "deltas", "step")
    grid = _grid("checkpoint", "rows", "bytes", "deltas", "created", "step", title=path, right=numbers)
    for each in found:
        name = Text(each.path.removeprefix(path.rstrip("/") + "/"))
        if each.manifest is None:
            grid.add_row(name, Text(each.problem.partition(":")[0], style="bold red"))
            continue
        grid.add_row(
            name,
            f"{each.rows:,}",
            show_bytes(each.bytes),
            f"{len(each.manifest.deltas):,}",
            each.manifest.latest.created,
            _steps(each.steps),
        )
    console().print(grid)


def _as_dict(found: ListedCheckpoint) -> dict[str, Any]:
    about = {"path": found.path, "complete": found.manifest is not None, "problem": found.problem}
    if found.manifest is None:
        return {**about, "leftovers": found.leftovers}
    manifest = found.manifest
    return {
        **about,
        "id": manifest.tip,
        "created": manifest.latest.created,
        "megalith": manifest.megalith,
        "rows": found.rows,
        "bytes": found.bytes,
        "steps": found.steps,
        "saves": [_save(save, manifest) for save in manifest.saves],
        "tables": [asdict(t) for t in summarize(manifest)],
        "leftovers": found.leftovers,
    }


def _save(save: Save, manifest: Manifest) -> dict[str, Any]:
    tables = [table for c in save.collections.values() for table in c.tables.values()]
    return {
        "id": save.id,
        "kind": "base" if save is manifest else "delta",
        "created": save.created,
        "rows": sum(table.rows for table in tables),
        "removed": sum(piece.rows for table in tables for piece in table.removed),
        "bytes": sum(file.bytes for file in save.files()),
        "steps": {path: c.global_step for path, c in save.collections.items()},
    }


def _steps(steps: dict[str, int]) -> str:
    if len(set(steps.values())) <= 1:
        return "".join(f"{step:,}" for step in set(steps.values()))
    return ", ".join(f"{path}: {step:,}" for path, step in steps.items())


def _name(t: TableSummary) -> str:
    return f"{t.collection}.{t.name}".lstrip(".")


def _segments(t: TableSummary) -> str:
    return " + ".join(f"{s.dim} {s.optimizer}" for s in t.segments)


# ---- diff


def _print_difference(found: Difference) -> None:
    out = console()
    if found.same:
        return out.print("nothing differs")
    numbers = ("before", "after", "added", "removed", "changed", "weights")
    shown = (*numbers, "largest", "id")
    grid = _grid("table", *shown, title="rows", right=shown)
    for name, t in found.tables.items():
        counts = (t.before, t.after, t.added, t.removed, t.changed, t.weights)
        largest = ("", "") if t.largest is None else (show_number(t.largest.amount), str(t.largest.id))
        grid.add_row(Text(name), *(f"{count:,}" for count in counts), *largest)
    if found.tables:
        out.print(grid)
    for side, names in (("before", found.only_before), ("after", found.only_after)):
        for name in names:
            out.print(Text(f"table {name} is only in the one {side}"))
    for name, t in found.tables.items():
        for key, change in t.settings.items():
            out.print(Text(f"table {name}: {key} {_arrow(change)}"), soft_wrap=True)
    for name, dense in found.dense.items():
        shapes = dense.shapes
        how = _arrow(shapes) if dense.largest is None else f"changed by up to {show_number(dense.largest)}"
        out.print(Text(f"dense {name}: {how}"))
    if found.optimizer:
        out.print("the dense optimizer's state differs")
    for name, change in found.steps.items():
        out.print(Text(f"step of {name or 'the model'}: {_arrow(change)}"))
    for key, change in found.progress.items():
        out.print(Text(f"progress {key}: {_arrow(change)}"), soft_wrap=True)


def _arrow(change: Change) -> str:
    sides = ["none" if side is None else str(side) for side in (change.before, change.after)]
    if any(len(side) > _LONGEST for side in sides):
        return "differs"
    return " → ".join(sides)
