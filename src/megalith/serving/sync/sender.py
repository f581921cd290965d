"""The sender: sends changes to one target, in its own thread.

    state     | event                                   | action                               | next state
    ----------+-----------------------------------------+--------------------------------------+-----------
    HANDSHAKE | position with a save in the journal     | sync_begin; backlog = ids since then | PUSHING
    HANDSHAKE | position with an unknown save           | sync_reload; use its answer          | HANDSHAKE
    HANDSHAKE | still an unknown save, or ""            | sync_begin ""; backlog = all ids     | REPLACING
    HANDSHAKE | error                                   | wait, longer after each failure      | HANDSHAKE
    REPLACING | the last id of the interval is queued   | queue sync_end                       | PUSHING
    PUSHING   | an interval ends                        | queue rows and dense weights         | PUSHING
    PUSHING   | interval acknowledged with base ""      | queue an empty message to ask again  | PUSHING
    both      | acknowledged with an older save as base | drop backlog and queue               | HANDSHAKE
    both      | a call fails                            | wait, send the same bytes again      | unchanged
    both      | the target refuses a message            | drop backlog and queue               | HANDSHAKE
    both      | the backlog overflows                   | drop backlog and queue               | HANDSHAKE
    any       | `close`                                 | cancel all calls                     | CLOSED

"both" means REPLACING and PUSHING. `_backlog is None` means HANDSHAKE, and `_replacing` means REPLACING.

Invariants:
- A sequence number belongs to one message: a message is sent again with the same bytes and number until it
  is acknowledged or refused; a message built later has a higher number.
- At most WINDOW messages are in flight. The target applies them in order; meanwhile the next ones are built.
- An interval counts as complete when its last message is acknowledged and the answer names a base.
- The backlog and the report are changed with the publisher's lock held.

With Monolith's protocol there is no handshake: messages have no header, one is in flight at a time, all ids
in the journal are sent first, and a removed id is sent as a row of zeros, which is how an absent id reads.

The publisher owns the state that it shares with its senders (source, journal, interval, dense weights) and
changes it with `lock` held; a sender reads it, and fills in the report of its own target.
"""

from __future__ import annotations

import logging
import random
import threading
import time as clock
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from megalith.errors import InputError, MegalithError, RemoteError
from megalith.routing import Router
from megalith.serving.client.channels import Call, Connection
from megalith.serving.client.credentials import Credentials
from megalith.serving.export.row_format import RowFormat
from megalith.serving.proto.message_types import Message
from megalith.serving.proto.tf_tensors import from_tensor_protos
from megalith.serving.sync import protocol as headers
from megalith.serving.sync.changed_ids import Backlog, Interval
from megalith.serving.sync.parameter_source import scan_ids
from megalith.serving.sync.protocol import (
    MAX_ANSWER_BYTES,
    MessageHeader,
    ModelLayout,
    Position,
    SequenceCounter,
    ask_position,
)
from megalith.serving.sync.push_messages import (
    MAX_CONTENT_BYTES,
    Inputs,
    MessageInputs,
    NotFiniteRows,
    PushMessage,
    encode_request,
    inputs_of,
    pack_inputs,
    row_bytes,
)
from megalith.serving.wire_names import SYNC_BEGIN, SYNC_END, SYNC_POSITION, SYNC_RELOAD

if TYPE_CHECKING:
    from megalith.serving.sync.publisher import Publisher


@dataclass
class TargetReport:
    """The progress of a target. Times are in seconds since 1970; None: not yet known."""

    address: str
    model: str  # The name of the model there
    part: str | None = None
    backlog: int = 0  # Rows to be sent
    sequence: int = 0
    rows: int = 0  # Rows sent and acknowledged
    error: str | None = None  # The last error; None after a success
    acknowledged_at: float | None = None  # The time of the last answer
    complete: float | None = None  # Everything trained until this time has arrived
    listed: bool = True  # Whether discovery still lists the target

    @property
    def staleness(self) -> float | None:
        """Seconds of training that have not arrived; None before the first interval is complete."""
        return None if self.complete is None else max(0.0, clock.time() - self.complete)


