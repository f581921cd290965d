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
from typing import Any

from megalith.errors import CheckpointError, InputError
from megalith.routing import MODES, Router
from megalith.storage.json_codec import JsonFields, parse_json
from megalith.storage.store import Store, StoredFile, open_store
from megalith.table import TableConfig
from megalith.table.policies import describe_policy

FORMAT = "megalith-checkpoint"
VERSION = 1
NAME = "manifest.json"


@dataclass(frozen=True)
class Piece:
    """A file with rows of a table, or with ids, of one shard."""

    file: StoredFile
    shard: int
    rows: int


@dataclass(frozen=True)
class Routing:
    """How rows were distributed over shards when they were saved."""

    dist_type: str = "roundrobin"
    num_shards: int = 1
    block_size: int | None = None
    skip_first: bool = False

    def router(self) -> Router | None:
        """Return the router that distributed the rows; None if there was one shard."""
        if self.num_shards == 1:
            return None
        return Router(self.dist_type, self.num_shards, block_size=self.block_size, skip_first=self.skip_first)


@dataclass(frozen=True)
class TableEntry:
    """A table of one save."""

    # The description of each segment: dim, precision, rounding, serving, optimizer, initializer, state
    segments: list[dict[str, Any]]
    seed: int  # The seed of the table's initial rows
    routing: Routing  # How the rows were distributed over shards
    pieces: list[Piece]  # The files of rows
    live: int = 0  # Number of rows of the whole table at the time of the save
    # In a delta, the files of ids removed since the save before it
    removed: list[Piece] = field(default_factory=list)
    # The files of ids without a row that an admission policy counted at the time of the save
    pending: list[Piece] = field(default_factory=list)
    # The descriptions of the table's policies, the admission policy first; None if the manifest does not
    # record them
    policies: list[dict[str, Any]] | None = None

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

    global_step: int
    tables: dict[str, TableEntry]


@dataclass(frozen=True, kw_only=True)
class Save:
    """The content of one save: all rows (the base), or the rows changed since the previous save (a delta)."""

    id: str
    created: str
    collections: dict[str, CollectionEntry]
    dense: StoredFile | None = None
    optimizer: dict[str, Any] | None = None
    optimizer_tensors: StoredFile | None = None
    progress: dict[str, Any] = field(default_factory=dict)

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
        fields = JsonFields(data, lambda problem: CheckpointError(f"{where}: {problem}"))
        deltas = fields.objects("deltas") if "deltas" in data else []
        manifest = cls(
            **_save(fields),
            megalith=fields.string("megalith"),
            deltas=[Delta(**_save(delta), previous=delta.string("previous")) for delta in deltas],
        )
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


def _save(fields: JsonFields) -> dict[str, Any]:
    return {
        "id": fields.string("id"),
        "created": fields.string("created"),
        "collections": {n: _collection(c) for n, c in fields.named_objects("collections").items()},
        "dense": _optional_file(fields, "dense"),
        "optimizer": fields.object("optimizer").data if "optimizer" in fields else None,
        "optimizer_tensors": _optional_file(fields, "optimizer_tensors"),
        "progress": fields.object("progress").data if "progress" in fields else {},
    }


def _collection(fields: JsonFields) -> CollectionEntry:
    tables = fields.named_objects("tables")
    return CollectionEntry(
        global_step=fields.integer("global_step"),
        tables={name: _table(table) for name, table in tables.items()},
    )


def _table(fields: JsonFields) -> TableEntry:
    segments = fields.objects("segments")
    if not segments:
        fields.fail("segments", "must not be empty")
    for segment in segments:
        segment.integer("dim", least=1)
        segment.object("optimizer").string("name")
        for state in segment.objects("state") if "state" in segment.data else []:
            state.string("name")
            state.integer("size", least=1)
    policies = fields.objects("policies") if "policies" in fields else None
    for policy in policies or ():
        policy.string("name")
        if "settings" in policy:
            policy.object("settings")
    pieces = _pieces(fields, "pieces")
    routing = _routing(fields.object("routing")) if "routing" in fields else Routing()
    if routing.num_shards > 1 and any(piece.shard >= routing.num_shards for piece in pieces):
        fields.fail("pieces", f"must be of shards below {routing.num_shards}")
    return TableEntry(
        segments=[segment.data for segment in segments],
        seed=fields.integer("seed", least=-(2**63)),
        routing=routing,
        pieces=pieces,
        live=fields.integer("live") if "live" in fields.data else sum(piece.rows for piece in pieces),
        removed=_pieces(fields, "removed") if "removed" in fields.data else [],
        pending=_pieces(fields, "pending") if "pending" in fields.data else [],
        policies=None if policies is None else [policy.data for policy in policies],
    )


def _routing(fields: JsonFields) -> Routing:
    data = fields.data
    routing = Routing(
        dist_type=fields.string("dist_type") if "dist_type" in data else "roundrobin",
        num_shards=fields.integer("num_shards", least=1) if "num_shards" in data else 1,
        block_size=fields.integer("block_size", least=1) if "block_size" in fields else None,
        skip_first=fields.boolean("skip_first") if "skip_first" in data else False,
    )
    if routing.dist_type not in MODES:
        fields.fail("dist_type", f"must be one of {', '.join(MODES)}, not {routing.dist_type!r}")
    try:
        routing.router()
    except InputError as error:
        fields.fail("num_shards", f"is not valid: {error}")
    return routing


def read_pieces(data: dict[str, Any], key: str, where: str) -> list[Piece]:
    """Parse the pieces in a part of a manifest."""
    return _pieces(JsonFields(data, lambda problem: CheckpointError(f"{where}: {problem}")), key)


def _pieces(fields: JsonFields, key: str) -> list[Piece]:
    return [
        Piece(_file(piece.object("file")), piece.integer("shard"), piece.integer("rows"))
        for piece in fields.objects(key)
    ]


def _optional_file(fields: JsonFields, key: str) -> StoredFile | None:
    return _file(fields.object(key)) if key in fields else None


def _file(fields: JsonFields) -> StoredFile:
    path = fields.string("path")
    if not _is_below(path):
        fields.fail("path", f"{path!r} leads out of the checkpoint")
    return StoredFile(path, fields.integer("bytes"), fields.string("checksum"))


def _is_below(path: str) -> bool:
    """Return whether a path is relative, normalized, printable and without ".."."""
    parts = PurePosixPath(path)
    return (
        str(parts) == path
        and parts.parts != ()
        and not parts.is_absolute()
        and ".." not in parts.parts
        and "\\" not in path
        and path.isprintable()
    )


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
