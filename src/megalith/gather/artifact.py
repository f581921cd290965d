"""Artifacts: what a window leaves in a store, and catching up, which replays windows from it.

    artifacts/RUN/WINDOW/payloads/UID.gather    an accepted payload, written by the rank that holds it
    artifacts/RUN/WINDOW/manifest.json          written last, by the first rank: the artifact is complete

Payloads are uploaded in the background while the weights are stepped. Nothing in an artifact comes from a
clock or a rank: its bytes do not depend on the number of ranks.

Windows are replayed through the same update code with the same order, settings and factors, by one process or
by ranks that share the work. The hashes of the weights before and after each window are compared. An error on
one rank is raised on all, so that none waits for another.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from torch import Tensor

from megalith.distributed.elastic_ranks import ElasticRanks
from megalith.distributed.ranks import BrokenExchange
from megalith.distributed.tensor_parts import Fingerprint
from megalith.errors import ArtifactError, InputError, RankTimeoutError
from megalith.gather.fetch import FetchOptions, Gatherer
from megalith.gather.payload_schema import PayloadSchema, Weights
from megalith.gather.plan import GatherPlan, Location, Status, deal
from megalith.gather.reduce import clip_factors
from megalith.gather.result import Decision, Gathered, GatherResult, SkipReason, as_result
from megalith.gather.table_rows import ApplyRows, TableShards
from megalith.gather.update import OuterUpdate
from megalith.ops import checks
from megalith.storage.bodies import ObjectBody, put_bodies
from megalith.storage.json_codec import Sha256, canonical_json, from_json, parse_json_object, to_json
from megalith.storage.object_store import ObjectStore, RequestFailure, StoreRequestError
from megalith.storage.retries import persist, run_async

T = TypeVar("T")
FORMAT = "megalith-gather-artifact"
VERSION = 2
MAX_MANIFEST_BYTES = 1 << 28
_DEADLINE = 30.0  # seconds at least for the payloads of a replay, for which nobody waits


@dataclass(frozen=True, kw_only=True)
class ArtifactEntry:
    """An accepted peer."""

    uid: int  # The peer
    digest: Sha256  # The digest of its payload
    norms: tuple[float, ...]  # Its norm of each parameter and table
    factors: tuple[float, ...]  # What its values were multiplied with; empty if it was excluded


@dataclass(frozen=True, kw_only=True)
class ArtifactManifest:
    """The manifest of one window.

    Attributes:
        plan: The plan, as of attempt 0.
        schema: The schema.
        entries: The accepted peers in canonical order.
        skipped: The status of each skipped peer.
        excluded: Accepted peers that were left out.
        gram: The Gram matrix; empty if it was not computed.
        reason: GO, or why the window had no update.
        outer_step: The number of steps after the window.
        weights_before: The hash of weights and momentum before the step; None if it was not computed.
        weights: The hash after the step.
        fingerprint: Norm, mean and 64 bits of the hash of each parameter.
        format: FORMAT.
        version: VERSION.
    """

    plan: GatherPlan
    schema: PayloadSchema
    entries: tuple[ArtifactEntry, ...]
    skipped: Mapping[int, Status]
    excluded: tuple[int, ...]
    gram: tuple[tuple[int, ...], ...]
    reason: SkipReason
    outer_step: int
    weights_before: Sha256 | None
    weights: Sha256 | None
    fingerprint: Mapping[str, tuple[float | None, float | None, int]] = field(default_factory=dict)
    format: str = FORMAT
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.format != FORMAT or self.version != VERSION:
            raise InputError(f"format must be {FORMAT!r}, version {VERSION}")
        uids, names = self.uids, self.schema.names
        known, primaries = {*self.plan.primary, *self.plan.reserve}, set(self.plan.primary)
        if self.plan.schema != self.schema.digest:
            raise InputError("schema is not that of the plan")
        if len(set(uids)) != len(uids) or not set(uids) <= known or not set(self.excluded) <= set(uids):
            raise InputError("entries and excluded must be distinct uids of the plan")
        if list(uids) != sorted(uids, key=lambda uid: (uid not in primaries, uid)):
            raise InputError("entries must be in canonical order")
        for entry in self.entries:
            if len(entry.norms) != len(names) or len(entry.factors) not in (0, len(names)):
                raise InputError(
                    f"entries: norms and factors of uid {entry.uid} must have {len(names)} numbers"
                )
            if not all(0 <= number < 1e300 for number in (*entry.norms, *entry.factors)):
                raise InputError(f"entries: norms and factors of uid {entry.uid} must be 0 or more")
        shapes = {len(self.gram), *map(len, self.gram)}
        if (self.gram and shapes != {len(uids)}) or any(n < 0 for row in self.gram for n in row):
            raise InputError(f"gram must be empty or {len(uids)} by {len(uids)} counts")
        checks.integer(self.outer_step, "outer_step", 0)

    @property
    def go(self) -> bool:
        """Whether the window had an update."""
        return self.reason is SkipReason.GO

    @property
    def uids(self) -> tuple[int, ...]:
        """Accepted peers in canonical order."""
        return tuple(entry.uid for entry in self.entries)

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        return canonical_json(to_json(self))

    @classmethod
    def from_bytes(cls, text: bytes, where: str) -> ArtifactManifest:
        """Read the file.

        Args:
            text: Its content.
            where: Its name, for messages.

        Returns:
            The manifest.

        Raises:
            ArtifactError: A field is missing or wrong; the message names it.
        """
        fields = parse_json_object(text, lambda problem: ArtifactError(f"{where}: {problem}"))
        return from_json(cls, fields)


def artifact_key(run: str, window: int, uid: int | None = None) -> str:
    """Return the key of a manifest, or of a payload of an artifact."""
    return f"artifacts/{run}/{window}/" + ("manifest.json" if uid is None else f"payloads/{uid}.gather")


def make_manifest(
    gathered: Gathered,
    decision: Decision,
    *,
    gram: Tensor | None = None,
    excluded: Sequence[int] = (),
    outer_step: int,
    weights_before: str | None = None,
    after: Fingerprint | None = None,
) -> ArtifactManifest:
    """Make the manifest of a window."""
    result = as_result(gathered)
    plan = replace(result.plan, attempt=0)
    left_out = set(excluded)
    used = [uid for uid in result.uids if uid not in left_out]
    factors = clip_factors(result.norm_table(used), plan.update).tolist()
    by_uid = dict(zip(used, factors, strict=True))
    return ArtifactManifest(
        plan=plan,
        schema=result.schema,
        entries=tuple(
            ArtifactEntry(
                uid=uid,
                digest=result.records[uid].digest or "",
                norms=result.accepted[uid].norms,
                factors=tuple(by_uid.get(uid, ())),
            )
            for uid in result.uids
        ),
        skipped={uid: result.records[uid].status for uid in result.skipped_uids},
        excluded=tuple(uid for uid in result.uids if uid in left_out),
        gram=() if gram is None else tuple(map(tuple, gram.tolist())),
        reason=decision.reason,
        outer_step=outer_step,
        weights_before=weights_before,
        weights=None if after is None else after.hash,
        fingerprint={} if after is None else after.to_json(),  # type: ignore[arg-type]
    )


def upload_payloads(store: ObjectStore, gathered: Gathered, *, deadline: float = 600.0) -> Future[None]:
    """Start to write the payloads that this process holds, in the background."""
    result = as_result(gathered)
    run, window = result.plan.run, result.plan.window
    bodies = {artifact_key(run, window, uid): each.body for uid, each in result.payloads.items()}

    def write() -> None:
        try:
            what = f"writing {len(bodies)} payloads"
            run_async(put_bodies(store, bodies, deadline=deadline), what, deadline=deadline * len(bodies))
        except Exception as error:
            raise ArtifactError(f"the artifact of window {window} cannot be written: {error}") from None

    pool = ThreadPoolExecutor(1, "megalith-artifact")
    try:
        return pool.submit(write)
    finally:
        pool.shutdown(wait=False)


def write_manifest(store: ObjectStore, manifest: ArtifactManifest, *, deadline: float = 120.0) -> None:
    """Write the manifest: then the artifact is complete."""
    key, data = artifact_key(manifest.plan.run, manifest.plan.window), manifest.to_bytes()
    _request(lambda limit: store.put(key, data, timeout=limit), deadline, f"{key!r} cannot be written")


def read_artifact_manifest(
    store: ObjectStore, run: str, window: int, *, deadline: float = 120.0
) -> ArtifactManifest | None:
    """Read the manifest of a window.

    Args:
        store: Where artifacts are.
        run: The run.
        window: The window.
        deadline: Seconds for each request.

    Returns:
        The manifest; None if there is none.

    Raises:
        ArtifactError: It is damaged or cannot be read.
    """
    checks.instance(store, ObjectStore, "artifacts")
    key = artifact_key(checks.text(run, "run"), checks.integer(window, "window", 0))
    try:
        body = ObjectBody(store, key, deadline=checks.seconds(deadline, "deadline"))
        if body.size > MAX_MANIFEST_BYTES:
            raise ArtifactError(f"{key!r} has {body.size} bytes, more than a manifest can have")
        text = body.source()
    except StoreRequestError as error:
        if error.failure is RequestFailure.NOT_FOUND:
            return None
        raise ArtifactError(f"{key!r} cannot be read: {error}") from None
    manifest = ArtifactManifest.from_bytes(text, key)
    if (manifest.plan.run, manifest.plan.window) != (run, window):
        raise ArtifactError(f"{key!r} belongs to run {manifest.plan.run!r}, window {manifest.plan.window}")
    return manifest


def prune_artifacts(store: ObjectStore, run: str, *, keep: int, deadline: float = 120.0) -> tuple[int, ...]:
    """Delete the artifacts of old windows.

    Args:
        store: Where artifacts are.
        run: The run.
        keep: How many of the latest windows are kept.
        deadline: Seconds for each request.

    Returns:
        The windows that were deleted, ascending.

    Raises:
        ArtifactError: The store cannot be listed, or an object cannot be deleted.
    """
    checks.integer(keep, "keep", 0)
    checks.instance(store, ObjectStore, "artifacts")
    checks.seconds(deadline, "deadline")
    prefix = f"artifacts/{checks.text(run, 'run')}"
    problem = f"old artifacts of run {run!r} cannot be deleted"
    windows: dict[int, list[str]] = {}
    for info in _request(lambda limit: store.list(prefix, timeout=limit), deadline, problem):
        number = info.key.removeprefix(prefix + "/").partition("/")[0]
        if number.isascii() and number.isdecimal():
            windows.setdefault(int(number), []).append(info.key)
    old = sorted(windows)[: max(0, len(windows) - keep)]
    for window in old:
        # The manifest first: an artifact without one is not complete.
        for key in sorted(windows[window], key=lambda key: not key.endswith("/manifest.json")):
            _request(lambda limit, key=key: store.delete(key, timeout=limit), deadline, problem)  # type: ignore[misc]
    return tuple(old)


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
    ranks: ElasticRanks | None = None,
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
    together = ElasticRanks.or_alone(ranks)
    if memory_budget is not None:
        checks.integer(memory_budget, "memory_budget")
    applied, skipped, missing = [], [], []
    try:
        for window in checks.items(windows, "windows", "integers"):
            read = partial(_next_manifest, store, run, window, update, missing_ok)
            manifest = together.agree(read, "manifest")
            if manifest is None:
                missing.append(window)
                continue
            if not manifest.go:
                skipped.append(window)
                continue
            if memory_budget is not None:
                manifest = replace(manifest, plan=replace(manifest.plan, memory_budget=memory_budget))
            together.agree(partial(update.parts, parameters, together), "parameters")
            before, after = manifest.weights_before, manifest.weights
            if before is not None and update.fingerprint(parameters, ranks=together).hash != before:
                raise ArtifactError(f"the weights are not those before window {window}")
            with closing(load_artifact(store, manifest, ranks=together, options=options)) as result:
                update.apply(
                    parameters,
                    result,
                    ranks=together,
                    exclude=manifest.excluded,
                    tables=tables,
                    apply_rows=apply_rows,
                )
            if after is not None and update.fingerprint(parameters, ranks=together).hash != after:
                raise ArtifactError(f"window {window} produced different weights than its manifest states")
            applied.append(window)
    except BrokenExchange as error:
        raise RankTimeoutError(f"a rank was lost while catching up: {error}") from error
    return CatchUp(tuple(applied), tuple(skipped), tuple(missing))


def load_artifact(
    store: ObjectStore,
    manifest: ArtifactManifest,
    *,
    ranks: ElasticRanks | None = None,
    options: FetchOptions | None = None,
) -> GatherResult:
    """Load the payloads of an artifact, validated again. A collective call with ranks.

    Args:
        store: Where artifacts are.
        manifest: The manifest.
        ranks: The ranks, each of which fetches a share of the payloads.
        options: How to fetch.

    Returns:
        A result like any other. Close it after use.

    Raises:
        ArtifactError: A payload is missing, damaged, or different from what the manifest names.
    """
    plan = checks.instance(manifest, ArtifactManifest, "manifest").plan
    together = ElasticRanks.or_alone(ranks)
    places = {uid: Location(artifact_key(plan.run, plan.window, uid)) for uid in manifest.uids}
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
        place, stores = {"rank": together.rank, "world_size": together.size}, {"default": store}
        made = Gatherer(replay, manifest.schema, stores, **place, options=options)
        made.fetch(deal(manifest.uids, [0] * together.size)[together.place])
        return made

    result = together.agree(fetch, "payloads", patience=replay.deadline).merge_with(together)
    for entry in manifest.entries:
        record = result.records[entry.uid]
        problem = record.detail if record.status is not Status.OK else ""
        if not problem and (record.digest, result.accepted[entry.uid].norms) != (entry.digest, entry.norms):
            problem = "its digest or norms are not those of the manifest"
        if problem:
            result.close()
            raise ArtifactError(f"window {plan.window}, payload of uid {entry.uid}: {problem}")
    return result


def _next_manifest(
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


def _request(call: Callable[[float], Awaitable[T]], deadline: float, problem: str) -> T:
    try:
        return run_async(persist(call, deadline=deadline), problem, deadline=deadline)
    except StoreRequestError as error:
        raise ArtifactError(f"{problem}: {error}") from None
