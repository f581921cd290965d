"""The publisher: pushes trained rows and dense weights to every server of a model.

The training loop calls `step` after each training step. Once an interval has passed, `step` collects the
changed ids and copies the dense weights, which takes the training thread milliseconds. Everything else
happens in one thread per server (`sender.py`), so a server that is slow or does not answer delays neither
training nor the other servers. A discovery finds the servers, which may change at any time.

Each rank of a session has a publisher of its own. With parameter servers, each server has one, because it
holds the rows; `ServerPublisher` starts and calls them:

    number in the session    process             sends
    0                        the worker          dense weights
    1 ... servers            a parameter server  the rows that it holds

With Monolith's protocol server i has number i and pushes to part ps_i; the worker sends nothing.
Model servers accept the messages of all publishers of a session, and replace rows together.
"""

from __future__ import annotations

import logging
import threading
import time as clock
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from megalith.checkpoint.model_state import collections_of
from megalith.errors import InputError, ServerLostError, UsageError
from megalith.ops import checks
from megalith.ops.bucketing import dedup
from megalith.ps import ServerShards
from megalith.serving.client.credentials import Credentials
from megalith.serving.discovery import (
    Discovery,
    ServiceName,
    StaticDiscovery,
    SyncBackend,
    Watch,
    open_discovery,
)
from megalith.serving.discovery.contract import Replicas, check_address
from megalith.serving.sync.changed_ids import Interval, Journal, Uncompacted
from megalith.serving.sync.parameter_source import ParameterSource
from megalith.serving.sync.protocol import MessageHeader, ModelLayout, SequenceCounter
from megalith.serving.sync.push_messages import is_assign
from megalith.serving.sync.sender import Sender, SenderOptions, TargetReport
from megalith.serving.wire_names import HASHTABLE_ASSIGN
from megalith.shards import Shards, ShardsPart

logger = logging.getLogger(__name__)

MISSING_SECONDS = 60.0  # How long a target may be missing from discovery before its sender is closed
# The fullness above which the journal is compacted: while nothing is being sent, and in any case
COMPACT_IDLE, COMPACT_ALWAYS = 0.5, 0.75
START_SECONDS = 15.0  # How long a publisher waits for its discovery before training begins without it
CONSUMER = "publisher "  # How the names of publishers as consumers of touched rows begin
_JOIN_SECONDS = 5.0


