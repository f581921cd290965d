"""Tensor parts: which part of a tensor this process holds, and the fingerprint of all parts together.

FSDP2 shards the first dimension of a parameter over the ranks. A part is contiguous: the whole tensor, or
lines of a DTensor.

A fingerprint is the root of a hash tree. No rank needs a whole tensor, and the result does not depend on the
number of ranks:

    leaf    SHA-256 of a fixed block of lines (about LEAF_ELEMENTS elements), with sum and sum of squares;
            hashed by the rank that holds its first line, to which the others send their lines of the block
    tensor  SHA-256 of its leaves, which all ranks exchange (48 bytes each)
    root    SHA-256 of names, types, shapes and tensors
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from megalith.distributed.elastic_ranks import ElasticRanks
from megalith.errors import InputError
from megalith.ops import checks

Span = tuple[int, int]  # A range: from, to


@dataclass(frozen=True)
class TensorPart:
    """What this process holds of a parameter."""

    tensor: Tensor  # A plain tensor
    span: Span | None  # Its lines in the whole parameter; None if it is the whole parameter
    whole: Tensor  # The parameter itself, a DTensor if it is sharded

    def like(self, local: Tensor) -> Tensor:
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
    send, receive = ([size * (b - a) for a, b in spans] for spans in (out, into))
    got = ranks.all_to_all(sent, send, receive, "lines")
    return got.view(last - first, *tensor.shape[1:])


LEAF_ELEMENTS = 1 << 16
_LEAF = struct.Struct("<32sdd")


@dataclass(frozen=True)
class ParameterPrint:
    """The fingerprint of one parameter."""

    norm: float  # Its L2 norm, in float64
    mean: float
    digest: bytes  # Its name, type and shape, and the hash of its bytes
    hash64: int  # 64 bits of the hash of its bytes, signed


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of weights.

    Attributes:
        parameters: By name.
    """

    parameters: dict[str, ParameterPrint]

    @cached_property
    def hash(self) -> str:
        """SHA-256 of names, types, shapes and bytes."""
        return self.hash_of(self.parameters)

    def hash_of(self, names: Iterable[str]) -> str:
        """Return the hash of some of the parameters.

        Args:
            names: Their names.

        Returns:
            What `hash` is of a fingerprint of these alone.
        """
        chosen = sorted(names)
        return hashlib.sha256(b"".join(self.parameters[name].digest for name in chosen)).hexdigest()

    @property
    def norm(self) -> float:
        """The norm of all parameters together."""
        return math.sqrt(math.fsum(each.norm**2 for each in self.parameters.values()))

    def to_json(self) -> dict[str, list[float | int | None]]:
        """Return norm, mean and hash64 by parameter; what is not finite is null."""
        return {
            name: [*(x if math.isfinite(x) else None for x in (each.norm, each.mean)), each.hash64]
            for name, each in self.parameters.items()
        }


def fingerprint(parameters: Mapping[str, Tensor], *, ranks: ElasticRanks | None = None) -> Fingerprint:
    """Compute the fingerprint of tensors. A collective call if some are sharded.

    Args:
        parameters: The tensors by name.
        ranks: The ranks over which some are sharded.

    Returns:
        The fingerprint, equal for any number of ranks.
    """
    together = ElasticRanks.or_alone(ranks)
    checks.mapping(parameters, "fingerprint: parameters", "{'weight': tensor}")
    prints = {}
    for name in sorted(parameters):
        tensor = parameters[name]
        if not isinstance(tensor, Tensor) or tensor.is_meta or tensor.is_complex():
            raise InputError(
                f"fingerprint: {name!r} must be a real tensor with data, got {checks.kind(tensor)}"
            )
        part = part_of(name, tensor.detach(), together)
        leaves = _leaves(part, tuple(tensor.shape), together)
        if part.span is not None:
            leaves = b"".join(together.exchange("leaves", leaves))
        found = list(_LEAF.iter_unpack(leaves))
        own = hashlib.sha256(b"".join(digest for digest, _, _ in found)).digest()
        prints[name] = ParameterPrint(
            norm=math.sqrt(_sum([squares for _, _, squares in found])),
            mean=_sum([total for _, total, _ in found]) / max(1, tensor.numel()),
            digest=f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode() + own,
            hash64=int.from_bytes(own[:8], "big", signed=True),
        )
    return Fingerprint(prints)


def _leaves(part: TensorPart, shape: tuple[int, ...], ranks: ElasticRanks) -> bytes:
    """The leaves whose first line this process holds."""
    lines = shape[0] if shape else 1
    width = math.prod(shape[1:])
    if not lines * width:
        return b""
    each = max(1, LEAF_ELEMENTS // width)
    local = part.tensor.reshape(-1, width)
    start, stop = part.span or (0, lines)
    tail = local[:0]
    if part.span is not None:
        spans = shard_spans(lines, ranks.size)
        head = min(stop, -(-start // each) * each) - start  # lines of a leaf that begins on a lower rank
        owner = start // each * each
        size = width * local.element_size()
        send = [size * head if a <= owner < b else 0 for a, b in spans]
        receive = [
            size * (min(b, -(-a // each) * each) - a)
            if a < b and a % each and start <= a // each * each < stop
            else 0
            for a, b in spans
        ]
        sent = local[:head].cpu().contiguous().view(-1).view(torch.uint8)
        got = ranks.all_to_all(sent, send, receive, "lines of leaves")
        tail = got.view(local.dtype).view(-1, width)
        local, start = local[head:], start + head
    found = []
    for at in range(0, len(local), each):
        block = local[at : at + each].cpu()
        if at + each > len(local) and len(tail):
            block = torch.cat([block, tail])
        data = block.contiguous().view(-1)
        digest = hashlib.sha256(data.view(torch.uint8).numpy().data).digest()
        wide = data.double().numpy()
        found.append(_LEAF.pack(digest, float(wide.sum()), float((wide * wide).sum())))
    return b"".join(found)


def _sum(values: list[float]) -> float:
    """The exact sum; infinities and NaN are allowed."""
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan
