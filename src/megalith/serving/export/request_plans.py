"""Request plans: what a request for scores needs besides its ids, compiled once for each batch size.

Most requests have one id for each feature and row. Their rows are read, and reduced to the inputs of the
dense program, in one native call from the bytes of the ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalith.library import span
from megalith.nn.batch_preparer import column_of, real_places
from megalith.nn.feature_plan import CompiledBatch, FeaturePlan
from megalith.serving.export.row_gathering import Gathered, Gathering, RowPlan

_MAX_COMPILED = 256
"""Maximum number of batch sizes for which a compiled request is cached."""
_MAX_COMPILED_SIZE = 1024
"""The largest cached batch size: clients choose the size, and memory grows with it."""


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
