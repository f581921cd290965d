"""The source of parameter sync: the tables and dense weights of a model in training.

Tables are read concurrently with training, from any thread. Dense weights are copied by the training thread,
between steps. Rows and weights that are not finite are not sent to servers: the log names their table and
ids, and the rows are counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megalith.checkpoint.manifest import full_name
from megalith.checkpoint.model_state import collections_of, dense_state
from megalith.errors import InputError, UsageError
from megalith.ops.checks import all_finite
from megalith.serving.sync.push_messages import DeferredRows, PushMessage
from megalith.shards import Shards
from megalith.table import Table
from megalith.table.table_data import FoundRows

logger = logging.getLogger(__name__)

MAX_NAMED_IDS = 20  # The number of ids of a table that a message about rows names


class ParameterSource:
    """The tables and dense weights of a model.

    A table has its own name or, if the model has several collections, "collection.table", as in a checkpoint.
    """

    def __init__(self, model: nn.Module | Shards, *, dense: bool = True, needs_rows: bool = True) -> None:
        if isinstance(model, Shards):
            collections: dict[str, Shards] = {"": model}
        else:
            collections = {path: c.shards for path, c in collections_of(model).items()}
        if not collections:
            raise InputError("this model has no EmbeddingCollection: there are no rows to push")
        if needs_rows and not all(shards.holds_rows for shards in collections.values()):
            raise UsageError("these rows are on parameter servers: use a ServerPublisher")
        if not needs_rows:
            collections = {path: shards for path, shards in collections.items() if shards.holds_rows}
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
        self._counting = threading.Lock()
        self.held_back = 0  # The number of rows that were not finite when a message was built

    # ---- in the training thread

    def track(self, consumer: str) -> None:
        """Start to record changes for a consumer."""
        self.flush()
        for shards in self._shards:
            shards.track(consumer)
            shards.drain_touched(consumer)

    def untrack(self, consumer: str) -> None:
        """Stop recording changes for a consumer."""
        for shards in self._shards:
            shards.untrack(consumer)

    def drain(self, consumer: str) -> dict[str, Tensor]:
        """Return the ids that changed or were removed since the last call; no id is lost by an error."""
        # returns: the ids of each table, int64 [n], without duplicates.
        found: dict[str, Tensor] = {}
        try:
            for shards in self._shards:
                for name, (updated, removed) in shards.drain_touched(consumer).items():
                    found[self._names[id(shards)][name]] = join_changes(updated, removed)
        except BaseException:
            self.put_back(consumer, found)
            raise
        return found

    def put_back(self, consumer: str, ids: Mapping[str, Tensor]) -> None:
        """Record ids as changed, so that the next `drain` returns them again."""
        # ids: the ids of each table, int64 [n], as `drain` returned them.
        for name, changed in ids.items():
            self.tables[name].mark_touched(consumer, changed)

    def flush(self) -> None:
        """Wait for updates in progress, so that `drain` returns what they change."""
        for shards in self._shards:
            shards.flush()

    def copy_dense(self) -> dict[str, Tensor] | None:
        """Return a copy of the dense weights; None if they have not changed or are not finite."""
        if self._model is None:
            return None
        now = {name: weight.detach() for name, weight in dense_state(self._model).items()}
        if now.keys() == self._last.keys() and all(_equal(now[name], self._last[name]) for name in now):
            return None
        bad = [name for name, weight in now.items() if weight.is_floating_point() and not all_finite(weight)]
        if bad:
            logger.warning("dense weights are not pushed, because these are not finite: %s", ", ".join(bad))
            return None
        self._last = {name: weight.to("cpu", copy=True).contiguous() for name, weight in now.items()}
        return self._last

    # ---- in any thread

    def find(self, ids: Mapping[str, Tensor]) -> PushMessage:
        """Find rows, which are read into the memory of a message when it is encoded."""
        # ids: the ids of each table, int64 [n].
        rows, removed = {}, {}
        for name, wanted in ids.items():
            present, found, gone = _find(self.tables[name], wanted)
            if gone is not None:
                removed[name] = gone
            if present.numel():
                rows[name] = (present, _deferred(self.tables[name], present, found))
        return PushMessage(rows, removed)

    def read(self, ids: Mapping[str, Tensor]) -> PushMessage:
        """Read rows; those that are not finite are logged, and counted in `held_back`."""
        # ids: the ids of each table, int64 [n].
        push, not_finite = read_rows(self.tables, ids)
        if not_finite:
            logger.warning("%s", describe_not_finite(not_finite))
            with self._counting:
                self.held_back += sum(each.numel() for each in not_finite.values())
        return push


def _equal(weight: Tensor, other: Tensor) -> bool:
    return weight.dtype == other.dtype and torch.equal(weight.cpu(), other)


def join_changes(updated: Tensor, removed: Tensor) -> Tensor:
    """Join the two results of `Table.drain_touched`."""
    # updated: the ids written, int64 [n], without duplicates; removed: the ids removed, int64 [m]; returns:
    # the distinct ids, int64 [k].
    return torch.unique(torch.cat([updated, removed])) if removed.numel() else updated


def scan_ids(tables: Mapping[str, Table]) -> dict[str, Tensor]:
    """List the ids that have a row; ids created or removed during the scan may be missing."""
    # returns: the ids of each table, int64 [n].
    none = [torch.empty(0, dtype=torch.int64, device="cpu")]
    return {name: torch.cat(none + [chunk.ids for chunk in table.scan()]) for name, table in tables.items()}


def _find(table: Table, ids: Tensor) -> tuple[Tensor, FoundRows, Tensor | None]:
    """Return the ids with a row, their rows, and the ids without one, if there are any."""
    found, epoch = table.engine_impl.find(table.checks.ids(ids))
    found = found.to(ids.device)
    if not ids.numel() or int(found.min()) >= 0:
        return ids.contiguous(), FoundRows(found, epoch), None
    there = found >= 0
    return ids[there], FoundRows(found[there], epoch), ids[~there]


def _deferred(table: Table, ids: Tensor, found: FoundRows) -> DeferredRows:
    engine: Any = table.engine_impl

    def read_into(out: Tensor) -> bool:
        if engine.engine == "cpu":
            finite = engine.read_finite(ids, found, out)
        else:
            out.copy_(table.read(found.rows, ids, epoch=found.epoch, stored=True))
            finite = all_finite(out)
        if finite and engine.view is not None:
            engine.apply_view(out, None)
        return bool(finite)

    return DeferredRows((ids.numel(), table.dim), read_into)


def read_rows(
    tables: Mapping[str, Table], ids: Mapping[str, Tensor]
) -> tuple[PushMessage, dict[str, Tensor]]:
    """Read the current rows of ids, as servers return them (`Segment.serving`)."""
    # ids: the ids of each table, int64 [n]; returns: A message with the finite rows, and the ids without a
    # row as removed.
    rows, removed, not_finite = {}, {}, {}
    for name, wanted in ids.items():
        table = tables[name]
        wanted, found, gone = _find(table, wanted)
        if gone is not None:
            removed[name] = gone
        if not wanted.numel():
            continue
        values = table.read(found.rows, wanted, epoch=found.epoch, stored=True)
        if not all_finite(values):
            finite = values.isfinite().all(1)
            not_finite[name] = wanted[~finite]
            wanted, values = wanted[finite], values[finite]
        if wanted.numel():
            if table.engine_impl.view is not None:
                table.engine_impl.apply_view(values, None)
            rows[name] = (wanted, values)
    return PushMessage(rows, removed), not_finite


def describe_not_finite(not_finite: Mapping[str, Tensor]) -> str:
    """Name the rows that are not pushed because they are not finite."""
    # not_finite: the ids of those rows, int64 [n] by table, as `read_rows` returns them.
    tables = []
    for name, ids in not_finite.items():
        more = ", ..." if ids.numel() > MAX_NAMED_IDS else ""
        named = ", ".join(map(str, ids[:MAX_NAMED_IDS].tolist()))
        tables.append(f"{ids.numel()} of table {name!r} (ids {named}{more})")
    return f"rows with NaN or Inf are not pushed, servers keep their last value: {'; '.join(tables)}"
