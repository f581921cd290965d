"""Fetching: one rank finds, downloads and checks the objects of its peers, each once.

A peer gets exactly one status, and a failure of one peer never affects another. Memory stays within the
plan's budget: a quarter each for streams, for ranged downloads, for checks, and for small bodies that stay in
memory; larger ones go to the spool. A `Gatherer` fetches the uids that it is given and ends in a partial;
`partition` and `backfill` decide which uids those are, and `gather` calls them where one process does it all.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

from megalith.distributed.elastic_ranks import ElasticRanks
from megalith.errors import BudgetError, InputError
from megalith.gather.payload import Payload, header_limit, least_size
from megalith.gather.payload_schema import PayloadSchema
from megalith.gather.plan import RETRIED, Fault, GatherPlan, Status, backfill, partition
from megalith.gather.result import Fetched, GatherResult, Partial, Record, make_partial, merge, tier_of
from megalith.gather.validate import least_work_bytes, validate
from megalith.ops import checks
from megalith.storage.bodies import RANGE_BYTES, Body, Ledger, MemoryWriter, SpoolWriter, download_body
from megalith.storage.object_store import (
    DOWNLOAD_PIECE_BYTES,
    ObjectInfo,
    ObjectStore,
    RequestFailure,
    StoreRequestError,
)
from megalith.storage.retries import backoff, repeat, run_async
from megalith.units import show_bytes

SnapshotPolicy = Literal["none", "host", "disk"]
Stores = Mapping[str, ObjectStore]
"""Stores by the names that plans use."""
_STREAM_BYTES = 4 * DOWNLOAD_PIECE_BYTES  # a piece that arrives, one handed over, what the client keeps
_SLACK = 0.05  # seconds after which a request is cancelled that should have ended by itself
_TORCH_FILE = b"PK\x03\x04"
_BYTES_PER_POSITION = 64  # of a block that is converted
_log = logging.getLogger("megalith.gather")


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """How this rank works. Given enough time, nothing here changes what is accepted or the weights."""

    in_flight: int = 16
    """Downloads at once at most."""
    workers: int = 2
    """Threads that check payloads."""
    spool_directory: Path | None = None
    """Where larger bodies and snapshots go; None: the system's directory for temporary files."""
    spool_from: int = 8 << 20
    """Bodies of this many bytes and more go to the spool; smaller ones too if the budget is small."""
    ranged_from: int = 32 << 20
    """Objects of this many bytes and more are downloaded by parallel ranged requests that resume."""
    request_timeout: float = 30.0
    """Seconds for one request, and for a download in addition to what its size takes."""
    slowest: float = 1 << 18
    """Bytes per second below which a download is given up and tried again."""
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    """The clock that time_max is compared with."""
    snapshot: SnapshotPolicy = "none"
    """How weights are restored if a step fails: "none", "host" (a copy in memory) or "disk" (a spool)."""

    def __post_init__(self) -> None:
        for name in ("in_flight", "workers", "spool_from", "ranged_from"):
            checks.integer(getattr(self, name), f"options: {name}")
        for name in ("request_timeout", "slowest"):
            checks.seconds(getattr(self, name), f"options: {name}")
        if self.spool_directory is not None:
            where = checks.path(self.spool_directory, "options: spool_directory")
            object.__setattr__(self, "spool_directory", where)
        checks.callback(self.now, "options: now", required=True)
        checks.one_of(self.snapshot, get_args(SnapshotPolicy), "options: snapshot")


def rank_options(options: RankOptions | None) -> RankOptions:
    """Return options that a caller gave, or the defaults."""
    return RankOptions() if options is None else checks.instance(options, RankOptions, "options")


@dataclass(frozen=True)
class _Phase:
    """One call of `fetch`: when it ends (on the loop's clock), places for downloads, threads for checks."""

    end: float
    places: asyncio.Semaphore
    ranged: asyncio.Semaphore
    workers: ThreadPoolExecutor
    bodies: list[Body] = field(default_factory=list)
    """All bodies that were downloaded, which are closed if the call is cancelled."""