@dataclass(frozen=True)
class SenderOptions:
    """The options that all senders of a publisher share."""

    session: str
    number: int  # The number of the session
    index: int
    count: int
    signature: str
    monolith: bool  # Use Monolith's protocol: rows only, without positions
    timeout: float
    max_backlog: int
    credentials: Credentials | None


logger = logging.getLogger(__name__)

RELOAD_TIMEOUT = 120.0
REPLACING_PAUSE = 0.1
# Seconds between two attempts: doubled after each failure, and shortened at random by up to half
MIN_PAUSE, MAX_PAUSE = 0.05, 5.0
_REFUSALS = ("FAILED_PRECONDITION", "NOT_FOUND", "INVALID_ARGUMENT")  # the same message would fail again
_ONE_SHARD = Router("roundrobin", 1)


class HandshakeNeeded(MegalithError):
    """A target needs a new handshake."""


@dataclass
class _QueuedMessage:
    """A message to send. Encoded just before sending, so that a large dense weight is not in memory twice."""

    header: MessageHeader
    rows: int
    interval: Interval | None
    content: tuple[str, str, Inputs] | None  # Model, signature and inputs; None once it is encoded
    encoded: bytes = b""

    @property
    def data(self) -> bytes:
        """The bytes, always the same."""
        if self.content is not None:
            self.encoded, self.content = encode_request(*self.content), None
        return self.encoded


