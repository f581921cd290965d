"""The subscriber: applies what publishers push to a served model, each message once and in order.

There is one for each served model; it outlives the model's versions. Messages of a session are applied in
their sequence; one that came before is acknowledged again, one that does not follow is refused with
SequenceError, whereupon its publisher asks for the position and starts over. What a Monolith client pushes
has no sequence and is applied as it comes. See docs/guides/online.md for the protocol.
"""

from __future__ import annotations

import logging
import threading
import time as clock
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from megalith.errors import CheckpointError, InputError, SequenceError
from megalith.serving.export.overlay import Overlay
from megalith.serving.proto.tf_tensors import Strings
from megalith.serving.sync.message_header import (
    WINDOW,
    MessageHeader,
    ModelLayout,
    Position,
    TableLayout,
    read_string,
    string,
)
from megalith.serving.sync.push_messages import PushMessage, is_assign, read_push, result_of
from megalith.serving.sync.reload import latest_save, read_newer
from megalith.serving.wire_names import CONTROLS, SYNC_BEGIN, SYNC_POSITION, SYNC_RELOAD

if TYPE_CHECKING:
    from megalith.serving.export.servable import Servable

log = logging.getLogger("megalith.serving")

EARLY_SECONDS = 1.0
"""How long a message waits for the one before it, which was sent before it."""
Tensors = Mapping[str, Tensor | Strings]
Outputs = dict[str, Tensor | Strings]


@dataclass
class SyncCounters:
    """What a subscriber has done so far."""

    messages: int = 0
    """Applied, heartbeats included."""
    rows: int = 0
    removed: int = 0
    duplicates: int = 0
    """Acknowledged again without being applied."""
    refused: int = 0
    """Out of order, or not understood."""
    begun: int = 0
    """How often a publisher started over."""
    reloads: int = 0
    replacements: int = 0
    dropped: int = 0
    """How often pushed rows were dropped, since nobody went on pushing after a new version."""