class Publisher:
    """Pushes the rows and dense weights of a model to its servers, until `close`.

    Its methods are called by the training thread.

    Args:
        model: The model in training, or the shards of its tables.
        targets: The discovery of the servers. One given as a URL is started here and stopped by `close`. A
            `SyncBackend` that is not a Discovery lists the parts with rows only, so the entry of a model in
            parts gets no dense weights.
        model_name: The name of the model on the servers.
        interval: Seconds between pushes.
        base: The id of the save that the model's rows are equal to now, if there is one. Servers at that save
            need only later changes.
        dense: Push dense weights too.
        credentials: The credentials for the servers.
        protocol: Either "megalith", or "monolith" for Monolith's servers, without positions and dense
            weights; a removed row becomes zeros there. Publisher `index` then pushes to the part ps_`index`.
        signature: Either "hashtable_assign" or "raw_assign".
        max_backlog: The number of rows that may wait for one target; beyond it the target starts over.
        max_journal: The number of ids remembered for targets that connect later.
        timeout: Seconds for one message.
        session: The session id that all ranks agreed on, 32 hex digits; random if not given.
        session_number: Orders the sessions of a model: servers that have followed a session refuse those with
            lower numbers. The same on all ranks; None: microseconds since 1970.
        index: The number of this publisher in the session, from 0.
        count: The number of publishers in the session.

    Raises:
        InputError: An argument is out of range or malformed.
        DiscoveryError: The discovery cannot be started. If it only cannot be reached, it is connected later.
    """

    needs_rows = True  # Whether the rows must be in this process

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
        session_number: int | None = None,
        index: int = 0,
        count: int = 1,
    ) -> None:
        for name, seconds in (("interval", interval), ("timeout", timeout)):
            checks.seconds(seconds, f"publisher: {name}")
        for name, number in (("max_backlog", max_backlog), ("max_journal", max_journal)):
            checks.integer(number, f"publisher: {name}")
        checks.one_of(protocol, ("megalith", "monolith"), "publisher: protocol")
        checks.flag(dense, "publisher: dense")
        if base is not None:
            checks.text(base, "publisher: base")
        if not isinstance(targets, SyncBackend | str):
            raise InputError(
                f"publisher: targets must be a discovery or its URL, got {type(targets).__name__}"
            )
        if not isinstance(signature, str) or not is_assign(signature):
            raise InputError(f"signature must be 'hashtable_assign' or 'raw_assign', got {signature!r}")
        self.session = uuid.uuid4().hex if session is None else checks.text(session, "publisher: session")
        number = clock.time_ns() // 1000
        if session_number is not None:
            number = checks.integer(session_number, "publisher: session_number")
        checks.integer(index, "publisher: index", least=0)
        checks.integer(count, "publisher: count")
        MessageHeader(self.session, index, count)
        self.model_name = ServiceName(model_name, "entry").model
        self._owned = open_discovery(targets) if isinstance(targets, str) else None
        self._targets: SyncBackend = self._owned or targets  # type: ignore[assignment]
        self.lock = threading.Condition(threading.RLock())
        # Every rank has the same dense weights, so one rank pushes them.
        own_dense = dense and index == 0 and protocol == "megalith"
        self.source = ParameterSource(model, dense=own_dense, needs_rows=self.needs_rows)
        self.journal = Journal(max_journal)
        # A unique name: two publishers of one model must not drain each other's ids.
        self._consumer = f"{CONSUMER}{self.session} {index}"
        self._seconds = interval
        self.options = SenderOptions(
            session=self.session,
            number=number,
            index=index,
            count=count,
            signature=signature,
            monolith=protocol == "monolith",
            timeout=timeout,
            max_backlog=max_backlog,
            credentials=credentials,
        )
        self._senders: dict[tuple[str, str], Sender] = {}
        self._listed: dict[str, set[tuple[str, str]]] = {}  # The targets of each service that discovery lists
        self._parts: set[str] = set()
        # The number of parts with rows, once a target has answered; 0: not known, or not in parts
        self._num_parts = 0
        self._asking = threading.Lock()
        self._missing_since: dict[tuple[str, str], float] = {}
        self._sequences: dict[tuple[str, str], SequenceCounter] = {}
        self._watches: dict[str, Watch] = {}
        self._compacting: threading.Thread | None = None
        self._closed = False
        self.source.track(self._consumer)
        self.journal.begin_epoch(base or "")
        self.interval = Interval(0, clock.time())
        self.dense: Mapping[str, Tensor] = self.source.copy_dense() or {}
        self.dense_number = 0 if self.dense else -1
        self._due = clock.monotonic() + interval
        try:
            if self._owned is not None:
                self._start_discovery(self._owned)
            self._targets.subscribe_model(self.model_name)
            self._find_targets()
        except BaseException:
            self.close()
            raise

    def _start_discovery(self, discovery: Discovery) -> None:
        """Start a discovery; one that cannot be reached connects later, and training begins without it."""
        discovery.start(0)
        deadline = clock.monotonic() + START_SECONDS
        while not discovery.is_connected and clock.monotonic() < deadline:
            clock.sleep(0.02)
        if not discovery.is_connected:
            logger.warning("%s: discovery does not answer; rows are pushed when it does", self.model_name)

    # ---- the training thread

    def step(self) -> bool:
        """Call this after every training step; returns whether the step ended an interval."""
        if clock.monotonic() < self._due:
            return False
        self.publish()
        return True

    def publish(self) -> int:
        """End the interval now and send the changes to every target; return the number of the interval."""
        self._check_open()
        ids = self.source.drain(self._consumer)
        try:
            dense = self.source.copy_dense()
        except BaseException:
            self.source.put_back(self._consumer, ids)
            raise
        with self.lock:
            self.interval = Interval(self.interval.number + 1, clock.time())
            if dense is not None:
                self.dense, self.dense_number = dense, self.interval.number
            self.journal.add(ids)
            for sender in self._senders.values():
                sender.add(ids, self.interval)
            self.lock.notify_all()
            number = self.interval.number
        self.compact_journal()
        self._due = clock.monotonic() + self._seconds
        self._find_targets()
        self._close_missing()
        return number

    def compact_journal(self) -> None:
        """Remove duplicate ids from the journal in another thread, if it is nearly full.

        It waits until no send is in progress, if it can, to leave the CPU to the senders.
        """
        with self.lock:
            sending = any(each.report.error is None for each in self._lagging(self.interval.number))
            if self.journal.fullness < (COMPACT_ALWAYS if sending else COMPACT_IDLE):
                return
            if self._closed or self._compacting is not None:
                return
            uncompacted = self.journal.needs_compaction()
            if uncompacted:
                self._compacting = threading.Thread(
                    target=self._compact, args=(uncompacted,), name="megalith journal", daemon=True
                )
                self._compacting.start()

    def _compact(self, uncompacted: list[Uncompacted]) -> None:
        for sets, table, parts in uncompacted:
            ids = dedup(torch.cat(parts)).ids
            with self.lock:
                sets.replace(table, parts, ids)
        with self.lock:
            self._compacting = None
            self.lock.notify_all()

    def checkpoint_taken(self, save_id: str) -> None:
        """Record that the model is equal to a save; servers at that save are sent later changes only.

        Call this when the save is taken or begun, before the next training step.

        Args:
            save_id: The id of the save.
        """
        checks.text(save_id, "publisher: save_id")
        self._check_open()
        ids = self.source.drain(self._consumer)
        with self.lock:
            self.journal.add(ids)
            # They belong to the interval in progress, which the next call of `publish` ends.
            for sender in self._senders.values():
                sender.add(ids, self.interval)
            self.journal.begin_epoch(save_id)

    def flush(self, timeout: float = 30.0) -> bool:
        """Push everything and wait until all targets have acknowledged it.

        Args:
            timeout: Seconds to wait.

        Returns:
            Whether all targets have acknowledged in time.
        """
        self.source.flush()
        return self._wait_for(self.publish(), timeout)

    def _wait_for(self, number: int, timeout: float) -> bool:
        """Wait until all targets have acknowledged an interval; return whether they have in time."""
        with self.lock:
            return self.lock.wait_for(lambda: not self._lagging(number) and not self._unserved(), timeout)

    def close(self) -> None:
        """Stop pushing; unsent changes are dropped. A second call does nothing."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            senders, self._senders = list(self._senders.values()), {}
            compacting = self._compacting
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
        if compacting is not None:
            compacting.join(_JOIN_SECONDS)
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

    # ---- progress

    def report(self) -> list[TargetReport]:
        """Return the progress of each target."""
        with self.lock:
            return [replace(sender.report) for _, sender in sorted(self._senders.items())]

    def lagging(self) -> list[TargetReport]:
        """Return the targets that have not acknowledged everything published, and parts without a server."""
        with self.lock:
            lagging = [replace(sender.report) for sender in self._lagging(self.interval.number)]
            error = "discovery lists no server of it"
            return lagging + [TargetReport("nowhere", part, error=error) for part in self._unserved()]

    def _lagging(self, number: int) -> list[Sender]:
        done = {sender.report.model for sender in self._senders.values() if sender.acknowledged >= number}
        return [
            sender
            for sender in self._senders.values()
            # An address may be listed for every part of a model although it serves one of them.
            if sender.report.listed
            and sender.acknowledged < number
            and not (sender.absent and sender.report.model in done)
        ]

    def _unserved(self) -> list[str]:
        """Return the parts of the entry's rows that no known server has."""
        return sorted(service for service in self._parts if not self._listed.get(service))

    # ---- targets

    def _find_targets(self) -> None:
        if self.options.monolith or not isinstance(self._targets, Discovery):
            self._ask_for_targets()
            return
        # A standalone model, or the entry of a model in parts; both are called by the model's name.
        for part in ("standalone", "entry"):
            self._watch(f"{self.model_name}:{part}", self.model_name)

    def _ask_for_targets(self) -> None:
        """Get the servers of all parts, or of this rank's part while their number is not known."""
        # For Monolith, where a rank is a part, and for backends without watches.
        numbers = range(self._num_parts) if self._num_parts else (self.options.index,)
        for number in numbers:
            try:
                with self._asking:
                    name, found = self._targets.get_sync_targets(f"ps_{number}")
                with self.lock:
                    self._parts |= {name} if self._num_parts else set()
                self._set_targets(name, {(check_address(address), name) for address in found})
            except Exception as error:  # an error of a user's backend must not stop training
                logger.warning("%s: no targets now: %s: %s", self.model_name, type(error).__name__, error)

    def _watch(self, service: str, name: str) -> None:
        with self.lock:
            if self._closed or service in self._watches:
                return
            self._watches[service] = Watch(lambda: None)  # a placeholder: no other thread starts it
        assert isinstance(self._targets, Discovery)

        def listed(replicas: Replicas) -> None:
            self._set_targets(service, {(each.address, name) for each in replicas})

        try:
            watch = self._targets.watch(service, listed)
        except BaseException:
            with self.lock:
                del self._watches[service]  # so that it is tried again
            raise
        with self.lock:
            self._watches[service] = watch
            closed = self._closed
        if closed:  # without the lock: discovery holds its own lock when it calls back
            watch.cancel()

    def find_parts(self, layout: ModelLayout) -> None:
        """Find the parts that hold the rows of a model, once the layout of the first target is known.

        Args:
            layout: The layout that a server has reported.
        """
        if not isinstance(self._targets, Discovery):
            with self.lock:
                known = layout.sub_graph_num == self._num_parts
                self._num_parts = layout.sub_graph_num
            if not known:
                self._ask_for_targets()
            return
        if layout.part != "entry":
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
            self._listed[service] = targets
            listed = set().union(*self._listed.values())
            for key in sorted(listed - set(self._senders)):
                sequence = self._sequences.setdefault(key, SequenceCounter())
                sender = Sender(*key, self, sequence)
                self._senders[key] = sender
                sender.start()
            for key, sender in self._senders.items():
                sender.report.listed = key in listed
                if key in listed:
                    self._missing_since.pop(key, None)
                else:
                    self._missing_since.setdefault(key, clock.monotonic())
            self.lock.notify_all()

    def _close_missing(self) -> None:
        """Close the senders of targets that discovery has not listed for long."""
        with self.lock:
            oldest = clock.monotonic() - MISSING_SECONDS
            for key in [key for key, since in self._missing_since.items() if since < oldest]:
                del self._missing_since[key]
                sender = self._senders.pop(key)
                logger.warning("%s: no longer a server of %s", *key)
                sender.close()
            self.lock.notify_all()


