"""TableSpace: the tables of one `ServerShards` on one server, and the workers that use them.

Every write of a worker has a number, 1, 2, 3 ... per server. Ray may deliver calls of an asynchronous actor
in another order, and a worker sends a write again if it does not know whether it arrived. So:

    a write with number            is
    at most `accepted`             a repetition: the answer waits until it is done, and nothing is applied
    accepted + 1                   accepted and applied
    higher                         kept waiting for its predecessors; without them it fails in the end

A read names the last write that it must see. In mode "sync" it sees no later step, and pushes are collected
in a round:

    event                                          effect
    a worker pushes step s                         its push joins the round
    all members have pushed                        one summed optimizer step, all pushes are answered
    a member reports an error instead              nothing is applied, all others raise RankFailedError
    a member leaves                                the round no longer waits for it
    a worker joins                                 it is a member from now on; not during a round
    a push waits longer than the timeout           nothing is applied, all pushes of the round raise

With a staleness bound k, a read waits while its worker has made more than k pushes more than another
member.

A worker may exit after one server has its gradients of a step and before another one has them. The first
server has then applied the step, if it has those of the other workers too. The process that replaces the
worker computes the step again, and must read what the worker has read (`RowsBefore`):

    a read that names as its last write          gets
    the push of the step, or a later write       the rows after the step
    the write before that push                   the rows before the step

No server is more than one step ahead: its next step needs the next push of that worker.
"""

from __future__ import annotations

import asyncio
import time as clock
import uuid
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megalith.errors import (
    InputError,
    MegalithError,
    RankFailedError,
    RankTimeoutError,
    ServerRestartedError,
    UsageError,
)
from megalith.ps.messages import READER, Array, Joined, ServerWrite, SpaceSpec
from megalith.ps.recovery import SpaceJournal
from megalith.ps.writes import OwnedTables, apply_pushes, apply_write
from megalith.shards.contract import ShardsPart
from megalith.shards.local import LocalShards
from megalith.shards.row_encoding import make_wire
from megalith.table.table_data import RowCounters, TableStats


class Waiters:
    """Conditions that coroutines wait for. Everything runs in one event loop."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    async def until(self, condition: Callable[[], bool], timeout: float, what: Callable[[], str]) -> None:
        if condition():
            return
        entry = condition, asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        try:
            await asyncio.wait_for(entry[1], timeout)
        except TimeoutError:
            raise RankTimeoutError(f"{what()}, after {timeout:g} s") from None
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    def changed(self) -> None:
        """Wake the coroutines whose condition holds now, in the order in which they began to wait."""
        ready = [entry for entry in self._waiting if entry[0]()]
        for entry in ready:
            self._waiting.remove(entry)
            if not entry[1].done():
                entry[1].set_result(None)

    def __len__(self) -> int:
        return len(self._waiting)


_KEPT_ERRORS = 1000


@dataclass
class Member:
    session: str = ""  # Identifies the process that is this worker
    accepted: int = 0  # The number of the last accepted write
    done: int = 0  # The number of the last write that has been applied or has failed
    pushes: int = 0  # The number of its pushes, counted from the highest number of a member when it joined
    result: Any = None  # The result of the last write
    # Errors of the last failed writes by their number, for writes that are sent again
    errors: dict[int, Exception] = field(default_factory=dict)
    # The number of the last write whose error is no longer in `errors`. A repetition of this write or an
    # earlier one raises, so no error is lost.
    forgotten: int = 0
    present: bool = True  # Whether it is a member now
    observer: bool = False  # Whether nobody waits for its gradients: it reads, saves, loads and evicts

    @property
    def trains(self) -> bool:
        """Whether others wait for its gradients."""
        return self.present and not self.observer

    @property
    def progress(self) -> tuple[int, int, str, bool]:
        """What changes when a write is accepted or done, or when the worker leaves or is replaced."""
        return self.accepted, self.done, self.session, self.present

    def keep(self, number: int, error: Exception) -> None:
        """Keep the error of a write, for the case that the write is sent again."""
        self.errors[number] = error.with_traceback(None)
        while len(self.errors) > _KEPT_ERRORS:
            self.forgotten = max(self.forgotten, next(iter(self.errors)))
            del self.errors[next(iter(self.errors))]

    def raise_error(self, number: int) -> None:
        if number in self.errors:
            raise self.errors[number]
        if number <= self.forgotten:
            raise UsageError(
                f"write {number} was sent again, but its result is no longer known: more than {_KEPT_ERRORS} "
                "writes after it have failed"
            )

    def skip(self, number: int, error: Exception) -> None:
        """Give up a write and those before it that have not arrived; they raise if they arrive later."""
        if number - _KEPT_ERRORS > self.accepted:
            self.forgotten = number - _KEPT_ERRORS
        for skipped in range(max(self.accepted, number - _KEPT_ERRORS) + 1, number + 1):
            self.keep(skipped, error)
        self.accepted = self.done = number


class Round:
    def __init__(self) -> None:
        self.pushes: dict[int, ServerWrite] = {}
        self.ended = False
        self.error: Exception | None = None


class RowsBefore:
    def __init__(
        self,
        numbers: Mapping[int, int] = MappingProxyType({}),
        rows: Mapping[str, tuple[Tensor, Tensor]] = MappingProxyType({}),
    ) -> None:
        self._numbers = numbers
        self._rows = rows

    def correction(self, worker: int, after: int) -> Callable[..., None] | None:
        """Return what a read must do with its rows."""
        return self.put if self._numbers.get(worker) == after + 1 else None

    def put(self, ids: Mapping[str, Tensor], rows: Sequence[Tensor]) -> None:
        # rows: float32 [n, dim] per table of `ids`, the rows to correct.
        for (name, wanted), found in zip(ids.items(), rows, strict=True):
            if name not in self._rows:
                continue
            own, before = self._rows[name]
            known, order = own.sort()
            at = torch.searchsorted(known, wanted).clamp_(max=known.numel() - 1)
            changed = known[at] == wanted
            found[changed] = before[order[at[changed]]]


LATENCY_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of latencies in seconds."""
RATE_SECONDS = 10  # The time over which calls per second are counted


