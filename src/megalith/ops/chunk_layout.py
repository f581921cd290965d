"""The chunks of a matrix: cut out, put together, and the step of the matrix by rows that hold chunks.

Chunks are numbered band by band: all chunks across the first lines, then the next. Chunks at the lower and
right border may extend beyond the matrix. The step has a native form for CPU tensors, and one in plain torch
with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from megalith.library import native_module

StepRule = Literal["sgd", "nesterov", "sign"]
STEP_BYTES = 24 << 16
"""Memory that a step needs at most in addition to its arguments."""
_STEP_POSITIONS = 1 << 16  # positions that a step in plain torch changes at once


def as_matrix(tensor: Tensor) -> Tensor:
    """Return a tensor as a matrix: one line if it has one dimension, the first against the rest otherwise."""
    # tensor: [...]; returns: [lines, columns], a view if the tensor is contiguous.
    return tensor.reshape(1, -1) if tensor.dim() < 2 else tensor.flatten(1)


def to_chunks(matrix: Tensor, chunk: tuple[int, int]) -> Tensor:
    """Cut a matrix into chunks."""
    # matrix: [lines, columns]; returns: float32 [chunks, height * width].
    (lines, columns), (height, width) = matrix.shape, chunk
    down, across = -(-lines // height), -(-columns // width)
    if (lines, columns) != (down * height, across * width):
        padded = matrix.new_zeros(down * height, across * width)
        padded[:lines, :columns] = matrix
        matrix = padded
    tiles = matrix.view(down, height, across, width).permute(0, 2, 1, 3)
    return tiles.to(torch.float32).reshape(down * across, height * width)


def from_chunks(chunks: Tensor, shape: tuple[int, int], chunk: tuple[int, int]) -> Tensor:
    """Put a matrix together; padding is dropped."""
    # chunks: [chunks, height * width]; returns: [lines, columns].
    (lines, columns), (height, width) = shape, chunk
    return _join(chunks, -(-lines // height), -(-columns // width), chunk)[:lines, :columns]


def step_chunks(
    tile: Tensor,
    matrix: Tensor,
    momentum: Tensor | None,
    *,
    first: int,
    across: int,
    chunk: tuple[int, int],
    corner: tuple[int, int],
    rule: StepRule,
    lr: float,
    beta: float = 0.0,
) -> None:
    """Step a matrix by the chunks of a gradient."""
    # tile: float32 [n, height * width], a row for each chunk; matrix: float [lines, columns], contiguous, a
    # part of a larger matrix.
    fast = rule == "sgd" and matrix.dtype is torch.float32 and matrix.is_cpu and tile.is_contiguous()
    native = native_module() if fast else None
    if native is not None:
        native.step_chunks(tile, matrix, first, max(1, across), *chunk, *corner, lr, torch.get_num_threads())
        return
    (height, width), (above, before) = chunk, corner
    each = max(1, _STEP_POSITIONS // (height * width))
    for start in range(0, len(tile), each):
        piece = tile[start : start + each]
        for top, bottom, left, right in _rectangles(first + start, len(piece), across):
            count = (bottom - top) * (right - left)
            gradient, piece = _join(piece[:count], bottom - top, right - left, chunk), piece[count:]
            lines = _overlap(top * height - above, bottom * height - above, matrix.shape[0])
            columns = _overlap(left * width - before, right * width - before, matrix.shape[1])
            gradient = gradient[_moved(lines, top * height - above), _moved(columns, left * width - before)]
            if rule == "sign":
                gradient = gradient.sign()
            elif rule == "nesterov":
                assert momentum is not None
                own = momentum[lines, columns]
                own.mul_(beta).add_(gradient)
                gradient = (own * beta).add_(gradient)
            # Multiplied, then subtracted: fused, the two would round once here and twice there.
            scaled, target = gradient * lr, matrix[lines, columns]
            if target.dtype is torch.float32:
                target -= scaled
            else:
                target.copy_(target.to(torch.float32) - scaled)


def _join(chunks: Tensor, down: int, across: int, chunk: tuple[int, int]) -> Tensor:
    """A rectangle of chunks as a matrix."""
    height, width = chunk
    return chunks.view(down, across, height, width).permute(0, 2, 1, 3).reshape(down * height, across * width)


def _rectangles(first: int, count: int, across: int) -> Iterator[tuple[int, int, int, int]]:
    """Divide a range of chunks into at most three rectangles: bands `top` to `bottom`, and of each the chunks
    `left` to `right`.
    """
    at, stop = first, first + count
    while at < stop:
        top, left = divmod(at, across)
        if left == 0 and stop - at >= across:
            bottom, right = stop // across, across
        else:
            bottom, right = top + 1, min(across, left + stop - at)
        yield top, bottom, left, right
        at += (bottom - top) * (right - left)


def _overlap(start: int, stop: int, length: int) -> slice:
    """The part of a range that lies from 0 to `length`, possibly empty."""
    return slice(max(0, start), max(0, start, min(stop, length)))


def _moved(part: slice, start: int) -> slice:
    return slice(part.start - start, part.stop - start)
