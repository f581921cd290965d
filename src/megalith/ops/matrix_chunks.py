"""The chunks of a matrix, the unit of compressed updates: cut, transformed, coded, packed and summed.

Chunks are numbered band by band: all chunks across the first lines, then the next. Chunks at the lower
and right border may extend beyond the matrix. `forward_dct` and `inverse_dct` are the orthonormal cosine
transform of chunks; the inverse adds in a fixed order, one product at a time, so the bits of a chunk do
not depend on its neighbours.

A row of a compressed update is a chunk, of which `keep` of `size` positions are sent. Indices have 12
bits, codes 2, 4 or 8. Each row starts at a byte of its own. Two indices fill three bytes: the low byte of
the first; its high four bits below the low four of the second; the high byte of the second. Codes fill a
byte from its low bits. Unused bits are zero, so a row has only one encoding.

The functions that take most of the time have a native form for CPU tensors, and one in plain torch with
the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megalith.library import native_module

StepRule = Literal["sgd", "nesterov", "sign"]
STEP_BYTES = 24 << 16  # Memory that a step needs at most in addition to its arguments
_STEP_POSITIONS = 1 << 16  # positions that a step in plain torch changes at once


def as_matrix(tensor: Tensor) -> Tensor:
    """Return a tensor as a matrix: one line if it has one dimension, the first against the rest otherwise."""
    # tensor: [...]; returns: [lines, columns], a view if the tensor is contiguous.
    return tensor.reshape(1, -1) if tensor.dim() < 2 else tensor.flatten(1)


def to_chunks(matrix: Tensor, chunk: tuple[int, int]) -> Tensor:
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


SPARE_BITS, TOO_HIGH, NOT_ASCENDING = 1, 2, 4  # What `index_problems` finds
_SIGMAS = 6  # the range of values that codes cover


def pack_indices(indices: Tensor) -> Tensor:
    # returns: uint8 [n, ceil(1.5 k)].
    rows, keep = indices.shape
    whole = torch.zeros(rows, keep + keep % 2, dtype=torch.int32, device=indices.device)
    whole[:, :keep] = indices
    first, second = whole[:, 0::2], whole[:, 1::2]
    triples = torch.stack([first & 0xFF, (first >> 8) | ((second & 0xF) << 4), second >> 4], dim=2)
    return triples.to(torch.uint8).flatten(1)[:, : -(-3 * keep // 2)].contiguous()


def unpack_indices(packed: Tensor, keep: int) -> Tensor:
    # packed: uint8 [n, ceil(1.5 k)]; returns: int32 [n, k].
    rows = packed.shape[0]
    pairs = keep // 2
    triples = packed[:, : 3 * pairs].to(torch.int32).view(rows, pairs, 3)
    out = torch.empty(rows, keep, dtype=torch.int32, device=packed.device)
    out[:, 0 : 2 * pairs : 2] = triples[:, :, 0] | ((triples[:, :, 1] & 0xF) << 8)
    out[:, 1 : 2 * pairs : 2] = (triples[:, :, 1] >> 4) | (triples[:, :, 2] << 4)
    if keep % 2:
        out[:, -1] = packed[:, -2].to(torch.int32) | ((packed[:, -1].to(torch.int32) & 0xF) << 8)
    return out


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    # codes: uint8 [n, k] below 2^bits; returns: uint8 [n, ceil(bits k / 8)].
    rows, keep = codes.shape
    each = 8 // bits
    whole = torch.zeros(rows, -(-keep // each) * each, dtype=torch.uint8, device=codes.device)
    whole[:, :keep] = codes
    groups = whole.view(rows, whole.shape[1] // each, each)
    packed = groups[:, :, 0].clone()
    for place in range(1, each):
        packed |= groups[:, :, place] << (bits * place)
    return packed


def unpack_codes(packed: Tensor, keep: int, bits: int) -> Tensor:
    # packed: uint8 [n, ceil(bits k / 8)]; returns: uint8 [n, k].
    rows, each, mask = packed.shape[0], 8 // bits, (1 << bits) - 1
    out = torch.empty(rows, packed.shape[1], each, dtype=torch.uint8, device=packed.device)
    for place in range(each):
        out[:, :, place] = (packed >> (bits * place)) & mask
    return out.flatten(1)[:, :keep]


def quantise(values: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Code values. Bins are equally wide and cover six standard deviations around the mean."""
    # returns: codes, uint8 of the shape of `values`, and the mean of the values in each bin, float32 [bins].
    if values.numel() == 0:
        return torch.zeros_like(values, dtype=torch.uint8), values.new_zeros(bins)
    shift = values.mean()
    centred = values - shift
    spread = float(centred.norm()) / math.sqrt(max(values.numel() - 1, 1))
    scale = _SIGMAS * spread / bins
    if not math.isfinite(scale) or scale == 0.0:
        scale = 1.0
    codes = (centred / scale + bins / 2).round().clamp(0, bins - 1).to(torch.int64)
    sums = torch.zeros(bins, dtype=torch.float64, device=values.device)
    sums.scatter_add_(0, codes.flatten(), centred.flatten().to(torch.float64))
    counts = torch.bincount(codes.flatten(), minlength=bins)
    lookup = (sums / counts.clamp(min=1)).to(torch.float32) + shift
    return codes.to(torch.uint8), lookup


