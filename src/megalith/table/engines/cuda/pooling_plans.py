"""Launches of a pooling: rows reduced into outputs, and the gradients of occurrences.

Compiling a pooling into launches takes longer than the launches. Poolings of batches with equal structure
(the same features, sizes and output shapes) differ only in the addresses of their tensors, so a
`PoolingPlan` is made once per structure and filled with addresses for each batch. A `Cut` is what one
launch reads: some columns of some parts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ops.pooling import Bags, OutputSlice, Pooling
from megalith.table.engines.cuda import pool_kernels
from megalith.table.engines.cuda.launch_group import LaunchGroup, RowSearch
from megalith.table.engines.cuda.row_layout import shared_number
from megalith.table.engines.cuda.streams import hold, retire
from megalith.table.engines.cuda.triton_runtime import INTERPRETED, PLAIN_ARITHMETIC, Bound, padded
from megalith.table.engines.cuda.updates import Gradients


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


POOL_TILE = 1024
"""Weights that one program reduces at a time."""
POOL_WARPS = 2
PLACE_TILE = 1024
PLACE_WARPS = 2
VECTOR = 16
"""Bytes of the widest memory access; parts that are multiples of it are read and written faster."""
MAX_PLANS = 32


class PoolingPlan:
    """The launches of poolings of equal structure over the tables of one LaunchGroup."""

    def __init__(
        self, group: LaunchGroup, names: Sequence[str], sizes: Sequence[int], pooling: Pooling
    ) -> None:
        self._group = group
        self._names = list(names)
        self._sizes = list(sizes)
        self._outputs = pooling.outputs
        self._first = [sum(sizes[:k]) for k in range(len(sizes))]
        self._model = self.bags_of(pooling)  # also keeps the tuples whose ids are in the signature
        owners = [number for number, name in enumerate(names) for _ in pooling.of(name)]
        self.parts = [
            TablePart(owners[k], k, part, number)
            for k, bags in enumerate(self._model)
            for number, part in enumerate(bags.parts)
        ]
        self._used = [each for each in self.parts if self._model[each.bags].num_bags]
        self._strided = self._find_strided()
        self._expanding = None
        if self._used:
            whole = [PartColumns(0, group.layout.dims[each.table]) for each in self._used]
            self._expanding = self._cut(self._used, whole)

    def bags_of(self, pooling: Pooling) -> list[Bags]:
        """Return the bags of the group's tables."""
        return [bags for name in self._names for bags in pooling.bags.get(name, ())]

    # ---- forward

    @cached_property
    def launches(self) -> list[Cut]:
        """The launches of all parts, in order."""
        return [cut for wave in waves(self.parts) for cut in self.cuts(wave)]

    def cuts(self, parts: Sequence[TablePart]) -> list[Cut]:
        """Divide parts into launches."""
        found = []
        layouts = self._group.layout.layouts
        for number, first in enumerate(layouts[0].runs):
            item = 4 if first.precision == 0 else 2
            chosen: dict[tuple[int, bool], tuple[list[TablePart], list[PartColumns]]] = {}
            for each in parts:
                run = layouts[each.table].runs[number]
                start, end = max(each.part.start, run.start), min(each.part.end, run.end)
                if start < end and self._model[each.bags].num_bags:
                    own = chosen.setdefault((padded(end - start), self._is_single(each)), ([], []))
                    own[0].append(each)
                    own[1].append(PartColumns(start, end, run.offset + (start - run.start) * item))
            found += [self._cut(own, columns, first.precision) for own, columns in chosen.values()]
        return found

    def pool(
        self, cut: Cut, bags: Sequence[Bags], ids: Tensor, found: RowSearch, outputs: Sequence[Tensor]
    ) -> None:
        """Reduce rows into outputs."""
        # ids: int64 [n], the ids of all tables of the group.
        addresses = self.output_addresses(bags, outputs)
        aligned = self.is_aligned(cut, addresses)
        uploaded = cut.upload(self._group, self.fill(cut, bags, addresses))
        self.launch(cut, aligned, uploaded, ids, found)

    @staticmethod
    def output_addresses(bags: Sequence[Bags], outputs: Sequence[Tensor]) -> list[int]:
        """Return the addresses of outputs or their gradients."""
        hold(_tensors(bags))
        return [tensor.data_ptr() for tensor in outputs]

    @staticmethod
    def is_aligned(cut: Cut, addresses: Sequence[int]) -> bool:
        """Return whether a launch can use the widest memory accesses."""
        return cut.aligned and not any(address % VECTOR for address in addresses)

    def launch(self, cut: Cut, aligned: bool, uploaded: Tensor, ids: Tensor, found: RowSearch) -> None:
        """Launch the kernels of a cut."""
        # ids: int64 [n].
        group = self._group
        key = ("pool", cut.precision, *cut.constants.values(), cut.single, aligned)
        if key not in group.bound:
            self._bind(key, cut, aligned)
        tables, count = group.descriptors(), len(cut.parts)
        blocks = -(-cut.most_bags // self._block(cut))
        main, rest = group.bound[key], group.bound.get((*key, "missing"))
        if cut.single:
            main((blocks, count), tables, uploaded, found.rows)
        else:
            main((blocks, count), tables, uploaded, ids, found.rows, found.missing)
        if rest is None:
            return
        programs = (min(blocks, group.few_programs), count)
        if cut.single:
            rest(programs, tables, uploaded, ids, found.missing, found.absent)
        else:
            rest(programs, tables, uploaded, ids, found.rows, found.missing)

    @staticmethod
    def _block(cut: Cut) -> int:
        columns = min(padded(cut.constants["WIDEST"]), 256)
        return max(1, (PLACE_TILE if cut.single else POOL_TILE) // columns)

    def _bind(self, key: tuple[object, ...], cut: Cut, aligned: bool) -> None:
        group, layout = self._group, self._group.layout
        columns = {name: value for name, value in cut.constants.items() if name != "OFFSET"}
        common = {
            **columns,
            "PRECISION": cut.precision,
            "NUM_SEGMENTS": layout.num_segments,
            "ALIGNED": aligned,
            "BLOCK": self._block(cut),
            "COLUMNS": min(padded(cut.constants["WIDEST"]), 256),
            "num_warps": PLACE_WARPS if cut.single else POOL_WARPS,
            **PLAIN_ARITHMETIC,
        }
        where = {**group.kinds, "OFFSET": cut.constants["OFFSET"]}
        missing: Bound
        if cut.single:
            group.bound[key] = pool_kernels.place_rows.bind(**where, **common)
            missing = pool_kernels.place_missing.bind(FIELDS=group.fields, **common)
        else:
            group.bound[key] = pool_kernels.pool_bags.bind(INITIAL=layout.initial, **where, **common)
            missing = pool_kernels.pool_missing.bind(INITIAL=True, **where, **common)
        if layout.initial:
            group.bound[(*key, "missing")] = missing

    # ---- backward

    def gradients(self, bags: Sequence[Bags], grads: Sequence[Tensor]) -> Gradients:
        """Find the gradients of the occurrences."""
        # If each feature fills whole rows of one output, occurrences refer to these; otherwise the gradients
        # are written to a matrix first.
        group, n = self._group, sum(self._sizes)
        hold((*grads, *_tensors(bags)))
        addresses = [tensor.data_ptr() for tensor in grads]
        if self._strided is not None:
            bases, strides = [], []
            for output, offset, stride in self._strided:
                bases.append(addresses[output] + offset if output >= 0 else 0)
                strides.append(stride)
            return Gradients(bases, strides, held=grads)
        wanted = torch.zeros(n, dtype=torch.int8, device=group.device)
        if self._is_direct():
            return self._addresses(bags, grads, addresses, wanted)
        dim = group.layout.max_dim
        matrix = torch.zeros(n, dim, dtype=torch.float32, device=group.device)
        for number in range(max((each.number for each in self._used), default=-1) + 1):
            widths: dict[int, list[TablePart]] = {}
            for each in (each for each in self._used if each.number == number):
                widths.setdefault(padded(each.part.width), []).append(each)
            for padded_width, chosen in widths.items():
                cut = self._cut(chosen, [PartColumns(each.part.start, each.part.end) for each in chosen])
                columns = {name: value for name, value in cut.constants.items() if name != "OFFSET"}
                width = min(padded_width, 256)
                block = max(1, (4096 if INTERPRETED else 1024) // width)
                pool_kernels.unpool_bags[-(-cut.most_bags // block), len(chosen)](
                    group.upload(self.fill(cut, bags, addresses)),
                    wanted,
                    matrix,
                    DIM=dim,
                    BLOCK=block,
                    COLUMNS=width,
                    **columns,
                    **PLAIN_ARITHMETIC,
                )
        return Gradients.of(matrix.split(self._sizes), wanted=wanted)

    def _is_direct(self) -> bool:
        """Whether each feature fills whole rows of one output."""
        dims = self._group.layout.dims
        return all(
            len(self._model[each.bags].parts) == 1
            and not self._model[each.bags].shared
            and each.part.start == 0
            and each.part.end == dims[each.table]
            for each in self._used
        )

    def _find_strided(self) -> list[tuple[int, int, int]] | None:
        """Find output, first byte and bytes between rows of each table's gradients."""
        # None unless the gradient of a table's occurrence k is row k of one output.
        found = [(-1, 0, 0)] * len(self._sizes)
        if not self._is_direct():
            return None
        for each in self._used:
            bags = self._model[each.bags]
            whole = bags.first == 0 and bags.num_bags == self._sizes[each.table]
            if not whole or not self._is_single(each, adds=True) or each.part.inner != 1:
                return None
            found[each.table] = (
                each.part.output,
                4 * each.part.column,
                4 * self._outputs[each.part.output][1],
            )
        if any(size and found[table][0] < 0 for table, size in enumerate(self._sizes)):
            return None
        return found

    def _addresses(
        self, bags: Sequence[Bags], grads: Sequence[Tensor], addresses: list[int], wanted: Tensor
    ) -> Gradients:
        group, n = self._group, wanted.numel()
        places = torch.zeros(n, dtype=torch.int64, device=group.device)  # 0: in no bag
        weighted = any(b.weights is not None or b.divisor is not None for b in bags)
        factors = torch.empty(n if weighted else 0, dtype=torch.float32, device=group.device)
        aligned = True
        if self._expanding is not None:
            cut = self._expanding
            block = 1024 if INTERPRETED else 128
            pool_kernels.expand_bags[-(-cut.most_bags // block), len(cut.parts)](
                cut.upload(group, self.fill(cut, bags, addresses)),
                wanted,
                places,
                factors,
                WEIGHTED=weighted,
                BLOCK=block,
                **PLAIN_ARITHMETIC,
            )
            aligned = cut.aligned and not any(address % VECTOR for address in addresses)
        return Gradients(
            addresses=places,
            factors=factors if weighted else None,
            wanted=wanted,
            all_aligned=aligned,
            held=grads,
        )

    # ---- descriptors

    def _is_single(self, each: TablePart, adds: bool = False) -> bool:
        bags = self._model[each.bags]
        plain = bags.weights is None and bags.divisor is None and not bags.shared
        return plain and bags.first is not None and (adds or not each.part.accumulate)

    def _cut(self, parts: Sequence[TablePart], columns_of: Sequence[PartColumns], precision: int = 0) -> Cut:
        template: list[int] = []
        aligned = not any(own.offset % VECTOR for own in columns_of)
        for each, (start, end, offset) in zip(parts, columns_of, strict=True):
            bags, part = self._model[each.bags], each.part
            rows, columns = self._outputs[part.output]
            column = part.column + max(0, start - part.start)
            step = part.step or part.width
            repeat = rows * part.inner // bags.num_bags if bags.shared else 1
            aligned = aligned and all(4 * x % VECTOR == 0 for x in (column, columns, step))
            template += [
                each.table,
                0,
                bags.num_bags,
                0,
                0,
                0,
                columns,
                column,
                part.inner,
                step,
                repeat,
                self._first[each.table],
                self._sizes[each.table],
                int(part.accumulate),
                bags.first or 0,
                start,
                end - start,
                offset,
            ]
        single = all(self._is_single(each) for each in parts)
        most = max(self._model[each.bags].num_bags for each in parts)
        constants = {
            "START": shared_number(own.start for own in columns_of),
            "WIDTH": shared_number(own.end - own.start for own in columns_of),
            "WIDEST": max(own.end - own.start for own in columns_of),
            "OFFSET": shared_number(own.offset for own in columns_of),
        }
        return Cut(constants, precision, tuple(parts), template, aligned, single, most)

    @staticmethod
    def fill(cut: Cut, bags: Sequence[Bags], addresses: Sequence[int]) -> list[int]:
        """Return the descriptors of parts with the addresses of a batch."""
        fields = cut.template.copy()
        at = 0
        for each in cut.parts:
            own = bags[each.bags]
            if own.first is None:
                fields[at + 1] = own.offsets.data_ptr()
            if own.weights is not None:
                fields[at + 3] = own.weights.data_ptr()
            if own.divisor is not None:
                fields[at + 4] = own.divisor.data_ptr()
            fields[at + 5] = addresses[each.part.output]
            at += pool_kernels.PART_FIELDS.value
        return fields


class PoolingPlans:
    """The plans of one set of tables, by the structure of the pooling."""

    def __init__(self) -> None:
        self._plans: dict[tuple[object, ...], PoolingPlan] = {}
        self._last: tuple[weakref.ref[Pooling], list[int], PoolingPlan] | None = None

    def find(
        self, group: LaunchGroup, names: Sequence[str], sizes: Sequence[int], pooling: Pooling
    ) -> PoolingPlan:
        """Return the plan of a pooling; a new structure is checked and compiled."""
        # The values of offsets, weights and divisors on a GPU are not read: that would wait for it. Kernels
        # keep offsets within the occurrences of the table.
        if self._last is not None and self._last[0]() is pooling and self._last[1] == sizes:
            return self._last[2]  # an update follows the forward of the same pooling
        key = (*sizes, pooling.outputs, *_structure(names, pooling.bags))
        on_cpu = group.device.type == "cpu"
        plan = self._plans.get(key)
        if plan is None or on_cpu:
            for name, size, dim in zip(names, sizes, group.layout.dims, strict=True):
                if pooling.bags.get(name):
                    _check(pooling, name, size, dim, group.device)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
                group.generation += 1
            plan = self._plans[key] = PoolingPlan(group, names, sizes, pooling)
        self._last = weakref.ref(pooling), list(sizes), plan
        return plan


def _tensors(bags: Sequence[Bags]) -> Iterator[Tensor]:
    """The tensors of bags that kernels read through addresses in a descriptor."""
    for own in bags:
        yield from (tensor for tensor in (own.offsets, own.weights, own.divisor) if tensor is not None)


def _structure(names: Sequence[str], bags: Mapping[str, tuple[Bags, ...]]) -> list[object]:
    """What determines the launches of tables' bags, besides addresses."""
    found: list[object] = []
    for name in names:
        of_table = bags.get(name, ())
        found.append(len(of_table))
        for own in of_table:
            found += (id(own.parts), own.first, own.shared, *_shape(name, own.offsets))
            if own.first is None:
                found += (own.offsets.dtype, own.offsets.device)
            for tensor in (own.weights, own.divisor):
                found.append(None if tensor is None else (*_shape(name, tensor), tensor.dtype, tensor.device))
    return found


def _shape(table: str, tensor: Any) -> tuple[int, ...]:
    if not isinstance(tensor, Tensor):
        kind = type(tensor).__name__
        raise InputError(f"table {table!r}: offsets, weights and divisor must be tensors, got {kind}")
    return tuple(tensor.shape)


def _check(pooling: Pooling, table: str, size: int, dim: int, device: torch.device) -> None:
    if device.type == "cpu":
        pooling.check(table, size, dim)
        return
    pooling.check_shapes(table, size, dim)
    for bags in pooling.of(table):
        for tensor in (bags.offsets, bags.weights, bags.divisor):
            if tensor is not None and tensor.device != device:
                raise InputError(f"table {table!r}: the pooling is on {tensor.device}, the table on {device}")
