"""Pooling: which occurrence goes where in which output, and how it is reduced.

A `Pooling` is pure data, compiled once a batch from features and layouts. Engines read
a table's rows straight into the outputs it describes, and use the same data backwards to
find each occurrence's gradient. `pool` and `unpool` are the obvious torch twins that define the
result; the order of every sum is the order of the occurrences.

It does not know tables, engines or modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megalith.errors import InputError


@dataclass(frozen=True)
class OutputSlice:
    """Columns `start:end` of a feature's pooled rows, and where they go.

    Bag `b` fills row `b // inner` of output number `output`, from column
    `column + (b % inner) * step` on. `inner` is 1 except where a feature keeps its
    first n rows side by side, `step` columns apart (0: without gaps). `accumulate` adds to what
    earlier parts wrote there.
    """

    output: int
    column: int
    start: int
    end: int
    inner: int = 1
    accumulate: bool = False
    step: int = 0

    @property
    def width(self) -> int:
        """Columns of one bag."""
        return self.end - self.start

    @property
    def columns(self) -> list[slice]:
        """The output's columns that bags 0 to inner - 1 fill."""
        starts = [self.column + k * (self.step or self.width) for k in range(self.inner)]
        return [slice(start, start + self.width) for start in starts]


@dataclass(frozen=True)
class Bags:
    """One feature's occurrences, cut into bags, and the outputs its bags feed.

    offsets: int64 [bags + 1], ascending; bag b holds the table's occurrences
        `offsets[b]:offsets[b + 1]`. Features of a table follow each other.
    parts: the outputs fed; all with the same `inner`.
    weights: float32 [occurrences of the table], each row is multiplied by its own.
    divisor: float32 [bags], each bag's sum is divided by its own (a mean's counts).
    shared: the bags stand for the whole batch; the outputs' rows repeat theirs.
    """

    offsets: Tensor
    parts: tuple[OutputSlice, ...]
    weights: Tensor | None = None
    divisor: Tensor | None = None
    shared: bool = False

    @property
    def num_bags(self) -> int:
        """Number of bags."""
        return self.offsets.numel() - 1

    @cached_property
    def native(self) -> tuple[Any, ...]:
        """The form the native module takes."""
        parts = tuple(
            (p.output, p.column, p.start, p.end, p.inner, p.accumulate, p.step or p.width) for p in self.parts
        )
        tensors = (self.offsets, self.weights, self.divisor)
        return (*(t.contiguous() if isinstance(t, Tensor) else t for t in tensors), self.shared, parts)


