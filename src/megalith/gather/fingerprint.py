"""Fingerprints of weights: what ranks and nodes compare after a step to know that they are the same."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_BLOCK = 1 << 20


@dataclass(frozen=True)
class ParameterPrint:
    """One parameter: norm and mean in float64, 64 bits of a hash of its bytes (signed)."""

    norm: float
    mean: float
    hash64: int


@dataclass(frozen=True)
class Fingerprint:
    """All parameters, by name. hash: SHA-256 of names, types, shapes and bytes."""

    parameters: dict[str, ParameterPrint]
    hash: str

    @property
    def norm(self) -> float:
        """The norm of all parameters together."""
        return math.sqrt(math.fsum(each.norm**2 for each in self.parameters.values()))

    def to_json(self) -> dict[str, Any]:
        """As manifests have it."""
        return {
            "hash": self.hash,
            "parameters": {
                name: [_finite(each.norm), _finite(each.mean), each.hash64]
                for name, each in self.parameters.items()
            },
        }


def fingerprint(parameters: Mapping[str, Tensor]) -> Fingerprint:
    """The fingerprint of these tensors, by name. Memory: a block of a million elements."""
    whole = hashlib.sha256()
    prints = {}
    for name in sorted(parameters):
        tensor = parameters[name].detach()
        own = hashlib.sha256()
        squares, sums = [], []
        flat = tensor.reshape(-1)
        for start in range(0, flat.numel(), _BLOCK):
            block = flat[start : start + _BLOCK].cpu().contiguous()
            own.update(_raw(block))
            wide = block.double().numpy()
            squares.append(float((wide * wide).sum()))
            sums.append(float(wide.sum()))
        whole.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        whole.update(own.digest())
        prints[name] = ParameterPrint(
            norm=math.sqrt(math.fsum(squares)),
            mean=math.fsum(sums) / max(1, flat.numel()),
            hash64=int.from_bytes(own.digest()[:8], "big", signed=True),
        )
    return Fingerprint(prints, whole.hexdigest())


def _finite(value: float) -> float | None:
    """JSON has no infinity: weights that ran away show as null, and by their hash."""
    return value if math.isfinite(value) else None


def _raw(block: Tensor) -> memoryview:
    return block.view(torch.uint8).numpy().data if block.numel() else memoryview(b"")
