"""Batches on their way into a collection: columns out of what users hold, ids of each table, pooling.

None of it needs a table or another rank, so a data worker can do it ahead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalith.errors import InputError, UnknownNameError, UsageError
from megalith.nn.combiners import FirstN
from megalith.nn.feature_plan import CompiledBatch, FeaturePlan
from megalith.nn.features import Feature
from megalith.ragged import Ragged
from megalith.shards import Lookup, Prepared


@dataclass(frozen=True)
class ReadyBatch:
    """A batch compiled, and its ids checked and sorted: what `EmbeddingCollection.prepare` gives."""

    batch: CompiledBatch
    ids: Prepared


class Started(NamedTuple):
    """A batch compiled, and its look-up under way."""

    ready: ReadyBatch
    lookup: Lookup


class StartedBatch(Mapping[str, Any]):
    """A batch whose look-ups are under way: what `EmbeddingCollection.start` gives, and `Pipeline`.

    It reads like the columns it was made of. A collection takes its look-up with its first forward; another
    forward of the same batch looks up again.
    """

    def __init__(self, columns: Any, started: Mapping[Any, Started]) -> None:
        self.columns = columns
        self._started: dict[Any, Started] = dict(started)

    def take(self, collection: object) -> Started | None:
        """What was started for a collection and not taken before."""
        return self._started.pop(collection, None)

    @cached_property
    def _named(self) -> Mapping[str, Any]:
        if isinstance(self.columns, ReadyBatch):
            return self.columns.batch.columns
        return self.columns if isinstance(self.columns, Mapping) else Ragged.from_keyed(self.columns)

    def __getitem__(self, name: str) -> Any:
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)


class BatchPreparer:
    """Makes `ReadyBatch`es. absent_ok: a feature that is not in the batch counts as empty rows, and is warned
    of."""

    def __init__(
        self, plan: FeaturePlan, prepare_ids: Callable[[Mapping[str, Tensor]], Prepared], absent_ok: bool
    ) -> None:
        self._plan = plan
        self._prepare_ids = prepare_ids
        self._absent_ok = absent_ok

    def __call__(self, batch: Any) -> ReadyBatch:
        """batch: what `EmbeddingCollection.forward` takes."""
        compiled = self._plan.batch(self._columns(batch))
        return ReadyBatch(compiled, self._prepare_ids(compiled.ids))

    def _columns(self, batch: Any) -> dict[str, Ragged]:
        if not isinstance(batch, Mapping):
            if not all(callable(getattr(batch, name, None)) for name in ("keys", "values", "lengths")):
                raise InputError(
                    "EmbeddingCollection: a batch is a mapping of columns, or has keys(), values() and "
                    f"lengths() like a KeyedJaggedTensor; got {type(batch).__name__}"
                )
            batch = Ragged.from_keyed(batch)
        columns: dict[str, Ragged] = {}
        absent = []
        for name, feature in self._plan.features.items():
            if name in batch:
                columns[name] = column_of(feature, batch[name])
                continue
            known = ", ".join(map(repr, batch)) or "nothing"
            if not self._absent_ok:
                raise UnknownNameError(f"feature {name!r} is not in the batch (it holds {known})")
            warnings.warn(f"feature {name!r} is not in this rank's batch (it holds {known})", stacklevel=6)
            absent.append(name)
        rows = next((len(c) for n, c in columns.items() if not self._plan.features[n].shared), 0)
        for name in absent:
            splits = torch.zeros((1 if self._plan.features[name].shared else rows) + 1, dtype=torch.int64)
            columns[name] = Ragged(torch.empty(0, dtype=torch.int64), splits)
        return columns


def column_of(feature: Feature, value: Any) -> Ragged:
    """A feature's column of a batch, out of what users hold. Raises InputError if it is none."""
    if isinstance(value, Ragged):
        column = value
    elif isinstance(value, Tensor) and value.is_nested:
        if value.layout != torch.jagged:
            raise InputError(f"feature {feature.name!r}: a nested tensor must have the layout torch.jagged")
        column = Ragged.from_nested(value)
    elif isinstance(value, Tensor) and value.dim() == 1:
        column = Ragged(value, torch.arange(value.shape[0] + 1, device=value.device))
    elif isinstance(value, Tensor) and value.dim() == 2:
        column = Ragged.from_padded(value, pad=feature.pad)
    else:
        shape = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(
            f"feature {feature.name!r}: expected a Ragged or a tensor [batch] or [batch, length]; got {shape}"
        )
    if column.values.dtype not in (torch.int64, torch.int32) or column.values.dim() != 1:
        raise InputError(
            f"feature {feature.name!r}: ids must be int64 or int32 [n], got {column.values.dtype} "
            f"{list(column.values.shape)} (strings become ids by megalith.hash_strings)"
        )
    if column.weights is not None and column.weights.requires_grad and feature.combiner is not None:
        raise UsageError(
            f"feature {feature.name!r}: weights take no gradient here: detach them, or use combiner=None and "
            "multiply the rows"
        )
    return column


def real_places(feature: Feature, column: Ragged) -> Tensor:
    """Which of the places of a FirstN feature hold a row, bool [B, n]."""
    if not isinstance(feature.combiner, FirstN):
        raise InputError(f"feature {feature.name!r}: only a FirstN feature has places")
    lengths = column.lengths()
    return torch.arange(feature.combiner.n, device=lengths.device) < lengths[:, None]
