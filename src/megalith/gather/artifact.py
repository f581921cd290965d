"""Artifacts: the decisions of a run in a store, and what is needed to follow them.

A decision says which payloads a window applies, or why it applies none. Nodes that share a run come to one
sequence of decisions, because each is written under the window that it follows, and only if nothing is there:

    artifacts/RUN/WINDOW/payloads/UID-DIGEST.gather  an accepted payload, before the decision that names it
    artifacts/RUN/decisions/AFTER.json               the decision that follows window AFTER ("first": none)
    artifacts/RUN/WINDOW/weights/NODE-HASH.json      the fingerprint of a node's weights after the window

A node applies what the decision after its last window says, whoever wrote it. So nodes with equal weights
stay equal; a node that missed windows catches up; a node that differs finds out by the hash of the weights
before the window, which the decision states, or by the hashes that the nodes write after it. Nothing in a
decision comes from a clock or a rank: its bytes do not depend on the number of ranks.

Up to version 2 the manifest of a window was written after its step, as artifacts/RUN/WINDOW/manifest.json
next to payloads/UID.gather. These are still followed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from torch import Tensor

from megalith.distributed.tensor_parts import Fingerprint
from megalith.errors import ArtifactError, InputError
from megalith.gather.payload_schema import PayloadSchema
from megalith.gather.plan import GatherConfig, GatherPlan, Location, Status
from megalith.gather.reduce import clip_factors
from megalith.gather.result import Decision, GatherResult, SkipReason
from megalith.ops import checks
from megalith.storage.bodies import ObjectBody, put_bodies
from megalith.storage.json_codec import (
    NOT_SAVED,
    JsonFields,
    Sha256,
    canonical_json,
    from_json,
    parse_json_object,
    to_json,
)
from megalith.storage.object_store import ObjectStore, RequestFailure, StoreRequestError
from megalith.storage.retries import persist, run_async

T = TypeVar("T")
FORMAT = "megalith-gather-artifact"
VERSION = 3
MAX_MANIFEST_BYTES = 1 << 28
_LEAST_SECONDS = 30.0  # for the payloads of a decision that is followed: no peer is waited for
# Fields of a plan up to version 2:
_OF_GATHER = [each.name for each in fields(GatherConfig) if each.name != "require_weights"]


@dataclass(frozen=True)
class Artifacts:
    """Where the decisions of a run are kept, and how this node takes part in them."""

    store: ObjectStore
    """The store, the same for all nodes of the run."""
    _: KW_ONLY
    node: str = "node"
    """The name of this node, different on each: letters, digits, ".", "-" and "_"."""
    wait: float = 0.0
    """Seconds for which this node leaves a window to the others; then it decides itself. 0: at once."""
    keep: int | None = None
    """How many of the latest windows are kept; None: all."""
    on_error: Literal["raise", "warn"] = "raise"
    """What happens if a decision cannot be written: raise, and nothing has changed; or report it and go on,
    which only a node that has the run to itself may do. `write_artifact` then writes it later."""
    deadline: float = 60.0
    """Seconds for which a request is repeated."""

    def __post_init__(self) -> None:
        checks.instance(self.store, ObjectStore, "artifacts: store")
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", checks.text(self.node, "artifacts: node")):
            raise InputError(
                f"artifacts: node must have 1 to 64 letters, digits, . - _, got {self.node!r:.80}"
            )
        checks.seconds(self.wait, "artifacts: wait", zero=True)
        checks.seconds(self.deadline, "artifacts: deadline")
        if self.keep is not None:
            checks.integer(self.keep, "artifacts: keep")
        checks.one_of(self.on_error, ("raise", "warn"), "artifacts: on_error")

    @classmethod
    def of(cls, given: Artifacts | ObjectStore) -> Artifacts:
        """Return the artifacts of a node that has a store to itself, or what is given.

        Args:
            given: The artifacts, or their store.

        Returns:
            The artifacts.
        """
        return given if isinstance(given, Artifacts) else cls(given)


@dataclass(frozen=True, kw_only=True)
class ArtifactEntry:
    """An accepted peer."""

    uid: int  # The peer
    digest: Sha256  # The digest of its payload
    norms: tuple[float, ...]  # Its norm of each parameter and table
    factors: tuple[float, ...]  # What its values were multiplied with; empty if it was excluded


@dataclass(frozen=True, kw_only=True)
class ArtifactManifest:
    """The decision of one window.

    Attributes:
        plan: The plan, as of attempt 0.
        schema: The schema.
        entries: The accepted peers in canonical order.
        skipped: The status of each skipped peer.
        excluded: Accepted peers that are left out.
        gram: The Gram matrix; empty if it was not computed.
        reason: GO, or why the window has no update.
        outer_step: The number of steps after the window.
        weights_before: The hash of weights and momentum before the window; None if it was not computed.
        previous: The window whose decision it follows; None if it is the first.
        format: FORMAT.
        version: VERSION.
        weights: The hash after the step, which manifests state up to version 2.
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
    previous: int | None
    format: str = FORMAT
    version: int = VERSION
    weights: str | None = field(default=None, metadata=NOT_SAVED)

    def __post_init__(self) -> None:
        if self.format != FORMAT or self.version not in (2, VERSION):
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
        if self.previous is not None and not 0 <= self.previous < self.plan.window:
            raise InputError(f"previous must be below window {self.plan.window}, got {self.previous}")

    @property
    def go(self) -> bool:
        """Whether the window has an update."""
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
        """Read the file; ArtifactError names a field that is missing or wrong."""
        found = parse_json_object(text, lambda problem: ArtifactError(f"{where}: {problem}"))
        earlier = found.data.get("version") == 2 and "previous" not in found.data  # or upgraded already
        weights = _upgraded(found) if earlier else None
        return from_json(cls, found, weights=weights)

    def replay(self, memory_budget: int | None) -> GatherPlan:
        """Return the plan by which its payloads are read from the store "artifacts"."""
        plan, wanted = self.plan, set(self.uids) if self.go else set()
        places = {each.uid: Location(self._key(each), "artifacts") for each in self.entries}
        return replace(
            plan,
            primary=tuple(uid for uid in plan.primary if uid in wanted),
            reserve=tuple(uid for uid in plan.reserve if uid in wanted),
            locations=places,
            time_min=None,
            time_max=None,
            gather=replace(
                plan.gather,
                deadline=max(plan.gather.deadline, _LEAST_SECONDS),
                formats=("megalith",),
                memory_budget=memory_budget or plan.gather.memory_budget,
            ),
        )

    def _key(self, entry: ArtifactEntry) -> str:
        folder = f"artifacts/{self.plan.run}/{self.plan.window}/payloads"
        return (
            f"{folder}/{entry.uid}.gather"
            if self.version == 2
            else f"{folder}/{entry.uid}-{entry.digest}.gather"
        )

    def check(self, result: GatherResult) -> None:
        """Raise ArtifactError unless a result has exactly the payloads that are named here."""
        for entry in self.entries if self.go else ():
            record, found = result.records.get(entry.uid), result.accepted.get(entry.uid)
            if record is None or found is None:
                problem = "no rank has fetched it" if record is None else record.detail or str(record.status)
            elif (record.digest, found.norms) != (entry.digest, entry.norms):
                problem = "its digest or norms are not those of the decision"
            else:
                continue
            raise ArtifactError(f"window {self.plan.window}, payload of uid {entry.uid}: {problem}")


