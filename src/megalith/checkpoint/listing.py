"""Listing: which checkpoints lie in a place, complete or not. Only manifests are read."""

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
"""How many folders deep checkpoints are looked for: runs/RUN/checkpoints/STEP."""


@dataclass(frozen=True)
class Found:
    """A place with a checkpoint, or with one that cannot be read.

    manifest: None where it is missing or wrong; `problem` says which. leftovers: folders of data that no
    manifest names, of a save that is under way or was cut off.
    """

    path: str
    manifest: Manifest | None
    problem: str = ""
    leftovers: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        tables = [] if self.manifest is None else self.manifest.tables().values()
        return sum(entries[-1].live for entries in tables)

    @property
    def bytes(self) -> int:
        """Of all files of the base and the deltas."""
        files = [] if self.manifest is None else self.manifest.all_files()
        return sum(file.bytes for file in files)

    @property
    def steps(self) -> dict[str, int]:
        """Each collection's step."""
        collections = {} if self.manifest is None else self.manifest.latest.collections
        return {path: collection.global_step for path, collection in collections.items()}


def find_checkpoints(path: str | PathLike[str]) -> list[Found]:
    """The checkpoint at a path, or those in the folders below it, up to MAX_DEPTH deep, by path.

    Raises CheckpointError if there is none.
    """
    store = open_store(path)
    found = _look(store, MAX_DEPTH)
    if not found:
        raise CheckpointError(f"{store.where} holds no checkpoint, and neither do the folders in it")
    return found


def _look(store: Store, depth: int) -> list[Found]:
    folders = store.folders()
    data = [folder for folder in folders if folder.startswith(DATA)]
    if is_checkpoint(store):
        return [_read(store, data)]
    if data:
        return [Found(store.where, None, f"incomplete: it has no {NAME}", data)]
    if not depth:
        return []
    return [found for folder in folders for found in _look(store.inside(folder), depth - 1)]


def is_checkpoint(path: str | PathLike[str] | Store) -> bool:
    """Whether a checkpoint is there, whole or damaged."""
    try:
        open_store(path).size(NAME)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _read(store: Store, data: list[str]) -> Found:
    try:
        manifest = read_manifest(store)
    except CheckpointError as error:
        return Found(store.where, None, f"damaged: {error}")
    named = {PurePosixPath(file.path).parts[:1] for file in manifest.all_files()}
    return Found(store.where, manifest, leftovers=[folder for folder in data if (folder,) not in named])
