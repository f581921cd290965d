"""Broadcast of the dense weights of a model at the start: every rank gets those of rank 0.

Tables need no broadcast: an initial row is a function of seed, table and id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.distributed.ranks import has_process_group
from megalith.errors import InputError

BUCKET_BYTES = 25 << 20
"""Tensors are sent together up to this size; larger ones separately."""


def broadcast_dense(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Copies the parameters and buffers of rank 0 of a group to all its ranks. A collective call.

    Gradients, optimizer state and tables stay unchanged.

    Args:
        model: The model.
        group: The process group; None: the default group.

    Raises:
        InputError: On all ranks, before anything is written: if names, shapes or dtypes differ between ranks,
            or a lazy module has not seen its first batch.
    """
    if not has_process_group():
        raise InputError("broadcast_dense needs a process group: call init_process_group first")
    named = list(chain(model.named_parameters(), model.named_buffers()))
    wire = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    _check_equal(named, group, wire)
    with torch.no_grad():
        for bucket in _buckets([tensor for _, tensor in named]):
            flat = torch.cat([_bytes(tensor).to(wire) for tensor in bucket])
            dist.broadcast(flat, group=group, group_src=0)
            if dist.get_rank(group) == 0:
                continue
            for tensor, piece in zip(bucket, flat.split([t.nbytes for t in bucket]), strict=True):
                # clone: a view as a wider dtype needs aligned memory
                tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))


def _check_equal(
    named: list[tuple[str, Tensor]], group: dist.ProcessGroup | None, wire: torch.device
) -> None:
    """Raises InputError on every rank if the tensors of one rank differ from those of rank 0."""
    lazy = [name for name, tensor in named if nn.parameter.is_lazy(tensor)]
    described = "lazy" if lazy else repr([(name, tuple(x.shape), str(x.dtype)) for name, x in named])
    digest = int.from_bytes(hashlib.sha256(described.encode()).digest()[:8], "big", signed=True)
    own = torch.tensor([digest, len(lazy)], device=wire)
    all_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_ranks, own, group=group)
    descriptions = torch.stack(all_ranks).tolist()
    if unready := [rank for rank, (_, count) in enumerate(descriptions) if count]:
        here = f" (here: {', '.join(lazy)})" if lazy else ""
        raise InputError(
            f"broadcast_dense: lazy parameters have no shape yet on ranks {unready}{here}; run a batch "
            "through the model first"
        )
    if other := [rank for rank, (theirs, _) in enumerate(descriptions) if theirs != descriptions[0][0]]:
        raise InputError(
            f"broadcast_dense: names, shapes or dtypes of parameters or buffers of ranks {other} differ from "
            "those of rank 0; build the same model on every rank"
        )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yields the tensors in order, in groups of up to BUCKET_BYTES, without empty tensors."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
