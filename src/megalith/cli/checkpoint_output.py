"""The output of `megalith checkpoint`: tables for the terminal and JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from megalith.checkpoint import Difference, ListedCheckpoint, Manifest
from megalith.checkpoint.compare import Change
from megalith.checkpoint.manifest import Save
from megalith.cli.output import console, plural, show_routing, show_segments
from megalith.reporting.inspection import TableSummary, summarize
from megalith.units import show_bytes, show_number

_LONGEST = 60


# ---- ls


def _grid(*columns: str, title: str = "", right: tuple[str, ...] = ()) -> Table:
    grid = Table(title=Text(title) if title else None, title_justify="left", title_style="bold")
    for column in columns:
        grid.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return grid


def print_checkpoint(found: ListedCheckpoint, manifest: Manifest) -> None:
    """Prints the saves and tables of a checkpoint."""
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
    tables = _grid("table", "rows", "bytes", "dim", "segments", "routing", "policies", right=numbers)
    for t in summarize(manifest):
        cells = [
            _name(t),
            f"{t.rows:,}",
            show_bytes(t.bytes),
            str(t.dim),
            show_segments(t),
            show_routing(t.routing),
            t.policies,
        ]
        tables.add_row(*(Text(cell) for cell in cells))
    out.print(tables)
    for folder in found.leftovers:
        out.print(f"{folder} belongs to an unfinished save; the next save deletes it")


def print_checkpoints(path: str, found: list[ListedCheckpoint]) -> None:
    """Prints one line per checkpoint of a directory."""
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


def checkpoint_json(found: ListedCheckpoint) -> dict[str, Any]:
    """Return the JSON form of a listed checkpoint."""
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
    """Prints the differences of two checkpoints."""
    out = console()
    if found.same:
        out.print("no differences" + (", except in times" if _times(found) else ""))
        for line in _times(found):
            out.print(Text(line), soft_wrap=True)
        return
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
        out.print(Text(line), soft_wrap=True)


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