class Sender:
    """Sends to one target until `close`."""

    def __init__(
        self,
        address: str,
        model: str,
        publisher: Publisher,
        sequence: SequenceCounter,
    ) -> None:
        self.report = TargetReport(address, model, sequence=sequence.last)
        self.acknowledged = -1  # The number of the last interval that is complete at the target
        self.absent = False  # Whether the server answered that it does not serve this model
        self._publisher = publisher
        self._options = options = publisher.options
        self._sequence = sequence
        self._backlog: Backlog | None = None
        self._replacing = False
        self._layout = ModelLayout()
        self._row_bytes: dict[str, int] = {}
        # The save that the pushed rows extend; None while all rows are replaced
        self._base: str | None = None
        self._refused_base: str | None = None  # The save on which the target refused to begin
        self._failures = 0
        # Messages up to this sequence number may have arrived before an earlier one
        self._reordered_until = 0
        self._dense_sent = -1
        self._ready: deque[_QueuedMessage] = deque()
        self._closed = threading.Event()
        self._connection = Connection(address, options.credentials)
        self._random = random.Random(f"{options.session} {address} {model}")
        self._thread = threading.Thread(target=self._run, name=f"megalith push {address}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop sending and cancel calls in progress; does not wait for the thread (see `join`)."""
        self._closed.set()
        self._connection.close()

    def join(self, timeout: float) -> None:
        """Wait for the thread."""
        self._thread.join(timeout)

    def add(self, ids: Mapping[str, Tensor], interval: Interval) -> None:
        """Add changed ids, with the publisher's lock held; a backlog that overflows is dropped."""
        # ids: the ids of each table, int64 [n], without duplicates.
        if self._backlog is None:
            return  # the handshake decides what to send
        if not self._backlog.add(ids, interval):
            rows = self._options.max_backlog
            logger.warning("%s: more than %d rows wait to be sent", self.report.address, rows)
            self._backlog = None
            self.report.error = "its backlog overflowed; it starts over"
        self._update_report()

    def _update_report(self) -> None:
        self.report.backlog = 0 if self._backlog is None else len(self._backlog)
        self.report.sequence = self._sequence.last

    # ---- the thread

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                if self._backlog is None:
                    self._handshake()
                self._push()
            except MegalithError as error:
                self.absent = isinstance(error, RemoteError) and error.code == "NOT_FOUND"
                self._reset(self._describe(error))
            except Exception as error:  # a thread has no caller to raise it to
                logger.exception("%s: pushing failed", self.report.address)
                self._reset(f"{type(error).__name__}: {error}")
            self._failures += 1
            self._pause(self._failures)

    def _describe(self, error: MegalithError) -> str:
        """Return the message of an error without the address, which the report has."""
        return str(error).removeprefix(f"{self.report.address}: ")

    def _reset(self, reason: str) -> None:
        if self._closed.is_set():
            return
        if headers.NEWER_SESSION in reason and headers.NEWER_SESSION not in (self.report.error or ""):
            text = "%s: another trainer pushes to %s, so nothing of this one is served: %s"
            logger.error(text, self.report.address, self.report.model, reason)
        with self._publisher.lock:
            self._backlog = None
            self._ready.clear()
            self.report.error = reason
            self._update_report()

    def _pause(self, failures: int) -> None:
        longest = min(MAX_PAUSE, MIN_PAUSE * 2 ** min(failures, 10))
        self._closed.wait(self._random.uniform(longest / 2, longest))

    def _push(self) -> None:
        """Send messages until the target needs a new handshake or the sender is closed."""
        # Without sequence numbers nothing would keep two messages in order.
        window = 1 if self._options.monolith else headers.WINDOW
        in_flight: deque[tuple[_QueuedMessage, Call]] = deque()
        try:
            while not self._closed.is_set():
                while len(in_flight) < window and self._fill(wait=not in_flight):
                    message = self._ready.popleft()
                    in_flight.append((message, self._send(message)))
                if not in_flight:
                    return
                self._fill(wait=False)
                message, call = in_flight.popleft()
                answer = self._await_answer(message, call, last=in_flight[-1][0] if in_flight else None)
                self._acknowledge(message, answer)
        finally:
            for _, call in in_flight:
                call.cancel()

    def _send(self, message: _QueuedMessage) -> Call:
        metadata = () if self._options.monolith else message.header.metadata()
        return self._connection.start_predict(message.data, timeout=self._options.timeout, metadata=metadata)

    def _await_answer(self, message: _QueuedMessage, call: Call, *, last: _QueuedMessage | None) -> Message:
        """Return the answer to a message, which is sent again until there is one."""
        # last: The last message in flight after it, which arrives too early if this one is sent again.
        failures = 0
        while True:
            try:
                return call.result()  # no limit: the call has one
            except RemoteError as error:
                early = not failures and message.header.sequence <= self._reordered_until
                refused = not self._options.monolith and error.code in _REFUSALS
                if self._closed.is_set() or (refused and not early):
                    raise HandshakeNeeded(self._describe(error)) from None
                failures += 1
                if last is not None:
                    self._reordered_until = max(self._reordered_until, last.header.sequence)
                with self._publisher.lock:
                    self.report.error = self._describe(error)
            self._pause(failures)
            if self._closed.is_set():
                raise HandshakeNeeded("closed")
            with self._publisher.lock:
                if self._backlog is None:
                    raise HandshakeNeeded(self.report.error or "its backlog overflowed")
            call = self._send(message)

    def _acknowledge(self, message: _QueuedMessage, answer: Message) -> None:
        base = self._base
        if "base" in answer.outputs:
            outputs = from_tensor_protos(answer.outputs, max_bytes=MAX_ANSWER_BYTES)
            base = headers.read_string(outputs, "base")
        with self._publisher.lock:
            if base and base != self._base:
                # Another version is served. Unless it is from a later save, some of its rows are older.
                if self._base is not None and not self._publisher.journal.is_not_older(base, self._base):
                    raise HandshakeNeeded(f"a version of save {base!r} is served now")
                self._base = base
            self.report.rows += message.rows
            self.report.error = None
            self.report.acknowledged_at = clock.time()
            self._update_report()
        if message.interval is not None:
            if base == "":
                self._ask_again(message.interval)
            else:
                self._complete(message.interval)

    def _ask_again(self, interval: Interval) -> None:
        """Queue an empty message: other ranks still replace rows, and nothing is visible until then."""
        self._closed.wait(REPLACING_PAUSE)
        self._queue(self._options.signature, self._inputs(PushMessage()), 0, interval)

    def _complete(self, interval: Interval) -> None:
        self._failures = 0  # only here: a target that never accepts the last message must back off
        with self._publisher.lock:
            if interval.number >= self.acknowledged:
                self.acknowledged = interval.number
                self.report.complete = interval.time
            self._publisher.lock.notify_all()
        self._publisher.compact_journal()

    # ---- building messages

    def _fill(self, *, wait: bool) -> bool:
        """Build the next message; return False if there is none yet, or the state is no longer PUSHING."""
        if not self._ready:
            self._take(wait=wait)
        if self._ready:
            _ = self._ready[0].data
        return bool(self._ready)

    def _take(self, *, wait: bool) -> None:
        """Queue messages of the next ids."""
        with self._publisher.lock:
            if wait:
                self._publisher.lock.wait_for(self._has_work)  # no limit: the next piece of work
            if self._closed.is_set() or self._backlog is None or not self._backlog.is_pending:
                return
            ids, interval = self._backlog.take(MAX_CONTENT_BYTES, self._row_bytes)
            dense = self._dense_to_send() if interval is not None else {}
            left = self._backlog.sizes if interval is None else {}
        expected = {table: own.numel() + left[table] for table, own in ids.items() if left.get(table)}
        self._build(ids, expected, dense, interval)

    def _has_work(self) -> bool:
        return self._closed.is_set() or self._backlog is None or self._backlog.is_pending

    def _dense_to_send(self) -> Mapping[str, Tensor]:
        if not self._layout.dense or self._publisher.dense_number <= self._dense_sent:
            return {}
        self._dense_sent = self._publisher.dense_number
        return {name: weight for name, weight in self._publisher.dense.items() if name in self._layout.dense}

    def _build(
        self,
        ids: Mapping[str, Tensor],
        expected: Mapping[str, int],
        dense: Mapping[str, Tensor],
        interval: Interval | None,
    ) -> None:
        """Queue messages of rows and, if they complete an interval, of dense weights and of its end."""
        signature = self._options.signature
        push, contents, first = self._read(ids, expected, dense)
        if interval is not None and not contents and not self._replacing:
            if self._options.monolith:
                self._complete(interval)
                return
            contents.append(self._inputs(PushMessage()))
        requests = [(signature, inputs) for inputs in contents]
        if interval is not None and self._replacing:
            self._replacing = False
            requests.append((SYNC_END, {}))
        rows = push.num_ids
        for number, (name, inputs) in enumerate(requests, start=1):
            self._queue(name, inputs, rows, interval if number == len(requests) else None, first)
            rows, first = 0, b""

    def _read(
        self, ids: Mapping[str, Tensor], expected: Mapping[str, int], dense: Mapping[str, Tensor]
    ) -> tuple[PushMessage, list[MessageInputs], bytes]:
        """Return a push, the inputs of its messages, and the bytes of the first if rows are read into it."""
        source, signature, tables = self._publisher.source, self._options.signature, self._table_names()
        if ids and not self._options.monolith and not self._layout.codes:
            push = replace(source.find(ids), expected=expected)
            contents = pack_inputs(push, dense, signature, tables, MAX_CONTENT_BYTES)
            with suppress(NotFiniteRows):
                return push, contents, encode_request(self.report.model, signature, contents[0])
        push = source.read(ids)
        if self._options.monolith:
            push = push.with_zero_rows({name: table.dim for name, table in self._layout.tables.items()})
        else:
            push = replace(push.encoded(self._layout.codes), expected=expected)
        return push, pack_inputs(push, dense, signature, tables, MAX_CONTENT_BYTES), b""

    def _queue(
        self, signature: str, inputs: Inputs, rows: int, interval: Interval | None, data: bytes = b""
    ) -> None:
        header = self._header(self._sequence.next(), None if interval is None else interval.time)
        content = None if data else (self.report.model, signature, inputs)
        self._ready.append(_QueuedMessage(header, rows, interval, content, data))

    def _inputs(self, push: PushMessage) -> MessageInputs:
        return inputs_of(push, self._options.signature, self._table_names())

    def _table_names(self) -> tuple[str, ...]:
        return tuple(self._layout.tables) if self._layout.takes_rows else ()

    def _header(self, sequence: int, complete: float | None = None) -> MessageHeader:
        options = self._options
        return MessageHeader(
            options.session, options.index, options.count, sequence, complete, options.number
        )

    # ---- handshake

    def _handshake(self) -> None:
        """Ask for the position of the target, and decide what has to be sent."""
        if self._options.monolith:
            self._begin_monolith()
            return
        position = self._ask_position(SYNC_POSITION, 0)
        self._set_layout(position.layout)
        self._publisher.find_parts(position.layout)
        if position.session == self._options.session:
            self._sequence.skip(position.sequence)
        if position.base and not self._knows(position.base):
            position = self._ask_position(SYNC_RELOAD, self._sequence.next(), timeout=RELOAD_TIMEOUT)
        base = position.base if self._knows(position.base) else ""
        self._begin(base)
        if base:
            with self._publisher.lock:
                self._start_backlog(self._publisher.journal.since(base))
            self._base = base
        else:
            self._start_with_all_rows()
            self._base = None
        self._replacing = not base

    def _knows(self, base: str) -> bool:
        """Return whether the changes since a save are known, and the target can begin there."""
        with self._publisher.lock:
            return base in self._publisher.journal.labels and base != self._refused_base

    def _begin(self, base: str) -> None:
        sequence = self._sequence.next()
        try:
            begun = self._ask_position(SYNC_BEGIN, sequence, base=base)
        except RemoteError as error:
            # A server that cannot return to those rows is sent all rows the next time.
            self._refused_base = base if error.code == "FAILED_PRECONDITION" else self._refused_base
            raise
        if (begun.session, begun.sequence) != (self._options.session, sequence):
            raise HandshakeNeeded("the server answered sync_begin but did not start the session")
        self._refused_base = None

    def _begin_monolith(self) -> None:
        """Send all ids in the journal, because there are no positions."""
        tables = self._publisher.source.tables.items()
        layouts = {name: headers.TableLayout(table.dim, _ONE_SHARD) for name, table in tables}
        self._set_layout(ModelLayout(tables=layouts))
        with self._publisher.lock:
            labels = self._publisher.journal.labels
            if labels:
                self._start_backlog(self._publisher.journal.since(labels[0]))
        if not labels:
            self._start_with_all_rows()

    def _start_with_all_rows(self) -> None:
        with self._publisher.lock:
            self._start_backlog({})  # from here on, `add` adds changes
            interval = self._publisher.interval
        all_ids = scan_ids(self._publisher.source.tables)
        with self._publisher.lock:
            if self._backlog is None:
                raise HandshakeNeeded("its backlog overflowed")
            self._backlog.begin(all_ids, interval)

    def _start_backlog(self, ids: Mapping[str, Tensor] | None) -> None:
        if ids is None:
            raise HandshakeNeeded("the save of the target is no longer in the journal")
        self._backlog = Backlog(self._options.max_backlog, keep=self._layout.keep)
        self._backlog.begin(ids, self._publisher.interval)
        self._ready.clear()
        self._dense_sent = -1
        self.absent = False
        self.report.part = None if self._options.monolith else self._layout.part
        self._update_report()

    def _set_layout(self, layout: ModelLayout) -> None:
        self._layout = layout
        dims = {name: table.dim for name, table in layout.tables.items()}
        self._row_bytes = row_bytes(dims, layout.codes)
        for name, table in self._publisher.source.tables.items():
            served = layout.tables.get(name)
            if served is not None and served.dim != table.dim:
                raise InputError(f"table {name!r} has {served.dim} columns there, {table.dim} here")
            if served is not None and served.codes not in (None, RowFormat.codes_of(table.config)):
                raise InputError(
                    f"table {name!r} is served in another precision than that of its segments here "
                    "(Segment.serving): export the model again"
                )

    def _ask_position(
        self, signature: str, sequence: int, *, base: str | None = None, timeout: float | None = None
    ) -> Position:
        return ask_position(
            self._connection,
            self.report.model,
            signature,
            timeout=timeout or self._options.timeout,
            header=self._header(sequence),
            base=base,
        )
