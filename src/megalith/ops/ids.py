"""Ids that contain a slot.

`fid` puts a slot (the number of a feature) into the high bits of an id, so that features sharing a table
do not collide. The layout is Monolith's second one: bit 63 is zero, then 15 bits of slot and 48 bits of id.

This module does not look up ids; ids of text are in `megalith.hashing`.
"""

from __future__ import annotations

from operator import index
from typing import overload

import numpy as np
import torch
from torch import Tensor

from megalith.bits import signed
from megalith.errors import InputError
from megalith.ops.checks import int64, require, with_data
from megalith.routing import mix

NUM_SLOTS = 2**15
SLOT_SHIFT = 48
ID_MASK = 2**SLOT_SHIFT - 1

_WORD = 2**64 - 1


# ---- slots


@overload
def fid(slot: int, id: int) -> int: ...
@overload
def fid(slot: Tensor, id: int | Tensor) -> Tensor: ...
@overload
def fid(slot: int, id: Tensor) -> Tensor: ...
def fid(slot: int | Tensor, id: int | Tensor) -> int | Tensor:
    """Put a slot into the high bits of an id: `slot << 48 | id`.

    An id in 0 .. 2^48 - 1 keeps its bits. Any other id (negative, or from `hash_strings`) is hashed to 48
    bits: among n such ids of a slot, two collide with a probability of about n^2 / 2^49. Fids of Monolith's
    first layout are not ids in this sense: use `fid_v1_to_v2`.

    Args:
        slot: An int, or an int64 or int32 tensor, in 0 .. 32767. Checking a tensor on a GPU waits for it.
        id: An int, or an int64 or int32 tensor; slot and id broadcast.

    Returns:
        An int for two ints, otherwise an int64 tensor.

    Raises:
        InputError: A slot is out of range.
    """
    slot, id = _check_integer(slot, "fid", "slot"), _check_integer(id, "fid", "id")
    if isinstance(slot, Tensor) and isinstance(id, Tensor):
        _check_broadcast(slot, id)
    _check_slot(slot)
    if isinstance(id, Tensor):
        id = torch.where((id >= 0) & (id <= ID_MASK), id, mix(id) & ID_MASK)
    elif not 0 <= id <= ID_MASK:
        id = int(mix(torch.tensor(signed(id & _WORD), device="cpu"))) & ID_MASK
    joined: int | Tensor = slot << SLOT_SHIFT | id
    return joined


@overload
def fid_v1_to_v2(fid: int) -> int: ...
@overload
def fid_v1_to_v2(fid: Tensor) -> Tensor: ...
def fid_v1_to_v2(fid: int | Tensor) -> int | Tensor:
    """Convert a fid of Monolith's first layout (10 bits of slot, 54 of id) to the second, as Monolith does.

    The slot is kept; the id loses its high 6 bits.

    Args:
        fid: An int, or an int64 or int32 tensor.

    Returns:
        An int for an int, otherwise an int64 tensor of the same shape.

    Raises:
        InputError: `fid` has another type, or does not fit in 64 bits.
    """
    fid = _check_integer(fid, "fid_v1_to_v2", "fid")
    converted: int | Tensor = (fid >> 54 & 0x3FF) << SLOT_SHIFT | fid & ID_MASK
    return converted


@overload
def slot_of(fid: int) -> int: ...
@overload
def slot_of(fid: Tensor) -> Tensor: ...
def slot_of(fid: int | Tensor) -> int | Tensor:
    """Return the slot of a fid; bit 63 is ignored.

    Args:
        fid: An int, or an int64 or int32 tensor.

    Returns:
        0 to 32767: an int for an int, otherwise an int64 tensor of the same shape.

    Raises:
        InputError: `fid` has another type, or does not fit in 64 bits.
    """
    slot: int | Tensor = _check_integer(fid, "slot_of", "fid") >> SLOT_SHIFT & (NUM_SLOTS - 1)
    return slot


# ---- helpers


def _check_integer(x: int | Tensor, function: str, name: str) -> int | Tensor:
    if isinstance(x, Tensor):
        return int64(x, f"{function}: {name}", shape=None)
    try:
        number = None if isinstance(x, bool) else index(x)
    except TypeError:
        number = None
    if number is None:
        kind = type(x).__name__
        raise InputError(f"{function}: {name} must be an int or an int64 or int32 tensor, got {kind}")
    if not -(2**63) <= number <= _WORD:
        raise InputError(f"{function}: {name} must fit in 64 bits, got {number}")
    return number


def _check_slot(slot: int | Tensor) -> None:
    message = f"fid: slot must be in 0 .. {NUM_SLOTS - 1}"
    if isinstance(slot, Tensor) and torch.compiler.is_compiling():
        require((slot >= 0) & (slot < NUM_SLOTS), message)
        return
    if isinstance(slot, Tensor):
        with_data(slot, "fid: slot")
    bad = slot[(slot < 0) | (slot >= NUM_SLOTS)][:1].tolist() if isinstance(slot, Tensor) else [slot]
    if bad and not 0 <= bad[0] < NUM_SLOTS:
        raise InputError(f"{message}, got {bad[0]}")


def _check_broadcast(slot: Tensor, id: Tensor) -> None:
    if slot.device != id.device:
        raise InputError(f"fid: slot is on {slot.device}, id is on {id.device}; move one of them")
    try:
        np.broadcast_shapes(slot.shape, id.shape)
    except ValueError:
        shapes = f"slot {list(slot.shape)} and id {list(id.shape)}"
        raise InputError(f"fid: {shapes} do not broadcast") from None
