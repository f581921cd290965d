"""One rank's fetching: each of its peers' objects is found, downloaded once, checked, and kept or given up.

A peer gets exactly one status, and nothing that goes wrong with it reaches another peer. Memory stays
within the plan's budget: a quarter for streams, a quarter for checks, half for small bodies that stay in
memory; larger ones go to the spool.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from megalith.errors import BudgetError, InputError
from megalith.gather.baseline import convert, is_baseline
from megalith.gather.body import Body, MemoryBody, SpoolWriter
from megalith.gather.ledger import Ledger
from megalith.gather.payload import Payload, header_limit, least_size
from megalith.gather.plan import Plan
from megalith.gather.schema import Schema
from megalith.gather.status import RETRIED, Fault, Status
from megalith.gather.store import Store, backoff
from megalith.gather.validate import Checked, least_work_bytes, validate
from megalith.storage.object_store import DOWNLOAD_PIECE_BYTES, ObjectInfo
from megalith.units import show_bytes

Tier = Literal["primary", "reserve"]
TIERS: tuple[Tier, ...] = ("primary", "reserve")

STREAM_BYTES = 4 * DOWNLOAD_PIECE_BYTES
"""Memory of one download: a piece on its way in, one handed over, and what the client keeps."""
_BYTES_PER_POSITION = 64  # of a block that is converted
_log = logging.getLogger("megalith.gather")


def utc_now() -> datetime:
    """The time, in UTC."""
    return datetime.now(UTC)


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """How this rank fetches. Nothing here changes what is accepted, given time enough."""

    in_flight: int = 16
    """Downloads at once at most."""
    workers: int = 2
    """Threads that check payloads."""
    spool_directory: Path | None = None
    """Where larger bodies go; None is the system's folder for temporary files."""
    spool_from: int = 8 << 20
    """Bodies of this many bytes and more go to the spool; fewer do where the budget is small."""
    request_timeout: float = 30.0
    """Seconds for one request, and for a download beside what its size takes."""
    slowest: float = 1 << 18
    """Bytes per second below which a download counts as stuck and is tried again."""
    now: Callable[[], datetime] = utc_now
    """The clock that time_max is compared with."""

    def __post_init__(self) -> None:
        for name in ("in_flight", "workers", "request_timeout", "slowest"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name} must be above 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class Record:
    """What became of one uid. bytes: downloaded; tries: of reading it; seconds: from start to status."""

    uid: int
    tier: Tier
    status: Status
    detail: str = ""
    bytes: int = 0
    tries: int = 0
    last_modified: datetime | None = None
    etag: str | None = None
    digest: str | None = None
    global_step: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Fetched:
    """A record, and with status OK what was checked and where its bytes are."""

    record: Record
    checked: Checked | None = None
    payload: Payload | None = None


@dataclass(frozen=True)
class _Phase:
    """One call of `fetch`: when it ends (on the loop's clock), places for downloads, threads for checks.

    bodies: all that were downloaded, to be closed if the call is cancelled.
    """

    end: float
    places: asyncio.Semaphore
    workers: ThreadPoolExecutor
    bodies: list[Body] = field(default_factory=list)