def _upgraded(given: JsonFields) -> str | None:
    """Give a manifest of version 2 the fields of version 3; its hash of the weights after the step."""
    data, plan = given.data, given.object("plan").data
    plan["gather"] = {name: plan.pop(name) for name in _OF_GATHER if name in plan}
    plan["gather"]["require_weights"] = False
    plan |= {"skip": False, "weights": None}
    given.object("fingerprint")
    weights = None if data.get("weights", "") is None else given.sha256("weights")
    for name in ("fingerprint", "weights"):
        data.pop(name)
    data["previous"] = None
    return weights


def make_manifest(
    result: GatherResult,
    decision: Decision,
    *,
    gram: Tensor | None,
    excluded: tuple[int, ...],
    outer_step: int,
    weights_before: str | None,
    previous: int | None,
) -> ArtifactManifest:
    """Make the decision of a window. outer_step: before it."""
    used = [uid for uid in result.uids if uid not in excluded]
    factors = clip_factors(result.norm_table(used), result.plan.update).tolist()
    by_uid = dict(zip(used, factors, strict=True))
    return ArtifactManifest(
        plan=replace(result.plan, attempt=0),
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
        excluded=tuple(uid for uid in result.uids if uid in excluded),
        gram=() if gram is None else tuple(map(tuple, gram.tolist())),
        reason=decision.reason,
        outer_step=outer_step + decision.go,
        weights_before=weights_before,
        previous=previous,
    )