_KEY = "publisher"


class ServerPublisher(Publisher):
    """Pushes the rows of parameter servers, and the dense weights of this process, until `close`.

    One worker makes it. A server that is started again has no publisher: the next call raises
    ServerLostError, and a new ServerPublisher sends everything.

    Args:
        model: The model in training, or its `ServerShards`.
        targets: The URL of the discovery of the serving processes; each server opens it.
        model_name: As for `Publisher`.
        interval: As for `Publisher`.
        dense: As for `Publisher`.
        refresh: Called before each push of dense weights; it writes the current ones into the model, for
            instance if they are on servers too. None: the model has them.
        options: Other arguments of `Publisher`, except session, index and count. With protocol="monolith"
            server i pushes its rows to the part ps_i, so the model needs a part for each server.

    Raises:
        InputError: An argument is wrong.
        UsageError: The tables are not on one `ServerShards`, or it has a publisher.
    """

    needs_rows = False

    def __init__(
        self,
        model: nn.Module | Shards,
        targets: str,
        *,
        model_name: str,
        interval: float = 10.0,
        dense: bool = True,
        refresh: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        checks.callback(refresh, "ServerPublisher: refresh")
        if not isinstance(targets, str):
            raise InputError(f"targets must be the URL of a discovery, got {type(targets).__name__}")
        own = ("session", "index", "count")
        if given := [name for name in own if name in options]:
            raise InputError(f"ServerPublisher sets {', '.join(given)} itself")
        if isinstance(model, Shards):
            found = [model]
        elif isinstance(model, nn.Module):
            found = list({id(c.shards): c.shards for c in collections_of(model).values()}.values())
        else:
            raise InputError(f"a publisher needs a model or its shards, got {type(model).__name__}")
        if len(found) != 1 or not isinstance(found[0], ServerShards):
            raise UsageError("ServerPublisher needs a model whose tables are on one ServerShards")
        self._tables = found[0]
        self._refresh = refresh
        self._started = False
        monolith = options.get("protocol") == "monolith"
        number = options.pop("session_number", None)
        session = {
            "session": uuid.uuid4().hex,
            # The same on all servers
            "session_number": clock.time_ns() // 1000 if number is None else number,
            "count": len(self._tables.links) + (0 if monolith else 1),
        }
        common: dict[str, Any] = {"model_name": model_name, "interval": interval, **options, **session}
        if refresh is not None:
            refresh()
        # Monolith's servers take no dense weights, so the worker has nothing to send.
        own_targets = StaticDiscovery({}) if monolith else targets
        super().__init__(model, own_targets, dense=dense, index=0, **common)
        try:
            self._tables.flush()
            self._tables.each_part(_start, targets, common, background=True)
            self._started = True
        except BaseException:
            self.close()
            raise

    def publish(self) -> int:
        # Every server sends its changes.
        if self._started:
            self._tables.each_part(_call, "publish")
        if self._refresh is not None:
            self._refresh()
        return super().publish()

    def checkpoint_taken(self, save_id: str) -> None:
        super().checkpoint_taken(save_id)
        self._tables.each_part(_call, "checkpoint_taken", save_id)

    def flush(self, timeout: float = 30.0) -> bool:
        # For the changes of all servers.
        self._tables.flush()
        number = self.publish()
        deadline = clock.monotonic() + timeout
        done = self._tables.each_part(_wait, timeout, background=True)
        return self._wait_for(number, max(0.0, deadline - clock.monotonic())) and all(done)

    def report(self) -> list[TargetReport]:
        """Return the progress of each target, for this worker and for each server."""
        parts = self._tables.each_part(_call, "report") if self._started else []
        return super().report() + [each for part in parts for each in part]

    def lagging(self) -> list[TargetReport]:
        """Return the targets that have not acknowledged everything published, by any publisher."""
        parts = self._tables.each_part(_call, "lagging") if self._started else []
        return super().lagging() + [each for part in parts for each in part]

    def close(self) -> None:
        """Stop pushing, also on the servers; unsent changes are dropped. A second call does nothing."""
        super().close()
        if self._started:
            self._started = False
            with suppress(ServerLostError):  # a server that was started again has no publisher
                self._tables.each_part(_close, background=True)


class PartPublisher:
    """The publisher of one server; a `Kept`."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher

    def abandon(self) -> None:
        """Stop pushing: the worker has left."""
        self.publisher.close()


# ---- what runs on servers


def _start(part: ShardsPart, targets: str, options: dict[str, Any]) -> None:
    if _KEY in part.kept:
        raise UsageError(f"server {part.index} has a publisher already: close it first")
    known = dict.fromkeys(name for stats in part.shards.stats().values() for name in stats.consumers)
    for left in known:
        if left.startswith(CONSUMER):  # of a publisher before this server was started again
            part.shards.untrack(left)
    index = part.index + (0 if options.get("protocol") == "monolith" else 1)
    publisher = Publisher(part.shards, targets, dense=False, index=index, **options)
    part.kept[_KEY] = PartPublisher(publisher)


def _publisher_of(part: ShardsPart) -> Publisher:
    kept = part.kept.get(_KEY)
    if not isinstance(kept, PartPublisher):
        raise ServerLostError(
            f"server {part.index} has no publisher: it was started again, or the worker has left; make a new "
            "ServerPublisher"
        )
    return kept.publisher


def _call(part: ShardsPart, method: str, *arguments: Any) -> Any:
    return getattr(_publisher_of(part), method)(*arguments)


def _wait(part: ShardsPart, timeout: float) -> bool:
    publisher = _publisher_of(part)
    return publisher._wait_for(publisher.interval.number, timeout)


def _close(part: ShardsPart) -> None:
    kept = part.kept.pop(_KEY, None)
    if kept is not None:
        kept.abandon()
