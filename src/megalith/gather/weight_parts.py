"""Weight parts: which part of each parameter this process holds, their fingerprint, and their snapshot.

A parameter is a whole tensor, or lines of a DTensor that FSDP2 shards over the ranks. Parts are contiguous,
so the chunks that a part touches are a range.

A fingerprint is a hash tree that does not depend on the number of ranks, and needs no whole parameter:

    leaf    SHA-256 of a fixed block of lines (about LEAF_ELEMENTS elements), with sum and sum of squares
            hashed by the rank that holds its first line; the others send it the lines they hold of the block
    tensor  SHA-256 of its leaves, which all ranks exchange (48 bytes each)
    root    SHA-256 of names, types, shapes and tensors
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megalith.distributed.surviving_ranks import Ranks
from megalith.errors import InputError
from megalith.gather.chunks import Area
from megalith.gather.payload_schema import ParameterSpec, PayloadSchema, Weights, named_weights
from megalith.ops import checks
from megalith.storage.spool import FileBody, SpoolWriter

Span = tuple[int, int]
"""A range: from, to."""
SnapshotPolicy = Literal["none", "host", "disk"]
LEAF_ELEMENTS = 1 << 16
_LEAF = struct.Struct("<32sdd")


@dataclass(frozen=True)
class Part:
    """What this process holds of a parameter.

    Attributes:
        tensor: A plain tensor.
        span: Its lines in the whole parameter; None if it is the whole parameter.
        whole: The parameter itself, a DTensor if it is sharded.
    """

    tensor: Tensor
    span: Span | None
    whole: Tensor

    def like(self, local: Tensor) -> Tensor:
        """Wrap a tensor like this parameter.

        Args:
            local: A tensor of the shape of `tensor`.

        Returns:
            A DTensor if the parameter is one; otherwise `local`.
        """
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


def weights_of(parameters: Weights, schema: PayloadSchema) -> dict[str, Tensor]:
    """Return the parameters of a schema.

    Args:
        parameters: The model, or its parameters by name.
        schema: The schema.

    Returns:
        The parameters by name, detached.

    Raises:
        InputError: One is missing, not contiguous, or has another shape or type.
    """
    given = named_weights(parameters, frozen=True)
    for spec in schema.parameters:
        tensor = given.get(spec.name)
        if tensor is None:
            raise InputError(f"parameter {spec.name!r} of the schema was not given")
        if tuple(tensor.shape) != spec.shape or not tensor.is_floating_point():
            raise InputError(
                f"parameter {spec.name!r} is {tensor.dtype} {tuple(tensor.shape)}, "
                f"its schema has floating point {spec.shape}"
            )
        if tensor.is_meta or not tensor.is_contiguous():
            raise InputError(f"parameter {spec.name!r} is not contiguous: use .contiguous()")
    return {spec.name: given[spec.name].detach() for spec in schema.parameters}


def part_of(name: str, tensor: Tensor, ranks: Ranks) -> Part:
    """Return what this rank holds of a parameter.

    Args:
        name: The name of the parameter.
        tensor: The parameter.
        ranks: The ranks that share the work.

    Returns:
        Its part.

    Raises:
        InputError: The parameter is sharded over other ranks, or not by Shard(0).
    """
    if type(tensor) in (Tensor, nn.Parameter):
        return Part(tensor, None, tensor)
    # Importing it takes about as long as torch itself: only for those that shard.
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(tensor, DTensor):
        return Part(tensor, None, tensor)
    mesh, placements = tensor.device_mesh, tensor.placements
    local = tensor.to_local()
    if mesh.ndim != 1 or mesh.size() != ranks.size:
        raise InputError(
            f"parameter {name!r} is sharded over a mesh of {tuple(mesh.shape)}, but {ranks.size} ranks "
            "gather: pass ranks=Ranks.of_group() with all ranks of a one-dimensional mesh"
        )
    if placements == (Replicate(),):
        return Part(local, None, tensor)
    if placements != (Shard(0),):
        raise InputError(f"parameter {name!r} is placed as {placements}: only Shard(0) or Replicate() works")
    place = mesh.get_local_rank()
    span = shard_spans(tensor.shape[0], mesh.size())[place]
    if place != ranks.place or local.shape[0] != span[1] - span[0] or not local.is_contiguous():
        raise InputError(f"parameter {name!r} is not sharded evenly and in the order of ranks")
    return Part(local, span, tensor)


def shard_spans(length: int, size: int) -> list[Span]:
    """Return how FSDP2 divides the first dimension of a parameter.

    Args:
        length: The number of lines.
        size: The number of ranks.

    Returns:
        The lines of each rank.
    """
    each = -(-length // size) if length else 0
    return [(min(length, each * place), min(length, each * (place + 1))) for place in range(size)]


def area_of(spec: ParameterSpec, span: Span | None) -> Area:
    """Return the lines and columns of a parameter's matrix that a part covers.

    Args:
        spec: The parameter.
        span: The part.

    Returns:
        The area.
    """
    lines, columns = spec.matrix
    if span is None:
        return Area(0, lines, 0, columns)
    return Area(0, 1, *span) if len(spec.shape) < 2 else Area(*span, 0, columns)


def rows_of(spec: ParameterSpec, span: Span | None) -> Span:
    """Return the chunks that a part touches.

    Args:
        spec: The parameter.
        span: The part.

    Returns:
        The first chunk, and the one after the last.
    """
    if span is None:
        return 0, spec.rows
    if span[0] >= span[1]:
        return 0, 0
    height, width = spec.chunk
    if len(spec.shape) < 2:
        return span[0] // width, -(-span[1] // width)
    return span[0] // height * spec.bands[1], -(-span[1] // height) * spec.bands[1]


def first_row_of(spec: ParameterSpec, line: int) -> int:
    """Return the first chunk that begins at or after a line of the first dimension.

    Args:
        spec: The parameter.
        line: The line.

    Returns:
        The number of the chunk; `spec.rows` if there is none.
    """
    height, width = spec.chunk
    return -(-line // width) if len(spec.shape) < 2 else -(-line // height) * spec.bands[1]


# ---- fingerprint


@dataclass(frozen=True)
class ParameterPrint:
    """The fingerprint of one parameter.

    Attributes:
        norm: Its L2 norm, in float64.
        mean: Its mean, in float64.
        hash64: 64 bits of the hash of its bytes, signed.
    """

    norm: float
    mean: float
    hash64: int


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of weights.

    Attributes:
        parameters: By name.
        hash: SHA-256 of names, types, shapes and bytes.
    """

    parameters: dict[str, ParameterPrint]
    hash: str

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


