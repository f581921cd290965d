"""Looking into a checkpoint without a model: what its tables hold, how large and how old their rows are.

Files are read one after the other, so memory stays at one file (32 MiB as `save` writes them) however
large the table is. Nothing is printed here and nothing is changed.
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

from megalith.checkpoint.manifest import Manifest, Routing, TableEntry, full_name
from megalith.checkpoint.saved_rows import latest_rows
from megalith.errors import UnknownNameError
from megalith.storage.store import open_store, verify
from megalith.table import Chunk
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

_NUM_BINS = 12
_LOG_RATIO = 20
_DROPPED_BITS = 11
_FLOAT32_MAX = np.finfo(np.float32).max


@dataclass(frozen=True)
class SegmentSummary:
    """A segment as its manifest describes it."""

    dim: int
    precision: str
    optimizer: str
    settings: str
    initializer: str


@dataclass(frozen=True)
class TableSummary:
    """A table as its manifest describes it.

    bytes: of its files on disk. memory: of weights, optimizer state, ids and times once loaded; an engine's
    index comes on top.
    """

    collection: str
    name: str
    rows: int
    bytes: int
    memory: int
    dim: int
    num_files: int
    global_step: int
    segments: list[SegmentSummary]
    routing: Routing


@dataclass(frozen=True)
class Histogram:
    """counts[i] values lie from edges[i] to edges[i + 1]."""

    edges: list[float]
    counts: list[int]


class TopRow(NamedTuple):
    """An id and the norm of its weights."""

    id: int
    norm: float


@dataclass(frozen=True)
class Norms:
    """L2 norms of the rows of a table; the numbers are None if it has no finite row.

    The median is right to 0.02 %. num_zero: rows of zeros. num_nonfinite: rows with a NaN or an infinity,
    which count nowhere else. top: the largest, the smaller id first among equals.
    """

    rows: int
    minimum: float | None
    median: float | None
    maximum: float | None
    num_zero: int
    num_nonfinite: int
    histogram: Histogram
    top: list[TopRow]


@dataclass(frozen=True)
class Ages:
    """How long ago the rows of a table were last updated, counted in seconds back from `now`.

    oldest, newest: times in seconds; median: an age. bins: (label, rows), from young to old, from the first
    that holds a row to the last. None and no bins if the table is empty.
    """

    now: int
    rows: int
    newest: int | None
    oldest: int | None
    median: float | None
    bins: list[tuple[str, int]]


@dataclass(frozen=True)
class InspectedRow:
    """All that is stored of an id. state: by "segment number/name". count: updates, where a policy counts."""

    id: int
    weights: list[float]
    norm: float
    state: dict[str, list[float]]
    time: int
    count: int | None


def _row_bytes(entry: TableEntry) -> int:
    """Weights and state as float32, the id, the time of the last update (4 bytes)."""
    return 4 * (entry.dim + sum(entry.state_sizes.values())) + 8 + 4


def summarize(manifest: Manifest) -> list[TableSummary]:
    """Every table of a checkpoint with its deltas, in the manifest's order."""
    tables = manifest.tables()
    return [
        _summary(path, name, tables[full_name(path, name)], manifest.latest.collections[path].global_step)
        for path, collection in manifest.collections.items()
        for name in collection.tables
    ]


def _summary(path: str, name: str, entries: list[TableEntry], step: int) -> TableSummary:
    files = [piece.file for entry in entries for piece in (*entry.pieces, *entry.removed)]
    latest = entries[-1]
    return TableSummary(
        collection=path,
        name=name,
        rows=latest.live,
        bytes=sum(file.bytes for file in files),
        memory=latest.live * _row_bytes(latest),
        dim=latest.dim,
        num_files=len(files),
        global_step=step,
        segments=[_segment(segment) for segment in latest.segments],
        routing=latest.routing,
    )


def find_table(
    manifest: Manifest, name: str | None = None, collection: str | None = None
) -> tuple[TableSummary, list[TableEntry]]:
    """The one table with this name, in this collection if given; without a name, the only one.

    Its entries are those of the base and of each delta.
    Raises UnknownNameError naming what there is if none fits, or several do.
    """
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
        raise UnknownNameError(f"there are several tables, name one (known: {known})")
    known = ", ".join(repr(t.collection) for t in fits)
    raise UnknownNameError(f"table {fits[0].name!r} is in several collections, name one (known: {known})")


def measure_norms(
    root: Path, entries: Sequence[TableEntry], *, top: int = 10, on_rows: OnRows | None = None
) -> Norms:
    """The norms of all rows. Files are checked; raises CheckpointError if one is damaged.

    on_rows: called with the number of rows read so far.
    """
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
    """The last update of any row, in seconds; None if there is no row."""
    latest = [int(chunk.time.max()) for chunk in _read(root, entries) if chunk.ids.numel()]
    return max(latest, default=None)


def measure_ages(root: Path, entries: Sequence[TableEntry], *, now: int) -> Ages:
    """The ages of all rows at `now`, in seconds."""
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
    """What is stored of an id, or None. Files are checked."""
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
    """The ids of a table, file by file: int64 [n], and how often each was updated if that was counted."""
    for chunk in _read(root, entries):
        if chunk.ids.numel():
            yield chunk.ids, chunk.count


# ---- files


def _read(root: Path, entries: Sequence[TableEntry]) -> Iterator[Chunk]:
    """Every row once, out of files that are as the manifest says."""
    store = open_store(root)
    for entry in entries:
        for piece in (*entry.pieces, *entry.removed):
            verify(store, piece.file)
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
    assert isinstance(optimizer, dict)  # the manifest's reader checked it
    return SegmentSummary(
        dim=int(str(segment["dim"])),
        precision=str(segment.get("precision", "float32")),
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
    """The distribution of numbers from 0 up, in 8 MB whatever their number.

    Numbers fall into bins by the high bits of their float32 form, 0.025 % wide.
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
        """Up to 12 bins of equal width; of equal ratio when the largest number is far above the median."""
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
        """The middle of every bin that holds something, and how much."""
        held = np.flatnonzero(self._counts)
        middle = (held.astype(np.uint32) << _DROPPED_BITS) | (1 << (_DROPPED_BITS - 1))
        values = middle.view(np.float32).astype(np.float64)
        if self.minimum is not None:
            values = np.clip(values, self.minimum, self.maximum)
        values[held == 0] = 0.0
        return values, self._counts[held]
