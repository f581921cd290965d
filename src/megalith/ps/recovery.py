"""Recovery: how a server that exited gets its rows back, and which log in a directory is its own.

A server that Ray starts again opens its tables with `TableSpace.recover`: a `SpaceJournal` loads its rows
from the newest checkpoint that the log knows, then replays the records of the log after it. Only this server
does so; the others continue, and workers wait for it and send again what was not answered.

    file                                  content
    DIRECTORY/NAME/layout.json            {"servers": N}: the tables are on N servers
    DIRECTORY/NAME/server-I-of-N/         the log of server I; see `update_log.py`
    .../server-I-of-M/moving              the id of a move of the tables to M servers

A move writes all rows into the logs of M servers, then server 0 of them replaces layout.json, which ends
the move. Before that, the tables are on N servers, and the next move discards what M servers have. After
it, N servers that start again raise.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import torch

from megalith.errors import CheckpointError, InputError, UsageError
from megalith.ops import checks
from megalith.ps.messages import READER, ServerWrite, array_of
from megalith.ps.update_log import UpdateLog
from megalith.ps.writes import pending_ids
from megalith.storage.json_codec import parse_json
from megalith.storage.local_files import write_atomically

if TYPE_CHECKING:
    from megalith.ps.table_space import TableSpace

logger = logging.getLogger(__name__)

LOGS = ("none", "async", "sync")
RestoreRows = Callable[..., str | None]
"""restore(part, place, only=id): loads the rows of a part from the checkpoint at a place, which is JSON data,
if that is the save with this id. Returns the id of the save there; None: there is no checkpoint."""


@dataclass(frozen=True)
class Recovery:
    """Where servers keep what they need to start again. `checkpoint.recovery` makes one."""

    directory: str  # A directory that all servers reach; each has a folder in it. Use a new one for each run.
    # "sync": nothing that was answered is lost. "async": at most the updates of the last 0.2 seconds (after a
    # power failure, of the last flush). "none": all updates since the last checkpoint.
    log: str
    restore: RestoreRows  # Loads rows from a checkpoint
    # The id of the move of tables to new servers that these are started for; None: no move
    move: str | None = None

    def __post_init__(self) -> None:
        checks.one_of(self.log, LOGS, "Recovery: log")
        if not isinstance(self.directory, str) or not self.directory:
            raise InputError(f"Recovery: directory must be a path, got {self.directory!r}")
        checks.callback(self.restore, "Recovery: restore", required=True)

    def folder(self, name: str, index: int, count: int) -> Path:
        return Path(self.directory) / name / f"server-{index}-of-{count}"


LAYOUT = "layout.json"
MOVING = "moving"


def claim_folder(recovery: Recovery, name: str, index: int, count: int) -> Path:
    folder = recovery.folder(name, index, count)
    now = _recorded_servers(folder.parent / LAYOUT)
    if now == count:
        return folder
    if recovery.move is not None:
        if not (folder / MOVING).exists() or (folder / MOVING).read_text() != recovery.move:
            rmtree(folder, ignore_errors=True)
            write_atomically(folder / MOVING, [recovery.move.encode()])
    elif now is not None:
        raise UsageError(
            f"ServerShards {name!r}: the tables of the logs in {recovery.directory} are on {now} servers, "
            f"not on {count}: call reconnect with the Servers that resize returned, or start {now} servers; "
            "a new run needs a new directory"
        )
    elif index == 0:
        write_layout(folder, count)
    return folder


def write_layout(folder: Path, count: int) -> None:
    write_atomically(folder.parent / LAYOUT, [json.dumps({"servers": count}).encode()])


def _recorded_servers(path: Path) -> int | None:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    data = parse_json(text, CheckpointError)
    if not isinstance(data, dict) or not isinstance(data.get("servers"), int):
        raise CheckpointError(f"{path} does not name a number of servers: {text[:100]!r}")
    return int(data["servers"])


_ALWAYS = {"restore", "restore_pending", "track", "untrack", "mark", "adopt"}
"""Recorded with log="none" too, which loses updates, but not rows that were moved here from other servers and
not what consumers have not received yet."""


class SpaceJournal:
    """Writes the log of a `TableSpace` and replays it; a `PartRecovery`."""

    def __init__(self, space: TableSpace, folder: Path, recovery: Recovery) -> None:
        self._space = space
        self._recovery = recovery
        self._log = UpdateLog(folder, flushed=recovery.log == "sync")
        self._folder = folder

    def append(self, worker: int, number: int, write: ServerWrite) -> None:
        # With log="none" no update is recorded.
        if self._recovery.log != "none":
            self._log.append(worker, number, write)
        elif write.kind in _ALWAYS:
            self._log.append(READER, 0, write)  # the numbers of writes are not known after a restart

    def flush(self) -> None:
        self._log.flush_in_background()

    def sync(self) -> None:
        self._log.sync()

    def check(self) -> None:
        self._log.check()

    def settle(self, count: int) -> None:
        write_layout(self._folder, count)

    def close(self, *, delete: bool = False) -> None:
        try:
            self._log.close()
        finally:
            if delete:
                rmtree(self._folder)

    def replay(self) -> None:
        """Restore the newest checkpoint of the log and apply the records after it; begin a segment."""
        first, applied = self._restore(), 0
        for worker, number, write in self._log.records(first):
            self._space.replay(worker, number, write)
            applied += 1
        self._log.begin_segment()
        if applied:
            logger.info("%s: %d records applied", self._folder, applied)

    def _restore(self) -> int:
        """Load rows and state; return the first segment to apply."""
        points = self._log.points()
        for id, point in points.items():
            if self._recovery.restore(self._space.part, point["place"], only=id) == id:
                self._space.set_state(point["state"])
                return int(point["segment"])
        segments = self._log.segments()
        if segments and segments[0] > 0:
            raise CheckpointError(
                f"{self._folder}: the log continues a checkpoint that is missing: "
                f"{', '.join(points) or 'it was deleted'}"
            )
        return 0

    def frozen(self, id: str, place: Any) -> None:
        segment = self._log.begin_segment()
        for worker, number, push in self._space.round_pushes():
            self.append(worker, number, push)
        self._record_touched()
        self._log.write_point(id, {"segment": segment, "place": place, "state": self._space.state()})

    def _record_touched(self) -> None:
        """Record the touched ids: a checkpoint holds rows, but not what consumers have not received yet."""
        part, tables = self._space.part, self._space.tables
        for consumer in self._space.state()["consumers"]:
            ids = pending_ids(part, consumer)
            counts = [ids[name].numel() for name in tables.names]
            flat = array_of(torch.cat([ids[name] for name in tables.names]))
            if flat.size:
                write = ServerWrite("mark", {"consumer": consumer, "counts": counts}, {"ids": flat})
                self._log.append(READER, 0, write)
        self._log.flush()  # before the point that needs them

    def ended(self, id: str, *, complete: bool) -> None:
        if complete:
            self._log.keep_from(id)
        else:
            self._log.remove_point(id)
