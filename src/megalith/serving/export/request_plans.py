"""Request plans: what a request for scores needs besides its ids, compiled once for each batch size.

Most requests have one id for each feature and row. Their rows are read, and reduced to the inputs of the
dense program, in one native call from the bytes of the ids. For other requests, the rows are gathered in one
buffer, table after table, and pooled from there.

`count_missing` counts the ids of a request that have no row. Such an id reads as zeros, so the scores of a
request with a wrong kind of id look like any others. It is another pass over the ids, for requests that ask
for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalith.library import native_module, span
from megalith.nn.compiled_batch import CompiledBatch, FeaturePlan, column_of, real_places
from megalith.ops.pooling import Bags, Pooling, covered, pool_flat
from megalith.ragged import Ragged
from megalith.shards.routed_lookup import joint_weights


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
    """Count the ids without a row."""
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
