"""Overlay: rows written since an export, which take precedence over its frozen rows, and their compaction.

The rows of each table are in a Table with one more column, a flag: PRESENT or REMOVED. A row and its removal
are thus one write each, and a concurrent reader sees the state before or after it. A table with codes
(row_format.py) holds the codes: three bytes in each column, as an integer below 2^24, which float32 holds
exactly.

The rows of a table are in layers, the newest first; the first layer that has an id decides:

    Table           rows written since the last compaction began
    Table           rows that are being compacted; read only
    CompactedRows   rows of all compactions before, in a mapped file; read only

A `Compactor` moves rows from memory into mapped files, in the background. A row takes 138 to 155 bytes of
memory in a Table. In a mapped file it takes its floats and 10 bytes, and the system may drop its page from
memory.

    step      thread                effect
    seal      the one that writes   the rows so far are sealed; further pushes go to new tables
    write     compaction            sealed rows and those of earlier compactions are merged into new files
    replace   compaction            the files replace the sealed rows and the earlier files, in one assignment

Invariants:
- The layers of all tables are one tuple, which is replaced as a whole, so that a reader never misses a row
  that moves from one layer to the next. Requests never wait for a compaction. The bits of a row do not
  change.
- At most one compaction runs. While the rows of a failed one are in memory nothing else is sealed; the next
  compaction writes them.
- A file has no name once it is mapped, and a compaction ends when its servable is closed. So only a crash
  during a compaction leaves a file (megalith-fold-*). A server that crashed starts from its export, and
  parameter sync sends the rows again. If a compaction fails, for example because the disk is full, the rows
  stay in memory.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megalith.errors import MegalithError
from megalith.library import native_module
from megalith.serving.export.frozen_rows import FrozenRows, FrozenWriter
from megalith.serving.export.row_format import Formats, RowFormat
from megalith.table import SGD, Chunk, Table, TableConfig, Zeros

logger = logging.getLogger(__name__)

PRESENT, REMOVED = 1.0, -1.0
MAX_RESERVED = 1 << 24
RowsByTable = Mapping[str, tuple[Tensor, Tensor]]
_NOTHING: Mapping[str, Tensor] = MappingProxyType({})
_NO_CODES: Formats = MappingProxyType({})
_BYTES = 3  # of a column with codes


Layers = Mapping[str, tuple[Any, ...]]  # The layers of each table: Tables and CompactedRows


class Overlay:
    """Rows by table that take precedence over frozen ones. Thread-safe; one thread at a time writes."""

    def __init__(
        self, dims: Mapping[str, int], *, hides_base: bool = False, codes: Formats = _NO_CODES
    ) -> None:
        self.dims = dict(dims)
        self.hides_base = hides_base
        self._codes = dict(codes)
        widths = self.dims | {name: -(-each.row_bytes // _BYTES) for name, each in codes.items()}
        self.widths = {name: width + 1 for name, width in widths.items()}
        self._layers: Layers = {name: (self._new_table(name),) for name in self.dims}
        self._served: tuple[Any, Any, Any] | None = None

    def _new_table(self, name: str) -> Table:
        return Table(
            TableConfig(
                name,
                dim=self.widths[name],
                optimizer=SGD(0.0),
                initializer=Zeros(),
                missing="zeros",
                # The first write of a huge page took 30 times as long on a virtual machine, and the first
                # push writes nothing but new pages. Requests read few rows, so small pages cost little.
                huge_pages=False,
            )
        )

    def __len__(self) -> int:
        return sum(self.rows_of(name) for name in self.dims)

    def rows_of(self, table: str) -> int:
        """Return the number of written ids of a table, including removed ones."""
        return sum(len(layer) for layer in self._layers[table])

    def reserve(self, rows: Mapping[str, int]) -> None:
        """Make room for rows that are about to be written."""
        for name, count in rows.items():
            self._layers[name][0].reserve(min(count, MAX_RESERVED))

    def apply(self, rows: RowsByTable, removed: Mapping[str, Tensor] = _NOTHING) -> None:
        """Write rows, then remove ids; the caller has validated both."""
        # rows: table -> (ids int64 [n], rows float32 [n, dim] or codes uint8 [n, bytes]); removed: table ->
        # ids int64 [n].
        for name, (ids, stored) in rows.items():
            if name in self._codes:
                codes = stored if stored.dtype == torch.uint8 else self._codes[name].encode(stored)
                stored = _columns(codes)
            # The engine itself: rows were validated when they arrived.
            engine: Any = self._layers[name][0].engine_impl
            engine.assign_filled(
                ids.contiguous(), stored.to(torch.float32).contiguous(), PRESENT, int(time.time())
            )
        for name, ids in removed.items():
            newest, *below = self._layers[name]
            if self.hides_base and not below:
                newest.remove(ids)
                continue
            flagged = torch.zeros(ids.numel(), self.widths[name], device="cpu")
            flagged[:, -1] = REMOVED
            newest.assign(ids, flagged)

    def read(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Read rows."""
        # ids: int64 [n]; returns: rows float32 [n, dim], zeros where there is none.
        flagged = _lookup(self._layers[table], ids)
        return self._rows(table, flagged), flagged[:, -1]

    def served(self, frozen: Mapping[str, FrozenRows]) -> Any:
        """Return the native reader of these rows over those of an export, in one pass over all tables."""
        served, layers = self._served, self._layers
        if served is None or served[0] is not layers or served[1] is not frozen:
            native: Any = native_module()
            tables = []
            for name, rows in frozen.items():
                assert rows.native is not None  # tables of the cpu engine need the native module too
                codes = self._codes.get(name)
                forms = None if codes is None else (codes.native_parts, codes.column_steps)
                own = [_native_layer(layer) for layer in layers[name]]
                tables.append((None if self.hides_base else rows.native, own, forms, self.dims[name]))
            served = self._served = (layers, frozen, native.ServedFiles(tables))
        return served[2]

    def _rows(self, table: str, flagged: Tensor) -> Tensor:
        stored, format = flagged[:, :-1], self._codes.get(table)
        if format is None:
            return stored
        rows = format.decode(_bytes(stored, format.row_bytes))
        rows[flagged[:, -1] != PRESENT] = 0.0
        return rows

    # ---- compaction; one thread at a time

    @property
    def unfolded_rows(self) -> int:
        """Number of ids written since the last compaction began."""
        return sum(len(layers[0]) for layers in self._layers.values())

    @property
    def folded_rows(self) -> int:
        """Number of ids in the layers below."""
        return sum(len(layer) for layers in self._layers.values() for layer in layers[1:])

    def seal(self) -> Layers:
        """Begin a compaction: further writes go to new tables. Called by the thread that writes."""
        # Nothing is sealed while the rows of a failed compaction are in memory: each failure would add a
        # layer, with another copy of rows that are written often.
        sealed = self._layers
        if any(isinstance(layer, Table) for layers in sealed.values() for layer in layers[1:]):
            return {name: layers[1:] for name, layers in sealed.items()}
        self._layers = {name: (self._new_table(name), *layers) for name, layers in sealed.items()}
        return sealed

    def replace_sealed(self, folded: Mapping[str, CompactedRows]) -> None:
        """End a compaction: one layer replaces those that `seal` returned, while nothing else is sealed."""
        self._layers = {name: (layers[0], folded[name]) for name, layers in self._layers.items()}
        self._served = None  # it would keep the sealed rows in memory until the next request

    def scan(self, table: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield everything written."""
        # yields: chunks: ids int64 [k], rows float32 [k, dim] and flags float32 [k].
        for ids, flagged in scan_layers(self._layers[table]):
            yield ids, self._rows(table, flagged), flagged[:, -1]


def scan_layers(layers: tuple[Any, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the flagged rows of layers, each id once."""
    # yields: chunks: ids int64 [k] and flagged rows float32 [k, width + 1].
    for number, layer in enumerate(layers):
        for chunk in layer.scan():
            ids, flagged = chunk.ids, chunk.rows
            if number:
                own = _lookup(layers[:number], ids)[:, -1] == 0
                ids, flagged = ids[own], flagged[own]
            if ids.numel():
                yield ids, flagged


def _lookup(layers: tuple[Any, ...], ids: Tensor) -> Tensor:
    flagged: Tensor = layers[0].lookup(ids)
    for layer in layers[1:]:
        absent = flagged[:, -1] == 0
        if bool(absent.any()):
            flagged[absent] = layer.lookup(ids[absent])
    return flagged


def _native_layer(layer: Any) -> Any:
    if not isinstance(layer, Table):
        return layer.native
    engine: Any = layer.engine_impl
    return engine.native_table


def _columns(codes: Tensor) -> Tensor:
    """Return codes, uint8 [n, bytes], as integers below 2^24, float32 [n, columns]."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % _BYTES)).to(torch.int32)
    low, middle, high = padded[:, 0::3], padded[:, 1::3], padded[:, 2::3]
    return (low | (middle << 8) | (high << 16)).to(torch.float32)


def _bytes(columns: Tensor, count: int) -> Tensor:
    """Return the codes of `_columns`, uint8 [n, count]."""
    integers = columns.to(torch.int32)
    parts = [(integers >> shift) & 255 for shift in (0, 8, 16)]
    return torch.stack(parts, dim=2).flatten(1)[:, :count].to(torch.uint8)


def find_rows(
    asked: Mapping[str, Tensor], overlay: Overlay, frozen: Mapping[str, FrozenRows]
) -> dict[str, Tensor]:
    """Look up ids in the rows of a version."""
    # asked: table -> ids int64 [n]; returns: table -> bool [n], whether an id has a row.
    found = {}
    for table, ids in asked.items():
        flags = overlay.read(table, ids)[1]
        exported = torch.zeros_like(ids) if overlay.hides_base else frozen[table].find(ids) + 1
        found[table] = (flags == PRESENT) | ((flags == 0) & (exported > 0))
    return found


_PIECE = 1 << 16  # Rows compared at once


def inherit_rows(own: Overlay, overlay: Overlay, frozen: Mapping[str, FrozenRows]) -> None:
    """Write what differs from the exported rows, so that overlays do not grow from version to version."""
    for table, exported in frozen.items():
        for ids, rows, flags in overlay.scan(table):
            there = flags == PRESENT
            known = exported.find(ids) >= 0
            before = torch.empty_like(rows, memory_format=torch.contiguous_format)
            exported.read(ids, before)
            new = there & ~(known & (before == rows).all(1))
            own.apply({table: (ids[new], rows[new])}, {table: ids[~there & known]})
        for ids in exported.ids.split(_PIECE) if overlay.hides_base else ():
            own.apply({}, {table: ids[overlay.read(table, ids)[1] != PRESENT]})


# ---- compaction

COMPACTION_ROWS = 1 << 18  # With fewer pushed rows in memory, no compaction starts
# A compaction waits until the rows in memory are this share of the compacted ones: it writes all of them
_SHARE = 4
_CHUNK = 1 << 16


class _CompactorClosedError(Exception):
    """Ends a compaction whose rows are not needed any more."""


class CompactedRows:
    """Flagged rows of one table in a mapped file that has no name any more."""

    def __init__(self, rows: FrozenRows, width: int) -> None:
        self._rows, self._width = rows, width
        self.native: Any = rows.native

    def __len__(self) -> int:
        return len(self._rows)

    def lookup(self, ids: Tensor) -> Tensor:
        """Return flagged rows."""
        # ids: int64 [n]; returns: float32 [n, width].
        out = torch.empty(ids.numel(), self._width, device="cpu")
        self._rows.read(ids.contiguous(), out)
        return out

    def scan(self) -> Iterator[Chunk]:
        for ids in self._rows.ids.split(_CHUNK):
            nothing = torch.zeros(ids.numel(), dtype=torch.int64, device="cpu")
            yield Chunk(ids, self.lookup(ids), {}, nothing)


class Compactor:
    """Moves the pushed rows of a servable into mapped files, one compaction at a time."""

    def __init__(
        self, directory: Path | None = None, *, rows: int = COMPACTION_ROWS, seconds: float = 0.0
    ) -> None:
        self._directory = directory
        self._least = rows
        self._seconds = seconds
        self._earliest = time.monotonic() + seconds
        self._thread: threading.Thread | None = None
        self._closed = False
        self.folds = 0  # Compactions that ended

    def consider(self, overlay: Overlay) -> None:
        """Begin a compaction if there are enough rows. Called by the thread that writes, after a write."""
        if self._closed or (self._thread is not None and self._thread.is_alive()):
            return
        enough = max(self._least, overlay.folded_rows // _SHARE)
        if time.monotonic() < self._earliest or overlay.unfolded_rows < enough:
            return
        sealed = overlay.seal()
        # Not a daemon: it removes its file before the process ends.
        self._thread = threading.Thread(target=self._fold, args=(overlay, sealed), name="megalith-folding")
        self._thread.start()

    def close(self) -> None:
        """End the compaction in progress, without waiting for it; no other one begins."""
        self._closed = True

    def _fold(self, overlay: Overlay, sealed: Layers) -> None:
        try:
            folded = {}
            for name, layers in sealed.items():
                folded[name] = self._fold_table(layers, overlay.widths[name], drops=overlay.hides_base)
            overlay.replace_sealed(folded)
            self.folds += 1
        except _CompactorClosedError:
            logger.debug("a compaction ended with its servable")
        except (MegalithError, OSError, RuntimeError, MemoryError) as error:  # torch: RuntimeError
            logger.warning("pushed rows stay in memory: %s", error)
        finally:
            self._earliest = time.monotonic() + self._seconds

    def _fold_table(self, layers: tuple[Any, ...], width: int, *, drops: bool) -> CompactedRows:
        """Write the rows of some layers into one file, without removed ids if nothing is below them."""

        def rows() -> Iterator[tuple[Tensor, Tensor]]:
            for ids, flagged in scan_layers(layers):
                if self._closed:
                    raise _CompactorClosedError
                wanted = flagged[:, -1] == PRESENT
                yield (ids[wanted], flagged[wanted]) if drops else (ids, flagged)

        format = RowFormat.uniform("float32", [width], [1.0])
        none = torch.zeros(0, dtype=torch.int64, device="cpu")
        whole = torch.cat([none, *(ids for ids, _ in rows())])
        with tempfile.TemporaryDirectory(prefix="megalith-fold-", dir=self._directory) as name:
            path = Path(name) / "rows"
            writer = FrozenWriter(path, whole, format)
            # Sealed rows do not change, so this scan finds the same ids.
            for ids, flagged in rows():
                writer.add(ids, flagged)
            writer.finish()
            found = FrozenRows(path, format)  # keeps its file after the name is gone
            os.unlink(path)
        return CompactedRows(found, width)