class Gatherer:
    """Fetches for one rank and makes its partial. Faults become statuses; only wrong arguments raise.

    Args:
        plan: The plan.
        schema: The schema of the payloads.
        stores: The stores that the plan names.
        rank: The rank.
        world_size: The number of ranks.
        options: How it fetches.
        complete: Whether no object comes any more: a missing one is not waited for.

    Raises:
        BudgetError: The plan's memory budget is too small for the schema.
        InputError: The plan is for another schema, or a store is missing.
    """

    def __init__(
        self,
        plan: GatherPlan,
        schema: PayloadSchema,
        stores: Stores,
        *,
        rank: int = 0,
        world_size: int = 1,
        options: RankOptions | None = None,
        complete: bool = False,
    ) -> None:
        checks.instance(plan, GatherPlan, "plan")
        checks.instance(schema, PayloadSchema, "schema")
        if plan.schema != schema.digest:
            raise InputError(f"the plan is for schema {plan.schema!s:.12}, not {schema.digest[:12]}")
        given = checks.mapping(stores, "stores", '{"default": store}')
        for name, store in given.items():
            checks.instance(store, ObjectStore, f"stores[{name!r}]")
        uids = (*plan.primary, *plan.reserve)
        missing = sorted({plan.location(uid).store for uid in uids} - set(given))
        if missing:
            raise InputError(f"the plan names store {missing[0]!r}: pass it in stores")
        budget, least = plan.gather.memory_budget, least_budget(schema)
        if budget < least:
            raise BudgetError(
                f"fetching: a budget of {show_bytes(budget)} is too small, this schema takes "
                f"{show_bytes(least)}: raise memory_budget"
            )
        self._plan = plan
        self._schema = schema
        self._stores = given
        self._rank = checks.integer(rank, "rank", 0)
        self._world_size = checks.integer(world_size, "world_size")
        self._options = rank_options(options)
        self._complete = checks.flag(complete, "complete")
        self._assigned: list[int] = []
        self._fetched: list[Fetched] = []
        self._start = time.monotonic()
        self._ledger = Ledger(budget, "fetching")
        quarter = budget // 4
        self._kept_bytes = min(self._options.spool_from - 1, quarter // max(1, len(uids)))
        self._in_flight = max(1, min(self._options.in_flight, quarter // _STREAM_BYTES))
        self._workers = max(1, min(self._options.workers, quarter // least_work_bytes(schema)))
        self._work_bytes = quarter // self._workers
        self._ranges = min(4, quarter // (2 * RANGE_BYTES))  # a range exists twice while it arrives
        self._ranged_bytes = 2 * RANGE_BYTES * self._ranges
        self._ranged_at_once = max(1, quarter // max(1, self._ranged_bytes))

    @property
    def peak_bytes(self) -> int:
        """The most memory that fetching and checking held at once, by the ledger."""
        return self._ledger.peak

    @property
    def statuses(self) -> dict[int, Status]:
        """The status of every uid so far."""
        return {record.uid: record.status for record, _ in self._fetched}

    def fetch(self, uids: Sequence[int]) -> dict[int, Status]:
        """Fetch peers, concurrently within the limits. A uid is fetched once.

        Args:
            uids: The peers, all of the plan.

        Returns:
            The status of every uid so far.
        """
        what = f"fetching window {self._plan.window}"
        return run_async(self.fetch_async(uids), what, deadline=self._plan.gather.deadline)

    async def fetch_async(self, uids: Sequence[int]) -> dict[int, Status]:
        """Do the same as `fetch` in an event loop.

        Args:
            uids: The peers.

        Returns:
            The status of every uid so far.
        """
        known = {*self._plan.primary, *self._plan.reserve}
        given = checks.items(uids, "uids", "integers")
        for uid in given:
            if checks.as_integer(uid) not in known:
                raise InputError(f"uid {uid!r:.40} is not in the plan")
        fresh = [uid for uid in dict.fromkeys(map(int, given)) if uid not in set(self._assigned)]
        self._assigned += fresh
        with ThreadPoolExecutor(self._workers, "megalith-validate") as workers:
            end = asyncio.get_running_loop().time() + self._plan.gather.deadline
            places, ranged = asyncio.Semaphore(self._in_flight), asyncio.Semaphore(self._ranged_at_once)
            phase = _Phase(end, places, ranged, workers)
            try:
                self._fetched += await asyncio.gather(*(self._one(uid, phase) for uid in fresh))
            except BaseException:
                for body in phase.bodies:
                    body.close()
                raise
        return self.statuses

    def use_plan(self, plan: GatherPlan, world_size: int) -> None:
        """Continue under the plan of another attempt, after a rank was lost.

        Args:
            plan: The plan.
            world_size: The number of ranks that are left.
        """
        self._plan = checks.instance(plan, GatherPlan, "plan")
        self._world_size = checks.integer(world_size, "world_size")

    def partial(self, error: str | None = None) -> Partial:
        """Return the result of this rank.

        Args:
            error: What ended its work early; uids without a status are then RANK_LOST.

        Returns:
            The partial.
        """
        if error is not None:
            checks.text(error, "error")
        return make_partial(
            self._plan,
            self._schema,
            self._assigned,
            self._fetched,
            rank=self._rank,
            world_size=self._world_size,
            seconds=time.monotonic() - self._start,
            error=error,
        )

    def merge_with(self, ranks: ElasticRanks, *, error: str | None = None) -> GatherResult:
        """Exchange the partials of all ranks and merge them. A collective call.

        Args:
            ranks: The ranks.
            error: What ended the work of this rank early.

        Returns:
            The result, equal on all ranks except for the payloads that they hold.
        """
        checks.instance(ranks, ElasticRanks, "ranks")
        own = self.partial(error)
        return merge(
            own if place == ranks.place else Partial.from_bytes(each, self._plan, self._schema)
            for place, each in enumerate(ranks.exchange("partials", own.to_bytes()))
        )

    async def _one(self, uid: int, phase: _Phase) -> Fetched:
        """Everything about one uid, up to its record; only cancellation leaves here as an exception."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        seen: dict[str, Any] = {}
        payload, status, detail = None, Status.OK, ""
        try:
            body = await self._download(uid, seen, phase)
            phase.bodies.append(body)
            payload = await loop.run_in_executor(phase.workers, self._check, body, uid)
            seen |= {"digest": payload.header.digest, "global_step": payload.header.label.global_step}
        except Fault as fault:
            status, detail = fault.status, fault.detail
        except OSError as error:
            status, detail = Status.LOCAL_ERROR, str(error)
        except Exception as error:
            _log.exception("uid %d of window %d: an error in Megalith", uid, self._plan.window)
            status, detail = Status.LOCAL_ERROR, f"{type(error).__name__}: {error}"
        _log.info("plan %s uid %d: %s %s", self._plan.digest[:12], uid, status, detail)
        tier = tier_of(self._plan, uid)
        return Record(uid, tier, status, detail, seconds=loop.time() - start, **seen), payload

    async def _download(self, uid: int, seen: dict[str, Any], phase: _Phase) -> Body:
        """The bytes of the object, tried again as statuses and time allow."""
        pauses = backoff(random.Random(f"{self._plan.digest}/{uid}"))
        replaced, last = False, False
        known: list[Fault] = []  # what the store answered so far

        async def attempt() -> Body:
            try:
                async with phase.places:
                    with self._ledger.hold(_STREAM_BYTES, "a download"):
                        return await self._attempt(uid, seen, known, phase)
            except StoreRequestError as error:
                raise Fault(Status(error.failure), str(error)) from None
            except TimeoutError as error:
                raise Fault(Status.TIMEOUT, f"the store gave no answer in time: {error}") from None
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                raise Fault(Status.STORE_ERROR, "the store cancelled its own request") from None

        def pause_after(fault: Fault) -> float | None:
            nonlocal replaced, last
            changed = fault.status is Status.CHANGED
            if fault.status is not Status.TIMEOUT:
                known[:] = [fault]
            if fault.status not in RETRIED or last or (changed and replaced):
                return None
            replaced = replaced or changed
            last = self._window_is_over()
            return 0.0 if changed else next(pauses)

        try:
            return await repeat(attempt, Fault, pause_after, phase.end)
        except Fault as fault:
            # The deadline cuts the last try short: that says less than the answer to an earlier one.
            raise known[0] if known and fault.status is Status.TIMEOUT else fault from None

    async def _attempt(self, uid: int, seen: dict[str, Any], known: list[Fault], phase: _Phase) -> Body:
        """One HEAD, and a download of the version that HEAD saw."""
        loop, options = asyncio.get_running_loop(), self._options
        location = self._plan.location(uid)
        store, key = self._stores[location.store], location.key
        left = phase.end - loop.time()
        if left <= 0:
            raise Fault(Status.TIMEOUT, "its turn came after the deadline")
        seen["tries"] = seen.get("tries", 0) + 1
        limit = min(left, options.request_timeout)
        async with asyncio.timeout(limit + _SLACK):  # a store may ignore its own limit
            info = await store.head(key, timeout=limit)
        known[:] = [fault for fault in known if fault.status is Status.SLOW]
        seen |= {"last_modified": info.last_modified, "etag": info.etag}
        self._check_info(info)
        enough = options.request_timeout + info.size / options.slowest
        info = replace(info, key=key)
        spool = options.spool_directory
        ranged = info.size >= options.ranged_from and info.etag is not None and self._ranges > 1
        in_memory = info.size <= self._kept_bytes and not ranged
        async with phase.ranged if ranged else nullcontext():
            with self._ledger.hold(self._ranged_bytes if ranged else 0, "a ranged download"):
                start = loop.time()
                limit = max(0.001, min(phase.end - start, enough))
                try:
                    async with asyncio.timeout(limit + _SLACK):
                        body = await download_body(
                            store,
                            info,
                            MemoryWriter(info.size, self._ledger) if in_memory else SpoolWriter(spool),
                            deadline=limit,
                            request_timeout=options.request_timeout,
                            ranges=self._ranges if ranged else 1,
                        )
                except StoreRequestError as error:
                    # A download that began shortly before the deadline says nothing about the peer.
                    had_time = loop.time() - start >= min(enough, self._plan.gather.deadline / 2)
                    status = Status.SLOW if had_time else Status.TIMEOUT
                    raise (
                        Fault(status, str(error)) if error.failure is RequestFailure.SLOW else error
                    ) from None
        seen["bytes"] = info.size
        return body

    def _window_is_over(self) -> bool:
        """Whether the next try is the last one: a peer that has not written by now is late."""
        limit = self._plan.time_max
        return self._complete or (
            limit is not None and self._options.now() > limit + timedelta(seconds=self._plan.gather.grace)
        )

    def _check_info(self, info: ObjectInfo) -> None:
        """Refuse by time and size, before a download."""
        plan, written = self._plan, info.last_modified
        if plan.time_min is not None and written < plan.time_min:
            raise Fault(Status.TOO_EARLY, f"written at {written}, the window opened at {plan.time_min}")
        if plan.time_max is not None and written > plan.time_max:
            raise Fault(Status.TOO_LATE, f"written at {written}, the window closed at {plan.time_max}")
        least, most = least_size(self._schema), plan.gather.max_object_bytes
        ours = plan.gather.formats == ("megalith",)
        if not self._schema.tables and ours:
            most = min(most, least + header_limit(self._schema))
        if info.size > most:
            raise Fault(Status.TOO_LARGE, f"has {info.size} bytes, at most {most} are possible")
        if info.size < least and ours:
            raise Fault(
                Status.CORRUPT, f"has {info.size} bytes, a payload of this model has at least {least}"
            )

    def _check(self, body: Body, uid: int) -> Payload:
        """Convert if necessary, then validate; on a worker. The body is closed if a Fault is raised."""
        plan = self._plan
        try:
            if "templar" in plan.gather.formats and body.read(0, min(4, body.size)) == _TORCH_FILE:
                body = self._converted(body, uid)
            return validate(body, self._schema, plan, uid, ledger=self._ledger, work_bytes=self._work_bytes)
        except BaseException:
            body.close()
            raise

    def _converted(self, body: Body, uid: int) -> Body:
        """A payload in the spool with the content of a torch file."""
        plan, spool = self._plan, SpoolWriter(self._options.spool_directory)
        widest = max((spec.keep for spec in self._schema.parameters), default=1)
        try:
            with self._ledger.hold(self._work_bytes, "converting"):
                import_module("megalith.compat.templar").convert_payload(
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


def gather(
    plan: GatherPlan, schema: PayloadSchema, stores: Stores, *, options: RankOptions | None = None
) -> GatherResult:
    """Gather a window in this process: primaries, then rounds of reserves for those that failed.

    Args:
        plan: The plan.
        schema: The schema of the payloads.
        stores: The stores that the plan names.
        options: How to fetch.

    Returns:
        The result. It holds payloads open: close it after the update.

    Raises:
        InputError: The plan does not match the schema or the stores.
        BudgetError: The memory budget is too small. Both are raised before any request.
    """
    rank = Gatherer(plan, schema, stores, options=options)
    try:
        statuses = rank.fetch(partition(plan, 1)[0])
        for _ in range(plan.gather.backfill_rounds):
            (more,) = backfill(plan, [statuses])
            if not more:
                break
            statuses = rank.fetch(more)
    except BaseException:
        rank.partial().close()
        raise
    return merge([rank.partial()])


def least_budget(schema: PayloadSchema) -> int:
    """Return the smallest memory budget with which payloads of a schema can be fetched."""
    return 4 * max(_STREAM_BYTES, least_work_bytes(schema))
