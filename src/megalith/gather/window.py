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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megalith.distributed.surviving_ranks import BrokenExchange, Ranks
from megalith.errors import (
    ArtifactError,
    BudgetError,
    InputError,
    MegalithError,
    RankFailedError,
    RankTimeoutError,
    UsageError,
)
from megalith.gather.artifact import PayloadUpload, make_manifest, prune_artifacts, write_manifest
from megalith.gather.columns import Columns
from megalith.gather.fetch import FetchOptions, Gatherer, Stores
from megalith.gather.overlap import Overlap, excluded_uids, find_overlap
from megalith.gather.payload_schema import Weights
from megalith.gather.plan import GatherPlan, backfill, deal
from megalith.gather.result import Decision, GatherResult, Partial, SkipReason, decide, make_partial, merge
from megalith.gather.status import Status
from megalith.gather.table_rows import TableShards
from megalith.gather.update import ApplyRows, OuterUpdate, UpdateReport, row_taker
from megalith.gather.weight_parts import Fingerprint, Part, SnapshotPolicy, WeightSnapshot
from megalith.ops import checks
from megalith.storage.json_records import canonical_json
from megalith.storage.object_store import ObjectStore
from megalith.storage.strict_json import parse_json_object

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
    ranks: Ranks | None = None,
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
    if ranks is not None:
        checks.instance(ranks, Ranks, "ranks")
    if artifacts is not None:
        checks.instance(artifacts, ObjectStore, "artifacts")
    if keep_artifacts is not None:
        checks.integer(keep_artifacts, "keep_artifacts")
    request = _WindowArguments(
        plan,
        parameters,
        stores,
        artifacts,
        tables,
        apply_rows,
        checks.instance(options or FetchOptions(), FetchOptions, "options"),
        snapshot,
        snapshot_directory,
        on_artifact_error,
        keep_artifacts,
        checks.flag(skip, "skip"),
    )
    return _GatherWindow(request, update, ranks or Ranks.alone()).run()


@dataclass(frozen=True)
class _WindowArguments:
    """The arguments of `run_window`."""

    plan: GatherPlan | None
    parameters: Weights
    stores: Stores
    artifacts: ObjectStore | None
    tables: TableShards | None
    apply_rows: ApplyRows | None
    options: FetchOptions
    snapshot: SnapshotPolicy
    snapshot_directory: Path | None
    on_artifact_error: str
    keep_artifacts: int | None
    skip: bool


