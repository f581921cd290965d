"""A window: gathered, searched for copies, decided, applied and published, by one process or by many ranks.

There is one path; a process alone is a group of one rank. Ranks share one copy of the weights and the work of
a window. Nodes, each of one or more ranks, have weights of their own and share decisions (`artifact.py`).

    plan -> decision of another node? -> ready -> fingerprint
      none:  -> fetch and statuses, until all uids have one -> partials -> indices -> pre-update -> decision
      there: -> fetch what it names                         -> partials            -> pre-update
    -> tiles -> fingerprints -> weights of the nodes

Every arrow is an exchange in which all ranks take part, whatever happened to their own work. A node leaves a
window to the others for `Artifacts.wait` seconds. Then it decides itself; if another decision was written in
the meantime, it drops its own and follows that one. Everything that can refuse does so before the decision
is written. The weights of a rank are in one of these stages:

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
from typing import Literal

from megalith.distributed.elastic_ranks import ElasticRanks
from megalith.distributed.ranks import BrokenExchange
from megalith.distributed.tensor_parts import Fingerprint, TensorPart
from megalith.errors import ArtifactError, BudgetError, InputError, RankTimeoutError, UsageError
from megalith.gather.artifact import (
    ArtifactManifest,
    Artifacts,
    make_manifest,
    next_decision,
    prune_artifacts,
    record_weights,
    upload_payloads,
    weights_of_nodes,
    write_decision,
)
from megalith.gather.columns import Columns
from megalith.gather.fetch import Gatherer, RankOptions, Stores, rank_options
from megalith.gather.overlap import Overlap, excluded_uids, find_overlap
from megalith.gather.payload_schema import Weights
from megalith.gather.plan import GatherPlan, Status, backfill, deal
from megalith.gather.result import (
    Decision,
    Gathered,
    GatherResult,
    Record,
    SkipReason,
    as_result,
    decide,
    tier_of,
)
from megalith.gather.table_rows import ApplyRows, TableShards, row_taker
from megalith.gather.update import TORN, OuterUpdate, TensorSnapshot, UpdateReport
from megalith.ops import checks
from megalith.storage.bodies import ObjectBody
from megalith.storage.object_store import ObjectStore, StoreRequestError

Stage = Literal["fresh", "torn", "done", "final"]
_log = logging.getLogger("megalith.gather")


@dataclass(frozen=True)
class WindowReport:
    """The outcome of a window, equal on all ranks except for times and peaks.

    Attributes:
        result: The merged result; its payloads are closed.
        overlap: The search for copies; None if the budget was too small, or another node decided.
        decision: Whether the update happened.
        update: What the step did; None if the window was skipped.
        fingerprint: The weights after the window; None if they were not compared.
        manifest: The decision that was written or followed; None without artifacts.
        differing: The nodes whose weights differed from those of this node, after this window or the last.
        artifact_error: Why the decision could not be written, with `Artifacts(on_error="warn")`.
    """

    result: GatherResult
    overlap: Overlap | None
    decision: Decision
    update: UpdateReport | None
    fingerprint: Fingerprint | None = None
    manifest: ArtifactManifest | None = None
    differing: tuple[str, ...] = ()
    artifact_error: str | None = None


def run_window(
    plan: GatherPlan | None,
    parameters: Weights,
    update: OuterUpdate,
    stores: Stores,
    *,
    ranks: ElasticRanks | None = None,
    artifacts: Artifacts | ObjectStore | None = None,
    tables: TableShards | ApplyRows | None = None,
    options: RankOptions | None = None,
) -> WindowReport:
    """Gather a window and step the weights, in place. A skipped window leaves weights and counters unchanged.

    With artifacts, the decision of the window is written to their store, or followed if another node has
    written it; windows that this node has missed are applied first.

    Args:
        plan: The plan. With ranks, only the first one needs it; others that have one compare it.
        parameters: The model, or its parameters by name. They may be sharded by FSDP2 over the ranks.
        update: The outer optimizer.
        stores: Stores by the names that the plan uses.
        ranks: The ranks that share the work; all of them call this function.
        artifacts: Where decisions are kept, for other nodes and for nodes that catch up later.
        tables: The tables to which changes of rows are added, each row once: `collection.shards`. Or a
            function that takes the name of a table, ids and changes, and is called on every rank.
        options: How this rank works.

    Returns:
        The outcome.

    Raises:
        InputError: An argument does not match, before any request.
        BudgetError: The budget is too small for fetching, before any request.
        UsageError: The window was applied already, before any request; or weights may be inconsistent.
        ArtifactError: A decision cannot be written, read or followed; unless the message says otherwise,
            nothing has changed.
        RankFailedError: Another rank raised an error.
        RankTimeoutError: Too few ranks are left.
    """
    if plan is not None or ranks is None:
        checks.instance(plan, GatherPlan, "plan")
    new_turn = _turns(parameters, update, stores, ranks, artifacts, tables, options)
    while True:
        turn = new_turn(given=plan)
        report = turn.run()
        if report is None:
            continue
        assert turn.plan is not None
        if (
            report.decision.reason is SkipReason.PLAN_MISMATCH
            or report.result.plan.window >= turn.plan.window
        ):
            return report


def catch_up(
    artifacts: Artifacts | ObjectStore,
    parameters: Weights,
    update: OuterUpdate,
    *,
    run: str,
    ranks: ElasticRanks | None = None,
    tables: TableShards | ApplyRows | None = None,
    options: RankOptions | None = None,
    memory_budget: int | None = None,
) -> tuple[int, ...]:
    """Follow all decisions after the last window that the update has followed.

    Args:
        artifacts: Where decisions are kept, or their store.
        parameters: The weights after that window; they change in place, and may be sharded over ranks.
        update: The outer optimizer as it was then, momentum included.
        run: The run.
        ranks: The ranks that share the work; all of them call this function.
        tables: See `run_window`.
        options: How this rank works.
        memory_budget: The budget of this node, if not that of the plans; it does not change weights.

    Returns:
        The windows that were applied. Windows that have no update, by their decision, are not among them.

    Raises:
        ArtifactError: A decision is missing, damaged or does not match, before its window changes anything;
            or the weights after a window are not those of another node.
        InputError: An argument is wrong.
        RankFailedError: Another rank raised an error.
        RankTimeoutError: Too few ranks are left.
    """
    checks.text(run, "run", 128)
    if memory_budget is not None:
        checks.integer(memory_budget, "memory_budget")
    new_turn = _turns(parameters, update, {}, ranks, Artifacts.of(artifacts), tables, options)
    applied = []
    while (report := new_turn(given=None, late_run=run, budget=memory_budget).run()) is not None:
        if report.decision.go:
            applied.append(report.result.plan.window)
        if report.decision.reason is SkipReason.PLAN_MISMATCH:
            raise InputError(f"the ranks do not catch up from one state: {report.decision.detail}")
        if report.differing:
            raise ArtifactError(
                f"window {report.result.plan.window} produced different weights than on node "
                f"{report.differing[0]!r}: were the weights before the first window those of the others?"
            )
    return tuple(applied)


def write_artifact(report: WindowReport, artifacts: Artifacts | ObjectStore, stores: Stores) -> None:
    """Write the decision of a window again whose upload failed, with its payloads.

    Args:
        report: The outcome of the window, with its manifest.
        artifacts: Where decisions are kept.
        stores: The stores that the plan names, which must still hold the payloads that are not there yet.

    Raises:
        ArtifactError: A payload is gone or has changed, another decision was written, or the store fails.
        InputError: An argument is wrong.
    """
    to, manifest = Artifacts.of(artifacts), checks.instance(report, WindowReport, "report").manifest
    given = checks.mapping(stores, "stores", '{"default": store}')
    if manifest is None:
        raise InputError("the report has no manifest: its window ran without artifacts")
    replay = manifest.replay(None)
    places = {uid: manifest.plan.location(uid) for uid in manifest.uids}
    for uid, place in replay.locations.items():
        with suppress(StoreRequestError):
            ObjectBody(to.store, place.key, deadline=to.deadline)
            places[uid] = place
    accept = replace(replay.gather, formats=manifest.plan.gather.formats)
    wanted = replace(replay, locations=places, gather=accept)
    limit = 2 * to.deadline
    gatherer = Gatherer(wanted, manifest.schema, {**given, "artifacts": to.store}, complete=True)
    try:
        gatherer.fetch((*wanted.primary, *wanted.reserve))
        result = as_result(gatherer.partial())
        manifest.check(result)
        upload_payloads(to, result, to.deadline).result(limit)
    except TimeoutError:
        window = manifest.plan.window
        raise ArtifactError(f"window {window}: payloads were not written within {limit:g} s") from None
    finally:
        gatherer.partial().close()
    if not write_decision(to, manifest):
        raise ArtifactError(f"another decision was written for window {manifest.plan.window}")
    if report.fingerprint is not None:
        record_weights(to, manifest.plan, report.fingerprint)


def _turns(
    parameters: Weights,
    update: OuterUpdate,
    stores: Stores,
    ranks: ElasticRanks | None,
    artifacts: Artifacts | ObjectStore | None,
    tables: TableShards | ApplyRows | None,
    options: RankOptions | None,
) -> Callable[..., _Turn]:
    checks.instance(update, OuterUpdate, "update")
    together = ElasticRanks.or_alone(ranks)
    settings = rank_options(options)
    return partial(
        _Turn,
        parameters=parameters,
        update=update,
        stores=stores,
        ranks=together,
        artifacts=None if artifacts is None else Artifacts.of(artifacts),
        row_taker=partial(row_taker, update.schema, together, tables),
        options=settings,
    )


@dataclass(kw_only=True)
class _Turn:
    """One decision that a rank makes or follows: the arguments of `run_window`, and what is known so far."""

    given: GatherPlan | None
    parameters: Weights
    update: OuterUpdate
    stores: Stores
    ranks: ElasticRanks
    artifacts: Artifacts | None
    row_taker: Callable[[], ApplyRows | None]
    options: RankOptions
    late_run: str | None = None  # the run to catch up with, without a plan
    budget: int | None = None
    plan: GatherPlan | None = None  # that of the first rank
    followed: ArtifactManifest | None = None  # the decision of another node
    manifest: ArtifactManifest | None = None  # that, or the one that was made here
    attempt: int = 0
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
    differing: set[str] = field(default_factory=set)

    def run(self) -> WindowReport | None:
        """The outcome; None if there is nothing to follow, or another decision was written first."""
        self.counters = (self.update.outer_step, self.update.last_window)
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

    def _attempt(self) -> WindowReport | None:
        if self.stage == "fresh":
            ready = self._agree()
            if ready is None or isinstance(ready, WindowReport):
                return ready
            self.outcome = self._gather_and_step(ready)
            if self.outcome is None:
                return None
        assert self.outcome is not None
        outcome = self.outcome
        if outcome.result.plan.is_checked and (outcome.decision.go or self.artifacts is not None):
            outcome = replace(outcome, fingerprint=self._compare_weights())
        if self.stage == "done":
            self.stage = "final"
        if self.artifacts is not None:
            self._publish_weights(outcome)
        if self.manifest is not None:
            plan = self.manifest.plan
            outcome = replace(outcome, result=replace(outcome.result, plan=plan))
            self.update.last_window = (plan.run, plan.window)  # also if it has no update
        return replace(outcome, manifest=self.manifest, differing=tuple(sorted(self.differing)))

    def _agree(self) -> GatherPlan | WindowReport | None:
        """The plan that is gathered, or the outcome without a gather. An error is raised on all ranks."""
        if self.late_run is None:
            own = self.plan or self.given
            sent = self.ranks.exchange("plan", b"" if own is None else own.to_bytes())
            found = next((each for each in sent if each), None)
            if found is None:
                raise InputError("no rank has a plan: the first one must pass it")
            self.plan = replace(GatherPlan.from_bytes(found), attempt=self.attempt)
        plan = self.plan
        manifest = self._decision_to_follow()
        if manifest is None and plan is None:
            return None
        if manifest is not None and plan is not None and manifest.plan.window > plan.window:
            why = f"the nodes went on to window {manifest.plan.window} after {manifest.previous}"
            return WindowReport(self._nothing(plan), None, Decision(SkipReason.PASSED_OVER, why), None)
        if manifest != self.followed and self.gatherer is not None:  # a rank was lost after the decision
            self.gatherer.partial().close()
            self.gatherer, self.wanted, self.rounds = None, [], 0
        self.followed = self.manifest = manifest
        if manifest is not None:
            budget = self.budget if plan is None else plan.gather.memory_budget
            plan = replace(manifest.replay(budget), attempt=self.attempt)
        assert plan is not None
        work = plan
        self.ranks.agree(lambda: self._prepare(work), "ready")
        state = {
            "fields": [] if self.given is None or self.plan is None else self.given.differences(self.plan),
            "outer_step": self.update.outer_step,
            "last_window": self.update.last_window,
        }
        replies = self.ranks.gather(state, "settings")
        differences = []
        for rank, each in zip(self.ranks.members, replies, strict=True):
            counters = [name for name in ("outer_step", "last_window") if each[name] != replies[0][name]]
            if names := [*each["fields"], *counters]:
                differences.append(f"rank {rank}: {', '.join(names)}")
        if differences:
            skip = Decision(SkipReason.PLAN_MISMATCH, "; ".join(differences))
            return WindowReport(self._nothing(plan), None, skip, None)
        return plan

    def _nothing(self, plan: GatherPlan) -> GatherResult:
        return GatherResult(plan=plan, schema=self.update.schema)

    def _decision_to_follow(self) -> ArtifactManifest | None:
        """What the nodes decided after the last window of this one, as far as it is known; on all ranks."""
        artifacts, plan = self.artifacts, self.plan
        if artifacts is None:
            return None
        run = self.late_run or ("" if plan is None else plan.run)
        wait = 0.0 if plan is None else artifacts.wait

        def look() -> bytes:
            if not self.ranks.leads:
                return b""
            if plan is not None:
                self.update.check_window(plan)
            found = next_decision(artifacts, run, self._last(run), wait=wait, earlier=plan is None)
            if found is None:
                return b""
            if found.go and found.outer_step != self.update.outer_step + 1:
                raise ArtifactError(
                    f"window {found.plan.window} is outer step {found.outer_step}, "
                    f"the update has made {self.update.outer_step} steps"
                )
            weights = "" if found.weights is None else found.weights
            return weights.encode().ljust(64) + found.to_bytes()

        patience = wait + artifacts.deadline
        own = self.ranks.agree(look, "decision of the nodes", patience=patience)
        text = self.ranks.exchange("the decision", own)[0]
        if not text:
            return None
        found = ArtifactManifest.from_bytes(text[64:], "the decision")
        return replace(found, weights=text[:64].decode().strip() or None)

    def _last(self, run: str) -> int | None:
        """The last window of a run that this node has followed."""
        last = self.update.last_window
        return last[1] if last is not None and last[0] == run else None

    def _prepare(self, plan: GatherPlan) -> None:
        """Everything on this rank that can refuse before a request."""
        if self.gatherer is not None:
            self.gatherer.use_plan(plan, self.ranks.size)
            return
        ranks, schema = self.ranks, self.update.schema
        self.parts = self.update.parts(self.parameters, ranks)
        self.update.check_window(plan)
        self.row_taker()
        follows = self.followed is not None and self.artifacts is not None
        self.gatherer = Gatherer(
            plan,
            schema,
            {"artifacts": self.artifacts.store} if follows and self.artifacts is not None else self.stores,
            rank=ranks.rank,
            world_size=ranks.size,
            options=self.options,
            complete=follows,
        )

    def _gather_and_step(self, plan: GatherPlan) -> WindowReport | None:
        decided = self.followed
        before = self._compare_weights() if plan.is_checked else None
        if before is not None:
            plan = self._with_weights(plan, before)
        result = self._gather(plan)
        if decided is not None:
            decided.check(result)
            result = _as_decided(result, decided)
        elif self.artifacts is not None:
            self.upload = upload_payloads(self.artifacts, result, self.ranks.timeout)
        columns, overlap, refuse = None, None, SkipReason.GO
        try:
            try:
                if decided is None or decided.go:
                    columns = Columns(
                        result, self.ranks, parts=self.parts, spool_directory=self.options.spool_directory
                    )
                if columns is not None and decided is None:
                    gram, exact = columns.gram()
                    overlap = find_overlap(result, gram, exact=exact)
            except BudgetError as error:
                if decided is not None:
                    raise
                _log.warning("window %d: %s", plan.window, error)
                refuse = SkipReason.BUDGET_TOO_SMALL
            left_out: tuple[int, ...] = ()
            if decided is not None:
                left_out, decision = decided.excluded, Decision(decided.reason)
            else:
                left_out = () if overlap is None else excluded_uids(overlap, plan.overlap)
                refuse = SkipReason.OPERATOR if plan.skip else refuse
                reason = decide(result, excluded=left_out, refuse=refuse).reason
                decision = Decision(SkipReason(self.ranks.gather(int(reason), "decision")[0]))
            uids = tuple(uid for uid in result.uids if uid not in left_out)
            take = self.ranks.agree(lambda: self._before_update(result, uids, decision), "pre-update")
            problem = None
            if decided is None and self.artifacts is not None:
                self.manifest = make_manifest(
                    result,
                    decision,
                    gram=None if overlap is None else overlap.gram,
                    excluded=left_out,
                    outer_step=self.update.outer_step,
                    weights_before=None if before is None else before.hash,
                    previous=self._last(plan.run),
                )
                problem = self._write_decision(self.manifest, self.artifacts)
                if problem == _OTHER:
                    return None
            report = None
            if decision.go:
                assert columns is not None
                report = self.update.step(columns, uids, self.parts, take, self._tear)
                self.stage = "done"
            return WindowReport(result, overlap, decision, report, artifact_error=problem)
        finally:
            if columns is not None:
                columns.close()

    def _tear(self) -> None:
        self.stage = "torn"

    def _with_weights(self, plan: GatherPlan, before: Fingerprint) -> GatherPlan:
        """The plan, with the weights that this node has; it must be those that the others have."""
        decided = self.followed
        if decided is not None and decided.weights_before not in (None, before.hash):
            raise ArtifactError(
                f"the weights are not those before window {plan.window}, as its decision states: reload a "
                "checkpoint of another node and catch up"
            )
        hash = before.hash_of(spec.name for spec in self.update.schema.parameters)
        if plan.weights not in (None, hash):
            raise UsageError(
                f"the plan of window {plan.window} is for weights {str(plan.weights)[:12]}, these are "
                f"{hash[:12]}: catch up, or reload a checkpoint"
            )
        if self.artifacts is not None:
            self._compare_nodes(plan.run, self._last(plan.run), before)
        plan = replace(plan, weights=plan.weights if decided is not None else hash)
        assert self.gatherer is not None
        self.gatherer.use_plan(plan, self.ranks.size)
        return plan

    def _gather(self, plan: GatherPlan) -> GatherResult:
        """The merged result, equal on all ranks."""
        gatherer, ranks = self.gatherer, self.ranks
        assert gatherer is not None
        self.wanted = self.wanted or sorted(
            plan.primary if self.followed is None else (*plan.primary, *plan.reserve)
        )
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
        replies = self.ranks.gather(mine, "statuses", patience=plan.gather.deadline)
        # After a rank was lost, some may know of a round that others do not know.
        self.wanted = max((each["wanted"] for each in replies), key=len)
        self.rounds = max(each["rounds"] for each in replies)
        statuses = [{int(u): Status(s) for u, s in each["statuses"].items()} for each in replies]
        known = {uid for each in statuses for uid in each}
        pending = [uid for uid in self.wanted if uid not in known]
        if not pending and self.followed is None and self.rounds < plan.gather.backfill_rounds:
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
        take = self.row_taker()
        if decision.go:
            self.update.prepare(result, uids, self.parts, take)
            if self.saved is not None:
                self.saved.close()
            self.saved = TensorSnapshot(self.update.local_tensors(self.parts), self.options)
        return take

    def _write_decision(self, manifest: ArtifactManifest, artifacts: Artifacts) -> str | None:
        """Write the decision when the payloads of all ranks are there. The problem; _OTHER: there is one."""
        patience = self.ranks.timeout + artifacts.deadline
        own = _problem_of(self.upload.result) if self.upload is not None else None
        problems = self.ranks.gather(own, "payloads", patience=patience)
        problem: str | None = next((each for each in problems if each), None)
        if problem is None and self.ranks.leads:
            written: list[bool] = []
            problem = _problem_of(lambda: written.append(write_decision(artifacts, manifest)))
            problem = _OTHER if written == [False] else problem
        problem = self.ranks.gather(problem, "the decision is written", patience=patience)[0]
        if problem not in (None, _OTHER):
            if artifacts.on_error == "raise":
                raise ArtifactError(f"{problem}; nothing has changed: run the window again")
            _log.warning("window %d: %s", manifest.plan.window, problem)
        return problem

    def _compare_weights(self) -> Fingerprint:
        """The fingerprint of weights and momentum. All ranks raise UsageError if theirs differ."""
        found = self.update.fingerprint(self.parameters, ranks=self.ranks)
        hashes = self.ranks.gather(found.hash, "fingerprints")
        others = [rank for rank, each in zip(self.ranks.members, hashes, strict=True) if each != found.hash]
        if others:
            raise UsageError(
                f"rank {self.ranks.rank} and rank {others[0]} have different weights: "
                "were they equal before the window? reload a checkpoint"
            )
        return found

    def _publish_weights(self, outcome: WindowReport) -> None:
        """Record the weights of this node after the window, and compare those of the others."""
        plan, artifacts, found = outcome.result.plan, self.artifacts, outcome.fingerprint
        assert artifacts is not None
        if self.late_run is None and outcome.artifact_error is None:

            def record() -> None:
                if self.ranks.leads and found is not None:
                    record_weights(artifacts, plan, found)
                if self.ranks.leads and artifacts.keep is not None:
                    prune_artifacts(artifacts, plan.run, keep=artifacts.keep)

            problems = self.ranks.gather(_problem_of(record), "weights recorded", patience=artifacts.deadline)
            if problems[0] is not None:
                self._fail_after(problems[0])
        if found is not None:
            self._compare_nodes(plan.run, plan.window, found)

    def _compare_nodes(self, run: str, window: int | None, found: Fingerprint) -> None:
        """Note and log the nodes that had other weights after a window."""
        artifacts = self.artifacts
        assert artifacts is not None
        others: list[str] = []

        def compare() -> None:
            nodes = weights_of_nodes(artifacts, run, window) if window is not None else {}
            others.extend(node for node, hashes in nodes.items() if hashes != {found.hash})
            stated = None if self.followed is None else self.followed.weights
            if self.stage == "final" and stated not in (None, found.hash):
                others.append("the writer of the manifest")

        problem = _problem_of(compare) if self.ranks.leads else None
        problem, named = self.ranks.gather(
            [problem, others], "weights of the nodes", patience=artifacts.deadline
        )[0]
        if problem is not None:
            self._fail_after(problem)
        if named:
            _log.error(
                "node %s: after window %s other weights on %s", artifacts.node, window, ", ".join(named)
            )
            self.differing |= set(named)

    def _fail_after(self, problem: str) -> None:
        assert self.artifacts is not None
        done = "the window itself is complete" if self.stage == "final" else "nothing has changed"
        if self.artifacts.on_error == "raise":
            raise ArtifactError(f"{problem}; {done}")
        _log.warning("%s; %s", problem, done)

    # ---- losing a rank

    def _continue_without(self, broken: BrokenExchange) -> None:
        """Continue with the ranks that are left, or raise on all of them why that is not possible."""
        what, _, _ = str(broken).partition(":")
        plan = self.plan
        patience = max(self.ranks.timeout, 0.0 if plan is None else plan.gather.deadline)
        lost: list[int] = []
        while True:
            lost += self.ranks.reform(what, patience)
            # Rows of tables belong to the caller: a snapshot does not have them.
            can_undo = self.saved is not None and self.saved.can_restore
            mine = {
                "stage": self.stage,
                "undo": can_undo and not self.update.schema.tables,
                "attempt": -1 if plan is None and self.late_run is None else self.attempt,
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
        if plan is not None or self.late_run is not None:
            self.attempt = max(each["attempt"] for each in states) + 1
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
            self.update.outer_step, self.update.last_window = self.counters
            self.stage = "fresh"

    def _torn(self, why: str) -> UsageError:
        with suppress(RuntimeError):
            self.ranks.close()
        return UsageError(f"{TORN}{why}")


_OTHER = "another node has decided"


def _problem_of(work: Callable[[], object]) -> str | None:
    try:
        work()
    except (ArtifactError, OSError) as error:
        return str(error)
    return None


def _as_decided(result: GatherResult, manifest: ArtifactManifest) -> GatherResult:
    """A result with the records that the decision has: skipped peers were not fetched here."""
    skipped = {
        uid: Record(uid, tier_of(manifest.plan, uid), status, "by the decision that was followed")
        for uid, status in manifest.skipped.items()
    }
    return replace(result, records={**result.records, **skipped})


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
    middles = result.norm_medians.values()
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
