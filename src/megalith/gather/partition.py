"""Who fetches whom: pure functions of the plan and of what all ranks know. Nothing downstream depends on
the answer.

A uid is attempted by one rank per attempt. An attempted uid never becomes a replacement.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from megalith.errors import InputError
from megalith.gather.plan import Plan
from megalith.gather.status import Status

Shares = tuple[tuple[int, ...], ...]
"""Uids by rank."""


def partition(plan: Plan, world_size: int, sizes: Mapping[int, int] | None = None) -> Shares:
    """The primaries of each rank: sorted, then dealt in turn; counts differ by one at most.

    sizes: bytes by uid, the same on all ranks; then the largest goes first, each to the rank with the
    fewest bytes (the lower rank, then the lower uid, on a tie). A uid without a size counts nothing.
    """
    _check_ranks(world_size)
    if sizes is None:
        return deal(sorted(plan.primary), [0] * world_size)
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for uid in sorted(plan.primary, key=lambda u: (-sizes.get(u, 0), u)):
        rank = min(range(world_size), key=lambda r: (loads[r], len(shares[r]), r))
        shares[rank].append(uid)
        loads[rank] += sizes.get(uid, 0)
    return tuple(tuple(sorted(share)) for share in shares)


def replacements(plan: Plan, accepted: Collection[int], attempted: Collection[int]) -> tuple[int, ...]:
    """The reserves of the next round: as many as primaries are missing, in the plan's order, none twice."""
    missing = len(plan.primary) - len(accepted)
    untried = [uid for uid in plan.reserve if uid not in set(attempted)]
    return tuple(untried[: max(0, missing)])


def backfill(plan: Plan, statuses: Sequence[Mapping[int, Status]]) -> Shares:
    """The next round of reserves by rank, from what every rank's attempted uids came to so far."""
    attempted = [uid for share in statuses for uid in share]
    accepted = [uid for share in statuses for uid, status in share.items() if status is Status.OK]
    return deal(replacements(plan, accepted, attempted), [len(share) for share in statuses])


def deal(uids: Iterable[int], attempted: Sequence[int]) -> Shares:
    """Deals uids in turn, to the ranks that attempted least first. attempted: how many uids each rank had."""
    _check_ranks(len(attempted))
    order = sorted(range(len(attempted)), key=lambda rank: (attempted[rank], rank))
    shares: list[list[int]] = [[] for _ in attempted]
    for number, uid in enumerate(uids):
        shares[order[number % len(order)]].append(uid)
    return tuple(tuple(share) for share in shares)


def redeal(uids: Collection[int], survivors: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """What a lost rank left without a status, by surviving rank; only these are fetched again."""
    ranks = sorted(set(survivors))
    shares = deal(sorted(set(uids)), [0] * len(ranks))
    return dict(zip(ranks, shares, strict=True))


def _check_ranks(count: int) -> None:
    if count < 1:
        raise InputError(f"at least one rank is needed, got {count}")