class _GatherWindow:
    """One window of one rank."""

    def __init__(self, request: _WindowArguments, update: OuterUpdate, ranks: Ranks) -> None:
        self._request = request
        self._update = update
        self._ranks = ranks
        self._plan: GatherPlan | None = None
        self._stage: Stage = "fresh"
        self._counters = (update.outer_step, update.last_applied)
        self._saved: WeightSnapshot | None = None
        self._gatherer: Gatherer | None = None
        self._upload: PayloadUpload | None = None
        self._parts: dict[str, Part] = {}
        self._wanted: list[int] = []
        self._rounds = 0
        self._error: str | None = None
        self._outcome: WindowReport | None = None
        self._before: str | None = None

    def run(self) -> WindowReport:
        """The window, tried again without ranks that are lost."""
        try:
            while True:
                try:
                    return self._attempt()
                except BrokenExchange as broken:
                    self._continue_without(broken)
        except BaseException as error:
            self._undo()
            if self._stage == "torn" and isinstance(error, Exception) and not isinstance(error, UsageError):
                raise self._torn(f"{type(error).__name__}: {error}") from error
            raise
        finally:
            if self._upload is not None:
                with suppress(ArtifactError):
                    self._upload.wait()
            if self._saved is not None:
                self._saved.close()
            if self._gatherer is not None:
                self._gatherer.partial().close()

    # ---- the path of a window

    def _attempt(self) -> WindowReport:
        if self._stage == "fresh":
            plan, mismatch = self._agree()
            if mismatch:
                nothing = merge(
                    [make_partial(replace(plan, primary=(), reserve=()), self._update.schema, (), ())]
                )
                decision = Decision(SkipReason.PLAN_MISMATCH, mismatch)
                return WindowReport(replace(nothing, plan=plan), None, decision, None, None)
            self._outcome = self._gather_and_step(plan)
        assert self._outcome is not None
        outcome, plan = self._outcome, self._outcome.result.plan
        if plan.is_checked and (outcome.decision.go or self._request.artifacts is not None):
            outcome = replace(outcome, fingerprint=self._compare_weights())
        if self._stage == "done":
            self._stage = "final"
        if self._request.artifacts is not None:
            outcome = replace(outcome, artifact_error=self._commit(outcome, self._request.artifacts))
        return outcome

    def _agree(self) -> tuple[GatherPlan, str]:
        """The plan, and which ranks have different settings. An error of one rank is raised on all."""
        own = self._plan or self._request.plan
        sent = self._ranks.exchange("plan", b"" if own is None else own.to_bytes())
        found = next((each for each in sent if each), None)
        if found is None:
            raise InputError("no rank has a plan: the first one must pass it")
        plan = self._plan = GatherPlan.from_bytes(found)
        error: Exception | None = None
        try:
            self._prepare(plan)
        except (MegalithError, OSError) as problem:
            error = problem
        mine = self._request.plan
        state = {
            "fields": [] if mine is None else mine.differences(plan),
            "outer_step": self._update.outer_step,
            "last_applied": self._update.last_applied,
        }
        replies = tell(self._ranks, "ready", state, error)
        differences = []
        for place, each in enumerate(replies):
            names = [
                *each["fields"],
                *(n for n in ("outer_step", "last_applied") if each[n] != replies[0][n]),
            ]
            if names:
                differences.append(f"rank {self._ranks.members[place]}: {', '.join(names)}")
        return plan, "; ".join(differences)

    def _prepare(self, plan: GatherPlan) -> None:
        """Everything on this rank that can refuse before a request."""
        if self._gatherer is not None:
            return
        request, update, ranks = self._request, self._update, self._ranks
        self._parts = update.parts(request.parameters, ranks)
        update.check_window(plan)
        schema = update.schema
        row_taker(merge([make_partial(plan, schema, (), ())]), (), ranks, request.tables, request.apply_rows)
        self._gatherer = Gatherer(
            plan,
            schema,
            request.stores,
            rank=ranks.rank,
            world_size=ranks.size,
            slots=len(plan.primary) + len(plan.reserve),
            options=request.options,
        )

    def _gather_and_step(self, plan: GatherPlan) -> WindowReport:
        result = self._gather(plan)
        columns, overlap, refuse = None, None, SkipReason.GO
        try:
            try:
                columns = Columns(
                    result,
                    self._ranks,
                    parts=self._parts,
                    spool_directory=self._request.options.spool_directory,
                )
                gram, exact = columns.gram()
                overlap = find_overlap(result, gram, exact=exact)
            except BudgetError as error:
                _log.warning("window %d: %s", plan.window, error)
                refuse = SkipReason.BUDGET_TOO_SMALL
            left_out = _left_out(overlap, plan)
            uids = tuple(uid for uid in result.uids if uid not in left_out)
            refuse = SkipReason.OPERATOR if self._request.skip else refuse
            decision = decide(result, excluded=left_out, refuse=refuse)
            decision = Decision(
                SkipReason(tell(self._ranks, "decision", {"reason": decision.reason})[0]["reason"])
            )
            take = self._before_update(result, uids, decision)
            report = None
            if decision.go:
                assert columns is not None
                report = self._update.step(columns, uids, self._parts, take, self._tear)
                self._stage = "done"
            return WindowReport(result, overlap, decision, report, None)
        finally:
            if columns is not None:
                columns.close()

    def _tear(self) -> None:
        self._stage = "torn"

    def _gather(self, plan: GatherPlan) -> GatherResult:
        """The merged result, equal on all ranks."""
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
        return merge(
            own if place == ranks.place else Partial.from_bytes(each, plan, self._update.schema)
            for place, each in enumerate(sent)
        )

    def _next_share(self, plan: GatherPlan) -> list[tuple[int, ...]]:
        """The uids that each rank fetches next, from the statuses of all so far; empty if there are none."""
        assert self._gatherer is not None
        mine = {
            "statuses": {str(uid): status.value for uid, status in self._gatherer.statuses.items()},
            "error": self._error,
            "wanted": self._wanted,
            "rounds": self._rounds,
        }
        replies = tell(self._ranks, "statuses", mine, patience=plan.deadline)
        # After a rank was lost, some may know of a round that others do not know.
        self._wanted = max((each["wanted"] for each in replies), key=len)
        self._rounds = max(each["rounds"] for each in replies)
        statuses = [{int(u): Status(s) for u, s in each["statuses"].items()} for each in replies]
        known = {uid for each in statuses for uid in each}
        pending = [uid for uid in self._wanted if uid not in known]
        if not pending and self._rounds < plan.backfill_rounds:
            pending = [uid for share in backfill(plan, statuses) for uid in share]
            pending.sort(key=plan.reserve.index)
            self._wanted = self._wanted + pending
            self._rounds += 1
        able = [place for place, each in enumerate(replies) if each["error"] is None]
        if not pending or not able:
            return []
        shares = dict(zip(able, deal(pending, [len(statuses[place]) for place in able]), strict=True))
        return [shares.get(place, ()) for place in range(self._ranks.size)]

    def _before_update(self, result: GatherResult, uids: tuple[int, ...], decision: Decision) -> ApplyRows:
        """The last steps that can refuse, then the barrier before weights change."""
        request, update, plan = self._request, self._update, result.plan
        take: ApplyRows | None = None
        error: Exception | None = None
        if request.artifacts is not None and plan.is_checked:
            self._before = update.fingerprint(request.parameters, ranks=self._ranks).hash
        try:
            if request.artifacts is not None:
                self._upload = PayloadUpload(request.artifacts, result, deadline=self._ranks.timeout)
            if decision.go:
                update.check(result, uids)
                take = row_taker(result, uids, self._ranks, request.tables, request.apply_rows)
                self._take_snapshot(plan)
        except (MegalithError, OSError) as problem:
            error = problem
        tell(self._ranks, "pre-update", {}, error)
        return take if take is not None else lambda table, ids, change: None

    def _take_snapshot(self, plan: GatherPlan) -> None:
        if self._saved is not None:
            self._saved.close()
        self._update.prepare(self._parts, plan.update)
        tensors = self._update.local_tensors(self._parts)
        self._saved = WeightSnapshot(tensors, self._request.snapshot, self._request.snapshot_directory)

    def _compare_weights(self) -> Fingerprint:
        """The fingerprint of the weights. All ranks raise UsageError if theirs differ."""
        found = self._update.fingerprint(self._request.parameters, ranks=self._ranks)
        replies = tell(self._ranks, "fingerprints", {"hash": found.hash})
        others = [self._ranks.members[p] for p, each in enumerate(replies) if each["hash"] != found.hash]
        if others:
            raise UsageError(
                f"rank {self._ranks.rank} and rank {others[0]} have different weights: "
                "were they equal before the window? reload a checkpoint"
            )
        return found

    def _commit(self, outcome: WindowReport, store: ObjectStore) -> str | None:
        """Wait for the payloads of all ranks, then write the manifest. Returns the problem."""
        own = self._try_artifact(self._upload.wait) if self._upload is not None else None
        replies = tell(self._ranks, "payloads", {"problem": own}, patience=self._ranks.timeout)
        problem: str | None = next((each["problem"] for each in replies if each["problem"]), None)
        if problem is None and self._ranks.leads:
            problem = self._try_artifact(lambda: self._write_manifest(outcome, store))
        replies = tell(self._ranks, "manifest", {"problem": problem}, patience=self._ranks.timeout)
        problem = replies[0]["problem"]
        if problem is not None and self._request.on_artifact_error == "raise":
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
            outer_step=self._update.outer_step,
            weights_before=self._before,
            after=outcome.fingerprint,
        )
        write_manifest(store, manifest, deadline=self._ranks.timeout)
        if self._request.keep_artifacts is not None:
            prune_artifacts(store, result.plan.run, keep=self._request.keep_artifacts)

    @staticmethod
    def _try_artifact(work: Callable[[], None]) -> str | None:
        try:
            work()
        except (ArtifactError, OSError) as error:
            return str(error)
        return None

    # ---- losing a rank

    def _continue_without(self, broken: BrokenExchange) -> None:
        """Continue with the ranks that are left, or raise on all of them why that is not possible."""
        what, _, _ = str(broken).partition(":")
        plan = self._plan
        patience = max(self._ranks.timeout, 0.0 if plan is None else plan.deadline)
        lost: list[int] = []
        while True:
            lost += self._ranks.reform(what, patience)
            # Rows of tables belong to the caller: a snapshot does not have them.
            can_undo = self._saved is not None and self._saved.can_restore
            mine = {
                "stage": self._stage,
                "undo": can_undo and not self._update.schema.tables,
                "attempt": -1 if plan is None else plan.attempt,
            }
            try:
                states = tell(self._ranks, "stages", mine)
                break
            except BrokenExchange:
                continue
        named = ", ".join(map(str, lost)) or "none"
        if lost and any(part.span is not None for part in self._parts.values()):
            raise RankTimeoutError(
                f"{what}: lost ranks: {named}; no other rank has their parts of parameters"
            )
        if plan is not None:
            self._plan = replace(plan, attempt=max(each["attempt"] for each in states) + 1)
            if self._gatherer is not None:
                self._gatherer.use_plan(self._plan, self._ranks.size)
        stages = {each["stage"] for each in states}
        if stages == {"fresh"} or stages <= {"done", "final"}:
            return
        if not all(each["undo"] or each["stage"] == "fresh" for each in states):
            raise self._torn(f"{what}: lost ranks: {named}")
        self._undo()

    def _undo(self) -> None:
        """Undo a step that is not final, if a snapshot can."""
        if self._stage in ("torn", "done") and self._saved is not None and self._saved.can_restore:
            self._saved.restore()
            self._update.outer_step, self._update.last_applied = self._counters
            self._stage = "fresh"

    def _torn(self, why: str) -> UsageError:
        with suppress(RuntimeError):
            self._ranks.close()
        return UsageError(
            "the update failed half-way and weights may be inconsistent: reload a checkpoint and catch up "
            f"(or use a snapshot): {why}"
        )


