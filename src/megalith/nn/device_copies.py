"""Copies between tables on the CPU and a dense part on a GPU.

They go through pinned host memory: the GPU copies to and from it directly, and the host does not wait for
copies to the GPU. Copies to the host are started together, and the host waits once for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megalith.ragged import Ragged


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors to a device without waiting for it."""
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    # torch keeps pinned memory until the copy from it has ended.
    return [
        (tensor.pin_memory() if tensor.is_cpu else tensor).to(device, non_blocking=True) for tensor in tensors
    ]


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to the CPU; wait once, until all have arrived."""
    copies, devices = [], set()
    for tensor in tensors:
        if not tensor.is_cuda:
            copies.append(tensor.cpu())
            continue
        devices.add(tensor.device)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
        copies.append(copy.copy_(tensor.detach(), non_blocking=True))
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copies


def columns_to_host(columns: Mapping[str, Ragged]) -> dict[str, Ragged]:
    """Copy the columns of a batch to the CPU."""
    parts = [(name, column.values, column.row_splits, column.weights) for name, column in columns.items()]
    arrived = iter(to_host([x for _, *own in parts for x in own if x is not None]))
    copied = {}
    for name, *own in parts:
        values, splits, weights = (None if x is None else next(arrived) for x in own)
        assert values is not None
        assert splits is not None
        copied[name] = Ragged.trusted(values, splits, weights, single=columns[name].single)
    return copied
