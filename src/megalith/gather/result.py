"""Results: the partial of each rank, the merged result of a window, and whether to update with it.

Every rank makes a partial, also if nothing was assigned to it or nothing was valid. Its control part
travels as bytes to all ranks; payloads stay where they are. `merge` makes one result of all partials, equal
for any number of ranks. `uids` is the canonical order: accepted primaries ascending, then accepted
reserves. Everything that adds over peers adds in this order.

`decide` and what else follows from a merged result is equal on all ranks.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import IntEnum
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.gather.payload import Payload
from megalith.gather.payload_schema import PayloadSchema
from megalith.gather.plan import OUR_FAULTS, PEER_FAULTS, GatherPlan, Status
from megalith.ops import checks
from megalith.storage.json_codec import (
    NOT_SAVED,
    Sha256,
    canonical_json,
    from_json,
    parse_json_object,
    to_json,
)

Tier = Literal["primary", "reserve"]


@dataclass(frozen=True)
class Record:
    """What happened to one uid.

    Attributes:
        uid: The peer.
        tier: The list of the plan that it is in.
        status: The outcome.
        detail: A sentence for the log, if it was not accepted.
        bytes: Bytes that were downloaded.
        tries: How often it was requested.
        last_modified: When its object was written.
        etag: The version of its object.
        digest: The digest of its payload.
        global_step: The step counter that it stated.
        seconds: The time from the start to the status.
    """

    uid: int
    tier: Tier
    status: Status
    detail: str = ""
    bytes: int = 0
    tries: int = 0
    last_modified: datetime | None = None
    etag: str | None = None
    digest: Sha256 | None = None
    global_step: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Accepted:
    """What merging and updating need to know about an accepted payload."""

    norms: tuple[float, ...]  # The norm of each parameter, then of each table
    signature: Sha256  # A digest of all its positions; equal ones mean equal positions
    table_rows: tuple[int, ...]  # The number of rows of each table


Fetched: TypeAlias = tuple[Record, Payload | None]
"""The outcome of fetching one peer: what happened and, with status OK, its checked payload."""


@dataclass(frozen=True, kw_only=True)
class Partial:
    """The result of one rank."""

    plan: GatherPlan = field(metadata=NOT_SAVED)
    """The plan."""
    schema: PayloadSchema = field(metadata=NOT_SAVED)
    """The schema of the payloads."""
    rank: int = 0
    """The rank that made it."""
    world_size: int = 1
    """The number of ranks that share the plan."""
    assigned: tuple[int, ...] = ()
    """The uids that this rank had to fetch."""
    records: Mapping[int, Record] = field(default_factory=dict)
    """What happened to each of them."""
    accepted: Mapping[int, Accepted] = field(default_factory=dict)
    """The accepted ones."""
    payloads: Mapping[int, Payload] = field(default_factory=dict, metadata=NOT_SAVED)
    """The payloads that this process holds."""
    seconds: float = 0.0
    """How long the rank worked."""
    error: str | None = None
    """What ended the work of the rank early, if something did."""

    @property
    def uids(self) -> tuple[int, ...]:
        """Accepted uids, ascending."""
        return tuple(sorted(self.accepted))

    @property
    def skipped_uids(self) -> tuple[int, ...]:
        """Assigned uids that were not accepted, ascending."""
        return tuple(sorted(set(self.assigned) - set(self.accepted)))

    @property
    def download_bytes(self) -> int:
        """Bytes of all objects that were downloaded, accepted or not."""
        return sum(record.bytes for record in self.records.values())

    def close(self) -> None:
        """Release all payloads."""
        for payload in self.payloads.values():
            payload.close()

    def to_bytes(self) -> bytes:
        """Return the control part: everything except payloads."""
        return canonical_json({"plan": self.plan.digest, "partial": to_json(self)})

    @classmethod
    def from_bytes(cls, text: bytes, plan: GatherPlan, schema: PayloadSchema) -> Partial:
        """Read the control part of another rank.

        Args:
            text: What `to_bytes` returned.
            plan: The plan, which must be that of the other rank.
            schema: The schema.

        Returns:
            The partial, without payloads.

        Raises:
            InputError: It is damaged, or belongs to another plan or schema.
        """
        checks.instance(plan, GatherPlan, "plan")
        checks.instance(schema, PayloadSchema, "schema")
        fields = parse_json_object(text, lambda problem: InputError(f"partial: {problem}"))
        fields.allow_only("plan", "partial")
        if fields.sha256("plan") != plan.digest:
            fields.fail("plan", f"must be {plan.digest[:12]}...")
        found = from_json(cls, fields.object("partial"), plan=plan, schema=schema)
        good = {uid for uid, record in found.records.items() if record.status is Status.OK}
        widths = {(len(each.norms), len(each.table_rows)) for each in found.accepted.values()}
        if (
            set(found.records) != set(found.assigned)
            or set(found.accepted) != good
            or any(uid != record.uid for uid, record in found.records.items())
            or not widths <= {(len(schema.names), len(schema.tables))}
        ):
            fields.fail("partial", "must have one record per assigned uid, and norms of the accepted ones")
        return found


def make_partial(
    plan: GatherPlan,
    schema: PayloadSchema,
    assigned: Iterable[int],
    fetched: Iterable[Fetched],
    error: str | None = None,
    **about: Any,
) -> Partial:
    """Make the partial of a rank. Assigned uids without an outcome (after an error) are RANK_LOST."""
    wanted, found = tuple(assigned), list(fetched)
    payloads = {record.uid: payload for record, payload in found if payload is not None}
    why = error or "its rank ended early"
    records = {uid: Record(uid, tier_of(plan, uid), Status.RANK_LOST, why) for uid in wanted}
    return Partial(
        plan=plan,
        schema=schema,
        assigned=wanted,
        records=records | {record.uid: record for record, _ in found},
        accepted={uid: _summary(payload) for uid, payload in payloads.items()},
        payloads=payloads,
        error=error,
        **about,
    )


def _summary(payload: Payload) -> Accepted:
    header = payload.header
    digests = [each.indices_sha256 for each in header.parameters if not each.spec.full and each.spec.rows]
    signature = hashlib.sha256("".join(digests).encode()).hexdigest()
    return Accepted(payload.norms, signature, tuple(each.num_rows for each in header.tables))


def tier_of(plan: GatherPlan, uid: int) -> Tier:
    """Return which list of a plan a uid is in."""
    return "primary" if uid in plan.primary else "reserve"


@dataclass(frozen=True, kw_only=True)
class GatherResult:
    """The result of a window's gather. Sequences are in canonical order, mappings by uid."""

    plan: GatherPlan
    """The plan."""
    schema: PayloadSchema
    """The schema of the payloads."""
    uids: tuple[int, ...] = ()
    """The accepted peers in canonical order."""
    records: Mapping[int, Record] = field(default_factory=dict)
    """What happened to each attempted uid."""
    accepted: Mapping[int, Accepted] = field(default_factory=dict)
    """Norms, signature and numbers of rows of the accepted ones."""
    holders: Mapping[int, int] = field(default_factory=dict)
    """The rank that holds the payload of each accepted uid."""
    payloads: Mapping[int, Payload] = field(default_factory=dict)
    """The payloads that this process holds; all of them if one process gathered."""
    duplicate_uids: tuple[int, ...] = ()
    """Uids that more than one rank attempted; they count once."""
    time: float = 0.0
    """Seconds of the slowest rank."""
    download_bytes: int = 0
    """Bytes of all objects that were downloaded."""

    @property
    def skipped_uids(self) -> tuple[int, ...]:
        """Attempted uids that were not accepted, ascending."""
        return tuple(sorted(set(self.records) - set(self.uids)))

    @property
    def success_rate(self) -> float:
        """Accepted divided by wanted; it may be 1 although primaries failed, if reserves replaced them."""
        return len(self.uids) / len(self.plan.primary) if self.plan.primary else 0.0

    @property
    def primary_success_rate(self) -> float:
        """Accepted primaries divided by wanted."""
        accepted = len(self.uids) - self.reserve_used
        return accepted / len(self.plan.primary) if self.plan.primary else 0.0

    @property
    def intended(self) -> tuple[int, ...]:
        """The peers that were wanted."""
        return self.plan.primary

    @property
    def actual(self) -> tuple[int, ...]:
        """The accepted peers."""
        return self.uids

    @property
    def reserve_used(self) -> int:
        """The number of accepted peers that are reserves."""
        return sum(self.records[uid].tier == "reserve" for uid in self.uids)

    @property
    def global_steps(self) -> tuple[int, ...]:
        """The step counters that accepted peers stated."""
        return tuple(self.records[uid].global_step or 0 for uid in self.uids)

    @property
    def conflicts(self) -> tuple[int, ...]:
        """Uids of which two ranks read different payloads; they are dropped."""
        return tuple(u for u in self.skipped_uids if self.records[u].status is Status.DIGEST_CONFLICT)

    @cached_property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """Groups of accepted peers that sent exactly the same positions, by first uid in canonical order."""
        groups: dict[str, list[int]] = {}
        for uid in self.uids:
            groups.setdefault(self.accepted[uid].signature, []).append(uid)
        telling = any(not spec.full and spec.rows for spec in self.schema.parameters)
        return tuple(tuple(group) for group in groups.values() if telling and len(group) > 1)

    @property
    def to_penalise(self) -> tuple[int, ...]:
        """The skipped peers whose own fault it was, ascending."""
        return tuple(uid for uid in self.skipped_uids if self.records[uid].status in PEER_FAULTS)

    @property
    def norm_medians(self) -> dict[str, float]:
        """The median norm of each parameter and table, the lower of two; empty without peers."""
        if not self.uids:
            return {}
        return dict(zip(self.schema.names, self.norm_table().median(dim=0).values.tolist(), strict=True))

    def lines(self) -> list[str]:
        """Return one line per attempted uid for a log, which begins with the digest of the plan."""
        plan = self.plan
        start = f"plan={plan.digest[:12]} window={plan.window}"
        return [
            f"{start} uid={uid} tier={record.tier} status={record.status} bytes={record.bytes} "
            f"tries={record.tries}" + (f" detail={record.detail!r}" if record.detail else "")
            for uid, record in sorted(self.records.items())
        ]

    def norm_table(self, uids: Sequence[int] | None = None) -> Tensor:
        """Return norms as a tensor.

        Args:
            uids: The peers; None: all accepted ones.

        Returns:
            float64 [peers, parameters and tables].
        """
        chosen = self.uids if uids is None else self._accepted(uids)
        rows = [self.accepted[uid].norms for uid in chosen]
        return torch.tensor(rows, dtype=torch.float64, device="cpu").view(len(chosen), len(self.schema.names))

    def held(self, uids: Sequence[int]) -> list[Payload]:
        """Return payloads.

        Args:
            uids: The peers.

        Returns:
            Their payloads.

        Raises:
            InputError: One is in another process.
        """
        chosen = self._accepted(uids)
        missing = [uid for uid in chosen if uid not in self.payloads]
        if missing:
            raise InputError(f"the payload of uid {missing[0]} is not in this process")
        return [self.payloads[uid] for uid in chosen]

    def _accepted(self, uids: Sequence[int]) -> list[int]:
        given = checks.items(uids, "uids", "integers")
        for uid in given:
            if checks.as_integer(uid) not in self.accepted:
                raise InputError(f"uid {uid!r:.40} was not accepted")
        return list(map(int, given))

    def close(self) -> None:
        """Release all payloads."""
        for payload in self.payloads.values():
            payload.close()


