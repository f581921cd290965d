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
class Part:
    """Columns `start:end` of a feature's pooled rows, and where they go.

    Bag `b` fills row `b // inner` of output number `output`, from column
    `column + (b % inner) * (end - start)` on. `inner` is 1 except where a feature keeps its
    first n rows side by side. `accumulate` adds to what earlier parts wrote there.
    """

    output: int
    column: int
    start: int
    end: int
    inner: int = 1
    accumulate: bool = False


@dataclass(frozen=True)
class Bags:
    """One feature's occurrences, cut into bags, and the outputs its bags feed.

    offsets: int64 [bags + 1], ascending; bag b holds the table's occurrences
        `offsets[b]:offsets[b + 1]`. Features of a table follow each other.
    parts: the outputs fed; all with the same `inner`.
    weights: float32 [occurrences of the table], each row is multiplied by its own.
    divisor: float32 [bags], each bag's sum is divided by its own (a mean's counts).
    """

    offsets: Tensor
    parts: tuple[Part, ...]
    weights: Tensor | None = None
    divisor: Tensor | None = None

    @property
    def num_bags(self) -> int:
        """Number of bags."""
        return self.offsets.numel() - 1

    @cached_property
    def native(self) -> tuple[Any, ...]:
        """The form the native module takes."""
        parts = tuple((p.output, p.column, p.start, p.end, p.inner, p.accumulate) for p in self.parts)
        tensors = (self.offsets, self.weights, self.divisor)
        return (*(t.contiguous() if isinstance(t, Tensor) else t for t in tensors), parts)


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
            bags={table: (Bags(offsets, (Part(0, 0, 0, dim),)),)},
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
            written: list[list[tuple[int, int]]] = [[] for _ in self.outputs]
            for part in (p for table in tables for bags in self.of(table) for p in bags.parts):
                if not part.accumulate and 0 <= part.output < len(written):
                    end = part.column + part.inner * (part.end - part.start)
                    written[part.output].append((part.column, end))
            widths = (width for _, width in self.outputs)
            self._coverage[tables] = [_fills(w, n) for w, n in zip(written, widths, strict=True)]
        return self._coverage[tables]

    def of(self, table: str) -> tuple[Bags, ...]:
        """The bags of one table (none if it feeds no output)."""
        return self.bags.get(table, ())

    def check(self, table: str, num_occurrences: int, dim: int) -> None:
        """Raises InputError unless the table's bags fit its occurrences, its rows and the outputs."""
        end = 0
        for bags in self.of(table):
            offsets = bags.offsets
            _check_vector(table, "offsets", offsets, torch.int64, None)
            steps = torch.diff(offsets, prepend=offsets.new_tensor([end]))
            end = int(offsets[-1])
            if bool((steps < 0).any()) or end > num_occurrences:
                raise InputError(
                    f"table {table!r}: offsets must ascend from feature to feature within "
                    f"{num_occurrences} occurrences"
                )
            if bags.weights is not None:
                _check_vector(table, "weights", bags.weights, torch.float32, num_occurrences)
            if bags.divisor is not None:
                _check_vector(table, "divisor", bags.divisor, torch.float32, bags.num_bags)
                if bool((bags.divisor == 0).any()):
                    raise InputError(f"table {table!r}: divisor holds a zero")
            for part in bags.parts:
                self._check_part(table, part, bags, dim)

    def _check_part(self, table: str, part: Part, bags: Bags, dim: int) -> None:
        if not 0 <= part.output < len(self.outputs):
            raise InputError(f"table {table!r}: no output number {part.output}")
        rows, columns = self.outputs[part.output]
        if not 0 <= part.start < part.end <= dim:
            raise InputError(
                f"table {table!r}: slice {part.start}:{part.end} lies outside rows of {dim} columns"
            )
        if part.inner < 1 or part.inner != bags.parts[0].inner or bags.num_bags != part.inner * rows:
            raise InputError(
                f"table {table!r}: {bags.num_bags} bags do not fill {rows} output rows ({part.inner} each)"
            )
        width = part.inner * (part.end - part.start)
        if not 0 <= part.column <= columns - width:
            raise InputError(f"table {table!r}: columns outside output {part.output}")


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

    source: float32 [occurrences, dim], one row per occurrence of the table.
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
            width = part.inner * (part.end - part.start)
            block = sums[:, part.start : part.end].reshape(-1, width)
            target = outputs[part.output][:, part.column : part.column + width]
            target.copy_(target + block if part.accumulate else block)


def unpool(
    grads: Sequence[Tensor], bags: Sequence[Bags], num_occurrences: int, dim: int
) -> tuple[Tensor, Tensor]:
    """The gradient of each occurrence, and which occurrences reached an output.

    grads: one [rows, columns] per output. Returns float32 [occurrences, dim], bool [occurrences].
    """
    result = torch.zeros(num_occurrences, dim)
    reached = torch.zeros(num_occurrences, dtype=torch.bool)
    for feature in bags:
        begin, end = int(feature.offsets[0]), int(feature.offsets[-1])
        bag_of = torch.repeat_interleave(torch.arange(feature.num_bags), torch.diff(feature.offsets))
        reached[begin:end] = True
        for part in feature.parts:
            width = part.end - part.start
            columns = slice(part.column, part.column + part.inner * width)
            block = grads[part.output][:, columns].reshape(-1, width)
            if feature.divisor is not None:
                block = block / feature.divisor[:, None]
            rows = block[bag_of]
            if feature.weights is not None:
                rows = rows * feature.weights[begin:end, None]
            result[begin:end, part.start : part.end] += rows
    return result, reached
