"""The manifest of an artifact: what a window's gather came to, in bytes that do not depend on the number of
ranks.

It is written last: an artifact without one is not complete. Nothing in it comes from a clock or a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megalith.errors import ArtifactError, InputError
from megalith.gather.decision import Decision, SkipReason
from megalith.gather.fields import canonical
from megalith.gather.fingerprint import Fingerprint
from megalith.gather.merge import Gathered, as_result
from megalith.gather.plan import Plan
from megalith.gather.reduce import clip_factors
from megalith.gather.schema import Schema
from megalith.gather.status import Status
from megalith.storage.strict_json import MAX_INT, JsonFields, parse_json_object

FORMAT = "megalith-gather-artifact"
VERSION = 1
MAX_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An accepted peer: its payload's digest, its norms, and what its values were multiplied with."""

    uid: int
    digest: str
    norms: tuple[float, ...]
    factors: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One window. entries: accepted peers in canonical order.

    weights_before, weights: hashes of weights and momentum before and after the step, where known.
    """

    plan: Plan
    schema: Schema
    entries: tuple[Entry, ...]
    skipped: tuple[tuple[int, Status], ...]
    excluded: tuple[int, ...]
    gram: tuple[tuple[int, ...], ...]
    reason: SkipReason
    outer_step: int
    weights_before: str | None
    weights: str | None
    fingerprint: dict[str, Any]

    @property
    def go(self) -> bool:
        """Whether the window had an update."""
        return self.reason is SkipReason.GO

    @property
    def uids(self) -> tuple[int, ...]:
        """Accepted peers in canonical order."""
        return tuple(entry.uid for entry in self.entries)

    def to_bytes(self) -> bytes:
        """The file."""
        return canonical(
            {
                "format": FORMAT,
                "version": VERSION,
                "plan": self.plan.to_json(),
                "schema": self.schema.to_json(),
                "entries": [
                    {
                        "uid": e.uid,
                        "digest": e.digest,
                        "norms": list(e.norms),
                        "factors": list(e.factors),
                    }
                    for e in self.entries
                ],
                "skipped": [[uid, status.value] for uid, status in self.skipped],
                "excluded": list(self.excluded),
                "gram": [list(row) for row in self.gram],
                "reason": self.reason.name,
                "outer_step": self.outer_step,
                "weights_before": self.weights_before,
                "weights": self.weights,
                "fingerprint": self.fingerprint,
            }
        )

    @classmethod
    def from_bytes(cls, text: bytes, where: str) -> Manifest:
        """Reads the file. Raises ArtifactError naming the field that is missing or wrong."""
        fields = parse_json_object(text, lambda problem: ArtifactError(f"{where} {problem}"))
        if fields.string("format") != FORMAT or fields.integer("version") != VERSION:
            fields.fail("format", f"must be {FORMAT!r}, version {VERSION}")
        try:
            plan = Plan.from_json(fields.object("plan"))
            schema = Schema.from_json(fields.object("schema"))
        except InputError as error:
            raise ArtifactError(f"{where}: {error}") from None
        reason = fields.string("reason", 1024)
        if plan.schema != schema.digest or reason not in SkipReason.__members__:
            fields.fail("schema", "does not fit the plan, or the reason is not known")
        manifest = cls(
            plan=plan,
            schema=schema,
            entries=tuple(_entry(each, schema) for each in fields.objects("entries")),
            skipped=tuple(_skipped(fields, each) for each in fields.array("skipped")),
            excluded=tuple(fields.integers("excluded")),
            gram=tuple(_gram_row(fields, each) for each in fields.array("gram")),
            reason=SkipReason[reason],
            outer_step=fields.integer("outer_step"),
            weights_before=None
            if fields.data.get("weights_before") is None
            else fields.sha256("weights_before"),
            weights=None if fields.data.get("weights") is None else fields.sha256("weights"),
            fingerprint=fields.object("fingerprint").data,
        )
        manifest._check(fields)
        return manifest

    def _check(self, fields: JsonFields) -> None:
        uids = self.uids
        known = {*self.plan.primary, *self.plan.reserve}
        if len(set(uids)) != len(uids) or not set(uids) <= known or not set(self.excluded) <= set(uids):
            fields.fail("entries", "and excluded must be distinct uids of the plan")
        primaries = set(self.plan.primary)
        if list(uids) != sorted(uids, key=lambda uid: (uid not in primaries, uid)):
            fields.fail("entries", "must be in canonical order")
        if len(self.gram) not in (0, len(uids)) or any(len(row) != len(self.gram) for row in self.gram):
            fields.fail("gram", f"must be empty or {len(uids)} by {len(uids)}")


def make_manifest(
    gathered: Gathered,
    decision: Decision,
    *,
    gram: Tensor | None = None,
    excluded: Sequence[int] = (),
    outer_step: int,
    weights_before: str | None = None,
    after: Fingerprint | None = None,
) -> Manifest:
    """The manifest of a window. gram: the Gram matrix. outer_step, after: once the window is over."""
    result = as_result(gathered)
    plan = replace(result.plan, attempt=0)
    used = [uid for uid in result.uids if uid not in set(excluded)]
    factors = clip_factors(result.norm_table(used), plan.update).tolist()
    by_uid = dict(zip(used, factors, strict=True))
    return Manifest(
        plan=plan,
        schema=result.schema,
        entries=tuple(
            Entry(
                uid=uid,
                digest=result.records[uid].digest or "",
                norms=result.norms[uid],
                factors=tuple(by_uid.get(uid, ())),
            )
            for uid in result.uids
        ),
        skipped=tuple((uid, result.records[uid].status) for uid in result.skipped_uids),
        excluded=tuple(uid for uid in result.uids if uid in set(excluded)),
        gram=() if gram is None else tuple(map(tuple, gram.tolist())),
        reason=decision.reason,
        outer_step=outer_step,
        weights_before=weights_before,
        weights=None if after is None else after.hash,
        fingerprint={} if after is None else after.to_json()["parameters"],
    )


def _entry(fields: JsonFields, schema: Schema) -> Entry:
    fields.allow_only("uid", "digest", "norms", "factors")
    norms, factors = _reals(fields, "norms"), _reals(fields, "factors")
    if len(norms) != len(schema.names) or len(factors) not in (0, len(schema.names)):
        fields.fail("norms", f"and factors must have {len(schema.names)} numbers")
    return Entry(
        uid=fields.integer("uid"),
        digest=fields.sha256("digest"),
        norms=norms,
        factors=factors,
    )


def _reals(fields: JsonFields, key: str) -> tuple[float, ...]:
    values = fields.array(key)
    if not all(isinstance(v, int | float) and not isinstance(v, bool) and 0 <= v < 1e300 for v in values):
        fields.fail(key, "must hold numbers, 0 or more")
    return tuple(float(value) for value in values)


def _skipped(fields: JsonFields, each: Any) -> tuple[int, Status]:
    if (
        not isinstance(each, list)
        or [type(part) for part in each] != [int, str]
        or each[1] not in set(Status)
        or not 0 <= each[0] <= MAX_INT
    ):
        fields.fail("skipped", "must hold [uid, status]")
    return each[0], Status(each[1])


def _gram_row(fields: JsonFields, each: Any) -> tuple[int, ...]:
    if not isinstance(each, list) or not all(type(n) is int and 0 <= n <= MAX_INT for n in each):
        fields.fail("gram", "must hold rows of counts")
    return tuple(each)