Gathered: TypeAlias = GatherResult | Partial | Sequence[Partial]
"""What every consumer takes: one result, or partials."""


def merge(partials: Iterable[Partial]) -> GatherResult:
    """Merge the partials of all ranks, in any order.

    Primaries that no partial mentions (a rank gave none) are RANK_LOST: they are skipped, and no peer is lost
    silently.

    Args:
        partials: The partials.

    Returns:
        The result, equal for any number of ranks.

    Raises:
        InputError: There is none, or they belong to different plans.
    """
    given: list[Partial] = checks.items(partials, "what is gathered", "partials, or a GatherResult")
    for each in given:
        checks.instance(each, Partial, "every item of partials")
    if not given:
        raise InputError("nothing to merge: every rank must give a partial, also an empty one")
    given.sort(key=lambda part: (part.plan.attempt, part.rank))
    plan, schema = given[-1].plan, given[-1].schema
    for part in given:
        if replace(part.plan, attempt=plan.attempt) != plan or part.schema != schema:
            raise InputError(f"rank {part.rank} gathered by another plan: {part.plan.digest[:12]}")
    claims: dict[int, list[Partial]] = {}
    for part in given:
        for uid in part.assigned:
            claims.setdefault(uid, []).append(part)
    chosen = {uid: min(parts, key=partial(_order, uid)) for uid, parts in claims.items()}
    records = {uid: part.records[uid] for uid, part in chosen.items()}
    for uid in plan.primary:
        if uid not in records:
            records[uid] = Record(uid, "primary", Status.RANK_LOST, "its rank gave no partial")
    repeated = []
    for uid, parts in claims.items():
        # The claim of a lost rank is not a second attempt: only its successor read the object.
        if sum(part.records[uid].status is not Status.RANK_LOST for part in parts) > 1:
            repeated.append(uid)
        if len({part.records[uid].digest for part in parts if uid in part.accepted}) > 1:
            why = "ranks read different payloads"
            records[uid] = replace(records[uid], status=Status.DIGEST_CONFLICT, detail=why)
    records = _attributed(plan, records)
    accepted = sorted(u for u, record in records.items() if record.status is Status.OK)
    uids = tuple(sorted(accepted, key=lambda uid: (records[uid].tier == "reserve", uid)))
    return GatherResult(
        plan=plan,
        schema=schema,
        uids=uids,
        records=records,
        accepted={uid: chosen[uid].accepted[uid] for uid in uids},
        holders={uid: chosen[uid].rank for uid in uids},
        payloads={uid: chosen[uid].payloads[uid] for uid in uids if uid in chosen[uid].payloads},
        duplicate_uids=tuple(sorted(repeated)),
        time=max(part.seconds for part in given),
        download_bytes=sum(record.bytes for record in records.values()),
    )


