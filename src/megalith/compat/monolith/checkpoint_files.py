"""The files of a Monolith checkpoint, and the tables in each.

    NAME-SSSSS-of-NNNNN              entries of one hash table; `:` and `/` in its name are replaced by `-`
    SHARED_NAME-SSSSS-of-NNNNN       entries of a native multi-table, table after table
    SHARED_NAME.meta-SSSSS-of-NNNNN  TFRecords with the name and number of entries of each table, in order

Sets of files must be complete.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megalith.data.record_files import RecordFile
from megalith.errors import CheckpointError, InputError

_FILE = re.compile(r"(.+?)(\.meta)?-(\d{5,9})-of-(\d{5,9})")
_UNFINISHED = re.compile(r".+-tmp-\d+")


@dataclass(frozen=True)
class EntrySource:
    """A file of entries. tables: (name, number of entries) in order; None means all entries of the file."""

    path: Path
    tables: tuple[tuple[str, int | None], ...]


def find_sources(path: Path) -> list[EntrySource]:
    """Find the files of a checkpoint."""
    root = path if path.is_dir() else path.with_name(path.name + ".assets")
    if not root.is_dir():
        raise CheckpointError(f"{path}: there is no such directory, and no {root.name}")
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
                raise CheckpointError(f"{root}: {name}.meta has no entries, {name}-SSSSS-of-NNNNN")
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
        raise CheckpointError(f"{root}: it has no files NAME-SSSSS-of-NNNNN of hash tables")
    return sources


def file_name(table: str) -> str:
    """Return the name of a table as Monolith writes it in file names."""
    return re.sub("[:/]", "-", table)


def _complete(root: Path, name: str, places: dict[tuple[int, int], Path]) -> list[Path]:
    """The files of a set in order."""
    sizes = sorted({of for _, of in places})
    if len(sizes) != 1:
        raise CheckpointError(f"{root}: {name} has files of saves with {sizes}; keep the files of one save")
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
    """The tables that a .meta file lists, as records of MultiHashTableMetadata."""
    from megalith.compat.monolith.monolith_protos import parse_message  # needs protobuf

    tables: dict[str, int | None] = {}
    try:
        for record in RecordFile(path, "tfrecord", max_bytes=1 << 20).read():
            try:
                table = parse_message("monolith.hash_table.MultiHashTableMetadata", record.message)
            except InputError as error:
                raise InputError(f"{path}: the record at byte {record.at}: {error}") from None
            name, count = table.table_name, table.num_entries
            if not isinstance(name, str) or not name or name in tables or count >= 2**62:  # bytes: not UTF-8
                raise InputError(
                    f"{path}: the table at byte {record.at} has no name, is listed twice, or is too large"
                )
            tables[name] = count
    except InputError as error:
        raise CheckpointError(str(error)) from None
    return tuple(tables.items())
