"""Compaction: moves pushed rows from memory into mapped files, in the background.

A pushed row takes 138 to 155 bytes of memory in a Table. In a mapped file it takes its floats and 10 bytes,
and the system writes its page to disk and drops it from memory when nobody reads it. A compaction has these
steps:

    step      thread                what happens
    seal      the one that writes   the rows so far are sealed; further pushes go to new tables
    write     compaction            sealed rows and those of earlier compactions are merged into new files
    replace   compaction            the files replace the sealed rows and the earlier files, in one assignment

Invariants: requests never wait, because they read the sealed rows until the files replace them. The bits of a
row do not change. At most one compaction runs, and nothing else is sealed while the rows of a failed one are
in memory: after a later push they are written again.

Files lose their names as soon as they are mapped, and a compaction ends when its servable is closed, so only
a crash during a compaction leaves a file (megalith-fold-*). A server that crashed starts from its export, and
parameter sync sends the rows again. A compaction that fails, for example because the disk is full, leaves the
rows where they are.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.errors import MegalithError
from megalith.serving.export.frozen_rows import FrozenRows, FrozenWriter
from megalith.serving.export.overlay import PRESENT, Layers, Overlay, scan_layers
from megalith.serving.export.row_format import RowFormat
from megalith.table import Chunk

logger = logging.getLogger(__name__)

COMPACTION_ROWS = 1 << 18
"""Pushed rows in memory from which a fold is worth its files."""
_SHARE = 4
"""A fold waits until the rows in memory are this share of the folded ones, because it writes all of them."""
_CHUNK = 1 << 16


class _CompactorClosedError(Exception):
    """Ends a fold whose rows nobody needs any more."""


class CompactedRows:
    """Flagged rows of one table in a mapped file that has no name any more."""

    def __init__(self, rows: FrozenRows, width: int) -> None:
        self._rows, self._width = rows, width

    @property
    def native(self) -> Any:
        """The native reader."""
        return self._rows.native

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
    """Folds the pushed rows of a servable, one fold at a time."""

    def __init__(
        self, directory: Path | None = None, *, rows: int = COMPACTION_ROWS, seconds: float = 0.0
    ) -> None:
        self._directory = directory
        self._least = rows
        self._seconds = seconds
        self._earliest = time.monotonic() + seconds
        self._thread: threading.Thread | None = None
        self._closed = False
        self.folds = 0
        """Folds that ended."""

    def consider(self, overlay: Overlay) -> None:
        """Begin a fold if there are enough rows. Called by the thread that writes, after a write."""
        if self._closed or (self._thread is not None and self._thread.is_alive()):
            return
        enough = max(self._least, overlay.folded_rows // _SHARE)
        if time.monotonic() < self._earliest or overlay.unfolded_rows < enough:
            return
        sealed = overlay.seal()
        # Not a daemon: it removes its file before the process ends.
        self._thread = threading.Thread(target=self._fold, args=(overlay, sealed), name="megalith-folding")
        self._thread.start()

    def join(self) -> None:
        """Wait for the fold in progress."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """End the fold in progress, without waiting for it; no other one begins."""
        self._closed = True

    def _fold(self, overlay: Overlay, sealed: Layers) -> None:
        try:
            folded = {}
            for name, layers in sealed.items():
                folded[name] = self._fold_table(layers, overlay.width_of(name), drops=overlay.hides_base)
            overlay.replace_sealed(folded)
            self.folds += 1
        except _CompactorClosedError:
            logger.debug("a fold ended with its servable")
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
                wanted = (
                    flagged[:, -1] == PRESENT
                    if drops
                    else torch.ones(ids.numel(), dtype=torch.bool, device="cpu")
                )
                yield ids[wanted], flagged[wanted]

        format = RowFormat.uniform("float32", [width], [1.0])
        every = [ids for ids, _ in rows()]  # sealed rows do not change, so both scans find the same ones
        with tempfile.TemporaryDirectory(prefix="megalith-fold-", dir=self._directory) as name:
            path = Path(name) / "rows"
            whole = torch.cat(every) if every else torch.zeros(0, dtype=torch.int64, device="cpu")
            writer = FrozenWriter(path, whole, format)
            for ids, flagged in rows():
                writer.add(ids, flagged)
            writer.finish()
            found = FrozenRows(path, format)  # keeps its file after the name is gone
            os.unlink(path)
        return CompactedRows(found, width)
