"""Listing: the checkpoints below a path, complete or not. Only manifests are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from os import PathLike
from pathlib import PurePosixPath

from megalith.checkpoint.manifest import NAME, Manifest
from megalith.checkpoint.save_job import DATA
from megalith.checkpoint.saved_rows import read_manifest
from megalith.errors import CheckpointError
from megalith.storage.store import Store, open_store

MAX_DEPTH = 3
"""How many levels of folders are searched: runs/RUN/checkpoints/STEP."""


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint, possibly incomplete or damaged.

    Attributes:
        path: Its directory or URL.
        manifest: Its manifest; None if it is missing or not valid.
        problem: Why there is no manifest; empty if there is one.
        leftovers: Data folders that the manifest does not name, from a save that is in progress or was
            interrupted.
    """

    path: str
    manifest: Manifest | None
    problem: str = ""
    leftovers: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Number of rows of all tables."""
        tables = [] if self.manifest is None else self.manifest.tables().values()
        return sum(entries[-1].live for entries in tables)

    @property
    def bytes(self) -> int:
        """Size of all files of the base and the deltas."""
        files = [] if self.manifest is None else self.manifest.all_files()
        return sum(file.bytes for file in files)

    @property
    def steps(self) -> dict[str, int]:
        """The global step of each collection."""
        return {} if self.manifest is None else self.manifest.steps


def find_checkpoints(path: str | PathLike[str]) -> list[ListedCheckpoint]:
    """List the checkpoint at a path, or those in the folders below it.

    Args:
        path: A directory or a URL. Folders are searched up to MAX_DEPTH levels deep.

    Returns:
        The checkpoints, sorted by path.

    Raises:
        CheckpointError: There is none.
    """
    store = open_store(path)
    found = _search(store, MAX_DEPTH)
    if not found:
        raise CheckpointError(f"{store.where} holds no checkpoint, and neither do the folders in it")
    return found


def _search(store: Store, depth: int) -> list[ListedCheckpoint]:
    folders = store.folders()
    data = [folder for folder in folders if folder.startswith(DATA)]
    if is_checkpoint(store):
        return [_read(store, data)]
    if data:
        return [ListedCheckpoint(store.where, None, f"incomplete: it has no {NAME}", data)]
    if not depth:
        return []
    return [found for folder in folders for found in _search(store.inside(folder), depth - 1)]


def is_checkpoint(path: str | PathLike[str] | Store) -> bool:
    """Find out whether a path holds a checkpoint, intact or damaged."""
    try:
        open_store(path).size(NAME)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _read(store: Store, data: list[str]) -> ListedCheckpoint:
    try:
        manifest = read_manifest(store)
    except CheckpointError as error:
        return ListedCheckpoint(store.where, None, f"damaged: {error}")
    named = {PurePosixPath(file.path).parts[:1] for file in manifest.all_files()}
    leftovers = [folder for folder in data if (folder,) not in named]
    return ListedCheckpoint(store.where, manifest, leftovers=leftovers)
