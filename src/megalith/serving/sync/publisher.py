"""The publisher: rows trained a moment ago reach every server of a model.

The training loop calls `step` after each step; once an interval has passed that collects the ids that changed
and copies dense weights, which takes the training thread milliseconds. Everything else happens in one thread
for each server (`sender.py`), so a server that is slow, hangs or is gone delays neither training nor the
other servers. Who serves the model is found by a discovery, and may change at any time.
"""

from __future__ import annotations

import logging
import threading
import time as clock
import uuid
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Literal, Self

import torch
from torch import Tensor, nn

from megalith.errors import InputError, UsageError
from megalith.ops.bucketing import dedup
from megalith.serving.client.credentials import Credentials
from megalith.serving.discovery import Discovery, SyncBackend, Watch, open_discovery
from megalith.serving.discovery.addresses import check_address
from megalith.serving.discovery.znode_records import SavedModel
from megalith.serving.sync.backlog import Interval
from megalith.serving.sync.journal import Journal, Swollen
from megalith.serving.sync.message_header import MessageHeader, ModelLayout
from megalith.serving.sync.parameter_source import ParameterSource
from megalith.serving.sync.push_messages import is_assign
from megalith.serving.sync.sender import Sender
from megalith.serving.sync.target import SenderOptions, Sequence, TargetReport
from megalith.serving.wire_names import HASHTABLE_ASSIGN
from megalith.shards import Shards

log = logging.getLogger("megalith.serving")

PATIENCE = 60.0
"""Seconds that a target may be missing from discovery before it is given up."""
TIDY_IDLE, TIDY_AT_ONCE = 0.5, 0.75
"""How full the journal is when its ids are put together: while nothing is sent, and anyway."""
_JOIN_SECONDS = 5.0


