"""Templar's gradient objects: torch files with packed indices, codes and quantiser settings.

For each parameter NAME the saved dict `state_dict` has `NAMEidxs` (uint8, 12-bit pairs), `NAMEvals` (uint8
codes) and `NAMEquant_params` (shift, scale, offset, lookup, dtype); `metadata` is optional. Reading
writes a payload of Megalith with the same content, block by block, with sorted indices. What the content
means is checked by `validate`, as for any payload. Schemas must be made with `padding=False`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.gather.compress import Compressed
from megalith.gather.payload import Header, Label, Payload, write_payload_file
from megalith.gather.payload_schema import MAX_NAME, ParameterSpec, PayloadSchema
from megalith.gather.plan import Fault, Status
from megalith.ops import checks
from megalith.ops.matrix_chunks import pack_codes, pack_indices, unpack_codes, unpack_indices
from megalith.storage.bodies import Body, MemoryBody
from megalith.storage.torch_files import PickledName, StoredTensor, TorchFile, TorchFileError

PARTS = ("idxs", "vals", "quant_params")
_DTYPES = {
    "torch.float32": torch.float32,
    "torch.float16": torch.float16,
    "torch.bfloat16": torch.bfloat16,
    "torch.float64": torch.float64,
}


def convert_payload(
    body: Body,
    schema: PayloadSchema,
    file: BinaryIO,
    *,
    run: str,
    window: int,
    uid: int,
    block_rows: int = 1024,
) -> Header:
    """Write the payload that a gradient object amounts to. Memory is that of a block of rows.

    Args:
        body: The object.
        schema: The schema of the model.
        file: A seekable file for the payload.
        run: The run, which the object does not name.
        window: The expected window.
        uid: The peer.
        block_rows: Rows that are converted at once.

    Returns:
        The header of the payload.

    Raises:
        Fault: CORRUPT if it is not a torch file of plain tensors; INVALID_SCHEMA if parameters are missing,
            unknown or misshaped, or it is of another window; INVALID_VALUE if a code has no value.
    """
    if not isinstance(body, Body):
        raise InputError(f"body must be a Body, such as MemoryBody(data), got {checks.kind(body)}")
    checks.instance(schema, PayloadSchema, "schema")
    if not hasattr(file, "seek"):
        raise InputError(f"file must be a seekable file, got {checks.kind(file)}")
    Label(run, window, uid)
    checks.integer(block_rows, "block_rows")
    try:
        return _convert(body, schema, file, run, window, uid, block_rows)
    except TorchFileError as error:
        raise Fault(Status.CORRUPT, str(error)) from None


def read_payload(data: bytes, schema: PayloadSchema, *, run: str, window: int, uid: int) -> Payload:
    """Read a gradient object.

    Args:
        data: Its bytes.
        schema: The schema of the model.
        run: The name of the run.
        window: The expected window.
        uid: The peer.

    Returns:
        A payload with the same content.

    Raises:
        Fault: See `convert_payload`.
    """
    file = io.BytesIO()
    if not isinstance(data, bytes):
        raise InputError(f"data must be bytes, got {checks.kind(data)}")
    header = convert_payload(MemoryBody(data), schema, file, run=run, window=window, uid=uid)
    return Payload(header, MemoryBody(file.getvalue()))


def write_payload(source: Compressed | Payload, label: Label) -> bytes:
    """Write a gradient object that Templar reads.

    Args:
        source: A compressed update, or a payload.
        label: Window and step; `metadata` may hold `sample_digest` and `sample_count`.

    Returns:
        The bytes of the torch file.

    Raises:
        InputError: The schema has tables, or a parameter that Templar's layout cannot hold.
    """
    checks.instance(label, Label, "label")
    if isinstance(source, Compressed):
        source = Payload.open(MemoryBody(source.to_bytes(label)))
    checks.instance(source, Payload, "source")
    if source.header.tables:
        raise InputError("Templar's objects have no embedding tables: use a schema without tables")
    state: dict[str, Any] = {"metadata": {"window": label.window, **label.metadata}}
    for number, entry in enumerate(source.header.parameters):
        state |= parameter_parts(source, number, entry.spec)
    file = io.BytesIO()
    torch.save({"state_dict": state, "global_step": label.global_step}, file)
    return file.getvalue()


def parameter_parts(payload: Payload, number: int, spec: ParameterSpec) -> dict[str, Any]:
    """Return a parameter of a payload under Templar's keys."""
    (lines, columns), (down, across), (height, width) = spec.matrix, spec.bands, spec.chunk
    if spec.keep % 2 or (lines, columns) != (down * height, across * width):
        raise InputError(
            f"parameter {spec.name!r}: Templar's layout needs an even `keep` and chunks without padding: "
            "use PayloadSchema.of(model, padding=False)"
        )
    shape = (across, spec.keep) if len(spec.shape) < 2 else (down, across, spec.keep)
    codes = unpack_codes(payload.codes(number, 0, spec.rows), spec.keep, spec.bits).reshape(shape)
    settings = torch.zeros((), device="cpu"), 1.0, spec.bins // 2, payload.lookup(number), torch.float32
    indices = payload.indices(number, 0, spec.rows).flatten()
    return dict(
        zip((spec.name + part for part in PARTS), (indices, codes.contiguous(), settings), strict=True)
    )


