"""Payloads in the layout that earlier systems send: a torch file with packed indices, codes and quantiser
settings.

For each parameter NAME the saved dict `state_dict` has `NAMEidxs` (uint8, 12-bit pairs), `NAMEvals` (uint8
codes), `NAMEquant_params` (shift, scale, offset, lookup, dtype); beside them may stand `metadata`. A
payload of ours with the same content is written from it, block by block; indices are sorted on the way.
What the content is worth is decided by `validate`, as for any payload.
"""

from __future__ import annotations

from typing import Any, BinaryIO

import torch
from torch import Tensor

from megalith.gather.body import Body
from megalith.gather.packing import pack_codes, pack_indices, unpack_indices
from megalith.gather.payload import Header, Label, PayloadWriter
from megalith.gather.schema import MAX_NAME, ParameterSpec, Schema
from megalith.gather.status import Fault, Status
from megalith.gather.torchfile import Name, StoredTensor, TorchFile

_PARTS = ("idxs", "vals", "quant_params")
_DTYPES = {
    "torch.float32": torch.float32,
    "torch.float16": torch.float16,
    "torch.bfloat16": torch.bfloat16,
    "torch.float64": torch.float64,
}


def is_baseline(start: bytes | bytearray) -> bool:
    """Whether an object that starts with these bytes is a torch file rather than a payload of ours."""
    return start[:4] == b"PK\x03\x04"


def convert(
    body: Body, schema: Schema, file: BinaryIO, *, run: str, window: int, uid: int, block_rows: int = 1024
) -> Header:
    """Writes the payload that a baseline object amounts to.

    Memory: a block of rows, plus what the names take. Raises Fault: CORRUPT if it is no torch file of plain
    tensors, INVALID_SCHEMA if parameters are missing, extra or misshaped or it is of another window,
    INVALID_VALUE if a code has no value.
    """
    longest = 4096 + sum(2048 + 12 * len(spec.name) for spec in schema.parameters) + 4 * MAX_NAME
    archive = TorchFile(body, longest_pickle=longest)
    saved = archive.value
    state = saved.get("state_dict") if isinstance(saved, dict) else None
    if not isinstance(state, dict):
        raise _invalid("has no state_dict")
    if schema.tables:
        raise _invalid("is of a layout without tables, which this schema has")
    _check_names(state, schema)
    label = _label(state.get("metadata"), saved.get("global_step"), run, window, uid)
    writer = PayloadWriter(file, schema, label)
    for spec in schema.parameters:
        indices, codes, lookup = _parts(archive, state, spec)
        blocks = range(0, spec.rows, block_rows)
        for start in blocks:
            rows = _indices(archive, indices, spec, start, min(start + block_rows, spec.rows))
            writer.write(pack_indices(rows.sort(dim=1).values))
        writer.write(lookup)
        for start in blocks:
            stop = min(start + block_rows, spec.rows)
            order = _indices(archive, indices, spec, start, stop).argsort(dim=1)
            found = archive.read(codes, start * spec.keep, stop * spec.keep).view(-1, spec.keep)
            if found.numel() and int(found.max()) >= spec.bins:
                raise Fault(Status.INVALID_VALUE, f"{spec.name!r} has a code outside of its lookup")
            writer.write(pack_codes(found.gather(1, order), spec.bits))
    return writer.finish()


def _check_names(state: dict[str, Any], schema: Schema) -> None:
    expected = {spec.name + part for spec in schema.parameters for part in _PARTS}
    missing, extra = sorted(expected - set(state)), sorted(set(state) - expected - {"metadata"})
    if missing:
        raise _invalid(f"{missing[0]!r} is missing")
    if extra:
        raise _invalid(f"{extra[0]!r:.80} is not part of the model")


def _label(metadata: Any, global_step: Any, run: str, window: int, uid: int) -> Label:
    given = metadata if isinstance(metadata, dict) else {}
    if given.get("window", window) != window:
        raise _invalid(f"is of window {given['window']!r:.20}, not {window}")
    step = global_step if isinstance(global_step, int) and 0 <= global_step < 1 << 63 else 0
    kept: dict[str, str | int] = {}
    for key in ("sample_digest", "sample_count"):
        value = given.get(key)
        if isinstance(value, str):
            kept[key] = value[:128]
        elif isinstance(value, int) and abs(value) < 1 << 63:
            kept[key] = int(value)
    return Label(run, window, uid, step, kept)


def _parts(
    archive: TorchFile, state: dict[str, Any], spec: ParameterSpec
) -> tuple[StoredTensor, StoredTensor, Tensor]:
    indices, codes = state[spec.name + "idxs"], state[spec.name + "vals"]
    shapes = [(*spec.bands, spec.keep)] + ([(spec.bands[1], spec.keep)] if spec.matrix[0] == 1 else [])
    for tensor in (indices, codes):
        if not isinstance(tensor, StoredTensor) or tensor.storage.dtype != torch.uint8:
            raise _invalid(f"{spec.name!r}: indices and codes must be uint8 tensors")
    if codes.shape not in shapes or indices.numel != spec.rows * spec.index_bytes or spec.keep % 2:
        raise _invalid(f"{spec.name!r}: codes {codes.shape} and {indices.numel} index bytes do not fit")
    settings = state[spec.name + "quant_params"]
    if not isinstance(settings, tuple) or len(settings) != 5:
        raise _invalid(f"{spec.name!r}: quant_params must have five parts")
    shift, _, _, lookup, dtype = settings
    if not isinstance(shift, StoredTensor) or shift.numel != 1:
        raise _invalid(f"{spec.name!r}: the shift of quant_params must be one number")
    if not isinstance(lookup, StoredTensor) or lookup.shape != (spec.bins,):
        raise _invalid(f"{spec.name!r}: the lookup of quant_params must have {spec.bins} values")
    if not isinstance(dtype, Name) or dtype.path not in _DTYPES:
        raise _invalid(f"{spec.name!r}: quant_params must name a floating point type")
    # Adding the shift to each value of the lookup gives the same numbers as adding it to each code's value.
    values = archive.read(lookup, 0, spec.bins) + archive.read(shift, 0, 1)
    return indices, codes, values.to(_DTYPES[dtype.path]).to(torch.float32)


def _indices(archive: TorchFile, tensor: StoredTensor, spec: ParameterSpec, start: int, stop: int) -> Tensor:
    packed = archive.read(tensor, start * spec.index_bytes, stop * spec.index_bytes)
    return unpack_indices(packed.view(-1, spec.index_bytes), spec.keep)


def _invalid(detail: str) -> Fault:
    return Fault(Status.INVALID_SCHEMA, detail)
