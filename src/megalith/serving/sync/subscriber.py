"""The subscriber: applies pushed messages to a served model, each message once and in order.

There is one subscriber per served model; it outlives the versions of the model.

    state     | event                              | action                                     | next state
    ----------+------------------------------------+--------------------------------------------+-----------
    any       | sync_begin with the current base   | drop the rows of other sessions and bases  | FOLLOWING
    REPLACING | same, from the session it follows  | refuse                                     | REPLACING
    any       | sync_begin with another base       | refuse                                     | unchanged
    any       | sync_begin ""                      | stage an empty set of rows                 | REPLACING
    REPLACING | same, from its next publisher      | join the stage                             | REPLACING
    FOLLOWING | assign                             | write rows; at interval ends dense weights | FOLLOWING
    REPLACING | assign                             | write rows to the stage                    | REPLACING
    REPLACING | sync_end of the last publisher     | adopt the stage and the dense weights      | FOLLOWING
    any       | sync_reload, the save is new       | adopt the latest save of the checkpoint    | IDLE
    FOLLOWING | new version, pushed rows fit       | carry the rows over, start the timer       | FOLLOWING
    any       | new version otherwise              | drop pushed rows                           | IDLE
    FOLLOWING | no message before the timer ends   | drop pushed rows                           | IDLE
    any       | sync_position                      | answer with the position                   | unchanged
    any       | any other, of an older session     | refuse                                     | unchanged

`_session == ""` means IDLE, and `_stage is not None` means REPLACING.

Order of messages, by their sequence number, for each publisher of the session:

    number              | action
    --------------------+----------------------------------------------------------------------------------
    last + 1            | apply it
    last or less        | acknowledge it again without applying it
    up to last + WINDOW | wait up to EARLY_SECONDS for the missing earlier messages
    any other           | refuse it with SequenceError: the publisher asks for the position and starts over

A session is older if its number is lower than that of any session that has begun here.

Invariants:
- Nothing is written by a message that is refused.
- Rows of two sessions are never mixed: a new session starts from the rows of a save, or replaces all rows.
- While rows are being replaced, requests see the old rows; all publishers of a session replace together.

`sync_reload` reads the rows that bring the model to the latest save of its training run. If the save that the
model was exported from is in the chain of the checkpoint, the later deltas are enough; otherwise all rows are
read.

Messages of a Monolith client have no header and are applied as they arrive, unless a session is followed; the
`rows_id` of a position changes when they are dropped. See docs/guides/online.md.
"""

from __future__ import annotations

import logging
import threading
import time as clock
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megalith.checkpoint.manifest import NAME, Manifest, TableEntry, full_name, read_manifest
from megalith.checkpoint.saved_rows import latest_rows, read_chunk, read_removed, read_tensors
from megalith.errors import CheckpointError, InputError, SequenceError
from megalith.ops import checks
from megalith.serving.export.overlay import Overlay
from megalith.serving.proto.tf_tensors import Strings
from megalith.serving.sync.protocol import (
    NEWER_SESSION,
    WINDOW,
    MessageHeader,
    ModelLayout,
    Position,
    TableLayout,
    read_string,
    string_array,
)
from megalith.serving.sync.push_messages import DenseAssembly, PushMessage, is_assign, read_push, result_of
from megalith.serving.wire_names import CONTROLS, SYNC_BEGIN, SYNC_POSITION, SYNC_RELOAD
from megalith.storage.store import Store, open_store

if TYPE_CHECKING:
    from megalith.serving.export.servable import Servable


@dataclass
class SyncCounters:
    """Counts the actions of a subscriber."""

    messages: int = 0  # Messages applied, including empty ones
    rows: int = 0
    removed: int = 0
    duplicates: int = 0  # Messages acknowledged again without being applied
    refused: int = 0  # Messages out of order or malformed
    begun: int = 0  # How often a publisher began or started over
    reloads: int = 0
    replacements: int = 0
    dropped: int = 0  # How often pushed rows were dropped because no message followed a new version
    sessions: int = 0  # Sessions that were followed
    replaced_sessions: int = 0  # Sessions that were followed when another one began
    old_sessions: int = 0  # Messages refused because a newer session had begun


