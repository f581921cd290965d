"""A whole window, in this process or with other ranks: gather, look for copies, decide, publish, update,
commit.

The order is that of many ranks: everything that can refuse does so before a weight changes, and the
manifest comes last.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from megalith.errors import BudgetError, InputError
from megalith.gather.artifact import write_manifest, write_payloads
from megalith.gather.budget import check_update_budget
from megalith.gather.decision import SkipReason, decide
from megalith.gather.fetch import FetchOptions
from megalith.gather.gatherer import gather
from megalith.gather.joint import JointWindow, WindowReport
from megalith.gather.manifest import make_manifest
from megalith.gather.merge import GatherResult
from megalith.gather.overlap import Overlap, excluded_uids, find_overlap
from megalith.gather.plan import Plan
from megalith.gather.ranks import Ranks
from megalith.gather.snapshot import Policy
from megalith.gather.store import Store
from megalith.gather.update import ApplyRows, OuterUpdate


def run_window(
    plan: Plan | None,
    parameters: nn.Module | Mapping[str, Tensor],
    update: OuterUpdate,
    stores: Mapping[str, Store],
    *,
    ranks: Ranks | None = None,
    artifacts: Store | None = None,
    apply_rows: ApplyRows | None = None,
    options: FetchOptions | None = None,
    snapshot: Policy = "none",
    snapshot_directory: Path | None = None,
    skip: bool = False,
) -> WindowReport:
    """Gathers a window and steps the weights, in place; a skipped window leaves them and the counter as
    they are.

    stores: by the names the plan uses. ranks: those who share the work and call this too; the plan may then
    be None on all but the first, and every rank calls apply_rows with all rows. artifacts: where the window
    is published for those who come late. skip: gather and tell, but leave the weights; the first rank's word
    counts. The result's payloads are closed when it returns.

    Raises InputError or BudgetError before any request, ArtifactError if the artifact cannot be written, and
    what `OuterUpdate.apply` raises; with ranks, RankFailedError for an error of another rank and
    RankTimeoutError if too few are left.
    """
    if ranks is not None:
        joint = JointWindow(
            plan,
            parameters,
            update,
            stores,
            ranks,
            artifacts=artifacts,
            apply_rows=apply_rows,
            options=options,
            snapshot=snapshot,
            snapshot_directory=snapshot_directory,
            skip=skip,
        )
        return joint.run()
    if plan is None:
        raise InputError("a plan is needed")
    result = gather(plan, update.schema, stores, options=options)
    try:
        overlap, refuse = _overlap(result)
        left_out = () if overlap is None else excluded_uids(overlap, plan.overlap)
        if refuse is SkipReason.GO and not _fits(result, len(result.uids) - len(left_out)):
            refuse = SkipReason.BUDGET_TOO_SMALL
        if skip:
            refuse = SkipReason.OPERATOR
        decision = decide(result, excluded=left_out, refuse=refuse)
        before = update.fingerprint(parameters).hash if artifacts is not None else None
        if artifacts is not None:
            write_payloads(artifacts, result)
        report = None
        if decision.go:
            report = update.apply(
                parameters,
                result,
                exclude=left_out,
                apply_rows=apply_rows,
                snapshot=snapshot,
                snapshot_directory=snapshot_directory,
            )
        after = update.fingerprint(parameters) if decision.go or artifacts is not None else None
        if artifacts is not None:
            manifest = make_manifest(
                result,
                decision,
                gram=None if overlap is None else overlap.gram,
                excluded=left_out,
                outer_step=update.outer_step,
                weights_before=before,
                after=after,
            )
            write_manifest(artifacts, manifest)
        return WindowReport(result, overlap, decision, report, after)
    finally:
        result.close()


def _overlap(result: GatherResult) -> tuple[Overlap | None, SkipReason]:
    try:
        return find_overlap(result), SkipReason.GO
    except BudgetError:
        return None, SkipReason.BUDGET_TOO_SMALL


def _fits(result: GatherResult, num_peers: int) -> bool:
    try:
        check_update_budget(result.schema, result.plan.update, num_peers, result.plan.memory_budget)
    except BudgetError:
        return False
    return True