def _convert(
    body: Body, schema: PayloadSchema, file: BinaryIO, run: str, window: int, uid: int, block_rows: int
) -> Header:
    longest = 4096 + sum(2048 + 12 * len(spec.name) for spec in schema.parameters) + 4 * MAX_NAME
    archive = TorchFile(body, longest_pickle=longest)
    saved = archive.value
    state = saved.get("state_dict") if isinstance(saved, dict) else None
    if not isinstance(state, dict):
        raise _invalid("has no state_dict")
    if schema.tables:
        raise _invalid("has no tables, which this schema has")
    _check_names(state, schema)
    label = _label(state.get("metadata"), saved.get("global_step"), run, window, uid)
    return write_payload_file(file, schema, label, _pieces(archive, state, schema, block_rows))


def _pieces(
    archive: TorchFile, state: dict[str, Any], schema: PayloadSchema, block_rows: int
) -> Iterator[Tensor]:
    """The sections of the payload, block by block."""
    for spec in schema.parameters:
        indices, codes, lookup = _parts(archive, state, spec)
        blocks = [(start, min(start + block_rows, spec.rows)) for start in range(0, spec.rows, block_rows)]
        for start, stop in blocks:
            yield pack_indices(_indices(archive, indices, spec, start, stop).sort(dim=1).values)
        yield lookup
        for start, stop in blocks:
            order = _indices(archive, indices, spec, start, stop).argsort(dim=1)
            found = archive.read(codes, start * spec.keep, stop * spec.keep).view(-1, spec.keep)
            if found.numel() and int(found.max()) >= spec.bins:
                raise Fault(Status.INVALID_VALUE, f"{spec.name!r} has a code outside of its lookup")
            yield pack_codes(found.gather(1, order), spec.bits)


def _check_names(state: dict[str, Any], schema: PayloadSchema) -> None:
    expected = {spec.name + part for spec in schema.parameters for part in PARTS}
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
        raise _invalid(f"{spec.name!r}: codes {codes.shape} and {indices.numel} index bytes do not match")
    settings = state[spec.name + "quant_params"]
    if not isinstance(settings, tuple) or len(settings) != 5:
        raise _invalid(f"{spec.name!r}: quant_params must have five parts")
    shift, _, _, lookup, dtype = settings
    if not isinstance(shift, StoredTensor) or shift.numel != 1:
        raise _invalid(f"{spec.name!r}: the shift of quant_params must be one number")
    if not isinstance(lookup, StoredTensor) or lookup.shape != (spec.bins,):
        raise _invalid(f"{spec.name!r}: the lookup of quant_params must have {spec.bins} values")
    if not isinstance(dtype, PickledName) or dtype.path not in _DTYPES:
        raise _invalid(f"{spec.name!r}: quant_params must name a floating point type")
    # Adding the shift to each value of the lookup gives the same numbers as adding it to each code's value.
    values = archive.read(lookup, 0, spec.bins) + archive.read(shift, 0, 1)
    return indices, codes, values.to(_DTYPES[dtype.path]).to(torch.float32)


def _indices(archive: TorchFile, tensor: StoredTensor, spec: ParameterSpec, start: int, stop: int) -> Tensor:
    packed = archive.read(tensor, start * spec.index_bytes, stop * spec.index_bytes)
    return unpack_indices(packed.view(-1, spec.index_bytes), spec.keep)


def _invalid(detail: str) -> Fault:
    return Fault(Status.INVALID_SCHEMA, detail)
