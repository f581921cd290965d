"""Router: maps an id to the shard that owns it. Every placement uses it, and checkpoints record it.

Ids are treated as unsigned 64-bit numbers, so negative ids have an owner too; int32 ids are sign-extended
first, so an id has the same owner in either type. The position of a row within its table depends on other
hash bits (native/hash.hpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megalith.bits import shift_right, show_id_dtype, signed, unsigned_divmod
from megalith.errors import InputError
from megalith.library import define_op, native_module

MODES = ("continuous", "roundrobin", "hash_roundrobin")


class Router:
    """Maps ids to shards.

    Args:
        mode: "roundrobin": id mod shards. "hash_roundrobin": hash of the id mod shards, which breaks up
            patterns in ids but does not spread a hot id. "continuous": blocks of `block_size` consecutive
            ids; ids after the last block by id mod shards.
        num_shards: Number of shards.
        block_size: Ids per shard, for mode "continuous".
        skip_first: Leaves shard 0 empty.

    Raises:
        InputError: The mode is unknown or a size is out of range.
    """

    def __init__(
        self, mode: str, num_shards: int, *, block_size: int | None = None, skip_first: bool = False
    ) -> None:
        if not isinstance(mode, str) or mode not in MODES:
            raise InputError(f"unknown routing mode {mode!r}; known modes: {', '.join(MODES)}")
        if not isinstance(skip_first, int) or skip_first not in (0, 1):
            raise InputError(f"Router: skip_first must be True or False, got {skip_first!r}")
        whole = isinstance(num_shards, int) and not isinstance(num_shards, bool)
        owners = num_shards - int(skip_first) if whole else 0
        if not 1 <= owners < 2**31:
            raise InputError(f"Router: num_shards={num_shards!r} must leave 1 to 2^31 - 1 shards for rows")
        if mode == "continuous":
            if block_size is None:
                raise InputError("Router: mode 'continuous' needs block_size (ids per shard)")
            whole = isinstance(block_size, int) and not isinstance(block_size, bool)
            if not whole or block_size < 1 or block_size * owners >= 2**63:
                raise InputError(
                    f"Router: block_size must be positive and all blocks below 2^63, got {block_size!r}"
                )
        elif block_size is not None:
            raise InputError(f"Router: block_size is an option of mode 'continuous', not of {mode!r}")
        self.mode = mode
        self.num_shards = num_shards
        self.block_size = block_size
        self.skip_first = skip_first
        self._owners = owners

    def owner(self, ids: Tensor) -> Tensor:
        """Return the owner of each id.

        Args:
            ids: int64 or int32, any shape.

        Returns:
            int32 of the same shape, from 0 to num_shards - 1.
        """
        ids = _check(ids)
        owners: Tensor = _route(ids, list(self.rule))
        return owners

    @property
    def rule(self) -> tuple[int, int, int, int]:
        """The form that ops take: number of the mode, shards that own rows, block size, first such shard."""
        return MODES.index(self.mode), self._owners, self.block_size or 0, int(self.skip_first)

    @classmethod
    def from_rule(cls, rule: Sequence[int]) -> Router:
        """Return the router that has this `rule`.

        Args:
            rule: What `Router.rule` returns.

        Returns:
            A router equal to the one that the rule came from.
        """
        if not isinstance(rule, list | tuple) or len(rule) != 4 or not all(isinstance(x, int) for x in rule):
            raise InputError(f"Router: a rule is four integers, got {rule!r}")
        mode, owners, block, first = rule
        if not 0 <= mode < len(MODES):
            raise InputError(f"Router: there is no mode {mode}")
        return cls(MODES[mode], owners + first, block_size=block or None, skip_first=bool(first))

    def owner_reference(self, ids: Tensor) -> Tensor:
        """Return `owner` computed in plain torch, on any device; it is the definition.

        Args:
            ids: int64 or int32, any shape.

        Returns:
            int32 of the same shape, from 0 to num_shards - 1.
        """
        ids = _check(ids)
        key = mix(ids) if self.mode == "hash_roundrobin" else ids
        owner = unsigned_divmod(key, self._owners)[1]
        if self.block_size is not None:
            inside = (ids >= 0) & (ids < self.block_size * self._owners)
            owner = torch.where(inside, ids // self.block_size, owner)
        return (owner + int(self.skip_first)).to(torch.int32)

    def local_index(self, ids: Tensor) -> Tensor:
        """Return the position of each id within its owner; only for mode "continuous".

        It is the position in the block, or id // shards after the last block. Ids within the blocks of one
        owner have distinct positions, and so have ids after the last block.

        Args:
            ids: int64 or int32, any shape.

        Returns:
            int64 of the same shape.
        """
        if self.block_size is None:
            raise InputError(f"Router: only mode 'continuous' has local indices, the mode is {self.mode!r}")
        ids = _check(ids)
        inside = (ids >= 0) & (ids < self.block_size * self._owners)
        return torch.where(inside, ids % self.block_size, unsigned_divmod(ids, self._owners)[0])

    def __repr__(self) -> str:
        block = "" if self.block_size is None else f", block_size={self.block_size}"
        skip = ", skip_first=True" if self.skip_first else ""
        return f"Router({self.mode!r}, {self.num_shards}{block}{skip})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Router) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


def mix(ids: Tensor) -> Tensor:
    """Hash ids with MurmurHash3's 64-bit finalizer, a bijection."""
    x = ids ^ shift_right(ids, 33)
    x = x * signed(0xFF51AFD7ED558CCD)
    x = x ^ shift_right(x, 33)
    x = x * signed(0xC4CEB9FE1A85EC53)
    return x ^ shift_right(x, 33)


def _check(ids: Tensor) -> Tensor:
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        kind = show_id_dtype(ids.dtype) if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(f"Router: ids must be an int64 or int32 tensor, got {kind}")
    return ids.to(torch.int64)


def _route_native(ids: Tensor, rule: Sequence[int]) -> Tensor:
    native: Any = native_module()
    flat = ids.contiguous().view(-1)
    owners = torch.empty(flat.numel(), dtype=torch.int32, device="cpu")
    native.route(flat, tuple(rule), owners, torch.get_num_threads())
    return owners.view(ids.shape)


_route = define_op(
    "route(Tensor ids, int[] rule) -> Tensor",
    native=_route_native,
    reference=lambda ids, rule: Router.from_rule(rule).owner_reference(ids),
    fake=lambda ids, rule: torch.empty_like(ids, dtype=torch.int32),
)
