"""Objects in stores: the payload that a peer publishes, and the artifact of a window.

    payloads/RUN/WINDOW/UID.gather              the payload of a peer
    artifacts/RUN/WINDOW/payloads/UID.gather    an accepted payload, written by the rank that holds it
    artifacts/RUN/WINDOW/manifest.json          written last, by the first rank: the artifact is complete

An artifact consists of the validated payloads of a window and its manifest, for nodes that catch up later.
Payloads are uploaded in the background while the weights are stepped. Nothing in an artifact comes from a
clock or a rank: its bytes do not depend on the number of ranks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from megalith.distributed.fingerprint import Fingerprint
from megalith.errors import ArtifactError, InputError, StoreError
from megalith.gather.compress import Compressed
from megalith.gather.decision import Decision, SkipReason
from megalith.gather.payload import Header, Label, read_header
from megalith.gather.payload_schema import PayloadSchema
from megalith.gather.plan import Fault, GatherPlan, Status, payload_key
from megalith.gather.reduce import clip_factors
from megalith.gather.result import Gathered, as_result
from megalith.ops import checks
from megalith.storage.json_records import Sha256, canonical_json, from_json, to_json
from megalith.storage.object_bodies import ObjectBody, put_body
from megalith.storage.object_store import ObjectStore, RequestFailure, StoreRequestError
from megalith.storage.retries import persist, run_async
from megalith.storage.spool import SpoolWriter
from megalith.storage.strict_json import parse_json_object

T = TypeVar("T")
FORMAT = "megalith-gather-artifact"
VERSION = 2
MAX_MANIFEST_BYTES = 1 << 28
_UPLOADS_AT_ONCE = 4
_SLOWEST = 1 << 18  # bytes per second; a slower upload is given up and tried again


@dataclass(frozen=True)
class Published:
    """A payload in a store.

    Attributes:
        key: Its key.
        digest: Its digest.
        bytes: Its size.
        written: False if the same payload was there already.
    """

    key: str
    digest: str
    bytes: int
    written: bool


def publish(
    store: ObjectStore,
    compressed: Compressed,
    label: Label,
    *,
    key: str | None = None,
    overwrite: bool = False,
    deadline: float = 300.0,
    directory: Path | None = None,
) -> Published:
    """Write the payload of a peer to a store; tried again until it is there or the deadline passes.

    Args:
        store: The store.
        compressed: The update.
        label: Whose payload it is.
        key: Where it goes; None: the `payload_key` of the label.
        overwrite: Replace what is there. Otherwise a different payload raises, and the same one is accepted.
        deadline: Seconds.
        directory: Where the payload is made, in a file without a name: nothing remains of a killed process.

    Returns:
        Where it is.

    Raises:
        StoreError: The time is up, or another payload is there. `ErrorFeedback.give_back` then takes the
            update back.
    """
    checks.instance(store, ObjectStore, "store")
    checks.instance(compressed, Compressed, "compressed")
    checks.instance(label, Label, "label")
    place = payload_key(label.run, label.window, label.uid) if key is None else checks.text(key, "key")
    checks.seconds(deadline, "deadline")
    checks.flag(overwrite, "overwrite")
    spool = SpoolWriter(None if directory is None else checks.path(directory, "directory"))
    try:
        header = compressed.write(spool.file, label)
        work = put_body(
            store,
            place,
            spool.finish(),
            create=not overwrite,
            deadline=deadline,
            request_timeout=30.0 + header.size / _SLOWEST,
        )
        written = run_async(work)
    except StoreRequestError as error:
        where = f"uid {label.uid}, window {label.window}"
        raise StoreError(f"{where}: not published: {error}") from None
    finally:
        spool.discard()
    if not written and peek(store, place, deadline=deadline).digest != header.digest:
        raise StoreError(
            f"{place!r} holds another payload: a peer sends one per window (or use overwrite=True)"
        )
    return Published(place, header.digest, header.size, written)


def peek(store: ObjectStore, key: str, *, deadline: float = 60.0) -> Header:
    """Read and verify the header of a payload in a store, by two ranged requests.

    Args:
        store: The store.
        key: The key of the payload.
        deadline: Seconds for each request.

    Returns:
        The header.

    Raises:
        Fault: It is missing, damaged or not a payload, or the store fails.
    """

    checks.instance(store, ObjectStore, "store")
    checks.seconds(deadline, "deadline")
    try:
        return read_header(ObjectBody(store, key, deadline=deadline))
    except StoreRequestError as error:
        raise Fault(Status(error.failure), str(error)) from None


# ---- artifacts


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


def manifest_key(run: str, window: int) -> str:
    """Return the key of a manifest.

    Args:
        run: The run.
        window: The window.

    Returns:
        The key.
    """
    return f"artifacts/{run}/{window}/manifest.json"


def artifact_payload_key(run: str, window: int, uid: int) -> str:
    """Return the key of a payload of an artifact.

    Args:
        run: The run.
        window: The window.
        uid: The peer.

    Returns:
        The key.
    """
    return f"artifacts/{run}/{window}/payloads/{uid}.gather"


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
        deadline: Seconds for all uploads.
    """

    def __init__(self, store: ObjectStore, gathered: Gathered, *, deadline: float = 600.0) -> None:
        checks.instance(store, ObjectStore, "artifacts")
        self._result = as_result(gathered)
        self._uids = [uid for uid in self._result.uids if uid in self._result.payloads]
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
        plan, places = self._result.plan, asyncio.Semaphore(_UPLOADS_AT_ONCE)

        async def write(uid: int) -> None:
            key, body = artifact_payload_key(plan.run, plan.window, uid), self._result.payloads[uid].body
            async with places:
                limit = self._deadline
                await put_body(self._store, key, body, deadline=limit, request_timeout=limit)

        await asyncio.gather(*map(write, self._uids))


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
    key = manifest_key(checks.text(run, "run"), checks.integer(window, "window", 0))
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


def _request(call: Callable[[float], Awaitable[T]], deadline: float, problem: str) -> T:
    try:
        return run_async(persist(call, deadline=deadline))
    except StoreRequestError as error:
        raise ArtifactError(f"{problem}: {error}") from None
