"""TableSpace: the tables of one `ServerShards` on one server, and the workers that use them.

Every write of a worker has a number, 1, 2, 3 ... per server. Ray may deliver calls of an asynchronous actor
in another order, and a worker sends a write again if it does not know whether it arrived. So:

    a write with number            is
    at most `accepted`             a repetition: the answer waits until it is done, and nothing is applied
    accepted + 1                   accepted and applied
    higher                         kept waiting for its predecessors; without them it fails in the end

A read names the last write that it must see. In mode "sync" it sees no later step (`rows_before.py`), and
pushes are collected in a round:

    event                                          effect
    a worker pushes step s                         its push joins the round
    all members have pushed                        one summed optimizer step, all pushes are answered
    a member reports an error instead              nothing is applied, all others raise RankFailedError
    a member leaves                                the round no longer waits for it
    a worker joins                                 it is a member from now on; not during a round
    a push waits longer than the timeout           nothing is applied, all pushes of the round raise

With a staleness bound k, a read waits while its worker has made more than k pushes more than another member.
"""

from __future__ import annotations

import asyncio
import time as clock
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megalith.errors import (
    InputError,
    MegalithError,
    RankFailedError,
    RankTimeoutError,
    UsageError,
)
from megalith.shards.local import LocalShards
from megalith.shards.part import ShardsPart
from megalith.shards.servers.log.space_journal import SpaceJournal
from megalith.shards.servers.server.call_counts import CallCounts
from megalith.shards.servers.server.members import Member, Round
from megalith.shards.servers.server.part_counters import count_from, part_stats
from megalith.shards.servers.server.rows_before import RowsBefore
from megalith.shards.servers.server.server_writes import OwnedTables, apply_pushes, apply_write
from megalith.shards.servers.server.space_members import SpaceMembers
from megalith.shards.servers.server_messages import (
    READER,
    Array,
    Joined,
    ServerWrite,
    SpaceSpec,
)
from megalith.shards.wire import make_wire

_TIMED = {"push", "assign", "assign_add", "reinitialize", "evict", "evict_part"}


