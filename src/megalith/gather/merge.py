"""merge: partials of all ranks to one result, the same for any number of ranks.

Only control data is merged; payloads stay where they are. `uids` is the canonical order: accepted primaries
ascending, then accepted reserves ascending. Everything that adds over peers adds in this order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.gather.fetch import Record
from megalith.gather.fields import digest, show_time
from megalith.gather.partial import Partial
from megalith.gather.payload import Payload
from megalith.gather.plan import Plan
from megalith.gather.schema import Schema
from megalith.gather.status import Status
from megalith.gather.view import StateView


@dataclass(frozen=True, kw_only=True)
class GatherResult:
    """What a window's gather came to. Sequences are in canonical order, mappings by uid."""

    plan: Plan
    schema: Schema
    uids: tuple[int, ...]
    """Accepted, in canonical order."""
    records: Mapping[int, Record]
    """Of every attempted uid."""
    norms: Mapping[int, tuple[float, ...]]
    lookups: Mapping[int, Tensor]
    signature: Mapping[int, tuple[str, ...]]
    payloads: Mapping[int, Payload]
    """Of accepted uids that this process holds; all of them where one process gathered."""
    duplicate_uids: tuple[int, ...] = ()
    """Attempted by more than one rank; counted once."""
    time: float = 0.0
    """Seconds of the slowest rank."""
    upload_bytes: int = 0
    download_bytes: int = 0

    @property
    def skipped_uids(self) -> tuple[int, ...]:
        """Attempted and not accepted, ascending."""
        return tuple(sorted(set(self.records) - set(self.uids)))

    @property
    def success_rate(self) -> float:
        """Accepted / wanted; may be 1 although primaries failed, if reserves took their places."""
        return len(self.uids) / len(self.plan.primary) if self.plan.primary else 0.0

    @property
    def primary_success_rate(self) -> float:
        """Accepted primaries / wanted."""
        accepted = len(self.uids) - self.reserve_used
        return accepted / len(self.plan.primary) if self.plan.primary else 0.0

    @property
    def intended(self) -> tuple[int, ...]:
        """The peers that were wanted."""
        return self.plan.primary

    @property
    def actual(self) -> tuple[int, ...]:
        """The peers there are."""
        return self.uids

    @property
    def reserve_used(self) -> int:
        """How many accepted peers are reserves."""
        return sum(self.records[uid].tier == "reserve" for uid in self.uids)

    @property
    def global_steps(self) -> tuple[int, ...]:
        """What accepted peers said their step was."""
        return tuple(self.records[uid].global_step or 0 for uid in self.uids)

    @property
    def conflicts(self) -> tuple[int, ...]:
        """Uids of which two ranks read different payloads: an alarm, and they are dropped."""
        return tuple(u for u in self.skipped_uids if self.records[u].status is Status.DIGEST_CONFLICT)

    @cached_property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """Groups of accepted peers that sent exactly the same positions, by first uid in canonical order."""
        telling = [i for i, spec in enumerate(self.schema.parameters) if not spec.full and spec.rows]
        groups: dict[tuple[str, ...], list[int]] = {}
        for uid in self.uids:
            groups.setdefault(tuple(self.signature[uid][i] for i in telling), []).append(uid)
        return tuple(tuple(group) for group in groups.values() if telling and len(group) > 1)

    def norm_table(self, uids: Sequence[int] | None = None) -> Tensor:
        """Norms as float64 [peers, parameters and tables], of all accepted peers or of these."""
        chosen = self.uids if uids is None else uids
        rows = [self.norms[uid] for uid in chosen]
        return torch.tensor(rows, dtype=torch.float64).view(len(chosen), len(self.schema.names))

    def held(self, uids: Sequence[int]) -> list[Payload]:
        """The payloads of these uids. Raises InputError if one lies in another process."""
        missing = [uid for uid in uids if uid not in self.payloads]
        if missing:
            raise InputError(f"the payload of uid {missing[0]} is not in this process")
        return [self.payloads[uid] for uid in uids]

    @cached_property
    def state_dict(self) -> StateView:
        """Payload parts by key, one entry per peer in canonical order, read when asked for."""
        return StateView(self.schema, self.held(self.uids))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all that does not depend on ranks or clocks: equal for any world size."""
        return digest(self.agreed())

    def agreed(self) -> dict[str, Any]:
        """What every number of ranks agrees on, as JSON."""
        return {
            "plan": replace(self.plan, attempt=0).digest,
            "uids": list(self.uids),
            "skipped": [[u, self.records[u].status.value] for u in self.skipped_uids],
            "records": [_stable(self.records[u]) for u in sorted(self.records)],
            "norms": [list(self.norms[u]) for u in self.uids],
            "lookups": [self.lookups[u].tolist() for u in self.uids],
            "copies": [list(group) for group in self.copies],
            "success_rate": self.success_rate,
            "primary_success_rate": self.primary_success_rate,
            "reserve_used": self.reserve_used,
            "download_bytes": self.download_bytes,
        }

    def close(self) -> None:
        """Gives all payloads up."""
        for payload in self.payloads.values():
            payload.close()


Gathered: TypeAlias = GatherResult | Partial | Sequence[Partial]
"""What every consumer takes: one aggregate, or partials."""


def merge(partials: Iterable[Partial]) -> GatherResult:
    """One result of all ranks' partials, in any order. Raises InputError if they are of different plans."""
    given = sorted(partials, key=lambda part: (part.plan.attempt, part.rank))
    if not given:
        raise InputError("nothing to merge: every rank must give a partial, also an empty one")
    plan, schema = given[-1].plan, given[-1].schema
    for part in given:
        if replace(part.plan, attempt=plan.attempt) != plan or part.schema != schema:
            raise InputError(f"rank {part.rank} gathered by another plan: {part.plan.digest[:12]}")
    chosen, duplicates = _choose(given)
    records = {uid: part.records[uid] for uid, part in chosen.items()}
    for uid in _conflicts(given):
        records[uid] = replace(
            records[uid], status=Status.DIGEST_CONFLICT, detail="ranks read different payloads"
        )
    accepted = sorted(u for u, record in records.items() if record.status is Status.OK)
    uids = tuple(sorted(accepted, key=lambda uid: (records[uid].tier == "reserve", uid)))
    return GatherResult(
        plan=plan,
        schema=schema,
        uids=uids,
        records=records,
        norms={uid: chosen[uid].norms[uid] for uid in uids},
        lookups={uid: chosen[uid].lookups[uid] for uid in uids},
        signature={uid: chosen[uid].signature[uid] for uid in uids},
        payloads={uid: chosen[uid].payloads[uid] for uid in uids if uid in chosen[uid].payloads},
        duplicate_uids=duplicates,
        time=max(part.seconds for part in given),
        download_bytes=sum(record.bytes for record in records.values()),
    )


