"""Launches of a pooling: rows reduced into outputs, and the gradients of occurrences.

Compiling a pooling into launches takes longer than the launches, so it is done once for many poolings:

    PoolingPlan      the launches of poolings of equal structure: the same features, parts and numbers of
                     bags. The numbers of ids may differ, so ragged batches of one size share a plan
    PlannedPooling   a plan with the tensors of one `Pooling`, which finds it again by its identity

A launch reads a descriptor for each of its parts (fields in pool_kernels.py). A plan holds them as an array
without addresses and sizes. A planned pooling fills these in, except for the addresses of outputs, which
differ from call to call.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megalith.ops.pooling import Bags, OutputSlice, Pooling
from megalith.table.engines.cuda import pool_kernels
from megalith.table.engines.cuda.device_functions import SPAN_FIELDS
from megalith.table.engines.cuda.launch_group import IntArray, JoinedRows, LaunchGroup
from megalith.table.engines.cuda.row_layout import shared_number
from megalith.table.engines.cuda.streams import hold
from megalith.table.engines.cuda.triton_runtime import INTERPRETED, PLAIN_ARITHMETIC, Bound, padded
from megalith.table.engines.cuda.updates import GradientPlaces, GradientSource

OFFSETS: int = pool_kernels.OFFSETS.value
WEIGHTS: int = pool_kernels.WEIGHTS.value
DIVISOR: int = pool_kernels.DIVISOR.value
OUT: int = pool_kernels.OUT.value
FIRST: int = pool_kernels.FIRST.value
COUNT: int = pool_kernels.COUNT.value
PART_FIELDS: int = pool_kernels.PART_FIELDS.value

POOL_TILE = 1024
"""Weights that one program reduces at a time."""
POOL_WARPS = 2
PLACE_TILE = 1024
PLACE_WARPS = 2
VECTOR = 16
"""Bytes of the widest memory access; parts that are multiples of it are read and written faster."""
MAX_PLANS = 32


class TableKind(NamedTuple):
    """Tables that share launches."""

    group: LaunchGroup
    names: Sequence[str]


class TablePart(NamedTuple):
    """A part of a table's pooling."""

    kind: int  # Number of the kind of the table in the plan
    table: int  # Number of the table in its kind
    name: int  # Number of the table in the pooling
    bags: int  # Number of the bags in the pooling
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

    parts: Sequence[TablePart]  # Of one kind
    # START, WIDTH and OFFSET of all parts as shared numbers, and WIDEST, the largest width
    constants: dict[str, int]
    precision: int  # Number of the precision of the columns
    template: list[int]  # The descriptors of the parts without addresses and sizes
    aligned: bool  # Whether columns and widths are multiples of VECTOR
    single: bool  # Whether every bag has exactly one occurrence, without a factor
    most_bags: int  # Number of bags of the largest part
    first: int = 0  # Position of the descriptors in the array of all launches

    @property
    def kind(self) -> int:
        """Number of the kind of its tables in the plan."""
        return self.parts[0].kind

    def of(self, fields: Tensor) -> Tensor:
        """Return its descriptors."""
        return fields[self.first : self.first + len(self.template)]


class Launches:
    """Launches that follow each other, and the descriptors of all their parts in one array."""

    def __init__(self, cuts: Iterable[Cut]) -> None:
        self.cuts = list(cuts)
        parts = [each for cut in self.cuts for each in cut.parts]
        template: list[int] = []
        for cut in self.cuts:
            cut.first = len(template)
            template += cut.template
        self.template = np.array(template, dtype=np.int64).reshape(-1, PART_FIELDS)
        self.names = np.array([each.name for each in parts], dtype=np.intp)
        self.bags = np.array([each.bags for each in parts], dtype=np.intp)
        self.outputs = np.array([each.part.output for each in parts], dtype=np.intp)
        self.out_places = np.arange(len(parts)) * PART_FIELDS + OUT


class Strides(NamedTuple):
    """Where the gradients of tables are if occurrence k of each has a row of one output, from row 0 on."""

    outputs: IntArray  # int64 [tables], the number of the output; -1 without occurrences
    offsets: IntArray  # int64 [tables], the first byte
    strides: IntArray  # int64 [tables], bytes from one row to the next


