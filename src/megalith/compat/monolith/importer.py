"""Imports the hash tables of a Monolith checkpoint, with optimizer state and times.

    NAME-SSSSS-of-NNNNN              entries of one hash table; `:` and `/` in its name are replaced by `-`
    SHARED_NAME-SSSSS-of-NNNNN       entries of a native multi-table, table after table
    SHARED_NAME.meta-SSSSS-of-NNNNN  TFRecords with the name and number of entries of each table, in order

    message EntryDump { sfixed64 id = 1; repeated float num = 2; OptimizerDump opt = 3;
                        int64 last_update_ts_sec = 4; }
    message OptimizerDump { repeated SingleOptimizerDump dump = 1; }     one for each segment
    message SingleOptimizerDump { oneof: a message of floats for each kind of optimizer }

A file is a stream of TFRecords, plain or in Snappy blocks; native code parses the entries. Sets of files must
be complete. Files are untrusted until validated: checksums are checked, lengths are bounded, and each entry
must have exactly the floats of the table's rows.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megalith.checkpoint.importers import ImportedRows, ImportReport, OnError, RowImport, chunk_rows
from megalith.data.compression import snappy_blocks
from megalith.data.record_files import MAX_RECORD_BYTES, RecordFile, masked_crc32c
from megalith.errors import CheckpointError, InputError, NativeMissingError
from megalith.library import native_module
from megalith.nn import EmbeddingCollection
from megalith.ops import checks
from megalith.table import TableConfig
from megalith.table.optimizers import Adam
from megalith.table.table_data import MAX_TIME

# ---- files

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
    from megalith.compat.monolith.feature_configs import parse_message  # needs protobuf

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


# ---- entries

_READ = 1 << 20
_NO_LIMIT = 2**62


@dataclass(frozen=True)
class SegmentLayout:
    """The optimizer state of a segment.

    kind: its field of SingleOptimizerDump. optional: an empty SingleOptimizerDump is accepted.
    pieces: for each field inside, (field, first float of the row, number of floats).
    """

    kind: int
    optional: bool
    pieces: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class EntryLayout:
    """The place of an entry's floats in a row of `width` floats; the `dim` weights come first.

    reads_state: False ignores optimizer state. needs_state: an entry without optimizer state is an error.
    """

    dim: int
    width: int
    reads_state: bool
    needs_state: bool
    segments: tuple[SegmentLayout, ...]

    @property
    def native(self) -> tuple[object, ...]:
        """The form the native parser takes."""
        segments = [(s.kind, s.optional, list(s.pieces)) for s in self.segments]
        return self.dim, self.width, self.reads_state, self.needs_state, segments


class Entries(NamedTuple):
    """Rows: ids int64 [n], floats float32 [n, width], times int64 [n] in seconds (0 where unknown)."""

    ids: Tensor
    floats: Tensor
    times: Tensor


class EntryFile:
    """Reads the entries of a file in order; several tables may be concatenated in it.

    Its methods raise CheckpointError, with the file and the byte of the unpacked stream, if the file is
    damaged or ends too early, or an entry does not have the expected layout.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._blocks = _blocks(path)
        self._data = b""
        self._at = 0

    def read(self, layout: EntryLayout, limit: int | None = None) -> Iterator[Entries]:
        """Yield the next entries, in pieces."""
        left = _NO_LIMIT if limit is None else limit
        while left > 0:
            room = min(chunk_rows(layout.width), left)
            rows = Entries(
                torch.empty(room, dtype=torch.int64, device="cpu"),
                torch.empty(room, layout.width, device="cpu"),
                torch.empty(room, dtype=torch.int64, device="cpu"),
            )
            n = self._fill(room, layout, rows)
            if n:
                yield Entries(*(column[:n] for column in rows))
            left -= n
            if n < room:
                self._check_end(None if limit is None else limit - left, limit)
                return

    def skip(self, count: int) -> None:
        """Skip the next entries."""
        n = self._fill(count, None, None)
        if n < count:
            self._check_end(n, count)

    def finish(self) -> None:
        """Raise CheckpointError if there is another entry."""
        if self._data or self._more():
            raise self._wrong(f"there are more entries at byte {self._at} than its .meta file lists")

    def _fill(self, room: int, layout: EntryLayout | None, rows: Entries | None) -> int:
        """Read up to `room` entries; fewer at the end of the file."""
        n = 0
        while n < room:
            into = None if rows is None else Entries(*(column[n:] for column in rows))
            try:
                read, used = read_entries(self._data, self._at, room - n, layout, into)
            except InputError as error:
                raise self._wrong(str(error)) from None
            n += read
            self._data, self._at = self._data[used:], self._at + used
            if n < room and not self._more():
                break
        return n

    def _more(self) -> bool:
        """Read at least as much as is buffered, so that a long record is copied only a few times."""
        parts, size = [self._data], 0
        try:
            while size < max(_READ, len(self._data)) and (block := next(self._blocks, None)) is not None:
                parts.append(block)
                size += len(block)
        except (InputError, OSError) as error:
            raise CheckpointError(str(error)) from None
        self._data = b"".join(parts)
        return size > 0

    def _check_end(self, found: int | None, expected: int | None) -> None:
        if self._data:
            raise self._wrong(f"the file ends within the record at byte {self._at}: it is truncated")
        if found is not None:
            raise self._wrong(f"the file ends after {found} of {expected} entries that its .meta file lists")

    def _wrong(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem}")


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, unpacked if it is a file of Snappy blocks."""
    with path.open("rb") as file:
        head = file.read(12)
        plain = len(head) < 12 or masked_crc32c(head[:8]) == struct.unpack("<I", head[8:])[0]
        if plain:
            while head:
                yield head
                head = file.read(_READ)
    if not plain:
        yield from snappy_blocks(path, max_bytes=MAX_RECORD_BYTES)


def read_entries(
    data: bytes, at: int, limit: int, layout: EntryLayout | None, into: Entries | None
) -> tuple[int, int]:
    """Read complete records."""
    native = native_module()
    if native is None:
        raise NativeMissingError(
            "Monolith checkpoints need megalith's native module, which is not built here"
        )
    rows: int
    used: int
    if layout is None or into is None:
        rows, used = native.skip_entries(data, at, limit, MAX_RECORD_BYTES)
    else:
        rows, used = native.entries(data, at, limit, MAX_RECORD_BYTES, layout.native, *into)
    return rows, used


# ---- tables

_OPTIMIZERS: dict[str, tuple[int, tuple[tuple[int, str], ...]]] = {
    "sgd": (2, ()),
    "adagrad": (1, ((1, "sum"),)),
    "ftrl": (3, ((1, "z"), (2, "sum"))),
    "adam": (7, ((1, "m"), (2, "v"), (3, "beta1_power"), (4, "beta2_power"))),
    "momentum": (9, ((1, "velocity"),)),
    "amsgrad": (8, ((1, "m"), (2, "v"), (3, "v_max"), (4, "beta1_power"), (5, "beta2_power"))),
    "adadelta": (6, ((1, "square_avg"), (2, "acc_delta"))),
    "rmsprop": (11, ((1, "square_avg"),)),
    "rmsprop_v2": (12, ((1, "square_avg"),)),
    "dynamic_wd_adagrad": (4, ((1, "sum"),)),
    "group_ftrl": (13, ((1, "z"), (2, "sum"))),
    "group_adagrad": (15, ((1, "sum"),)),
}
"""Optimizers that Monolith has with the same formula: field of SingleOptimizerDump, (field, state) inside."""

_POWERS = ("beta1_power", "beta2_power")
_VANISHED = 1e-30
"""A power of a beta below this has no effect on the bias correction."""


def import_monolith(
    collection: EmbeddingCollection,
    path: str | Path,
    *,
    tables: Mapping[str, str | Sequence[str]] | None = None,
    drop_optimizer_state: bool = False,
    time: float | None = None,
    on_error: OnError = "raise",
) -> ImportReport:
    """Import tables from a Monolith checkpoint: single hash tables and native multi-tables, plain or Snappy.

    The state of all of Monolith's optimizers except batch_softmax is imported. The powers of the betas of
    Adam and AMSGrad become the update count of a row, so these need bias_correction="row". Ids are not
    changed.

    Args:
        collection: The tables to fill.
        path: The directory `model.ckpt-STEP.assets`, or `model.ckpt-STEP`.
        tables: Our table -> its name in Monolith, or a list of names whose rows belong together (one for each
            parameter server). Default: all tables of the collection, under their own names. Rows of a name
            that several multi-tables have are merged.
        drop_optimizer_state: Whether to start with fresh optimizer state.
        time: Seconds, the last-update time of rows without one. Default: now.
        on_error: See `RowImport`.

    Returns:
        What was imported, and what was left out.

    Raises:
        CheckpointError: A set of files is not complete, a file is damaged, entries do not match the table, or
            optimizers differ and drop_optimizer_state is not set. The message has the file and the byte.
            Nothing is written.
        InputError: An argument is wrong.
    """
    into = RowImport(collection, tables, time=time, on_error=on_error)
    wanted = _wanted({name: name for name in into.configs} if tables is None else tables)
    path = checks.path(path, "import_monolith: path")
    checks.flag(drop_optimizer_state, "import_monolith: drop_optimizer_state")
    sources = find_sources(path)
    _check_names(path, wanted, sources, into.left_out)
    readers = {
        name: _ShardReader(config, drop_optimizer_state, into.time) for name, config in into.configs.items()
    }
    for name in into.configs if drop_optimizer_state else ():
        into.left_out[f"{name}: optimizer state"] = "drop_optimizer_state=True, so it starts fresh"

    def walk() -> Iterator[ImportedRows]:
        for reader in readers.values():
            reader.odd = 0
        for source in sources:
            yield from _pieces(source, wanted, readers)

    report = into.run(walk)
    for name, reader in readers.items():
        if reader.odd:
            report.left_out[f"{name}: beta1_power of {reader.odd} rows"] = (
                "it does not match beta2_power, from which the update count was computed (Monolith's own "
                "restore confuses the two)"
            )
    return report


class _ShardReader:
    """Converts entries to rows of one table. odd: number of rows with inconsistent beta powers."""

    def __init__(self, config: TableConfig, drop_state: bool, time: int) -> None:
        self.config = config
        self.layout = _layout(config, drop_state)
        self.odd = 0
        self._time = time

    def piece(self, where: str, entries: Entries) -> ImportedRows:
        """Convert the state and the times of some entries."""
        times = entries.times
        if times.numel() and not 0 <= int(times.min()) <= int(times.max()) <= MAX_TIME:
            wrong = int(entries.ids[(times < 0) | (times > MAX_TIME)][0])
            raise CheckpointError(
                f"{where}: the last-update time of id {wrong} is not within 0 .. {MAX_TIME}"
            )
        return ImportedRows(
            self.config.name,
            where,
            entries.ids,
            entries.floats[:, : self.config.dim],
            self._state(where, entries) if self.layout.reads_state else {},
            torch.where(times == 0, self._time, times),
        )

    def _state(self, where: str, entries: Entries) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for number, segment in enumerate(self.config.segments):
            names = _OPTIMIZERS[segment.optimizer.name][1]
            places = self.layout.segments[number].pieces
            found = {
                name: entries.floats[:, start : start + size]
                for (_, name), (_, start, size) in zip(names, places, strict=True)
            }
            if isinstance(segment.optimizer, Adam):
                power1, power2 = (found.pop(name) for name in _POWERS)
                found["count"] = self._count(where, entries.ids, power1, power2, segment.optimizer.betas)
            state |= {f"{number}/{name}": values for name, values in found.items()}
        return state

    def _count(
        self, where: str, ids: Tensor, power1: Tensor, power2: Tensor, betas: tuple[float, float]
    ) -> Tensor:
        count, odd = counts(power1, power2, betas)
        wrong = count.isnan()[:, 0]
        if bool(wrong.any()):
            raise CheckpointError(
                f"{where}: the beta powers of id {int(ids[wrong][0])} (table {self.config.name!r}) are not "
                f"powers of betas={betas}: give Adam the betas of the training, or drop_optimizer_state=True"
            )
        self.odd += odd
        return count


def counts(power1: Tensor, power2: Tensor, betas: tuple[float, float]) -> tuple[Tensor, int]:
    """Compute the number of updates t from beta1 ** (t + 1) and beta2 ** (t + 1)."""
    # power1: float32 [n, 1]; power2: float32 [n, 1]; returns: t, float32 [n, 1], NaN where the numbers are
    # not such powers.
    (first, known1, slack1), (second, known2, slack2) = (
        _exponent(power.double(), float(np.float32(beta)))
        for power, beta in zip((power1, power2), betas, strict=True)
    )
    other = torch.where(known1, first, torch.maximum(first, second))
    count = torch.where(known2, _rounded(second, slack2), _rounded(other, slack1))
    agree = (first - second).abs() <= 0.5 + slack2
    count = torch.where(known1 & known2 & agree & ~count.isnan(), first.round(), count)
    odd = known1 & known2 & ~agree & ~count.isnan()
    return count.float(), int(odd.sum())


def _exponent(power: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """t of beta ** (t + 1), float64; whether the power determines t; the possible error of t."""
    # A vanished power gives a t that is large enough to leave no correction.
    vanished = (power >= 0) & (power < _VANISHED)
    if beta == 0:
        return torch.ones_like(power), torch.zeros_like(vanished), torch.zeros_like(power)
    exponent = torch.log(power) / math.log(beta) - 1
    exponent = torch.where(vanished, math.ceil(math.log(_VANISHED) / math.log(beta)), exponent)
    # A product of t factors has at most t roundings; their effect on t grows as beta approaches 1.
    return exponent, ~vanished, 0.02 + (exponent + 2) * 2**-23 / -math.log(beta)


def _rounded(t: Tensor, slack: Tensor) -> Tensor:
    """t rounded to an integer, or NaN if it is not close to one."""
    return torch.where(((t - t.round()).abs() <= slack) & (t > -0.5), t.round(), math.nan)


def _layout(config: TableConfig, drop_state: bool) -> EntryLayout:
    """The layout of an entry of this table. Raises InputError if Monolith does not have an optimizer."""
    if drop_state:
        return EntryLayout(config.dim, config.dim, False, False, ())
    segments, at = [], config.dim
    for segment in config.segments:
        optimizer = segment.optimizer.name
        if optimizer not in _OPTIMIZERS:
            raise InputError(
                f"table {config.name!r}: Monolith has no {optimizer} whose state could be imported; pass "
                "drop_optimizer_state=True to start with fresh state"
            )
        if isinstance(segment.optimizer, Adam) and not segment.optimizer.counts_rows:
            raise InputError(
                f"table {config.name!r}: Monolith corrects the bias of Adam by the updates of each row; give "
                'the table Adam(bias_correction="row"), or pass drop_optimizer_state=True'
            )
        kind, names = _OPTIMIZERS[optimizer]
        pieces = []
        for field, name in names:
            size = 1 if name in _POWERS or optimizer == "group_adagrad" else segment.dim
            pieces.append((field, at, size))
            at += size
        segments.append(SegmentLayout(kind, not names, tuple(pieces)))
    needs_state = any(segment.pieces for segment in segments)
    return EntryLayout(config.dim, at, True, needs_state, tuple(segments))


# ---- tables


def _wanted(tables: Mapping[str, str | Sequence[str]]) -> dict[str, str]:
    """Our table by Monolith's name."""
    wanted: dict[str, str] = {}
    for ours, theirs in tables.items():
        for name in [theirs] if isinstance(theirs, str) else theirs:
            if wanted.setdefault(name, ours) != ours:
                raise InputError(
                    f"import_monolith: tables maps {name!r} to both {wanted[name]!r} and {ours!r}"
                )
    return wanted


