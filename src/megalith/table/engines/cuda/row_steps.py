"""Launches of an update: gradients summed by row in a fixed order, and one step per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.table.engines.cuda import update_kernels
from megalith.table.engines.cuda.atomic_steps import step_rows_atomically
from megalith.table.engines.cuda.device_table import BLOCK, WARPS, float_bits
from megalith.table.engines.cuda.launch_group import LaunchGroup
from megalith.table.engines.cuda.step_settings import NUM_SETTINGS, step_numbers
from megalith.table.engines.cuda.stream_order import hold
from megalith.table.engines.cuda.triton_runtime import INTERPRETED, PLAIN_ARITHMETIC
from megalith.table.table_data import Step

CHUNK = 8 if INTERPRETED else 64
"""Sorted occurrences that one program of an update sums."""


class Gradients(NamedTuple):
    """Where the gradients of the occurrences are."""

    # For each table, the address of the gradient of its first occurrence; none with `addresses`
    bases: Sequence[int] = ()
    strides: Sequence[int] = ()  # For each table, the bytes from one gradient to the next
    addresses: Tensor | None = None  # int64 [n] of all tables: the address of the gradient of each occurrence
    factors: Tensor | None = None  # float32 [n]: factor of each gradient, or None
    wanted: Tensor | None = None  # int8 [n]: which occurrences count; None: all
    all_aligned: bool = False  # With `addresses`, whether they are multiples of 16
    held: Sequence[Tensor] = ()  # The tensors that the addresses belong to

    @classmethod
    def of(cls, matrices: Sequence[Tensor], wanted: Tensor | None = None) -> Gradients:
        """Return the gradients of matrices."""
        # matrices: float32 [n, dim] of each table; wanted: int8 [n]: which occurrences count.
        hold(matrices)
        bases = [matrix.data_ptr() for matrix in matrices]
        return cls(bases, [4 * matrix.stride(0) for matrix in matrices], wanted=wanted, held=matrices)

    @property
    def aligned(self) -> bool:
        """Whether all addresses are multiples of 16."""
        if self.addresses is not None:
            return self.all_aligned
        return not any(base % 16 for base in self.bases) and not any(stride % 16 for stride in self.strides)

    def part(self, number: int, sizes: list[int]) -> Gradients:
        """Return the gradients of one table."""

        def own(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.split(sizes)[number]

        return Gradients(
            self.bases[number : number + 1],
            self.strides[number : number + 1],
            own(self.addresses),
            own(self.factors),
            own(self.wanted),
            self.all_aligned,
            self.held,
        )


def call_fields(group: LaunchGroup, gradients: Gradients, steps: Sequence[Step]) -> list[int]:
    """Return the numbers of an update that change from call to call."""
    fields: list[int] = []
    bits: list[int] = []
    before: Step | None = None
    bases, strides = gradients.bases, gradients.strides
    for number, step in enumerate(steps):
        if step != before:  # tables often have equal numbers
            bits = [step.time, step.step, float_bits(step.scale), float_bits(step.clip_norm)]
            segments = group.tables[number].config.segments
            for segment, rate in zip(segments, step.rates, strict=False):
                bits += [float_bits(x) for x in step_numbers(segment.optimizer, rate, step.step)]
            before = step
        fields += (bases[number], strides[number]) if bases else (0, 0)
        fields += bits
    return fields


def step_rows(
    group: LaunchGroup, keys: Tensor, sizes: Sequence[int], gradients: Gradients, calls: Tensor
) -> None:
    """Sum the gradients of each row in the order of its occurrences, and make one step per row."""
    if not keys.numel():
        return
    if not group.layout.deterministic:
        addresses, factors = gradients.addresses, gradients.factors
        if addresses is None:
            order = torch.arange(keys.numel(), device=group.device)
            addresses, _ = _sorted_gradients(group, sizes, gradients, calls, order)
        return step_rows_atomically(group, keys, sizes, addresses, factors, gradients.aligned, calls)
    walk = _Walk(group, keys, sizes, gradients, calls)
    measured = group.layout.num_segments > 1
    if measured:
        walk.measure()
    for number in range(group.layout.num_segments):
        walk.segment(number, measured)


def sum_rows(
    group: LaunchGroup, keys: Tensor, sizes: Sequence[int], gradients: Gradients
) -> tuple[Tensor, Tensor]:
    """Sum the gradients of each row."""
    # returns: the positions of the first occurrence of each row, int64 [u], by ascending row, and the sums,
    # float32 [u, dim].
    dim = group.layout.max_dim
    if not keys.numel():
        return torch.empty(0, dtype=torch.int64, device=group.device), torch.empty(
            0, dim, device=group.device
        )
    calls = group.upload(call_fields(group, gradients, [Step([], 0, 1.0, 0.0, 0)]))
    walk = _Walk(group, keys, sizes, gradients, calls)
    heads = walk.sums()
    heads = heads[walk.keys[heads] < group.tables[0].row_capacity]
    return walk.order[heads], walk.buffer.view(-1, dim)[heads]


def _sorted_gradients(
    group: LaunchGroup, sizes: Sequence[int], gradients: Gradients, calls: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the addresses and factors of gradients in the order of sorted occurrences."""
    n, num_fields = order.numel(), calls.numel() // len(sizes)
    addressed, weighted = gradients.addresses is not None, gradients.factors is not None
    addresses = group.scratch("addresses", n, torch.int64)
    factors = group.scratch("factors", n if weighted else 0, torch.float32)
    key = ("sort", addressed, weighted, num_fields)
    if key not in group.bound:
        group.bound[key] = update_kernels.sort_gradients.bind(
            CALL_FIELDS=num_fields,
            ADDRESSED=addressed,
            WEIGHTED=weighted,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    group.bound[key](
        group.grid(sizes, BLOCK),
        calls,
        group.spans(sizes, BLOCK),
        order,
        order if gradients.addresses is None else gradients.addresses,
        factors if gradients.factors is None else gradients.factors,
        addresses,
        factors,
    )
    return addresses, factors


class _Walk:
    """The launches of one update: sorted occurrences, scratch memory and the descriptors of the call."""

    def __init__(
        self,
        group: LaunchGroup,
        keys: Tensor,
        sizes: Sequence[int],
        gradients: Gradients,
        calls: Tensor,
    ) -> None:
        self.group, self.sizes, self.gradients, self.calls = group, sizes, gradients, calls
        self.keys, self.order = torch.sort(keys, stable=True)
        self.num_fields = calls.numel() // len(sizes)
        self.spans = group.spans(sizes, CHUNK)
        self.grid = group.grid(sizes, CHUNK)
        self.num_chunks = sum(-(-size // CHUNK) for size in sizes)
        self.heads = group.scratch("heads", self.num_chunks, torch.int64)
        self.addresses, self.factors = _sorted_gradients(group, sizes, gradients, calls, self.order)
        self.buffer = self.factors

    def segment(self, number: int, measured: bool) -> None:
        layout = self.group.layout
        what = {**layout.step_constants[number], "MEASURED": measured, "COUNTED": layout.counted}
        self._launch(("walk", number, measured), what, layout.rule(number).settings)

    def measure(self) -> None:
        """Compute the factor of each row's gradient, which depends on all columns."""
        self.buffer = torch.empty(self.keys.numel(), dtype=torch.float32, device=self.group.device)
        self._whole_row("measure", update_kernels.MEASURE.value)

    def sums(self) -> Tensor:
        """Compute the sums; return the sorted positions of the first occurrence of each row."""
        n = self.keys.numel()
        size = n * self.group.layout.max_dim
        self.buffer = torch.empty(size, dtype=torch.float32, device=self.group.device)
        self._whole_row("sum", update_kernels.SUM.value)
        first = torch.ones(n, dtype=torch.bool, device=self.group.device)
        first[1:] = self.keys[1:] != self.keys[:-1]
        return first.nonzero()[:, 0]

    def _whole_row(self, use: str, rule: int) -> None:
        """Do something with the sums of whole rows that is no optimizer step."""
        what = {**self.group.layout.whole_row_constants(rule), "MEASURED": False, "COUNTED": False}
        self._launch((use,), what, (0.0,) * NUM_SETTINGS)

    def _launch(self, use: tuple[object, ...], what: dict[str, float], settings: tuple[float, ...]) -> None:
        group, gradients = self.group, self.gradients
        key = (*use, gradients.factors is not None, gradients.aligned, self.num_fields)
        if key not in group.bound:
            self._bind(key, what)
        tables, columns = group.descriptors(), int(what["COLUMNS"])
        parts = group.scratch("parts", 2 * self.num_chunks * columns, torch.float32)
        group.bound[key](
            self.grid,
            tables,
            self.calls,
            self.spans,
            self.keys,
            self.addresses,
            self.factors,
            parts,
            self.heads,
            self.buffer,
            *settings,
        )
        group.bound[(*key, "finish")](
            self.grid,
            tables,
            self.calls,
            self.spans,
            self.keys,
            parts,
            self.heads,
            self.buffer,
            *settings,
        )

    def _bind(self, key: tuple[object, ...], what: dict[str, float]) -> None:
        group, layout, gradients = self.group, self.group.layout, self.gradients
        columns = int(what["COLUMNS"])
        common = {
            **group.kinds,
            "CALL_FIELDS": self.num_fields,
            "HEADER": layout.header,
            "DIM": layout.max_dim,
            "CHUNK": CHUNK,
            "num_warps": max(1, min(8, columns // 128)),
            **what,
            **PLAIN_ARITHMETIC,
        }
        group.bound[key] = update_kernels.walk_chunks.bind(
            WEIGHTED=gradients.factors is not None, ALIGNED=gradients.aligned, **common
        )
        group.bound[(*key, "finish")] = update_kernels.finish_chunks.bind(
            AHEAD=max(2, min(16, 2048 // columns)), **common
        )
