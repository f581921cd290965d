"""A window on many ranks: fetched in disjoint shares, merged alike on all, applied together.

    plan -> readiness -> fetch and statuses, until all have one -> partials -> indices -> decision
    -> payloads of the artifact -> "pre-update" -> tiles -> fingerprints -> manifest

Every arrow is an exchange that all ranks take part in, whatever became of their own work. A rank that dies
before "pre-update" costs an attempt: its uids are dealt to those left. One that dies later leaves a torn
step: it is undone by a snapshot and done again, or every rank is told so.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megalith.errors import (
    ArtifactError,
    BudgetError,
    InputError,
    MegalithError,
    RankFailedError,
    RankTimeoutError,
    UsageError,
)
from megalith.gather.artifact import write_manifest, write_payloads
from megalith.gather.columns import Columns
from megalith.gather.decision import Decision, SkipReason, decide
from megalith.gather.fetch import FetchOptions
from megalith.gather.fields import canonical, digest
from megalith.gather.fingerprint import Fingerprint, fingerprint
from megalith.gather.gatherer import Gatherer
from megalith.gather.manifest import make_manifest
from megalith.gather.merge import GatherResult, merge
from megalith.gather.overlap import Overlap, excluded_uids, find_overlap
from megalith.gather.partial import Partial, make_partial
from megalith.gather.partition import deal, replacements
from megalith.gather.plan import Plan
from megalith.gather.ranks import BrokenExchange, Ranks
from megalith.gather.reduce import clip_factors, medians
from megalith.gather.sharding import Part, Span, WholeTensors, area_of, part_of, rows_of
from megalith.gather.snapshot import Policy, Snapshot
from megalith.gather.status import Status
from megalith.gather.store import Store
from megalith.gather.tables import reduce_table
from megalith.gather.update import ApplyRows, OuterUpdate, UpdateReport, momentum_names, table_step
from megalith.storage.strict_json import parse_json_object

Stage = Literal["fresh", "torn", "done"]
"""Of a rank's weights: as before the window, half-way, stepped."""


@dataclass(frozen=True)
class WindowReport:
    """What a window came to. overlap: None if the budget was too small; update: None if skipped.

    The same on all ranks, but for times and peaks.
    """

    result: GatherResult
    overlap: Overlap | None
    decision: Decision
    update: UpdateReport | None
    fingerprint: Fingerprint | None


