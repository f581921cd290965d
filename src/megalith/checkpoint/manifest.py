"""The manifest: a JSON file that lists the content of a checkpoint. It is written last and completes it.

Its fields are described in docs/formats/checkpoint.md. Reading validates all of them and ignores others.
`commit` replaces the manifest, which makes a save the checkpoint, and deletes data folders that it does not
name. `find_checkpoints` lists the checkpoints below a path, complete or not; it reads only manifests.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import PurePosixPath
from typing import Annotated, Any

from megalith.errors import CheckpointError, InputError
from megalith.routing import MODES, Router
from megalith.storage.json_codec import (
    NULL_IS_DEFAULT,
    JsonFields,
    Limits,
    Natural,
    Positive,
    from_json,
    parse_json,
)
from megalith.storage.store import Store, StoredFile, open_store
from megalith.table import TableConfig
from megalith.table.policies import describe_policy

FORMAT = "megalith-checkpoint"
VERSION = 1
NAME = "manifest.json"
_LONGEST_PATH = 4096


def _check_file(file: StoredFile) -> None:
    """Refuse a path that is not relative, normalized and printable, or that has ".." in it."""
    path, parts = file.path, PurePosixPath(file.path)
    if len(path) > _LONGEST_PATH:
        raise InputError(f"path is longer than {_LONGEST_PATH} characters")
    is_normal = str(parts) == path and parts.parts != () and not parts.is_absolute()
    if not is_normal or ".." in parts.parts or "\\" in path or not path.isprintable():
        raise InputError(f"path {path!r} leads out of the checkpoint")


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise InputError(f"must be one of {', '.join(MODES)}, not {mode!r}")


def _check_segments(segments: list[Any]) -> None:
    if not segments:
        raise InputError("must not be empty")


_File = Annotated[StoredFile, _check_file]


@dataclass(frozen=True)
class Piece:
    """A file with rows of a table, or with ids, of one shard."""

    file: _File
    shard: Natural
    rows: Natural


@dataclass(frozen=True)
class Routing:
    """How rows were distributed over shards when they were saved."""

    dist_type: Annotated[str, _check_mode] = "roundrobin"
    num_shards: Positive = 1
    block_size: Positive | None = None
    skip_first: bool = False

    def router(self) -> Router | None:
        """Return the router that distributed the rows; None if there was one shard."""
        if self.num_shards == 1:
            return None
        return Router(self.dist_type, self.num_shards, block_size=self.block_size, skip_first=self.skip_first)


def _check_routing(routing: Routing) -> None:
    try:
        routing.router()
    except InputError as error:
        raise InputError(f"num_shards is not valid: {error}") from None


# The fields that the reader needs of data that are kept as they are.


@dataclass(frozen=True)
class _OptimizerFields:
    name: str


@dataclass(frozen=True)
class _StateFields:
    name: str
    size: Positive


@dataclass(frozen=True)
class _SegmentFields:
    dim: Positive
    optimizer: _OptimizerFields
    state: list[_StateFields] = field(default_factory=list)


@dataclass(frozen=True)
class _PolicyFields:
    name: str
    settings: dict[str, Any] = field(default_factory=dict, metadata=NULL_IS_DEFAULT)


@dataclass(frozen=True, kw_only=True)
class TableEntry:
    """A table of one save."""

    # The description of each segment: dim, precision, rounding, serving, optimizer, initializer, state
    segments: Annotated[list[Annotated[dict[str, Any], _SegmentFields]], _check_segments]
    seed: Annotated[int, Limits(-(2**63))]  # The seed of the table's initial rows
    # How the rows were distributed over shards
    routing: Annotated[Routing, _check_routing] = field(default_factory=Routing, metadata=NULL_IS_DEFAULT)
    pieces: list[Piece]  # The files of rows
    # Number of rows of the whole table at the time of the save; by default those of its files
    live: Natural = -1
    # In a delta, the files of ids removed since the save before it
    removed: list[Piece] = field(default_factory=list)
    # The files of ids without a row that an admission policy counted at the time of the save
    pending: list[Piece] = field(default_factory=list)
    # The descriptions of the table's policies, the admission policy first; None if the manifest does not
    # record them
    policies: list[Annotated[dict[str, Any], _PolicyFields]] | None = None

    def __post_init__(self) -> None:
        shards = self.routing.num_shards
        if shards > 1 and any(piece.shard >= shards for piece in self.pieces):
            raise InputError(f"pieces must be of shards below {shards}")
        if self.live < 0:
            object.__setattr__(self, "live", self.rows)

    def files(self) -> list[Piece]:
        """Return all files of the table: rows, removed ids, counts."""
        return [*self.pieces, *self.removed, *self.pending]

    @property
    def rows(self) -> int:
        """Number of rows in all files."""
        return sum(piece.rows for piece in self.pieces)

    @property
    def dim(self) -> int:
        """Number of weights of a row."""
        return sum(int(segment["dim"]) for segment in self.segments)

    @property
    def state_sizes(self) -> dict[str, int]:
        """Floats per row of each optimizer state, by "segment number/name"."""
        return {
            f"{number}/{state['name']}": int(state["size"])
            for number, segment in enumerate(self.segments)
            for state in segment.get("state", ())
        }


@dataclass(frozen=True)
class CollectionEntry:
    """A collection of the model: its global step and its tables."""

    global_step: Natural
    tables: dict[str, TableEntry]


@dataclass(frozen=True, kw_only=True)
class Save:
    """The content of one save: all rows (the base), or the rows changed since the previous save (a delta)."""

    id: str
    created: str
    collections: dict[str, CollectionEntry]
    dense: _File | None = None
    optimizer: dict[str, Any] | None = None
    optimizer_tensors: _File | None = None
    progress: dict[str, Any] = field(default_factory=dict, metadata=NULL_IS_DEFAULT)

    def files(self) -> list[StoredFile]:
        """Return every file of this save."""
        tables = [table for c in self.collections.values() for table in c.tables.values()]
        pieces = [piece.file for table in tables for piece in table.files()]
        return [*pieces, *(f for f in (self.dense, self.optimizer_tensors) if f is not None)]


@dataclass(frozen=True, kw_only=True)
class Delta(Save):
    """The changes since the save whose id is `previous`."""

    previous: str


@dataclass(frozen=True, kw_only=True)
class Manifest(Save):
    """A checkpoint: its base, and the deltas on top of it in order.

    Attributes:
        id: The unique id of the base.
        created: The time of the base, in ISO format.
        collections: The collections of the model by module path.
        dense: The file of dense weights, or None.
        optimizer: The structure of the dense optimizer's state (`nested_state`), or None.
        optimizer_tensors: The file of the tensors of that state, or None.
        progress: JSON data of the caller.
        megalith: The version of Megalith that wrote it.
        deltas: The deltas in order.
    """

    megalith: str
    deltas: list[Delta] = field(default_factory=list)

    @property
    def saves(self) -> list[Save]:
        """The base and its deltas."""
        return [self, *self.deltas]

    @property
    def latest(self) -> Save:
        """The last save; its dense weights, optimizer, progress and steps are those of the checkpoint."""
        return self.saves[-1]

    @property
    def steps(self) -> dict[str, int]:
        """The global step of each collection."""
        return {path: collection.global_step for path, collection in self.latest.collections.items()}

    @property
    def tip(self) -> str:
        """The id of the latest save, which the next delta must name."""
        return self.latest.id

    def all_files(self) -> list[StoredFile]:
        """Return every file of the base and the deltas."""
        return [file for save in self.saves for file in save.files()]

    def tables(self) -> dict[str, list[TableEntry]]:
        """Return the entries of each table in the base and the deltas, by "collection.table"."""
        return {
            full_name(path, name): [
                save.collections[path].tables[name]
                for save in self.saves
                if path in save.collections and name in save.collections[path].tables
            ]
            for path, collection in self.collections.items()
            for name in collection.tables
        }

    def to_json(self) -> str:
        """Return the text of the file."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Manifest:
        """Parse the text of a manifest.

        Args:
            text: The content of the file.
            where: The file's name, for messages.

        Returns:
            The manifest, whose saves form one chain.

        Raises:
            CheckpointError: The text is not a manifest; the message names the field that is missing or wrong.
        """
        data = parse_json(text, lambda problem: CheckpointError(f"{where} {problem}"))
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise CheckpointError(f"{where} is not the manifest of a Megalith checkpoint")
        if data.get("version") != VERSION:
            raise CheckpointError(
                f"{where} has version {data.get('version')!r}; this Megalith reads version {VERSION}"
            )
        # Lenient: later versions may add fields.
        fields = JsonFields(data, lambda problem: CheckpointError(f"{where}: {problem}"), lenient=True)
        manifest = from_json(cls, fields)
        _check_chain(manifest, where)
        _check_tables(manifest, where)
        return manifest