class TableSpace(SpaceMembers):
    """See the module."""

    def __init__(self, spec: SpaceSpec, index: int, num_servers: int) -> None:
        super().__init__(spec, index)
        shards = LocalShards(list(spec.configs), engine=spec.engine, seed=spec.seed, num_shards=num_servers)
        self.part = ShardsPart(shards, index, num_servers)
        self.tables = OwnedTables(shards, make_wire(spec.wire[0]), make_wire(spec.wire[1]))
        self.reads = self.writes = 0
        self.calls = CallCounts()
        self._journal: SpaceJournal | None = None
        self._kept_by: dict[str, int] = {}  # worker by the key of what its functions keep
        self._before = RowsBefore()

    # ---- recovery

    def recover(self, folder: Path) -> int:
        """Take the state of the last server with this log, and continue the log."""
        recovery = self.spec.recovery
        assert recovery is not None
        journal = SpaceJournal(self, folder, recovery)
        applied = journal.replay()
        self._journal = self.part.recovery = journal
        return applied

    def flush_log(self) -> None:
        """Write what the log has buffered. The next call of a worker raises the error."""
        if self._journal is not None:
            self._journal.flush()

    def close(self, *, moved: bool = False) -> None:
        """End what functions keep, and close the log."""
        for worker in set(self._kept_by.values()):
            self._abandon(worker)
        if self._journal is not None:
            self._journal.close(delete=moved)

    def state(self) -> dict[str, Any]:
        # With the consumers of touched rows.
        consumers = [table.stats().consumers for table in self.part.shards.local.values()]
        counters = {name: list(stats.counters) for name, stats in part_stats(self.part).items()}
        own = {"consumers": list(consumers[0]) if consumers else [], "counters": counters}
        return super().state() | own

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        for consumer in state["consumers"]:
            self.part.shards.track(consumer)
        count_from(self.part, state["counters"])

    def replay(self, worker: int, number: int, write: ServerWrite) -> None:
        """Apply a record of the log."""
        if write.kind == "join":
            self.join(worker, write.header["session"], observer=write.header["observer"])
        elif write.kind == "leave":
            self.remove(worker)
        elif write.kind == "drop":
            self._drop_round(RankTimeoutError(write.header["error"]))
        elif worker == READER:
            with suppress(MegalithError):  # it failed when it was recorded, too
                self._adopt(write.header) if write.kind == "adopt" else apply_write(self.tables, write)
        elif worker in self.members and number > self.members[worker].accepted:
            self.accept(worker, number, write)

    # ---- workers

    def join(
        self, worker: int, session: str, unacknowledged: int | None = None, *, observer: bool = False
    ) -> Joined:
        """Add a worker, or return what is known of it after its connection was lost."""
        member = self.members.get(worker)
        if member is None or not member.present:
            if self.spec.sync and self.complete and self._round.pushes and not observer:
                raise UsageError(
                    f"worker {worker} cannot join during a step: with mode='sync' workers join and leave "
                    "between steps"
                )
            member = self.members.setdefault(worker, Member())
            member.pushes = max(each.pushes for each in self.members.values())
            member.present, member.observer = True, observer
            member.session = ""  # so that it is recorded
        if member.session != session:
            self._record(worker, 0, ServerWrite("join", {"session": session, "observer": observer}))
            member.session = session
            self._abandon(worker)
        known = member.accepted
        if unacknowledged is not None and unacknowledged - 1 > member.accepted:
            # Answered writes that this server no longer has: they were lost with its log.
            member.accepted = member.done = unacknowledged - 1
        training = sum(each.trains for each in self.members.values())
        self.complete = self.complete or training >= self.spec.num_workers
        self._waiters.changed()
        return Joined(known, self.step, self._incarnation)

    async def leave(self, worker: int, session: str, after: int) -> None:
        """Remove the worker that calls, after its writes."""
        await self.wait_for(worker, session, after)
        self.remove(worker)

    def remove(self, worker: int) -> None:
        """Remove a worker; steps and other workers no longer wait for it, and its next write raises."""
        if worker in self.members:
            self._record(worker, 0, ServerWrite("leave", {}))
            self.members[worker].present = False
            self._abandon(worker)
            self._end_round_if_complete()
            self._waiters.changed()

    # ---- reads

    async def read(
        self,
        worker: int,
        session: str,
        after: int,
        ids: Array,
        counts: Sequence[int],
        step: int | None,
        out: Array | None = None,
    ) -> Array:
        """Read rows."""
        if worker != READER:
            await self.wait_for(worker, session, after)
            if self.spec.staleness is not None and not self.members[worker].observer:
                await self._wait_for_slowest(worker, session)
        self.reads += 1
        return self.tables.read(ids, counts, step, out, self._before.correction(worker, after))

    async def wait_for(self, worker: int, session: str, after: int) -> None:
        # It raises the error of a log that cannot be written.
        await super().wait_for(worker, session, after)
        if self._journal is not None:
            self._journal.check()

    # ---- functions

    async def run(
        self,
        worker: int,
        session: str,
        after: int,
        function: Callable[..., Any],
        *args: Any,
        background: bool,
    ) -> Any:
        """Run a function with this server's part of the tables; see `Shards.each_part`."""
        await self.wait_for(worker, session, after)
        if background:
            return await asyncio.to_thread(function, self.part, *args)
        try:
            return function(self.part, *args)
        finally:
            self._kept_by = {key: self._kept_by.get(key, worker) for key in self.part.kept}

    def _abandon(self, worker: int) -> None:
        """End what functions of a worker keep, for instance a save."""
        for key in [key for key, owner in self._kept_by.items() if owner == worker]:
            del self._kept_by[key]
            if key in self.part.kept:
                self.part.kept.pop(key).abandon()

    # ---- writes

    async def write(self, worker: int, session: str, number: int, write: ServerWrite) -> Any:
        """Apply a write once, in the order of the worker's numbers."""
        member = await self._wait_for_turn(worker, session, number)
        if number > member.accepted:
            self.writes += 1
            timed = self.with_time(write)
            try:
                if timed.kind == "push":
                    self.tables.check_push(timed)
                self._record(worker, number, timed)
            except (OSError, InputError) as error:  # it cannot be applied, or not recovered
                member.accepted = number
                self._finish(member, number, error)
            else:
                joined = self.accept(worker, number, timed)
                if joined is not None:
                    await self._wait_for_round(joined)
        elif member.done < number:
            await self._waiters.until(
                lambda: member.done >= number, self.spec.timeout, lambda: self._missing(f"write {number}")
            )
        self._member(worker, session)
        member.raise_error(number)
        return member.result if member.done == number else None

    async def _wait_for_turn(self, worker: int, session: str, number: int) -> Member:
        """Wait until a write is accepted or the next one of its worker."""
        # The time counts from the worker's last progress. A write that waits too long is accepted with this
        # error, so that those after it go on.
        while True:
            member = self._member(worker, session)
            if number <= member.accepted:
                return member
            if not member.present:
                raise UsageError(
                    f"worker {worker} has left the workers of server {self._index}, so it cannot write: "
                    "make a new ServerShards to join again"
                )
            in_round = member.done < member.accepted  # which has its own time limit
            if number == member.accepted + 1 and not (self.spec.sync and in_round):
                return member
            error = await self._wait_for_progress(member, worker, number)
            if error is not None and not in_round:
                member.skip(number, error)
                self._waiters.changed()

    async def _wait_for_progress(self, member: Member, worker: int, number: int) -> RankTimeoutError | None:
        """Wait until something has changed for a worker; return the error if nothing has."""
        before = member.progress
        try:
            await self._waiters.until(
                lambda: member.progress != before,
                self.spec.timeout,
                lambda: f"server {self._index}: write {number} of worker {worker} waits for the one before",
            )
        except RankTimeoutError as error:
            return error if member.progress == before else None
        return None

    def _record(self, worker: int, number: int, write: ServerWrite) -> None:
        """Record a change before it is applied."""
        if self._journal is not None:
            self._journal.append(worker, number, write)

    def with_time(self, write: ServerWrite) -> ServerWrite:
        """Return a write whose time is known: that of the worker, or the clock of this server."""
        if write.kind in _TIMED and write.header.get("time") is None:
            return ServerWrite(write.kind, write.header | {"time": int(clock.time())}, write.arrays)
        return write

    def accept(self, worker: int, number: int, write: ServerWrite) -> Round | None:
        """Apply a write, or add it to the round. It neither waits nor raises: errors are kept by number."""
        member = self.members[worker]
        member.accepted = number
        if write.kind == "push":
            self.step = max(self.step, write.header["step"])
            member.pushes += 1
        if self.spec.sync and write.kind in ("push", "fail"):
            joined = self._round
            joined.pushes[worker] = write
            self._end_round_if_complete()
            return None if joined.ended else joined
        self._before, member.result = RowsBefore(), None
        failure: Exception | None = None
        try:
            if write.kind == "adopt":
                self._adopt(write.header)
            elif write.kind != "fail":
                member.result = apply_write(self.tables, write)
        except Exception as error:
            failure = error
        self._finish(member, number, failure)
        return None

    def _adopt(self, header: Mapping[str, Any]) -> None:
        """Take the workers and the step of tables that were moved here from other servers."""
        self.step = max(self.step, header["step"])
        self.complete = self.complete or header["complete"]
        for worker, pushes in header["pushes"].items():
            member = self.members.setdefault(int(worker), Member())
            member.pushes = pushes
        count_from(self.part, header.get("counters", {}))
        if self._journal is not None:
            self._journal.sync()  # before the logs of the other servers are deleted
            if self._index == 0:  # the others have adopted their part before
                self._journal.settle(self.part.count)

    def _finish(self, member: Member, number: int, error: Exception | None) -> None:
        if error is not None:
            member.keep(number, error)
        member.done = number
        self._waiters.changed()

    # ---- synchronous steps

    def _end_round_if_complete(self) -> None:
        current = self._round
        absent = [w for w, member in self.members.items() if member.trains and w not in current.pushes]
        if not current.pushes or absent or not self.complete:
            return
        pushes = [current.pushes[worker] for worker in sorted(current.pushes)]
        failed = {w: push for w, push in sorted(current.pushes.items()) if push.kind == "fail"}
        try:
            if failed:
                worker, push = next(iter(failed.items()))
                raise RankFailedError(
                    f"apply_gradients: worker {worker} failed, so nothing was done: {push.header['error']}"
                )
            numbers = {worker: self.members[worker].accepted for worker in current.pushes}
            self._before = RowsBefore(numbers, apply_pushes(self.tables, pushes, keep=True))
        except Exception as error:
            current.error = error
        self._end_round(current)

    def _end_round(self, ended: Round) -> None:
        self._round = Round()
        ended.ended = True
        for worker, push in ended.pushes.items():
            member = self.members[worker]
            member.done, member.result = member.accepted, None
            if ended.error is not None and push.kind != "fail":
                member.keep(member.accepted, ended.error)
        self._waiters.changed()

    async def _wait_for_round(self, joined: Round) -> None:
        try:
            await self._waiters.until(
                lambda: joined.ended,
                self.spec.timeout,
                lambda: self._missing(f"server {self._index}: a step waits for the gradients of all workers"),
            )
        except RankTimeoutError as error:
            if not joined.ended:
                self._record(READER, 0, ServerWrite("drop", {"error": str(error)}))
                self._drop_round(error)

    def _drop_round(self, error: MegalithError) -> None:
        """End the round without applying it; its pushes raise the error."""
        self._round.error = error
        self._end_round(self._round)