def largest_of_rows(rows: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Return the positions of largest magnitude of each row; of equal ones the first."""
    # rows: float32 [n, size], finite; returns: the positions, int64 [n, k], ascending, and their values,
    # float32 [n, k].
    found = largest_of_chunks(rows, (1, rows.shape[1]), keep)
    if found is not None:
        return found
    order = rows.abs().sort(dim=1, descending=True, stable=True).indices
    indices = order[:, :keep].sort(dim=1).values
    return indices, rows.gather(1, indices)


def largest_of_chunks(matrix: Tensor, chunk: tuple[int, int], keep: int) -> tuple[Tensor, Tensor] | None:
    """Do the same for the chunks of a matrix, band by band, if there is native code for it."""
    # matrix: float32 [lines, columns], finite.
    native = _native(matrix)
    if native is None:
        return None
    rows = math.prod(-(-side // each) for side, each in zip(matrix.shape, chunk, strict=True))
    indices = torch.empty(rows, keep, dtype=torch.int64, device="cpu")
    values = torch.empty(rows, keep, device="cpu")
    native.largest_of_chunks(matrix, *chunk, indices, values, torch.get_num_threads())
    return indices, values


def index_problems(packed: Tensor, keep: int, size: int) -> int:
    """Check packed indices: they must ascend within a row and be below the size, and unused bits be zero."""
    # packed: uint8 [n, ceil(1.5 k)].
    native = _native(packed)
    if native is not None:
        return int(native.check_indices(packed, keep, size))
    indices = unpack_indices(packed, keep)
    spare = keep % 2 and bool((packed[:, -1] >> 4).any())
    high = bool((indices[:, -1:] >= size).any())
    ascend = not bool((indices[:, 1:] <= indices[:, :-1]).any())
    return SPARE_BITS * bool(spare) + TOO_HIGH * high + NOT_ASCENDING * (not ascend)


def count_codes(packed: Tensor, keep: int, bits: int) -> tuple[Tensor, bool]:
    # packed: uint8 [n, ceil(bits k / 8)]; returns: how often each code occurs, int64 [2^bits], and whether
    # unused bits are set.
    counts = torch.zeros(1 << bits, dtype=torch.int64, device="cpu")
    native = _native(packed)
    if native is not None:
        return counts, bool(native.count_codes(packed, keep, bits, counts))
    used = keep * bits % 8
    found = torch.bincount(unpack_codes(packed, keep, bits).flatten(), minlength=1 << bits)
    return counts + found.cpu(), bool(used) and bool((packed[:, -1] >> used).any())


def add_chunk_rows(
    total: Tensor, count: Tensor | None, indices: Tensor, codes: Tensor, values: Tensor, keep: int, bits: int
) -> None:
    """Add the values of one peer to sums, and 1 to the counts of the positions that it sent."""
    # total: float32 [n, size]; count: uint8 or int32 [n, size], which changes; indices: uint8 [n, ceil(1.5
    # k)], checked before; codes: uint8 [n, ceil(bits k / 8)], checked before.
    native = _native(total, indices, codes, values)
    if native is not None:
        native.add_chunk_rows(indices, codes, keep, bits, values, total, count, torch.get_num_threads())
        return
    places = unpack_indices(indices, keep).to(torch.int64)
    sent = values[unpack_codes(codes, keep, bits).to(torch.int32)]
    total.scatter_add_(1, places, sent)
    if count is not None:
        count.scatter_add_(1, places, torch.ones_like(places, dtype=count.dtype))


def divide_by_counts(total: Tensor, count: Tensor) -> Tensor:
    """Divide sums by counts, in place; a count of 0 is taken as 1."""
    # total: float32 [...].
    native = _native(total, count)
    if native is None:
        return total.div_(count.clamp(min=1))
    native.divide_by_counts(total, count, torch.get_num_threads())
    return total


def common_positions(rows: Sequence[Tensor], keep: int, size: int) -> Tensor:
    """Count the positions that each pair of peers has in common."""
    # rows: the packed indices of each peer, uint8 [n, ceil(1.5 k)]; returns: int64 [peers, peers].
    count = len(rows)
    num_rows = rows[0].shape[0] if count else 0
    each = num_rows * keep
    keys = np.empty((count, each), np.int64)
    starts = np.arange(num_rows, dtype=np.int64)[:, None] * size
    for number, packed in enumerate(rows):
        places = unpack_indices(packed, keep).cpu().numpy() + starts
        keys[number] = places.reshape(-1) * count + number
    flat = keys.reshape(-1)
    flat.sort()
    places, peers = np.divmod(flat, max(1, count))
    found = np.zeros(count * count, np.int64)
    for shift in range(1, count):
        same = places[shift:] == places[:-shift]
        if not same.any():
            break
        pairs = peers[:-shift][same] * count + peers[shift:][same]
        found += np.bincount(pairs, minlength=count * count)
    matrix = found.reshape(count, count)
    matrix += matrix.T
    matrix[np.arange(count), np.arange(count)] = each
    return torch.from_numpy(matrix)


def _native(*tensors: Tensor) -> Any:
    """The native module, if it can work on these tensors."""
    return native_module() if all(each.is_cpu and each.is_contiguous() for each in tensors) else None
