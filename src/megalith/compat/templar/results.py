"""Templar's gather results and aggregator objects: real lists of tensors, one entry per peer; metric names.

Templar's consumers test entries for `list` and call `.dtype` and `.to` on their items, so everything is read
into memory here. Megalith's own update needs none of this: it reads payloads block by block.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from megalith.compat.templar.payloads import PARTS, parameter_parts, read_payload
from megalith.errors import ArtifactError, InputError
from megalith.gather.overlap import Overlap
from megalith.gather.payload_schema import PayloadSchema
from megalith.gather.plan import Fault, GatherPlan, Status, UpdateConfig
from megalith.gather.result import (
    Fetched,
    Gathered,
    GatherResult,
    Record,
    as_result,
    make_partial,
    merge,
    tier_of,
)
from megalith.gather.validate import validate
from megalith.gather.window import metrics
from megalith.ops import checks
from megalith.storage.bodies import Ledger, MemoryBody
from megalith.storage.json_codec import MAX_INT
from megalith.storage.torch_files import PickledName, StoredTensor, TorchFile, TorchFileError

_MAX_PICKLE = 1 << 28
_WORK_BYTES = 1 << 22  # of a block that is validated


def _state_lists(gathered: Gathered) -> dict[str, list[Any]]:
    """All payloads under Templar's keys: for each key a list with one entry per peer in canonical order."""
    result = as_result(gathered)
    state: dict[str, list[Any]] = {}
    for number, spec in enumerate(result.schema.parameters):
        state |= {spec.name + part: [] for part in PARTS}
        for payload in result.held(result.uids):
            for key, value in parameter_parts(payload, number, spec).items():
                state[key].append(value)
    return state


def gather_result(gathered: Gathered) -> SimpleNamespace | None:
    """Return a result as Templar's `gather` returns it.

    Args:
        gathered: The result, with all payloads in this process.

    Returns:
        A namespace with time, upload_bytes, download_bytes, success_rate, state_dict (a namespace of lists),
        uids, global_steps and skipped_uids; None without a valid peer, as Templar does.
    """
    result = as_result(gathered)
    if not result.uids:
        return None
    return SimpleNamespace(
        time=result.time,
        upload_bytes=0,
        download_bytes=result.download_bytes,
        success_rate=result.success_rate,
        state_dict=SimpleNamespace(**_state_lists(result)),
        uids=list(result.uids),
        global_steps=list(result.global_steps),
        skipped_uids=list(result.skipped_uids),
    )


def write_aggregator(gathered: Gathered, *, global_step: int = 0) -> bytes:
    """Write the aggregator object of a window, from which Templar's nodes catch up.

    Args:
        gathered: The result, with all payloads in this process.
        global_step: The step counter of the node that writes it.

    Returns:
        The bytes of the torch file.
    """
    result = as_result(gathered)
    checks.integer(global_step, "global_step", 0)
    file = io.BytesIO()
    content = {
        "state_dict": _state_lists(result),
        "uids": list(result.uids),
        "skipped_uids": list(result.skipped_uids),
        "success_rate": result.success_rate,
    }
    # Templar's Comms puts whatever it stores under "state_dict".
    torch.save({"state_dict": content, "global_step": global_step}, file)
    return file.getvalue()


