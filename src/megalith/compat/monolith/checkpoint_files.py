"""What lies in the assets of a Monolith checkpoint: which tables, in which files.

A hash table is a set of files `NAME-SSSSS-of-NNNNN`, : and / in its name replaced by -. A native multi-table
is a set `SHARED_NAME-SSSSS-of-NNNNN` with a set `SHARED_NAME.meta-SSSSS-of-NNNNN`: TFRecords that list, in
order, the tables of the file beside it and how many entries each has there. Sets must be complete.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megalith.data.formats.record_files import RecordFile
from megalith.errors import CheckpointError, InputError
from megalith.protowire import fields

_FILE = re.compile(r"(.+?)(\.meta)?-(\d{5,9})-of-(\d{5,9})")
_UNFINISHED = re.compile(r".+-tmp-\d+")


@dataclass(frozen=True)
class EntrySource:
    """A file of entries, and the tables in it one after the other. count: None is all to the end."""

    path: Path
    tables: tuple[tuple[str, int | None], ...]


def find_sources(path: Path) -> list[EntrySource]:
    """The files of a checkpoint. path: its directory of assets, or the checkpoint's name without `.assets`.

    Raises CheckpointError if there are none, or a set of files is not complete.
    """
    root = path if path.is_dir() else path.with_name(path.name + ".assets")
    if not root.is_dir():
        raise CheckpointError(f"{path}: no such directory, nor is there {root.name}")
    sets: dict[tuple[str, bool], dict[tuple[int, int], Path]] = {}
    for file in sorted(root.iterdir()):
        match = _FILE.fullmatch(file.name)
        if match and not _UNFINISHED.fullmatch(match[1]) and file.is_file():
            place = int(match[3]), int(match[4])
            sets.setdefault((match[1], bool(match[2])), {})[place] = file
    sources: list[EntrySource] = []
    for (name, is_meta), places in sets.items():
        if is_meta:
            if (name, False) not in sets:
                raise CheckpointError(f"{root}: {name}.meta has no entries beside it, {name}-SSSSS-of-NNNNN")
            continue
        files = _complete(root, name, places)
        if (name, True) not in sets:
            sources += (EntrySource(file, ((name, None),)) for file in files)
            continue
        metas = _complete(root, f"{name}.meta", sets[name, True])
        if len(metas) != len(files):
            raise CheckpointError(f"{root}: {name} has {len(files)} shards, {name}.meta has {len(metas)}")
        sources += (EntrySource(f, _tables_of(m)) for f, m in zip(files, metas, strict=True))
    if not sources:
        raise CheckpointError(f"{root}: no files NAME-SSSSS-of-NNNNN of hash tables in it")
    return sources


def file_name(table: str) -> str:
    """A table's name as Monolith writes it into file names."""
    return re.sub("[:/]", "-", table)


def _complete(root: Path, name: str, places: dict[tuple[int, int], Path]) -> list[Path]:
    """A set's files in order."""
    sizes = sorted({of for _, of in places})
    if len(sizes) != 1:
        raise CheckpointError(f"{root}: {name} has files of sets of {sizes}; keep those of one save")
    shards = {shard for shard, _ in places}
    for shard in range(sizes[0]):
        if shard not in shards:
            raise CheckpointError(
                f"{root}: {name} lacks shard {shard} of {sizes[0]}: the set is not complete"
            )
    if len(shards) != sizes[0]:
        raise CheckpointError(f"{root}: {name} has shard {max(shards)}, beyond the {sizes[0]} of its set")
    return [places[shard, sizes[0]] for shard in range(sizes[0])]


def _tables_of(path: Path) -> tuple[tuple[str, int | None], ...]:
    """MultiHashTableMetadata: string table_name = 1, uint64 num_entries = 2."""
    tables: dict[str, int | None] = {}
    try:
        for record in RecordFile(path, "tfrecord", max_bytes=1 << 20).read():
            name, count = "", 0
            for field in fields(record.message, at=record.at):
                if field.number == 1:
                    name = field.text()
                elif field.number == 2:
                    count = field.uint64()
            if not name or name in tables or count >= 2**62:
                raise InputError(
                    f"{path}: the table at byte {record.at} has no name, is there twice, or is too large"
                )
            tables[name] = count
    except InputError as error:
        told = str(error)
        raise CheckpointError(told if told.startswith(str(path)) else f"{path}: {told}") from None
    return tuple(tables.items())
