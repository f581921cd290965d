"""megalith checkpoint: lists, verifies, compares and rewrites checkpoints without a model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.text import Text

from megalith import checkpoint
from megalith.checkpoint import Difference, ListedCheckpoint, Manifest
from megalith.checkpoint.compare import Change
from megalith.checkpoint.manifest import Save, is_checkpoint
from megalith.cli.output import (
    AsJson,
    console,
    exit_on_error,
    grid,
    plural,
    print_json,
    print_line,
    progress,
    show_routing,
    show_segments,
)
from megalith.errors import CheckpointError, InputError
from megalith.reporting.inspection import TableSummary, summarize
from megalith.training.directory import find_checkpoint
from megalith.units import show_bytes, show_number

_LONGEST = 60


# ---- ls


def print_checkpoint(found: ListedCheckpoint, manifest: Manifest) -> None:
    out = console()
    out.print(Text.assemble("checkpoint ", (found.path, "bold")), soft_wrap=True)
    saved = f"saved {manifest.latest.created} by megalith {manifest.megalith}"
    out.print(Text(f"{found.rows:,} rows, {show_bytes(found.bytes)}, {saved}"))
    names = ("save", "kind", "created", "rows", "removed", "bytes", "step")
    saves = grid(names, left=names[:3])
    for save in manifest.saves:
        each = _save(save, manifest)
        counts = f"{each['rows']:,}", f"{each['removed']:,}", show_bytes(each["bytes"])
        saves.add_row(save.id, each["kind"], save.created, *counts, _steps(each["steps"]))
    out.print(saves)
    names = ("table", "rows", "bytes", "dim", "segments", "routing", "policies")
    tables = grid(names, left=("table", *names[4:]))
    for t in summarize(manifest):
        counts = f"{t.rows:,}", show_bytes(t.bytes), str(t.dim)
        cells = (_name(t), *counts, show_segments(t), show_routing(t.routing), t.policies)
        tables.add_row(*map(Text, cells))
    out.print(tables)
    for folder in found.leftovers:
        out.print(f"{folder} belongs to an unfinished save; the next save deletes it")


def print_checkpoints(path: str, found: list[ListedCheckpoint]) -> None:
    names = ("checkpoint", "rows", "bytes", "deltas", "created", "step")
    table = grid(names, left=("checkpoint", "created"), title=path)
    for each in found:
        name = Text(each.path.removeprefix(path.rstrip("/") + "/"))
        if each.manifest is None:
            table.add_row(name, Text(each.problem.partition(":")[0], style="bold red"))
            continue
        counts = f"{each.rows:,}", show_bytes(each.bytes), f"{len(each.manifest.deltas):,}"
        table.add_row(name, *counts, each.manifest.latest.created, _steps(each.steps))
    console().print(table)


def checkpoint_json(found: ListedCheckpoint) -> dict[str, Any]:
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


# ---- diff


def print_difference(found: Difference) -> None:
    out = console()
    if found.same:
        out.print("no differences" + (", except in times" if _times(found) else ""))
        for line in _times(found):
            print_line(line)
        return
    columns = ("table", "before", "after", "added", "removed", "changed", "weights", "largest", "id")
    table = grid(columns, left=("table",), title="rows")
    for name, t in found.tables.items():
        counts = (t.before, t.after, t.added, t.removed, t.changed, t.weights)
        largest = ("", "") if t.largest is None else (show_number(t.largest.amount), str(t.largest.id))
        table.add_row(Text(name), *(f"{count:,}" for count in counts), *largest)
    if found.tables:
        out.print(table)
    for side, names in (("before", found.only_before), ("after", found.only_after)):
        for name in names:
            out.print(Text(f"table {name} is only in the checkpoint {side}"))
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
    for line in _times(found):
        print_line(line)


def _times(found: Difference) -> list[str]:
    """Return a line for each difference that comes from the clock."""
    lines = [
        f"table {name}: {plural(t.times, 'row')} with only another time of the last update"
        for name, t in found.tables.items()
        if t.times
    ]
    return lines + ([] if found.seconds is None else [f"seconds of the run: {_arrow(found.seconds)}"])


def _arrow(change: Change) -> str:
    sides = ["none" if side is None else str(side) for side in (change.before, change.after)]
    if any(len(side) > _LONGEST for side in sides):
        return "differs"
    return " → ".join(sides)


app = typer.Typer(no_args_is_help=True, help="List, verify, compare and rewrite checkpoints.")

Place = Annotated[
    str,
    typer.Argument(
        help="A checkpoint, or a run with one: a directory, or an address like s3://bucket/x.",
        show_default=False,
    ),
]


@app.command()
def ls(
    path: Annotated[
        str, typer.Argument(help="A checkpoint, or a directory or address of several.", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Show the saves and tables of a checkpoint, or list the checkpoints of a directory.

    Only manifests are read. A directory is searched three levels deep. Incomplete and damaged checkpoints
    are marked.

    \b
    Example:
      megalith checkpoint ls runs/demo/checkpoint
      megalith checkpoint ls runs
      megalith checkpoint ls s3://bucket/models --json
    """
    with exit_on_error():
        found = checkpoint.find_checkpoints(path)
    if as_json:
        print_json({"checkpoints": [checkpoint_json(each) for each in found]})
    elif len(found) == 1 and found[0].manifest is not None:
        print_checkpoint(found[0], found[0].manifest)
    else:
        print_checkpoints(path, found)


