"""CompiledBatch: a batch compiled for a lookup, by the FeaturePlan of a collection.

A plan is made once, of features and layouts. `FeaturePlan.read` turns what the user passes into ids per
table and a Pooling; `FeaturePlan.assemble` gives the pooled outputs their names and shapes. It needs the
configs of the tables, not the tables, so a data worker can run it ahead of the forward.

A batch has three forms:

    form                      class                                  made by
    what the user passes      a mapping of columns, `data.Batch`     a reader, or the user
    the compiled batch        `CompiledBatch`, plain data            EmbeddingCollection.prepare
    the lookup in progress    `Lookup`                               EmbeddingCollection.start, forward
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from megalith.bits import show_id_dtype
from megalith.errors import InputError, UnknownNameError, UsageError
from megalith.nn.combiners import Combiner, FirstN
from megalith.nn.device_copies import columns_to_host
from megalith.nn.features import Feature, Layout
from megalith.ops.pooling import Bags, Coverage, OutputSlice, Pooling
from megalith.ragged import Ragged, as_tensor
from megalith.shards import PreparedIds
from megalith.shards.lookup import versions
from megalith.shards.preparer import LocalPreparer
from megalith.table import TableConfig
from megalith.table.validation import are_plain_ids


@dataclass(frozen=True)
class Output:
    """A tensor of the result."""

    name: str  # The name of the feature or layout
    shape: tuple[int, ...]  # The shape of one example
    rows_of: str | None = None  # The feature whose rows it lists, for a feature without a combiner

    @property
    def columns(self) -> int:
        """The number of elements of one example."""
        return prod(self.shape)


@dataclass(frozen=True)
class CompiledBatch:
    """A batch compiled for a lookup. Plain data: a data worker can make it and send it."""

    prepared: PreparedIds  # The validated ids of each table, as the shards take them
    pooling: Pooling  # How their rows become outputs
    size: int
    columns: Mapping[str, Any]  # The column of each feature: a Ragged, or as the user passed it
    device: torch.device  # The device of the columns
    # Tensors of the user that the pooling refers to, which must not change before the update, by feature
    row_splits: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def ids(self) -> Mapping[str, Tensor]:
        """The ids, int64 [n] per table, features in declared order."""
        return self.prepared.ids


class FeaturePlan:
    """The features of each table in declared order, and the position of their columns in the outputs."""

    def __init__(
        self,
        features: Sequence[Feature],
        layouts: Sequence[Layout] | None,
        configs: Mapping[str, TableConfig],
    ) -> None:
        self.features = _by_name(features, configs)
        self.layouts = layouts
        self.outputs: list[Output] = []
        self._parts: dict[str, list[OutputSlice]] = {name: [] for name in self.features}
        self._dims = {f.name: configs[f.table].dim for f in self.features.values()}
        if layouts is None:
            for feature in self.features.values():
                self._add_feature(feature)
        else:
            self._add_layouts(layouts)
        # The same tuples in every batch, so that an engine can recognise the structure of a pooling.
        self._fixed_parts = {name: tuple(parts) for name, parts in self._parts.items()}
        self._coverage = Coverage()
        self._single_bags: dict[str, Bags] = {}
        self._pooling: Pooling | None = None  # of the last batch; the next one is often equal
        # The row_splits and the pooling of the last batch with one id per example and feature.
        self._single_pooling: tuple[Tensor, Pooling] | None = None
        self._splits = SingleSplits()
        self._one_bag = all(
            f.combiner is not None and f.combiner.inner == 1 and not f.shared for f in self.features.values()
        )
        self.tables: dict[str, list[Feature]] = {}
        for feature in self.features.values():
            self.tables.setdefault(feature.table, []).append(feature)
        # The others need no call per batch: their bags are the rows of the column, and nothing is divided.
        combiners = {f.name: type(f.combiner) for f in self.features.values() if f.combiner is not None}
        plain = Combiner.cut, Combiner.offsets
        self._cutting = {name for name, kind in combiners.items() if (kind.cut, kind.offsets) != plain}
        self._dividing = {name for name, kind in combiners.items() if kind.divisor is not Combiner.divisor}
        self._places = {name: number for number, name in enumerate(self.features)}
        self.trainable = all(config.trainable for config in configs.values())

    def __getstate__(self) -> dict[str, object]:
        caches: dict[str, object] = {
            "_single_bags": {},
            "_pooling": None,
            "_single_pooling": None,
            "_splits": SingleSplits(),
        }
        return {**vars(self), **caches}

    # ---- at construction

    def _add_feature(self, feature: Feature) -> None:
        dim, combiner = self._dims[feature.name], feature.combiner
        inner = 1 if combiner is None else combiner.inner
        shape = (dim,) if combiner is None else combiner.output_shape(dim)
        rows_of = feature.name if combiner is None else None
        self._parts[feature.name].append(OutputSlice(len(self.outputs), 0, 0, dim, inner))
        self.outputs.append(Output(feature.name, shape, rows_of))

    def _add_layouts(self, layouts: Sequence[Layout]) -> None:
        if not isinstance(layouts, list | tuple) or not all(isinstance(each, Layout) for each in layouts):
            raise InputError(f"layouts must be a list of Layout, got {layouts!r}")
        names = [layout.name for layout in layouts]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"two layouts are named {name!r}: names must differ")
        for layout in layouts:
            shapes = [self._slice_shape(layout, number) for number in range(len(layout.slices))]
            self._check_layout(layout, shapes)
            self._add_layout(layout, shapes)
        unused = [name for name, parts in self._parts.items() if not parts]
        if unused:
            raise InputError(
                f"no layout has a slice of {', '.join(map(repr, unused))}: add a slice or remove the feature"
            )

    def _slice_shape(self, layout: Layout, number: int) -> tuple[int, ...]:
        """Return the shape of a slice for one example: (width,) or, for a FirstN feature, (n, width)."""
        cut = layout.slices[number]
        where = f"layout {layout.name!r}, slice {number}"
        if cut.feature not in self.features:
            known = ", ".join(map(repr, self.features))
            raise UnknownNameError(f"{where}: unknown feature {cut.feature!r} (known: {known})")
        dim, combiner = self._dims[cut.feature], self.features[cut.feature].combiner
        if cut.end > dim:
            raise InputError(f"{where}: columns {cut.start}:{cut.end} of {cut.feature!r}, which has {dim}")
        if combiner is None:
            raise InputError(
                f"{where}: feature {cut.feature!r} has combiner=None, so it cannot be in a layout"
            )
        return combiner.output_shape(cut.width)

    @staticmethod
    def _check_layout(layout: Layout, shapes: Sequence[tuple[int, ...]]) -> None:
        if layout.kind == "none":
            return
        for number, shape in enumerate(shapes):
            where = f"layout {layout.name!r}, slice {number}"
            if layout.kind == "add" and len(shape) > 1:
                raise InputError(f"{where}: rows of a FirstN feature cannot be added")
            if shape[:-1] != shapes[0][:-1]:
                raise InputError(f"{where}: either all or no slices are FirstN features, all with the same n")
            if layout.kind != "concat" and shape != shapes[0]:
                raise InputError(f"{where}: it has {shape[-1]} columns, slice 0 has {shapes[0][-1]}")

    def _add_layout(self, layout: Layout, shapes: Sequence[tuple[int, ...]]) -> None:
        first, width = shapes[0][:-1], sum(shape[-1] for shape in shapes)
        column = 0
        for number, (cut, shape) in enumerate(zip(layout.slices, shapes, strict=True)):
            output = len(self.outputs) + (number if layout.kind == "none" else 0)
            inner = shape[0] if len(shape) > 1 else 1
            step = width if layout.kind == "concat" else 0
            part = OutputSlice(output, column, cut.start, cut.end, inner, layout.kind == "add", step)
            self._parts[cut.feature].append(part)
            column += {"concat": cut.width, "stack": inner * cut.width}.get(layout.kind, 0)
        if layout.kind == "none":
            self.outputs += [Output(layout.name, shape) for shape in shapes]
        elif layout.kind == "concat":
            self.outputs.append(Output(layout.name, (*first, width)))
        elif layout.kind == "stack":
            self.outputs.append(Output(layout.name, (len(shapes), *shapes[0])))
        else:
            self.outputs.append(Output(layout.name, shapes[0]))

    # ---- for every batch

    def read(self, batch: Any, prepare_ids: LocalPreparer, absent_ok: bool = False) -> CompiledBatch:
        """Compile a batch: anything that `EmbeddingCollection.forward` accepts."""
        return self._repeated(batch, prepare_ids) or self.compile(
            self._columns(batch, absent_ok), prepare_ids, prepare_ids.device
        )

    def _repeated(self, batch: Any, prepare_ids: LocalPreparer) -> CompiledBatch | None:
        """Compile a batch with one id per example and feature whose shapes are those of the last such batch.

        The rest is as it was then: no other check, and the same pooling, by which engines know it again.
        """
        known = self._single_pooling  # read once: another thread may replace it
        if known is None or not isinstance(batch, Mapping):
            return None
        columns = [batch[name] for name in self.features if name in batch]  # a defaultdict has every key
        if len(columns) < len(self.features):
            return None
        splits, pooling = known
        device, size = splits.device, splits.shape[0] - 1
        values, same = [], splits
        for column in columns:
            if type(column) is not Ragged:
                values.append(column)
                continue
            if column.row_splits is not same and not _are_equal(column.row_splits, splits):
                return None
            if column.weights is not None:
                return None
            same = column.row_splits  # the columns of a batch often share them
            values.append(column.values)
        if not are_plain_ids(values, device) or [x.shape[0] for x in values].count(size) < len(values):
            return None
        if versions([splits]) != [0]:
            return None
        if len(self.tables) == len(values):
            ids = dict(zip(self.tables, values, strict=True))
        else:
            ids = {
                table: torch.cat([values[self._places[feature.name]] for feature in own])
                for table, own in self.tables.items()
            }
        compiled = dict(zip(self.features, columns, strict=True))
        return CompiledBatch(prepare_ids.trusted(ids), pooling, size, compiled, device)

    def _columns(self, batch: Any, absent_ok: bool) -> dict[str, Ragged]:
        if not isinstance(batch, Mapping):
            if not all(callable(getattr(batch, name, None)) for name in ("keys", "values", "lengths")):
                raise InputError(
                    "EmbeddingCollection: a batch must be a mapping of columns, or have keys(), values() and "
                    f"lengths() like a KeyedJaggedTensor; got {type(batch).__name__}"
                )
            batch = Ragged.from_keyed(batch)
        columns: dict[str, Ragged] = {}
        self._splits.begin_batch()
        absent = []
        for name, feature in self.features.items():
            if name in batch:
                columns[name] = column_of(feature, batch[name], self._splits)
                continue
            known = ", ".join(map(repr, batch)) or "nothing"
            if not absent_ok:
                raise UnknownNameError(f"feature {name!r} is not in the batch (it holds {known})")
            warnings.warn(f"feature {name!r} is not in this rank's batch (it holds {known})", stacklevel=6)
            absent.append(name)
        rows = next((len(c) for n, c in columns.items() if not self.features[n].shared), 0)
        for name in absent:
            splits = torch.zeros(
                (1 if self.features[name].shared else rows) + 1, dtype=torch.int64, device="cpu"
            )
            columns[name] = Ragged(torch.empty(0, dtype=torch.int64, device="cpu"), splits)
        return columns

    def compile(
        self,
        columns: Mapping[str, Ragged],
        prepare_ids: Callable[[Mapping[str, Tensor]], PreparedIds] = PreparedIds,
        tables_at: torch.device | None = None,
    ) -> CompiledBatch:
        """Compile the column of each feature."""
        splits = self._common_splits(columns)
        size = self._batch_size(columns)
        device = _device(columns)
        # Columns stay on the device of the tables; from any other device they come to the CPU.
        keep = device.type == "cpu" or device == tables_at
        place = device if keep else torch.device("cpu")
        here = columns if keep else columns_to_host(columns)
        rows = [size] * len(self.outputs)
        ids = {}
        bags: dict[str, tuple[Bags, ...]] = {}
        for table, features in self.tables.items():
            values: list[Tensor] = []
            found: list[tuple[Feature, Ragged, Tensor, int]] = []
            begin = 0
            for feature in features:
                column = here[feature.name]
                offsets = column.row_splits
                if feature.combiner is None:
                    offsets = torch.arange(column.values.shape[0] + 1, device=place)
                    rows[self._parts[feature.name][0].output] = column.values.shape[0]
                elif feature.name in self._cutting:
                    column = feature.combiner.cut(column)
                    offsets = feature.combiner.offsets(column)
                values.append(column.values)
                found.append((feature, column, offsets + begin if begin else offsets, begin))
                begin += column.values.shape[0]
            ids[table] = values[0] if len(values) == 1 else torch.cat(values)
            weights = _weights([column for _, column, _, _ in found])
            bags[table] = tuple(self._bags(*each, weights) for each in found)
        shapes = tuple((r, output.columns) for r, output in zip(rows, self.outputs, strict=True))
        pooling = self._pooling
        if pooling is None or pooling.outputs != shapes or not _same(pooling.bags, bags):
            pooling = self._pooling = Pooling(shapes, bags, self._coverage)
        if splits is not None and keep:
            self._single_pooling = splits, pooling
        mine = {} if splits is not None or device.type != "cpu" else columns
        watched = {name: column.row_splits for name, column in mine.items()}
        return CompiledBatch(prepare_ids(ids), pooling, size, columns, device, watched)

    def _common_splits(self, columns: Mapping[str, Ragged]) -> Tensor | None:
        """Return the row_splits of all columns if they share them and every example has one id in each."""
        if not self._one_bag:
            return None
        common: Tensor | None = None
        for name in self.features:
            column = columns[name]
            if not column.single or column.weights is not None:
                return None
            if common is None:
                common = column.row_splits
            elif column.row_splits is not common:
                return None
        return common

    def _bags(
        self, feature: Feature, column: Ragged, offsets: Tensor, begin: int, weights: Tensor | None
    ) -> Bags:
        parts = self._fixed_parts[feature.name]
        if feature.combiner is None:
            return Bags(offsets, parts, first=begin)
        if column.single and not begin and column.weights is None and feature.combiner.inner == 1:
            known = self._single_bags.get(feature.name)
            if known is None or known.offsets is not offsets:  # batches of equal size share their row_splits
                known = Bags(offsets, parts, None, None, feature.shared, 0)
                self._single_bags[feature.name] = known
            return known
        weighted = weights if column.weights is not None else None
        first = begin if column.single and feature.combiner.inner == 1 else None
        divisor = feature.combiner.divisor(column) if feature.name in self._dividing else None
        return Bags(offsets, parts, weighted, divisor, feature.shared, first)

    def _batch_size(self, columns: Mapping[str, Ragged]) -> int:
        size: int | None = None
        named = ""
        for name, feature in self.features.items():
            rows = len(columns[name])
            if feature.shared:
                if rows != 1:
                    raise InputError(f"feature {name!r} is shared: it must have one row, got {rows}")
            elif size is None:
                size, named = rows, name
            elif rows != size:
                raise InputError(f"feature {name!r} has {rows} rows, feature {named!r} has {size}")
        return 1 if size is None else size

    def assemble(self, batch: CompiledBatch, outputs: Sequence[Tensor]) -> dict[str, Any]:
        """Give the outputs of a pooling their names and shapes."""
        result: dict[str, Any] = {}
        for output, tensor in zip(self.outputs, outputs, strict=True):
            if output.rows_of is not None:
                column = batch.columns[output.rows_of]
                result[output.name] = Ragged(tensor, column.row_splits, column.weights)
                continue
            result.setdefault(output.name, []).append(tensor.view(batch.size, *output.shape))
        lists = {layout.name for layout in self.layouts or () if layout.kind == "none"}
        return {k: v[0] if isinstance(v, list) and k not in lists else v for k, v in result.items()}


def _by_name(features: Sequence[Feature], configs: Mapping[str, TableConfig]) -> dict[str, Feature]:
    if not isinstance(features, list | tuple):
        raise InputError(f"features must be a list of Feature, got {features!r}")
    by_name: dict[str, Feature] = {}
    for feature in features:
        if not isinstance(feature, Feature):
            raise InputError(f"features must be a list of Feature, got {feature!r}")
        if feature.name in by_name:
            raise InputError(f"two features are named {feature.name!r}: names must differ")
        if feature.table not in configs:
            known = ", ".join(map(repr, configs)) or "none"
            raise UnknownNameError(
                f"feature {feature.name!r}: unknown table {feature.table!r} (known: {known})"
            )
        by_name[feature.name] = feature
    if not by_name:
        raise InputError("features is empty: pass at least one")
    return by_name


def _same(one: Mapping[str, tuple[Bags, ...]], other: Mapping[str, tuple[Bags, ...]]) -> bool:
    """Return whether two poolings of a plan have the same bags."""
    return all(a is b for table in one for a, b in zip(one[table], other[table], strict=True))


def _device(columns: Mapping[str, Ragged]) -> torch.device:
    """Return the device of the batch; raise InputError if it is on two devices."""
    (first, column), *others = columns.items()
    for name, other in others:
        if other.device != column.device:
            raise InputError(
                f"feature {name!r} is on {other.device}, feature {first!r} on {column.device}: "
                "move the batch to one device"
            )
    return column.device


def _weights(columns: Sequence[Ragged]) -> Tensor | None:
    """Return the weights of all columns of a table, 1 for a column without; None if no column has any."""
    if all(column.weights is None for column in columns):
        return None
    pieces = [
        torch.ones(c.values.shape[0], dtype=torch.float32, device=c.device)
        if c.weights is None
        else c.weights.to(torch.float32)
        for c in columns
    ]
    return torch.cat(pieces)


class SingleSplits:
    """The row_splits of columns with one id per example, which batches share while they are unchanged.

    With equal row_splits, a batch is compiled like the one before it; see `FeaturePlan._repeated`.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, torch.device], Tensor] = {}
        self._given: dict[int, tuple[Tensor, Tensor | None]] = {}

    def begin_batch(self) -> None:
        """Forget row_splits that were changed in place, and those of the batch before."""
        self._given.clear()
        if len(self._known) > 4:
            self._known.clear()
        for key, splits in list(self._known.items()):
            if versions([splits]) != [0]:
                self._known.pop(key, None)  # another thread may have removed it

    def of(self, size: int, device: torch.device) -> Tensor:
        """Return the row_splits of a column."""
        # returns: int64 [size + 1], the numbers from 0 on.
        found = self._known.get((size, device))
        if found is None:
            found = self._known[size, device] = torch.arange(size + 1, device=device)
        return found

    def recognise(self, column: Ragged) -> Ragged:
        """Return a column with shared row_splits if every example has exactly one id."""
        if column.single or column.weights is not None:
            return column
        splits = column.row_splits
        given = self._given.get(id(splits))
        if given is None:  # the columns of a batch often have the same row_splits
            given = self._given[id(splits)] = splits, self._equal_to(splits, column.values.shape[0])
        return column if given[1] is None else Ragged.trusted(column.values, given[1], single=True)

    def _equal_to(self, splits: Tensor, size: int) -> Tensor | None:
        """Return the shared row_splits that equal those of a column with this number of ids, or None."""
        if splits.shape[0] != size + 1 or type(splits) is not Tensor or not splits.is_cpu:
            return None
        shared = self.of(size, splits.device)
        return shared if torch.equal(splits, shared) else None


