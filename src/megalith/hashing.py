"""Ids of text: `hash_strings` maps a string to a 64-bit id, the same in every process and version.

The id is the xxHash64 of the UTF-8 bytes. This module does not store the strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.bits import signed
from megalith.errors import InputError
from megalith.library import native_module

if TYPE_CHECKING:
    from typing_extensions import Buffer

Strings = Sequence[str] | Sequence[bytes] | Sequence[str | bytes] | NDArray[Any]

_WORD = 2**64 - 1
_PRIMES = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


def hash_strings(strings: Strings, *, seed: int = 0) -> Tensor:
    """Map each string to an id: xxHash64 of its UTF-8 bytes.

    A str and its UTF-8 bytes have the same id. Ids may be negative. Among n different strings, two have the
    same id with a probability of about n^2 / 2^65.

    Args:
        strings: A list or tuple of n str or bytes, or a numpy array of them.
        seed: 0 to 2^64 - 1.

    Returns:
        int64 [n], or int64 in the shape of the array.

    Raises:
        InputError: `strings` is a single string, or an item is not a string.
    """
    items, shape = _items(strings)
    data, offsets = _join(items)
    return _hash(data, offsets, _check_seed(seed)).view(shape)


def hash_strings_reference(strings: Strings, *, seed: int = 0) -> Tensor:
    """Compute `hash_strings` in plain Python: the reference that tests compare with."""
    items, shape = _items(strings)
    seed = _check_seed(seed)
    hashes = [signed(_xxhash64(_encode(item, i), seed)) for i, item in enumerate(items)]
    return torch.tensor(hashes, dtype=torch.int64, device="cpu").view(shape)


def hash_bytes(data: Buffer, offsets: Tensor, *, seed: int = 0) -> Tensor:
    """Map strings in one buffer, as in an Arrow array, to the ids of `hash_strings`.

    Args:
        data: Bytes, or a contiguous buffer, of which the used part is copied.
        offsets: int64 or int32 [n + 1]; string i is `data[offsets[i]:offsets[i + 1]]`. The first offset need
            not be 0.
        seed: 0 to 2^64 - 1.

    Returns:
        int64 [n].

    Raises:
        InputError: The offsets descend or are outside the data.
    """
    try:
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
    except TypeError:
        kind = type(data).__name__
        raise InputError(f"hash_bytes: data must be bytes or a contiguous buffer, got {kind}") from None
    if not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int64, torch.int32):
        raise InputError("hash_bytes: offsets must be an int64 or int32 tensor")
    if offsets.dim() != 1 or offsets.numel() < 1 or not offsets.is_cpu:
        shape, device = list(offsets.shape), offsets.device
        raise InputError(f"hash_bytes: offsets must be [n + 1] on the CPU, got {shape} on {device}")
    offsets = offsets.to(torch.int64).contiguous()
    first, last = int(offsets[0]), int(offsets[-1])
    if first < 0 or last > len(view) or bool((offsets[1:] < offsets[:-1]).any()):
        raise InputError(f"hash_bytes: offsets must ascend within 0 .. {len(view)}, the size of data")
    if isinstance(data, bytes):
        return _hash(data, offsets, _check_seed(seed))
    return _hash(bytes(view[first:last]), offsets - first, _check_seed(seed))


# ---- helpers


def _items(strings: Strings) -> tuple[Sequence[Any], tuple[int, ...]]:
    if isinstance(strings, str | bytes):
        raise InputError("hash_strings: strings is a single string; pass a list: [string]")
    if isinstance(strings, np.ndarray):
        if strings.size and strings.dtype.kind not in "USOT":
            raise InputError(f"hash_strings: strings must be an array of str or bytes, got {strings.dtype}")
        return strings.ravel().tolist(), strings.shape
    if not isinstance(strings, list | tuple):
        kind = type(strings).__name__
        raise InputError(f"hash_strings: strings must be a list, a tuple or a numpy array, got {kind}")
    return strings, (len(strings),)


def _encode(item: object, position: int) -> bytes:
    if isinstance(item, bytes):
        return item
    if not isinstance(item, str):
        kind = type(item).__name__
        raise InputError(f"hash_strings: strings[{position}] must be a str or bytes, got {kind}: {item!r}")
    try:
        return item.encode()
    except UnicodeEncodeError:
        raise InputError(f"hash_strings: strings[{position}] cannot be encoded as UTF-8: {item!r}") from None


def _join(items: Sequence[Any]) -> tuple[bytes, Tensor]:
    """Concatenate the strings; return the bytes and int64 offsets [n + 1]."""
    parts: Sequence[Any] = items
    try:
        data = "".join(items).encode("ascii")  # so that a string has as many bytes as characters
    except (TypeError, UnicodeEncodeError):
        parts = [_encode(item, i) for i, item in enumerate(items)]
        data = b"".join(parts)
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)), out=offsets[1:])
    return data, torch.from_numpy(offsets)


def _hash(data: bytes, offsets: Tensor, seed: int) -> Tensor:
    native = native_module()
    if native is None:
        hashes = [signed(_xxhash64(data[a:b], seed)) for a, b in pairwise(offsets.tolist())]
        return torch.tensor(hashes, dtype=torch.int64, device="cpu")
    out = torch.empty(offsets.numel() - 1, dtype=torch.int64, device="cpu")
    native.hash_strings(data, offsets, seed, out, torch.get_num_threads())
    return out


def _xxhash64(data: bytes, seed: int) -> int:
    p1, p2, p3, p4, p5 = _PRIMES
    words = np.frombuffer(data, "<u8", len(data) // 8).tolist()
    striped = len(data) // 32 * 4
    value = seed + p5
    if striped:
        lanes = [seed + p1 + p2, seed + p2, seed, seed - p1]
        for i, word in enumerate(words[:striped]):
            lanes[i % 4] = _absorb(lanes[i % 4], word)
        value = sum(_rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True))
        for lane in lanes:
            value = (value ^ _absorb(0, lane)) * p1 + p4 & _WORD
    value = value + len(data) & _WORD
    for word in words[striped:]:
        value = _rotate(value ^ _absorb(0, word), 27) * p1 + p4 & _WORD
    rest = data[len(words) * 8 :]
    if len(rest) >= 4:
        word, rest = int.from_bytes(rest[:4], "little"), rest[4:]
        value = _rotate(value ^ word * p1 & _WORD, 23) * p2 + p3 & _WORD
    for byte in rest:
        value = _rotate(value ^ byte * p5 & _WORD, 11) * p1 & _WORD
    value = (value ^ value >> 33) * p2 & _WORD
    value = (value ^ value >> 29) * p3 & _WORD
    return value ^ value >> 32


def _absorb(lane: int, word: int) -> int:
    return _rotate(lane + word * _PRIMES[1] & _WORD, 31) * _PRIMES[0] & _WORD


def _rotate(x: int, bits: int) -> int:
    return (x << bits | x >> (64 - bits)) & _WORD


def _check_seed(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _WORD:
        raise InputError(f"hash_strings: seed must be an int in 0 .. 2^64 - 1, got {seed!r}")
    return seed
