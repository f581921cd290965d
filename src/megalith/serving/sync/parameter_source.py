"""The source of parameter sync: the tables and dense weights of a model in training.

Tables are read concurrently with training, from any thread. Dense weights are copied by the training thread,
between steps. Rows and weights that are not finite are not sent to servers; such rows are counted.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megalith.checkpoint.dense_state import collections_of, dense_state
from megalith.checkpoint.manifest import full_name
from megalith.errors import InputError
from megalith.ops.checks import all_finite
from megalith.serving.sync.push_messages import PushMessage
from megalith.shards import Shards
from megalith.table import Table


class ParameterSource:
    """The tables and dense weights of a model.

    A table has its own name or, if the model has several collections, "collection.table", as in a checkpoint.

    Args:
        model: The model, or the shards of its tables, which have no dense weights.
        dense: Include dense weights.

    Raises:
        InputError: The model has no EmbeddingCollection.
    """

    def __init__(self, model: nn.Module | Shards, *, dense: bool = True) -> None:
        if isinstance(model, Shards):
            collections: dict[str, Shards] = {"": model}
        else:
            collections = {path: c.shards for path, c in collections_of(model).items()}
        if not collections:
            raise InputError("this model has no EmbeddingCollection: there are no rows to push")
        self._model = model if dense and isinstance(model, nn.Module) else None
        self._shards = list({id(shards): shards for shards in collections.values()}.values())
        alone = len(self._shards) == 1
        self._names = {
            id(shards): {name: name if alone else full_name(path, name) for name in shards.local}
            for path, shards in reversed(collections.items())
        }
        self.tables: dict[str, Table] = {
            self._names[id(shards)][name]: table
            for shards in self._shards
            for name, table in shards.local.items()
        }
        self._last: dict[str, Tensor] = {}
        self.held_back = 0
        """The number of rows that were not finite when a message was built."""

    # ---- in the training thread

    def track(self, consumer: str) -> None:
        """Starts to record changes for a consumer."""
        self.flush()
        for shards in self._shards:
            shards.track(consumer)
            shards.drain_touched(consumer)

    def untrack(self, consumer: str) -> None:
        """Stops recording changes for a consumer."""
        for shards in self._shards:
            shards.untrack(consumer)

    def drain(self, consumer: str) -> dict[str, Tensor]:
        """Returns the ids changed or removed since the last call, int64 [n] by table, without duplicates."""
        found = {}
        for shards in self._shards:
            for name, (updated, removed) in shards.drain_touched(consumer).items():
                # An id that was removed and created again is in both.
                ids = torch.unique(torch.cat([updated, removed])) if removed.numel() else updated
                found[self._names[id(shards)][name]] = ids
        return found

    def flush(self) -> None:
        """Waits for updates in progress, so that `drain` returns what they change."""
        for shards in self._shards:
            shards.flush()

    def copy_dense(self) -> dict[str, Tensor] | None:
        """Returns a copy of the dense weights; None if they have not changed or are not finite."""
        if self._model is None:
            return None
        now = {name: weight.detach() for name, weight in dense_state(self._model).items()}
        if now.keys() == self._last.keys() and all(_equal(now[name], self._last[name]) for name in now):
            return None
        if not all(all_finite(weight) for weight in now.values() if weight.is_floating_point()):
            return None
        self._last = {name: weight.to("cpu", copy=True).contiguous() for name, weight in now.items()}
        return self._last

    # ---- in any thread

    def all_ids(self) -> dict[str, Tensor]:
        """Returns the ids with a row, int64 [n] by table; ids created or removed meanwhile may be missing."""
        none = [torch.empty(0, dtype=torch.int64)]
        return {
            name: torch.cat(none + [chunk.ids for chunk in table.scan()])
            for name, table in self.tables.items()
        }

    def read(self, ids: Mapping[str, Tensor]) -> PushMessage:
        """Reads rows; see `read_rows`. Rows that are not finite are counted in `held_back`."""
        push, held_back = read_rows(self.tables, ids)
        self.held_back += held_back
        return push


def _equal(weight: Tensor, other: Tensor) -> bool:
    return weight.dtype == other.dtype and torch.equal(weight.cpu(), other)


def read_rows(tables: Mapping[str, Table], ids: Mapping[str, Tensor]) -> tuple[PushMessage, int]:
    """Reads the current rows of ids.

    Args:
        tables: The tables by name.
        ids: The ids of each table, int64 [n].

    Returns:
        A message with the rows, and the ids without a row as removed; and the number of rows that are left
        out because they are not finite.
    """
    rows, removed, held_back = {}, {}, 0
    for name, wanted in ids.items():
        table = tables[name]
        epoch, found = table.epoch, table.find(wanted)
        gone = found < 0
        if bool(gone.any()):
            removed[name] = wanted[gone]
            wanted, found = wanted[~gone], found[~gone]
        if not wanted.numel():
            continue
        values = table.read(found, wanted, epoch=epoch)
        if not all_finite(values):
            finite = values.isfinite().all(1)
            held_back += int((~finite).sum())
            wanted, values = wanted[finite], values[finite]
        rows[name] = (wanted, values)
    return PushMessage(rows, removed), held_back
