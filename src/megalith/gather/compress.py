"""The peer's side of a payload: chunked top-k, coded values, error feedback; and the way back.

An update is a pseudo-gradient: weights before local training minus weights after it. Of each chunk the
`keep` positions of largest magnitude are sent, coded in a few values that are computed per parameter; what
was not sent stays in the feedback and is sent later. Changed rows of embedding tables travel whole.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.gather.chunks import forward_dct, from_chunks, inverse_dct, to_chunks
from megalith.gather.packing import pack_codes, pack_indices, unpack_codes, unpack_indices
from megalith.gather.payload import Header, Label, Payload, PayloadWriter
from megalith.gather.schema import ParameterSpec, Schema

TableRows = Mapping[str, tuple[Tensor, Tensor]]
"""Rows of tables by name: ids int64 [n], rows float32 [n, dim]."""

_SIGMAS = 6  # the range of values that codes cover


@dataclass(frozen=True)
class Packed:
    """One parameter as it travels. indices, codes: uint8 [rows, .]. lookup: float32 [bins]."""

    indices: Tensor
    lookup: Tensor
    codes: Tensor


@dataclass(frozen=True)
class Compressed:
    """A compressed update: parameters in schema order, and rows of tables sorted by id."""

    schema: Schema
    parameters: tuple[Packed, ...]
    tables: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def write(self, file: BinaryIO, label: Label) -> Header:
        """Writes the payload to a seekable file."""
        writer = PayloadWriter(
            file, self.schema, label, {name: ids.numel() for name, (ids, _) in self.tables.items()}
        )
        for packed in self.parameters:
            writer.write(packed.indices)
            writer.write(packed.lookup)
            writer.write(packed.codes)
        for table in self.schema.tables:
            if table.name in self.tables:
                ids, rows = self.tables[table.name]
                writer.write(ids)
                writer.write(rows)
        return writer.finish()

    def to_bytes(self, label: Label) -> bytes:
        """The payload as bytes."""
        file = io.BytesIO()
        self.write(file, label)
        return file.getvalue()


class ErrorFeedback:
    """What was not sent yet, per parameter: decay * (what was left) + update, less what is sent."""

    def __init__(self, decay: float = 0.95) -> None:
        if not 0.0 <= decay <= 1.0:
            raise InputError(f"decay must be from 0 to 1, got {decay}")
        self.decay = decay
        self.left: dict[str, Tensor] = {}

    def give_back(self, compressed: Compressed) -> None:
        """Takes back an update that was compressed but never reached the store."""
        for name, sent in decompress(compressed).items():
            self.left[name] += sent.to(self.left[name].device)

    def state_dict(self) -> dict[str, Tensor]:
        """What is left, by parameter: float32."""
        return dict(self.left)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes what `state_dict` gave."""
        self.left = {name: tensor.to(torch.float32).clone() for name, tensor in state.items()}

    def add(self, name: str, update: Tensor) -> Tensor:
        """What there is to send of a parameter now: float32, in the feedback's own memory."""
        if name not in self.left:
            self.left[name] = torch.zeros_like(update, dtype=torch.float32)
        return self.left[name].mul_(self.decay).add_(update.to(torch.float32))


def compress(
    update: Mapping[str, Tensor],
    schema: Schema,
    *,
    tables: TableRows | None = None,
    feedback: ErrorFeedback | None = None,
) -> Compressed:
    """Compresses a pseudo-gradient: a floating point tensor for each parameter of the schema.

    tables: changed rows, ids distinct; tables left out are sent empty. feedback: keeps what is not sent; it
    changes here. Raises InputError, before the feedback changes, for names, shapes or values that do not
    fit.
    """
    _check_update(update, schema)
    sorted_tables = {name: _sorted_rows(schema, name, *rows) for name, rows in (tables or {}).items()}
    packed = []
    for spec in schema.parameters:
        whole = update[spec.name].detach()
        pending = whole if feedback is None else feedback.add(spec.name, whole)
        packed.append(_pack(pending, spec))
        if feedback is not None:
            pending -= _unpack(packed[-1], spec).to(pending.device)
    return Compressed(schema, tuple(packed), sorted_tables)


