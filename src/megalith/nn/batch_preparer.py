"""BatchPreparer: compiles what the user passes into the ids of each table and a Pooling.

It needs no table and no other rank, so a data worker can run it ahead of the forward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megalith.bits import show_id_dtype
from megalith.errors import InputError, UnknownNameError, UsageError
from megalith.nn.combiners import FirstN
from megalith.nn.feature_plan import CompiledBatch, FeaturePlan
from megalith.nn.features import Feature
from megalith.ragged import Ragged
from megalith.shards import PreparedIds
from megalith.shards.lookup import versions


class BatchPreparer:
    """Makes compiled batches. It can be pickled."""

    def __init__(
        self, plan: FeaturePlan, prepare_ids: Callable[[Mapping[str, Tensor]], PreparedIds], absent_ok: bool
    ) -> None:
        self._plan = plan
        self.prepare_ids = prepare_ids
        self._absent_ok = absent_ok
        self._splits = SingleSplits()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_splits": SingleSplits()}

    def __call__(self, batch: Any) -> CompiledBatch:
        """Compile a batch: anything that `EmbeddingCollection.forward` accepts."""
        return self._plan.compile(self._columns(batch), self.prepare_ids)

    def _columns(self, batch: Any) -> dict[str, Ragged]:
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
        for name, feature in self._plan.features.items():
            if name in batch:
                columns[name] = column_of(feature, batch[name], self._splits)
                continue
            known = ", ".join(map(repr, batch)) or "nothing"
            if not self._absent_ok:
                raise UnknownNameError(f"feature {name!r} is not in the batch (it holds {known})")
            warnings.warn(f"feature {name!r} is not in this rank's batch (it holds {known})", stacklevel=6)
            absent.append(name)
        rows = next((len(c) for n, c in columns.items() if not self._plan.features[n].shared), 0)
        for name in absent:
            splits = torch.zeros(
                (1 if self._plan.features[name].shared else rows) + 1, dtype=torch.int64, device="cpu"
            )
            columns[name] = Ragged(torch.empty(0, dtype=torch.int64, device="cpu"), splits)
        return columns


class SingleSplits:
    """The row_splits of columns with one id per example, which batches share if nobody changed them.

    With equal row_splits, a batch is compiled like the one before it; see `FeaturePlan.compile`.
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


def column_of(feature: Feature, value: Any, shared: SingleSplits | None = None) -> Ragged:
    """Return the column of a feature."""
    # value: A Ragged, a jagged nested tensor, int64 or int32 [B], or [B, L] padded with `feature.pad`.
    if type(value) is Tensor and value.dtype is torch.int64 and shared is not None and _is_vector(value):
        return Ragged.trusted(value, shared.of(value.shape[0], value.device), single=True)
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
