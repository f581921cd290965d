"""The message of gradients from one rank to another: a header, one bit per id, the values.

    part       content
    header     sequence number, flags (1 failed, 4 left), step, time, scale, clip_norm: int64, the last two
               the bits of float64
    bits       one per requested id (1: it has a gradient), padded to 8 bytes
    values     the gradients by table, in the precision of the wire, padded to 8 bytes
    counts     int32 per requested id: its occurrences, padded to 8 bytes; only if a table has an admission
               policy

A rank that fails the update sends a header and zeros, as the other ranks expect data of a known size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.shards.gradient_sums import ReceivedGradients
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
        occurrences: int64 [u], how often each distinct id occurred; None if no table has an admission policy.
    """

    flat: Tensor
    mask: Tensor | None
    step: int
    time: float | None
    scale: float
    clip_norm: float
    rates: Mapping[str, list[float]]
    occurrences: Tensor | None = None


class GradientMessage:
    """Encodes and decodes messages.

    In all methods `counts` has the number of ids: int64 [ranks, tables], or [tables] for one rank.

    Args:
        wire: The precision of the values.
        dims: The dim of each table.
        with_counts: Whether messages hold the occurrences of ids.
    """

    def __init__(self, wire: Wire, dims: Sequence[int], *, with_counts: bool = False) -> None:
        self._with_counts = with_counts
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
        ids = counts.sum(1).tolist()
        extra = [_pad(4 * n) if self._with_counts else 0 for n in ids]
        bits = [_pad(-(-n // 8)) for n in ids]
        return [_HEAD_BYTES + b + _pad(v) + e for b, v, e in zip(bits, values, extra, strict=True)]

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
        seen = [None] * len(ids) if push.occurrences is None else push.occurrences.split_with_sizes(ids)
        pieces: list[Tensor] = []
        for own, n, mask, flat, count, size in zip(counts, ids, masks, flats, seen, sizes, strict=True):
            bits = _bits(n, mask)
            values = self._wire.encode(flat, own[None], self._dims)
            filler = _pad(values.numel()) - values.numel()
            pieces += [head.view(torch.uint8), bits, values, torch.zeros(filler, dtype=torch.uint8)]
            if self._with_counts:
                words = torch.ones(n, dtype=torch.int32) if count is None else count.to(torch.int32)
                pieces.append(torch.nn.functional.pad(words, (0, n % 2)).view(torch.uint8))
            assert sum(piece.numel() for piece in pieces[-5 if self._with_counts else -4 :]) == size
        return torch.cat(pieces)

    def decode(self, part: Tensor, counts: Tensor) -> list[ReceivedGradients]:
        """Decode the message of one rank.

        Args:
            part: uint8, the message.
            counts: The ids that it requested from this rank, int64 [tables].

        Returns:
            The gradients per table.
        """
        sizes = counts.tolist()
        ids, one = sum(sizes), counts[None]
        bits = part[_HEAD_BYTES:][: _pad(-(-ids // 8))]
        (size,) = self._wire.sizes(one, self._dims)
        values = part[_HEAD_BYTES + bits.numel() :][:size]
        flat = self._wire.decode(values, one, self._dims)
        floats = flat.split_with_sizes([n * dim for n, dim in zip(sizes, self._dims, strict=True)])
        masks: Sequence[Tensor | None] = [None] * len(sizes)
        seen: Sequence[Tensor | None] = [None] * len(sizes)
        if not bool((bits == 255).all()):
            masks = _unpack_bits(bits, ids).split_with_sizes(sizes)
        if self._with_counts:
            words = part[_HEAD_BYTES + bits.numel() + _pad(size) :][: 4 * ids].view(torch.int32)
            seen = words.to(torch.int64).split_with_sizes(sizes)
        return [ReceivedGradients(*each) for each in zip(masks, floats, seen, strict=True)]


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