def upload_payloads(artifacts: Artifacts, result: GatherResult, deadline: float) -> Future[None]:
    """Start to write the payloads that this process holds, in the background."""
    folder = f"artifacts/{result.plan.run}/{result.plan.window}/payloads"
    bodies = {
        f"{folder}/{uid}-{each.header.digest}.gather": each.body for uid, each in result.payloads.items()
    }

    def write() -> None:
        try:
            run_async(put_bodies(artifacts.store, bodies, create=True, deadline=deadline))
        except Exception as error:
            window = result.plan.window
            raise ArtifactError(f"the artifact of window {window} cannot be written: {error}") from None

    pool = ThreadPoolExecutor(1, "megalith-artifact")
    try:
        return pool.submit(write)
    finally:
        pool.shutdown(wait=False)


def write_decision(artifacts: Artifacts, manifest: ArtifactManifest) -> bool:
    """Write a decision unless there is one. Whether it holds: also if it was written before."""
    key, data = _decision_key(manifest.plan.run, manifest.previous), manifest.to_bytes()
    problem = f"the artifact of window {manifest.plan.window}, {key!r}, cannot be written"
    if _request(artifacts, lambda limit: artifacts.store.put(key, data, create=True, timeout=limit), problem):
        return True
    return _read(artifacts, key) == data  # a request that was repeated may have written it


def next_decision(
    artifacts: Artifacts, run: str, last: int | None, *, wait: float = 0.0, earlier: bool = False
) -> ArtifactManifest | None:
    """Return the decision that follows a window; None if there is none within `wait` seconds."""
    # earlier: look for manifests of version 2 also if there is no later decision.
    key, end = _decision_key(run, last), time.monotonic() + wait
    while (text := _read(artifacts, key)) is None:
        left = end - time.monotonic()
        if left <= 0:
            return _manifest_after(artifacts, run, -1 if last is None else last, earlier=earlier)
        time.sleep(min(left, max(0.02, min(1.0, wait / 50))))
    manifest = ArtifactManifest.from_bytes(text, key)
    if (manifest.plan.run, manifest.previous) != (run, last):
        raise ArtifactError(f"{key!r} is of run {manifest.plan.run!r} and follows window {manifest.previous}")
    return manifest


def _manifest_after(artifacts: Artifacts, run: str, last: int, *, earlier: bool) -> ArtifactManifest | None:
    """The manifest of version 2 that comes next. ArtifactError: only later decisions are there."""
    problem = f"run {run!r} cannot be listed"
    keys = [info.key for info in _listed(artifacts, f"artifacts/{run}/decisions", problem)]
    later = any(number > last for number in _numbers(keys, run, "decisions/", ".json"))
    if later or earlier:
        keys = [info.key for info in _listed(artifacts, f"artifacts/{run}", problem)]
        windows = [number for number in _numbers(keys, run, "", "/manifest.json") if number > last]
        if windows:
            return read_artifact_manifest(artifacts, run, min(windows))
    if later:
        what = "the first decision" if last < 0 else f"the decision after window {last}"
        raise ArtifactError(
            f"run {run!r}: {what} is missing, but there are later ones: if it was deleted, start from a "
            "later checkpoint; if its upload failed, call write_artifact on the node that made it"
        )
    return None


def record_weights(artifacts: Artifacts, plan: GatherPlan, found: Fingerprint) -> None:
    """Write the fingerprint that this node has after a window."""
    key = f"artifacts/{plan.run}/{plan.window}/weights/{artifacts.node}-{found.hash}.json"
    data = canonical_json(found.to_json())
    problem = f"the weights after window {plan.window} cannot be recorded"
    _request(artifacts, lambda limit: artifacts.store.put(key, data, timeout=limit), problem)


def weights_of_nodes(artifacts: Artifacts, run: str, window: int) -> dict[str, set[str]]:
    """Return the hashes of the weights after a window, by node."""
    prefix = f"artifacts/{run}/{window}/weights"
    found: dict[str, set[str]] = {}
    for info in _listed(artifacts, prefix, f"the weights after window {window} cannot be listed"):
        node, _, hash = info.key.removeprefix(prefix + "/").removesuffix(".json").rpartition("-")
        found.setdefault(node, set()).add(hash)
    return found


