"""BatchLookup: one forward of a collection, from its lookup to its update.

A batch has three forms:

    form                      class                                  made by
    what the user passes      a mapping of columns, `data.Batch`     a reader, or the user
    the compiled batch        `CompiledBatch`, plain data            EmbeddingCollection.prepare
    the lookup in progress    `BatchLookup`                          EmbeddingCollection.start, forward

`StartedBatch` is not a fourth form: it is the mapping that the user passes, with the lookups that were
started for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megalith.errors import UsageError
from megalith.nn.feature_plan import CompiledBatch
from megalith.ops.pooling import Pooling
from megalith.ragged import Ragged
from megalith.shards import Lookup
from megalith.shards.lookup import versions
from megalith.table import TableConfig


class BatchLookup:
    """A compiled batch and its lookup."""

    def __init__(self, batch: CompiledBatch, lookup: Lookup, push: bool = False) -> None:
        self.batch = batch
        self.lookup = lookup
        self.push = push
        self.step = 0
        self.time: float | None = None
        self.grads: list[Tensor] | None = None
        self.backward = -1
        self.trained = batch.pooling
        self._versions = self._splits_versions()

    def _splits_versions(self) -> list[int]:
        """How often each row_splits was modified in place; nothing on other devices than the CPU."""
        if self.batch.device.type != "cpu":
            return []
        return versions([column.row_splits for column in self.batch.columns.values()])

    def select_trained(
        self, configs: Mapping[str, TableConfig], grads: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Set `trained`; return a gradient for each output, zeros for one that was not used (None)."""
        # Only features of trainable tables are updated, and only those whose outputs have a gradient: rows
        # must not be created because another output of the same forward was used.
        pooling = self.batch.pooling
        given = [grad is not None for grad in grads]
        if all(given) and all(config.trainable for config in configs.values()):
            return [grad for grad in grads if grad is not None]
        bags = {
            table: tuple(b for b in own if any(given[part.output] for part in b.parts))
            for table, own in pooling.bags.items()
            if configs[table].trainable
        }
        self.trained = Pooling(pooling.outputs, {table: own for table, own in bags.items() if own})
        device = next((grad.device for grad in grads if grad is not None), torch.device("cpu"))
        return [
            torch.zeros(shape, dtype=torch.float32, device=device) if grad is None else grad
            for grad, shape in zip(grads, pooling.outputs, strict=True)
        ]

    def check_unchanged(self) -> None:
        """Raise UsageError if ids or row_splits were modified in place since the lookup."""
        self.lookup.check_unchanged()
        now = self._splits_versions()
        if now != self._versions:
            pairs = zip(self.batch.columns, now, self._versions, strict=True)
            name = next(name for name, new, old in pairs if new != old)
            raise UsageError(
                f"feature {name!r}: its row_splits were changed in place after forward; keep them until "
                "the update"
            )


class StartedBatch(Mapping[str, Any]):
    """The columns of a batch, with lookups in progress; `EmbeddingCollection.start` and `Pipeline` return it.

    It reads like the columns that it was made from. The first forward of a collection takes the lookup of
    that collection; another forward of the same batch looks up again.
    """

    def __init__(self, columns: Any, lookups: Mapping[Any, BatchLookup]) -> None:
        self.columns = columns
        self._lookups: dict[Any, BatchLookup] = dict(lookups)

    def add(self, collection: object, lookup: BatchLookup) -> None:
        self._lookups[collection] = lookup

    def take(self, collection: object) -> BatchLookup | None:
        """Remove and return the lookup of a collection."""
        return self._lookups.pop(collection, None)

    @cached_property
    def _named(self) -> Mapping[str, Any]:
        if isinstance(self.columns, CompiledBatch):
            return self.columns.columns
        return self.columns if isinstance(self.columns, Mapping) else Ragged.from_keyed(self.columns)

    def __getitem__(self, name: str) -> Any:
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)
