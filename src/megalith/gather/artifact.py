"""Artifacts: a window's validated payloads and its manifest, for those who come late; and catching up with
them.

Each payload is written by whoever holds it, the manifest last and by one. Catching up replays windows
through the same update code with the same order, settings and factors: it ends in the same weights, and
checks that it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any, TypeVar

from torch import Tensor, nn

from megalith.errors import ArtifactError
from megalith.gather.fetch import FetchOptions
from megalith.gather.gatherer import Gatherer
from megalith.gather.manifest import MAX_BYTES, Manifest
from megalith.gather.merge import Gathered, GatherResult, as_result, merge
from megalith.gather.plan import Location
from megalith.gather.status import Fault, Status
from megalith.gather.store import Store, persist, wait
from megalith.gather.update import ApplyRows, OuterUpdate

T = TypeVar("T")

_UPLOADS_AT_ONCE = 4


def artifact_prefix(run: str, window: int) -> str:
    """Below which a window's artifact lies."""
    return f"artifacts/{run}/{window}"


def manifest_key(run: str, window: int) -> str:
    """Where a window's manifest lies."""
    return f"{artifact_prefix(run, window)}/manifest.json"


def artifact_payload_key(run: str, window: int, uid: int) -> str:
    """Where a payload of an artifact lies."""
    return f"{artifact_prefix(run, window)}/payloads/{uid}.gather"


def write_payloads(
    store: Store, gathered: Gathered, uids: Sequence[int] | None = None, *, deadline: float = 600.0
) -> None:
    """Writes the payloads that this process holds, all or those of some uids. Raises ArtifactError."""
    result = as_result(gathered)
    held = [uid for uid in result.uids if uid in result.payloads]
    chosen = held if uids is None else [uid for uid in held if uid in set(uids)]

    async def write() -> None:
        places = asyncio.Semaphore(_UPLOADS_AT_ONCE)

        async def one(uid: int) -> None:
            key = artifact_payload_key(result.plan.run, result.plan.window, uid)
            async with places:
                source = result.payloads[uid].body.source()
                await persist(
                    lambda limit: store.put(key, source, timeout=limit),
                    deadline=deadline,
                    request_timeout=deadline,
                )

        await asyncio.gather(*(one(uid) for uid in chosen))

    _try(write(), f"the artifact of window {result.plan.window} cannot be written")


def write_manifest(store: Store, manifest: Manifest, *, deadline: float = 120.0) -> None:
    """Writes the manifest: from now on the artifact is complete. Raises ArtifactError."""
    key, data = manifest_key(manifest.plan.run, manifest.plan.window), manifest.to_bytes()
    work = persist(lambda limit: store.put(key, data, timeout=limit), deadline=deadline)
    _try(work, f"{key!r} cannot be written")


def read_artifact_manifest(
    store: Store, run: str, window: int, *, deadline: float = 120.0
) -> Manifest | None:
    """The manifest of a window, or None if there is none. Raises ArtifactError if it is damaged."""
    key = manifest_key(run, window)

    async def read() -> bytes | None:
        try:
            info = await persist(lambda limit: store.head(key, timeout=limit), deadline=deadline)
            if info.size > MAX_BYTES:
                raise ArtifactError(f"{key!r} has {info.size} bytes, more than a manifest can have")
            data = BytesIO()
            await persist(lambda limit: _whole(store, key, data, info.etag, limit), deadline=deadline)
        except Fault as fault:
            if fault.status is Status.NOT_FOUND:
                return None
            raise
        return data.getvalue()

    text = _try(read(), f"{key!r} cannot be read")
    if text is None:
        return None
    manifest = Manifest.from_bytes(text, key)
    if (manifest.plan.run, manifest.plan.window) != (run, window):
        raise ArtifactError(f"{key!r} is of run {manifest.plan.run!r}, window {manifest.plan.window}")
    return manifest


@dataclass(frozen=True)
class CatchUp:
    """What catching up did, window by window."""

    applied: tuple[int, ...]
    skipped: tuple[int, ...]
    """Windows that had no update, by their manifests."""
    missing: tuple[int, ...]
    """Windows without an artifact."""