class CallCounts:
    def __init__(self) -> None:
        self._seconds: deque[list[int]] = deque()  # [second, calls], the last RATE_SECONDS of them
        self._began = clock.monotonic()
        self._latencies = [0] * (len(LATENCY_BOUNDS) + 1)
        self._latency_sum = 0.0

    def add(self, now: float | None = None) -> None:
        second = int(clock.monotonic() if now is None else now)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0])
            self._forget(second)
        self._seconds[-1][1] += 1

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - RATE_SECONDS:
            self._seconds.popleft()

    def add_lookup(self, seconds: float) -> None:
        self._latencies[bisect_left(LATENCY_BOUNDS, seconds)] += 1
        self._latency_sum += seconds

    def numbers(self, now: float | None = None) -> dict[str, Any]:
        at = clock.monotonic() if now is None else now
        self._forget(int(at))
        span = max(1.0, min(RATE_SECONDS, at - self._began))
        histogram = {
            "bounds": list(LATENCY_BOUNDS),
            "counts": list(self._latencies),
            "sum": self._latency_sum,
        }
        return {
            "requests_per_second": sum(count for _, count in self._seconds) / span,
            "lookup_seconds": histogram,
        }


def part_stats(part: ShardsPart) -> dict[str, TableStats]:
    """Return numbers about each table, with the counters since the tables were created anywhere."""
    found = part.shards.stats()
    for name, before in part.counted.items():
        counters = RowCounters(*map(sum, zip(found[name].counters, before, strict=True)))
        found[name] = replace(found[name], counters=counters)
    return found


def count_from(part: ShardsPart, counters: Mapping[str, Sequence[int]]) -> None:
    """Continue the counters of tables whose rows were restored on this server."""
    for name, own in part.shards.stats().items():
        if name in counters:
            before = RowCounters(*(a - b for a, b in zip(counters[name], own.counters, strict=True)))
            part.counted[name] = before._replace(pending=0)


_TIMED = {"push", "assign", "assign_add", "reinitialize", "evict", "evict_part"}