def read_artifact_manifest(
    artifacts: Artifacts | ObjectStore, run: str, window: int
) -> ArtifactManifest | None:
    """Read the decision of a window.

    Args:
        artifacts: The artifacts, or their store.
        run: The run.
        window: The window.

    Returns:
        The decision; None if there is none.

    Raises:
        ArtifactError: It is damaged or cannot be read.
    """
    given = Artifacts.of(artifacts)
    checks.integer(window, "window", 0)
    prefix = f"artifacts/{checks.text(run, 'run')}/decisions"
    found = [info.key for info in _listed(given, prefix, f"run {run!r} cannot be listed")]
    before = [number for number in _numbers(found, run, "decisions/", ".json") if number < window]
    key = _decision_key(run, max(before, default=None))
    for each in (key, f"artifacts/{run}/{window}/manifest.json"):
        text = _read(given, each)
        manifest = None if text is None else ArtifactManifest.from_bytes(text, each)
        if manifest is not None and (manifest.plan.run, manifest.plan.window) == (run, window):
            return manifest
        if manifest is not None and each != key:
            raise ArtifactError(
                f"{each!r} belongs to run {manifest.plan.run!r}, window {manifest.plan.window}"
            )
    return None


def prune_artifacts(artifacts: Artifacts | ObjectStore, run: str, *, keep: int) -> tuple[int, ...]:
    """Delete the artifacts of old windows.

    Args:
        artifacts: The artifacts, or their store.
        run: The run.
        keep: How many of the latest windows are kept.

    Returns:
        The windows whose payloads or fingerprints were deleted, ascending.

    Raises:
        ArtifactError: The store cannot be listed, or an object cannot be deleted.
    """
    checks.integer(keep, "keep")
    given = Artifacts.of(artifacts)
    problem = f"old artifacts of run {checks.text(run, 'run')!r} cannot be deleted"
    keys = [info.key for info in _listed(given, f"artifacts/{run}", problem)]
    after = set(_numbers(keys, run, "decisions/", ".json"))
    folders = set(_numbers(keys, run, "", "/"))
    deleted = sorted(folders | after)[:-keep]
    # A decision is stored under the window before: that of the last deleted window is the one to keep.
    old = [_decision_key(run, number) for number in (None, *after) if deleted and (number or 0) < deleted[-1]]
    old += [key for key in keys if any(key.startswith(f"artifacts/{run}/{window}/") for window in deleted)]
    for key in old:  # decisions first: without it, payloads are not an artifact
        _request(given, lambda limit, key=key: given.store.delete(key, timeout=limit), problem)  # type: ignore[misc]
    return tuple(window for window in deleted if window in folders)


def _decision_key(run: str, last: int | None) -> str:
    return f"artifacts/{run}/decisions/{'first' if last is None else last}.json"


def _numbers(keys: list[str], run: str, before: str, after: str) -> list[int]:
    """The numbers in keys of a run, between two texts."""
    pattern = re.compile(re.escape(f"artifacts/{run}/{before}") + r"(\d{1,19})" + re.escape(after))
    return [int(found[1]) for found in map(pattern.match, keys) if found]


def _listed(artifacts: Artifacts, prefix: str, problem: str) -> list[Any]:
    return _request(artifacts, lambda limit: artifacts.store.list(prefix, timeout=limit), problem)


def _read(artifacts: Artifacts, key: str) -> bytes | None:
    """An object of limited size; None if there is none."""
    try:
        body = ObjectBody(artifacts.store, key, deadline=artifacts.deadline)
        if body.size > MAX_MANIFEST_BYTES:
            raise ArtifactError(f"{key!r} has {body.size} bytes, more than a manifest can have")
        return body.source()
    except StoreRequestError as error:
        if error.failure is RequestFailure.NOT_FOUND:
            return None
        raise ArtifactError(f"{key!r} cannot be read: {error}") from None


def _request(artifacts: Artifacts, call: Callable[[float], Awaitable[T]], problem: str) -> T:
    try:
        return run_async(persist(call, deadline=artifacts.deadline))
    except StoreRequestError as error:
        raise ArtifactError(f"{problem}: {error}") from None