class Publisher:
    """Pushes a model's rows and dense weights to its servers, until `close`. For the training thread.

    model: in training, or the shards of its tables. targets: who serves it; a discovery that is given as an
    address is started here and stopped by `close`. model_name: what it is called there. interval: seconds
    between pushes. base: the id of the save that the model's rows are of now, if there is one: servers that
    stand there need nothing but changes. dense: push dense weights too.
    protocol: "monolith" for servers of Monolith's, which know no positions, deletions and dense weights.
    signature: "hashtable_assign" or "raw_assign". max_backlog: rows that may wait for one target; one with
    more starts over. max_journal: ids remembered for targets that come late. timeout: seconds of one message.
    session, index, count: where several ranks publish, a session id they agreed on, and which of how many
    this is.
    """

    def __init__(
        self,
        model: nn.Module | Shards,
        targets: SyncBackend | str,
        *,
        model_name: str,
        interval: float = 10.0,
        base: str | None = None,
        dense: bool = True,
        credentials: Credentials | None = None,
        protocol: Literal["megalith", "monolith"] = "megalith",
        signature: str = HASHTABLE_ASSIGN,
        max_backlog: int = 10_000_000,
        max_journal: int = 20_000_000,
        timeout: float = 3.0,
        session: str | None = None,
        index: int = 0,
        count: int = 1,
    ) -> None:
        _check(interval=interval, timeout=timeout, max_backlog=max_backlog)
        if protocol not in ("megalith", "monolith"):
            raise InputError(f"protocol must be megalith or monolith, got {protocol!r}")
        if not is_assign(signature):
            raise InputError(f"signature must be hashtable_assign or raw_assign, got {signature!r}")
        self.session = uuid.uuid4().hex if session is None else session
        MessageHeader(self.session, index, count)
        self.model_name = SavedModel(model_name, "entry").model_name
        self._owned = open_discovery(targets) if isinstance(targets, str) else None
        self._targets: SyncBackend = self._owned or targets  # type: ignore[assignment]
        self.lock = threading.Condition(threading.RLock())
        # Every rank has the same dense weights; one of them is enough to push them.
        self.source = ParameterSource(model, dense=dense and index == 0 and protocol == "megalith")
        self.journal = Journal(max_journal)
        # A name of its own: two publishers of one model must not drain each other's ids.
        self._consumer = f"publisher {self.session} {index}"
        self._seconds = interval
        self._options = SenderOptions(
            session=self.session,
            index=index,
            count=count,
            signature=signature,
            plain=protocol == "monolith",
            timeout=timeout,
            max_backlog=max_backlog,
            credentials=credentials,
            on_layout=self._watch_parts,
        )
        self._senders: dict[tuple[str, str], Sender] = {}
        self._named: dict[str, set[tuple[str, str]]] = {}
        """The targets of each service, as discovery has them."""
        self._parts: set[str] = set()
        self._missing_since: dict[tuple[str, str], float] = {}
        self._sequences: dict[tuple[str, str], Sequence] = {}
        self._watches: dict[str, Watch] = {}
        self._tidying: threading.Thread | None = None
        self._closed = False
        self.source.track(self._consumer)
        self.journal.label(base or "")
        self.interval = Interval(0, clock.time())
        self.dense: Mapping[str, Tensor] = self.source.copy_dense() or {}
        self.dense_number = 0 if self.dense else -1
        self._due = clock.monotonic() + interval
        try:
            if self._owned is not None:
                self._owned.start()
            self._targets.subscribe_model(self.model_name)
            self._find_targets()
        except BaseException:
            self.close()
            raise

    # ---- the training thread

    def step(self) -> bool:
        """To be called after every training step; whether this one ended an interval."""
        if clock.monotonic() < self._due:
            return False
        self.publish()
        return True

    def publish(self) -> int:
        """Ends the interval now, and returns its number: what changed is sent to every target."""
        self._check_open()
        ids = self.source.drain(self._consumer)
        dense = self.source.copy_dense()
        with self.lock:
            self.interval = Interval(self.interval.number + 1, clock.time())
            if dense is not None:
                self.dense, self.dense_number = dense, self.interval.number
            self.journal.add(ids)
            for sender in self._senders.values():
                sender.add(ids, self.interval)
            self.lock.notify_all()
            number = self.interval.number
        self.tidy()
        self._due = clock.monotonic() + self._seconds
        self._find_targets()
        self._give_up_missing()
        return number

    def tidy(self) -> None:
        """Puts the journal's ids together, each once, in a thread of its own, where room gets scarce.

        If it can wait, not while a target is being sent to, which needs the processor more.
        """
        with self.lock:
            sending = any(each.report.error is None for each in self._lagging(self.interval.number))
            if self.journal.fullness < (TIDY_AT_ONCE if sending else TIDY_IDLE):
                return
            if self._closed or self._tidying is not None:
                return
            swollen = self.journal.swollen()
            if swollen:
                self._tidying = threading.Thread(
                    target=self._tidy, args=(swollen,), name="megalith journal", daemon=True
                )
                self._tidying.start()

    def _tidy(self, swollen: list[Swollen]) -> None:
        for sets, table, parts in swollen:
            ids = dedup(torch.cat(parts)).ids
            with self.lock:
                sets.replace(table, parts, ids)
        with self.lock:
            self._tidying = None
            self.lock.notify_all()

    def checkpoint_taken(self, save_id: str) -> None:
        """Says that the model as it is now is that save; to be called right after it was taken or begun.

        No training step may lie between. Servers that start from that save are sent what changed since.
        """
        self._check_open()
        ids = self.source.drain(self._consumer)
        with self.lock:
            self.journal.add(ids)
            # They belong to the interval under way, which the next call of `publish` ends.
            for sender in self._senders.values():
                sender.add(ids, self.interval)
            self.journal.label(save_id)

    def flush(self, timeout: float = 30.0) -> bool:
        """Pushes everything and waits until all targets have acknowledged it; whether they have, in time."""
        self.source.settle()
        number = self.publish()
        with self.lock:
            return self.lock.wait_for(lambda: not self._lagging(number) and not self._unserved(), timeout)

    def close(self) -> None:
        """Ends it: what has not been sent is not sent. Closing again is harmless."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            senders, self._senders = list(self._senders.values()), {}
            tidying = self._tidying
            watches = list(self._watches.values())
            self.lock.notify_all()
        for watch in watches:
            watch.cancel()
        for sender in senders:
            sender.close()
        with self.lock:
            self.lock.notify_all()
        for sender in senders:
            sender.join(_JOIN_SECONDS)
        if tidying is not None:
            tidying.join(_JOIN_SECONDS)
        if self._owned is not None:
            self._owned.stop()
        self.source.untrack(self._consumer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this publisher is closed; make a new one")

    # ---- how it is getting on

    def report(self) -> list[TargetReport]:
        """How each target is getting on."""
        with self.lock:
            return [replace(sender.report) for _, sender in sorted(self._senders.items())]

    def lagging(self) -> list[TargetReport]:
        """The targets that have not acknowledged everything that was published."""
        with self.lock:
            lagging = [replace(sender.report) for sender in self._lagging(self.interval.number)]
            nowhere = "discovery names no server of it"
            return lagging + [TargetReport("nowhere", part, error=nowhere) for part in self._unserved()]

    def _lagging(self, number: int) -> list[Sender]:
        done = {sender.report.model for sender in self._senders.values() if sender.acknowledged >= number}
        return [
            sender
            for sender in self._senders.values()
            # An address may be named for every part of a model, and have one of them.
            if sender.report.named
            and sender.acknowledged < number
            and not (sender.absent and sender.report.model in done)
        ]

    def _unserved(self) -> list[str]:
        """The parts of an entry's rows that nobody is known to have."""
        return sorted(service for service in self._parts if not self._named.get(service))

    # ---- targets

    def _find_targets(self) -> None:
        if self._options.plain or not isinstance(self._targets, Discovery):
            self._ask_for_targets()
            return
        # A model that stands alone, and the entry of one in parts; both answer to the model's name.
        for part in ("standalone", "entry"):
            self._watch(f"{self.model_name}:{part}", self.model_name)

    def _ask_for_targets(self) -> None:
        """Where changes are not told, and for Monolith: the servers of this rank's part."""
        try:
            name, found = self._targets.get_sync_targets(f"ps_{self._options.index}")
            self._set_targets(name, {(check_address(address), name) for address in found})
        except Exception as error:  # training goes on, whatever a backend of somebody else's raises
            log.warning("%s: no targets now: %s: %s", self.model_name, type(error).__name__, error)

    def _watch(self, service: str, name: str) -> None:
        with self.lock:
            if self._closed or service in self._watches:
                return
            self._watches[service] = Watch(lambda: None)  # so that nobody else begins it
        assert isinstance(self._targets, Discovery)
        try:
            watch = self._targets.watch(
                service,
                lambda replicas: self._set_targets(service, {(each.address, name) for each in replicas}),
            )
        except BaseException:
            with self.lock:
                del self._watches[service]  # the next time, then
            raise
        with self.lock:
            self._watches[service] = watch
            closed = self._closed
        if closed:  # not with the lock held: discovery holds its own when it calls back
            watch.cancel()

    def _watch_parts(self, layout: ModelLayout) -> None:
        """Once an entry is met, the parts that hold its rows are targets too."""
        if layout.part != "entry" or not isinstance(self._targets, Discovery):
            return
        services = [f"{self.model_name}:ps_{number}" for number in range(layout.sub_graph_num)]
        with self.lock:
            self._parts = set(services)
        for service in services:
            self._watch(service, service)

    def _set_targets(self, service: str, targets: set[tuple[str, str]]) -> None:
        with self.lock:
            if self._closed:
                return
            self._named[service] = targets
            named = set().union(*self._named.values())
            for key in sorted(named - set(self._senders)):
                sequence = self._sequences.setdefault(key, Sequence())
                sender = Sender(*key, self, self._options, sequence)
                self._senders[key] = sender
                sender.start()
            for key, sender in self._senders.items():
                sender.report.named = key in named
                if key in named:
                    self._missing_since.pop(key, None)
                else:
                    self._missing_since.setdefault(key, clock.monotonic())
            self.lock.notify_all()

    def _give_up_missing(self) -> None:
        """Ends the senders of targets that discovery has not named for long."""
        with self.lock:
            late = [key for key, since in self._missing_since.items() if clock.monotonic() - since > PATIENCE]
            for key in late:
                del self._missing_since[key]
                sender = self._senders.pop(key)
                log.warning("%s: no longer a server of %s", *key)
                sender.close()
            self.lock.notify_all()


def _check(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise InputError(f"publisher: {name} must be above 0, got {value}")
