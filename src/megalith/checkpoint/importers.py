"""Importers: fill the tables of a collection from files of other systems, and report what was imported.

`import_torch` reads the weights of nn.Embedding and nn.EmbeddingBag; a row's id is its index.

`RowImport` is the part that all importers share. An importer provides a function that iterates over all rows
in chunks of bounded size. It is called twice: first to validate all rows, then to write them, so that a bad
file is rejected before any table changes. With several ranks each rank iterates over all rows, and its shards
keep the rows that it owns.
"""

from __future__ import annotations

import time as clock
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megalith.errors import CheckpointError, InputError, UsageError
from megalith.nn import EmbeddingCollection
from megalith.ops import checks
from megalith.ops.checks import all_finite
from megalith.table import Chunk, TableConfig
from megalith.table.table_data import MAX_TIME

__all__ = ["ImportReport", "import_torch"]


OnError = Literal["raise", "skip"]
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class ImportReport:
    """The result of an import.

    Attributes:
        rows: Number of rows read, by table of the collection.
        kept: Number of rows now in this process's table, by table.
        left_out: What was not imported, with the reason.
    """

    rows: dict[str, int]
    kept: dict[str, int]
    left_out: dict[str, str]


@dataclass(frozen=True)
class ImportedRows:
    """Some rows of a table."""

    table: str  # The name of the table in the collection
    where: str  # The file, for messages
    ids: Tensor  # int64 [n]
    rows: Tensor  # Weights, float32 [n, dim]
    # Optimizer state by "segment number/name", float32 [n, size]; empty if it starts fresh
    state: Mapping[str, Tensor]
    time: Tensor  # Last-update times in seconds, int64 [n]


ReadRows = Callable[[], Iterable[ImportedRows]]


class RowImport:
    """An import into tables of a collection."""

    def __init__(
        self,
        collection: EmbeddingCollection,
        tables: Mapping[str, object] | None,
        *,
        time: float | None = None,
        on_error: OnError = "raise",
    ) -> None:
        if not isinstance(collection, EmbeddingCollection):
            raise InputError(f"an import needs an EmbeddingCollection, got {type(collection).__name__}")
        if tables is not None and not (isinstance(tables, Mapping) and tables):
            raise InputError(
                f'tables must map tables to names in the source ({{"user": "name"}}), got {tables!r}'
            )
        checks.one_of(on_error, ("raise", "skip"), "on_error")
        self.shards = collection.shards
        self.configs: dict[str, TableConfig] = {}
        self.left_out: dict[str, str] = {}
        self.time = _seconds(time)
        self._skip = on_error == "skip"
        stats = self.shards.stats()
        for name in self.shards.configs if tables is None else tables:
            self.shards.check_name(name)
            self.configs[name] = self.shards.configs[name]
            if stats[name].rows:
                raise UsageError(
                    f"table {name!r} already holds {stats[name].rows} rows: import into a new collection, or "
                    "clear it first (collection.shards.clear())"
                )

    def run(self, read_rows: ReadRows) -> ImportReport:
        """Validate all rows, then write them."""
        read, bad = Counter(dict.fromkeys(self.configs, 0)), Counter[str]()
        for piece in read_rows():
            read[piece.table] += piece.ids.numel()
            bad[piece.table] += int((~self._usable(piece)).sum())
        self.shards.reserve(read)
        for piece in read_rows():
            self._write(piece)
        kept = {name: stats.rows for name, stats in self.shards.stats().items() if name in self.configs}
        for name, rows in read.items():
            if bad[name]:
                self.left_out[f"{name}: {bad[name]} rows"] = "they contain NaN or Inf"
            again = rows - bad[name] - kept[name]
            if again and self.shards.world_size == 1:
                self.left_out[f"{name}: {again} rows"] = (
                    "their ids occur again, and the last row of an id is kept"
                )
        return ImportReport(dict(read), kept, self.left_out)

    def _usable(self, piece: ImportedRows) -> Tensor:
        """Return which rows are finite, bool [n]; unless such rows are skipped, raise if one is not."""
        finite = torch.ones(piece.ids.numel(), dtype=torch.bool, device="cpu")
        for values in (piece.rows, *piece.state.values()):
            if not all_finite(values):
                finite &= torch.isfinite(values).all(1)
        if not self._skip and not bool(finite.all()):
            first = int(piece.ids[~finite][0])
            raise CheckpointError(
                f"{piece.where}: the row of id {first} (table {piece.table!r}) contains NaN or Inf; "
                'on_error="skip" leaves such rows out'
            )
        return finite

    def _write(self, piece: ImportedRows) -> None:
        state = piece.state or fresh_state(self.configs[piece.table], piece.ids.numel())
        chunk = Chunk(piece.ids, piece.rows, state, piece.time)
        usable = self._usable(piece)
        if not bool(usable.all()):
            chunk = Chunk(
                chunk.ids[usable],
                chunk.rows[usable],
                {key: values[usable] for key, values in state.items()},
                chunk.time[usable],
            )
        self.shards.restore(piece.table, chunk)