def _attributed(plan: GatherPlan, records: Mapping[int, Record]) -> dict[int, Record]:
    """The records, with refused and slow answers as our fault where nothing shows that this side works."""
    stores = {uid: plan.location(uid).store for uid in records}
    peers = Counter(plan.location(uid).store for uid in (*plan.primary, *plan.reserve))
    silent = OUR_FAULTS - {Status.OTHER_WEIGHTS} | {Status.DENIED}
    works = {stores[uid] for uid, record in records.items() if record.status not in silent}
    works |= {name for name, count in peers.items() if count == 1 and name != "default"}
    good = any(record.status is Status.OK for record in records.values())
    found = dict(records)
    for uid, record in records.items():
        if record.status is Status.DENIED and stores[uid] not in works:
            found[uid] = replace(record, status=Status.STORE_ERROR)
        elif record.status is Status.SLOW and not good:
            found[uid] = replace(record, status=Status.TIMEOUT)
    return found


def as_result(gathered: Gathered) -> GatherResult:
    """Return one result of what a consumer was given."""
    if isinstance(gathered, GatherResult):
        return gathered
    return merge([gathered] if isinstance(gathered, Partial) else gathered)


def _order(uid: int, part: Partial) -> tuple[bool, bool, bool, int, int]:
    """Of several partials that have a uid, the one with the lowest order counts."""
    record = part.records[uid]
    failed, lost = record.status is not Status.OK, record.status is Status.RANK_LOST
    return failed, lost, record.tier == "reserve", part.plan.attempt, part.rank


