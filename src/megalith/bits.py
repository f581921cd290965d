"""64-bit integer arithmetic that torch does not have for its signed tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def signed(x: int) -> int:
    """Return the int64 with the same 64 bits as an unsigned number."""
    return x - (1 << 64) if x >= 1 << 63 else x


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros (torch fills with the sign bit)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def unsigned_divmod(x: Tensor, divisor: int) -> tuple[Tensor, Tensor]:
    """Divide the unsigned values of an int64 tensor."""
    quotient = shift_right(x, 1) // divisor * 2
    rest = x - quotient * divisor  # at most 2 * divisor
    return quotient + rest // divisor, rest % divisor


def mix64(x: Tensor) -> Tensor:
    """Mix the 64 bits of each number. It is a bijection and the reference of mix64 in native/hash.hpp."""
    x = (x ^ shift_right(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift_right(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ shift_right(x, 31)


def show_id_dtype(dtype: torch.dtype) -> str:
    """Describe a dtype that ids cannot have, for an error message."""
    hint = " (ids.view(torch.int64) keeps all 64 bits)" if dtype == torch.uint64 else ""
    return f"{dtype}{hint}"