@app.command()
def verify(path: Place, as_json: AsJson = False) -> None:
    """Read a checkpoint completely and list all problems. The exit code is 1 if there are any.

    It checks the manifest and its chain of deltas, the length and checksum of every file, row counts,
    duplicate ids, and rows on another shard than the recorded routing gives.

    \b
    Example:
      megalith checkpoint verify runs/demo/checkpoint
    """
    place = _checkpoint_of(path)
    with exit_on_error(), progress("verifying", _bytes_of(place)) as advance:
        result = checkpoint.verify(place, on_bytes=advance)
    if as_json:
        print_json({"path": path, "ok": not result.problems, **asdict(result)})
    else:
        out = console()
        for problem in result.problems:
            out.print(Text.assemble(("problem: ", "bold red"), problem), soft_wrap=True)
        summary = (
            f"{plural(result.files, 'file')}, {show_bytes(result.bytes)}, {plural(result.rows, 'row')} read"
        )
        end = plural(len(result.problems), "problem") if result.problems else "no problems"
        out.print(f"{end}: {summary}")
    if result.problems:
        raise typer.Exit(1)


@app.command()
def diff(
    before: Annotated[str, typer.Argument(help="A checkpoint or a run.", show_default=False)],
    after: Annotated[str, typer.Argument(help="Another one.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Show the differences of two checkpoints: rows, largest change, dense weights, steps and settings.

    Every row of both is read. The memory is about 70 bytes per row of the two tables being compared, plus
    256 MiB. The exit code is 0 even if they differ; --json reports "same". Two runs that are equal bit by bit
    are the same, although their durations and the clock times of their updates differ.

    \b
    Example:
      megalith checkpoint diff runs/monday runs/tuesday
    """
    with exit_on_error():
        old, new = _checkpoint_of(before), _checkpoint_of(after)
        with progress("comparing", _rows_of(old) + _rows_of(new)) as advance:
            found = checkpoint.diff(old, new, on_rows=advance)
    if as_json:
        print_json({"before": before, "after": after, "same": found.same, **asdict(found)})
    else:
        print_difference(found)


@app.command()
def reshard(
    path: Place,
    to: Annotated[
        str, typer.Argument(help="Directory or address of the new checkpoint.", show_default=False)
    ],
    num_shards: Annotated[
        int, typer.Option(min=1, help="Number of shards: one per rank.", show_default=False)
    ],
    dist_type: Annotated[
        str | None,
        typer.Option(help="continuous, roundrobin or hash_roundrobin. Default: the mode of each table."),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Number of consecutive ids per rank with mode continuous.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace an existing checkpoint.")] = False,
) -> None:
    """Write a checkpoint as another number of ranks would save it, with its deltas merged.

    Loading does not require this: any number of ranks can load any checkpoint. It makes loading faster,
    because each rank then reads only its own files, and it can change the routing.

    \b
    Example:
      megalith checkpoint reshard runs/demo/checkpoint demo-on-8 --num-shards 8
      megalith checkpoint reshard s3://bucket/a s3://bucket/b --num-shards 8 --dist-type hash_roundrobin
    """
    path = _checkpoint_of(path)
    with exit_on_error():
        if block_size is not None and dist_type not in (None, "continuous"):
            raise InputError(f"--block-size is for --dist-type continuous, not {dist_type}")
        if is_checkpoint(to) and not replace:
            raise InputError(f"{to} already holds a checkpoint: choose another path, or use --replace")
        with progress("resharding", _rows_of(path)) as advance:
            written = checkpoint.reshard(
                path, to, num_shards=num_shards, dist_type=dist_type, block_size=block_size, on_rows=advance
            )
    count = sum(entries[-1].live for entries in written.tables().values())
    print_line(f"{plural(count, 'row')} for {plural(num_shards, 'rank')} in {to}")


@app.command()
def compact(path: Place) -> None:
    """Merge the deltas of a checkpoint into its base, in place. It then loads faster and is smaller.

    The checkpoint stays valid until the merge is complete. Deltas can be added to it afterwards.

    \b
    Example:
      megalith checkpoint compact runs/demo/checkpoint
    """
    path = _checkpoint_of(path)
    with exit_on_error():
        before = checkpoint.read_manifest(path)
        with progress("merging", _rows_of(path)) as advance:
            after = checkpoint.compact(path, on_rows=advance)
    if not before.deltas:
        return print_line(f"{path} has no deltas: nothing to merge")
    sizes = [show_bytes(sum(file.bytes for file in m.all_files())) for m in (before, after)]
    print_line(f"{plural(len(before.deltas), 'delta')} merged: {sizes[0]} before, {sizes[1]} now")


@app.command()
def export(
    path: Place,
    out: Annotated[
        str,
        typer.Argument(
            help="Directory or address for one file per table, or NAME.parquet for one table.",
            show_default=False,
        ),
    ],
    table: Annotated[
        list[str] | None, typer.Option("--table", help="Table to export. May be repeated. Default: all.")
    ] = None,
    state: Annotated[bool, typer.Option("--state/--no-state", help="Include the optimizer state.")] = True,
) -> None:
    """Write tables of a checkpoint as Parquet: id, weights, optimizer state and time of the last update.

    \b
    Example:
      megalith checkpoint export runs/demo/checkpoint tables
      megalith checkpoint export runs/demo/checkpoint user.parquet --table user --no-state
    """
    path = _checkpoint_of(path)
    with exit_on_error(), progress("exporting", _rows_of(path)) as advance:
        written = checkpoint.export(path, out, tables=table or None, state=state, on_rows=advance)
    for name, count in written.items():
        print_line(f"{plural(count, 'row')} in {name}")


def _checkpoint_of(path: str) -> str:
    """The checkpoint of a run's directory. Another path, and an address, is returned unchanged."""
    return path if "://" in path else str(find_checkpoint(path))


# ---- amounts


def _rows_of(path: str) -> int:
    manifest = checkpoint.read_manifest(path)
    return sum(entry.rows for entries in manifest.tables().values() for entry in entries)


def _bytes_of(path: str) -> int | None:
    try:
        return sum(file.bytes for file in checkpoint.read_manifest(path).all_files())
    except CheckpointError:
        return None
