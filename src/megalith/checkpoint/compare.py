"""diff: the differences between two checkpoints, without a model.

Files are read one at a time. For each row, its id, a hash of its content, its time and its position are kept;
both sides are sorted by id and compared. Rows whose hashes differ are read again in batches, to compute by
how much their weights differ. The memory is about 70 bytes for each row of one table on both sides, 256 MiB
for rows that differ, one file, and the dense weights of both sides.

Reading again is cheap if rows have about the same order on both sides, as in checkpoints of one run.
Otherwise each 256 MiB of weights that differ may cost a pass over the other side's table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.json_state import unpack
from megalith.checkpoint.manifest import Manifest, Piece, TableEntry, read_manifest, show_policies
from megalith.checkpoint.saved_rows import read_chunk, read_removed, read_tensors
from megalith.errors import CheckpointError
from megalith.routing import mix
from megalith.storage.store import Store, StoredFile, open_store
from megalith.table import Chunk

BATCH_BYTES = 256 << 20
"""Memory for the weights of rows that differ, of both sides together."""
_HASH_BLOCK = 1 << 19
_INDEX_BYTES = 64
_MAX_NESTING = 16
_DURATION = "seconds"

OnRows = Callable[[int], None]


@dataclass(frozen=True)
class Change:
    """A value of both sides; None if a side does not have it."""

    before: Any
    after: Any


@dataclass(frozen=True)
class LargestChange:
    """The weight that differs most. The amount is infinite if one side is NaN or infinite."""

    id: int
    column: int
    before: float
    after: float
    amount: float


@dataclass(frozen=True)
class TableDifference:
    """The differences of a table that both checkpoints have."""

    before: int  # Number of rows in the first checkpoint
    after: int  # Number of rows in the second checkpoint
    added: int  # Number of ids that only the second has
    removed: int  # Number of ids that only the first has
    # Number of rows whose weights, optimizer state or count differ. Optimizer state is not compared if its
    # sizes differ, and rows are not compared if the dims differ.
    changed: int
    times: int  # Number of other rows whose last-update time differs
    weights: int  # Number of rows whose weights differ
    largest: LargestChange | None  # The largest difference of a weight
    settings: dict[str, Change]  # The dims, optimizers, routing and seed that differ

    @property
    def same(self) -> bool:
        """Whether there is no difference except in times, which may come from the clock."""
        return not (self.added or self.removed or self.changed or self.settings)


@dataclass(frozen=True)
class DenseDifference:
    """A dense weight that differs: its shapes and, if they are equal, the largest difference of a value."""

    shapes: Change
    largest: float | None


@dataclass(frozen=True)
class Difference:
    """The differences between two checkpoints.

    Attributes:
        tables: The differences of each table that both have.
        only_before: Tables that only the first has.
        only_after: Tables that only the second has.
        dense: The dense weights that differ.
        optimizer: Whether the state of the dense optimizer differs.
        steps: The global steps that differ, by collection.
        progress: The caller's data that differ, by "key.key"; they include the config of a run.
        seconds: The duration of the run (the key "seconds" of the progress), if it differs.
    """

    tables: dict[str, TableDifference]
    only_before: list[str]
    only_after: list[str]
    dense: dict[str, DenseDifference]
    optimizer: bool
    steps: dict[str, Change]
    progress: dict[str, Change]
    seconds: Change | None

    @property
    def same(self) -> bool:
        """Whether there is no difference except in durations and last-update times.

        Those come from the clock, so they differ between two runs that are equal bit by bit.
        """
        rest = self.only_before or self.only_after or self.dense or self.steps or self.progress
        return not (rest or self.optimizer) and all(table.same for table in self.tables.values())


def diff(
    before: str | PathLike[str], after: str | PathLike[str], *, on_rows: OnRows | None = None
) -> Difference:
    """Compare two checkpoints, with their deltas applied.

    Files of an object store are fetched once, into a temporary directory.

    Args:
        before: The directory or URL of the first checkpoint.
        after: The directory or URL of the second checkpoint.
        on_rows: Called with the number of rows read so far, of both sides together.

    Returns:
        The differences.

    Raises:
        CheckpointError: A checkpoint is missing or damaged.
    """
    stores = open_store(before), open_store(after)
    old, new = read_manifest(stores[0]), read_manifest(stores[1])
    old_tables, new_tables = old.tables(), new.tables()
    count = _RowCount(on_rows)
    progress = _changes(_flat(old.latest.progress), _flat(new.latest.progress))
    seconds = progress.pop(_DURATION, None)
    with ExitStack() as stack:
        left, right = (
            stack.enter_context(store.local_copy(_needed(manifest), CheckpointError))
            for store, manifest in zip(stores, (old, new), strict=True)
        )
        return Difference(
            tables={
                name: _compare_table(left, entries, right, new_tables[name], count)
                for name, entries in old_tables.items()
                if name in new_tables
            },
            only_before=sorted(set(old_tables) - set(new_tables)),
            only_after=sorted(set(new_tables) - set(old_tables)),
            dense=_compare_dense(_read(left, old.latest.dense), _read(right, new.latest.dense)),
            optimizer=not _equal(_optimizer(left, old), _optimizer(right, new)),
            steps=_changes(old.steps, new.steps),
            progress=progress,
            seconds=seconds,
        )


def _needed(manifest: Manifest) -> list[StoredFile]:
    tables = [entry for entries in manifest.tables().values() for entry in entries]
    pieces = [piece.file for entry in tables for piece in entry.files()]
    latest = manifest.latest
    return [*pieces, *(file for file in (latest.dense, latest.optimizer_tensors) if file is not None)]


# ---- tables


class _RowCount:
    """Counts the rows read so far and reports them."""

    def __init__(self, on_rows: OnRows | None) -> None:
        self._on_rows = on_rows
        self._rows = 0

    def add(self, rows: int) -> None:
        self._rows += rows
        if self._on_rows is not None:
            self._on_rows(self._rows)


class _Index:
    """The latest rows of a table: its sorted ids, and the hash, position and time of each row, [n] each.

    All are int64, except that the 32 bits of a time are int32. The position of a row is its number among the
    rows of all files in order.
    """

    def __init__(self, store: Store, entries: list[TableEntry], *, state: bool, count: _RowCount) -> None:
        self._store = store
        self.dim = entries[-1].dim
        self._pieces: list[tuple[Piece, TableEntry]] = []
        self._starts: list[int] = []
        ids, hashes, positions, times = [], [], [], []
        rows = removed = 0
        for entry in entries:
            for piece in entry.pieces:
                chunk = read_chunk(store, piece, entry)
                ids.append(chunk.ids.clone())
                hashes.append(_hash(chunk, state))
                times.append((chunk.time - 2**31).to(torch.int32))
                positions.append(torch.arange(rows, rows + piece.rows, device="cpu"))
                self._pieces.append((piece, entry))
                self._starts.append(rows)
                rows += piece.rows
                count.add(piece.rows)
            for piece in entry.removed:
                ids.append(read_removed(store, piece).clone())
                hashes.append(torch.zeros(piece.rows, dtype=torch.int64, device="cpu"))
                times.append(torch.zeros(piece.rows, dtype=torch.int32, device="cpu"))
                positions.append(torch.full((piece.rows,), -1, device="cpu"))
                removed += piece.rows
        # The sort is stable: the last row of an id is that of the newest save; -1 if that save removed it.
        self.ids, order = _join(ids).sort(stable=True)
        last = torch.ones(self.ids.numel(), dtype=torch.bool, device="cpu")
        last[:-1] = self.ids[1:] != self.ids[:-1]
        self.ids, order = self.ids[last], order[last]
        self.positions = _join(positions)[order]
        self.hashes = _join(hashes)[order]
        self.times = _join(times, torch.int32)[order]
        if removed:
            kept = self.positions >= 0
            self.ids, self.positions = self.ids[kept], self.positions[kept]
            self.hashes, self.times = self.hashes[kept], self.times[kept]

    def weights(self, positions: Tensor) -> Tensor:
        """Read the weights of the rows at some positions again: int64 [n] -> float32 [n, dim]."""
        found = torch.empty(positions.numel(), self.dim, device="cpu")
        numbers = torch.searchsorted(torch.tensor(self._starts, device="cpu"), positions, right=True) - 1
        for number in torch.unique(numbers).tolist():
            piece, entry = self._pieces[number]
            inside = numbers == number
            found[inside] = read_chunk(self._store, piece, entry).rows[
                positions[inside] - self._starts[number]
            ]
        return found


def _join(parts: list[Tensor], dtype: torch.dtype = torch.int64) -> Tensor:
    """Concatenate tensors of this dtype and empty the list, which frees them."""
    whole = torch.cat([torch.empty(0, dtype=dtype, device="cpu"), *parts])
    parts.clear()
    return whole


def _compare_table(
    left: Store, before: list[TableEntry], right: Store, after: list[TableEntry], count: _RowCount
) -> TableDifference:
    old, new = before[-1], after[-1]
    state = old.state_sizes == new.state_sizes
    a = _Index(left, before, state=state, count=count)
    b = _Index(right, after, state=state, count=count)
    at = torch.searchsorted(b.ids, a.ids).clamp(max=max(0, b.ids.numel() - 1))
    common = (
        b.ids[at] == a.ids if b.ids.numel() else torch.zeros(a.ids.numel(), dtype=torch.bool, device="cpu")
    )
    shared = int(common.sum())
    changed = common.nonzero()[:, 0]
    times = 0
    if old.dim == new.dim:
        differs = a.hashes[changed] != b.hashes[at[changed]]
        times = int((a.times[changed] != b.times[at[changed]])[~differs].sum())
        changed = changed[differs]
        weights, largest = _compare_weights(a, changed, b, at[changed])
    else:
        changed, weights, largest = changed[:0], 0, None
    return TableDifference(
        before=a.ids.numel(),
        after=b.ids.numel(),
        added=b.ids.numel() - shared,
        removed=a.ids.numel() - shared,
        changed=changed.numel(),
        times=times,
        weights=weights,
        largest=largest,
        settings=_changes(_settings(old), _settings(new)),
    )


def _compare_weights(
    a: _Index, rows_a: Tensor, b: _Index, rows_b: Tensor
) -> tuple[int, LargestChange | None]:
    """Of pairs of rows that differ, return how many differ in weights, and the largest difference."""
    if not rows_a.numel():
        return 0, None
    order = torch.argsort(a.positions[rows_a])
    size = max(1, BATCH_BYTES // (16 * a.dim + _INDEX_BYTES))
    differing, largest = 0, None
    for part in order.split(size):
        before, after = a.weights(a.positions[rows_a[part]]), b.weights(b.positions[rows_b[part]])
        differs = before.view(torch.int32) != after.view(torch.int32)
        differing += int(differs.any(1).sum())
        # The difference of equal infinities is NaN, but they are equal; any other NaN counts as infinite.
        amounts = (
            (before - after).abs().nan_to_num_(nan=torch.inf, posinf=torch.inf).masked_fill_(~differs, 0)
        )
        at = int(amounts.argmax())
        row, column = divmod(at, amounts.shape[1])
        amount = float(amounts[row, column])
        if amount > (0.0 if largest is None else largest.amount):
            largest = LargestChange(
                id=int(a.ids[rows_a[part[row]]]),
                column=column,
                before=float(before[row, column]),
                after=float(after[row, column]),
                amount=amount,
            )
    return differing, largest


def _hash(chunk: Chunk, state: bool) -> Tensor:
    """Return a hash of each row without its time, int64 [n]; two rows collide with probability 2^-64."""
    parts = [chunk.rows, *(chunk.state[key] for key in sorted(chunk.state) if state)]
    whole = [column for column in (chunk.count, chunk.step) if column is not None]
    total = torch.zeros(chunk.ids.numel(), dtype=torch.int64, device="cpu")
    column = 0
    for values in [*(part.contiguous().view(torch.int32) for part in parts), *(t[:, None] for t in whole)]:
        width = values.shape[1]
        salt = mix(torch.arange(column + 1, column + 1 + width, device="cpu"))
        step = max(1, _HASH_BLOCK // width)
        for start in range(0, total.numel(), step):
            total[start : start + step] += mix(values[start : start + step].long() + salt).sum(1)
        column += width
    return total


def _settings(entry: TableEntry) -> dict[str, Any]:
    segments = {
        f"segment {number} {key}": value
        for number, segment in enumerate(entry.segments)
        for key, value in {
            "dim": segment["dim"],
            "precision": segment.get("precision"),
            "rounding": segment.get("rounding", "nearest"),
            "serving": segment.get("serving"),
            "optimizer": segment["optimizer"].get("settings", segment["optimizer"]["name"]),
            "initializer": segment.get("initializer"),
        }.items()
    }
    routing = entry.routing
    return (
        segments
        | {
            "seed": entry.seed,
            "dist_type": routing.dist_type,
            "shards": routing.num_shards,
            "block_size": routing.block_size,
            "skip_first": routing.skip_first,
        }
        | ({} if entry.policies is None else {"policies": show_policies(entry.policies)})
    )


# ---- dense weights, optimizer, progress


def _read(store: Store, file: StoredFile | None) -> dict[str, Tensor]:
    return {} if file is None else read_tensors(store, file)


def _compare_dense(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, DenseDifference]:
    found = {}
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old is not None and new is not None and _equal(old, new):
            continue
        largest = None
        if old is not None and new is not None and old.shape == new.shape:
            amounts = (old.double() - new.double()).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
            largest = float(amounts.masked_fill(old == new, 0).max()) if old.numel() else 0.0
        shapes = Change(*(None if side is None else list(side.shape) for side in (old, new)))
        found[name] = DenseDifference(shapes, largest)
    return found


def _optimizer(store: Store, manifest: Manifest) -> Any:
    latest = manifest.latest
    return unpack(latest.optimizer, _read(store, latest.optimizer_tensors))


def _equal(a: Any, b: Any) -> bool:
    """Return whether nested data are equal, tensors bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape
        return alike and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and bool(a == b)


def _flat(data: Any, name: str = "", depth: int = 0) -> dict[str, Any]:
    """Flatten nested objects to one, by "key.key"."""
    if not isinstance(data, dict) or not data or depth == _MAX_NESTING:
        return {name: data} if name else {}
    return {
        key: value
        for inner, part in data.items()
        for key, value in _flat(part, f"{name}.{inner}".lstrip("."), depth + 1).items()
    }


def _changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Change]:
    names = [*before, *(name for name in after if name not in before)]
    return {
        name: Change(before.get(name), after.get(name))
        for name in names
        if not _equal(before.get(name), after.get(name))
    }