def read_aggregator(
    data: bytes, schema: PayloadSchema, *, run: str, window: int, update: UpdateConfig | None = None
) -> GatherResult:
    """Read an aggregator object. Every payload is validated.

    Args:
        data: Its bytes.
        schema: The schema of the model.
        run: The name of the run.
        window: The window.
        update: How the outer step is made; None: the default.

    Returns:
        A result like any other, which `OuterUpdate.apply` takes. Peers that the object lists as skipped have
        the status LOCAL_ERROR, because it does not say why.

    Raises:
        ArtifactError: It is damaged, or of another model.
    """
    if not isinstance(data, bytes):
        raise InputError(f"data must be bytes, got {checks.kind(data)}")
    digest = checks.instance(schema, PayloadSchema, "schema").digest
    where = f"the aggregator object of window {window}"
    fetched: list[Fetched] = []
    try:
        archive = TorchFile(MemoryBody(data), longest_pickle=min(_MAX_PICKLE, len(data)))
        saved = archive.value if isinstance(archive.value, dict) else {}
        inner = saved.get("state_dict")
        # The first version of `write_aggregator` lacked the outer level.
        content = inner if isinstance(inner, dict) and "uids" in inner else saved
        uids, state, skipped = (content.get(each) for each in ("uids", "state_dict", "skipped_uids"))
        if not isinstance(uids, list) or not isinstance(state, dict):
            raise ArtifactError(f"{where} has no uids or no state_dict")
        # Primaries ascend, then reserves do: peers are applied in this order.
        primaries = next((n for n in range(1, len(uids)) if uids[n] < uids[n - 1]), len(uids))
        lost = tuple(skipped) if isinstance(skipped, list) else ()
        plan = GatherPlan(
            run=run,
            window=window,
            schema=digest,
            primary=(*uids[:primaries], *lost),
            reserve=tuple(uids[primaries:]),
            update=UpdateConfig() if update is None else update,
        )
        for number, uid in enumerate(uids):
            one = _loaded(archive, {key: _entry(where, key, each, number) for key, each in state.items()})
            file = io.BytesIO()
            torch.save({"state_dict": one, "global_step": saved.get("global_step", 0)}, file)
            body = read_payload(file.getvalue(), schema, run=run, window=window, uid=uid).body
            ledger = Ledger(MAX_INT, "reading")  # the object is in memory already
            payload = validate(body, schema, plan, uid, ledger=ledger, work_bytes=_WORK_BYTES)
            found = payload.header
            record = Record(uid, tier_of(plan, uid), Status.OK, bytes=found.size, digest=found.digest)
            fetched.append((replace(record, global_step=found.label.global_step), payload))
    except (TorchFileError, Fault, InputError, TypeError) as error:
        raise ArtifactError(f"{where}: {error}") from None
    fetched += [(Record(uid, "primary", Status.LOCAL_ERROR, f"skipped in {where}"), None) for uid in lost]
    return merge([make_partial(plan, schema, [record.uid for record, _ in fetched], fetched)])


def templar_metrics(
    gathered: Gathered, *, scores: Mapping[int, float] | None = None, overlap: Overlap | None = None
) -> dict[str, float]:
    """Return the numbers of a window under the names of Templar's validator.

    Args:
        gathered: The result.
        scores: The final score of each uid.
        overlap: The search for copies.

    Returns:
        By name.
    """
    own = metrics(gathered, scores={} if scores is None else scores, overlap=overlap)
    names = {
        "validator/gather/success_rate": "gather/success_rate",
        "validator/gather/intended_mean_final": "gather/intended_mean",
        "validator/gather/actual_mean_final": "gather/actual_mean",
        "validator/gather/reserve_used": "gather/reserve_used",
        "validator/overlap/pairs_checked": "overlap/pairs_checked",
        "validator/overlap/pairs_over_thresh": "overlap/pairs_high",
        "validator/overlap/ratio_over_thresh": "overlap/ratio_high",
        "validator/overlap/mean": "overlap/mean",
        "validator/overlap/min": "overlap/min",
        "validator/overlap/max": "overlap/max",
    }
    found = {name: own[key] for name, key in names.items() if key in own}
    if middles := as_result(gathered).norm_medians.values():
        found["compress/min_median_block_norm"] = min(middles)
        found["compress/max_median_block_norm"] = max(middles)
    return found


def _entry(where: str, key: str, entries: Any, number: int) -> Any:
    if not isinstance(entries, list) or len(entries) <= number:
        raise ArtifactError(f"{where}: {key!r:.80} must be a list with an entry per peer")
    return entries[number]


def _loaded(archive: TorchFile, value: Any) -> Any:
    """Stored tensors as tensors."""
    if isinstance(value, StoredTensor):
        return archive.read(value, 0, value.numel).view(value.shape)
    if isinstance(value, dict):
        return {key: _loaded(archive, each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_loaded(archive, each) for each in value)
    if isinstance(value, PickledName):
        module, _, name = value.path.partition(".")
        return getattr(torch, name, None) if module == "torch" else None
    return value
