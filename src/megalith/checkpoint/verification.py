"""verify: find everything that is wrong with a checkpoint, without a model.

Every file is read twice, once for its checksum. The memory is 16 bytes per row of one table, more if it has
deltas, and four files.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from os import PathLike

import torch
from torch import Tensor

from megalith.checkpoint.json_state import unpack
from megalith.checkpoint.manifest import Manifest, Piece, Save, TableEntry, read_manifest
from megalith.checkpoint.saved_rows import contains, read_chunk, read_pending, read_removed, read_tensors
from megalith.errors import CheckpointError, InputError
from megalith.storage.store import Store, StoredFile, open_store

_THREADS = 4


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    Attributes:
        files: Number of files read.
        bytes: Number of bytes read.
        rows: Number of rows read.
        problems: A sentence for each problem found.
    """

    files: int = 0
    bytes: int = 0
    rows: int = 0
    problems: list[str] = field(default_factory=list)


def verify(path: str | PathLike[str], *, on_bytes: Callable[[int], None] | None = None) -> Verification:
    """Read a whole checkpoint and report every problem.

    It checks the manifest and the chain; the length, checksum and content of every file; the number of rows
    of each table; that no save has an id twice, or both saves and removes it; and that rows are on the shard
    that the recorded routing gives.

    Args:
        path: A directory or a URL.
        on_bytes: Called with the number of bytes read so far.

    Returns:
        What was verified and the problems found; no problem means that the checkpoint is intact.
    """
    if on_bytes is not None and not callable(on_bytes):
        raise InputError(f"on_bytes must be a function, got {type(on_bytes).__name__}")
    store = open_store(path)
    try:
        manifest = read_manifest(store)
    except CheckpointError as error:
        return Verification(problems=[str(error)])
    return _Verifier(store, manifest, on_bytes).run()


class _Verifier:
    """A verification in progress."""

    def __init__(self, store: Store, manifest: Manifest, on_bytes: Callable[[int], None] | None) -> None:
        self._store, self._manifest, self._on_bytes = store, manifest, on_bytes
        self._problems: list[str] = []
        self._files = self._bytes = self._rows = 0

    def run(self) -> Verification:
        for name, entries in self._manifest.tables().items():
            self._table(name, entries)
        for save in self._manifest.saves:
            self._dense(save)
        return Verification(self._files, self._bytes, self._rows, self._problems)

    def _wrong(self, problem: str) -> None:
        self._problems.append(problem)

    # ---- tables

    def _table(self, name: str, entries: list[TableEntry]) -> None:
        alive = torch.empty(0, dtype=torch.int64, device="cpu")
        complete = True
        for save, entry in zip(self._manifest.saves, entries, strict=True):
            where = f"{self._store.where}: table {name!r}, save {save.id}"
            saved = self._saved_ids(entry)
            removed = self._ids(entry.removed, read_removed)
            self._ids(entry.pending, lambda store, piece: read_pending(store, piece)[0])
            complete &= saved is not None and removed is not None
            if saved is None or removed is None:
                continue
            self._rows += saved.numel()
            saved, removed = self._distinct(where, saved), torch.unique(removed)
            alive = torch.unique(torch.cat([alive, saved])) if alive.numel() else saved
            if removed.numel():
                both = contains(removed, saved)
                if bool(both.any()):
                    self._wrong(f"{where}: {_ids(saved[both])} both saved and removed")
                alive = alive[~contains(removed, alive)]
            if complete and alive.numel() != entry.live:
                self._wrong(f"{where}: it has {alive.numel():,} rows, but its manifest states {entry.live:,}")

    def _saved_ids(self, entry: TableEntry) -> Tensor | None:
        check = partial(self._misplaced, entry)
        return self._ids(entry.pieces, lambda store, piece: read_chunk(store, piece, entry).ids, check)

    def _ids(
        self,
        pieces: list[Piece],
        read: Callable[[Store, Piece], Tensor],
        check: Callable[[Piece, Tensor], list[str]] = lambda piece, ids: [],
    ) -> Tensor | None:
        """Return the ids of some files, or None if one of them cannot be read."""

        def work(piece: Piece) -> tuple[Tensor | None, list[str]]:
            try:
                with self._store.local_copy([piece.file], CheckpointError) as local:
                    ids = read(local, piece).clone()  # frees the rest of the file
            except CheckpointError as error:
                return None, [str(error)]
            return ids, check(piece, ids)

        found: list[Tensor | None] = []
        with ThreadPoolExecutor(_THREADS) as pool:
            for piece, (ids, problems) in zip(pieces, pool.map(work, pieces), strict=True):
                self._problems += problems
                found.append(ids)
                self._done(piece.file)
        read_ids = [part for part in found if part is not None]
        if len(read_ids) < len(found):
            return None
        return torch.cat(read_ids) if read_ids else torch.empty(0, dtype=torch.int64, device="cpu")

    def _misplaced(self, entry: TableEntry, piece: Piece, ids: Tensor) -> list[str]:
        """Return the problem of rows that are on another shard than the routing gives."""
        router = entry.routing.router()
        if router is None:
            misplaced = ids[: ids.numel() if piece.shard else 0]
        else:
            misplaced = ids[router.owner(ids) != piece.shard]
        if not misplaced.numel():
            return []
        rule = router or "a single shard"
        file = f"{self._store.where}/{piece.file.path}"
        return [f"{file}: {_ids(misplaced)} on shard {piece.shard}, against the routing {rule}"]

    def _distinct(self, where: str, ids: Tensor) -> Tensor:
        """Return the distinct ids, sorted in place."""
        ids.numpy().sort()
        again = ids[1:] == ids[:-1]
        if not bool(again.any()):
            return ids
        self._wrong(f"{where}: {_ids(torch.unique(ids[1:][again]))} in it more than once")
        distinct: Tensor = torch.unique_consecutive(ids)
        return distinct

    def _done(self, file: StoredFile) -> None:
        self._files += 1
        self._bytes += file.bytes
        if self._on_bytes is not None:
            self._on_bytes(self._bytes)

    # ---- dense weights and optimizer

    def _dense(self, save: Save) -> None:
        self._tensors(save.dense)
        tensors = self._tensors(save.optimizer_tensors)
        if save.optimizer is not None and tensors is not None:
            try:
                unpack(save.optimizer, tensors)
            except (CheckpointError, ValueError) as error:
                self._wrong(f"{self._store.where}: save {save.id}: {error}")

    def _tensors(self, file: StoredFile | None) -> dict[str, Tensor] | None:
        if file is None:
            return {}
        tensors = None
        try:
            with self._store.local_copy([file], CheckpointError) as local:
                tensors = read_tensors(local, file)
        except CheckpointError as error:
            self._wrong(str(error))
        self._done(file)
        return tensors


def _ids(ids: Tensor) -> str:
    """Format ids as the start of a sentence: "ids 7, 8, 9 and 4 more are"."""
    first = ", ".join(map(str, ids[:3].tolist()))
    if ids.numel() == 1:
        return f"id {first} is"
    return f"ids {first}" + (f" and {ids.numel() - 3:,} more" if ids.numel() > 3 else "") + " are"