def full_name(collection: str, table: str) -> str:
    """Return the name of a table within the whole model."""
    return f"{collection}.{table}".lstrip(".")


def _check_chain(manifest: Manifest, where: str) -> None:
    before: Save = manifest
    for delta in manifest.deltas:
        if delta.previous != before.id:
            raise CheckpointError(
                f"{where}: there is a gap in the chain: delta {delta.id} continues {delta.previous}, but the "
                f"save before it is {before.id}"
            )
        if [(c, list(e.tables)) for c, e in delta.collections.items()] != [
            (c, list(e.tables)) for c, e in manifest.collections.items()
        ]:
            raise CheckpointError(f"{where}: delta {delta.id} does not have the tables of the base")
        before = delta
    ids = [save.id for save in manifest.saves]
    if len(set(ids)) != len(ids):
        raise CheckpointError(f"{where}: two saves have the same id")
    paths = [file.path for file in manifest.all_files()]
    if len(set(paths)) != len(paths):
        raise CheckpointError(f"{where}: a file is named twice")


def _check_tables(manifest: Manifest, where: str) -> None:
    """Check the entries of each table against each other."""
    tables = manifest.tables()
    if len(tables) != sum(len(collection.tables) for collection in manifest.collections.values()):
        raise CheckpointError(f"{where}: two tables have the same name")
    for name, entries in tables.items():
        rows = 0
        for save, entry in zip(manifest.saves, entries, strict=True):
            rows += entry.rows
            if entry.live > rows:
                raise CheckpointError(
                    f"{where}: save {save.id} states {entry.live} ids for table {name!r}, but its files hold "
                    f"{rows}"
                )
            if entry.dim != entries[0].dim or entry.state_sizes != entries[0].state_sizes:
                raise CheckpointError(
                    f"{where}: delta {save.id} does not have the base's segments of table {name!r}"
                )