class Fetcher:
    """Fetches peers for one rank. slots: how many bodies it may have to keep in all.

    Raises BudgetError if the plan's memory budget is too small for its schema, InputError if a store is not
    given.
    """

    def __init__(
        self,
        plan: Plan,
        schema: Schema,
        stores: Mapping[str, Store],
        *,
        slots: int | None = None,
        options: FetchOptions | None = None,
    ) -> None:
        if plan.schema != schema.digest:
            raise InputError(f"the plan is for schema {plan.schema[:12]}, not {schema.digest[:12]}")
        missing = sorted({plan.location(u).store for u in (*plan.primary, *plan.reserve)} - set(stores))
        if missing:
            raise InputError(f"the plan names store {missing[0]!r}, which was not given")
        budget, least = plan.memory_budget, least_budget(schema)
        if budget < least:
            raise BudgetError(
                f"fetching: a budget of {show_bytes(budget)} is too small, this schema takes "
                f"{show_bytes(least)}: raise memory_budget"
            )
        self.ledger = Ledger(budget, "fetching")
        self._plan = plan
        self._schema = schema
        self._stores = stores
        self._options = options or FetchOptions()
        most = slots if slots is not None else len(plan.primary) + len(plan.reserve)
        self._kept_bytes = min(self._options.spool_from - 1, budget // 2 // max(1, most))
        self._in_flight = max(1, min(self._options.in_flight, budget // 4 // STREAM_BYTES))
        self._workers = max(1, min(self._options.workers, budget // 4 // least_work_bytes(schema)))
        self._work_bytes = budget // 4 // self._workers

    async def fetch(self, uids: Sequence[int], tier: Tier) -> list[Fetched]:
        """Fetches these uids at once, as far as limits allow; results in the order of the uids."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(self._workers, "megalith-validate") as workers:
            phase = _Phase(loop.time() + self._plan.deadline, asyncio.Semaphore(self._in_flight), workers)
            try:
                return list(await asyncio.gather(*(self._one(uid, tier, phase) for uid in uids)))
            except BaseException:
                for body in phase.bodies:
                    body.close()
                raise

    async def _one(self, uid: int, tier: Tier, phase: _Phase) -> Fetched:
        """Everything about one uid, ending in its record; only cancellation leaves here as an exception."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        found = _Found(Record(uid, tier, Status.OK))
        try:
            body = await self._download(uid, found, phase)
            phase.bodies.append(body)
            checked, payload = await loop.run_in_executor(phase.workers, self._check, body, uid)
        except Fault as fault:
            done = Fetched(replace(found.record, status=fault.status, detail=fault.detail))
        except OSError as error:
            done = Fetched(replace(found.record, status=Status.LOCAL_ERROR, detail=str(error)))
        except Exception as error:
            _log.exception("uid %d of window %d: an error of ours", uid, self._plan.window)
            detail = f"{type(error).__name__}: {error}"
            done = Fetched(replace(found.record, status=Status.LOCAL_ERROR, detail=detail))
        else:
            header = checked.header
            record = replace(found.record, digest=header.digest, global_step=header.label.global_step)
            done = Fetched(record, checked, payload)
        record = replace(done.record, seconds=loop.time() - start)
        _log.info("plan %s uid %d: %s %s", self._plan.digest[:12], uid, record.status, record.detail)
        return replace(done, record=record)

    async def _download(self, uid: int, found: _Found, phase: _Phase) -> Body:
        """The object's bytes, tried again as statuses and time allow. Raises Fault with the last status."""
        loop = asyncio.get_running_loop()
        pauses = backoff(random.Random(f"{self._plan.digest}/{uid}"))
        replaced, last = False, False
        while True:
            try:
                async with phase.places:
                    with self.ledger.hold(STREAM_BYTES, "a download"):
                        return await self._attempt(uid, found, phase)
            except Fault as fault:
                changed = fault.status is Status.CHANGED
                if fault.status not in RETRIED or last or (changed and replaced):
                    raise
                replaced = replaced or changed
                last = self._window_is_over()
                pause = 0.0 if changed else next(pauses)
                if loop.time() + pause >= phase.end:
                    raise
                await asyncio.sleep(pause)

    async def _attempt(self, uid: int, found: _Found, phase: _Phase) -> Body:
        """One HEAD, and one GET of what HEAD saw."""
        loop, options = asyncio.get_running_loop(), self._options
        location = self._plan.location(uid)
        store, key = self._stores[location.store], location.key
        if loop.time() >= phase.end:
            raise Fault(Status.TIMEOUT, "its turn came after the deadline")
        found.update(tries=found.record.tries + 1)
        info = await store.head(key, timeout=min(phase.end - loop.time(), options.request_timeout))
        found.update(last_modified=info.last_modified, etag=info.etag)
        self._check_info(info)
        sink = self._new_sink(info.size)
        try:
            limit = min(phase.end - loop.time(), options.request_timeout + info.size / options.slowest)
            got = await store.get(key, sink.write, etag=info.etag, timeout=max(0.0, limit))
            if (got.size, got.etag) != (info.size, info.etag):
                raise Fault(Status.CHANGED, f"{key!r} was replaced between two requests")
            found.update(bytes=info.size)
            return sink.finish()
        except BaseException:
            sink.discard()
            raise

    def _window_is_over(self) -> bool:
        """Whether the next try is the last: who has not written by now is late."""
        limit = self._plan.time_max
        return limit is not None and self._options.now() > limit + timedelta(seconds=self._plan.grace)

    def _check_info(self, info: ObjectInfo) -> None:
        """Refuses by time and size, before a download."""
        plan = self._plan
        if plan.time_min is not None and info.last_modified < plan.time_min:
            raise Fault(
                Status.TOO_EARLY, f"written at {info.last_modified}, the window opened {plan.time_min}"
            )
        if plan.time_max is not None and info.last_modified > plan.time_max:
            raise Fault(
                Status.TOO_LATE, f"written at {info.last_modified}, the window closed {plan.time_max}"
            )
        least, most = least_size(self._schema), plan.max_object_bytes
        if not self._schema.tables and not plan.accept_baseline:
            most = min(most, least + header_limit(self._schema))
        if info.size > most:
            raise Fault(Status.TOO_LARGE, f"has {info.size} bytes, {most} are the most")
        if info.size < least and not plan.accept_baseline:
            raise Fault(Status.CORRUPT, f"has {info.size} bytes, a payload of this model {least} or more")

    def _new_sink(self, size: int) -> _MemorySink | _SpoolSink:
        if size > self._kept_bytes:
            return _SpoolSink(size, SpoolWriter(self._options.spool_directory))
        return _MemorySink(size, self.ledger)

    def _check(self, body: Body, uid: int) -> tuple[Checked, Payload]:
        """Converts if need be, then validates; on a worker. Raises Fault, and closes the body then."""
        plan = self._plan
        try:
            if plan.accept_baseline and is_baseline(body.read(0, min(4, body.size))):
                body = self._converted(body, uid)
            checked = validate(
                body,
                self._schema,
                run=plan.run,
                window=plan.window,
                uid=uid,
                max_value=plan.max_value,
                ledger=self.ledger,
                work_bytes=self._work_bytes,
            )
        except BaseException:
            body.close()
            raise
        return checked, Payload(checked.header, body)

    def _converted(self, body: Body, uid: int) -> Body:
        """A payload of ours, in the spool, in the place of a baseline object."""
        plan, spool = self._plan, SpoolWriter(self._options.spool_directory)
        widest = max((spec.keep for spec in self._schema.parameters), default=1)
        try:
            with self.ledger.hold(self._work_bytes, "converting"):
                convert(
                    body,
                    self._schema,
                    spool.file,
                    run=plan.run,
                    window=plan.window,
                    uid=uid,
                    block_rows=max(1, self._work_bytes // (widest * _BYTES_PER_POSITION)),
                )
            converted = spool.finish()
        except BaseException:
            spool.discard()
            raise
        body.close()
        return converted


def least_budget(schema: Schema) -> int:
    """The smallest memory budget that fetching payloads of this schema works with."""
    return 4 * max(STREAM_BYTES, least_work_bytes(schema))


class _Found:
    """A record as it grows."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def update(self, **fields: Any) -> None:
        self.record = replace(self.record, **fields)


class _Sink:
    """Takes a body of known size; more bytes than announced are a fault, fewer never get here."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._done = 0

    def write(self, piece: memoryview) -> None:
        if self._done + len(piece) > self._size:
            raise Fault(Status.CHANGED, f"more than the announced {self._size} bytes came")
        self._keep(piece)
        self._done += len(piece)

    def _keep(self, piece: memoryview) -> None:
        raise NotImplementedError


class _MemorySink(_Sink):
    def __init__(self, size: int, ledger: Ledger) -> None:
        super().__init__(size)
        ledger.take(size, "a body in memory")
        self._ledger = ledger
        self._data = bytearray(size)

    def _keep(self, piece: memoryview) -> None:
        self._data[self._done : self._done + len(piece)] = piece

    def finish(self) -> Body:
        return MemoryBody(self._data, on_close=lambda: self._ledger.give(self._size))

    def discard(self) -> None:
        self._data = bytearray()
        self._ledger.give(self._size)


class _SpoolSink(_Sink):
    def __init__(self, size: int, spool: SpoolWriter) -> None:
        super().__init__(size)
        self._spool = spool

    def _keep(self, piece: memoryview) -> None:
        self._spool.write(piece)

    def finish(self) -> Body:
        return self._spool.finish()

    def discard(self) -> None:
        self._spool.discard()
