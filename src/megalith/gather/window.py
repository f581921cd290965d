"""A window: gathered, searched for copies, decided, applied and published, by one process or by many ranks.

There is one path; a process alone is a group of one rank.

    plan -> ready -> fetch and statuses, until all uids have one -> partials -> indices -> decision
    -> "pre-update" -> tiles -> fingerprints -> manifest

Every arrow is an exchange in which all ranks take part, whatever happened to their own work. Everything that
can refuse does so before "pre-update". The weights of a rank are in one of these stages:

| stage | meaning | if a rank is lost | if an error is raised |
| --- | --- | --- | --- |
| fresh | as before the window | its uids are dealt to the others | nothing has changed |
| torn  | half-way | a snapshot undoes the step, and it is repeated; without one all raise | the same |
| done  | stepped, not compared yet | the others continue | a snapshot undoes the step |
| final | stepped and compared | the others continue | the step stays: the same window is refused later |
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

from megalith.distributed.elastic_ranks import ElasticRanks
from megalith.distributed.ranks import BrokenExchange
from megalith.distributed.tensor_parts import Fingerprint, TensorPart
from megalith.errors import ArtifactError, BudgetError, InputError, RankTimeoutError, UsageError
from megalith.gather.artifact import make_manifest, prune_artifacts, upload_payloads, write_manifest
from megalith.gather.columns import Columns
from megalith.gather.fetch import FetchOptions, Gatherer, Stores
from megalith.gather.overlap import Overlap, excluded_uids, find_overlap
from megalith.gather.payload_schema import Weights
from megalith.gather.plan import GatherPlan, Status, backfill, deal
from megalith.gather.result import (
    Decision,
    Gathered,
    GatherResult,
    SkipReason,
    as_result,
    decide,
    norm_medians,
)
from megalith.gather.table_rows import ApplyRows, TableShards, row_taker
from megalith.gather.update import TORN, OuterUpdate, SnapshotPolicy, TensorSnapshot, UpdateReport
from megalith.ops import checks
from megalith.storage.object_store import ObjectStore

Stage = Literal["fresh", "torn", "done", "final"]
_log = logging.getLogger("megalith.gather")


@dataclass(frozen=True)
class WindowReport:
    """The outcome of a window, equal on all ranks except for times and peaks.

    Attributes:
        result: The merged result; its payloads are closed.
        overlap: The search for copies; None if the budget was too small.
        decision: Whether the update happened.
        update: What the step did; None if the window was skipped.
        fingerprint: The weights after the window; None if they were not compared.
        artifact_error: Why the artifact could not be written, with on_artifact_error="warn".
    """

    result: GatherResult
    overlap: Overlap | None
    decision: Decision
    update: UpdateReport | None
    fingerprint: Fingerprint | None
    artifact_error: str | None = None


def run_window(
    plan: GatherPlan | None,
    parameters: Weights,
    update: OuterUpdate,
    stores: Stores,
    *,
    ranks: ElasticRanks | None = None,
    artifacts: ObjectStore | None = None,
    tables: TableShards | None = None,
    apply_rows: ApplyRows | None = None,
    options: FetchOptions | None = None,
    snapshot: SnapshotPolicy = "none",
    snapshot_directory: Path | None = None,
    on_artifact_error: Literal["raise", "warn"] = "raise",
    keep_artifacts: int | None = None,
    skip: bool = False,
) -> WindowReport:
    """Gather a window and step the weights, in place. A skipped window leaves weights and counters unchanged.

    Args:
        plan: The plan. With ranks, only the first one needs it; others that have one compare it.
        parameters: The model, or its parameters by name. They may be sharded by FSDP2 over the ranks.
        update: The outer optimizer.
        stores: Stores by the names that the plan uses.
        ranks: The ranks that share the work; all of them call this function.
        artifacts: Where the window is published for nodes that catch up later.
        tables: The tables to which changes of rows are added, each row once: `collection.shards`.
        apply_rows: Called with all changes of rows, on every rank, instead of `tables`.
        options: How to fetch.
        snapshot: How weights are restored if the step fails: "none", "host" or "disk".
        snapshot_directory: Where "disk" stores the copy.
        on_artifact_error: With "warn", an artifact that cannot be written is logged and reported.
        keep_artifacts: Delete the artifacts of all but this many of the latest windows; None: keep all.
        skip: Gather and report, but leave the weights; that of the first rank counts.

    Returns:
        The outcome.

    Raises:
        InputError: An argument does not match, before any request.
        BudgetError: The budget is too small for fetching, before any request.
        UsageError: The window was applied already, before any request; or weights may be inconsistent.
        ArtifactError: The artifact cannot be written. The step is complete then, on all ranks.
        RankFailedError: Another rank raised an error.
        RankTimeoutError: Too few ranks are left.
    """
    checks.instance(update, OuterUpdate, "update")
    checks.one_of(on_artifact_error, ("raise", "warn"), "on_artifact_error")
    if plan is not None or ranks is None:
        checks.instance(plan, GatherPlan, "plan")
    if artifacts is not None:
        checks.instance(artifacts, ObjectStore, "artifacts")
    if keep_artifacts is not None:
        checks.integer(keep_artifacts, "keep_artifacts")
    together = ElasticRanks.or_alone(ranks)
    return _GatherWindow(
        given=plan,
        parameters=parameters,
        update=update,
        stores=stores,
        ranks=together,
        artifacts=artifacts,
        row_taker=partial(row_taker, update.schema, together, tables, apply_rows),
        options=FetchOptions() if options is None else checks.instance(options, FetchOptions, "options"),
        snapshot=partial(TensorSnapshot, policy=snapshot, directory=snapshot_directory),
        on_artifact_error=on_artifact_error,
        keep_artifacts=keep_artifacts,
        skip=checks.flag(skip, "skip"),
    ).run()


@dataclass(kw_only=True)
class _GatherWindow:
    """One window of one rank: the arguments of `run_window`, and what is known so far."""

    given: GatherPlan | None
    parameters: Weights
    update: OuterUpdate
    stores: Stores
    ranks: ElasticRanks
    artifacts: ObjectStore | None
    row_taker: Callable[[], ApplyRows | None]
    options: FetchOptions
    snapshot: Callable[[Mapping[str, Tensor]], TensorSnapshot]
    on_artifact_error: str
    keep_artifacts: int | None
    skip: bool
    plan: GatherPlan | None = None
    stage: Stage = "fresh"
    counters: tuple[int, tuple[str, int] | None] = (0, None)
    saved: TensorSnapshot | None = None
    gatherer: Gatherer | None = None
    upload: Future[None] | None = None
    parts: dict[str, TensorPart] = field(default_factory=dict)
    wanted: list[int] = field(default_factory=list)
    rounds: int = 0
    error: str | None = None
    outcome: WindowReport | None = None
    before: str | None = None

    def run(self) -> WindowReport:
        """The window, tried again without ranks that are lost."""
        self.counters = (self.update.outer_step, self.update.last_applied)
        try:
            while True:
                try:
                    return self._attempt()
                except BrokenExchange as broken:
                    self._continue_without(broken)
        except BaseException as error:
            self._undo()
            if self.stage == "torn" and isinstance(error, Exception) and not isinstance(error, UsageError):
                raise self._torn(f"{type(error).__name__}: {error}") from error
            raise
        finally:
            if self.upload is not None:
                with suppress(ArtifactError):
                    self.upload.result()  # no limit: its requests have a deadline
            if self.saved is not None:
                self.saved.close()
            if self.gatherer is not None:
                self.gatherer.partial().close()

    # ---- the path of a window

    def _attempt(self) -> WindowReport:
        if self.stage == "fresh":
            plan, mismatch = self._agree()
            if mismatch:
                nothing = GatherResult(plan=plan, schema=self.update.schema)
                return WindowReport(nothing, None, Decision(SkipReason.PLAN_MISMATCH, mismatch), None, None)
            self.outcome = self._gather_and_step(plan)
        assert self.outcome is not None
        outcome = self.outcome
        if outcome.result.plan.is_checked and (outcome.decision.go or self.artifacts is not None):
            outcome = replace(outcome, fingerprint=self._compare_weights())
        if self.stage == "done":
            self.stage = "final"
        if self.artifacts is not None:
            outcome = replace(outcome, artifact_error=self._commit(outcome, self.artifacts))
        return outcome

    def _agree(self) -> tuple[GatherPlan, str]:
        """The plan, and which ranks have different settings. An error of one rank is raised on all."""
        own = self.plan or self.given
        sent = self.ranks.exchange("plan", b"" if own is None else own.to_bytes())
        found = next((each for each in sent if each), None)
        if found is None:
            raise InputError("no rank has a plan: the first one must pass it")
        plan = self.plan = GatherPlan.from_bytes(found)
        self.ranks.agree(lambda: self._prepare(plan), "ready")
        state = {
            "fields": [] if self.given is None else self.given.differences(plan),
            "outer_step": self.update.outer_step,
            "last_applied": self.update.last_applied,
        }
        replies = self.ranks.gather(state, "settings")
        differences = []
        for rank, each in zip(self.ranks.members, replies, strict=True):
            counters = [name for name in ("outer_step", "last_applied") if each[name] != replies[0][name]]
            if names := [*each["fields"], *counters]:
                differences.append(f"rank {rank}: {', '.join(names)}")
        return plan, "; ".join(differences)

    def _prepare(self, plan: GatherPlan) -> None:
        """Everything on this rank that can refuse before a request."""
        if self.gatherer is not None:
            return
        ranks, schema = self.ranks, self.update.schema
        self.parts = self.update.parts(self.parameters, ranks)
        self.update.check_window(plan)
        self.row_taker()
        self.gatherer = Gatherer(
            plan, schema, self.stores, rank=ranks.rank, world_size=ranks.size, options=self.options
        )

    def _gather_and_step(self, plan: GatherPlan) -> WindowReport:
        result = self._gather(plan)
        columns, overlap, refuse = None, None, SkipReason.GO
        spool = self.options.spool_directory
        try:
            try:
                columns = Columns(result, self.ranks, parts=self.parts, spool_directory=spool)
                gram, exact = columns.gram()
                overlap = find_overlap(result, gram, exact=exact)
            except BudgetError as error:
                _log.warning("window %d: %s", plan.window, error)
                refuse = SkipReason.BUDGET_TOO_SMALL
            left_out = _left_out(overlap, plan)
            uids = tuple(uid for uid in result.uids if uid not in left_out)
            refuse = SkipReason.OPERATOR if self.skip else refuse
            reason = decide(result, excluded=left_out, refuse=refuse).reason
            decision = Decision(SkipReason(self.ranks.gather(int(reason), "decision")[0]))
            if self.artifacts is not None and plan.is_checked:
                self.before = self.update.fingerprint(self.parameters, ranks=self.ranks).hash
            take = self.ranks.agree(lambda: self._before_update(result, uids, decision), "pre-update")
            report = None
            if decision.go:
                assert columns is not None
                report = self.update.step(columns, uids, self.parts, take, self._tear)
                self.stage = "done"
            return WindowReport(result, overlap, decision, report, None)
        finally:
            if columns is not None:
                columns.close()

    def _tear(self) -> None:
        self.stage = "torn"

    def _gather(self, plan: GatherPlan) -> GatherResult:
        """The merged result, equal on all ranks."""
        gatherer, ranks = self.gatherer, self.ranks
        assert gatherer is not None
        self.wanted = self.wanted or sorted(plan.primary)
        while share := self._next_share(plan, gatherer):
            try:
                gatherer.fetch(share[ranks.place])
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"
        return gatherer.merge_with(ranks, error=self.error)

    def _next_share(self, plan: GatherPlan, gatherer: Gatherer) -> list[tuple[int, ...]]:
        """The uids that each rank fetches next, from the statuses of all so far; empty if there are none."""
        mine = {
            "statuses": {str(uid): status.value for uid, status in gatherer.statuses.items()},
            "error": self.error,
            "wanted": self.wanted,
            "rounds": self.rounds,
        }
        replies = self.ranks.gather(mine, "statuses", patience=plan.deadline)
        # After a rank was lost, some may know of a round that others do not know.
        self.wanted = max((each["wanted"] for each in replies), key=len)
        self.rounds = max(each["rounds"] for each in replies)
        statuses = [{int(u): Status(s) for u, s in each["statuses"].items()} for each in replies]
        known = {uid for each in statuses for uid in each}
        pending = [uid for uid in self.wanted if uid not in known]
        if not pending and self.rounds < plan.backfill_rounds:
            pending = [uid for share in backfill(plan, statuses) for uid in share]
            pending.sort(key=plan.reserve.index)
            self.wanted = self.wanted + pending
            self.rounds += 1
        able = [place for place, each in enumerate(replies) if each["error"] is None]
        if not pending or not able:
            return []
        shares = dict(zip(able, deal(pending, [len(statuses[place]) for place in able]), strict=True))
        return [shares.get(place, ()) for place in range(self.ranks.size)]

    def _before_update(
        self, result: GatherResult, uids: tuple[int, ...], decision: Decision
    ) -> ApplyRows | None:
        """The last steps on this rank that can refuse; what takes the changes of table rows."""
        if self.artifacts is not None:
            self.upload = upload_payloads(self.artifacts, result, deadline=self.ranks.timeout)
        take = self.row_taker()
        if decision.go:
            self.update.prepare(result, uids, self.parts, take)
            if self.saved is not None:
                self.saved.close()
            self.saved = self.snapshot(self.update.local_tensors(self.parts))
        return take

    def _compare_weights(self) -> Fingerprint:
        """The fingerprint of the weights. All ranks raise UsageError if theirs differ."""
        found = self.update.fingerprint(self.parameters, ranks=self.ranks)
        hashes = self.ranks.gather(found.hash, "fingerprints")
        others = [rank for rank, each in zip(self.ranks.members, hashes, strict=True) if each != found.hash]
        if others:
            raise UsageError(
                f"rank {self.ranks.rank} and rank {others[0]} have different weights: "
                "were they equal before the window? reload a checkpoint"
            )
        return found

    def _commit(self, outcome: WindowReport, store: ObjectStore) -> str | None:
        """Wait for the payloads of all ranks, then write the manifest. Returns the problem."""
        patience = self.ranks.timeout
        own = _problem_of(self.upload.result) if self.upload is not None else None
        problems = self.ranks.gather(own, "payloads", patience=patience)
        problem: str | None = next((each for each in problems if each), None)
        if problem is None and self.ranks.leads:
            problem = _problem_of(lambda: self._write_manifest(outcome, store))
        problem = self.ranks.gather(problem, "manifest", patience=patience)[0]
        if problem is not None and self.on_artifact_error == "raise":
            raise ArtifactError(f"{problem}; the window itself is complete")
        if problem is not None:
            _log.warning("window %d: %s", outcome.result.plan.window, problem)
        return problem

    def _write_manifest(self, outcome: WindowReport, store: ObjectStore) -> None:
        result = outcome.result
        manifest = make_manifest(
            result,
            outcome.decision,
            gram=None if outcome.overlap is None else outcome.overlap.gram,
            excluded=_left_out(outcome.overlap, result.plan),
            outer_step=self.update.outer_step,
            weights_before=self.before,
            after=outcome.fingerprint,
        )
        write_manifest(store, manifest, deadline=self.ranks.timeout)
        if self.keep_artifacts is not None:
            prune_artifacts(store, result.plan.run, keep=self.keep_artifacts)

    # ---- losing a rank

    def _continue_without(self, broken: BrokenExchange) -> None:
        """Continue with the ranks that are left, or raise on all of them why that is not possible."""
        what, _, _ = str(broken).partition(":")
        plan = self.plan
        patience = max(self.ranks.timeout, 0.0 if plan is None else plan.deadline)
        lost: list[int] = []
        while True:
            lost += self.ranks.reform(what, patience)
            # Rows of tables belong to the caller: a snapshot does not have them.
            can_undo = self.saved is not None and self.saved.can_restore
            mine = {
                "stage": self.stage,
                "undo": can_undo and not self.update.schema.tables,
                "attempt": -1 if plan is None else plan.attempt,
            }
            try:
                states = self.ranks.gather(mine, "stages")
                break
            except BrokenExchange:
                continue
        named = ", ".join(map(str, lost)) or "none"
        if lost and any(part.span is not None for part in self.parts.values()):
            raise RankTimeoutError(
                f"{what}: lost ranks: {named}; no other rank has their parts of parameters"
            )
        if plan is not None:
            self.plan = replace(plan, attempt=max(each["attempt"] for each in states) + 1)
            if self.gatherer is not None:
                self.gatherer.use_plan(self.plan, self.ranks.size)
        stages = {each["stage"] for each in states}
        if stages == {"fresh"} or stages <= {"done", "final"}:
            return
        if not all(each["undo"] or each["stage"] == "fresh" for each in states):
            raise self._torn(f"{what}: lost ranks: {named}")
        self._undo()

    def _undo(self) -> None:
        """Undo a step that is not final, if a snapshot can."""
        if self.stage in ("torn", "done") and self.saved is not None and self.saved.can_restore:
            self.saved.restore()
            self.update.outer_step, self.update.last_applied = self.counters
            self.stage = "fresh"

    def _torn(self, why: str) -> UsageError:
        with suppress(RuntimeError):
            self.ranks.close()
        return UsageError(f"{TORN}{why}")


def _problem_of(work: Callable[[], None]) -> str | None:
    try:
        work()
    except (ArtifactError, OSError) as error:
        return str(error)
    return None


def _left_out(overlap: Overlap | None, plan: GatherPlan) -> tuple[int, ...]:
    return () if overlap is None else excluded_uids(overlap, plan.overlap)


def metrics(
    gathered: Gathered, *, scores: Mapping[int, float] | None = None, overlap: Overlap | None = None
) -> dict[str, float]:
    """Return all numbers of a window.

    Args:
        gathered: The result.
        scores: The score of each uid; None: without mean scores.
        overlap: The overlap; None: without its numbers.

    Returns:
        By name.
    """
    result = as_result(gathered)
    found: dict[str, float] = {
        "gather/window": result.plan.window,
        "gather/success_rate": 100.0 * result.success_rate,
        "gather/primary_success_rate": 100.0 * result.primary_success_rate,
        "gather/accepted": len(result.uids),
        "gather/skipped": len(result.skipped_uids),
        "gather/reserve_used": result.reserve_used,
        "gather/duplicates": len(result.duplicate_uids),
        "gather/exact_copies": sum(len(group) - 1 for group in result.copies),
        "gather/download_bytes": result.download_bytes,
        "gather/seconds": result.time,
    }
    statuses = Counter(str(record.status) for record in result.records.values())
    found |= {f"gather/status/{name}": count for name, count in sorted(statuses.items())}
    middles = norm_medians(result).values()
    if middles:
        found |= {"gather/min_median_norm": min(middles), "gather/max_median_norm": max(middles)}
    if scores is not None:
        if not isinstance(scores, Mapping) or None in map(checks.as_number, scores.values()):
            raise InputError(f"scores must be numbers by uid, got {checks.kind(scores)}")
        for name, uids in (("intended", result.intended), ("actual", result.actual)):
            found[f"gather/{name}_mean"] = sum(scores.get(uid, 0.0) for uid in uids) / max(1, len(uids))
    if overlap is not None:
        checks.instance(overlap, Overlap, "overlap")
        found |= {
            "overlap/pairs_checked": overlap.pairs_checked,
            "overlap/pairs_high": len(overlap.pairs),
            "overlap/ratio_high": overlap.ratio_high,
            "overlap/mean": overlap.mean,
            "overlap/min": overlap.minimum,
            "overlap/max": overlap.maximum,
        }
    return found
