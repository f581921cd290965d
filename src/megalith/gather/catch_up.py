"""Catching up: windows replayed from their artifacts, with the same weights as those who took part.

Windows are replayed through the same update code with the same order, settings and factors, by one process or
by ranks that share the work. The hashes of the weights before and after each window are compared. An error on
one rank is raised on all, so that none waits for another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from megalith.distributed.surviving_ranks import BrokenExchange, Ranks
from megalith.errors import ArtifactError, InputError, RankTimeoutError
from megalith.gather.artifact import ArtifactManifest, artifact_payload_key, read_artifact_manifest
from megalith.gather.fetch import FetchOptions, Gatherer
from megalith.gather.payload_schema import Weights
from megalith.gather.plan import Location, Status, deal
from megalith.gather.result import GatherResult
from megalith.gather.table_rows import ApplyRows, TableShards
from megalith.gather.update import OuterUpdate
from megalith.ops import checks
from megalith.storage.object_store import ObjectStore

_DEADLINE = 30.0  # seconds at least for the payloads, for which nobody waits here


@dataclass(frozen=True)
class CatchUp:
    """What catching up did.

    Attributes:
        applied: Windows that were applied.
        skipped: Windows that had no update, by their manifests.
        missing: Windows without an artifact.
    """

    applied: tuple[int, ...]
    skipped: tuple[int, ...]
    missing: tuple[int, ...]


def catch_up(
    store: ObjectStore,
    parameters: Weights,
    update: OuterUpdate,
    *,
    run: str,
    windows: Iterable[int],
    ranks: Ranks | None = None,
    tables: TableShards | None = None,
    apply_rows: ApplyRows | None = None,
    missing_ok: bool = False,
    memory_budget: int | None = None,
    options: FetchOptions | None = None,
) -> CatchUp:
    """Replay windows, in this order, on the weights before the first of them.

    Args:
        store: Where artifacts are.
        parameters: The weights before the first window; they change in place, and may be sharded over ranks.
        update: The outer optimizer as it was then, momentum included.
        run: The run.
        windows: The windows.
        ranks: The ranks that share the work; all of them call this function.
        tables: The tables to which changes of rows are added, each row once.
        apply_rows: Called with all changes of rows, on every rank, instead of `tables`.
        missing_ok: Pass over windows without an artifact. The weights are then not those of the others, which
            the comparison of the next window reports.
        memory_budget: The budget of this node, if not that of the plans; it does not change weights.
        options: How to fetch.

    Returns:
        What was done with each window.

    Raises:
        ArtifactError: An artifact is missing, damaged or does not match, before its window changes anything;
            or the outcome of a window is different.
        InputError: An argument is wrong.
        RankFailedError: Another rank raised an error.
        RankTimeoutError: A rank was lost.
    """
    checks.instance(update, OuterUpdate, "update")
    together = Ranks.or_alone(ranks)
    if not isinstance(windows, Iterable) or isinstance(windows, str | bytes | Tensor):
        raise InputError(f"windows must be integers, got {checks.kind(windows)}")
    if memory_budget is not None:
        checks.integer(memory_budget, "memory_budget")
    applied, skipped, missing = [], [], []
    try:
        for window in windows:
            read = partial(_manifest, store, run, window, update, missing_ok)
            manifest = together.agree("manifest", read)
            if manifest is None:
                missing.append(window)
            elif not manifest.go:
                skipped.append(window)
            else:
                if memory_budget is not None:
                    manifest = replace(manifest, plan=replace(manifest.plan, memory_budget=memory_budget))
                _replay(store, manifest, parameters, update, together, tables, apply_rows, options)
                applied.append(window)
    except BrokenExchange as error:
        raise RankTimeoutError(f"a rank was lost while catching up: {error}") from error
    return CatchUp(tuple(applied), tuple(skipped), tuple(missing))


def load_artifact(
    store: ObjectStore, manifest: ArtifactManifest, *, options: FetchOptions | None = None
) -> GatherResult:
    """Load the payloads of an artifact, validated again.

    Args:
        store: Where artifacts are.
        manifest: The manifest.
        options: How to fetch.

    Returns:
        A result like any other. Close it after use.

    Raises:
        ArtifactError: A payload is missing, damaged, or different from what the manifest names.
    """
    checks.instance(manifest, ArtifactManifest, "manifest")
    return _load(store, manifest, Ranks.alone(), options)


def _manifest(
    store: ObjectStore, run: str, window: int, update: OuterUpdate, missing_ok: bool
) -> ArtifactManifest | None:
    """The manifest of a window, if it follows the steps so far; None if it is missing and may be."""
    manifest = read_artifact_manifest(store, run, window)
    if manifest is None and not missing_ok:
        raise ArtifactError(f"run {run!r} has no artifact of window {window}: start from a later checkpoint")
    if manifest is not None and manifest.go and update.outer_step + 1 != manifest.outer_step:
        raise ArtifactError(
            f"window {window} is outer step {manifest.outer_step}, "
            f"the update has made {update.outer_step} steps"
        )
    return manifest


def _load(
    store: ObjectStore, manifest: ArtifactManifest, ranks: Ranks, options: FetchOptions | None
) -> GatherResult:
    """The merged result; each rank fetches a share of the payloads."""
    plan = manifest.plan
    places = {u: Location(artifact_payload_key(plan.run, plan.window, u)) for u in manifest.uids}
    replay = replace(
        plan,
        primary=tuple(uid for uid in plan.primary if uid in places),
        reserve=tuple(uid for uid in plan.reserve if uid in places),
        locations=places,
        time_min=None,
        time_max=None,
        deadline=max(plan.deadline, _DEADLINE),
        formats=("megalith",),
    )

    def fetch() -> Gatherer:
        given = {"default": store}
        made = Gatherer(
            replay, manifest.schema, given, rank=ranks.rank, world_size=ranks.size, options=options
        )
        made.fetch(deal(manifest.uids, [0] * ranks.size)[ranks.place])
        return made

    result = ranks.agree("payloads", fetch, patience=replay.deadline).merge_with(ranks)
    for entry in manifest.entries:
        record = result.records[entry.uid]
        problem = record.detail if record.status is not Status.OK else ""
        if not problem and (record.digest, result.accepted[entry.uid].norms) != (entry.digest, entry.norms):
            problem = "its digest or norms are not those of the manifest"
        if problem:
            result.close()
            raise ArtifactError(f"window {plan.window}, payload of uid {entry.uid}: {problem}")
    return result


def _replay(
    store: ObjectStore,
    manifest: ArtifactManifest,
    parameters: Weights,
    update: OuterUpdate,
    ranks: Ranks,
    tables: TableShards | None,
    apply_rows: ApplyRows | None,
    options: FetchOptions | None,
) -> None:
    window = manifest.plan.window
    ranks.agree("parameters", lambda: update.parts(parameters, ranks))
    before = manifest.weights_before
    if before is not None and update.fingerprint(parameters, ranks=ranks).hash != before:
        raise ArtifactError(f"the weights are not those before window {window}")
    result = _load(store, manifest, ranks, options)
    try:
        update.apply(
            parameters,
            result,
            ranks=ranks,
            exclude=manifest.excluded,
            tables=tables,
            apply_rows=apply_rows,
        )
    finally:
        result.close()
    if manifest.weights is not None and update.fingerprint(parameters, ranks=ranks).hash != manifest.weights:
        raise ArtifactError(f"window {window} produced different weights than its manifest states")
