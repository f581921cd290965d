"""The sender: brings one target up to date and keeps it there, in a thread of its own.

Messages are applied strictly one after the other; one may travel while the one before is applied, and the
next is built meanwhile. One that failed is sent again, the same bytes with the same sequence, until it is
acknowledged; a target that refuses it as out of order is met anew: asked where it stands, then sent what
changed since.
"""

from __future__ import annotations

import logging
import random
import threading
import time as clock
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from megalith.errors import InputError, MegalithError, RemoteError
from megalith.routing import Router
from megalith.serving.client.channels import Call, Connection
from megalith.serving.proto.schema import Message
from megalith.serving.proto.tf_serving import PredictRequest
from megalith.serving.proto.tf_tensors import Strings, from_tensor_protos, strings_to_tensor_proto
from megalith.serving.sync.backlog import Backlog, Interval
from megalith.serving.sync.message_header import (
    WINDOW,
    MessageHeader,
    ModelLayout,
    Position,
    TableLayout,
    read_string,
    string,
)
from megalith.serving.sync.push_messages import (
    DENSE,
    PUSH_ROOM,
    PushMessage,
    encode_request,
    inputs_of,
)
from megalith.serving.sync.target import PublisherState, SenderOptions, Sequence, TargetReport
from megalith.serving.wire_names import SYNC_BEGIN, SYNC_END, SYNC_POSITION, SYNC_RELOAD

log = logging.getLogger("megalith.serving")

RELOAD_TIMEOUT = 120.0
REPLACING_PAUSE = 0.1
MAX_ANSWER = 1 << 23
_ALL = Router("roundrobin", 1)
SHORTEST, LONGEST = 0.05, 5.0
"""Seconds between tries, doubled from one to the other, and less by chance."""


class StartOver(MegalithError):
    """A target must be met anew."""


@dataclass(frozen=True)
class _QueuedMessage:
    data: bytes
    stamp: MessageHeader
    rows: int = 0
    interval: Interval | None = None
    """The one that is complete with it."""


