"""Servable: one exported version in memory, which computes scores from features.

A standalone model holds its rows. A ps part, and an export of Shards, has rows but no model. An entry holds
the model and fetches its rows through a callable. Rows and dense weights can be overwritten in memory; the
files never change. Files, ids, rows, dense values and the outputs of the program are validated here; the
modules behind it trust what they get.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megalith.errors import ExportError, InputError, RemoteError, UnknownNameError, UsageError
from megalith.library import native_module, span
from megalith.nn.compiled_batch import CompiledBatch, FeaturePlan, column_of, real_places
from megalith.ops.checks import all_finite, callback, flag, instance, kind, mapping
from megalith.ops.checks import path as check_path
from megalith.ops.pooling import Bags, Pooling, covered, pool_flat
from megalith.ragged import Ragged
from megalith.serving.export.compiled_program import use_library
from megalith.serving.export.dense_program import DenseProgram, ProgramCopy
from megalith.serving.export.frozen_rows import FrozenRows
from megalith.serving.export.overlay import Compactor, Overlay, RowsByTable, find_rows, inherit_rows
from megalith.serving.export.signature import ENTRY, OUTPUT_DTYPES, Signature, read_examples
from megalith.shards.routed_lookup import joint_weights
from megalith.storage.store import LocalStore


def check_files(directory: Path, signature: Signature, *, checksums: bool) -> None:
    """Check that the files of a version are complete."""
    store = LocalStore(directory)
    tables = (table.file for table in signature.tables.values())
    for entry in (*tables, signature.program, signature.examples):
        if entry is None:
            continue
        try:
            if checksums:
                store.verify(entry, ExportError)
            elif store.size(entry.path) != entry.bytes:
                raise ExportError(f"{directory / entry.path} does not have {entry.bytes} bytes")
        except OSError as error:
            raise ExportError(str(error)) from None


def open_rows(
    directory: Path, signature: Signature, *, first: Sequence[str], in_memory: bool
) -> dict[str, FrozenRows]:
    """Open the rows of all tables."""
    rest = [name for name in signature.tables if name not in first]
    found = {}
    for name in (*first, *rest):
        table = signature.tables[name]
        assert table.file is not None  # the signature was checked
        path = directory / table.file.path
        rows = FrozenRows(path, table.format(signature.precision), in_memory=in_memory)
        if len(rows) != table.rows:
            raise ExportError(f"{path} holds {len(rows)} rows, not {table.rows}")
        found[name] = rows
    return found


def check_ids(signature: Signature, table: str, ids: Tensor) -> None:
    """Check the form of ids of a table."""
    # ids: int64 [n].
    if not isinstance(table, str) or table not in signature.tables:
        known = ", ".join(map(repr, signature.tables))
        raise UnknownNameError(f"unknown table {table!r} (known: {known})")
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 1 or not ids.is_cpu:
        raise InputError(f"table {table!r}: ids must be int64 [n] on the CPU, got {_describe(ids)}")


def check_owner(signature: Signature, table: str, ids: Tensor) -> None:
    shard = signature.shard
    if shard is None:
        return
    owners = signature.tables[table].router().owner(ids)
    if bool((owners != shard).any()):
        wrong = int(ids[owners != shard][0])
        raise InputError(
            f"table {table!r}: id {wrong} belongs to another part than {signature.part} of "
            f"{signature.sub_graph_num}, version {signature.version}"
        )


def check_rows(signature: Signature, rows: RowsByTable, removed: Mapping[str, Tensor]) -> None:
    """Check the form of rows to write and of ids to remove."""
    # rows: table -> (ids int64 [n], rows float32 [n, dim]); removed: table -> ids int64 [n].
    mapping(rows, "rows", '{"user": (ids, rows)}')
    mapping(removed, "removed", '{"user": ids}')
    if signature.part == ENTRY and (rows or removed):
        raise InputError(f"{signature.name} holds no rows: push them to the ps parts")
    for table, pair in rows.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(f"rows: table {table!r} must have a pair (ids, rows), got {kind(pair)}")
        ids, values = pair
        check_ids(signature, table, ids)
        shape = [ids.numel(), signature.tables[table].dim]
        is_cpu = isinstance(values, Tensor) and values.is_cpu
        if not is_cpu or values.dtype != torch.float32 or list(values.shape) != shape:
            raise InputError(
                f"table {table!r}: rows must be float32 {shape} on the CPU, got {_describe(values)}"
            )
    for table, ids in removed.items():
        check_ids(signature, table, ids)


def _describe(given: object) -> str:
    if not isinstance(given, Tensor):
        return kind(given)
    return f"{given.dtype} {list(given.shape)}" + ("" if given.is_cpu else f" on {given.device}")


def check_features(plan: FeaturePlan, features: Any) -> None:
    """Check the names of the features of a request."""
    if not isinstance(features, Mapping):
        raise InputError(f"features must be a dict of columns by name, got {kind(features)}")
    missing = plan.features.keys() - features.keys()
    if missing:
        raise UnknownNameError(f"feature {min(missing)!r} is missing from the request")


def check_dense(signature: Signature, dense: Tensor | None, size: int) -> Tensor | None:
    """Check the dense values of a request."""
    width = signature.num_dense
    if width == 0:
        if dense is not None:
            raise InputError("this model takes no dense values")
        return None
    fits = isinstance(dense, Tensor) and tuple(dense.shape) == (size, width)
    if dense is None or not fits or not dense.is_floating_point() or not dense.is_cpu:
        got = f"{dense.dtype} {list(dense.shape)}" if isinstance(dense, Tensor) else kind(dense)
        raise InputError(f"{signature.dense_name} must be float32 {[size, width]}, got {got}")
    return dense.to(torch.float32)


def check_outputs(directory: Path, signature: Signature, outputs: Sequence[Any], size: int) -> None:
    """Check what the program of a version returns."""
    for spec, tensor in zip_longest(signature.outputs, outputs):
        if (
            spec is None
            or not isinstance(tensor, Tensor)
            or tensor.dtype != OUTPUT_DTYPES[spec.dtype]
            or tuple(tensor.shape) != (size, *spec.shape)
        ):
            raise ExportError(
                f"{directory}: the program does not return the outputs that the signature describes"
            )


# ---- what a request needs besides its ids, compiled once for each batch size
#
# Most requests have one id for each feature and row. Their rows are read, and reduced to the inputs of the
# dense program, in one native call from the bytes of the ids. For other requests, they are gathered in one
# buffer, table after table, and pooled from there.


class Gathering:
    """A pooling over the rows of one buffer."""

    def __init__(self, sizes: Mapping[str, int], pooling: Pooling, dims: Mapping[str, int]) -> None:
        self._outputs = pooling.outputs
        self._dim = max(dims[name] for name in sizes)
        self._shapes = {name: (n, dims[name]) for name, n in sizes.items()}
        self._sizes = [n * dim for n, dim in self._shapes.values()]
        index = []
        weights = joint_weights(pooling, list(sizes), list(sizes.values()))
        self._bags: list[Bags] = []
        begin = at = 0
        for name, (n, dim) in self._shapes.items():
            index.append(torch.arange(at, at + n * dim, dim, device="cpu"))
            for each in pooling.of(name):
                offsets = each.offsets + begin if begin else each.offsets
                own = None if each.weights is None else weights
                self._bags.append(Bags(offsets, each.parts, own, each.divisor, each.shared))
            begin += n
            at += n * dim
        self._index = torch.cat(index)
        self._covered = covered(self._bags, self._outputs)

    def plan(self, features: Sequence[int], size: int) -> RowPlan:
        """Compile the pooling of requests with one id for each feature and row."""
        native: Any = native_module()
        bags = [each.native for each in self._bags]
        arguments = (bags, self._outputs, self._index, self._dim, sum(self._sizes), list(features), size)
        return RowPlan(native.PoolPlan(*arguments), self._outputs, self._covered)

    def rows(self) -> Gathered:
        """Allocate the buffer of a request."""
        buffer = torch.empty(sum(self._sizes), device="cpu")
        parts = zip(self._shapes.items(), buffer.split(self._sizes), strict=True)
        return Gathered(buffer, {name: part.view(shape) for (name, shape), part in parts})

    def pool(self, gathered: Gathered) -> list[Tensor]:
        """Reduce the rows of a request."""
        return pool_flat(gathered.buffer, self._index, self._bags, self._outputs, self._dim, self._covered)


class RowPlan:
    """A compiled pooling."""

    def __init__(self, native: Any, shapes: Sequence[tuple[int, int]], covered: Sequence[bool]) -> None:
        self.native = native
        self._outputs = [
            (shape, torch.empty if whole else torch.zeros)
            for shape, whole in zip(shapes, covered, strict=True)
        ]

    def outputs(self) -> list[Tensor]:
        """Allocate the outputs of a request, float32."""
        return [make(shape, dtype=torch.float32) for shape, make in self._outputs]


@dataclass(frozen=True)
class Gathered:
    """Rows to fill, all in one buffer."""

    buffer: Tensor
    rows: dict[str, Tensor]


_MAX_COMPILED = 256  # Maximum number of batch sizes for which a compiled request is cached
_MAX_COMPILED_SIZE = 1024  # The largest cached batch size: clients choose the size, and memory grows with it


@dataclass(frozen=True)
class RequestPlan:
    """A compiled request: the ids of each table, and where their rows go."""

    batch: CompiledBatch
    gathering: Gathering
    ids: dict[str, Tensor]


@dataclass(frozen=True)
class PlainPlan:
    """A compiled request with one id for each feature and row."""

    batch: CompiledBatch
    gathering: Gathering
    rows: RowPlan


class RequestPlans:
    """Compiles requests to one model. Thread-safe."""

    def __init__(self, plan: FeaturePlan, dims: Mapping[str, int], masks: Mapping[str, str]) -> None:
        self.plan = plan
        self._dims = dims
        self._masks = masks
        self._compiled: dict[int, PlainPlan] = {}
        self._features = [len(own) for own in plan.tables.values()]
        shared = any(feature.shared for feature in plan.features.values())
        self.plain_features: tuple[str, ...] = (
            () if shared else tuple(feature.name for own in plan.tables.values() for feature in own)
        )
        """The features in the order of the tables; empty if one of them is shared by the rows of a batch."""

    def columns(self, features: Mapping[str, Any]) -> RequestPlan:
        """Compile columns of any kind."""
        columns = {name: column_of(f, features[name]) for name, f in self.plan.features.items()}
        batch = self.plan.compile(columns)
        sizes = {table: ids.numel() for table, ids in batch.ids.items()}
        ids = {table: ids.to(torch.int64).contiguous() for table, ids in batch.ids.items()}
        return RequestPlan(batch, Gathering(sizes, batch.pooling, self._dims), ids)

    def plain(self, size: int) -> PlainPlan:
        """Return the plan of a request with one id for each of `plain_features` and row."""
        compiled = self._compiled.get(size)
        if compiled is None:
            zeros = torch.zeros(size, dtype=torch.int64, device="cpu")
            made = self.columns(dict.fromkeys(self.plan.features, zeros))
            compiled = PlainPlan(made.batch, made.gathering, made.gathering.plan(self._features, size))
            if size <= _MAX_COMPILED_SIZE and len(self._compiled) < _MAX_COMPILED:
                self._compiled[size] = compiled
        return compiled

    def singles(self, ids: Tensor) -> RequestPlan:
        """Compile what `plain_ids` returned."""
        # ids: int64 [features * rows].
        size = ids.numel() // len(self.plain_features)
        plan = self.plain(size)
        parts = ids.split([count * size for count in self._features])
        return RequestPlan(plan.batch, plan.gathering, dict(zip(self.plan.tables, parts, strict=True)))

    def plain_ids(self, features: Mapping[str, Any]) -> Tensor | None:
        """Concatenate the ids of a request with one id for each feature and row."""
        # returns: int64 [features * rows], in the order of `plain_features`.
        columns: list[Tensor] = []
        for name in self.plain_features:
            ids = features[name]
            if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.is_nested or ids.dim() != 1:
                return None
            if not ids.is_cpu or not ids.numel() or ids.shape != (columns or [ids])[0].shape:
                return None
            columns.append(ids)
        return torch.cat(columns) if columns else None

    def pooled(self, request: RequestPlan, gathered: Gathered) -> dict[str, Any]:
        """Return the inputs of the dense program."""
        with span("megalith.pool"):
            return self.program_inputs(request.batch, request.gathering.pool(gathered))

    def program_inputs(self, batch: CompiledBatch, outputs: Sequence[Tensor]) -> dict[str, Any]:
        """Give pooled rows their names."""
        rows = self.plan.assemble(batch, outputs)
        for name, of in self._masks.items():
            places = real_places(self.plan.features[of], batch.columns[of])
            rows[name] = places.expand(batch.size, -1)  # a shared feature has one row
        return rows


# {table: ids int64 [n]} -> {table: bool [n]}, whether an id has a row
HasRows = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


def count_missing(
    plan: FeaturePlan, features: Mapping[str, Ragged | Tensor], has_rows: HasRows
) -> dict[str, int]:
    """Count the ids without a row, in another pass over them. Such an id reads as zeros, so the scores of a
    request with a wrong kind of id look like any others."""
    ids = {}
    for name, feature in plan.features.items():
        column = column_of(feature, features[name])
        column = column if feature.combiner is None else feature.combiner.cut(column)
        ids[name] = column.values.to(torch.int64)
    asked = {table: torch.cat([ids[f.name] for f in own]) for table, own in plan.tables.items()}
    found = has_rows(asked)
    missing = {}
    for table, own in plan.tables.items():
        parts = found[table].split([ids[feature.name].numel() for feature in own])
        for feature, part in zip(own, parts, strict=True):
            count = part.numel() - int(part.sum())
            if count:
                missing[feature.name] = count
    return missing


# ---- the servable

Fetch = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
Tensors = Mapping[str, Tensor]
_NOTHING: Tensors = MappingProxyType({})


@dataclass
class ServingCounters:
    """Counts since the servable was opened."""

    ids_looked_up: int = 0  # Number of ids whose rows were read
    ids_missing: int = 0  # Number of them without a row


@dataclass(frozen=True)
class _Snapshot:
    """The overlay and the copy of the dense program in use, replaced together; without a model, no copy."""

    overlay: Overlay
    copy: ProgramCopy | None


class Servable:
    """An exported version, or a part of one. Thread-safe; one thread at a time writes.

    Args:
        directory: The directory of the version.
        fetch: For an entry: {table: ids int64 [n]} -> {table: rows float32 [n, dim]}.
        verify_files: Compare the checksums of all files first.
        in_memory: Read the files of rows instead of mapping them, so that a file that is overwritten or
            truncated later changes nothing.
        folder: Moves written rows from memory into mapped files. None: they stay in memory.
        compiled: Compute with the compiled library of the export, if it has one for this CPU and this version
            of torch. A library is code: only for an export that is trusted.

    Raises:
        ExportError: The directory is incomplete or damaged.
        UsageError: `fetch` is missing for an entry, or given for another part.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        fetch: Fetch | None = None,
        verify_files: bool = True,
        in_memory: bool = False,
        folder: Compactor | None = None,
        compiled: bool = False,
    ) -> None:
        self.directory = check_path(directory, "directory")
        self._folder = None if folder is None else instance(folder, Compactor, "folder")
        callback(fetch, "fetch")
        flag(verify_files, "verify_files")
        flag(in_memory, "in_memory")
        flag(compiled, "compiled")
        self.signature = Signature.read(self.directory)
        self.counters = ServingCounters()
        self._closed = False
        self._counting = threading.Lock()
        if (fetch is None) == (self.signature.part == ENTRY):
            raise UsageError(
                f"{self.directory}: an entry needs `fetch` to get its rows"
                if fetch is None
                else f"{self.directory} holds its own rows: only an entry takes `fetch`"
            )
        self._fetch = fetch
        check_files(self.directory, self.signature, checksums=verify_files)
        self._plans: RequestPlans | None = None
        self._program: DenseProgram | None = None
        self._frozen: dict[str, FrozenRows] = {}
        self._output_names = tuple(spec.name for spec in self.signature.outputs)
        self._outputs_checked = False
        if self.signature.program is not None:
            self._plans = RequestPlans(self.signature.plan(), self.signature.dims, self.signature.masks)
        if fetch is None:
            # Requests read their tables in the order of the plan; see `Overlay.served`.
            first = () if self._plans is None else tuple(self._plans.plan.tables)
            self._frozen = open_rows(self.directory, self.signature, first=first, in_memory=in_memory)
        if self.signature.program is not None:
            path = self.directory / self.signature.program.path
            self._program = DenseProgram(path)
            if compiled:
                use_library(self._program, path, self._random_inputs)
        self._snapshot = self._with(self._new_overlay())

    # ---- reading

    @property
    def plain_features(self) -> tuple[str, ...]:
        """The features in the order of the tables; empty unless requests with one id for each feature and row
        are read from their bytes (`predict_plain`)."""
        plans = self._plans
        return () if plans is None or self._fetch is not None else plans.plain_features

    def predict(self, features: Mapping[str, Any], dense: Tensor | None = None) -> dict[str, Tensor]:
        """Compute the scores of a batch.

        Args:
            features: Every feature by name, Ragged columns or tensors, as for an EmbeddingCollection.
            dense: float32 [B, num_dense].

        Returns:
            The outputs of the signature by name, each [B, ...].

        Raises:
            InputError: An input has a wrong dtype or shape.
            UnknownNameError: A feature is missing.
            UsageError: It holds rows without a model, or it is closed.
        """
        return self._predict(features, dense, self._fetch)

    def _predict(
        self, features: Mapping[str, Any], dense: Tensor | None, fetch: Fetch | None
    ) -> dict[str, Tensor]:
        plans, program, frozen = self._plans, self._program, self._frozen
        self._check_open()  # after the reads above, which `close` clears
        if plans is None or program is None:
            raise UsageError(
                f"{self.signature.name} holds rows without a model: request scores from the entry"
            )
        check_features(plans.plan, features)
        ids = plans.plain_ids(features)
        if fetch is None and ids is not None:
            size = ids.numel() // len(plans.plain_features)
            return predict_plain(
                self, [ids.numpy().tobytes()], size, check_dense(self.signature, dense, size)
            )
        with torch.inference_mode():
            with span("megalith.ids"):
                request = plans.columns(features) if ids is None else plans.singles(ids)
            values = check_dense(self.signature, dense, request.batch.size)
            gathered = request.gathering.rows()
            if fetch is not None:
                with span("megalith.rows"):
                    self._fill(gathered, request, fetch)
                # The dense weights are not held during the fetch, which may take long.
                outputs = program(plans.pooled(request, gathered), values)
            else:
                overlay, copy = self._hold_snapshot()
                try:
                    with span("megalith.rows"):
                        self._read(overlay, frozen, request.ids, gathered.buffer)
                    outputs = copy(plans.pooled(request, gathered), values)
                finally:
                    copy.release()
            return self._named(outputs, request.batch.size)

    def _named(self, outputs: Sequence[Tensor], size: int) -> dict[str, Tensor]:
        """Give the outputs their names; raise ExportError unless they are what the signature describes."""
        if not self._outputs_checked:
            check_outputs(self.directory, self.signature, outputs, size)
            self._outputs_checked = True  # the graph computes the same shapes for every request
        return dict(zip(self._output_names, outputs, strict=True))

    def _hold_snapshot(self) -> tuple[Overlay, ProgramCopy]:
        """Return the current overlay and program, which belong together; unchanged until `copy.release`."""
        while True:
            snapshot = self._snapshot
            assert snapshot.copy is not None  # `_predict` refuses rows without a model
            snapshot.copy.hold()
            if snapshot.copy is self._snapshot.copy:
                return snapshot.overlay, snapshot.copy
            snapshot.copy.release()  # it was replaced and may change

    def _fill(self, gathered: Gathered, request: RequestPlan, fetch: Fetch) -> None:
        """Fetch the rows of an entry's request."""
        if not gathered.buffer.numel():
            return
        fetched = fetch(request.ids)
        for name, out in gathered.rows.items():
            if name not in fetched or fetched[name].shape != out.shape:
                raise RemoteError(
                    f"{self.signature.name}: fetch must return float32 {list(out.shape)} for table {name!r}",
                    code="INTERNAL",
                )
            out.copy_(fetched[name])
            if fetch is self._fetch:  # parts do not report missing ids: their rows are zeros
                self._count(out.shape[0], int((out == 0).all(1).sum()))

    def count_missing(self, features: Mapping[str, Any]) -> dict[str, int]:
        """Count the ids of a request that have no row.

        An entry fetches the rows again for it, and counts rows of zeros.

        Args:
            features: As for `predict`.

        Returns:
            Feature -> number of its ids without a row; features that have none are left out.

        Raises:
            InputError: A feature has a wrong dtype or shape.
            UnknownNameError: A feature is missing.
            UsageError: It holds rows without a model, or it is closed.
        """
        plans, frozen, fetch = self._plans, self._frozen, self._fetch
        self._check_open()
        if plans is None:
            raise UsageError(f"{self.signature.name} holds rows without a model")
        check_features(plans.plan, features)

        def has_rows(asked: Mapping[str, Tensor]) -> dict[str, Tensor]:
            if fetch is not None:
                fetched = fetch(dict(asked))
                return {table: (fetched[table] != 0).any(1) for table in asked}
            return find_rows(asked, self.overlay, frozen)

        return count_missing(plans.plan, features, has_rows)

    def lookup(self, table: str, ids: Tensor) -> Tensor:
        """Return the rows of ids; an id without a row reads as zeros.

        Args:
            table: Name of the table.
            ids: int64 [n].

        Returns:
            float32 [n, dim].

        Raises:
            UnknownNameError: The table is unknown.
            InputError: The ids have a wrong dtype or shape, or belong to another part.
            UsageError: This is an entry, or it is closed.
        """
        frozen = self._frozen
        self._check_open()
        if self._fetch is not None:
            raise UsageError(f"{self.signature.name} holds no rows: look them up in the ps parts")
        if isinstance(ids, Tensor) and ids.dtype == torch.int32:
            ids = ids.to(torch.int64)
        check_ids(self.signature, table, ids)
        check_owner(self.signature, table, ids)
        ids = ids.contiguous()
        out = torch.empty(ids.numel(), self.signature.tables[table].dim, device="cpu")
        self._read(self.overlay, frozen, {table: ids}, out)
        return out

    def _read(self, overlay: Overlay, frozen: Mapping[str, FrozenRows], ids: Tensors, out: Tensor) -> None:
        """Read the rows of some tables, which are in the order of `frozen`, into one buffer."""
        counts = torch.tensor([ids[name].numel() if name in ids else 0 for name in frozen], device="cpu")
        every = torch.cat(list(ids.values())) if len(ids) > 1 else next(iter(ids.values()))
        self._count(every.numel(), overlay.served(frozen).read(every, counts, out))

    def _count(self, looked_up: int, missing: int) -> None:
        with self._counting:
            self.counters.ids_looked_up += looked_up
            self.counters.ids_missing += missing

    def warm_up(self) -> None:
        """Compute the export's examples once, so that the first request does not pay for lazy setup.

        An entry uses rows of zeros for them, because its parts may not be available yet.
        """
        if self.signature.examples is None or self._program is None:
            return
        fetch = None if self._fetch is None else self._zeros
        for example in read_examples(self.directory / self.signature.examples.path):
            self._predict(*example, fetch)

    @property
    def dense_program(self) -> DenseProgram | None:
        """The dense part; None without a model."""
        return self._program

    def _random_inputs(self, size: int) -> tuple[dict[str, Any], Tensor | None]:
        """Return random inputs of the dense part as those of a request with one id per feature and row."""
        plans, width = self._plans, self.signature.num_dense
        if plans is None or not plans.plain_features:
            raise UsageError(f"{self.signature.name} has no requests with one id for each feature and row")
        plan = plans.plain(size)
        rows = [torch.randn(output.shape, device="cpu") for output in plan.rows.outputs()]
        dense = torch.randn(size, width, device="cpu") if width else None
        return plans.program_inputs(plan.batch, rows), dense

    def _zeros(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        dims = self.signature.dims
        return {name: torch.zeros(each.numel(), dims[name], device="cpu") for name, each in ids.items()}

    # ---- writing

    @property
    def overlay(self) -> Overlay:
        """The rows written since the export."""
        return self._snapshot.overlay

    @property
    def dense_names(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the dense weights; empty without a model."""
        return {} if self._program is None else self._program.names

    @property
    def dense_weights(self) -> dict[str, Tensor]:
        """The dense weights in use."""
        return {} if self._program is None else self._program.weights

    def check(self, rows: RowsByTable, removed: Tensors = _NOTHING, dense: Tensors = _NOTHING) -> None:
        """Validate the arguments of `apply`.

        Args:
            rows: Table -> (ids int64 [n], rows float32 [n, dim]).
            removed: Table -> ids int64 [n].
            dense: Name -> dense weight.

        Raises:
            InputError: A tensor has a wrong dtype or shape, holds NaN or Inf, or is of another part.
            UnknownNameError: A table is unknown.
        """
        check_rows(self.signature, rows, removed)
        mapping(dense, "dense", '{"weight": tensor}')
        self.check_values(rows, removed, dense)

    def check_values(self, rows: RowsByTable, removed: Tensors, dense: Tensors) -> None:
        """Check the values of tensors whose form is checked.

        Args:
            rows: Table -> (ids, rows or their codes).
            removed: Table -> ids.
            dense: Name -> dense weight.

        Raises:
            InputError: A tensor holds NaN or Inf, or is of another part.
        """
        for table, (ids, values) in rows.items():
            check_owner(self.signature, table, ids)
            if values.dtype == torch.uint8:
                finite = self.signature.codes[table].are_finite(values)
            else:
                finite = all_finite(values)
            if not finite:
                raise InputError(f"table {table!r}: rows hold NaN or Inf")
        for table, ids in removed.items():
            check_owner(self.signature, table, ids)
        if dense:
            if self._program is None:
                raise InputError(f"{self.signature.name} has no dense weights")
            self._program.check(dense)

    def apply(self, rows: RowsByTable, removed: Tensors = _NOTHING, dense: Tensors = _NOTHING) -> None:
        """Write rows, then remove ids, then replace dense weights; write nothing if `check` raises.

        Args:
            rows: Table -> (ids int64 [n], rows float32 [n, dim]).
            removed: Table -> ids int64 [n].
            dense: Name -> dense weight.
        """
        self.check(rows, removed, dense)
        self.write(rows, removed, dense)

    def write(self, rows: RowsByTable, removed: Tensors = _NOTHING, dense: Tensors = _NOTHING) -> None:
        """Write arguments that passed `check` or `check_values`.

        Args:
            rows: Table -> (ids, rows or their codes).
            removed: Table -> ids.
            dense: Name -> dense weight.
        """
        self.overlay.apply(rows, removed)
        if self._folder is not None:
            self._folder.consider(self.overlay)
        if dense:
            self._snapshot = self._with(self.overlay, dense)

    def reset(self) -> None:
        """Restore the exported rows and weights in one step."""
        copy = None if self._program is None else self._program.reset()
        self._snapshot = _Snapshot(self._new_overlay(), copy)

    def stage(self, *, hides_base: bool = True) -> Overlay:
        """Return an empty overlay to fill and then `adopt`.

        Args:
            hides_base: Whether it will hold all rows, so that exported ones are not read; see `Overlay`.

        Returns:
            The overlay.
        """
        return self._new_overlay(hides_base=flag(hides_base, "hides_base"))

    def _new_overlay(self, *, hides_base: bool = False) -> Overlay:
        return Overlay(self.signature.dims, hides_base=hides_base, codes=self.signature.codes)

    def adopt(self, overlay: Overlay, dense: Mapping[str, Tensor] | None = None) -> None:
        """Replace the overlay, and dense weights, in one step.

        Args:
            overlay: The new overlay.
            dense: Name -> dense weight.

        Raises:
            InputError: The overlay has other tables, or a weight does not match.
        """
        self._check_other(overlay, dense)
        self._snapshot = self._with(overlay, dense)

    def inherit(self, overlay: Overlay, dense: Mapping[str, Tensor] | None = None) -> None:
        """Take over the overlay of another version, which keeps it, and dense weights.

        Only rows that differ from this version's exported rows are copied, so that overlays do not grow from
        version to version.

        Args:
            overlay: The overlay of the other version.
            dense: Name -> dense weight.

        Raises:
            InputError: The overlay has other tables, or a weight does not match.
        """
        self._check_other(overlay, dense)
        own = self._new_overlay()
        inherit_rows(own, overlay, self._frozen)
        self._snapshot = self._with(own, dense)

    def _with(self, overlay: Overlay, dense: Mapping[str, Tensor] | None = None) -> _Snapshot:
        """Return a snapshot of an overlay and dense weights; without weights, those in use."""
        if self._program is None:
            return _Snapshot(overlay, None)
        return _Snapshot(overlay, self._program.set(dense) if dense else self._program.front)

    def _check_other(self, overlay: Overlay, dense: Tensors | None) -> None:
        instance(overlay, Overlay, "overlay")
        if overlay.dims != self.signature.dims:
            raise InputError(f"{self.signature.name}: the overlay has other tables: {overlay.dims}")
        if dense is not None:
            self.check({}, {}, dense)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"{self.signature.name} of {self.directory} is closed")

    def close(self) -> None:
        """Close the servable; files and rows are released when calls in progress have ended."""
        self._closed = True
        if self._folder is not None:
            self._folder.close()
        self._frozen = {}
        self._plans = self._program = None


def predict_plain(
    servable: Servable, batch: Sequence[bytes], size: int, dense: Tensor | None
) -> dict[str, Tensor]:
    """Compute the scores of validated requests with one id for each of `plain_features` and row."""
    # batch: int64 [features, rows] of each request; size: their rows, above 0; dense: float32 [size, k].
    plans, frozen = servable._plans, servable._frozen
    servable._check_open()  # after the reads above, which `close` clears
    assert plans is not None
    with torch.inference_mode():
        with span("megalith.ids"):
            plan = plans.plain(size)
        rows = plan.rows.outputs()
        overlay, copy = servable._hold_snapshot()
        try:
            with span("megalith.rows"):
                missing = overlay.served(frozen).pool(list(batch), plan.rows.native, rows)
            outputs = copy(plans.program_inputs(plan.batch, rows), dense)
        finally:
            copy.release()
    servable._count(size * len(plans.plain_features), missing)
    return servable._named(outputs, size)
