"""One rank's side of a window, and a whole window in one process.

A `Gatherer` fetches what it is given and ends in a partial. What it is given is decided by `partition` and,
between rounds, by `backfill` from all ranks' statuses; `gather` does that where there is one process only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from megalith.gather.fetch import TIERS, Fetched, Fetcher, FetchOptions
from megalith.gather.merge import GatherResult, merge
from megalith.gather.partial import Partial, make_partial, tier_of
from megalith.gather.partition import backfill, partition
from megalith.gather.plan import Plan
from megalith.gather.schema import Schema
from megalith.gather.status import Status
from megalith.gather.store import Store, wait


class Gatherer:
    """Fetches for one rank. Faults become statuses; only wrong arguments raise.

    slots: how many bodies it may have to keep; an equal share of the plan's uids unless given.
    """

    def __init__(
        self,
        plan: Plan,
        schema: Schema,
        stores: Mapping[str, Store],
        *,
        rank: int = 0,
        world_size: int = 1,
        slots: int | None = None,
        options: FetchOptions | None = None,
    ) -> None:
        self._plan = plan
        self._schema = schema
        self._rank = rank
        self._world_size = world_size
        share = -(-len(plan.primary) // world_size) + -(-len(plan.reserve) // world_size)
        self._fetcher = Fetcher(plan, schema, stores, slots=slots or share, options=options)
        self._assigned: list[int] = []
        self._fetched: list[Fetched] = []
        self._start = time.monotonic()

    @property
    def peak_bytes(self) -> int:
        """The most memory that fetching and checking held at once, by the ledger."""
        return self._fetcher.ledger.peak

    @property
    def statuses(self) -> dict[int, Status]:
        """What became of every uid so far."""
        return {each.record.uid: each.record.status for each in self._fetched}

    def fetch(self, uids: Sequence[int]) -> dict[int, Status]:
        """Fetches these uids and returns what became of every uid so far. A uid is fetched once."""
        fresh = [uid for uid in uids if uid not in set(self._assigned)]
        self._assigned += fresh
        for tier in TIERS:
            if chosen := [uid for uid in fresh if tier_of(self._plan, uid) == tier]:
                self._fetched += wait(self._fetcher.fetch(chosen, tier))
        return self.statuses

    def go_on(self, plan: Plan, world_size: int) -> None:
        """Goes on under the plan of another attempt, after a rank was lost."""
        self._plan = plan
        self._world_size = world_size

    def partial(self, error: str | None = None) -> Partial:
        """This rank's result; uids without a status, after an error, are RANK_LOST."""
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


def gather(
    plan: Plan, schema: Schema, stores: Mapping[str, Store], *, options: FetchOptions | None = None
) -> GatherResult:
    """Gathers a window in this process: primaries, then rounds of reserves for those that failed.

    The result holds payloads open: close it after the update. Raises InputError or BudgetError before any
    request.
    """
    rank = Gatherer(plan, schema, stores, options=options)
    try:
        statuses = rank.fetch(partition(plan, 1)[0])
        for _ in range(plan.backfill_rounds):
            (more,) = backfill(plan, [statuses])
            if not more:
                break
            statuses = rank.fetch(more)
    except BaseException:
        rank.partial().close()
        raise
    return merge([rank.partial()])