class JointWindow:
    """One window of one rank among several. plan: needed on the first rank; elsewhere compared with it."""

    def __init__(
        self,
        plan: Plan | None,
        parameters: nn.Module | Mapping[str, Tensor],
        update: OuterUpdate,
        stores: Mapping[str, Store],
        ranks: Ranks,
        *,
        artifacts: Store | None,
        apply_rows: ApplyRows | None,
        options: FetchOptions | None,
        snapshot: Policy,
        snapshot_directory: Path | None,
        skip: bool,
    ) -> None:
        self._own_plan = plan
        self._plan: Plan | None = None
        self._parameters = parameters
        self._update = update
        self._stores = stores
        self._ranks = ranks
        self._artifacts = artifacts
        self._apply_rows = apply_rows
        self._options = options or FetchOptions()
        self._policy: Policy = snapshot
        self._snapshot_directory = snapshot_directory
        self._skip = skip
        self._stage: Stage = "fresh"
        self._saved: Snapshot | None = None
        self._gatherer: Gatherer | None = None
        self._parts: dict[str, Part] = {}
        self._spans: list[dict[str, Span]] = []
        self._wanted: list[int] = []
        self._rounds = 0
        self._error: str | None = None
        self._outcome: WindowReport | None = None
        self._before: str | None = None

    def run(self) -> WindowReport:
        """The window, tried again without those that are lost on the way."""
        try:
            while True:
                try:
                    return self._attempt()
                except BrokenExchange as broken:
                    self._go_on(broken)
        except BaseException as error:
            self._put_back()
            if self._stage == "torn" and isinstance(error, Exception) and not isinstance(error, UsageError):
                raise self._torn(f"{type(error).__name__}: {error}") from error
            raise
        finally:
            if self._saved is not None:
                self._saved.close()
            if self._gatherer is not None:
                self._gatherer.partial().close()

    # ---- the way of a window

    def _attempt(self) -> WindowReport:
        if self._stage == "fresh":
            plan, agreed = self._agree()
            if not agreed:
                nothing = merge([make_partial(plan, self._update.schema, (), ())])
                decision = decide(nothing, refuse=SkipReason.PLAN_MISMATCH)
                return WindowReport(nothing, None, decision, None, None)
            self._outcome = self._gather_and_step(plan)
        assert self._outcome is not None
        outcome = self._outcome
        if outcome.decision.go or self._artifacts is not None:
            outcome = replace(outcome, fingerprint=self._same_weights())
        if self._artifacts is not None:
            self._commit(outcome)
        self._stage = "fresh"
        return outcome

    def _agree(self) -> tuple[Plan, bool]:
        """The plan, and whether all ranks read it alike. An error of one rank is raised on all."""
        own = self._plan or self._own_plan
        sent = self._ranks.exchange("plan", b"" if own is None else own.to_bytes())
        found = next((each for each in sent if each), None)
        if found is None:
            raise InputError("no rank has a plan: the first one must give it")
        plan = self._plan = Plan.from_bytes(found)
        view = plan if self._own_plan is None else replace(self._own_plan, attempt=plan.attempt)
        update, error = self._update, None
        try:
            self._prepare(plan)
        except (MegalithError, OSError) as problem:
            error = problem
        standing = digest([view.digest, update.schema.digest, update.outer_step])
        spans = {name: list(part.span) for name, part in self._parts.items() if part.span is not None}
        replies = self._tell("ready", {"standing": standing, "spans": spans}, error)
        self._spans = [
            {name: (int(span[0]), int(span[1])) for name, span in each["spans"].items()} for each in replies
        ]
        return plan, len({each["standing"] for each in replies}) == 1

    def _prepare(self, plan: Plan) -> None:
        """Everything on this rank that can refuse before a request."""
        if self._gatherer is not None:
            return
        if plan.schema == self._update.schema.digest:
            self._gatherer = Gatherer(
                plan,
                self._update.schema,
                self._stores,
                rank=self._ranks.rank,
                world_size=self._ranks.size,
                slots=len(plan.primary) + len(plan.reserve),
                options=self._options,
            )
        tensors = self._update.checked(self._parameters)
        self._parts = {name: part_of(name, tensor, self._ranks) for name, tensor in tensors.items()}

    def _gather_and_step(self, plan: Plan) -> WindowReport:
        result, holders, counts = self._gather(plan)
        columns, overlap, refuse = None, None, SkipReason.GO
        try:
            try:
                columns = Columns(result, holders, self._ranks, spool_directory=self._options.spool_directory)
                overlap = find_overlap(result, columns.exchange_indices())
            except BudgetError:
                refuse = SkipReason.BUDGET_TOO_SMALL
            left_out = _left_out(overlap, plan)
            decision = self._decide(result, left_out, refuse)
            self._before_update(result, counts, decision)
            report = None
            if decision.go:
                assert columns is not None
                report = self._step(columns, left_out, counts)
                self._stage = "done"
            return WindowReport(result, overlap, decision, report, None)
        finally:
            if columns is not None:
                columns.close()

    def _gather(self, plan: Plan) -> tuple[GatherResult, dict[int, int], dict[int, list[int]]]:
        """The merged result, who holds which payload, and rows of tables by uid."""
        gatherer, ranks = self._gatherer, self._ranks
        assert gatherer is not None
        self._wanted = self._wanted or sorted(plan.primary)
        while share := self._next_share(plan):
            try:
                gatherer.fetch(share[ranks.place])
            except Exception as error:
                self._error = f"{type(error).__name__}: {error}"
        own = gatherer.partial(self._error)
        sent = ranks.exchange("partials", own.to_bytes())
        schema = self._update.schema
        result = merge(
            own if place == ranks.place else Partial.from_bytes(each, plan, schema)
            for place, each in enumerate(sent)
        )
        tables = {str(u): [t.num_rows for t in p.header.tables] for u, p in result.payloads.items()}
        held = self._tell("payloads held", {"tables": tables})
        holders: dict[int, int] = {}
        counts: dict[int, list[int]] = {}
        for place, each in enumerate(held):
            for uid, rows in each["tables"].items():
                holders.setdefault(int(uid), place)
                counts.setdefault(int(uid), rows)
        return result, holders, counts

    def _next_share(self, plan: Plan) -> list[tuple[int, ...]]:
        """Who fetches whom next, from all ranks' statuses so far; empty if nobody does."""
        assert self._gatherer is not None
        mine = {
            "statuses": {str(uid): status.value for uid, status in self._gatherer.statuses.items()},
            "error": self._error,
            "wanted": self._wanted,
            "rounds": self._rounds,
        }
        replies = self._tell("statuses", mine, patience=plan.deadline)
        # After a rank was lost some may know of a round that others have not heard of.
        self._wanted = max((each["wanted"] for each in replies), key=len)
        self._rounds = max(each["rounds"] for each in replies)
        known = {int(u): Status(s) for each in replies for u, s in each["statuses"].items()}
        pending = [uid for uid in self._wanted if uid not in known]
        if not pending and self._rounds < plan.backfill_rounds:
            accepted = [uid for uid, status in known.items() if status is Status.OK]
            pending = list(replacements(plan, accepted, self._wanted))
            self._wanted = self._wanted + pending
            self._rounds += 1
        able = [place for place, each in enumerate(replies) if each["error"] is None]
        if not pending or not able:
            return []
        shares = deal(pending, [len(replies[place]["statuses"]) for place in able])
        given = dict(zip(able, shares, strict=True))
        return [given.get(place, ()) for place in range(self._ranks.size)]

    def _decide(self, result: GatherResult, left_out: tuple[int, ...], refuse: SkipReason) -> Decision:
        """The first rank's decision, as all have it."""
        lost = any(record.status is Status.RANK_LOST for record in result.records.values())
        if refuse is SkipReason.GO and lost and len(result.uids) < result.plan.min_peers:
            refuse = SkipReason.RANK_LOST
        if self._skip:
            refuse = SkipReason.OPERATOR
        decision = decide(result, excluded=left_out, refuse=refuse)
        replies = self._tell("decision", {"numbers": decision.to_numbers()})
        return Decision.from_numbers(replies[0]["numbers"])

    def _before_update(
        self, result: GatherResult, counts: Mapping[int, list[int]], decision: Decision
    ) -> None:
        """The last that can refuse, then the barrier before weights change."""
        error: Exception | None = None
        if self._artifacts is not None:
            self._before = self._fingerprint().hash
        try:
            if self._artifacts is not None:
                write_payloads(self._artifacts, result, deadline=self._ranks.timeout)
            sent = [
                t.name for n, t in enumerate(self._update.schema.tables) if any(c[n] for c in counts.values())
            ]
            if decision.go and sent and self._apply_rows is None:
                raise InputError(f"peers sent rows of table {sent[0]!r}: give apply_rows to take them")
            if decision.go:
                self._take_snapshot(result)
        except (MegalithError, OSError) as problem:
            error = problem
        self._tell("pre-update", {}, error, patience=self._ranks.timeout)

    def _take_snapshot(self, result: GatherResult) -> None:
        if self._saved is not None:
            self._saved.close()
        tensors = {name: part.tensor for name, part in self._parts.items()}
        self._update.prepare(tensors, result.plan.update)
        everything = {**tensors, **momentum_names(self._update.momentum)}
        self._saved = Snapshot(everything, self._policy, self._snapshot_directory)

    @torch.no_grad()
    def _step(
        self, columns: Columns, left_out: tuple[int, ...], counts: Mapping[int, list[int]]
    ) -> UpdateReport:
        result, update = columns.result, self._update
        schema, config = update.schema, result.plan.update
        uids = tuple(uid for uid in result.uids if uid not in set(left_out))
        norms = result.norm_table(uids)
        factors = clip_factors(norms, config)
        names = [spec.name for spec in schema.parameters]
        wanted = [
            [rows_of(spec, spans.get(spec.name)) for spec in schema.parameters] for spans in self._spans
        ]
        areas = [area_of(spec, self._parts[spec.name].span) for spec in schema.parameters]
        tiles = columns.tiles(uids, factors, wanted, lambda n: self._parts[names[n]].tensor.device)
        for number, start, tile in tiles:
            self._stage = "torn"
            update.step_tile(self._parts[names[number]].tensor, number, start, tile, config, areas[number])
        payloads = columns.table_payloads(uids, counts) if schema.tables else []
        for number, table in enumerate(schema.tables):
            column = factors[:, len(names) + number]
            for ids, rows in reduce_table(payloads, number, column, config, columns.ledger):
                self._stage = "torn"
                assert self._apply_rows is not None
                self._apply_rows(table.name, ids, table_step(rows, config))
        update.outer_step += 1
        return UpdateReport(
            uids=uids,
            excluded=left_out,
            medians=tuple(medians(norms).tolist()),
            factors=tuple(map(tuple, factors.tolist())),
            outer_step=update.outer_step,
            peak_bytes=columns.ledger.peak,
        )

    def _same_weights(self) -> Fingerprint:
        """The fingerprint of the weights. Raises UsageError on all ranks if theirs differ."""
        found = self._fingerprint()
        replies = self._tell("fingerprints", {"hash": found.hash})
        others = [self._ranks.members[p] for p, each in enumerate(replies) if each["hash"] != found.hash]
        if others:
            raise UsageError(
                f"rank {self._ranks.rank} and rank {others[0]} have different weights: "
                "were they the same before the window? reload a checkpoint"
            )
        return found

    def _fingerprint(self) -> Fingerprint:
        momentum = {
            name: Part(tensor, self._parts[name].span) for name, tensor in self._update.momentum.items()
        }
        shapes = {spec.name: spec.shape for spec in self._update.schema.parameters}
        parts = {**self._parts, **momentum_names(momentum)}
        return fingerprint(WholeTensors(parts, {**shapes, **momentum_names(shapes)}, self._ranks))

    def _commit(self, outcome: WindowReport) -> None:
        """The manifest, by the first rank: the artifact is complete."""
        error = None
        if self._ranks.leads:
            assert self._artifacts is not None
            manifest = make_manifest(
                outcome.result,
                outcome.decision,
                gram=None if outcome.overlap is None else outcome.overlap.gram,
                excluded=_left_out(outcome.overlap, outcome.result.plan),
                outer_step=self._update.outer_step,
                weights_before=self._before,
                after=outcome.fingerprint,
            )
            try:
                write_manifest(self._artifacts, manifest, deadline=self._ranks.timeout)
            except ArtifactError as problem:
                error = problem
        self._tell("manifest", {}, error, patience=self._ranks.timeout)

    # ---- telling each other

    def _tell(
        self, what: str, message: dict[str, Any], error: Exception | None = None, *, patience: float = 0.0
    ) -> list[dict[str, Any]]:
        """Everybody's message, by place. An error of one rank is raised there, and named on all others."""
        problem = None if error is None else f"{type(error).__name__}: {error}"
        data = canonical({"message": message, "problem": problem})
        replies = [
            parse_json_object(each, lambda wrong: RankFailedError(f"{what}: {wrong}")).data
            for each in self._ranks.exchange(what, data, patience=patience)
        ]
        if error is not None:
            raise error
        for place, each in enumerate(replies):
            if each["problem"] is not None:
                raise RankFailedError(f"{what}: rank {self._ranks.members[place]}: {each['problem']}")
        return [each["message"] for each in replies]

    # ---- losing a rank

    def _go_on(self, broken: BrokenExchange) -> None:
        """Goes on with those that are left, or raises on all of them why that cannot be."""
        what, _, _ = str(broken).partition(":")
        plan = self._plan
        patience = max(self._ranks.timeout, 0.0 if plan is None else plan.deadline)
        lost: list[int] = []
        while True:
            lost += self._ranks.reform(what, patience)
            # Rows of tables are the caller's: no snapshot has them.
            can_undo = self._saved is not None and self._saved.can_restore
            mine = {
                "stage": self._stage,
                "undo": can_undo and not self._update.schema.tables,
                "attempt": -1 if plan is None else plan.attempt,
            }
            try:
                states = self._tell("where each stands", mine)
                break
            except BrokenExchange:
                continue
        named = ", ".join(map(str, lost)) or "none"
        if lost and any(self._spans):
            raise RankTimeoutError(f"{what}: lost ranks: {named}; nobody else has their parts of parameters")
        if plan is not None:
            self._plan = replace(plan, attempt=max(each["attempt"] for each in states) + 1)
            if self._gatherer is not None:
                self._gatherer.go_on(self._plan, self._ranks.size)
        stages = {each["stage"] for each in states}
        if stages in ({"fresh"}, {"done"}):
            return
        if not all(each["undo"] or each["stage"] == "fresh" for each in states):
            raise self._torn(f"{what}: lost ranks: {named}")
        self._put_back()

    def _put_back(self) -> None:
        """Undoes a step if a snapshot can."""
        if self._stage != "fresh" and self._saved is not None and self._saved.can_restore:
            self._saved.restore()
            if self._stage == "done":
                self._update.outer_step -= 1
            self._stage = "fresh"

    def _torn(self, why: str) -> UsageError:
        with suppress(RuntimeError):
            self._ranks.close()
        return UsageError(
            "the update broke off and weights may be torn: reload a checkpoint and catch up "
            f"(or use a snapshot): {why}"
        )


def _left_out(overlap: Overlap | None, plan: Plan) -> tuple[int, ...]:
    return () if overlap is None else excluded_uids(overlap, plan.overlap)