def fresh_state(config: TableConfig, n: int) -> dict[str, Tensor]:
    """Return the optimizer state of rows that were never trained."""
    # returns: float32 [n, size] by "segment number/name".
    return {c.key: torch.full((n, c.end - c.start), c.initial, device="cpu") for c in config.state_columns}


def spread_state(config: TableConfig, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split the optimizer state of whole rows into that of the table's segments."""
    # whole: state by name: float32 [n, dim], of which each segment takes its columns, or [n, 1] for one
    # number per row.
    state, start = {}, 0
    for number, segment in enumerate(config.segments):
        end = start + segment.dim
        for kept in segment.optimizer.states(segment.dim):
            values = whole[kept.name]
            alone = values.shape[1] == 1 and kept.size == 1
            state[f"{number}/{kept.name}"] = values if alone else values[:, start:end]
        start = end
    return state


def optimizer_of(config: TableConfig) -> str:
    """Name the optimizer of a table."""
    names = [segment.optimizer.name for segment in config.segments]
    return names[0] if len(set(names)) == 1 else " and ".join(names)


def pieces_of(rows: int, floats: int) -> Iterator[slice]:
    """Split rows into slices of bounded size."""
    size = chunk_rows(floats)
    return (slice(at, min(rows, at + size)) for at in range(0, rows, size))


def chunk_rows(floats: int) -> int:
    """Return the number of rows to import at a time."""
    return max(1, min(65_536, CHUNK_BYTES // (4 * floats + 16)))


def _seconds(time: float | None) -> int:
    if time is None:
        return int(clock.time())
    if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time <= MAX_TIME:
        raise InputError(f"time must be seconds between 0 and {MAX_TIME}, got {time!r}")
    return int(time)


_STATE: dict[str, dict[str, str]] = {
    "sgd": {},
    "adagrad": {"sum": "sum"},
    "rowwise_adagrad": {"sum": "sum"},
    "adam": {"m": "exp_avg", "v": "exp_avg_sq", "count": "step"},
}
"""The state names of our optimizers, and the names that torch.optim and TorchRec's RowWiseAdagrad have."""


def import_torch(
    collection: EmbeddingCollection,
    state_dict: Mapping[str, Any],
    tables: Mapping[str, str],
    *,
    ids: Mapping[str, Tensor] | None = None,
    optimizer_state: Mapping[str, Mapping[str, Any]] | None = None,
    time: float | None = None,
    on_error: OnError = "raise",
) -> ImportReport:
    """Fill tables with the rows of embedding weights; row i becomes the row of id i, or of `ids[table][i]`.

    Args:
        collection: The collection; the tables to fill must be empty.
        state_dict: The state_dict of a model, from `torch.load(path, weights_only=True, mmap=True)`.
        tables: For each table, the key of its weight: [rows, dim] of any float dtype.
        ids: For some tables, the distinct ids of the rows of the weight, int64 or int32 [rows], such as the
            raw ids of a vocabulary in the order of its indices. Without them, row i is that of id i.
        optimizer_state: For each table, the state that torch.optim.Adagrad, Adam or SparseAdam, or TorchRec's
            RowWiseAdagrad, has for the weight, `optimizer.state[weight]`. Without it the state starts fresh.
        time: The last-update time of the rows in seconds; None is now.
        on_error: "raise" rejects rows with NaN or Inf; "skip" leaves them out and counts them.

    Returns:
        The report.

    Raises:
        InputError: A key is missing, or a weight or its state does not match the table. Nothing was written.
    """
    into = RowImport(collection, {} if tables is None else tables, time=time, on_error=on_error)
    if not isinstance(state_dict, Mapping):
        raise InputError(
            f"import_torch: state_dict must map names to tensors, got {type(state_dict).__name__}"
        )
    given = {} if optimizer_state is None else optimizer_state
    checks.mapping(given, "import_torch: optimizer_state", '{"user": optimizer.state[weight]}')
    if extra := sorted(set(given) - set(tables)):
        raise InputError(f"import_torch: optimizer_state is given for {extra}, which are not in tables")
    chosen = checks.mapping({} if ids is None else ids, "import_torch: ids", '{"user": raw_ids}')
    if extra := sorted(set(chosen) - set(tables)):
        raise InputError(f"import_torch: ids are given for {extra}, which are not in tables")
    weights, states, all_ids = {}, {}, {}
    for name, key in tables.items():
        config = into.configs[name]
        weights[name] = _weight(config, state_dict, key)
        rows = weights[name].shape[0]
        all_ids[name] = _ids(name, chosen[name], rows) if name in chosen else torch.arange(rows, device="cpu")
        if name in given:
            states[name] = _state(config, weights[name].shape[0], given[name])
            if "m" in states[name] and "count" not in states[name]:
                into.left_out[f"{name}: step"] = (
                    "Adam's bias correction continues from the global step: set global_step to "
                    f"{given[name].get('step')}"
                )
        elif config.state_columns:
            into.left_out[f"{name}: optimizer state"] = "optimizer_state was not given, so it starts fresh"

    def read_rows() -> Iterator[ImportedRows]:
        for name, weight in weights.items():
            config = into.configs[name]
            for part in pieces_of(weight.shape[0], config.row_floats):
                n = part.stop - part.start
                yield ImportedRows(
                    name,
                    f"state_dict[{tables[name]!r}]",
                    all_ids[name][part],
                    _plain(weight[part]),
                    spread_state(config, _part(states[name], part, n)) if name in states else {},
                    torch.full((n,), into.time, device="cpu"),
                )

    return into.run(read_rows)


def _ids(table: str, given: Any, rows: int) -> Tensor:
    where = f"table {table!r}: import_torch: ids"
    ids = checks.int64(given, where).cpu()
    if ids.shape != (rows,):
        raise InputError(f"{where} are {list(ids.shape)}, but the weight has {rows} rows: one id per row")
    values, counts = ids.unique(return_counts=True)
    if values.numel() < rows:
        raise InputError(f"{where}: {int(values[counts > 1][0])} occurs twice: ids must be distinct")
    return ids


def _weight(config: TableConfig, state_dict: Mapping[str, Any], key: str) -> Tensor:
    if key not in state_dict:
        known = ", ".join(repr(k) for k, v in state_dict.items() if isinstance(v, Tensor) and v.dim() == 2)
        raise InputError(
            f"table {config.name!r}: the state_dict has no key {key!r} (its matrices: {known or 'none'})"
        )
    weight = state_dict[key]
    where = f"table {config.name!r}: state_dict[{key!r}]"
    if not isinstance(weight, Tensor) or type(weight) not in (Tensor, torch.nn.Parameter):
        raise InputError(
            f"{where} is a {type(weight).__name__}, not a plain tensor (use full_tensor() of a "
            "DTensor, gather() of a ShardedTensor)"
        )
    if weight.layout != torch.strided or weight.is_meta or not weight.is_floating_point():
        raise InputError(
            f"{where} must hold dense floats, got {weight.dtype}, {weight.layout}, on {weight.device}"
        )
    if weight.dim() != 2 or weight.shape[1] != config.dim:
        raise InputError(f"{where} is {list(weight.shape)}, the table needs [rows, {config.dim}]")
    return weight


def _state(config: TableConfig, rows: int, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the state by our names: float [rows, dim], or [] for one number for all rows."""
    where = f"table {config.name!r}: optimizer_state"
    checks.mapping(given, where, '{"sum": ...}')
    wanted: dict[str, str] = {}
    for segment in config.segments:
        by_row = segment.optimizer.name == "rowwise_adagrad"
        if segment.optimizer.name not in _STATE or (by_row and len(config.segments) > 1):
            raise InputError(
                f"{where}: torch.optim has no state that {optimizer_of(config)} could continue with"
            )
        kept = {state.name for state in segment.optimizer.states(segment.dim)}
        wanted |= {ours: theirs for ours, theirs in _STATE[segment.optimizer.name].items() if ours in kept}
    if missing := sorted(set(wanted.values()) - set(given)):
        raise InputError(
            f"{where} has {sorted(given)} but lacks {missing}, which {optimizer_of(config)} needs: is it the "
            "same optimizer?"
        )
    extra = sorted(k for k in set(given) - {"step", *wanted.values()} if given[k] is not None)
    if extra:
        raise InputError(f"{where} has {extra}, which {optimizer_of(config)} does not use")
    state = {}
    for ours, theirs in wanted.items():
        value = given[theirs]
        if type(value) not in (Tensor, torch.nn.Parameter, int, float):
            raise InputError(f"{where}: {theirs!r} is a {type(value).__name__}, not a plain tensor")
        value = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
        shape = () if theirs == "step" else (rows, 1 if by_row else config.dim)
        if value.shape != shape or value.layout != torch.strided or value.is_meta:
            raise InputError(f"{where}: {theirs!r} is {list(value.shape)}, expected {list(shape)}")
        state[ours] = value
    return state


def _part(state: Mapping[str, Tensor], part: slice, n: int) -> dict[str, Tensor]:
    return {
        name: _plain(value[part]) if value.dim() else torch.full((n, 1), float(value), device="cpu")
        for name, value in state.items()
    }


def _plain(values: Tensor) -> Tensor:
    return values.detach().to("cpu", torch.float32).contiguous()