def as_result(gathered: Gathered) -> GatherResult:
    """One result of whatever a consumer was given."""
    if isinstance(gathered, GatherResult):
        return gathered
    return merge([gathered] if isinstance(gathered, Partial) else gathered)


def _choose(partials: Sequence[Partial]) -> tuple[dict[int, Partial], tuple[int, ...]]:
    """The partial that speaks for each uid, and the uids that more than one speaks about."""
    claims: dict[int, list[Partial]] = {}
    for part in partials:
        for uid in part.assigned:
            claims.setdefault(uid, []).append(part)

    def rank_of(uid: int, part: Partial) -> tuple[bool, bool, bool, int, int]:
        record = part.records[uid]
        failed, lost = record.status is not Status.OK, record.status is Status.RANK_LOST
        return failed, lost, record.tier == "reserve", part.plan.attempt, part.rank

    chosen = {uid: min(parts, key=lambda part: rank_of(uid, part)) for uid, parts in claims.items()}
    # A lost rank's claim is no second attempt: only its successor read the object.
    repeated = [
        uid
        for uid, parts in claims.items()
        if sum(part.records[uid].status is not Status.RANK_LOST for part in parts) > 1
    ]
    return chosen, tuple(sorted(repeated))


def _conflicts(partials: Sequence[Partial]) -> list[int]:
    digests: dict[int, set[str | None]] = {}
    for part in partials:
        for uid in part.uids:
            digests.setdefault(uid, set()).add(part.records[uid].digest)
    return sorted(uid for uid, found in digests.items() if len(found) > 1)


def _stable(record: Record) -> dict[str, Any]:
    """A record without what depends on timing."""
    return {
        "uid": record.uid,
        "tier": record.tier,
        "status": record.status.value,
        "bytes": record.bytes,
        "last_modified": None if record.last_modified is None else show_time(record.last_modified),
        "etag": record.etag,
        "digest": record.digest,
        "global_step": record.global_step,
    }