class Subscriber:
    """Keeps a served model up to date. Threads may share it.

    checkpoint: that of the training run, or the run's directory, to catch up from when a publisher says so.
    carry_seconds: how long pushed rows stay in front of a new version's without another message.
    """

    def __init__(
        self, servable: Servable, *, checkpoint: Path | None = None, carry_seconds: float = 60.0
    ) -> None:
        self.servable = servable
        self.counters = SyncCounters()
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._carry_seconds = carry_seconds
        self._lock = threading.Condition(threading.RLock())
        self._base = servable.signature.base
        self._dense: dict[str, Tensor] = {}
        self._dirty = False
        """Whether the rows are others than the base's."""
        self._pushed_on: str | None = None
        """The base that pushed rows went on top of; some rows of another one may be newer than they."""
        self._session = ""
        self._count = 0
        self._positions: dict[int, int] = {}
        self._completes: dict[int, float] = {}
        self._complete: float | None = None
        self._waiting: dict[int, dict[str, Tensor]] = {}
        """Dense weights of intervals that are not complete, by publisher."""
        self._stage: Overlay | None = None
        self._ended: set[int] = set()
        self._timer: threading.Timer | None = None

    # ---- messages

    def handle(self, signature: str, inputs: Tensors, metadata: Mapping[str, str]) -> Outputs:
        """Answers one message: an assign, or a control signature.

        Raises InputError for what cannot be read, SequenceError for what does not follow the last message.
        Nothing is written in either case.
        """
        with self._lock:
            try:
                stamp = MessageHeader.read(metadata)
                if signature == SYNC_POSITION:
                    return self._position(stamp)
                if signature == SYNC_RELOAD:
                    if not self._is_late(stamp):
                        self._reload()
                    return self._position(stamp)
                if stamp is not None:
                    self._await_turn(stamp)
                if is_assign(signature):
                    return self._assign(signature, inputs, stamp)
                if signature not in CONTROLS:
                    raise InputError(f"unknown signature {signature[:100]!r} of parameter sync")
                if stamp is None or not stamp.sequence:
                    raise InputError(f"{signature} needs a session and a sequence")
                return self._begin(inputs, stamp) if signature == SYNC_BEGIN else self._end(stamp)
            except (InputError, SequenceError):
                self.counters.refused += 1
                raise

    def _assign(self, signature: str, inputs: Tensors, stamp: MessageHeader | None) -> Outputs:
        spec = self.servable.signature
        dims = {} if spec.part == "entry" else spec.dims
        push = read_push(signature, inputs, dims, self.servable.dense_names)
        self.servable.check(push.rows, push.removed, push.dense)
        outputs: Outputs = {**result_of(push, signature)}
        if stamp is None:
            self.servable.write(push.rows, push.removed, push.dense)
            self._note(push, push.dense)
            return outputs
        if self._follows(stamp):
            self._write(push, stamp)
        return outputs | self._base_shown()

    def _write(self, push: PushMessage, stamp: MessageHeader) -> None:
        # Several messages of dense weights change them together, when an interval is complete.
        dense = {**self._waiting.pop(stamp.index, {}), **push.dense}
        now = {} if stamp.complete is None or self._stage is not None else dense
        if self._stage is not None:
            self._stage.apply(push.rows, push.removed)
        elif push.num_ids or now:
            self.servable.write(push.rows, push.removed, now)
        if dense and not now:
            self._waiting[stamp.index] = dense
        self._note(push, now)
        self._advance(stamp)

    def _base_shown(self) -> Outputs:
        """What every answer to a stamped message tells; "" while what was pushed does not show yet."""
        return {"base": string(self._base if self._stage is None else "")}

    def _note(self, push: PushMessage, dense: Mapping[str, Tensor]) -> None:
        self.counters.messages += 1
        self.counters.rows += sum(ids.numel() for ids, _ in push.rows.values())
        self.counters.removed += sum(ids.numel() for ids in push.removed.values())
        self._dense |= dense
        self._dirty = self._dirty or bool(push.num_ids or dense)

    # ---- order

    def _await_turn(self, stamp: MessageHeader) -> None:
        """Lets a message that overtook the one before it wait for that one, not for long."""

        def is_early() -> bool:
            last = self._positions.get(stamp.index, stamp.sequence)
            return stamp.session == self._session and last + 1 < stamp.sequence <= last + WINDOW

        self._lock.wait_for(lambda: not is_early(), EARLY_SECONDS)

    def _follows(self, stamp: MessageHeader) -> bool:
        """Whether a message is the next; False if it was before. Raises SequenceError if it is neither."""
        last = self._positions.get(stamp.index)
        if stamp.session != self._session or stamp.count != self._count or last is None:
            raise SequenceError(
                f"publisher {stamp.index}/{stamp.count} of session {stamp.session} has not begun here: "
                "ask for sync_position, then sync_begin"
            )
        if stamp.sequence > last + 1 or not stamp.sequence:
            raise SequenceError(f"message {stamp.sequence} came after {last}: some between them are missing")
        if stamp.sequence <= last:
            self.counters.duplicates += 1
        return stamp.sequence == last + 1

    def _advance(self, stamp: MessageHeader) -> None:
        self._positions[stamp.index] = stamp.sequence
        self._lock.notify_all()
        if stamp.complete is not None:
            self._completes[stamp.index] = stamp.complete
        if len(self._completes) == self._count and self._stage is None:
            self._complete = min(self._completes.values())
        self._stop_timer()

    def _position(self, stamp: MessageHeader | None) -> Outputs:
        same = stamp is not None and stamp.session == self._session
        return Position(
            session=self._session,
            base="" if same and self._stage is not None else self._base,
            sequence=self._positions.get(stamp.index, 0) if stamp is not None and same else 0,
            step=self.servable.signature.step,
            layout=_layout_of(self.servable),
        ).outputs()

    # ---- starting over

    def _begin(self, inputs: Tensors, stamp: MessageHeader) -> Outputs:
        base = read_string(inputs, "base")
        if self._is_late(stamp):
            return self._position(stamp)
        if base:
            self._begin_on(base, stamp)
        elif self._stage is None or stamp.session != self._session or stamp.index in self._positions:
            # Who begins a second time may have sent rows to the stage that are gone since, so all begin anew.
            self._follow(stamp)
            self._stage = self.servable.stage()
        self.counters.begun += 1
        self._positions[stamp.index] = stamp.sequence
        self._stop_timer()
        return self._position(stamp)

    def _is_late(self, stamp: MessageHeader | None) -> bool:
        """Whether a control comes after others that its publisher sent later: it must not undo those."""
        if stamp is None or stamp.session != self._session or not stamp.sequence:
            return False
        late = stamp.sequence <= self._positions.get(stamp.index, 0)
        self.counters.duplicates += late
        return late

    def _begin_on(self, base: str, stamp: MessageHeader) -> None:
        """Back to the rows of the base, unless all that was pushed belongs to this session and base."""
        staged = self._stage is not None and stamp.session == self._session
        if base == self._base and not staged:
            if (stamp.session, base) == (self._session, self._pushed_on):
                return
            self._return_to_base()
        if base != self._base or staged:
            now = "being replaced" if staged else repr(self._base)
            raise SequenceError(f"the base is {now}, not {base[:100]!r}")
        self._follow(stamp)
        self._pushed_on = base

    def _follow(self, stamp: MessageHeader) -> None:
        """Makes a session the one that is followed, from its beginning."""
        self._session, self._count = stamp.session, stamp.count
        self._forget_positions()

    def _forget_positions(self) -> None:
        self._lock.notify_all()
        self._positions, self._completes, self._waiting = {}, {}, {}
        self._stage, self._ended = None, set()

    def _return_to_base(self) -> None:
        if not self._dirty:
            return
        if self._base == self.servable.signature.base:
            self.servable.reset()
            self._dirty, self._dense = False, {}
        else:
            self._reload(again=True)

    def _end(self, stamp: MessageHeader) -> Outputs:
        if not self._follows(stamp):
            return self._base_shown()
        if self._stage is None:
            raise SequenceError("nothing is being replaced: sync_begin comes first")
        ended = self._ended | {stamp.index}
        if len(ended) == self._count:
            for dense in self._waiting.values():
                self._dense |= dense
            self.servable.adopt(self._stage, self._dense or None)
            self._stage, self._waiting, ended = None, {}, set()
            self._dirty, self._pushed_on = True, None
            self.counters.replacements += 1
        self._ended = ended
        self.counters.messages += 1
        self._advance(stamp)
        return self._base_shown()

    def _reload(self, *, again: bool = False) -> None:
        """Catches up from the checkpoint. again: even if it is the base already, to drop what was pushed.

        Where there is none, or it cannot be read, everything stays as it is, the base included, which tells
        the publisher.
        """
        if self._checkpoint is None:
            return
        try:
            if not again and latest_save(self._checkpoint) == self._base:
                return
            found = read_newer(self._checkpoint, self.servable)
            self.servable.adopt(found.overlay, found.dense or None)
        except (CheckpointError, InputError, OSError) as error:
            log.warning("%s: cannot catch up from the checkpoint: %s", self.servable.signature.name, error)
            if again:
                raise SequenceError(f"the rows of {self._base} cannot be read again: {error}") from None
            return
        self._base = found.save
        self._dense, self._dirty, self._pushed_on = dict(found.dense), False, None
        self._session = ""
        self._forget_positions()
        self._stop_timer()
        self.counters.reloads += 1

    # ---- versions

    def move_to(self, servable: Servable) -> None:
        """Goes on with another version, which inherits what was pushed while somebody goes on pushing."""
        with self._lock:
            before, self.servable = self.servable, servable
            self._base = servable.signature.base
            if not self._session or not self._dirty or not _continues(servable, before):
                self._leave()  # publishers hear of it, and ask where it stands
                return
            try:
                servable.inherit(before.overlay, self._dense or None)
            except InputError as error:
                log.warning("%s: pushed rows do not fit the new version: %s", servable.signature.name, error)
                self._leave()
                return
            self._stop_timer()
            timer = threading.Timer(self._carry_seconds, lambda: self._drop(timer))
            timer.daemon = True
            self._timer = timer
            timer.start()

    def _drop(self, timer: threading.Timer) -> None:
        with self._lock:
            if timer is not self._timer:
                return
            log.warning(
                "%s: nothing was pushed for %g s after a new version came: it shows its own rows now",
                self.servable.signature.name,
                self._carry_seconds,
            )
            self._timer = None
            self.counters.dropped += 1
            self._leave()

    def _leave(self) -> None:
        """Follows nobody, with the rows of the version alone, which may have been followed before."""
        self.servable.reset()
        self._stop_timer()
        self._session, self._dirty, self._dense, self._pushed_on = "", False, {}, None
        self._forget_positions()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Ends it; the served model stays as it is."""
        with self._lock:
            self._stop_timer()

    # ---- how it is getting on

    def staleness(self) -> float | None:
        """Seconds since the moment up to which everything trained has arrived; None before the first."""
        complete = self._complete  # without the lock, which a reload holds for long
        return None if complete is None else max(0.0, clock.time() - complete)

    @property
    def base(self) -> str:
        """The id of the save whose rows lie below what was pushed."""
        with self._lock:
            return self._base


def _layout_of(servable: Servable) -> ModelLayout:
    spec = servable.signature
    tables = {name: TableLayout(table.dim, table.router()) for name, table in spec.tables.items()}
    return ModelLayout(spec.part, spec.sub_graph_num, tables, frozenset(servable.dense_names))


def _continues(servable: Servable, before: Servable) -> bool:
    """Whether what was pushed to one version makes sense above another.

    Not above an older one, some of whose rows may be older than what was pushed, nor where other ids are at
    home: publishers would go on sending those of before.
    """
    old, new = before.signature, servable.signature
    newer = new.version > old.version and new.step >= old.step
    return newer and _layout_of(servable).to_json() == _layout_of(before).to_json()
