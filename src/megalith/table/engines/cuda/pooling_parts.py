"""The parts of a pooling that launches read and write, and their descriptors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalith.ops.pooling import Bags, OutputSlice, Pooling
from megalith.table.engines.cuda.launch_group import LaunchGroup
from megalith.table.engines.cuda.stream_order import retire


class TablePart(NamedTuple):
    """A part of a table's pooling."""

    table: int  # Number of the table in its group
    bags: int  # Number of the bags among those of the group
    part: OutputSlice
    number: int  # Number of the part in its feature


class PartColumns(NamedTuple):
    """Columns of the rows of a part."""

    start: int  # The first column
    end: int  # The column after the last one
    offset: int = 0  # Bytes from the start of the row to the first column; 0 where it is not needed


@dataclass
class Cut:
    """The columns of some parts that one launch reads."""

    # START, WIDTH and OFFSET of all parts as shared numbers, and WIDEST, the largest width
    constants: dict[str, int]
    precision: int  # Number of the precision of the columns
    parts: tuple[TablePart, ...]
    template: list[int]  # The descriptors of the parts without addresses
    aligned: bool  # Whether columns and widths are multiples of VECTOR
    single: bool  # Whether every bag has exactly one occurrence, without a factor
    most_bags: int  # Number of bags of the largest part
    fields: list[int] | None = None  # The descriptors that were uploaded last
    uploaded: Tensor | None = None  # The same on the device

    def upload(self, group: LaunchGroup, fields: list[int]) -> Tensor:
        """Copy the descriptors to the device, unless the last call copied the same."""
        if self.uploaded is None or self.fields != fields:
            if self.uploaded is not None:
                retire(self.uploaded)
            self.fields, self.uploaded = fields, group.upload(fields)
        return self.uploaded


def on_device(pooling: Pooling, device: torch.device) -> Pooling:
    """Return a pooling as kernels read it: on a device, each tensor contiguous."""
    if all(_is_ready(bags, device) for of_table in pooling.bags.values() for bags in of_table):
        return pooling
    pooling = pooling.to(device)
    packed = {name: tuple(map(_packed, bags)) for name, bags in pooling.bags.items()}
    return Pooling(pooling.outputs, packed, pooling.coverage)


def _is_ready(bags: Bags, device: torch.device) -> bool:
    for tensor in (bags.offsets, bags.weights, bags.divisor):
        # What is not a tensor is left to the checks of the pooling.
        if isinstance(tensor, Tensor) and (tensor.device != device or not tensor.is_contiguous()):
            return False
    return True


def _packed(bags: Bags) -> Bags:
    tensors: dict[str, Any] = {"offsets": bags.offsets, "weights": bags.weights, "divisor": bags.divisor}
    packed: dict[str, Any] = {k: x.contiguous() for k, x in tensors.items() if isinstance(x, Tensor)}
    return replace(bags, **packed)


def waves(parts: Sequence[TablePart]) -> list[list[TablePart]]:
    """Divide parts into lists that can be launched together: a part that accumulates comes after others."""
    found: list[list[TablePart]] = [[]]
    added: dict[int, int] = {}
    for each in parts:
        wave = 0
        if each.part.accumulate:
            wave = added[each.part.output] = added.get(each.part.output, 0) + 1
        while len(found) <= wave:
            found.append([])
        found[wave].append(each)
    return found
