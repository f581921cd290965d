"""The orthonormal cosine transform of chunks of a matrix.

The inverse adds in a fixed order, one product at a time: the bits of a chunk do not depend on its neighbours.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor


def forward_dct(chunks: Tensor, shape: tuple[int, int]) -> Tensor:
    """Compute the orthonormal cosine transform (DCT-II, both sides) of each chunk."""
    # chunks: [n, size]; returns: [n, size].
    height, width = shape
    down, across = _basis(height, chunks.device), _basis(width, chunks.device)
    return (down @ chunks.view(-1, height, width) @ across.T).reshape(chunks.shape)


def inverse_dct(chunks: Tensor, shape: tuple[int, int]) -> Tensor:
    """Compute the inverse of `forward_dct`. It needs twice the memory of its argument in addition."""
    # chunks: [n, size]; returns: [n, size].
    height, width = shape
    tile = chunks.view(-1, height, width)
    out = torch.zeros_like(tile)
    for line, row in enumerate(_basis(height, chunks.device)):
        out += tile[:, line : line + 1, :] * row[:, None]
    tile, out = out, torch.zeros_like(tile)
    for column, row in enumerate(_basis(width, chunks.device)):
        out += tile[:, :, column : column + 1] * row
    return out.view(chunks.shape)


@lru_cache(maxsize=256)
def _basis(side: int, device: torch.device) -> Tensor:
    """The rows of the orthonormal transform of `side` values: float32 [side, side]."""
    rows = [
        [
            math.sqrt((1 if k == 0 else 2) / side) * math.cos(math.pi * (2 * j + 1) * k / (2 * side))
            for j in range(side)
        ]
        for k in range(side)
    ]
    return torch.tensor(rows, dtype=torch.float64, device="cpu").to(torch.float32).to(device)