def layout_of(servable: Servable) -> ModelLayout:
    """Return the layout of a version."""
    spec = servable.signature
    tables = {
        name: TableLayout(table.dim, table.router(), spec.codes.get(name))
        for name, table in spec.tables.items()
    }
    return ModelLayout(spec.part, spec.sub_graph_num, tables, frozenset(servable.dense_names))


def have_equal_layouts(one: Servable, other: Servable) -> bool:
    """Return whether two versions take the same messages."""
    return layout_of(one).to_json() == layout_of(other).to_json()


def continues(servable: Servable, before: Servable) -> bool:
    """Return whether rows pushed to one version are valid on top of another."""
    # They are not on an older version, and not if its layout differs: publishers would continue to send the
    # ids of the old layout.
    old, new = before.signature, servable.signature
    newer = new.version > old.version and new.step >= old.step
    return newer and have_equal_layouts(servable, before)


CHECKPOINT_FOLDER = "checkpoint"  # The checkpoint's folder in the directory of a run


@dataclass(frozen=True)
class Reloaded:
    """The rows of a checkpoint over those of an export, its dense weights, and the id of its latest save."""

    save: str
    overlay: Overlay
    dense: Mapping[str, Tensor]


def read_newer(checkpoint: Path, servable: Servable) -> Reloaded:
    """Read what a checkpoint has in addition to the save a model was exported from."""
    store = _open_checkpoint(checkpoint)
    manifest = read_manifest(store)
    try:
        overlay = _read_rows(store, manifest, servable)
        saved = {} if manifest.latest.dense is None else read_tensors(store, manifest.latest.dense)
    except FileNotFoundError as error:
        raise CheckpointError(f"{store.where} was replaced while it was read: {error.filename}") from None
    dense = {}
    for name, shape in servable.dense_names.items():
        if name not in saved or tuple(saved[name].shape) != tuple(shape):
            raise CheckpointError(f"{store.where} has no dense weight {name!r} {list(shape)}")
        dense[name] = saved[name]
    return Reloaded(manifest.tip, overlay, dense)


def _open_checkpoint(checkpoint: Path) -> Store:
    inside = checkpoint / CHECKPOINT_FOLDER
    return open_store(inside if not (checkpoint / NAME).exists() and inside.exists() else checkpoint)


def _read_rows(store: Store, manifest: Manifest, servable: Servable) -> Overlay:
    signature = servable.signature
    saves = [save.id for save in manifest.saves]
    known = signature.base in saves
    overlay = servable.stage(hides_base=not known)
    if signature.part == "entry":
        return overlay
    for table, entries in _table_entries(manifest, signature.dims, store.where).items():
        if not known:
            for chunk in latest_rows(store, entries):
                overlay.apply({table: _rows_of_part(servable, table, chunk.ids, chunk.rows)})
            continue
        for entry in entries[saves.index(signature.base) + 1 :]:
            for piece in entry.removed:
                ids = read_removed(store, piece)
                overlay.apply({}, {table: _rows_of_part(servable, table, ids, ids)[0]})
            for piece in entry.pieces:
                chunk = read_chunk(store, piece, entry)
                overlay.apply({table: _rows_of_part(servable, table, chunk.ids, chunk.rows)})
    return overlay


def _table_entries(manifest: Manifest, dims: Mapping[str, int], where: str) -> dict[str, list[TableEntry]]:
    """Return the entries of each served table; raises CheckpointError if a table is missing or differs."""
    found = {}
    all_entries = manifest.tables()
    for path, collection in manifest.collections.items():
        for name in collection.tables:
            full = full_name(path, name)
            found[name if name in dims else full] = all_entries[full]
    for table, dim in dims.items():
        if table not in found:
            raise CheckpointError(f"{where} has no table {table!r} (it has {', '.join(sorted(found))})")
        if found[table][0].dim != dim:
            raise CheckpointError(
                f"{where}: table {table!r} has {found[table][0].dim} columns, the served table has {dim}"
            )
    return {table: found[table] for table in dims}


