"""Chunks: tensors to chunks and back.

Chunks are numbered band by band: all chunks across the first lines, then the next. A range of chunks is at
most three rectangles of the matrix, so that an update can work on a range without the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.gather.payload_schema import ParameterSpec


class Rectangle(NamedTuple):
    """Chunks `start` to `stop` of a range: bands `top` to `bottom`, chunks `left` to `right` of each."""

    start: int
    stop: int
    top: int
    bottom: int
    left: int
    right: int


class Area(NamedTuple):
    """Lines `top` to `bottom` and columns `left` to `right` of a matrix."""

    top: int
    bottom: int
    left: int
    right: int


def to_chunks(tensor: Tensor, spec: ParameterSpec) -> Tensor:
    """Divide a tensor into chunks.

    Args:
        tensor: A tensor of the spec's shape.
        spec: How it is divided.

    Returns:
        float32 [rows, size]; padding is zero.

    Raises:
        InputError: The tensor has another shape.
    """
    if tuple(tensor.shape) != spec.shape:
        raise InputError(f"{spec.name!r} has shape {tuple(tensor.shape)}, its schema says {spec.shape}")
    (down, across), (height, width) = spec.bands, spec.chunk
    lines, columns = spec.matrix
    whole = tensor.detach().reshape(lines, columns)
    if (lines, columns) != (down * height, across * width):
        padded = whole.new_zeros(down * height, across * width)
        padded[:lines, :columns] = whole
        whole = padded
    tiles = whole.view(down, height, across, width).permute(0, 2, 1, 3)
    return tiles.to(torch.float32).reshape(spec.rows, spec.size)


def from_chunks(chunks: Tensor, spec: ParameterSpec) -> Tensor:
    """Put chunks together; padding is dropped.

    Args:
        chunks: [rows, size].
        spec: How the tensor was divided.

    Returns:
        A tensor of the spec's shape.
    """
    (down, across), (lines, columns) = spec.bands, spec.matrix
    whole = Rectangle(0, spec.rows, 0, down, 0, across)
    return lay_out(chunks, spec, whole)[:lines, :columns].reshape(spec.shape)


def rectangles(spec: ParameterSpec, start: int, stop: int) -> Iterator[Rectangle]:
    """Divide a range of chunks into rectangles.

    Args:
        spec: How the tensor is divided.
        start: The first chunk.
        stop: The chunk after the last one.

    Yields:
        The rectangles in order; their `start` and `stop` count from the first chunk of the range.
    """
    across = spec.bands[1]
    at = start
    while at < stop:
        band, left = divmod(at, across)
        if left == 0 and stop - at >= across:
            bottom, right = stop // across, across
        else:
            bottom, right = band + 1, min(across, left + stop - at)
        count = (bottom - band) * (right - left)
        yield Rectangle(at - start, at - start + count, band, bottom, left, right)
        at += count


def lay_out(chunks: Tensor, spec: ParameterSpec, place: Rectangle) -> Tensor:
    """Put the chunks of a rectangle together, with padding.

    Args:
        chunks: [n, size].
        spec: How the tensor is divided.
        place: The rectangle.

    Returns:
        [lines, columns].
    """
    height, width = spec.chunk
    down, across = place.bottom - place.top, place.right - place.left
    return chunks.view(down, across, height, width).permute(0, 2, 1, 3).reshape(down * height, across * width)


def covered(spec: ParameterSpec, place: Rectangle, held: Area) -> Area:
    """Return which part of an area a rectangle covers, without padding.

    Args:
        spec: How the tensor is divided.
        place: The rectangle.
        held: The area.

    Returns:
        The part; it is empty if `top` >= `bottom` or `left` >= `right`.
    """
    height, width = spec.chunk
    return Area(
        max(place.top * height, held.top),
        min(place.bottom * height, held.bottom),
        max(place.left * width, held.left),
        min(place.right * width, held.right),
    )


def within(matrix: Tensor, area: Area, top: int, left: int) -> Tensor:
    """Return the part of a matrix that an area covers.

    Args:
        matrix: [lines, columns].
        area: The area, in the coordinates of the whole parameter.
        top: The first line of the matrix in these coordinates.
        left: Its first column.

    Returns:
        A view.
    """
    return matrix[area.top - top : area.bottom - top, area.left - left : area.right - left]