def tell(
    ranks: Ranks,
    what: str,
    message: Mapping[str, Any],
    error: Exception | None = None,
    *,
    patience: float = 0.0,
) -> list[dict[str, Any]]:
    """Exchange messages. An error of one rank is raised there, and as RankFailedError on all others.

    Args:
        ranks: The ranks.
        what: The name of the exchange.
        message: JSON data of this rank.
        error: The error of this rank.
        patience: Seconds of work that other ranks may still have before it.

    Returns:
        The message of each rank, by place.

    Raises:
        RankFailedError: Another rank has an error; the message names it.
    """
    problem = None if error is None else f"{type(error).__name__}: {error}"
    data = canonical_json({"message": message, "problem": problem})
    replies = [
        parse_json_object(each, lambda wrong: RankFailedError(f"{what}: {wrong}")).data
        for each in ranks.exchange(what, data, patience=patience)
    ]
    if error is not None:
        raise error
    for place, each in enumerate(replies):
        if each["problem"] is not None:
            raise RankFailedError(f"{what}: rank {ranks.members[place]}: {each['problem']}")
    return [each["message"] for each in replies]


def _left_out(overlap: Overlap | None, plan: GatherPlan) -> tuple[int, ...]:
    return () if overlap is None else excluded_uids(overlap, plan.overlap)
