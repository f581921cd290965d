"""Artifacts: the validated payloads of a window and its manifest, for nodes that catch up later.

    artifacts/RUN/WINDOW/payloads/UID.gather    an accepted payload, written by the rank that holds it
    artifacts/RUN/WINDOW/manifest.json          written last, by the first rank: the artifact is complete

Payloads are uploaded in the background while the weights are stepped. Nothing in an artifact comes from a
clock or a rank: its bytes do not depend on the number of ranks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, TypeVar

from torch import Tensor

from megalith.errors import ArtifactError, InputError
from megalith.gather.payload_schema import PayloadSchema
from megalith.gather.plan import GatherPlan
from megalith.gather.reduce import clip_factors
from megalith.gather.result import Decision, Gathered, GatherResult, SkipReason, as_result
from megalith.gather.status import Status
from megalith.gather.weight_parts import Fingerprint
from megalith.ops import checks
from megalith.storage.json_records import Sha256, canonical_json, from_json, to_json
from megalith.storage.object_store import ObjectStore, RequestFailure, StoreRequestError
from megalith.storage.retries import persist, run_async
from megalith.storage.strict_json import parse_json_object

T = TypeVar("T")
FORMAT = "megalith-gather-artifact"
VERSION = 2
MAX_MANIFEST_BYTES = 1 << 28
_UPLOADS_AT_ONCE = 4


@dataclass(frozen=True, kw_only=True)
class ArtifactEntry:
    """An accepted peer.

    Attributes:
        uid: The peer.
        digest: The digest of its payload.
        norms: Its norm of each parameter and table.
        factors: What its values were multiplied with; empty if it was excluded.
    """

    uid: int
    digest: Sha256
    norms: tuple[float, ...]
    factors: tuple[float, ...]


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
        sizes = {len(row) for row in self.gram}
        if len(self.gram) not in (0, len(uids)) or not sizes <= {len(uids)} or any(map(_negative, self.gram)):
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


def _negative(row: tuple[int, ...]) -> bool:
    return any(number < 0 for number in row)


def artifact_prefix(run: str, window: int | None = None) -> str:
    """Return the prefix of artifacts.

    Args:
        run: The run.
        window: The window; None: all windows.

    Returns:
        The beginning of their keys, without a final "/".
    """
    return f"artifacts/{run}" if window is None else f"artifacts/{run}/{window}"


def manifest_key(run: str, window: int) -> str:
    """Return the key of a manifest.

    Args:
        run: The run.
        window: The window.

    Returns:
        The key.
    """
    return f"{artifact_prefix(run, window)}/manifest.json"


def artifact_payload_key(run: str, window: int, uid: int) -> str:
    """Return the key of a payload of an artifact.

    Args:
        run: The run.
        window: The window.
        uid: The peer.

    Returns:
        The key.
    """
    return f"{artifact_prefix(run, window)}/payloads/{uid}.gather"


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
    """Make the manifest of a window.

    Args:
        gathered: The result.
        decision: Whether the window had an update.
        gram: The Gram matrix.
        excluded: Accepted peers that were left out.
        outer_step: The number of steps after the window.
        weights_before: The hash before the step.
        after: The fingerprint after the step.

    Returns:
        The manifest.
    """
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


class PayloadUpload:
    """Writes the payloads that this process holds, in the background.

    Args:
        store: Where artifacts are.
        gathered: The result, whose payloads must stay open until `wait`.
        uids: The peers; None: all.
        deadline: Seconds for all uploads.
    """

    def __init__(
        self,
        store: ObjectStore,
        gathered: Gathered,
        uids: Sequence[int] | None = None,
        *,
        deadline: float = 600.0,
    ) -> None:
        checks.instance(store, ObjectStore, "artifacts")
        self._result = as_result(gathered)
        held = [uid for uid in self._result.uids if uid in self._result.payloads]
        self._uids = held if uids is None else [uid for uid in held if uid in set(uids)]
        self._store = store
        self._deadline = deadline
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="megalith-artifact", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all payloads are written.

        Raises:
            ArtifactError: One cannot be written.
        """
        self._thread.join()
        if self._error is not None:
            window = self._result.plan.window
            raise ArtifactError(f"the artifact of window {window} cannot be written: {self._error}")

    def _run(self) -> None:
        try:
            asyncio.run(self._write_all())
        except Exception as error:
            self._error = error

    async def _write_all(self) -> None:
        places = asyncio.Semaphore(_UPLOADS_AT_ONCE)
        await asyncio.gather(*(self._write(uid, places) for uid in self._uids))

    async def _write(self, uid: int, places: asyncio.Semaphore) -> None:
        plan = self._result.plan
        key = artifact_payload_key(plan.run, plan.window, uid)
        async with places:

            async def put(limit: float) -> bool:
                source: bytes | BinaryIO = self._result.payloads[uid].body.source()
                try:
                    return await self._store.put(key, source, timeout=limit)
                finally:
                    if not isinstance(source, bytes):
                        source.close()

            await persist(put, deadline=self._deadline, request_timeout=self._deadline)