def _rows_of_part(servable: Servable, table: str, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids and rows that belong to the served part."""
    signature = servable.signature
    if signature.shard is None:
        return ids, rows
    mine = signature.tables[table].router().owner(ids) == signature.shard
    return ids[mine], rows[mine]


logger = logging.getLogger(__name__)

EARLY_SECONDS = 1.0  # How long a message waits for the one before it
Tensors = Mapping[str, Tensor | Strings]
Outputs = dict[str, Tensor | Strings]


class Subscriber:
    """Keeps a served model up to date. Safe to share between threads.

    Args:
        servable: The served model.
        checkpoint: The checkpoint of the training run, or the directory of the run, to reload from when a
            publisher asks for it.
        carry_seconds: How long pushed rows stay on top of a new version without another message.
    """

    def __init__(
        self, servable: Servable, *, checkpoint: Path | None = None, carry_seconds: float = 60.0
    ) -> None:
        self.servable = _check_servable(servable)
        self.counters = SyncCounters()
        self._checkpoint = None if checkpoint is None else checks.path(checkpoint, "subscriber: checkpoint")
        self._carry_seconds = carry_seconds
        self._lock = threading.Condition(threading.RLock())
        self._base = servable.signature.base
        self._dense: dict[str, Tensor] = {}
        self._dirty = False  # Whether the rows differ from those of the base
        # The base on which the rows were pushed; rows of another base may be newer than the pushed ones
        self._pushed_on: str | None = None
        self._rows_id = uuid.uuid4().hex
        self._session = ""
        self._number = 0  # The highest number of a session that has begun
        self._count = 0
        self._positions: dict[int, int] = {}
        self._completes: dict[int, float] = {}
        self._complete: float | None = None
        # The dense weights of incomplete intervals, by publisher
        self._waiting: dict[int, dict[str, Tensor]] = {}
        # The dense weights of which parts have arrived, by publisher
        self._assemblies: dict[int, DenseAssembly] = {}
        self._stage: Overlay | None = None
        self._ended: set[int] = set()
        self._timer: threading.Timer | None = None
        self._older: list[Servable] = []  # Older versions that are still served

    # ---- messages

    def handle(self, signature: str, inputs: Tensors, metadata: Mapping[str, str]) -> Outputs:
        """Handle one message.

        Args:
            signature: An assign or a control signature.
            inputs: The inputs of the request.
            metadata: The gRPC metadata of the request.

        Returns:
            The outputs of the answer.

        Raises:
            InputError: The message is malformed. Nothing is written.
            SequenceError: The message does not follow the last one. Nothing is written.
        """
        checks.text(signature, "subscriber: signature")
        checks.mapping(inputs, "subscriber: inputs", '{"user_id": ids, "user_value": rows}')
        checks.mapping(metadata, "subscriber: metadata", '{"x-session": "..."}')
        with self._lock:
            try:
                header = MessageHeader.read(metadata)
                if signature == SYNC_POSITION:
                    return self._position(header)
                self._check_not_older(header)
                if signature == SYNC_RELOAD:
                    if not self._is_late(header):
                        self._reload()
                    return self._position(header)
                if header is not None:
                    # Not for long: the message before this one may be on its way.
                    self._lock.wait_for(lambda: not self._is_early(header), EARLY_SECONDS)
                    self._check_not_older(header)  # another session may have begun during the wait
                if is_assign(signature):
                    return self._assign(signature, inputs, header)
                if signature not in CONTROLS:
                    raise InputError(f"unknown signature {signature[:100]!r} of parameter sync")
                if header is None or not header.sequence:
                    raise InputError(f"{signature} needs a session and a sequence")
                return self._begin(inputs, header) if signature == SYNC_BEGIN else self._end(header)
            except (InputError, SequenceError):
                self.counters.refused += 1
                raise

    def _assign(self, signature: str, inputs: Tensors, header: MessageHeader | None) -> Outputs:
        spec = self.servable.signature
        dims = {} if spec.part == "entry" else spec.dims
        push = read_push(signature, inputs, dims, self.servable.dense_names, spec.codes)
        self.servable.check_values(push.rows, push.removed, push.dense)
        outputs: Outputs = {**result_of(push, signature)}
        if header is None:
            if push.parts:
                raise InputError("parts of dense weights need a session and a sequence")
            if self._session:
                raise SequenceError(
                    "a training session pushes to this model; writes without a session would mix with it"
                )
            self._write_all(push, push.dense)
            self._count_push(push, push.dense)
            return outputs
        if self._follows(header):
            self._write(push, header)
        return outputs | self._base_output()

    def _write(self, push: PushMessage, header: MessageHeader) -> None:
        # The dense weights of several messages change together, when an interval is complete.
        whole = self._assembled(push, header)
        dense = {**self._waiting.pop(header.index, {}), **push.dense, **whole}
        now = {} if header.complete is None or self._stage is not None else dense
        if push.expected:
            overlay = self.servable.overlay if self._stage is None else self._stage
            overlay.reserve(push.expected)
        if self._stage is not None:
            self._stage.apply(push.rows, push.removed)
        elif push.num_ids or now:
            self._write_all(push, now)
        if dense and not now:
            self._waiting[header.index] = dense
        self._count_push(push, now)
        self._advance(header)

    def _write_all(self, push: PushMessage, dense: Mapping[str, Tensor]) -> None:
        """Write rows and weights to the version that is followed, and to older ones that are still served."""
        for servable in (self.servable, *self._older):
            servable.write(push.rows, push.removed, dense)

    def _assembled(self, push: PushMessage, header: MessageHeader) -> dict[str, Tensor]:
        """Add the parts of a message to those before; return the weights that are complete with them."""
        if not push.parts and header.index not in self._assemblies:
            return {}
        assembly = self._assemblies.setdefault(header.index, DenseAssembly())
        return assembly.add(push.parts, self.servable.dense_weights, is_last=header.complete is not None)

    def _base_output(self) -> Outputs:
        """Return the base for an answer; "" while pushed rows are not visible yet."""
        return {"base": string_array(self._base if self._stage is None else "")}

    def _count_push(self, push: PushMessage, dense: Mapping[str, Tensor]) -> None:
        self.counters.messages += 1
        self.counters.rows += sum(ids.numel() for ids, _ in push.rows.values())
        self.counters.removed += sum(ids.numel() for ids in push.removed.values())
        self._dense |= dense
        self._dirty = self._dirty or bool(push.num_ids or dense)

    # ---- order

    def _check_not_older(self, header: MessageHeader | None) -> None:
        """Raise SequenceError for a session that began before one that was followed here."""
        if header is not None and header.number < self._number and header.session != self._session:
            self.counters.old_sessions += 1
            raise SequenceError(f"{NEWER_SESSION}: number {self._number}, this one has {header.number}")

    def _is_early(self, header: MessageHeader) -> bool:
        last = self._positions.get(header.index, header.sequence)
        return header.session == self._session and last + 1 < header.sequence <= last + WINDOW

    def _follows(self, header: MessageHeader) -> bool:
        """Return whether to apply a message: False if it is repeated; raises SequenceError after a gap."""
        last = self._positions.get(header.index)
        if header.session != self._session or header.count != self._count or last is None:
            raise SequenceError(
                f"publisher {header.index}/{header.count} has no session {header.session} on this server: "
                "ask for sync_position, then sync_begin"
            )
        if header.sequence > last + 1 or not header.sequence:
            raise SequenceError(
                f"message {header.sequence} came after {last}: messages between them are missing"
            )
        if header.sequence <= last:
            self.counters.duplicates += 1
        return header.sequence == last + 1

    def _advance(self, header: MessageHeader) -> None:
        self._positions[header.index] = header.sequence
        self._lock.notify_all()
        if header.complete is not None:
            self._completes[header.index] = header.complete
        if len(self._completes) == self._count and self._stage is None:
            self._complete = min(self._completes.values())
        self._stop_timer()

    def _position(self, header: MessageHeader | None) -> Outputs:
        same = header is not None and header.session == self._session
        return Position(
            session=self._session,
            base="" if same and self._stage is not None else self._base,
            sequence=self._positions.get(header.index, 0) if header is not None and same else 0,
            step=self.servable.signature.step,
            layout=layout_of(self.servable),
            rows_id=self._rows_id,
        ).outputs()

    # ---- begin, end, reload

    def _begin(self, inputs: Tensors, header: MessageHeader) -> Outputs:
        base = read_string(inputs, "base")
        if self._is_late(header):
            return self._position(header)
        if base:
            self._begin_on(base, header)
        elif self._stage is None or header.session != self._session or header.index in self._positions:
            # A publisher that begins twice may have staged rows that no longer exist, so all start over.
            self._follow(header)
            self._stage = self.servable.stage()
        self.counters.begun += 1
        self._positions[header.index] = header.sequence
        self._stop_timer()
        return self._position(header)

    def _is_late(self, header: MessageHeader | None) -> bool:
        """Return whether later messages of its publisher have arrived: a late control must not undo them."""
        if header is None or header.session != self._session or not header.sequence:
            return False
        late = header.sequence <= self._positions.get(header.index, 0)
        self.counters.duplicates += late
        return late

    def _begin_on(self, base: str, header: MessageHeader) -> None:
        """Return to the rows of the base, unless all pushed rows belong to this session and base."""
        staged = self._stage is not None and header.session == self._session
        if base == self._base and not staged:
            if (header.session, base) == (self._session, self._pushed_on):
                return
            self._return_to_base()
        if base != self._base or staged:
            now = "being replaced" if staged else repr(self._base)
            raise SequenceError(f"the base is {now}, not {base[:100]!r}")
        self._follow(header)
        self._pushed_on = base

    def _follow(self, header: MessageHeader) -> None:
        """Follow a session from its beginning."""
        if header.session != self._session:
            self.counters.sessions += 1
            self.counters.replaced_sessions += bool(self._session)
            if self._session:
                text = "%s: session %s replaces session %s, which is refused from now on"
                logger.warning(text, self.servable.signature.name, header.session, self._session)
        self._number = max(self._number, header.number)
        self._session, self._count = header.session, header.count
        self._forget_positions()

    def _forget_positions(self) -> None:
        self._lock.notify_all()
        self._positions, self._completes, self._waiting, self._assemblies = {}, {}, {}, {}
        self._stage, self._ended = None, set()

    def _return_to_base(self) -> None:
        if not self._dirty:
            return
        if self._base == self.servable.signature.base:
            self.servable.reset()
            self._rows_id = uuid.uuid4().hex
            self._dirty, self._dense = False, {}
        else:
            self._reload(again=True)

    def _end(self, header: MessageHeader) -> Outputs:
        if not self._follows(header):
            return self._base_output()
        if self._stage is None:
            raise SequenceError("nothing is being replaced: send sync_begin first")
        if header.index in self._assemblies:
            self._assemblies[header.index].check_last({}, {})
        ended = self._ended | {header.index}
        if len(ended) == self._count:
            for dense in self._waiting.values():
                self._dense |= dense
            self.servable.adopt(self._stage, self._dense or None)
            self._rows_id = uuid.uuid4().hex
            self._stage, self._waiting, ended = None, {}, set()
            self._dirty, self._pushed_on = True, None
            self.counters.replacements += 1
        self._ended = ended
        self.counters.messages += 1
        self._advance(header)
        return self._base_output()

    def _reload(self, *, again: bool = False) -> None:
        """Adopt the latest save of the checkpoint."""
        # Without a checkpoint, or if it cannot be read, nothing changes: the publisher sees the old base.
        if self._checkpoint is None:
            return
        try:
            if not again and read_manifest(_open_checkpoint(self._checkpoint)).tip == self._base:
                return
            found = read_newer(self._checkpoint, self.servable)
            self.servable.adopt(found.overlay, found.dense or None)
        except (CheckpointError, InputError, OSError) as error:
            logger.warning("%s: cannot reload from the checkpoint: %s", self.servable.signature.name, error)
            if again:
                raise SequenceError(f"the rows of save {self._base} cannot be read again: {error}") from None
            return
        self._base, self._rows_id = found.save, uuid.uuid4().hex
        self._dense, self._dirty, self._pushed_on = dict(found.dense), False, None
        self._session = ""
        self._forget_positions()
        self._stop_timer()
        self.counters.reloads += 1

    # ---- versions

    def move_to(self, servable: Servable) -> None:
        """Switch to another version, which inherits the pushed rows as long as messages keep coming.

        Args:
            servable: The new version.

        Raises:
            InputError: It is not a Servable.
        """
        _check_servable(servable)
        with self._lock:
            before, self.servable = self.servable, servable
            self._base = servable.signature.base
            if not self._session or not self._dirty or not continues(servable, before):
                self._leave()  # publishers get an error and ask for the position
                return
            try:
                servable.inherit(before.overlay, self._dense or None)
            except InputError as error:
                text = "%s: pushed rows do not fit the new version: %s"
                logger.warning(text, servable.signature.name, error)
                self._leave()
                return
            self._stop_timer()
            timer = threading.Timer(self._carry_seconds, lambda: self._drop(timer))
            timer.daemon = True
            self._timer = timer
            timer.start()

    def set_older(self, servables: Sequence[Servable]) -> None:
        """Also write what is pushed to older versions, which entries that have not moved yet still use.

        They are not changed when all rows are replaced, or when the pushed rows are dropped.

        Args:
            servables: The versions; those with another layout than the newest are left out.

        Raises:
            InputError: One of them is not a Servable.
        """
        given = [_check_servable(each) for each in checks.as_list(servables, "subscriber: servables")]
        with self._lock:
            older = [each for each in given if each is not self.servable]
            self._older = [each for each in older if have_equal_layouts(each, self.servable)]

    def _drop(self, timer: threading.Timer) -> None:
        with self._lock:
            if timer is not self._timer:
                return
            text = "%s: no message for %g s after a new version: its own rows are served now"
            logger.warning(text, self.servable.signature.name, self._carry_seconds)
            self._timer = None
            self.counters.dropped += 1
            self._leave()

    def _leave(self) -> None:
        """Stop following and serve the rows of the version only."""
        self.servable.reset()
        self._rows_id = uuid.uuid4().hex
        self._stop_timer()
        self._session, self._dirty, self._dense, self._pushed_on = "", False, {}, None
        self._forget_positions()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Stop the timer; the served model does not change."""
        with self._lock:
            self._stop_timer()

    # ---- progress

    def staleness(self) -> float | None:
        """Return the seconds of training that have not arrived; None before the first complete interval."""
        complete = self._complete  # without the lock, which a reload holds for a long time
        return None if complete is None else max(0.0, clock.time() - complete)

    @property
    def base(self) -> str:
        """The id of the save below the pushed rows."""
        with self._lock:
            return self._base


def _check_servable(servable: Any) -> Servable:
    if not hasattr(servable, "signature"):  # importing Servable here would be a cycle
        raise InputError(f"subscriber: servable must be a Servable, got {type(servable).__name__}")
    return servable  # type: ignore[no-any-return]