def catch_up(
    store: Store,
    parameters: nn.Module | Mapping[str, Tensor],
    update: OuterUpdate,
    *,
    run: str,
    windows: Iterable[int],
    apply_rows: ApplyRows | None = None,
    missing_ok: bool = False,
    memory_budget: int | None = None,
    options: FetchOptions | None = None,
) -> CatchUp:
    """Replays windows, in this order, on weights that stand before the first of them.

    parameters, update: as they were then, momentum included; both change in place. missing_ok: pass over
    windows without an artifact; the weights are then not those of the others, and their check will say so.
    memory_budget: this node's, if not the plans'; it changes no weight. Raises ArtifactError before the
    window changes anything, unless only its outcome is wrong.
    """
    applied, skipped, missing = [], [], []
    for window in windows:
        manifest = read_artifact_manifest(store, run, window)
        if manifest is None:
            if not missing_ok:
                raise ArtifactError(
                    f"run {run!r} has no artifact of window {window}: start from a later checkpoint"
                )
            missing.append(window)
        elif not manifest.go:
            skipped.append(window)
        else:
            if memory_budget is not None:
                manifest = replace(manifest, plan=replace(manifest.plan, memory_budget=memory_budget))
            _replay(store, manifest, parameters, update, apply_rows, options)
            applied.append(window)
    return CatchUp(tuple(applied), tuple(skipped), tuple(missing))


def load_artifact(store: Store, manifest: Manifest, *, options: FetchOptions | None = None) -> GatherResult:
    """The payloads of an artifact, validated again, as a result like any other. Close it after use.

    Raises ArtifactError if a payload is missing, damaged, or another than the manifest names.
    """
    plan = manifest.plan
    places = {u: Location(artifact_payload_key(plan.run, plan.window, u)) for u in manifest.uids}
    replay = replace(plan, locations=places, time_min=None, time_max=None, accept_baseline=False)
    rank = Gatherer(replay, manifest.schema, {"default": store}, options=options)
    primaries = set(plan.primary)
    for tier in (True, False):
        rank.fetch([uid for uid in manifest.uids if (uid in primaries) is tier])
    result = merge([rank.partial()])
    for entry in manifest.entries:
        record = result.records[entry.uid]
        problem = record.detail if record.status is not Status.OK else ""
        if not problem and (record.digest, result.norms[entry.uid]) != (entry.digest, entry.norms):
            problem = "its digest or norms are not those of the manifest"
        if problem:
            result.close()
            raise ArtifactError(f"window {plan.window}, payload of uid {entry.uid}: {problem}")
    return result


def _replay(
    store: Store,
    manifest: Manifest,
    parameters: nn.Module | Mapping[str, Tensor],
    update: OuterUpdate,
    apply_rows: ApplyRows | None,
    options: FetchOptions | None,
) -> None:
    window = manifest.plan.window
    if update.outer_step + 1 != manifest.outer_step:
        raise ArtifactError(
            f"window {window} is outer step {manifest.outer_step}, "
            f"the update given has done {update.outer_step}"
        )
    before = manifest.weights_before
    if before is not None and update.fingerprint(parameters).hash != before:
        raise ArtifactError(f"the weights given are not those that window {window} started from")
    result = load_artifact(store, manifest, options=options)
    try:
        update.apply(parameters, result, exclude=manifest.excluded, apply_rows=apply_rows)
    finally:
        result.close()
    if manifest.weights is not None and update.fingerprint(parameters).hash != manifest.weights:
        raise ArtifactError(f"window {window} led to other weights than its manifest says")


async def _whole(store: Store, key: str, data: BytesIO, etag: str | None, limit: float) -> None:
    data.seek(0)
    data.truncate()
    await store.get(key, lambda piece: _append(data, piece), etag=etag, timeout=limit)


def _append(data: BytesIO, piece: memoryview) -> None:
    if data.tell() + len(piece) > MAX_BYTES:
        raise ArtifactError("a manifest is longer than announced")
    data.write(piece)


def _try(work: Coroutine[Any, Any, T], problem: str) -> T:
    try:
        return wait(work)
    except Fault as fault:
        raise ArtifactError(f"{problem}: {fault}") from None