class Sender:
    """Sends to one target until `close`. address: host:port. model: what it is called there.

    sequence: numbers its messages; of an earlier sender to this target, if there was one.
    """

    def __init__(
        self, address: str, model: str, desk: PublisherState, options: SenderOptions, sequence: Sequence
    ) -> None:
        self.report = TargetReport(address, model, sequence=sequence.last)
        self.acknowledged = -1
        """The last interval that is complete there."""
        self.absent = False
        """Whether the server says that it does not have this model."""
        self._desk = desk
        self._options = options
        self._backlog: Backlog | None = None
        """None while the target does not stand anywhere in this session."""
        self._layout = ModelLayout()
        self._base: str | None = None
        """The save whose rows lie below what is pushed; None where it does not matter."""
        self._refused: str | None = None
        """The save on which it could not begin."""
        self._replacing = False
        self._failures = 0
        self._disturbed = 0
        """Up to which message one may have come before an earlier one."""
        self._dense_sent = -1
        self._sequence = sequence
        self._ready: deque[_QueuedMessage] = deque()
        self._closed = threading.Event()
        self._connection = Connection(address, options.credentials)
        self._random = random.Random(f"{options.session} {address} {model}")
        self._thread = threading.Thread(target=self._run, name=f"megalith push {address}", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def close(self) -> None:
        """Ends it, calls under way included, without waiting for its thread; `join` does."""
        self._closed.set()
        self._connection.close()

    def join(self, timeout: float) -> None:
        """Waits for its thread."""
        self._thread.join(timeout)

    def add(self, ids: Mapping[str, Tensor], interval: Interval) -> None:
        """Takes over what changed, with the publisher's lock held; a backlog without room is dropped."""
        if self._backlog is None:
            return  # it is met later, and told then
        if not self._backlog.add(ids, interval):
            log.warning("%s: more than %d rows wait for it", self.report.address, self._options.max_backlog)
            self._backlog = None
            self.report.error = "its backlog overflowed; it starts over"
        self._tell()

    def _tell(self) -> None:
        self.report.backlog = 0 if self._backlog is None else len(self._backlog)
        self.report.sequence = self._sequence.last

    # ---- the thread

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                if self._backlog is None:
                    self._meet()
                self._push()
            except MegalithError as error:
                self.absent = isinstance(error, RemoteError) and error.code == "NOT_FOUND"
                self._forget(self._told(error))
            except Exception as error:  # a thread has nobody to raise to
                log.exception("%s: pushing failed", self.report.address)
                self._forget(f"{type(error).__name__}: {error}")
            self._failures += 1
            self._pause(self._failures)

    def _told(self, error: MegalithError) -> str:
        """What went wrong; the report itself says where."""
        return str(error).removeprefix(f"{self.report.address}: ")

    def _forget(self, why: str) -> None:
        if self._closed.is_set():
            return
        with self._desk.lock:
            self._backlog = None
            self._ready.clear()
            self.report.error = why
            self._tell()

    def _pause(self, failures: int) -> None:
        longest = min(LONGEST, SHORTEST * 2 ** min(failures, 10))
        self._closed.wait(self._random.uniform(longest / 2, longest))

    def _push(self) -> None:
        """Sends for as long as the target takes part."""
        window = 1 if self._options.plain else WINDOW  # without a sequence nothing would keep two in order
        flying: deque[tuple[_QueuedMessage, Call]] = deque()
        try:
            while not self._closed.is_set():
                while len(flying) < window and (message := self._next(wait=not flying)) is not None:
                    flying.append((message, self._send(message)))
                if not flying:
                    return
                self._fill(wait=False)
                message, call = flying.popleft()
                answer = self._answer(message, call.result, disturbs=flying[-1][0] if flying else None)
                self._acknowledge(message, answer)
        finally:
            for _, call in flying:
                call.cancel()

    def _send(self, message: _QueuedMessage) -> Call:
        return self._connection.start_predict(
            message.data, timeout=self._options.timeout, metadata=self._metadata(message)
        )

    def _metadata(self, message: _QueuedMessage) -> tuple[tuple[str, str], ...]:
        return () if self._options.plain else message.stamp.metadata()

    def _answer(
        self, message: _QueuedMessage, result: Callable[[], Message], *, disturbs: _QueuedMessage | None
    ) -> Message:
        """What a target says to a message, which is sent again until it says something.

        disturbs: the last message behind it, which may have come too early if this one has to go again.
        """
        failures = 0
        while True:
            try:
                return result()
            except RemoteError as error:
                early = not failures and message.stamp.sequence <= self._disturbed
                if self._closed.is_set() or (self._is_final(error) and not early):
                    raise StartOver(self._told(error)) from None
                failures += 1
                self._disturbed = max(self._disturbed, disturbs.stamp.sequence if disturbs else 0)
                with self._desk.lock:
                    self.report.error = self._told(error)
            self._pause(failures)
            if self._closed.is_set():
                raise StartOver("closed")
            with self._desk.lock:
                if self._backlog is None:
                    raise StartOver(self.report.error or "its backlog overflowed")
            result = self._send(message).result

    def _is_final(self, error: RemoteError) -> bool:
        """Whether sending the same again makes no sense."""
        return not self._options.plain and error.code in (
            "FAILED_PRECONDITION",
            "NOT_FOUND",
            "INVALID_ARGUMENT",
        )

    def _acknowledge(self, message: _QueuedMessage, answer: Message) -> None:
        base = self._base
        if "base" in answer.outputs:
            base = read_string(from_tensor_protos(answer.outputs, max_bytes=MAX_ANSWER), "base")
        with self._desk.lock:
            if base and base != self._base:
                # Another version is served. Unless it came from a later save, some of its rows are older.
                if self._base is not None and not self._desk.journal.goes_on(self._base, base):
                    raise StartOver(f"a version of save {base!r} is served now")
                self._base = base
            self.report.rows += message.rows
            self.report.error = None
            self.report.acknowledged_at = clock.time()
            self._tell()
        if message.interval is not None:
            if base == "":
                self._ask_again(message.interval)
            else:
                self._complete(message.interval)

    def _ask_again(self, interval: Interval) -> None:
        """All rows are being replaced, and other ranks are not done: nothing shows before they are."""
        self._closed.wait(REPLACING_PAUSE)
        data = encode_request(self.report.model, self._options.signature, self._inputs(PushMessage()))
        stamp = self._stamp(self._sequence.next(), interval.time)
        self._ready.append(_QueuedMessage(data, stamp, 0, interval))

    # ---- building messages

    def _next(self, *, wait: bool) -> _QueuedMessage | None:
        """The next message; None if there is none yet, the target must be met anew, or all is over."""
        self._fill(wait=wait)
        return self._ready.popleft() if self._ready else None

    def _fill(self, *, wait: bool) -> None:
        """Builds messages if none is ready and there is something to send."""
        if self._ready:
            return
        with self._desk.lock:
            if wait:
                self._desk.lock.wait_for(lambda: self._closed.is_set() or self._waits())
            if self._closed.is_set() or self._backlog is None or not self._backlog.waits:
                return
            costs = {name: 8 + 4 * table.dim for name, table in self._layout.tables.items()}
            ids, interval = self._backlog.take(PUSH_ROOM, costs)
            dense = self._dense_to_send() if interval is not None else {}
        self._build(ids, dense, interval)

    def _waits(self) -> bool:
        return self._backlog is None or self._backlog.waits

    def _dense_to_send(self) -> Mapping[str, Tensor]:
        if not self._layout.dense or self._desk.dense_number <= self._dense_sent:
            return {}
        self._dense_sent = self._desk.dense_number
        return {name: weight for name, weight in self._desk.dense.items() if name in self._layout.dense}

    def _build(
        self, ids: Mapping[str, Tensor], dense: Mapping[str, Tensor], interval: Interval | None
    ) -> None:
        """Messages of rows and, where they complete an interval, of dense weights and of the end."""
        push = self._desk.source.read(ids)
        if self._options.plain:
            push = PushMessage(push.rows)
        contents = [self._inputs(push)] if push.num_ids else []
        room = PUSH_ROOM - 8 * push.num_ids - sum(rows.nbytes for _, rows in push.rows.values())
        for name, weight in dense.items():
            if not contents or weight.nbytes > room:
                contents.append(self._inputs(PushMessage()))
                room = PUSH_ROOM
            contents[-1][f"{DENSE}{name}"] = weight
            room -= weight.nbytes
        if interval is not None and not contents and not self._replacing:
            if self._options.plain:
                self._complete(interval)
                return
            contents.append(self._inputs(PushMessage()))
        requests = [(self._options.signature, inputs) for inputs in contents]
        if interval is not None and self._replacing:
            self._replacing = False
            requests.append((SYNC_END, {}))
        for number, (signature, inputs) in enumerate(requests, start=1):
            last = interval if number == len(requests) else None
            self._ready.append(
                _QueuedMessage(
                    encode_request(self.report.model, signature, inputs),
                    self._stamp(self._sequence.next(), None if last is None else last.time),
                    push.num_ids if number == 1 else 0,
                    last,
                )
            )

    def _inputs(self, push: PushMessage) -> dict[str, Tensor | list[Tensor]]:
        tables = self._layout.tables if self._layout.takes_rows else ()
        return inputs_of(push, self._options.signature, tables)

    def _complete(self, interval: Interval) -> None:
        self._failures = 0  # not before: one that takes some messages and never the last must be left alone
        with self._desk.lock:
            if interval.number >= self.acknowledged:
                self.acknowledged = interval.number
                self.report.complete = interval.time
            self._desk.lock.notify_all()
        self._desk.tidy()

    def _stamp(self, sequence: int, complete: float | None = None) -> MessageHeader:
        options = self._options
        return MessageHeader(options.session, options.index, options.count, sequence, complete)

    # ---- meeting a target

    def _meet(self) -> None:
        """Finds out where a target stands, and what it has to be sent."""
        if self._options.plain:
            self._meet_plainly()
            return
        position = self._position(SYNC_POSITION, 0)
        self._layout = position.layout
        self._check_layout()
        self._options.on_layout(position.layout)
        if position.session == self._options.session:
            self._sequence.skip(position.sequence)
        if position.base and not self._knows(position.base):
            position = self._position(SYNC_RELOAD, self._sequence.next(), timeout=RELOAD_TIMEOUT)
        base = position.base if self._knows(position.base) else ""
        self._begin(base)
        if base:
            with self._desk.lock:
                self._start(self._desk.journal.since(base))
            self._base = base
        else:
            self._start_with_everything()
            self._base = None
        self._replacing = not base

    def _knows(self, base: str) -> bool:
        """Whether it is known what changed since a save, and nothing speaks against beginning there."""
        with self._desk.lock:
            return base in self._desk.journal.labels and base != self._refused

    def _begin(self, base: str) -> None:
        sequence = self._sequence.next()
        try:
            begun = self._position(SYNC_BEGIN, sequence, base=base)
        except RemoteError as error:
            # A server that cannot go back to those rows is sent others the next time.
            self._refused = base if error.code == "FAILED_PRECONDITION" else self._refused
            raise
        if (begun.session, begun.sequence) != (self._options.session, sequence):
            raise StartOver("it answers, but has not begun")
        self._refused = None

    def _start_with_everything(self) -> None:
        with self._desk.lock:
            self._start({})  # from here on it hears of changes
            interval = self._desk.interval
        everything = self._desk.source.all_ids()
        with self._desk.lock:
            if self._backlog is None:
                raise StartOver("its backlog overflowed")
            self._backlog.begin(everything, interval)

    def _meet_plainly(self) -> None:
        """Without positions all that is known to have changed is sent, to whoever is met."""
        tables = {name: TableLayout(table.dim, _ALL) for name, table in self._desk.source.tables.items()}
        self._layout = ModelLayout(tables=tables)
        with self._desk.lock:
            labels = self._desk.journal.labels
            if labels:
                self._start(self._desk.journal.since(labels[0]))
        if not labels:
            self._start_with_everything()

    def _start(self, ids: Mapping[str, Tensor] | None) -> None:
        if ids is None:
            raise StartOver("the journal does not go back that far any more")
        self._backlog = Backlog(self._options.max_backlog, keep=self._layout.keep)
        self._backlog.begin(ids, self._desk.interval)
        self._ready.clear()
        self._dense_sent = -1
        self.absent = False
        self.report.part = None if self._options.plain else self._layout.part
        self._tell()

    def _check_layout(self) -> None:
        for name, table in self._desk.source.tables.items():
            served = self._layout.tables.get(name)
            if served is not None and served.dim != table.dim:
                raise InputError(f"table {name!r} has {served.dim} columns there, {table.dim} here")

    def _position(
        self, signature: str, sequence: int, *, base: str | None = None, timeout: float | None = None
    ) -> Position:
        request = PredictRequest()
        request.model_spec.name = self.report.model
        request.model_spec.signature_name = signature
        if base is not None:
            request.inputs["base"].CopyFrom(strings_to_tensor_proto(string(base)))
        answer = self._connection.predict(
            request, timeout=timeout or self._options.timeout, metadata=self._stamp(sequence).metadata()
        )
        outputs: dict[str, Tensor | Strings] = from_tensor_protos(answer.outputs, max_bytes=MAX_ANSWER)
        return Position.read(outputs)
