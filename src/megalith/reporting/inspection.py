"""Inspection of a checkpoint without a model: its tables, and the norms and ages of their rows.

Files are read one at a time, so that the memory is that of one file (64 MiB as `save` writes them) for a
table of any size. Nothing is printed or changed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.checkpoint.manifest import Manifest, Routing, TableEntry, full_name, show_policies
from megalith.checkpoint.saved_rows import latest_rows
from megalith.errors import CheckpointError, UnknownNameError
from megalith.storage.store import open_store
from megalith.table import Chunk
from megalith.table.config import PRECISIONS
from megalith.units import DAY, HOUR, MINUTE, MONTH, WEEK, YEAR

OnRows = Callable[[int], None]

AGE_LIMITS = (
    (10, "under 10 seconds"),
    (MINUTE, "10 to 60 seconds"),
    (10 * MINUTE, "1 to 10 minutes"),
    (HOUR, "10 to 60 minutes"),
    (6 * HOUR, "1 to 6 hours"),
    (DAY, "6 to 24 hours"),
    (WEEK, "1 to 7 days"),
    (MONTH, "7 to 30 days"),
    (3 * MONTH, "1 to 3 months"),
    (YEAR, "3 to 12 months"),
    (3 * YEAR, "1 to 3 years"),
)
OLDEST_LABEL, FUTURE_LABEL = "over 3 years", "in the future"

INDEX_BYTES = 24
"""Bytes of the cpu engine's index per row of a loaded table: 64 bytes for 5 ids, at a load of 0.55."""
PENDING_BYTES = 45
"""Bytes of a counted id without a row; see `MinCount`."""

_NUM_BINS = 12
_LOG_RATIO = 20
_DROPPED_BITS = 11
_FLOAT32_MAX = np.finfo(np.float32).max


@dataclass(frozen=True)
class SegmentSummary:
    dim: int
    precision: str
    rounding: str
    """How an update rounds to the precision: "nearest" or "stochastic"."""
    serving: str | None
    """How servers store the weights, such as "FixedPoint(range=1.0)"; None: as the export says."""
    optimizer: str
    settings: str
    initializer: str


@dataclass(frozen=True)
class TableSummary:
    collection: str
    name: str
    rows: int
    bytes: int
    """Size of its files on disk."""
    memory: int
    """Bytes of weights, optimizer state, ids and times in memory, without the index of the engine."""
    memory_parts: dict[str, int]
    """Bytes of a table that is loaded from the checkpoint, by the names of `MemoryUse`. `index` is an
    estimate for the cpu engine."""
    pending: int
    """Number of ids without a row that an admission policy counts."""
    dim: int
    num_files: int
    global_step: int
    segments: list[SegmentSummary]
    routing: Routing
    policies: str
    """The policies of the table, such as "ttl(seconds=60.0)", "none", or "not recorded"."""


@dataclass(frozen=True)
class Histogram:
    """counts[i] is the number of values between edges[i] and edges[i + 1]."""

    edges: list[float]
    counts: list[int]


class TopRow(NamedTuple):
    """An id and the norm of its weights."""

    id: int
    norm: float


@dataclass(frozen=True)
class Norms:
    """L2 norms of the rows of a table. The statistics are None if there is no finite row."""

    rows: int
    minimum: float | None
    median: float | None
    """Accurate to 0.02 %."""
    maximum: float | None
    num_zero: int
    """Number of rows of zeros."""
    num_nonfinite: int
    """Number of rows with a NaN or infinity; the other fields do not include them."""
    histogram: Histogram
    top: list[TopRow]
    """The largest rows; of rows with equal norms, the smaller id first."""


@dataclass(frozen=True)
class Ages:
    """The times since the last update of the rows of a table."""

    now: int
    """The time that ages are relative to, in seconds."""
    rows: int
    newest: int | None
    """Time of the last update of any row, in seconds. None if the table is empty."""
    oldest: int | None
    """Time of the last update of the oldest row, in seconds. None if the table is empty."""
    median: float | None
    """Median age in seconds. None if the table is empty."""
    bins: list[tuple[str, int]]
    """(label, rows) from young to old, without empty bins at either end."""


@dataclass(frozen=True)
class InspectedRow:
    id: int
    weights: list[float]
    norm: float
    state: dict[str, list[float]]
    """Optimizer state by "segment number/name"."""
    time: int
    """Time of the last update in seconds."""
    count: int | None
    """Number of updates, if a policy counts them."""


def _memory_parts(entry: TableEntry) -> dict[str, int]:
    weights = sum(int(s["dim"]) * PRECISIONS.get(str(s.get("precision")), 4) for s in entry.segments)
    return {
        "rows": entry.live * weights,
        "state": 4 * entry.live * sum(entry.state_sizes.values()),
        "index": INDEX_BYTES * entry.live,
        "side": (8 + 4) * entry.live,  # the id, and the time of the last update
        "counters": PENDING_BYTES * sum(piece.rows for piece in entry.pending),
    }


