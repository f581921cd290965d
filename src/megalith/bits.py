"""64-bit integer arithmetic that torch's signed tensors do not have."""

from __future__ import annotations

from torch import Tensor


def signed(x: int) -> int:
    """The int64 with the same 64 bits as this unsigned number."""
    return x - (1 << 64) if x >= 1 << 63 else x


def shift_right(x: Tensor, bits: int) -> Tensor:
    """`x >> bits` of int64, filled with zeros (torch fills with the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def unsigned_divmod(x: Tensor, divisor: int) -> tuple[Tensor, Tensor]:
    """Quotient and remainder of the unsigned values of int64 x by a positive divisor below 2^62."""
    quotient = shift_right(x, 1) // divisor * 2
    rest = x - quotient * divisor  # below twice the divisor, plus one
    return quotient + rest // divisor, rest % divisor


def mix64(x: Tensor) -> Tensor:
    """A bijection of 64 bits that leaves no pattern; the twin of native/hash.hpp's."""
    x = (x ^ shift_right(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift_right(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ shift_right(x, 31)