def fingerprint(parameters: Mapping[str, Tensor], *, ranks: Ranks | None = None) -> Fingerprint:
    """Compute the fingerprint of tensors. A collective call if some are sharded.

    Args:
        parameters: The tensors by name.
        ranks: The ranks over which some are sharded.

    Returns:
        The fingerprint, equal for any number of ranks.
    """
    together = ranks or Ranks.alone()
    checks.mapping(parameters, "fingerprint: parameters", "{'weight': tensor}")
    root, prints = hashlib.sha256(), {}
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
        root.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode() + own)
        prints[name] = ParameterPrint(
            norm=math.sqrt(_sum([squares for _, _, squares in found])),
            mean=_sum([total for _, total, _ in found]) / max(1, tensor.numel()),
            hash64=int.from_bytes(own[:8], "big", signed=True),
        )
    return Fingerprint(prints, root.hexdigest())


def _leaves(part: Part, shape: tuple[int, ...], ranks: Ranks) -> bytes:
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
        got = ranks.all_to_all("lines of leaves", sent, send, receive)
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


# ---- snapshot


class WeightSnapshot:
    """A copy of tensors, with which a failed step is undone.

    Args:
        tensors: The tensors of this process.
        policy: "none" (no copy), "host" (a copy in memory) or "disk" (a copy in a spool file).
        directory: Where the spool file is stored.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], policy: SnapshotPolicy, directory: Path | None = None
    ) -> None:
        checks.one_of(policy, ("none", "host", "disk"), "snapshot")
        self.policy = policy
        self._tensors = tensors
        self._copies: dict[str, Tensor] = {}
        self._file: FileBody | None = None
        if policy == "host":
            self._copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        elif policy == "disk":
            spool = SpoolWriter(directory)
            try:
                for tensor in tensors.values():
                    flat = tensor.detach().cpu().contiguous().view(-1)
                    spool.write(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
                self._file = spool.finish()
            except BaseException:
                spool.discard()
                raise

    @property
    def can_restore(self) -> bool:
        """Whether there is a copy."""
        return self.policy != "none"

    @torch.no_grad()
    def restore(self) -> None:
        """Set the tensors to the copy."""
        at = 0
        for name, tensor in self._tensors.items():
            if name in self._copies:
                tensor.copy_(self._copies[name])
            elif self._file is not None and tensor.numel():
                data = self._file.read(at, tensor.numel() * tensor.element_size())
                tensor.copy_(torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape))
                at += len(data)

    def close(self) -> None:
        """Delete the copy."""
        self._copies = {}
        if self._file is not None:
            self._file.close()
            self._file = None