def summarize(manifest: Manifest) -> list[TableSummary]:
    """Summarize each table of a checkpoint, including its deltas, in the order of the manifest."""
    tables = manifest.tables()
    return [
        _summary(path, name, tables[full_name(path, name)], manifest.latest.collections[path].global_step)
        for path, collection in manifest.collections.items()
        for name in collection.tables
    ]


def _summary(path: str, name: str, entries: list[TableEntry], step: int) -> TableSummary:
    files = [piece.file for entry in entries for piece in (*entry.pieces, *entry.removed)]
    latest = entries[-1]
    parts = _memory_parts(latest)
    return TableSummary(
        collection=path,
        name=name,
        rows=latest.live,
        bytes=sum(file.bytes for file in files),
        memory=parts["rows"] + parts["state"] + parts["side"],
        memory_parts=parts,
        pending=sum(piece.rows for piece in latest.pending),
        dim=latest.dim,
        num_files=len(files),
        global_step=step,
        segments=[_segment(segment) for segment in latest.segments],
        routing=latest.routing,
        policies=show_policies(latest.policies),
    )


def find_table(
    manifest: Manifest, name: str | None = None, collection: str | None = None
) -> tuple[TableSummary, list[TableEntry]]:
    if collection is not None and collection not in manifest.collections:
        known = ", ".join(map(repr, manifest.collections)) or "none"
        raise UnknownNameError(f"no collection {collection!r} (known: {known})")
    tables = [t for t in summarize(manifest) if collection in (None, t.collection)]
    fits = [t for t in tables if name in (None, t.name)]
    if len(fits) == 1:
        (found,) = fits
        return found, manifest.tables()[full_name(found.collection, found.name)]
    if not fits:
        known = ", ".join(dict.fromkeys(t.name for t in tables)) or "none"
        raise UnknownNameError(f"no table {name!r} (known: {known})" if name else "there is no table")
    if len({t.name for t in fits}) > 1:
        known = ", ".join(dict.fromkeys(t.name for t in fits))
        raise UnknownNameError(f"the checkpoint has several tables; name one (known: {known})")
    known = ", ".join(repr(t.collection) for t in fits)
    raise UnknownNameError(f"table {fits[0].name!r} is in several collections; name one (known: {known})")


def measure_norms(
    root: Path, entries: Sequence[TableEntry], *, top: int = 10, on_rows: OnRows | None = None
) -> Norms:
    spread = _Spread()
    best: list[TopRow] = []
    rows = nonfinite = 0
    for chunk in _read(root, entries):
        norms = torch.linalg.vector_norm(chunk.rows, dim=1, dtype=torch.float64).numpy()
        ids = chunk.ids.numpy()
        good = np.isfinite(norms)
        nonfinite += int(len(norms) - good.sum())
        spread.add(norms[good])
        best = _largest(best, ids[good], norms[good], top)
        rows += len(ids)
        if on_rows is not None:
            on_rows(rows)
    return Norms(
        rows=rows,
        minimum=spread.minimum,
        median=spread.median(),
        maximum=spread.maximum,
        num_zero=spread.num_zero,
        num_nonfinite=nonfinite,
        histogram=spread.histogram(),
        top=best,
    )


def newest_time(root: Path, entries: Sequence[TableEntry]) -> int | None:
    latest = [int(chunk.time.max()) for chunk in _read(root, entries) if chunk.ids.numel()]
    return max(latest, default=None)


def measure_ages(root: Path, entries: Sequence[TableEntry], *, now: int) -> Ages:
    limits = np.array([0, *(limit for limit, _ in AGE_LIMITS)], np.int64)
    counts = np.zeros(len(limits) + 1, np.int64)
    spread = _Spread()
    newest: list[int] = []
    oldest: list[int] = []
    for chunk in _read(root, entries):
        if chunk.ids.numel():
            ages = now - chunk.time.numpy()
            counts += np.bincount(np.searchsorted(limits, ages, side="right"), minlength=len(counts))
            spread.add(np.maximum(ages, 0).astype(np.float64))
            newest.append(now - int(ages.min()))
            oldest.append(now - int(ages.max()))
    labels = [FUTURE_LABEL, *(label for _, label in AGE_LIMITS), OLDEST_LABEL]
    held = np.flatnonzero(counts)
    shown = range(held[0], held[-1] + 1) if len(held) else range(0)
    return Ages(
        now=now,
        rows=int(counts.sum()),
        newest=max(newest, default=None),
        oldest=min(oldest, default=None),
        median=spread.median(),
        bins=[(labels[i], int(counts[i])) for i in shown],
    )


def find_row(
    root: Path, entries: Sequence[TableEntry], id: int, *, on_rows: OnRows | None = None
) -> InspectedRow | None:
    done = 0
    for chunk in _read(root, entries):
        at = torch.nonzero(chunk.ids == id)
        if len(at):
            return _row(chunk, int(at[0]))
        done += chunk.ids.numel()
        if on_rows is not None:
            on_rows(done)
    return None