def _are_equal(splits: Tensor, shared: Tensor) -> bool:
    """Compare row_splits with shared ones. A GPU is not waited for: there only the same ones are equal."""
    same_place = splits.is_cpu and shared.is_cpu
    return same_place and splits.shape == shared.shape and torch.equal(splits, shared)


def column_of(feature: Feature, value: Any, shared: SingleSplits | None = None) -> Ragged:
    """Return the column of a feature."""
    # value: A Ragged, a jagged nested tensor, int64 or int32 [B], [B, L] padded with `feature.pad`, an array
    # of numpy of these shapes, or a list of B tensors or lists.
    if type(value) is Tensor and value.dtype is torch.int64 and shared is not None and _is_vector(value):
        return Ragged.trusted(value, shared.of(value.shape[0], value.device), single=True)
    if isinstance(value, list | tuple):  # one tensor or list per row
        value = Ragged.from_lists(value)
    value = as_tensor(value)
    if isinstance(value, Ragged):
        column = value if shared is None else shared.recognise(value)
    elif isinstance(value, Tensor) and value.is_nested:
        if value.layout != torch.jagged:
            raise InputError(f"feature {feature.name!r}: a nested tensor must have layout=torch.jagged")
        column = Ragged.from_nested(value)
    elif isinstance(value, Tensor) and value.dim() == 1:
        shared = SingleSplits() if shared is None else shared
        column = Ragged.trusted(value, shared.of(value.shape[0], value.device), single=True)
    elif isinstance(value, Tensor) and value.dim() == 2:
        column = Ragged.from_padded(value, pad=feature.pad)
    else:
        shape = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(
            f"feature {feature.name!r}: expected a Ragged or a tensor [batch] or [batch, length]; got {shape}"
        )
    if column.values.dtype not in (torch.int64, torch.int32) or column.values.dim() != 1:
        raise InputError(
            f"feature {feature.name!r}: ids must be int64 or int32 [n], got "
            f"{show_id_dtype(column.values.dtype)} {list(column.values.shape)} (for strings use "
            "megalith.hash_strings)"
        )
    if column.weights is not None and column.weights.requires_grad and feature.combiner is not None:
        raise UsageError(
            f"feature {feature.name!r}: weights cannot have a gradient: detach them, or use combiner=None "
            "and multiply the rows"
        )
    return column


def _is_vector(value: Tensor) -> bool:
    return value.dim() == 1 and not value.is_nested


def real_places(feature: Feature, column: Ragged) -> Tensor:
    """Return which positions of a FirstN feature hold a row."""
    # returns: bool [B, n].
    if not isinstance(feature.combiner, FirstN):
        raise InputError(f"feature {feature.name!r}: only a FirstN feature has positions")
    lengths = column.lengths()
    return torch.arange(feature.combiner.n, device=lengths.device) < lengths[:, None]