def write_manifest(store: ObjectStore, manifest: ArtifactManifest, *, deadline: float = 120.0) -> None:
    """Write the manifest: then the artifact is complete.

    Args:
        store: Where artifacts are.
        manifest: The manifest.
        deadline: Seconds.

    Raises:
        ArtifactError: It cannot be written.
    """
    key, data = manifest_key(manifest.plan.run, manifest.plan.window), manifest.to_bytes()
    work = persist(lambda limit: store.put(key, data, timeout=limit), deadline=deadline)
    _try(work, f"{key!r} cannot be written")


def read_artifact_manifest(
    store: ObjectStore, run: str, window: int, *, deadline: float = 120.0
) -> ArtifactManifest | None:
    """Read the manifest of a window.

    Args:
        store: Where artifacts are.
        run: The run.
        window: The window.
        deadline: Seconds.

    Returns:
        The manifest; None if there is none.

    Raises:
        ArtifactError: It is damaged or cannot be read.
    """
    checks.instance(store, ObjectStore, "artifacts")
    key = manifest_key(checks.text(run, "run"), checks.integer(window, "window", 0))

    async def read() -> bytes | None:
        try:
            info = await persist(lambda limit: store.head(key, timeout=limit), deadline=deadline)
            if info.size > MAX_MANIFEST_BYTES:
                raise ArtifactError(f"{key!r} has {info.size} bytes, more than a manifest can have")
            return await persist(
                lambda limit: store.get_range(key, 0, info.size, etag=info.etag, timeout=limit),
                deadline=deadline,
            )
        except StoreRequestError as error:
            if error.failure is RequestFailure.NOT_FOUND:
                return None
            raise

    text = _try(read(), f"{key!r} cannot be read")
    if text is None:
        return None
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
    prefix = artifact_prefix(checks.text(run, "run"))

    async def delete() -> tuple[int, ...]:
        found = await persist(lambda limit: store.list(prefix, timeout=limit), deadline=deadline)
        windows: dict[int, list[str]] = {}
        for info in found:
            number = info.key.removeprefix(prefix + "/").partition("/")[0]
            if number.isascii() and number.isdecimal():
                windows.setdefault(int(number), []).append(info.key)
        old = sorted(windows)[: max(0, len(windows) - keep)]
        for window in old:
            # The manifest first: an artifact without one is not complete.
            for key in sorted(windows[window], key=lambda key: not key.endswith("/manifest.json")):
                await persist(lambda limit, key=key: store.delete(key, timeout=limit), deadline=deadline)  # type: ignore[misc]
        return tuple(old)

    return _try(delete(), f"old artifacts of run {run!r} cannot be deleted")


def check_payloads(manifest: ArtifactManifest, result: GatherResult) -> None:
    """Check that a result has exactly the payloads of a manifest.

    Args:
        manifest: The manifest.
        result: The result.

    Raises:
        ArtifactError: A payload is missing, damaged, or different.
    """
    for entry in manifest.entries:
        record = result.records[entry.uid]
        problem = record.detail if record.status is not Status.OK else ""
        if not problem and (record.digest, result.accepted[entry.uid].norms) != (entry.digest, entry.norms):
            problem = "its digest or norms are not those of the manifest"
        if problem:
            raise ArtifactError(f"window {manifest.plan.window}, payload of uid {entry.uid}: {problem}")


def _try(work: Coroutine[Any, Any, T], problem: str) -> T:
    try:
        return run_async(work)
    except StoreRequestError as error:
        raise ArtifactError(f"{problem}: {error}") from None