class GradientPlan(NamedTuple):
    """How the gradients of outputs reach the occurrences of the tables of a kind."""

    strides: Strides | None  # None: launches find them
    launches: Launches
    direct: bool  # Whether each occurrence has a whole row of one output; otherwise a matrix is written
    weighted: bool  # Whether occurrences have factors


class Members(NamedTuple):
    """The tables of a kind that a pooling reads."""

    tables: list[int]  # Their numbers in the kind
    names: list[int]  # Their numbers in the pooling


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


class PoolingPlan:
    """The launches of poolings of equal structure over kinds of tables."""

    def __init__(self, kinds: Sequence[TableKind], pooling: Pooling, sizes: Sequence[int]) -> None:
        # sizes: number of ids of each table of the pooling.
        self.names = [name for name, bags in pooling.bags.items() if bags]
        self.kinds = [kind for kind in kinds if not set(self.names).isdisjoint(kind.names)]
        self.groups = [kind.group for kind in self.kinds]
        self.outputs = pooling.outputs
        self.covered = pooling.coverage.of(pooling, tuple(pooling.bags))
        numbers = {name: number for number, name in enumerate(self.names)}
        self.members: list[Members] = []
        places: dict[str, tuple[int, int, int]] = {}
        for number, kind in enumerate(self.kinds):
            own = [(table, name) for table, name in enumerate(kind.names) if name in numbers]
            self.members.append(Members([table for table, _ in own], [numbers[name] for _, name in own]))
            places |= {name: (number, table, numbers[name]) for table, name in own}
        # Parts are read in the order of the pooling's tables, because some add to what others wrote.
        self._bags = [(name, bags) for name in self.names for bags in pooling.bags[name]]
        # It also keeps the tuples of parts whose ids are in the signature of the structure.
        self._parts = [(bags.parts, bags.num_bags) for _, bags in self._bags]
        parts = [
            TablePart(*places[name], number, part, k)
            for number, (name, bags) in enumerate(self._bags)
            for k, part in enumerate(bags.parts)
        ]
        self.forward = Launches(
            cut
            for wave in waves(parts)
            for number in range(len(self.kinds))
            for cut in self._cuts(number, wave)
        )
        self.gradients = [
            self._gradients(number, [each for each in parts if each.kind == number], sizes)
            for number in range(len(self.kinds))
        ]
        self._bags.clear()  # the tensors of one batch
        # The descriptors of the forward, then the spans of each kind, aligned.
        self.num_part_fields = self.forward.template.size
        self.num_span_fields = [-(-len(kind.names) * SPAN_FIELDS.value // 2) * 2 for kind in self.kinds]
        self.num_fields = self.num_part_fields + sum(self.num_span_fields)

    def columns(self, ids: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the ids of the pooling's tables, in its order."""
        return [ids[name] for name in self.names]

    def new_outputs(self, device: torch.device) -> list[Tensor]:
        """Allocate outputs, zero where no part writes."""
        return [
            torch.empty(shape, dtype=torch.float32, device=device)
            if covered
            else torch.zeros(shape, dtype=torch.float32, device=device)
            for shape, covered in zip(self.outputs, self.covered, strict=True)
        ]

    # ---- forward

    def _cuts(self, number: int, parts: Sequence[TablePart]) -> Iterable[Cut]:
        """Divide the parts of a kind into launches."""
        layouts = self.groups[number].layout.layouts
        for run_number, first in enumerate(layouts[0].runs):
            item = 4 if first.precision == 0 else 2
            chosen: dict[tuple[int, bool], tuple[list[TablePart], list[PartColumns]]] = {}
            for each in parts:
                if each.kind != number:
                    continue
                run = layouts[each.table].runs[run_number]
                start, end = max(each.part.start, run.start), min(each.part.end, run.end)
                if start < end and self._bags[each.bags][1].num_bags:
                    own = chosen.setdefault((padded(end - start), self._is_single(each)), ([], []))
                    own[0].append(each)
                    own[1].append(PartColumns(start, end, run.offset + (start - run.start) * item))
            for of_launch, columns in chosen.values():
                yield self._cut(of_launch, columns, first.precision)

    def launch(self, fields: Tensor, rows: Sequence[JoinedRows], *, aligned: bool) -> None:
        """Reduce rows into outputs. `aligned`: whether all outputs are at multiples of VECTOR."""
        # fields: int64, on the device; rows: those of each kind.
        for cut in self.forward.cuts:
            self._launch(cut, fields, rows[cut.kind], aligned=aligned and cut.aligned)

    def _launch(self, cut: Cut, fields: Tensor, rows: JoinedRows, *, aligned: bool) -> None:
        group, found = self.groups[cut.kind], rows.search
        key = ("pool", cut.precision, *cut.constants.values(), cut.single, aligned)
        if key not in group.bound:
            _bind(group, key, cut, aligned=aligned)
        tables, parts, count = group.descriptors(), cut.of(fields), len(cut.parts)
        blocks = -(-cut.most_bags // _block(cut))
        main, rest = group.bound[key], group.bound.get((*key, "missing"))
        if cut.single:
            main((blocks, count), tables, parts, found.rows)
        else:
            main((blocks, count), tables, parts, rows.ids, found.rows, found.missing)
        if rest is None:
            return
        programs = (min(blocks, group.few_programs), count)
        if cut.single:
            rest(programs, tables, parts, rows.ids, found.missing, found.absent)
        else:
            rest(programs, tables, parts, rows.ids, found.rows, found.missing)

    # ---- backward

    def _gradients(self, number: int, parts: Sequence[TablePart], sizes: Sequence[int]) -> GradientPlan:
        used = [each for each in parts if self._bags[each.bags][1].num_bags]
        dims = self.groups[number].layout.dims
        own = [self._bags[each.bags][1] for each in used]
        direct = all(
            len(bags.parts) == 1 and not bags.shared and each.part.end - each.part.start == dims[each.table]
            for each, bags in zip(used, own, strict=True)
        )
        strides = self._strides(number, used, sizes) if direct else None
        cuts = []
        if strides is None and direct and used:
            cuts = [self._cut(used, [PartColumns(0, dims[each.table]) for each in used])]
        elif strides is None:
            for part_number in range(max((each.number for each in used), default=-1) + 1):
                widths: dict[int, list[TablePart]] = {}
                for each in (each for each in used if each.number == part_number):
                    widths.setdefault(padded(each.part.width), []).append(each)
                for chosen in widths.values():
                    columns = [PartColumns(each.part.start, each.part.end) for each in chosen]
                    cuts.append(self._cut(chosen, columns))
        weighted = direct and any(bags.weights is not None or bags.divisor is not None for bags in own)
        return GradientPlan(strides, Launches(cuts), direct, weighted)

    def _strides(self, number: int, used: Sequence[TablePart], sizes: Sequence[int]) -> Strides | None:
        found = [(-1, 0, 0)] * len(self.kinds[number].names)
        for each in used:
            bags, part = self._bags[each.bags][1], each.part
            whole = bags.first == 0 and bags.num_bags == sizes[each.name]
            if not whole or not self._is_single(each, adds=True) or part.inner != 1:
                return None
            found[each.table] = part.output, 4 * part.column, 4 * self.outputs[part.output][1]
        # A table without bags: its ids, of which a later batch may have some, have no gradient.
        if any(found[table][0] < 0 for table in self.members[number].tables):
            return None
        return Strides(*np.array(found, dtype=np.int64).T)

    # ---- descriptors

    def _is_single(self, each: TablePart, adds: bool = False) -> bool:
        bags = self._bags[each.bags][1]
        plain = bags.weights is None and bags.divisor is None and not bags.shared
        return plain and bags.first is not None and (adds or not each.part.accumulate)

    def _cut(self, parts: Sequence[TablePart], columns_of: Sequence[PartColumns], precision: int = 0) -> Cut:
        template: list[int] = []
        aligned = not any(own.offset % VECTOR for own in columns_of)
        for each, (start, end, offset) in zip(parts, columns_of, strict=True):
            bags, part = self._bags[each.bags][1], each.part
            rows, columns = self.outputs[part.output]
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
                0,
                0,
                int(part.accumulate),
                bags.first or 0,
                start,
                end - start,
                offset,
            ]
        single = all(self._is_single(each) for each in parts)
        most = max(self._bags[each.bags][1].num_bags for each in parts)
        constants = {
            "START": shared_number(own.start for own in columns_of),
            "WIDTH": shared_number(own.end - own.start for own in columns_of),
            "WIDEST": max(own.end - own.start for own in columns_of),
            "OFFSET": shared_number(own.offset for own in columns_of),
        }
        return Cut(tuple(parts), constants, precision, template, aligned, single, most)


def _block(cut: Cut) -> int:
    columns = min(padded(cut.constants["WIDEST"]), 256)
    return max(1, (PLACE_TILE if cut.single else POOL_TILE) // columns)


def _bind(group: LaunchGroup, key: tuple[object, ...], cut: Cut, *, aligned: bool) -> None:
    layout = group.layout
    columns = {name: value for name, value in cut.constants.items() if name != "OFFSET"}
    common = {
        **columns,
        "PRECISION": cut.precision,
        "NUM_SEGMENTS": layout.num_segments,
        "ALIGNED": aligned,
        "BLOCK": _block(cut),
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


@dataclass(frozen=True)
class Room:
    """Numbers of positions for which a slot has memory."""

    n: int  # Of all tables of a kind
    most: int  # Of one table

    @classmethod
    def of(cls, sizes: Sequence[int], *, padded: bool) -> Room:
        """Return the room for ids of given numbers."""
        n, most = sum(sizes), max(sizes)
        return cls(_padded(n), _padded(most)) if padded else cls(n, most)


def _padded(n: int) -> int:
    """Return a number of few digits: at most a sixteenth more than n."""
    step = max(16, 1 << max(0, n.bit_length() - 5))
    return -(-n // step) * step


class PlannedPooling:
    """A plan with the tensors of one pooling, for ids of given numbers."""

    def __init__(self, plan: PoolingPlan, pooling: Pooling, ready: Pooling, sizes: list[int]) -> None:
        # ready: the pooling on the device; sizes: number of ids of each table of the pooling.
        self.plan, self.sizes = plan, sizes
        self.bags = [bags for name in plan.names for bags in ready.bags[name]]
        # A copy on the device lives as long as the pooling; the pooling itself must not refer to itself.
        self.moved = None if ready is pooling else ready
        self._addresses = np.array(
            [
                (
                    0 if bags.first is not None else bags.offsets.data_ptr(),
                    0 if bags.weights is None else bags.weights.data_ptr(),
                    0 if bags.divisor is None else bags.divisor.data_ptr(),
                )
                for bags in self.bags
            ],
            dtype=np.int64,
        ).reshape(-1, 3)
        counts, firsts = np.array(sizes, dtype=np.int64), np.zeros(len(sizes), dtype=np.int64)
        self.kind_sizes: list[list[int]] = []  # number of ids of all tables of each kind
        spans = []
        for group, own, fields in zip(plan.groups, plan.members, plan.num_span_fields, strict=True):
            of_kind = np.zeros(len(group.tables), dtype=np.int64)
            of_kind[own.tables] = counts[own.names]
            self.kind_sizes.append(of_kind.tolist())
            spans.append(np.zeros(fields, dtype=np.int64))
            own_spans = group.span_fields(of_kind)
            firsts[own.names] = own_spans[own.tables, 0]
            spans[-1][: own_spans.size] = own_spans.reshape(-1)
        self.rooms = [Room.of(own, padded=True) for own in self.kind_sizes]
        self.slot_key = plan, *self.rooms  # Lookups with an equal key share memory
        self._placed = np.stack((firsts, counts), axis=1)
        self._fields = np.concatenate((self._filled(plan.forward), *spans))
        self._gradient_fields: dict[int, IntArray] = {}

    def _filled(self, launches: Launches) -> IntArray:
        """Return the descriptors of launches without the addresses of outputs."""
        fields = launches.template.copy()
        fields[:, FIRST : COUNT + 1] = self._placed[launches.names]
        fields[:, OFFSETS] = self._addresses[launches.bags, 0]
        fields[:, WEIGHTS : DIVISOR + 1] = self._addresses[launches.bags, 1:]
        return fields.reshape(-1)

    def hold(self) -> None:
        """Note that launches of the current stream use the tensors of the pooling."""
        hold(
            tensor
            for bags in self.bags
            for tensor in (bags.offsets, bags.weights, bags.divisor)
            if tensor is not None
        )

    def fields(self, addresses: Sequence[int]) -> IntArray:
        """Return the descriptors of a call, with the addresses of outputs."""
        return _with_outputs(self._fields, self.plan.forward, addresses)

    def pool(self, rows: Sequence[JoinedRows], outputs: Sequence[Tensor]) -> None:
        """Reduce rows that were found into outputs."""
        # rows: those of each kind.
        self.hold()
        addresses = [tensor.data_ptr() for tensor in outputs]
        fields = self.plan.groups[0].upload(self.fields(addresses)) if self.plan.groups else outputs[0]
        self.plan.launch(fields, rows, aligned=are_aligned(addresses))

    def gradients(self, number: int, grads: Sequence[Tensor]) -> GradientSource:
        """Find the gradients of the occurrences of a kind of tables."""
        # If each feature fills whole rows of one output, occurrences refer to these; otherwise the gradients
        # are written to a matrix first.
        addresses = [grad.data_ptr() for grad in grads]
        own = self.plan.gradients[number]
        if own.strides is not None:
            outputs, offsets, strides = own.strides
            bases = np.array([*addresses, 0])[outputs] + offsets
            return GradientSource(bases, strides)
        fields = self._gradient_fields.get(number)
        if fields is None:
            fields = self._gradient_fields[number] = self._filled(own.launches)
        fields = _with_outputs(fields, own.launches, addresses)
        aligned = are_aligned(addresses) and all(cut.aligned for cut in own.launches.cuts)
        return PooledGradients(self.plan.groups[number], own, fields, aligned=aligned)


def are_aligned(addresses: Sequence[int]) -> bool:
    """Return whether all addresses are multiples of VECTOR."""
    return not any(address % VECTOR for address in addresses)


def _with_outputs(fields: IntArray, launches: Launches, addresses: Sequence[int]) -> IntArray:
    fields = fields.copy()
    fields[launches.out_places] = np.array(addresses, dtype=np.int64)[launches.outputs]
    return fields


class PooledGradients(GradientSource):
    """Gradients of occurrences that launches find in those of outputs."""

    def __init__(self, group: LaunchGroup, plan: GradientPlan, fields: IntArray, *, aligned: bool) -> None:
        nothing = np.zeros(len(group.tables), dtype=np.int64)
        super().__init__(nothing, nothing, fields)
        self._group, self._plan = group, plan
        self.aligned = aligned if plan.direct else 4 * group.layout.max_dim % VECTOR == 0

    def places(self, fields: Tensor, n: int) -> GradientPlaces:
        group, plan = self._group, self._plan
        wanted = group.scratch("wanted", n, torch.int8)[:n].zero_()  # 0: in no bag
        if not plan.direct:
            return GradientPlaces(self._matrix_rows(fields, n, wanted), None, wanted)
        addresses = group.scratch("places", n, torch.int64)[:n].zero_()
        factors = group.scratch("bag factors", n if plan.weighted else 0, torch.float32)[:n]
        block = 1024 if INTERPRETED else 128
        for cut in plan.launches.cuts:
            pool_kernels.expand_bags[-(-cut.most_bags // block), len(cut.parts)](
                cut.of(fields),
                wanted,
                addresses,
                factors,
                WEIGHTED=plan.weighted,
                BLOCK=block,
                **PLAIN_ARITHMETIC,
            )
        return GradientPlaces(addresses, factors if plan.weighted else None, wanted)

    def _matrix_rows(self, fields: Tensor, n: int, wanted: Tensor) -> Tensor:
        """Write the gradients of occurrences to a matrix; return the addresses of its rows."""
        group, dim = self._group, self._group.layout.max_dim
        matrix = group.scratch("gradients", n * dim, torch.float32)[: n * dim].zero_()
        for cut in self._plan.launches.cuts:
            columns = {name: value for name, value in cut.constants.items() if name != "OFFSET"}
            width = min(padded(cut.constants["WIDEST"]), 256)
            block = max(1, (4096 if INTERPRETED else 1024) // width)
            pool_kernels.unpool_bags[-(-cut.most_bags // block), len(cut.parts)](
                cut.of(fields),
                wanted,
                matrix,
                DIM=dim,
                BLOCK=block,
                COLUMNS=width,
                **columns,
                **PLAIN_ARITHMETIC,
            )
        first, row = matrix.data_ptr(), 4 * dim
        return torch.arange(first, first + n * row, row, dtype=torch.int64, device=group.device)


class PoolingPlans:
    """The plans of poolings over kinds of tables, and the poolings that are in use."""

    def __init__(self, kinds: Sequence[TableKind]) -> None:
        self._kinds = kinds
        self._device = kinds[0].group.device
        self._dims = {
            name: dim for group, names in kinds for name, dim in zip(names, group.layout.dims, strict=True)
        }
        self._plans: dict[tuple[object, ...] | None, PoolingPlan] = {}
        self._known: dict[int, tuple[weakref.ref[Pooling], PlannedPooling]] = {}

    def find(self, pooling: Pooling, ids: Mapping[str, Tensor]) -> PlannedPooling:
        """Return a pooling with its plan; a new structure is checked and compiled."""
        # The values of offsets, weights and divisors on a GPU are not read: that would wait for it. Kernels
        # keep offsets within the occurrences of the table.
        number = id(pooling)
        known = self._known.get(number)
        if known is not None and known[0]() is pooling:
            planned = known[1]
            if [ids[name].numel() for name in planned.plan.names] == planned.sizes:
                return planned
        sizes = [ids[name].numel() for name, bags in pooling.bags.items() if bags]
        ready, signature = pooling, _signature(pooling, sizes)
        plan = self._plans.get(signature)
        if plan is None or self._device.type == "cpu":
            ready = on_device(pooling, self._device)
            for name, bags in pooling.bags.items():
                if bags:
                    self._check(ready, name, ids[name].numel())
        if plan is None:
            signature = _signature(ready, sizes)
            assert signature is not None
            plan = self._plans.get(signature)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[signature] = PoolingPlan(self._kinds, ready, sizes)
        planned = PlannedPooling(plan, pooling, ready, sizes)
        forget = self._known.pop
        self._known[number] = weakref.ref(pooling, lambda _: forget(number, None)), planned
        return planned

    def _check(self, pooling: Pooling, table: str, size: int) -> None:
        if self._device.type == "cpu":
            pooling.check(table, size, self._dims[table])
        else:
            pooling.check_shapes(table, size, self._dims[table])


def _signature(pooling: Pooling, sizes: Sequence[int]) -> tuple[object, ...] | None:
    """Return what determines the launches of a pooling, besides addresses and numbers of ids.

    None: some tensor is of a wrong type, which `PoolingPlans._check` reports.
    """
    # One comprehension, because a ragged batch runs it for every feature. Of the numbers of ids, plans use
    # only whether bags of one occurrence each end where the ids end.
    used = [(name, bags) for name, bags in pooling.bags.items() if bags]
    try:
        return (
            pooling.outputs,
            tuple([(name, len(bags)) for name, bags in used]),
            *[
                (
                    id(own.parts),
                    own.shared,
                    (x := own.offsets).shape,
                    x.dtype,
                    x.device,
                    x.is_contiguous(),
                    own.first,
                    None if own.first is None else (n > (end := own.first + x.shape[0] - 1)) - (n < end),
                    None if (w := own.weights) is None else (*_kind(w), w.shape == (n,)),
                    None if (d := own.divisor) is None else (*_kind(d), d.shape[0] == x.shape[0] - 1),
                )
                for (_, bags), n in zip(used, sizes, strict=True)
                for own in bags
            ],
        )
    except (AttributeError, TypeError, IndexError):
        return None


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.device, tensor.is_contiguous()


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