def read_ids(root: Path, entries: Sequence[TableEntry]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the ids of a table file by file, int64 [n], and their numbers of updates if they are counted."""
    # yields: ids int64 [n], and their numbers of updates int64 [n] or None.
    for chunk in _read(root, entries):
        if chunk.ids.numel():
            yield chunk.ids, chunk.count


# ---- files


def _read(root: Path, entries: Sequence[TableEntry]) -> Iterator[Chunk]:
    """Yield every row once. Raise CheckpointError if a file does not match the manifest."""
    store = open_store(root)
    for entry in entries:
        for piece in (*entry.pieces, *entry.removed):
            store.verify(piece.file, CheckpointError)
    return latest_rows(store, entries)


def _row(chunk: Chunk, at: int) -> InspectedRow:
    weights = chunk.rows[at].double()
    return InspectedRow(
        id=int(chunk.ids[at]),
        weights=weights.tolist(),
        norm=float(torch.linalg.vector_norm(weights)),
        state={key: column[at].double().tolist() for key, column in sorted(chunk.state.items())},
        time=int(chunk.time[at]),
        count=None if chunk.count is None else int(chunk.count[at]),
    )


def _segment(segment: dict[str, object]) -> SegmentSummary:
    optimizer = segment["optimizer"]
    assert isinstance(optimizer, dict)  # validated when the manifest was read
    return SegmentSummary(
        dim=int(str(segment["dim"])),
        precision=str(segment.get("precision", "float32")),
        rounding=str(segment.get("rounding", "nearest")),
        serving=None if segment.get("serving") is None else str(segment["serving"]),
        optimizer=str(optimizer["name"]),
        settings=str(optimizer.get("settings", optimizer["name"])),
        initializer=str(segment.get("initializer", "")),
    )


# ---- numbers


def _largest(
    best: list[TopRow], ids: NDArray[np.int64], norms: NDArray[np.float64], top: int
) -> list[TopRow]:
    if len(ids) > top > 0:
        limit = np.partition(norms, len(norms) - top)[len(norms) - top]
        ids, norms = ids[norms >= limit], norms[norms >= limit]
        order = np.lexsort((ids, -norms))[:top]
        ids, norms = ids[order], norms[order]
    rows = [TopRow(i, n) for i, n in zip(ids.tolist(), norms.tolist(), strict=True)] if top else []
    return sorted([*best, *rows], key=lambda row: (-row.norm, row.id))[:top]


class _Spread:
    """The distribution of any number of non-negative numbers, in 8 MB.

    The bins are given by the high bits of the float32 form and are 0.025 % wide.
    """

    def __init__(self) -> None:
        self._counts = np.zeros(1 << (31 - _DROPPED_BITS), np.int64)
        self.minimum: float | None = None
        self.maximum: float | None = None
        self.num_zero = 0

    def add(self, values: NDArray[np.float64]) -> None:
        if not len(values):
            return
        low, high = float(values.min()), float(values.max())
        self.minimum = low if self.minimum is None else min(low, self.minimum)
        self.maximum = high if self.maximum is None else max(high, self.maximum)
        self.num_zero += int((values == 0).sum())
        bits = np.minimum(values, _FLOAT32_MAX).astype(np.float32).view(np.uint32)
        np.add.at(self._counts, bits >> _DROPPED_BITS, 1)

    def median(self) -> float | None:
        values, counts = self._held()
        if not len(values):
            return None
        return float(values[np.searchsorted(counts.cumsum(), (counts.sum() + 1) // 2)])

    def histogram(self) -> Histogram:
        """Up to 12 bins of equal width, or of equal ratio if the largest number is far above the median."""
        values, counts = self._held()
        middle = self.median()
        if self.minimum is None or self.maximum is None or middle is None:
            return Histogram([], [])
        if self.minimum == self.maximum:
            return Histogram([self.minimum, self.maximum], [int(counts.sum())])
        if self.maximum > _LOG_RATIO * middle:
            least = self.minimum or values[values > 0].min(initial=self.maximum / 1000)
            edges = np.geomspace(max(least, self.maximum * 1e-12), self.maximum, _NUM_BINS + 1)
            edges[0], edges[-1] = self.minimum, self.maximum
        else:
            edges = np.linspace(self.minimum, self.maximum, _NUM_BINS + 1)
        bins = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, _NUM_BINS - 1)
        return Histogram(edges.tolist(), np.bincount(bins, counts, _NUM_BINS).astype(np.int64).tolist())

    def _held(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The middle and the count of every bin that is not empty."""
        held = np.flatnonzero(self._counts)
        middle = (held.astype(np.uint32) << _DROPPED_BITS) | (1 << (_DROPPED_BITS - 1))
        values = middle.view(np.float32).astype(np.float64)
        if self.minimum is not None:
            values = np.clip(values, self.minimum, self.maximum)
        values[held == 0] = 0.0
        return values, self._counts[held]
