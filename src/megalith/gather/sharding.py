"""Which part of a parameter this process holds: all of it, or lines of a DTensor that is sharded over ranks.

FSDP2 shards the first dimension. Parts are contiguous, so the chunks that a part touches are a range, and a
rank is sent these chunks and no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalith.errors import InputError
from megalith.gather.chunks import Area
from megalith.gather.ranks import Ranks
from megalith.gather.schema import ParameterSpec

Span = tuple[int, int]
"""A range of a tensor's first dimension."""


@dataclass(frozen=True)
class Part:
    """What this process holds of a parameter: a plain tensor, and where it lies. span: None if it is all."""

    tensor: Tensor
    span: Span | None = None


def part_of(name: str, tensor: Tensor, ranks: Ranks) -> Part:
    """What this rank holds. Raises InputError if the tensor is spread in a way that gather cannot follow."""
    if type(tensor) in (Tensor, nn.Parameter):
        return Part(tensor)
    # Only those that shard pay for importing it, which takes about as long as torch itself.
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(tensor, DTensor):
        return Part(tensor)
    mesh, placements = tensor.device_mesh, tensor.placements
    local = tensor.to_local()
    if mesh.ndim != 1 or mesh.size() != ranks.size:
        raise InputError(
            f"parameter {name!r} lies on a mesh of {tuple(mesh.shape)}, but {ranks.size} ranks gather: "
            "a mesh of one dimension with all of them is needed"
        )
    if placements == (Replicate(),):
        return Part(local)
    if placements != (Shard(0),):
        raise InputError(f"parameter {name!r} is placed as {placements}: only Shard(0) or Replicate() works")
    length, place = tensor.shape[0], mesh.get_local_rank()
    each = -(-length // mesh.size())
    span = min(length, each * place), min(length, each * (place + 1))
    if place != ranks.place or local.shape[0] != span[1] - span[0] or not local.is_contiguous():
        raise InputError(f"parameter {name!r} is not sharded evenly and in the order of ranks")
    return Part(local, span)


def area_of(spec: ParameterSpec, span: Span | None) -> Area:
    """The lines and columns of a parameter's matrix that a part covers."""
    lines, columns = spec.matrix
    if span is None:
        return Area(0, lines, 0, columns)
    return Area(0, 1, *span) if len(spec.shape) < 2 else Area(*span, 0, columns)


def rows_of(spec: ParameterSpec, span: Span | None) -> Span:
    """The chunks that a part touches."""
    if span is None:
        return 0, spec.rows
    if span[0] >= span[1]:
        return 0, 0
    height, width = spec.chunk
    if len(spec.shape) < 2:
        return span[0] // width, -(-span[1] // width)
    return span[0] // height * spec.bands[1], -(-span[1] // height) * spec.bands[1]


class WholeTensors(Mapping[str, Tensor]):
    """Parameters as a whole: parts are collected from all ranks when asked for, one parameter at a time.

    All ranks read the same names in the same order.
    """

    def __init__(self, parts: Mapping[str, Part], shapes: Mapping[str, Sequence[int]], ranks: Ranks) -> None:
        self._parts = parts
        self._shapes = shapes
        self._ranks = ranks

    def __getitem__(self, name: str) -> Tensor:
        part = self._parts[name]
        if part.span is None:
            return part.tensor
        own = part.tensor.detach().cpu().contiguous()
        data = own.reshape(-1).view(torch.uint8).numpy().tobytes() if own.numel() else b""
        pieces = bytearray().join(self._ranks.exchange(f"all of {name}", data))
        whole = torch.frombuffer(pieces, dtype=own.dtype) if pieces else own.new_empty(0)
        return whole.view(tuple(self._shapes[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)
