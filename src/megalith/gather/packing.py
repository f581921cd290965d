"""Bits to bytes and back: 12-bit indices, codes of 2, 4 or 8 bits. Each row starts at a byte of its own.

Two indices fill three bytes: the low byte of the first; its high four bits below the low four of the
second; the high byte of the second. Codes fill a byte from its low bits up. Bits that no entry of a row
uses are zero: the same row always has the same bytes, so digests of rows compare.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_indices(indices: Tensor) -> Tensor:
    """Indices [n, k], each from 0 to 4095, as uint8 [n, ceil(1.5 k)]."""
    rows, keep = indices.shape
    whole = torch.zeros(rows, keep + keep % 2, dtype=torch.int32, device=indices.device)
    whole[:, :keep] = indices
    first, second = whole[:, 0::2], whole[:, 1::2]
    triples = torch.stack([first & 0xFF, (first >> 8) | ((second & 0xF) << 4), second >> 4], dim=2)
    return triples.to(torch.uint8).flatten(1)[:, : -(-3 * keep // 2)].contiguous()


def unpack_indices(packed: Tensor, keep: int) -> Tensor:
    """Bytes [n, ceil(1.5 k)] as int32 [n, k]."""
    rows = packed.shape[0]
    pairs = keep // 2
    triples = packed[:, : 3 * pairs].to(torch.int32).view(rows, pairs, 3)
    out = torch.empty(rows, keep, dtype=torch.int32, device=packed.device)
    out[:, 0 : 2 * pairs : 2] = triples[:, :, 0] | ((triples[:, :, 1] & 0xF) << 8)
    out[:, 1 : 2 * pairs : 2] = (triples[:, :, 1] >> 4) | (triples[:, :, 2] << 4)
    if keep % 2:
        out[:, -1] = packed[:, -2].to(torch.int32) | ((packed[:, -1].to(torch.int32) & 0xF) << 8)
    return out


def spare_index_bits(packed: Tensor, keep: int) -> Tensor:
    """What stands in bits that no index of a row uses: uint8 [n], zeros in a proper payload."""
    return packed[:, -1] >> 4 if keep % 2 else torch.zeros_like(packed[:, 0])


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [n, k] below 2^bits as uint8 [n, ceil(bits k / 8)]."""
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
    """Bytes [n, ceil(bits k / 8)] as codes uint8 [n, k]."""
    rows, each, mask = packed.shape[0], 8 // bits, (1 << bits) - 1
    out = torch.empty(rows, packed.shape[1], each, dtype=torch.uint8, device=packed.device)
    for place in range(each):
        out[:, :, place] = (packed >> (bits * place)) & mask
    return out.flatten(1)[:, :keep]


def spare_code_bits(packed: Tensor, keep: int, bits: int) -> Tensor:
    """What stands in bits that no code of a row uses: uint8 [n], zeros in a proper payload."""
    used = keep * bits % 8
    return packed[:, -1] >> used if used else torch.zeros_like(packed[:, 0])
