"""StateTensor: a tensor of a state_dict with any number of rows, for torch.distributed.checkpoint (DCP).

DCP loads a tensor into the one that the state_dict of the model holds, and only if both have the same size.
Tables grow, and a model that is about to load usually has no rows. A StateTensor is a plain tensor for
everything except DCP, which it answers through DCP's own protocol for tensor subclasses:

    DCP, on save        __create_write_items__    the items of a plain tensor
                        __get_tensor_shard__      the plain tensor
    DCP, on load        size()                    equal to a size with any number of rows
                        __create_chunk_list__     all rows that there are; this tensor is empty from now on
                        __get_tensor_shard__      a target that takes the number of rows that are read

The number of columns must be the same. A table without rows has nothing to read, so its tensors stay empty.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

LONGEST = 1 << 62
"""More rows than any tensor has."""

_DCP = "torch.distributed.checkpoint."


class AnyLength(int):
    """A number of rows that equals every other number, and otherwise is an int."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int)

    def __ne__(self, other: object) -> bool:
        return not isinstance(other, int)

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


class StateTensor(Tensor):
    """A tensor of a state_dict, [rows] or [rows, columns]; copies in files are plain tensors."""

    # Results of operations are plain tensors, as for nn.Parameter.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    loading = False

    @staticmethod
    def of(tensor: Tensor) -> StateTensor:
        """Make a StateTensor of a tensor."""
        # tensor: [rows] or [rows, columns].
        return tensor.as_subclass(StateTensor)

    def plain(self) -> Tensor:
        """Return a plain tensor that shares the memory of this one."""
        return self.detach().as_subclass(Tensor)

    def size(self, dim: Any = None) -> Any:
        """Return the size, as `torch.Tensor.size`."""
        if dim is not None:
            return self.shape[dim]
        caller = sys._getframe().f_back
        if caller is None or not caller.f_globals.get("__name__", "").startswith(_DCP):
            return self.shape
        return torch.Size((AnyLength(self.shape[0]), *self.shape[1:]))

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.planner_helpers import _create_write_items  # imported by the caller

        return _create_write_items(fqn, self.plain())

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        self.loading = True
        self.resize_rows(0)
        offsets, sizes = [0] * self.dim(), (LONGEST, *self.shape[1:])
        return [ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        if not self.loading:
            return self.plain()
        target = self.plain().as_subclass(_LoadTarget)
        target.owner = self
        return target

    def resize_rows(self, rows: int) -> Tensor:
        """Replace the content by rows that are not initialised."""
        self.data = torch.empty((rows, *self.shape[1:]), dtype=self.dtype, device=self.device)
        return self.plain()

    def __deepcopy__(self, memo: dict[int, Any]) -> StateTensor:
        if id(self) not in memo:
            memo[id(self)] = StateTensor.of(self.plain().clone())
        copied: StateTensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)


class _LoadTarget(Tensor):
    """What DCP reads into: it narrows this tensor to the rows that it reads, which the owner then has."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    owner: StateTensor

    def size(self, dim: Any = None) -> Any:
        size = (LONGEST, *self.shape[1:])
        return torch.Size(size) if dim is None else size[dim]

    def narrow(self, dim: Any, start: Any, length: Any) -> Tensor:
        if dim != 0 or start != 0:
            raise NotImplementedError("a table's rows are saved in one piece")
        return self.owner.resize_rows(length)
