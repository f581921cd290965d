"""The manifest: what a checkpoint holds and where. A JSON file, written last: without it there is none.

Its fields are those of docs/formats/checkpoint.md. Reading checks every field; unknown ones are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from megalith.errors import CheckpointError, InputError
from megalith.routing import MODES, Router
from megalith.storage.strict_json import parse_json
from megalith.table import TableConfig

FORMAT = "megalith-checkpoint"
VERSION = 1
NAME = "manifest.json"


@dataclass(frozen=True)
class FileEntry:
    """A file: its path below the checkpoint, its length and its checksum."""

    path: str
    bytes: int
    checksum: str


@dataclass(frozen=True)
class Piece:
    """A file of a table's rows, or of ids, of one shard."""

    file: FileEntry
    shard: int
    rows: int


@dataclass(frozen=True)
class Routing:
    """How rows were spread over shards when they were saved."""

    dist_type: str = "roundrobin"
    num_shards: int = 1
    block_size: int | None = None
    skip_first: bool = False

    def router(self) -> Router | None:
        """What spread them so; None where one shard had them all."""
        if self.num_shards == 1:
            return None
        return Router(self.dist_type, self.num_shards, block_size=self.block_size, skip_first=self.skip_first)


@dataclass(frozen=True)
class TableEntry:
    """A table: what its rows are made of, how they were spread, and the files that hold them.

    live: rows of the whole table then. removed: of a delta, files of ids that are gone.
    """

    segments: list[dict[str, Any]]
    seed: int
    routing: Routing
    pieces: list[Piece]
    live: int = 0
    removed: list[Piece] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows of all files."""
        return sum(piece.rows for piece in self.pieces)

    @property
    def dim(self) -> int:
        """Weights of a row."""
        return sum(int(segment["dim"]) for segment in self.segments)

    @property
    def state_sizes(self) -> dict[str, int]:
        """Floats of each piece of optimizer state, by "segment number/name"."""
        return {
            f"{number}/{state['name']}": int(state["size"])
            for number, segment in enumerate(self.segments)
            for state in segment.get("state", ())
        }


@dataclass(frozen=True)
class CollectionEntry:
    """A collection of the model: its step and its tables."""

    global_step: int
    tables: dict[str, TableEntry]


@dataclass(frozen=True, kw_only=True)
class Save:
    """What one call saved: all rows (the base), or those changed since the save before (a delta)."""

    id: str
    created: str
    collections: dict[str, CollectionEntry]
    dense: FileEntry | None = None
    optimizer: dict[str, Any] | None = None
    optimizer_tensors: FileEntry | None = None
    progress: dict[str, Any] = field(default_factory=dict)

    def files(self) -> list[FileEntry]:
        """Every file it names."""
        tables = [table for c in self.collections.values() for table in c.tables.values()]
        pieces = [piece.file for table in tables for piece in (*table.pieces, *table.removed)]
        return [*pieces, *(f for f in (self.dense, self.optimizer_tensors) if f is not None)]


@dataclass(frozen=True, kw_only=True)
class Delta(Save):
    """What changed since the save whose id is `previous`."""

    previous: str


@dataclass(frozen=True, kw_only=True)
class Manifest(Save):
    """All of a checkpoint: its base, and the deltas behind it in order."""

    megalith: str
    deltas: list[Delta] = field(default_factory=list)

    @property
    def saves(self) -> list[Save]:
        """The base and its deltas."""
        return [self, *self.deltas]

    @property
    def latest(self) -> Save:
        """The last of them: its dense weights, optimizer, progress and steps are the checkpoint's."""
        return self.saves[-1]

    @property
    def tip(self) -> str:
        """The id of the latest save, which the next delta must name."""
        return self.latest.id

    def all_files(self) -> list[FileEntry]:
        """Every file of the base and the deltas."""
        return [file for save in self.saves for file in save.files()]

    def tables(self) -> dict[str, list[TableEntry]]:
        """Each table by "collection.table": its entry in the base and in the deltas."""
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
        """The file's text."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Reads the text. Raises CheckpointError naming the field that is missing or wrong."""
        try:
            data = parse_json(text)
        except ValueError as error:
            raise CheckpointError(f"{where} is no JSON: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise CheckpointError(f"{where} is no manifest of a Megalith checkpoint")
        if data.get("version") != VERSION:
            raise CheckpointError(
                f"{where} has version {data.get('version')!r}; this Megalith reads {VERSION}"
            )
        read = _FieldReader(where)
        manifest = cls(
            **_save(read, data),
            megalith=read.text(data, "megalith"),
            deltas=[
                _delta(read.inside(f"deltas[{number}]"), each)
                for number, each in enumerate(read.listing(data, "deltas") if "deltas" in data else [])
            ],
        )
        _check_chain(manifest, where)
        _check_tables(manifest, where)
        return manifest


def full_name(collection: str, table: str) -> str:
    """A table's name in the whole model."""
    return f"{collection}.{table}".lstrip(".")


def _check_chain(manifest: Manifest, where: str) -> None:
    before: Save = manifest
    for delta in manifest.deltas:
        if delta.previous != before.id:
            raise CheckpointError(
                f"{where}: there is a gap in the chain: delta {delta.id} was made on top of "
                f"{delta.previous}, but {before.id} comes before it"
            )
        if [(c, list(e.tables)) for c, e in delta.collections.items()] != [
            (c, list(e.tables)) for c, e in manifest.collections.items()
        ]:
            raise CheckpointError(f"{where}: delta {delta.id} has other tables than the base")
        before = delta
    ids = [save.id for save in manifest.saves]
    if len(set(ids)) != len(ids):
        raise CheckpointError(f"{where}: two saves have one id")
    paths = [file.path for file in manifest.all_files()]
    if len(set(paths)) != len(paths):
        raise CheckpointError(f"{where}: a file is named twice")


def _check_tables(manifest: Manifest, where: str) -> None:
    """What entries of one table, taken together, must keep to."""
    tables = manifest.tables()
    if len(tables) != sum(len(collection.tables) for collection in manifest.collections.values()):
        raise CheckpointError(f"{where}: two tables have one name")
    for name, entries in tables.items():
        rows = 0
        for save, entry in zip(manifest.saves, entries, strict=True):
            rows += entry.rows
            if entry.live > rows:
                raise CheckpointError(
                    f"{where}: save {save.id} says that table {name!r} has {entry.live} ids, its files hold "
                    f"{rows}"
                )
            if entry.dim != entries[0].dim or entry.state_sizes != entries[0].state_sizes:
                raise CheckpointError(
                    f"{where}: delta {save.id} has other segments of table {name!r} than the base"
                )


def describe(config: TableConfig) -> list[dict[str, Any]]:
    """A table's segments as the manifest lists them."""
    return [
        {
            "dim": segment.dim,
            "precision": segment.precision,
            "optimizer": {"name": segment.optimizer.name, "settings": repr(segment.optimizer)},
            "initializer": repr(segment.initializer),
            "state": [{"name": s.name, "size": s.size} for s in segment.optimizer.state(segment.dim)],
        }
        for segment in config.segments
    ]


def _save(read: _FieldReader, data: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": read.text(data, "id"),
        "created": read.text(data, "created"),
        "collections": {
            name: _collection(read.inside(f"collections.{name}"), each)
            for name, each in read.named(data, "collections").items()
        },
        "dense": _file(read, data, "dense"),
        "optimizer": read.mapping(data, "optimizer", optional=True),
        "optimizer_tensors": _file(read, data, "optimizer_tensors"),
        "progress": read.mapping(data, "progress", optional=True) or {},
    }


def _delta(read: _FieldReader, data: Any) -> Delta:
    data = read.as_mapping(data)
    return Delta(**_save(read, data), previous=read.text(data, "previous"))


def _collection(read: _FieldReader, data: Any) -> CollectionEntry:
    tables = read.named(read.as_mapping(data), "tables")
    return CollectionEntry(
        global_step=read.number(data, "global_step"),
        tables={name: _table(read.inside(f"tables.{name}"), each) for name, each in tables.items()},
    )


def _table(read: _FieldReader, data: Any) -> TableEntry:
    data = read.as_mapping(data)
    segments = read.listing(data, "segments")
    if not segments:
        raise read.wrong("segments", "must not be empty")
    for number, segment in enumerate(segments):
        _check_segment(read.inside(f"segments[{number}]"), segment)
    pieces = _pieces(read, data, "pieces")
    routing = _routing(read.inside("routing"), read.mapping(data, "routing", optional=True) or {})
    if routing.num_shards > 1 and any(piece.shard >= routing.num_shards for piece in pieces):
        raise read.wrong("pieces", f"must be of shards below {routing.num_shards}")
    return TableEntry(
        segments=segments,
        seed=read.number(data, "seed", least=-(2**63)),
        routing=routing,
        pieces=pieces,
        live=read.number(data, "live") if "live" in data else sum(piece.rows for piece in pieces),
        removed=_pieces(read, data, "removed") if "removed" in data else [],
    )


def _check_segment(read: _FieldReader, segment: Any) -> None:
    read.number(read.as_mapping(segment), "dim", least=1)
    read.text(read.mapping(segment, "optimizer"), "name")
    for number, state in enumerate(read.listing(segment, "state") if "state" in segment else []):
        inside = read.inside(f"state[{number}]")
        inside.text(inside.as_mapping(state), "name")
        inside.number(state, "size", least=1)


def _routing(read: _FieldReader, data: dict[str, Any]) -> Routing:
    skip_first = data.get("skip_first", False)
    if not isinstance(skip_first, bool):
        raise read.wrong("skip_first", "must be true or false")
    routing = Routing(
        dist_type=read.text(data, "dist_type") if "dist_type" in data else "roundrobin",
        num_shards=read.number(data, "num_shards", least=1) if "num_shards" in data else 1,
        block_size=read.number(data, "block_size", least=1) if data.get("block_size") is not None else None,
        skip_first=skip_first,
    )
    if routing.dist_type not in MODES:
        raise read.wrong("dist_type", f"must be one of {', '.join(MODES)}, not {routing.dist_type!r}")
    try:
        routing.router()
    except InputError as error:
        raise read.wrong("num_shards", f"makes no sense: {error}") from None
    return routing


def read_pieces(data: Mapping[str, Any], key: str, where: str) -> list[Piece]:
    """The pieces in a part of a manifest. Raises CheckpointError naming the field that is wrong."""
    return _pieces(_FieldReader(where), data, key)


def _pieces(read: _FieldReader, data: Mapping[str, Any], key: str) -> list[Piece]:
    return [
        _piece(read.inside(f"{key}[{number}]"), each) for number, each in enumerate(read.listing(data, key))
    ]


def _piece(read: _FieldReader, data: Any) -> Piece:
    data = read.as_mapping(data)
    file = _file(read, data, "file")
    if file is None:
        raise read.wrong("file", "is missing")
    return Piece(file=file, shard=read.number(data, "shard"), rows=read.number(data, "rows"))


def _file(read: _FieldReader, data: Mapping[str, Any], key: str) -> FileEntry | None:
    entry = read.mapping(data, key, optional=True)
    if entry is None:
        return None
    inside = read.inside(key)
    path, sum_ = inside.text(entry, "path"), inside.text(entry, "checksum")
    if not _is_below(path):
        raise inside.wrong("path", f"{path!r} leads out of the checkpoint")
    return FileEntry(path=path, bytes=inside.number(entry, "bytes"), checksum=sum_)


def _is_text(value: str) -> bool:
    """Whether it can be printed; JSON can spell half of a character that takes two."""
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def _is_below(path: str) -> bool:
    """Whether a path is a plain way down: neither absolute nor with "..", and spelled as we spell it."""
    parts = PurePosixPath(path)
    return (
        str(parts) == path
        and parts.parts != ()
        and not parts.is_absolute()
        and ".." not in parts.parts
        and "\\" not in path
        and path.isprintable()
    )


class _FieldReader:
    """Takes fields out of JSON; errors say which file and field."""

    def __init__(self, where: str, field: str = "") -> None:
        self._where = where
        self._field = field

    def inside(self, name: str) -> _FieldReader:
        return _FieldReader(self._where, f"{self._field}{name}.")

    def wrong(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: field {self._field}{key} {problem}")

    def as_mapping(self, data: Any) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise CheckpointError(f"{self._where}: field {self._field.rstrip('.')} must be an object")
        return data

    def _typed(self, data: Mapping[str, Any], key: str, kind: type, name: str) -> Any:
        value = data.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.wrong(key, "is missing" if key not in data else f"must be {name}")
        return value

    def text(self, data: Mapping[str, Any], key: str) -> str:
        value = str(self._typed(data, key, str, "a text"))
        if not _is_text(value):
            raise self.wrong(key, "must be a text")
        return value

    def named(self, data: Mapping[str, Any], key: str) -> Any:
        """An object whose keys are names."""
        value = self.mapping(data, key)
        if not all(map(_is_text, value)):
            raise self.wrong(key, "has a name that is no text")
        return value

    def number(self, data: Mapping[str, Any], key: str, least: int = 0) -> int:
        value = int(self._typed(data, key, int, "a whole number"))
        if value < least:
            raise self.wrong(key, f"must be at least {least}")
        if value >= 2**63:
            raise self.wrong(key, "is too large")
        return value

    def listing(self, data: Mapping[str, Any], key: str) -> list[Any]:
        return list(self._typed(data, key, list, "a list"))

    def mapping(self, data: Mapping[str, Any], key: str, optional: bool = False) -> Any:
        if optional and data.get(key) is None:
            return None
        return dict(self._typed(data, key, dict, "an object"))