def _ours(source: EntrySource, name: str, wanted: Mapping[str, str]) -> str | None:
    """Our table for a table of a file, or None."""
    if source.tables != ((name, None),):
        return wanted.get(name)
    return next((ours for theirs, ours in wanted.items() if file_name(theirs) == name), None)


def _check_names(
    path: Path, wanted: Mapping[str, str], sources: Sequence[EntrySource], left_out: dict[str, str]
) -> None:
    found: set[str] = set()
    entries: Counter[str] = Counter()
    for source in sources:
        for name, count in source.tables:
            if _ours(source, name, wanted) is None:
                entries[name] += count or 0
            else:
                found |= {name}
    for theirs, ours in wanted.items():
        if theirs not in found and file_name(theirs) not in found:
            known = ", ".join(map(repr, sorted({name for s in sources for name, _ in s.tables})[:20]))
            raise CheckpointError(
                f"{path}: there is no table {theirs!r} for {ours!r} (tables: {known}); name it in tables="
            )
    for name, count in entries.items():
        filters = "; hash filters are not imported" if name.startswith("hash_filter_") else ""
        left_out[f"table {name!r} of the checkpoint"] = (
            "not requested" + (f", {count} rows" if count else "") + filters
        )


def _pieces(
    source: EntrySource, wanted: Mapping[str, str], readers: Mapping[str, _ShardReader]
) -> Iterator[ImportedRows]:
    goals = [(_ours(source, name, wanted), count) for name, count in source.tables]
    if not any(ours for ours, _ in goals):
        return
    file = EntryFile(source.path)
    for ours, count in goals:
        if ours is None:
            file.skip(count or 0)
            continue
        for entries in file.read(readers[ours].layout, count):
            yield readers[ours].piece(str(source.path), entries)
    file.finish()
