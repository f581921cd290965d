"""Tracked changes: which ids of the attached tables have changed, for one or several sync clients.

A table records changes for 8 consumers at most, and there is one client for each part of a served model. So
the clients of one model share one consumer: whenever one of them takes its ids, those of the others are kept
for them. All ids since the first attach are remembered too, for a server that has lost what was pushed to it:

    more than max_ids | what such a server is sent                      | removed rows
    ------------------+-------------------------------------------------+-------------------------
    neither           | the ids that changed                            | removed
    changed ids       | all rows, and the ids that were removed         | removed
    removed ids too   | all rows                                        | served again: reported
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping

from torch import Tensor

from megalith.errors import UsageError
from megalith.serving.sync.changed_ids import IdSets, Journal
from megalith.serving.sync.parameter_source import join_changes, scan_ids
from megalith.table import Table

MAX_IDS = 20_000_000
"""The number of changed ids to remember, and of removed ids."""


class TrackedChanges:
    """The changed ids of tables, for each client. Safe to share between threads.

    Ids are returned for each table, int64 [n], without duplicates.
    """

    def __init__(self, max_ids: int = MAX_IDS) -> None:
        self._consumer = f"sync clients {uuid.uuid4().hex}"
        self._lock = threading.Lock()
        # Two tables may have one name, if each client has the tables of its own parameter server.
        self._tables: dict[str, Table] = {}
        self._attached: dict[object, dict[str, str]] = {}
        """The keys of each client's tables, by the name of the table."""
        self._pending: dict[object, IdSets] = {}
        self._reached: dict[object, set[tuple[str, int]]] = {}
        """The models and parts that have answered each client."""
        self._changed: set[str] = set()
        """The keys of the tables that have changed since they were attached."""
        self._journal, self._removals = Journal(max_ids), Journal(max_ids)
        for journal in (self._journal, self._removals):
            journal.begin_epoch("")

    def attach(self, client: object, name: str, table: Table) -> None:
        """Record the changes of a table for a client from now on; a second call has no effect."""
        key = str(id(table))
        with self._lock:
            self._drain()  # earlier changes are not for this client
            if key not in self._tables:
                try:
                    table.track(self._consumer)
                except UsageError as error:
                    raise UsageError(
                        f"{error}; the clients that one call of create_parameter_sync_clients makes share one"
                    ) from None
                self._tables[key] = table
            self._attached.setdefault(client, {})[name] = key
            self._pending.setdefault(client, IdSets())

    def detach(self, client: object) -> None:
        """Forget a client; tables that no other client has attached stop recording."""
        with self._lock:
            keys = set(self._attached.pop(client, {}).values())
            self._pending.pop(client, None)
            self._reached.pop(client, None)
            for key in keys.difference(*(others.values() for others in self._attached.values())):
                self._tables.pop(key).untrack(self._consumer)

    def reach(self, client: object, model: str, part: int) -> None:
        """Record that a part of a model has answered a client, which then pushes the part's ids to it."""
        with self._lock:
            self._reached.setdefault(client, set()).add((model, part))

    def unreached(self, client: object, name: str, model: str, num_parts: int) -> set[int]:
        """Return the parts of a model that no client pushes a table to."""
        # Clients that have not pushed yet are expected to push to a part each: nothing is returned as long as
        # there are enough of them for the parts that are left.
        with self._lock:
            key = self._attached[client][name]
            clients = [each for each, keys in self._attached.items() if key in keys.values()]
            reached = [self._reached.get(each, set()) for each in clients]
            left = set(range(num_parts)) - {part for each in reached for at, part in each if at == model}
            return left if len(left) > sum(not each for each in reached) else set()

    def waiting(self, client: object) -> dict[str, Tensor]:
        """Return what `take` would return, and leave it there."""
        with self._lock:
            self._drain()
            return self._by_name(client, self._pending.get(client, IdSets()).tensors())

    def take(self, client: object) -> dict[str, Tensor]:
        """Return the ids that changed or were removed since the client's last call."""
        with self._lock:
            self._drain()
            pending = self._pending.get(client, IdSets()).tensors()
            self._pending[client] = IdSets()
            return self._by_name(client, pending)

    def has_changed(self, client: object) -> bool:
        """Return whether anything has changed since the tables were attached, as far as `take` knows."""
        with self._lock:
            return not self._changed.isdisjoint(self._attached.get(client, {}).values())

    @property
    def knows_removals(self) -> bool:
        """Whether `all_ids` has the ids of all removed rows."""
        with self._lock:
            return bool(self._journal.labels or self._removals.labels)

    def all_ids(self, client: object) -> dict[str, Tensor]:
        """Return all ids that changed since the tables were attached; if too many, those of all rows
        instead."""
        with self._lock:
            self._drain()
            known = self._journal.since("")
            if known is not None:
                return self._by_name(client, known)
            removed = self._by_name(client, self._removals.since("") or {})
            tables = {name: self._tables[key] for name, key in self._attached.get(client, {}).items()}
        found = IdSets()
        found.add(removed)
        found.add(scan_ids(tables))
        return found.tensors()

    def _by_name(self, client: object, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        keys = self._attached.get(client, {})
        return {name: ids[key] for name, key in keys.items() if key in ids}

    def _drain(self) -> None:
        """Distribute the changed ids to the clients that have attached their table."""
        for key, table in self._tables.items():
            updated, removed = table.drain_touched(self._consumer)
            ids = join_changes(updated, removed)
            if not ids.numel():
                continue
            self._changed.add(key)
            self._journal.add({key: ids})
            self._removals.add({key: removed})
            for client, keys in self._attached.items():
                if key in keys.values():
                    self._pending[client].add({key: ids})
