"""Imports the hash tables of a Monolith checkpoint, with optimizer state and times.

`checkpoint_files` finds the files, `entry_dumps` reads the entries. This module maps tables to ours and
converts Monolith's optimizer state.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megalith.checkpoint.importers import ImportedRows, ImportReport, OnError, RowImport
from megalith.compat.monolith.checkpoint_files import EntrySource, file_name, find_sources
from megalith.compat.monolith.entry_dumps import Entries, EntryFile, EntryLayout, SegmentLayout
from megalith.errors import CheckpointError, InputError
from megalith.nn import EmbeddingCollection
from megalith.ops import checks
from megalith.table import TableConfig
from megalith.table.optimizers import Adam
from megalith.table.table_data import MAX_TIME

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
