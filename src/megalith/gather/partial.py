"""A rank's partial result: what became of its peers, and all that merging and updating need to know about
them.

Every rank makes one, also if nothing was assigned to it or nothing was valid. Its control part travels as
bytes to all ranks; payloads stay where they are.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.gather.fetch import Fetched, Record, Tier
from megalith.gather.fields import canonical, show_time
from megalith.gather.payload import Payload
from megalith.gather.plan import Plan
from megalith.gather.schema import Schema
from megalith.gather.status import Status
from megalith.storage.strict_json import MAX_INT, JsonFields, parse_json_object

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Partial:
    """One rank's result. Mappings by uid: records of all assigned, the rest of the accepted ones.

    norms: parameters, then tables. lookups: value of each code, parameter after parameter. signature:
    digest of each parameter's indices; two peers with equal signatures sent the same positions. payloads:
    only those that this process holds. error: what ended this rank's gathering early, if something did.
    """

    plan: Plan
    schema: Schema
    rank: int = 0
    world_size: int = 1
    assigned: tuple[int, ...] = ()
    records: Mapping[int, Record] = field(default_factory=dict)
    norms: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    lookups: Mapping[int, Tensor] = field(default_factory=dict)
    signature: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    payloads: Mapping[int, Payload] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None

    @property
    def uids(self) -> tuple[int, ...]:
        """Accepted uids, ascending."""
        return tuple(sorted(u for u, record in self.records.items() if record.status is Status.OK))

    @property
    def skipped_uids(self) -> tuple[int, ...]:
        """Assigned and not accepted, ascending."""
        return tuple(sorted(set(self.assigned) - set(self.uids)))

    @property
    def success_rate_part(self) -> float | None:
        """Accepted / assigned; None if nothing was assigned."""
        return len(self.uids) / len(self.assigned) if self.assigned else None

    @property
    def download_bytes(self) -> int:
        """Bytes of all objects that were downloaded, accepted or not."""
        return sum(record.bytes for record in self.records.values())

    def close(self) -> None:
        """Gives all payloads up."""
        for payload in self.payloads.values():
            payload.close()

    def to_bytes(self) -> bytes:
        """The control part: everything but payloads."""
        data = {
            "version": VERSION,
            "plan": self.plan.digest,
            "rank": self.rank,
            "world_size": self.world_size,
            "assigned": list(self.assigned),
            "records": [_record_to_json(self.records[uid]) for uid in sorted(self.records)],
            "norms": {str(u): list(norms) for u, norms in self.norms.items()},
            "lookups": {str(u): _pack(lookups) for u, lookups in self.lookups.items()},
            "signature": {str(u): list(digests) for u, digests in self.signature.items()},
            "seconds": self.seconds,
            "error": self.error,
        }
        return canonical(data)

    @classmethod
    def from_bytes(cls, text: bytes, plan: Plan, schema: Schema) -> Partial:
        """Another rank's control part. Raises InputError if it is damaged, or of another plan or schema."""
        fields = parse_json_object(text, lambda problem: InputError(f"partial: {problem}"))
        if fields.integer("version") != VERSION or fields.sha256("plan") != plan.digest:
            fields.fail("plan", f"must be {plan.digest[:12]}..., in version {VERSION}")
        records = {record.uid: record for record in map(_record_from_json, fields.objects("records"))}
        accepted = {u for u, record in records.items() if record.status is Status.OK}
        assigned = tuple(fields.integers("assigned"))
        if set(records) != set(assigned) or len(set(assigned)) != len(assigned):
            fields.fail("records", "must be one for each assigned uid")
        return cls(
            plan=plan,
            schema=schema,
            rank=fields.integer("rank"),
            world_size=fields.integer("world_size", 1),
            assigned=assigned,
            records=records,
            norms={u: _norms(fields, u, each, schema) for u, each in _by_uid(fields, "norms", accepted)},
            lookups={u: _unpack(fields, u, each, schema) for u, each in _by_uid(fields, "lookups", accepted)},
            signature={
                u: _digests(fields, u, each, schema) for u, each in _by_uid(fields, "signature", accepted)
            },
            seconds=fields.number("seconds"),
            error=None if fields.data.get("error") is None else fields.string("error", 1 << 16),
        )


