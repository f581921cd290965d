"""The parts of a pooling as descriptors for the kernels of pool_kernels.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ops.pooling import Bags, OutputSlice, Pooling
from megalith.table.engines.cuda import pool_kernels
from megalith.table.engines.cuda.launch_group import MAX_PROGRAMS, Gradients, LaunchGroup
from megalith.table.engines.cuda.row_layout import ColumnRun
from megalith.table.engines.cuda.triton_runtime import INTERPRETED, PLAIN_ARITHMETIC, padded

POOL_TILE = 2048
"""Weights that one program reduces at a time."""
VECTOR = 16
"""Bytes of the widest memory access; parts that are multiples of it are read and written faster."""


class TablePart(NamedTuple):
    """A part of a table's pooling.

    Attributes:
        table: Number of the table in its group.
        bags: The bags of the feature.
        part: The part.
        number: Number of the part in its feature.
    """

    table: int
    bags: Bags
    part: OutputSlice
    number: int


class PoolingParts:
    """The parts of a pooling that read the tables of one LaunchGroup.

    Args:
        group: The group.
        names: Names of its tables.
        sizes: Number of occurrences of each table.
        pooling: The pooling; it fits the tables.
    """

    def __init__(
        self, group: LaunchGroup, names: Sequence[str], sizes: Sequence[int], pooling: Pooling
    ) -> None:
        self._group = group
        self._sizes = sizes
        self._first = [sum(sizes[:k]) for k in range(len(sizes))]
        self._pooling = pooling
        self.parts = [
            TablePart(number, bags, part, k)
            for number, name in enumerate(names)
            for bags in pooling.of(name)
            for k, part in enumerate(bags.parts)
        ]

    def pool(self, ids: Tensor, rows: Tensor, outputs: Sequence[Tensor], parts: Sequence[TablePart]) -> None:
        """Reduce rows into outputs.

        Args:
            ids: int64 [n], the ids of all tables of the group.
            rows: int32 [n].
            outputs: The outputs of the pooling.
            parts: Some of `parts`, no two of which write the same columns.
        """
        for run in self._group.layout.runs:
            cuts: dict[tuple[int, int], list[TablePart]] = {}
            for each in parts:
                start, end = max(each.part.start, run.start), min(each.part.end, run.end)
                if start < end and each.bags.num_bags:
                    cuts.setdefault((start, end), []).append(each)
            for (start, end), chosen in cuts.items():
                self._pool_cut(run, start, end, chosen, ids, rows, outputs)

    def _pool_cut(
        self,
        run: ColumnRun,
        start: int,
        end: int,
        parts: list[TablePart],
        ids: Tensor,
        rows: Tensor,
        outputs: Sequence[Tensor],
    ) -> None:
        group, layout = self._group, self._group.layout
        width, item = end - start, 4 if run.precision == 0 else 2
        offset = run.offset + (start - run.start) * item
        fields: list[int] = []
        for each in parts:
            fields += self._fields(each, outputs, start)
        aligned = offset % VECTOR == 0 and all(self._is_aligned(each, outputs, start) for each in parts)
        columns = min(padded(width), 256)
        block = max(1, POOL_TILE // columns)
        most = max(each.bags.num_bags for each in parts)
        uploaded = group.upload_once(("pool", run.start, start, end, parts[0].part.accumulate), fields)
        blocks = -(-most // block)
        kernels = [(pool_kernels.pool_bags, blocks)]
        if layout.initial:
            kernels.append((pool_kernels.pool_missing, min(blocks, MAX_PROGRAMS // len(parts) + 1)))
        for kernel, programs in kernels:
            kernel[(programs, len(parts))](
                group.descriptors(),
                uploaded,
                ids,
                rows,
                group.missing_of(rows),
                **group.kinds,
                OFFSET=offset,
                START=start,
                WIDTH=width,
                PRECISION=run.precision,
                INITIAL=layout.initial,
                NUM_SEGMENTS=len(layout.segments),
                ALIGNED=aligned,
                BLOCK=block,
                COLUMNS=columns,
                num_warps=4,
                **PLAIN_ARITHMETIC,
            )

    def gradients(self, grads: Sequence[Tensor]) -> Gradients:
        """Find the gradients of the occurrences.

        If each feature fills whole rows of one output, occurrences refer to these; otherwise the gradients
        are written to a matrix first.

        Args:
            grads: The gradient of each output.

        Returns:
            The gradients and which occurrences are in an output.
        """
        group, n = self._group, sum(self._sizes)
        wanted = torch.zeros(n, dtype=torch.int8, device=group.device)
        used = [each for each in self.parts if each.bags.num_bags]
        dim = group.layout.dim
        direct = all(
            len(each.bags.parts) == 1
            and not each.bags.shared
            and each.part.start == 0
            and each.part.end == dim
            for each in used
        )
        if direct:
            return self._addresses(used, grads, wanted)
        matrix = torch.zeros(n, dim, device=group.device)
        for number in range(max((each.number for each in used), default=-1) + 1):
            cuts: dict[tuple[int, int], list[TablePart]] = {}
            for each in (each for each in used if each.number == number):
                cuts.setdefault((each.part.start, each.part.end), []).append(each)
            for (start, end), chosen in cuts.items():
                columns = min(padded(end - start), 256)
                block = max(1, (4096 if INTERPRETED else 1024) // columns)
                most = max(each.bags.num_bags for each in chosen)
                pool_kernels.unpool_bags[(-(-most // block), len(chosen))](
                    group.upload([x for each in chosen for x in self._fields(each, grads, start)]),
                    wanted,
                    matrix,
                    DIM=dim,
                    START=start,
                    WIDTH=end - start,
                    BLOCK=block,
                    COLUMNS=columns,
                    **PLAIN_ARITHMETIC,
                )
        return Gradients(list(matrix.split(list(self._sizes))), wanted=wanted)

    def _addresses(self, parts: list[TablePart], grads: Sequence[Tensor], wanted: Tensor) -> Gradients:
        group, n = self._group, wanted.numel()
        addresses = torch.empty(n, dtype=torch.int64, device=group.device)
        weighted = any(each.bags.weights is not None or each.bags.divisor is not None for each in parts)
        factors = torch.empty(n if weighted else 0, device=group.device)
        if parts:
            block = 1024 if INTERPRETED else 128
            most = max(each.bags.num_bags for each in parts)
            pool_kernels.expand_bags[(-(-most // block), len(parts))](
                group.upload_once(("expand",), [x for each in parts for x in self._fields(each, grads, 0)]),
                wanted,
                addresses,
                factors,
                WEIGHTED=weighted,
                BLOCK=block,
                **PLAIN_ARITHMETIC,
            )
        aligned = all(self._is_aligned(each, grads, 0) for each in parts)
        return Gradients((), addresses, factors if weighted else None, wanted, aligned)

    def _fields(self, each: TablePart, tensors: Sequence[Tensor], start: int) -> list[int]:
        bags, part = each.bags, each.part
        tensor = tensors[part.output]
        rows, columns = tensor.shape
        repeat = rows * part.inner // bags.num_bags if bags.shared else 1
        return [
            each.table,
            bags.offsets.data_ptr(),
            bags.num_bags,
            0 if bags.weights is None else bags.weights.data_ptr(),
            0 if bags.divisor is None else bags.divisor.data_ptr(),
            tensor.data_ptr(),
            columns,
            part.column + start - part.start,
            part.inner,
            part.step or part.width,
            repeat,
            self._first[each.table],
            self._sizes[each.table],
            int(part.accumulate),
        ]

    def _is_aligned(self, each: TablePart, tensors: Sequence[Tensor], start: int) -> bool:
        part, tensor = each.part, tensors[each.part.output]
        numbers = (part.column + start - part.start, tensor.shape[1], part.step or part.width)
        return tensor.data_ptr() % VECTOR == 0 and all(4 * x % VECTOR == 0 for x in numbers)


def waves(parts: Sequence[TablePart]) -> list[list[TablePart]]:
    """Divide parts into lists that can be launched together: a part that accumulates comes after others.

    Args:
        parts: Parts in the order of the pooling.

    Returns:
        The parts that set columns first, then those that add to an output, one after another.
    """
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


def on_device(pooling: Pooling, table: str, size: int, dim: int, device: torch.device) -> None:
    """Check that a pooling fits a table.

    The values of offsets, weights and divisors on a GPU are not read: that would wait for it. Kernels keep
    offsets within the occurrences of the table.

    Args:
        pooling: The pooling.
        table: Name of the table.
        size: Number of its occurrences.
        dim: Number of columns of its rows.
        device: The device of the table.

    Raises:
        InputError: It does not fit, or a tensor is on another device.
    """
    if device.type == "cpu":
        pooling.check(table, size, dim)
        return
    pooling.check_shapes(table, size, dim)
    for bags in pooling.of(table):
        for tensor in (bags.offsets, bags.weights, bags.divisor):
            if tensor is not None and tensor.device != device:
                raise InputError(f"table {table!r}: the pooling is on {tensor.device}, the table on {device}")
