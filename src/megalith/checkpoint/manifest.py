"""The manifest: what a checkpoint holds and where. A JSON file, written last: without it there is none.

Its fields are those of docs/formats/checkpoint.md. Reading checks every field; unknown ones are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megalith.errors import CheckpointError
from megalith.table import TableConfig

FORMAT = "megalith-checkpoint"
VERSION = 1
NAME = "manifest.json"
_MAX_BYTES = 1 << 28


@dataclass(frozen=True)
class FileEntry:
    """A file: its path below the checkpoint, its length and its checksum."""

    path: str
    bytes: int
    checksum: str


@dataclass(frozen=True)
class Piece:
    """A file of a table's rows, of one shard."""

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


@dataclass(frozen=True)
class TableEntry:
    """A table: what its rows are made of, how they were spread, and the files that hold them."""

    segments: list[dict[str, Any]]
    seed: int
    routing: Routing
    pieces: list[Piece]

    @property
    def rows(self) -> int:
        """Rows of all files."""
        return sum(piece.rows for piece in self.pieces)

    @property
    def dim(self) -> int:
        """Weights of a row."""
        return sum(int(segment["dim"]) for segment in self.segments)


@dataclass(frozen=True)
class CollectionEntry:
    """A collection of the model: its step and its tables."""

    global_step: int
    tables: dict[str, TableEntry]


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint."""

    id: str
    created: str
    megalith: str
    collections: dict[str, CollectionEntry]
    dense: FileEntry | None = None
    optimizer: dict[str, Any] | None = None
    optimizer_tensors: FileEntry | None = None
    progress: dict[str, Any] = field(default_factory=dict)

    def files(self) -> list[FileEntry]:
        """Every file it names."""
        pieces = [
            piece.file for c in self.collections.values() for t in c.tables.values() for piece in t.pieces
        ]
        return [*pieces, *(f for f in (self.dense, self.optimizer_tensors) if f is not None)]

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Reads the text. Raises CheckpointError naming the field that is missing or wrong."""
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise CheckpointError(f"{where} is no JSON: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise CheckpointError(f"{where} is no manifest of a Megalith checkpoint")
        if data.get("version") != VERSION:
            raise CheckpointError(
                f"{where} has version {data.get('version')!r}; this Megalith reads {VERSION}"
            )
        read = _Reader(where)
        return cls(
            id=read.text(data, "id"),
            created=read.text(data, "created"),
            megalith=read.text(data, "megalith"),
            collections={
                name: _collection(read.inside(f"collections.{name}"), each)
                for name, each in read.mapping(data, "collections").items()
            },
            dense=_file(read, data, "dense"),
            optimizer=read.mapping(data, "optimizer", optional=True),
            optimizer_tensors=_file(read, data, "optimizer_tensors"),
            progress=read.mapping(data, "progress", optional=True) or {},
        )


def read_manifest(root: Path) -> Manifest:
    """The manifest of a checkpoint directory. Raises CheckpointError if there is none or it is wrong."""
    path = root / NAME
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path} is larger than a manifest can be")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{root} holds no complete checkpoint: it has no {NAME}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return Manifest.from_json(text, str(path))


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


def _collection(read: _Reader, data: Any) -> CollectionEntry:
    tables = read.mapping(read.as_mapping(data), "tables")
    return CollectionEntry(
        global_step=read.number(data, "global_step"),
        tables={name: _table(read.inside(f"tables.{name}"), each) for name, each in tables.items()},
    )


def _table(read: _Reader, data: Any) -> TableEntry:
    data = read.as_mapping(data)
    routing = read.mapping(data, "routing", optional=True) or {}
    segments = read.listing(data, "segments")
    for number, segment in enumerate(segments):
        inside = read.inside(f"segments[{number}]")
        inside.number(inside.as_mapping(segment), "dim", least=1)
        inside.text(inside.mapping(segment, "optimizer"), "name")
    return TableEntry(
        segments=segments,
        seed=read.number(data, "seed", least=-(2**63)),
        routing=Routing(
            dist_type=str(routing.get("dist_type", "roundrobin")),
            num_shards=read.number(routing, "num_shards", least=1) if "num_shards" in routing else 1,
            block_size=read.number(routing, "block_size", least=1) if routing.get("block_size") else None,
            skip_first=bool(routing.get("skip_first", False)),
        ),
        pieces=[
            _piece(read.inside(f"pieces[{number}]"), each)
            for number, each in enumerate(read.listing(data, "pieces"))
        ],
    )


def _piece(read: _Reader, data: Any) -> Piece:
    data = read.as_mapping(data)
    file = _file(read, data, "file")
    if file is None:
        raise read.wrong("file", "is missing")
    return Piece(file=file, shard=read.number(data, "shard"), rows=read.number(data, "rows"))


def _file(read: _Reader, data: Mapping[str, Any], key: str) -> FileEntry | None:
    entry = read.mapping(data, key, optional=True)
    if entry is None:
        return None
    inside = read.inside(key)
    path, sum_ = inside.text(entry, "path"), inside.text(entry, "checksum")
    return FileEntry(path=path, bytes=inside.number(entry, "bytes"), checksum=sum_)


class _Reader:
    """Takes fields out of JSON; errors say which file and field."""

    def __init__(self, where: str, field: str = "") -> None:
        self._where = where
        self._field = field

    def inside(self, name: str) -> _Reader:
        return _Reader(self._where, f"{self._field}{name}.")

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
        return str(self._typed(data, key, str, "a text"))

    def number(self, data: Mapping[str, Any], key: str, least: int = 0) -> int:
        value = int(self._typed(data, key, int, "a whole number"))
        if value < least:
            raise self.wrong(key, f"must be at least {least}")
        return value

    def listing(self, data: Mapping[str, Any], key: str) -> list[Any]:
        return list(self._typed(data, key, list, "a list"))

    def mapping(self, data: Mapping[str, Any], key: str, optional: bool = False) -> Any:
        if optional and data.get(key) is None:
            return None
        return dict(self._typed(data, key, dict, "an object"))