class SkipReason(IntEnum):
    """Why the update of a window is skipped; GO if it is not."""

    GO = 0
    NO_PEERS = 1
    BELOW_MIN_PEERS = 2
    PLAN_MISMATCH = 3
    RANK_LOST = 4
    BUDGET_TOO_SMALL = 5
    DIGEST_CONFLICT = 6
    OPERATOR = 7
    PASSED_OVER = 8


@dataclass(frozen=True)
class Decision:
    """Whether the update of a window happens. A skip leaves weights and counters as they are on every rank.

    Attributes:
        reason: GO, or why not.
        detail: For PLAN_MISMATCH, the ranks and fields that differ.
    """

    reason: SkipReason
    detail: str = ""

    @property
    def go(self) -> bool:
        """Whether the update happens."""
        return self.reason is SkipReason.GO


def decide(
    gathered: Gathered, *, excluded: Sequence[int] = (), refuse: SkipReason = SkipReason.GO
) -> Decision:
    """Decide whether to update with a result.

    Args:
        gathered: The result.
        excluded: Accepted uids that are left out.
        refuse: A reason that is known already.

    Returns:
        The decision.
    """
    result = as_result(gathered)
    left_out = checks.sizes(excluded, "excluded", 0)
    count = sum(uid not in left_out for uid in result.uids)
    reason = checks.instance(refuse, SkipReason, "refuse")
    if reason is SkipReason.GO and count < result.plan.gather.min_peers:
        reason = SkipReason.NO_PEERS if count == 0 else SkipReason.BELOW_MIN_PEERS
        lost = sum(record.status is Status.RANK_LOST for record in result.records.values())
        if lost and count + lost >= result.plan.gather.min_peers:
            reason = SkipReason.RANK_LOST
        if result.conflicts and count + len(result.conflicts) >= result.plan.gather.min_peers:
            reason = SkipReason.DIGEST_CONFLICT
    return Decision(reason)