def describe(config: TableConfig) -> list[dict[str, Any]]:
    """Describe the segments of a table for the manifest."""
    return [
        {
            "dim": segment.dim,
            "precision": segment.precision,
            "rounding": segment.rounding,
            "serving": None if segment.serving is None else str(segment.serving),
            "optimizer": {"name": segment.optimizer.name, "settings": repr(segment.optimizer)},
            "initializer": repr(segment.initializer),
            "state": [{"name": s.name, "size": s.size} for s in segment.optimizer.states(segment.dim)],
        }
        for segment in config.segments
    ]


def describe_policies(config: TableConfig) -> list[dict[str, Any]]:
    """Describe the policies of a table for the manifest."""
    admission = [] if config.admission is None else [describe_policy(config.admission)]
    return admission + [describe_policy(policy) for policy in config.eviction]


def show_policies(policies: list[dict[str, Any]] | None) -> str:
    """Return the policies of a table as text."""
    if policies is None:
        return "not recorded"
    shown = []
    for policy in policies:
        settings = policy.get("settings") or {}
        given = ", ".join(f"{key}={value}" for key, value in settings.items() if value is not None)
        shown.append(f"{policy['name']}({given})")
    return ", ".join(shown) or "none"


MAX_MANIFEST = 1 << 28


def read_manifest(path: str | PathLike[str] | Store) -> Manifest:
    """Read the manifest of a checkpoint.

    Args:
        path: A directory, a URL or a store.

    Returns:
        The manifest.

    Raises:
        CheckpointError: There is no complete checkpoint, or its manifest is not valid.
    """
    store = open_store(path)
    where = f"{store.where}/{NAME}"
    try:
        text = store.read_whole(NAME, MAX_MANIFEST).decode()
    except FileNotFoundError:
        raise CheckpointError(f"{store.where} holds no complete checkpoint: it has no {NAME}") from None
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else None
        raise CheckpointError(f"{where} cannot be read: {problem or error}") from None
    return Manifest.from_json(text, where)


DATA = "data-"


def commit(store: Store, manifest: Manifest, replaced: Manifest | None = None) -> None:
    """Write a manifest, which makes it the checkpoint, and delete the data folders that it does not name."""
    text = manifest.to_json().encode()
    if len(text) > MAX_MANIFEST:
        raise CheckpointError(
            f"{store.where}: the manifest would have {len(text)} bytes, more than {MAX_MANIFEST}: pass less "
            "progress, or merge the deltas with `megalith checkpoint compact`"
        )
    store.write(NAME, [text])
    try:
        old = store.folders() if replaced is None else folders_of(replaced)
        for folder in set(old) - folders_of(manifest):
            if folder.startswith(DATA):
                store.remove(folder)
    except OSError as error:
        # The checkpoint is complete; the next save deletes what is left.
        warnings.warn(f"{store.where}: old files could not be deleted: {error}", stacklevel=2)


def folders_of(manifest: Manifest) -> set[str]:
    """List the folders that hold the files of a checkpoint."""
    return {PurePosixPath(file.path).parts[0] for file in manifest.all_files()}


def megalith_version() -> str:
    """Return the version of Megalith, which manifests record."""
    from megalith import __version__

    return __version__


MAX_FOLDER_DEPTH = 3
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
    found = _search_folders(store, MAX_FOLDER_DEPTH)
    if not found:
        raise CheckpointError(f"{store.where} holds no checkpoint, and neither do the folders in it")
    return found


def _search_folders(store: Store, depth: int) -> list[ListedCheckpoint]:
    folders = store.folders()
    data = [folder for folder in folders if folder.startswith(DATA)]
    if is_checkpoint(store):
        return [_read_listing(store, data)]
    if data:
        return [ListedCheckpoint(store.where, None, f"incomplete: it has no {NAME}", data)]
    if not depth:
        return []
    return [found for folder in folders for found in _search_folders(store.inside(folder), depth - 1)]


def is_checkpoint(path: str | PathLike[str] | Store) -> bool:
    """Find out whether a path holds a checkpoint, intact or damaged."""
    try:
        open_store(path).size(NAME)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _read_listing(store: Store, data: list[str]) -> ListedCheckpoint:
    try:
        manifest = read_manifest(store)
    except CheckpointError as error:
        return ListedCheckpoint(store.where, None, f"damaged: {error}")
    named = {PurePosixPath(file.path).parts[:1] for file in manifest.all_files()}
    leftovers = [folder for folder in data if (folder,) not in named]
    return ListedCheckpoint(store.where, manifest, leftovers=leftovers)