def decompress(source: Compressed | Payload) -> dict[str, Tensor]:
    """The dense float32 update of each parameter; zero where nothing was sent."""
    if isinstance(source, Compressed):
        pairs = zip(source.schema.parameters, source.parameters, strict=True)
        return {spec.name: _unpack(packed, spec) for spec, packed in pairs}
    result = {}
    for number, entry in enumerate(source.header.parameters):
        spec = entry.spec
        packed = Packed(
            source.indices(number, 0, spec.rows), source.lookup(number), source.codes(number, 0, spec.rows)
        )
        result[spec.name] = _unpack(packed, spec)
    return result


def quantise(values: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Codes and their values: uint8 of the shape of `values`, float32 [bins].

    Bins are equally wide and cover six standard deviations around the mean; a code stands for the mean of
    the values in its bin.
    """
    if values.numel() == 0:
        return torch.zeros_like(values, dtype=torch.uint8), values.new_zeros(bins)
    shift = values.mean()
    centred = values - shift
    spread = float(centred.norm()) / math.sqrt(max(values.numel() - 1, 1))
    scale = _SIGMAS * spread / bins
    if not math.isfinite(scale) or scale == 0.0:
        scale = 1.0
    codes = (centred / scale + bins / 2).round().clamp(0, bins - 1).to(torch.int64)
    sums = torch.zeros(bins, dtype=torch.float64, device=values.device)
    sums.scatter_add_(0, codes.flatten(), centred.flatten().to(torch.float64))
    counts = torch.bincount(codes.flatten(), minlength=bins)
    lookup = (sums / counts.clamp(min=1)).to(torch.float32) + shift
    return codes.to(torch.uint8), lookup


def _pack(pending: Tensor, spec: ParameterSpec) -> Packed:
    chunks = to_chunks(pending, spec)
    if spec.dct:
        chunks = forward_dct(chunks, spec)
    indices = chunks.abs().topk(spec.keep, dim=1, sorted=False).indices.sort(dim=1).values
    codes, lookup = quantise(chunks.gather(1, indices), spec.bins)
    return Packed(pack_indices(indices).cpu(), lookup.cpu(), pack_codes(codes, spec.bits).cpu())


def _unpack(packed: Packed, spec: ParameterSpec) -> Tensor:
    chunks = torch.zeros(spec.rows, spec.size)
    codes = unpack_codes(packed.codes, spec.keep, spec.bits).to(torch.int64)
    indices = unpack_indices(packed.indices, spec.keep).to(torch.int64)
    chunks.scatter_(1, indices, packed.lookup[codes])
    return from_chunks(inverse_dct(chunks, spec) if spec.dct else chunks, spec)


def _check_update(update: Mapping[str, Tensor], schema: Schema) -> None:
    names = {spec.name for spec in schema.parameters}
    for name in sorted(names ^ set(update)):
        problem = "has no update" if name in names else "has an update but is not in the schema"
        raise InputError(f"parameter {name!r} {problem}")
    for spec in schema.parameters:
        tensor = update[spec.name]
        if tuple(tensor.shape) != spec.shape or not tensor.is_floating_point():
            raise InputError(
                f"update of {spec.name!r} is {tensor.dtype} {tuple(tensor.shape)}, "
                f"its schema says floating point {spec.shape}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"update of {spec.name!r} has values that are not finite")


def _sorted_rows(schema: Schema, name: str, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    dims = {table.name: table.dim for table in schema.tables}
    if name not in dims:
        raise InputError(f"rows of table {name!r}, which the schema does not have")
    if ids.dtype != torch.int64 or ids.dim() != 1 or rows.shape != (ids.numel(), dims[name]):
        raise InputError(
            f"table {name!r}: ids {ids.dtype} {tuple(ids.shape)} and rows {tuple(rows.shape)} must be "
            f"int64 [n] and [n, {dims[name]}]"
        )
    if not bool(torch.isfinite(rows).all()):
        raise InputError(f"table {name!r} has rows with values that are not finite")
    order = ids.argsort()
    found = ids[order].cpu()
    if bool((found[1:] == found[:-1]).any()):
        raise InputError(f"table {name!r}: an id stands twice; add its rows first")
    return found, rows[order].to(torch.float32).cpu()
