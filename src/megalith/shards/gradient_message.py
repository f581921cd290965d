"""The message of gradients from one rank to another: a header, one bit per id, the values.

    part       content
    header     sequence number, flags (1 failed, 4 left), step, time, scale, clip_norm: int64, the last two
               the bits of float64
    bits       one per requested id (1: it has a gradient), padded to 8 bytes
    values     the gradients by table, in the precision of the wire, padded to 8 bytes

A rank that fails the update sends a header and zeros, as the other ranks expect data of a known size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.shards.wire import Wire

NO_TIME = -1
"""Stands for no time in a header."""
_HEAD_WORDS = 6
_HEAD_BYTES = 8 * _HEAD_WORDS


@dataclass(frozen=True)
class GradientPush:
    """Gradients to send.

    Attributes:
        flat: float32, the summed gradients of all distinct ids.
        mask: bool [u], which ids take part; None: all.
        step: See `Shards.apply_gradients`, as are the others.
        clip_norm: 0 for no limit.
        rates: The learning rate of each segment, for the trainable tables with requested ids.
    """

    flat: Tensor
    mask: Tensor | None
    step: int
    time: float | None
    scale: float
    clip_norm: float
    rates: Mapping[str, list[float]]


class GradientMessage:
    """Encodes and decodes messages.

    In all methods `counts` has the number of ids: int64 [ranks, tables], or [tables] for one rank.

    Args:
        wire: The precision of the values.
        dims: The dim of each table.
    """

    def __init__(self, wire: Wire, dims: Sequence[int]) -> None:
        self._wire = wire
        self._dims = dims
        self._widths = torch.tensor(dims, dtype=torch.int64)

    def sizes(self, counts: Tensor) -> list[int]:
        """Return the size of the message for each rank.

        Args:
            counts: See the class.

        Returns:
            Bytes per rank.
        """
        values = self._wire.sizes(counts, self._dims)
        bits = [_pad(-(-n // 8)) for n in counts.sum(1).tolist()]
        return [_HEAD_BYTES + b + _pad(v) for b, v in zip(bits, values, strict=True)]

    def encode(self, head: Tensor, push: GradientPush | None, counts: Tensor, sizes: list[int]) -> Tensor:
        """Encode one message per rank.

        Args:
            head: The header, from `push_head`.
            push: The gradients; None: only the header has content.
            counts: The ids that this rank requested from each rank.
            sizes: What `sizes` returns for these counts.

        Returns:
            uint8 [sum of sizes].
        """
        if push is None:
            parts = [torch.nn.functional.pad(head, (0, size // 8 - _HEAD_WORDS)) for size in sizes]
            return torch.cat(parts).view(torch.uint8)
        ids = counts.sum(1).tolist()
        flats = push.flat.split_with_sizes((counts @ self._widths).tolist())
        masks = [None] * len(ids) if push.mask is None else push.mask.split_with_sizes(ids)
        pieces: list[Tensor] = []
        for own, n, mask, flat, size in zip(counts, ids, masks, flats, sizes, strict=True):
            bits = _bits(n, mask)
            values = self._wire.encode(flat, own[None], self._dims)
            filler = size - _HEAD_BYTES - bits.numel() - values.numel()
            pieces += [head.view(torch.uint8), bits, values, torch.zeros(filler, dtype=torch.uint8)]
        return torch.cat(pieces)

    def decode(self, part: Tensor, counts: Tensor) -> list[tuple[Tensor | None, Tensor]]:
        """Decode the message of one rank.

        Args:
            part: uint8, the message.
            counts: The ids that it requested from this rank, int64 [tables].

        Returns:
            Per table, which ids take part, bool [n] (None: all), and the floats of all ids.
        """
        sizes = counts.tolist()
        ids, one = sum(sizes), counts[None]
        bits = part[_HEAD_BYTES:][: _pad(-(-ids // 8))]
        (size,) = self._wire.sizes(one, self._dims)
        values = part[_HEAD_BYTES + bits.numel() :][:size]
        flat = self._wire.decode(values, one, self._dims)
        floats = flat.split_with_sizes([n * dim for n, dim in zip(sizes, self._dims, strict=True)])
        if bool((bits == 255).all()):
            return [(None, each) for each in floats]
        return list(zip(_unpack_bits(bits, ids).split_with_sizes(sizes), floats, strict=True))


def push_head(number: int, flags: int, push: GradientPush | None) -> Tensor:
    """Make a header.

    Args:
        number: The sequence number of the lookup.
        flags: See the module.
        push: The gradients; None if this rank fails the update.

    Returns:
        int64 [6].
    """
    head = torch.zeros(_HEAD_WORDS, dtype=torch.int64)
    head[0] = number
    head[1] = flags
    head[3] = NO_TIME
    if push is not None:
        head[2] = push.step
        head[3] = seconds_word(push.time)
        numbers = torch.tensor([push.scale, push.clip_norm], dtype=torch.float64)
        head[4:6] = numbers.view(torch.int64)
    return head


def read_head(part: Tensor) -> list[int]:
    """Return the header of a message.

    Args:
        part: uint8, the message.

    Returns:
        Its six numbers; equal numbers have equal bits.
    """
    words: list[int] = part[:_HEAD_BYTES].view(torch.int64).tolist()
    return words


def seconds_word(time: float | None) -> int:
    """Return a time as a number of a header.

    Args:
        time: Seconds, or None.

    Returns:
        Whole seconds, or NO_TIME.
    """
    return NO_TIME if time is None else int(time)


def latest_time(times: Sequence[int]) -> int | None:
    """Return the latest time of all ranks.

    Args:
        times: One number per rank, as `seconds_word` returns it.

    Returns:
        Seconds; None if no rank has a time.
    """
    latest = max(times)
    return None if latest == NO_TIME else latest


def _pad(size: int) -> int:
    return -(-size // 8) * 8


def _bits(n: int, mask: Tensor | None) -> Tensor:
    """Return one bit per id, padded to 8 bytes: those in the mask, or all."""
    if mask is None:
        return torch.full((_pad(-(-n // 8)),), 255, dtype=torch.uint8)
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -n % 64)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)


def _unpack_bits(bits: Tensor, n: int) -> Tensor:
    return ((bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).view(-1)[:n].bool()