def make_partial(
    plan: Plan,
    schema: Schema,
    assigned: Iterable[int],
    fetched: Iterable[Fetched],
    *,
    rank: int = 0,
    world_size: int = 1,
    seconds: float = 0.0,
    error: str | None = None,
) -> Partial:
    """The partial of a rank. Assigned uids without a result (an error came first) are RANK_LOST."""
    results = {each.record.uid: each for each in fetched}
    wanted = tuple(assigned)
    records = {
        uid: results[uid].record
        if uid in results
        else Record(uid, tier_of(plan, uid), Status.RANK_LOST, error or "its rank ended early")
        for uid in wanted
    }
    accepted = {u: each.checked for u, each in results.items() if each.checked is not None}
    return Partial(
        plan=plan,
        schema=schema,
        rank=rank,
        world_size=world_size,
        assigned=wanted,
        records=records,
        norms={u: checked.norms for u, checked in accepted.items()},
        lookups={u: checked.lookups for u, checked in accepted.items()},
        signature={u: checked.index_digests for u, checked in accepted.items()},
        payloads={u: each.payload for u, each in results.items() if each.payload is not None},
        seconds=seconds,
        error=error,
    )


def tier_of(plan: Plan, uid: int) -> Tier:
    """Which list of the plan a uid is in."""
    return "primary" if uid in plan.primary else "reserve"


# ---- the control part


def _record_to_json(record: Record) -> dict[str, Any]:
    return {
        "uid": record.uid,
        "tier": record.tier,
        "status": record.status.value,
        "detail": record.detail,
        "bytes": record.bytes,
        "tries": record.tries,
        "last_modified": None if record.last_modified is None else show_time(record.last_modified),
        "etag": record.etag,
        "digest": record.digest,
        "global_step": record.global_step,
        "seconds": record.seconds,
    }


def _record_from_json(fields: JsonFields) -> Record:
    tier, status = fields.string("tier", 1024), fields.string("status", 1024)
    if tier not in get_args(Tier) or status not in set(Status):
        fields.fail("status", f"or tier is not known: {status:.40}, {tier:.40}")
    return Record(
        uid=fields.integer("uid"),
        tier="primary" if tier == "primary" else "reserve",
        status=Status(status),
        detail=fields.string("detail", 1 << 16),
        bytes=fields.integer("bytes"),
        tries=fields.integer("tries"),
        last_modified=fields.time("last_modified"),
        etag=None if fields.data.get("etag") is None else fields.string("etag", 1024),
        digest=None if fields.data.get("digest") is None else fields.sha256("digest"),
        global_step=None if fields.data.get("global_step") is None else fields.integer("global_step"),
        seconds=fields.number("seconds"),
    )


def _by_uid(fields: JsonFields, key: str, accepted: set[int]) -> list[tuple[int, Any]]:
    found = fields.object(key).data
    if set(found) != {str(uid) for uid in accepted}:
        fields.fail(key, "must be there for each accepted uid and no other")
    return [(int(uid), value) for uid, value in found.items() if int(uid) <= MAX_INT]


def _norms(fields: JsonFields, uid: int, given: Any, schema: Schema) -> tuple[float, ...]:
    fits = isinstance(given, list) and len(given) == len(schema.names)
    if not fits or not all(isinstance(n, int | float) and isfinite(n) and n >= 0 for n in given):
        fields.fail("norms", f"of uid {uid} must be {len(schema.names)} numbers")
    return tuple(float(n) for n in given)


def _digests(fields: JsonFields, uid: int, given: Any, schema: Schema) -> tuple[str, ...]:
    fits = isinstance(given, list) and len(given) == len(schema.parameters)
    if not fits or not all(isinstance(each, str) and len(each) == 64 for each in given):
        fields.fail("signature", f"of uid {uid} must be {len(schema.parameters)} digests")
    return tuple(given)


def _pack(lookups: Tensor) -> str:
    return base64.b64encode(lookups.numpy().astype("<f4").tobytes()).decode()


def _unpack(fields: JsonFields, uid: int, given: Any, schema: Schema) -> Tensor:
    count = sum(spec.bins for spec in schema.parameters)
    try:
        data = base64.b64decode(given, validate=True) if isinstance(given, str) else b""
    except (binascii.Error, ValueError):
        data = b""
    if len(data) != 4 * count:
        fields.fail("lookups", f"of uid {uid} must have {count} values")
    return torch.from_numpy(np.frombuffer(data, "<f4").astype(np.float32))