@dataclass(frozen=True)
class Pooling:
    """What one batch's outputs look like and which tables' bags fill them.

    outputs: the shape (rows, columns) of each output.
    bags: for each table its features' bags, in the order of the table's occurrences. Tables are read
        in this mapping's order, so a part that accumulates comes after the one it adds to.
    """

    outputs: tuple[tuple[int, int], ...]
    bags: Mapping[str, tuple[Bags, ...]]
    _coverage: dict[tuple[str, ...], list[bool]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def sum(cls, table: str, offsets: Tensor, dim: int) -> Pooling:
        """One feature of one table, summed: `offsets` int64 [bags + 1] -> one output [bags, dim]."""
        return cls(
            outputs=((offsets.numel() - 1, dim),),
            bags={table: (Bags(offsets, (OutputSlice(0, 0, 0, dim),)),)},
        )

    def new_outputs(self, tables: Iterable[str] | None = None) -> list[Tensor]:
        """Float32 outputs, one per shape, zero where no part of these tables (default: all) writes."""
        covered = self._covered(tuple(self.bags if tables is None else tables))
        return [
            torch.empty(shape) if whole else torch.zeros(shape)
            for shape, whole in zip(self.outputs, covered, strict=True)
        ]

    def _covered(self, tables: tuple[str, ...]) -> list[bool]:
        """Which outputs have every column written by some part of the tables."""
        if tables not in self._coverage:
            bags = [bags for table in tables for bags in self.of(table)]
            self._coverage[tables] = covered(bags, self.outputs)
        return self._coverage[tables]

    def of(self, table: str) -> tuple[Bags, ...]:
        """The bags of one table (none if it feeds no output)."""
        return self.bags.get(table, ())

    def check(self, table: str, num_occurrences: int, dim: int) -> None:
        """Raises InputError unless the table's bags fit its occurrences, its rows and the outputs."""
        self.check_ends(table, num_occurrences, dim)
        for bags in self.of(table):
            if bool((torch.diff(bags.offsets) < 0).any()):
                raise _descends(table, num_occurrences)

    def check_ends(self, table: str, num_occurrences: int, dim: int) -> list[tuple[int, int]]:
        """`check` without a look at offsets between the first and the last; these two, of each feature."""
        found = []
        end = 0
        for bags in self.of(table):
            _check_vector(table, "offsets", bags.offsets, torch.int64, None)
            first, last = int(bags.offsets[0]), int(bags.offsets[-1])
            if not end <= first <= last <= num_occurrences:
                raise _descends(table, num_occurrences)
            found.append((first, last))
            end = last
            if bags.weights is not None:
                _check_vector(table, "weights", bags.weights, torch.float32, num_occurrences)
            if bags.divisor is not None:
                _check_vector(table, "divisor", bags.divisor, torch.float32, bags.num_bags)
                if bool((bags.divisor == 0).any()):
                    raise InputError(f"table {table!r}: divisor holds a zero")
            for part in bags.parts:
                self._check_part(table, part, bags, dim)
        return found

    def _check_part(self, table: str, part: OutputSlice, bags: Bags, dim: int) -> None:
        if not 0 <= part.output < len(self.outputs):
            raise InputError(f"table {table!r}: no output number {part.output}")
        rows, columns = self.outputs[part.output]
        if not 0 <= part.start < part.end <= dim:
            raise InputError(
                f"table {table!r}: slice {part.start}:{part.end} lies outside rows of {dim} columns"
            )
        if part.inner < 1 or part.inner != bags.parts[0].inner or not _bags_fit(bags, part, rows):
            raise InputError(
                f"table {table!r}: {bags.num_bags} bags do not fill {rows} output rows ({part.inner} each)"
            )
        if rows != self.outputs[bags.parts[0].output][0]:
            raise InputError(f"table {table!r}: a feature's outputs must have the same number of rows")
        if part.step and part.step < part.width:
            raise InputError(f"table {table!r}: step {part.step} is below the width {part.width} of a part")
        end = part.column + (part.inner - 1) * (part.step or part.width) + part.width
        if part.column < 0 or end > columns:
            raise InputError(f"table {table!r}: columns outside output {part.output}")


def covered(bags: Sequence[Bags], outputs: Sequence[tuple[int, int]]) -> list[bool]:
    """Which outputs have every column written by some part of the bags."""
    written: list[list[tuple[int, int]]] = [[] for _ in outputs]
    for part in (p for b in bags for p in b.parts):
        if not part.accumulate and 0 <= part.output < len(written):
            written[part.output] += [(c.start, c.stop) for c in part.columns]
    return [_fills(w, columns) for w, (_, columns) in zip(written, outputs, strict=True)]


def _descends(table: str, num_occurrences: int) -> InputError:
    return InputError(
        f"table {table!r}: offsets must ascend from feature to feature within {num_occurrences} occurrences"
    )


def _bags_fit(bags: Bags, part: OutputSlice, rows: int) -> bool:
    """Whether the bags fill the output's rows, once or, if shared, a whole number of times."""
    if not bags.shared:
        return bags.num_bags == part.inner * rows
    period, rest = divmod(bags.num_bags, part.inner)
    return rest == 0 and period >= 1 and rows % period == 0


def _check_vector(table: str, field: str, tensor: Tensor, dtype: torch.dtype, size: int | None) -> None:
    """Raises InputError unless `tensor` is a finite CPU vector of this type and size (None: not empty)."""
    shape = "[bags + 1]" if size is None else f"[{size}]"
    good = (
        isinstance(tensor, Tensor)
        and tensor.dtype == dtype
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and tensor.dim() == 1
        and (tensor.numel() >= 1 if size is None else tensor.numel() == size)
    )
    if not good:
        name = str(dtype).removeprefix("torch.")
        raise InputError(f"table {table!r}: {field} must be {name} {shape} on the CPU")
    if dtype.is_floating_point and not bool(torch.isfinite(tensor).all()):
        raise InputError(f"table {table!r}: {field} holds NaN or Inf")


def _fills(intervals: list[tuple[int, int]], width: int) -> bool:
    """Whether the intervals leave no gap in 0:width."""
    reached = 0
    for start, end in sorted(intervals):
        if start > reached:
            return False
        reached = max(reached, end)
    return reached >= width


def pool(source: Tensor, bags: Sequence[Bags], outputs: Sequence[Tensor]) -> None:
    """Reduces rows into outputs: the twin of the native kernel.

    source: float [occurrences, dim], one row per occurrence of the table.
    outputs: the tensors to fill, [rows, columns] each.
    """
    for feature in bags:
        lengths = torch.diff(feature.offsets)
        begin, end = int(feature.offsets[0]), int(feature.offsets[-1])
        rows = source[begin:end]
        if feature.weights is not None:
            rows = rows * feature.weights[begin:end, None]
        sums = source.new_zeros(feature.num_bags, source.shape[1])
        # One occurrence of each bag at a time keeps the order of each sum.
        for k in range(int(lengths.max()) if feature.num_bags else 0):
            has = lengths > k
            sums[has] += rows[feature.offsets[:-1][has] - begin + k]
        if feature.divisor is not None:
            sums = sums / feature.divisor[:, None]
        for part in feature.parts:
            block = sums[:, part.start : part.end].reshape(-1, part.inner, part.width)
            if feature.shared:
                block = block.repeat(outputs[part.output].shape[0] // block.shape[0], 1, 1)
            for k, columns in enumerate(part.columns):
                target = outputs[part.output][:, columns]
                target.copy_(target + block[:, k] if part.accumulate else block[:, k])


def unpool(
    grads: Sequence[Tensor], bags: Sequence[Bags], num_occurrences: int, dim: int
) -> tuple[Tensor, Tensor]:
    """The gradient of each occurrence, and which occurrences reached an output.

    grads: one [rows, columns] per output. Returns float [occurrences, dim], bool [occurrences].
    """
    like = grads[0] if grads else torch.empty(0)
    result = like.new_zeros(num_occurrences, dim)
    reached = torch.zeros(num_occurrences, dtype=torch.bool, device=result.device)
    for feature in bags:
        begin, end = int(feature.offsets[0]), int(feature.offsets[-1])
        numbers = torch.arange(feature.num_bags, device=result.device)
        bag_of = torch.repeat_interleave(numbers, torch.diff(feature.offsets))
        reached[begin:end] = True
        for part in feature.parts:
            block = torch.stack([grads[part.output][:, columns] for columns in part.columns], 1)
            if feature.shared:
                block = _fold(block, feature.num_bags // part.inner)
            block = block.reshape(-1, part.width)
            if feature.divisor is not None:
                block = block / feature.divisor[:, None]
            rows = block[bag_of]
            if feature.weights is not None:
                rows = rows * feature.weights[begin:end, None]
            result[begin:end, part.start : part.end] += rows
    return result, reached


def _fold(grads: Tensor, period: int) -> Tensor:
    """Sums rows that repeat the same `period` rows, in their order."""
    total = grads.new_zeros(period, *grads.shape[1:])
    for first in range(0, grads.shape[0], period):
        total += grads[first : first + period]
    return total