class TableSpace:
    def __init__(self, spec: SpaceSpec, index: int, num_servers: int) -> None:
        self.spec = spec
        self.members: dict[int, Member] = {}
        self.step = -1
        self.complete = False
        self._waiters = Waiters()
        self._round = Round()
        self._index = index
        self._incarnation = uuid.uuid4().hex
        shards = LocalShards(list(spec.configs), engine=spec.engine, seed=spec.seed, num_shards=num_servers)
        self.part = ShardsPart(shards, index, num_servers)
        self.tables = OwnedTables(shards, make_wire(spec.wire[0]), make_wire(spec.wire[1]))
        self.reads = self.writes = 0
        self.calls = CallCounts()
        self._journal: SpaceJournal | None = None
        self._kept_by: dict[str, int] = {}  # worker by the key of what its functions keep
        self._before = RowsBefore()

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    # ---- recovery

    def recover(self, folder: Path) -> None:
        """Take the state of the last server with this log, and continue the log."""
        recovery = self.spec.recovery
        assert recovery is not None
        journal = SpaceJournal(self, folder, recovery)
        journal.replay()
        self._journal = self.part.recovery = journal

    def flush_log(self) -> None:
        """Write what the log has buffered. The next call of a worker raises the error."""
        if self._journal is not None:
            self._journal.flush()

    def close(self, *, moved: bool = False) -> None:
        for worker in set(self._kept_by.values()):
            self._abandon(worker)
        if self._journal is not None:
            self._journal.close(delete=moved)

    def state(self) -> dict[str, Any]:
        """Return what a log begins with, as JSON data, without the pushes of a round in progress."""
        pushed = self._round.pushes
        members = {
            str(worker): {
                "session": member.session,
                "accepted": member.accepted - (worker in pushed),
                "pushes": member.pushes - (worker in pushed and pushed[worker].kind == "push"),
                "present": member.present,
                "observer": member.observer,
            }
            for worker, member in self.members.items()
        }
        consumers = [table.stats().consumers for table in self.part.shards.local.values()]
        return {
            "members": members,
            "step": self.step,
            "complete": self.complete,
            "consumers": list(consumers[0]) if consumers else [],
            "counters": {name: list(stats.counters) for name, stats in part_stats(self.part).items()},
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.members = {
            int(worker): Member(done=known["accepted"], **known) for worker, known in state["members"].items()
        }
        self.step, self.complete = state["step"], state["complete"]
        for consumer in state["consumers"]:
            self.part.shards.track(consumer)
        count_from(self.part, state["counters"])

    def round_pushes(self) -> list[tuple[int, int, ServerWrite]]:
        return [(w, self.members[w].accepted, push) for w, push in sorted(self._round.pushes.items())]

    def replay(self, worker: int, number: int, write: ServerWrite) -> None:
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

    def _member(self, worker: int, session: str) -> Member:
        """Return a worker. `session` is that of `join`, then "@" and the incarnation that it returned."""
        session, _, incarnation = session.partition("@")
        if incarnation and incarnation != self._incarnation:
            raise ServerRestartedError(
                f"server {self._index} was started again: worker {worker} must join it"
            )
        member = self.members.get(worker)
        if member is None:
            raise UsageError(f"worker {worker} has not joined server {self._index}")
        if member.session != session:
            raise UsageError(
                f"another ServerShards has joined server {self._index} as worker {worker}: give each worker "
                "its own number"
            )
        return member

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
        if worker != READER:
            await self.wait_for(worker, session, after)
            if self.spec.staleness is not None and not self.members[worker].observer:
                await self._wait_for_slowest(worker, session)
        self.reads += 1
        return self.tables.read(ids, counts, step, out, self._before.correction(worker, after))

    async def wait_for(self, worker: int, session: str, after: int) -> None:
        """Wait for a write of a worker; raise the error of a log that cannot be written."""
        member = self._member(worker, session)
        own = member.session
        await self._waiters.until(
            lambda: member.done >= after or member.session != own,
            self.spec.timeout,
            lambda: self._missing(f"server {self._index}: a call of worker {worker} waits for its push"),
        )
        self._member(worker, session)
        if self._journal is not None:
            self._journal.check()

    async def _wait_for_slowest(self, worker: int, session: str) -> None:
        member, bound = self._member(worker, session), self.spec.staleness
        own = member.session
        assert bound is not None

        def slowest() -> int:
            others = [x.pushes for w, x in self.members.items() if x.trains and w != worker]
            return min(others, default=member.pushes)

        await self._waiters.until(
            lambda: member.pushes - slowest() <= bound or member.session != own,
            self.spec.timeout,
            lambda: (
                f"server {self._index}: worker {worker} has made {member.pushes} steps and may be {bound} "
                f"ahead, but another worker has made {slowest()}"
            ),
        )
        self._member(worker, session)

    def _missing(self, what: str) -> str:
        absent = [w for w, x in self.members.items() if x.trains and w not in self._round.pushes]
        count = sum(member.trains for member in self.members.values())
        joined = "" if self.complete else f", and {count} of {self.spec.num_workers} workers have joined"
        return f"{what}; no gradients from workers {absent}{joined}"

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
