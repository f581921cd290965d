"""SpaceJournal: the log of a `TableSpace`, the points from which it can be replayed, and the replay."""

from __future__ import annotations

import logging
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import torch

from megalith.errors import CheckpointError
from megalith.shards.servers.log.log_layout import write_layout
from megalith.shards.servers.log.recovery import Recovery
from megalith.shards.servers.log.update_log import UpdateLog
from megalith.shards.servers.server.touched_ids import pending_ids
from megalith.shards.servers.server_messages import READER, ServerWrite, array_of

if TYPE_CHECKING:
    from megalith.shards.servers.server.table_space import TableSpace

logger = logging.getLogger(__name__)

_ALWAYS = {"restore", "restore_pending", "track", "untrack", "mark", "adopt"}
"""Recorded with log="none" too, which loses updates, but not rows that were moved here from other servers and
not what consumers have not received yet."""


class SpaceJournal:
    """See the module. A `PartRecovery`."""

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
        """Record that the tables are on these servers; see `log_layout.py`."""
        write_layout(self._folder, count)

    def close(self, *, delete: bool = False) -> None:
        try:
            self._log.close()
        finally:
            if delete:
                rmtree(self._folder)

    def replay(self) -> int:
        """Restore the newest checkpoint of the log and apply the records after it; begin a segment."""
        first, applied = self._restore(), 0
        for worker, number, write in self._log.records(first):
            self._space.replay(worker, number, write)
            applied += 1
        self._log.begin_segment()
        if applied:
            logger.info("%s: %d records applied", self._folder, applied)
        return applied

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
