"""Tensor parts: which part of a tensor this process holds, whole or as lines of a DTensor.

FSDP2 shards the first dimension of a parameter over the ranks. A part is contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalith.distributed.elastic_ranks import ElasticRanks
from megalith.errors import InputError

Span = tuple[int, int]
"""A range: from, to."""


@dataclass(frozen=True)
class TensorPart:
    """What this process holds of a parameter."""

    tensor: Tensor  # A plain tensor
    span: Span | None  # Its lines in the whole parameter; None if it is the whole parameter
    whole: Tensor  # The parameter itself, a DTensor if it is sharded

    def like(self, local: Tensor) -> Tensor:
        """Wrap a tensor like this parameter."""
        if self.whole is self.tensor:
            return local
        from torch.distributed.tensor import DTensor

        whole: Any = self.whole
        return DTensor.from_local(
            local,
            whole.device_mesh,
            whole.placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )


def part_of(name: str, tensor: Tensor, ranks: ElasticRanks) -> TensorPart:
    """Return what this rank holds of a parameter."""
    if type(tensor) in (Tensor, nn.Parameter):
        return TensorPart(tensor, None, tensor)
    # Importing it takes about as long as torch itself: only for those that shard.
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(tensor, DTensor):
        return TensorPart(tensor, None, tensor)
    mesh, placements = tensor.device_mesh, tensor.placements
    local = tensor.to_local()
    if mesh.ndim != 1 or mesh.size() != ranks.size:
        raise InputError(
            f"parameter {name!r} is sharded over a mesh of {tuple(mesh.shape)}, but {ranks.size} ranks "
            "gather: pass ranks=ElasticRanks.of_group() with all ranks of a one-dimensional mesh"
        )
    if placements == (Replicate(),):
        return TensorPart(local, None, tensor)
    if placements != (Shard(0),):
        raise InputError(f"parameter {name!r} is placed as {placements}: only Shard(0) or Replicate() works")
    place = mesh.get_local_rank()
    span = shard_spans(tensor.shape[0], mesh.size())[place]
    if place != ranks.place or local.shape[0] != span[1] - span[0] or not local.is_contiguous():
        raise InputError(f"parameter {name!r} is not sharded evenly and in the order of ranks")
    return TensorPart(local, span, tensor)


def shard_spans(length: int, size: int) -> list[Span]:
    """Return how FSDP2 divides the first dimension of a parameter."""
    each = -(-length // size) if length else 0
    return [(min(length, each * place), min(length, each * (place + 1))) for place in range(size)]


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def move_lines(tensor: Tensor, have: Sequence[Span], need: Sequence[Span], ranks: ElasticRanks) -> Tensor:
    """Return the lines that this rank needs of a tensor that is divided over ranks. A collective call."""
    start, (first, last), place = have[ranks.place][0], need[ranks.place], ranks.place
    size = math.prod(tensor.shape[1:])

    def common(a: Span, b: Span) -> Span:
        return max(a[0], b[0]), max(max(a[0], b[0]), min(a[1], b[1]))

    out = [common(have[place], span) for span in need]
    into = [common(span, need[place]) for span in have]
    sent = torch.cat([tensor[a - start : b - start].cpu().to(torch.float32).reshape(-1) for a, b in out])
    got = ranks.all_to_all("lines", sent, [size * (b - a) for a, b in out], [size * (b - a) for a, b in into])
    return got.view(last - first, *tensor.shape[1:])
