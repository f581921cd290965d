"""Pooling: which occurrence goes to which output, and how it is reduced.

A `Pooling` is pure data, compiled once per batch from features and layouts. Engines read a table's rows
directly into the outputs it describes, and use the same data in reverse to compute the gradient of each
occurrence. `pool` and `unpool` are the torch twins that define the result; every sum runs in the order of the
occurrences.

This module does not depend on tables, engines or modules.
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
    """Columns `start:end` of a feature's pooled rows, and where in the outputs they go.

    Bag `b` fills row `b // inner` of the output, beginning at column `column + (b % inner) * step`.
    """

    output: int
    """The number of the output."""
    column: int
    """The first column of the output."""
    start: int
    """The first column of the pooled row."""
    end: int
    """The column after the last one of the pooled row."""
    inner: int = 1
    """Bags per output row: 1, or n for a feature that keeps its first n rows."""
    accumulate: bool = False
    """Whether to add to what earlier parts wrote."""
    step: int = 0
    """Columns from one bag of an output row to the next; 0 means `width`."""

    @property
    def width(self) -> int:
        """The number of columns of one bag."""
        return self.end - self.start

    @cached_property
    def native(self) -> tuple[int, int, int, int, int, bool, int]:
        """The arguments for the native module."""
        step = self.step or self.width
        return self.output, self.column, self.start, self.end, self.inner, self.accumulate, step

    @property
    def columns(self) -> list[slice]:
        """The columns of the output that bags 0 to inner - 1 fill."""
        starts = [self.column + k * (self.step or self.width) for k in range(self.inner)]
        return [slice(start, start + self.width) for start in starts]


@dataclass(frozen=True)
class Bags:
    """The occurrences of one feature, divided into bags, and the outputs that the bags fill."""

    offsets: Tensor
    """int64 [bags + 1], ascending: bag b has the table's occurrences `offsets[b]:offsets[b + 1]`. The
    features of a table follow each other."""
    parts: tuple[OutputSlice, ...]
    """The outputs to fill; all parts have the same `inner`."""
    weights: Tensor | None = None
    """float32 [occurrences of the table]: the factor of each row."""
    divisor: Tensor | None = None
    """float32 [bags]: the divisor of each bag's sum, such as the counts of a mean."""
    shared: bool = False
    """Whether the bags belong to the whole batch; the rows of the outputs then repeat theirs."""
    first: int | None = None
    """If every bag has exactly one occurrence, the first of them: bag b has the occurrence `first + b`, and
    offsets say the same. A GPU then need not read them. None: not known."""

    @property
    def num_bags(self) -> int:
        """The number of bags."""
        return self.offsets.numel() - 1

    def _moved(self, device: torch.device) -> Bags:
        """Return the bags with their tensors on another device."""

        def move(tensor: Any) -> Any:
            has_data = isinstance(tensor, Tensor) and not tensor.is_meta
            return tensor.to(device, non_blocking=device.type != "cpu") if has_data else tensor

        tensors = move(self.offsets), self.parts, move(self.weights), move(self.divisor)
        return Bags(*tensors, self.shared, self.first)

    @property
    def native(self) -> tuple[Any, ...]:
        """The arguments for the native module."""
        weights, divisor = self.weights, self.divisor
        return (
            _contiguous(self.offsets),
            None if weights is None else _contiguous(weights),
            None if divisor is None else _contiguous(divisor),
            self.shared,
            [part.native for part in self.parts],
        )


class Coverage:
    """Remembers which outputs of a pooling are written completely, by the tables that are read.

    Poolings of the same features and layouts may share one.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], list[bool]] = {}

    def of(self, pooling: Pooling, tables: tuple[str, ...]) -> list[bool]:
        """Return which outputs have every column written by some part of the tables."""
        if not isinstance(pooling, Pooling) or not isinstance(tables, tuple):
            raise InputError("Coverage: expected a Pooling and a tuple of table names")
        if tables not in self._known:
            bags = [bags for table in tables for bags in pooling.of(table)]
            self._known[tables] = covered(bags, pooling.outputs)
        return self._known[tables]


@dataclass(frozen=True)
class Pooling:
    """The outputs of one batch and the bags that fill them."""

    outputs: tuple[tuple[int, int], ...]
    """The shape (rows, columns) of each output."""
    bags: Mapping[str, tuple[Bags, ...]]
    """For each table, the bags of its features, in the order of the table's occurrences. Tables are read in
    the order of this mapping, so a part that accumulates must come after the part it adds to."""
    coverage: Coverage = field(default_factory=Coverage, repr=False, compare=False)
    """Which outputs need no zeros before they are written. Poolings with equal parts may share it."""

    @classmethod
    def sum(cls, table: str, offsets: Tensor, dim: int) -> Pooling:
        """Make a pooling that sums one feature of one table.

        Args:
            table: The name of the table.
            offsets: int64 [bags + 1].
            dim: The number of columns of a row.

        Returns:
            A Pooling with one output [bags, dim].

        Raises:
            InputError: An argument has the wrong type.
        """
        _check_name(table)
        _check_shape(table, "offsets", offsets, torch.int64, None)
        _check_count("dim", dim)
        return cls(
            outputs=((offsets.numel() - 1, dim),),
            bags={table: (Bags(offsets, (OutputSlice(0, 0, 0, dim),)),)},
        )

    def to(self, device: torch.device | str) -> Pooling:
        """Return the pooling with its tensors on another device.

        Args:
            device: The device.

        Returns:
            The pooling itself if all its tensors are there.

        Raises:
            InputError: The device is not known.
        """
        place = _check_device(device)
        tensors = [t for bags in self.bags.values() for b in bags for t in (b.offsets, b.weights, b.divisor)]
        if all(not isinstance(tensor, Tensor) or tensor.device == place for tensor in tensors):
            return self
        moved = {name: tuple(own._moved(place) for own in bags) for name, bags in self.bags.items()}
        return Pooling(self.outputs, moved, self.coverage)

    def new_outputs(
        self, tables: Iterable[str] | None = None, device: torch.device | None = None
    ) -> list[Tensor]:
        """Allocate float32 outputs, zero where no part of the tables writes.

        Args:
            tables: The names of the tables; default all.
            device: Where to allocate them; default the CPU.

        Returns:
            A tensor for each shape of `outputs`.
        """
        if tables is not None:
            if not isinstance(tables, list | tuple | set | Mapping):
                raise InputError(f"tables must be a list of names, got {type(tables).__name__}")
            tables = [_check_name(table) for table in tables]
        device = torch.device("cpu") if device is None else _check_device(device)
        if not isinstance(self.coverage, Coverage):
            raise InputError(f"coverage must be a Coverage, got {type(self.coverage).__name__}")
        covered = self.coverage.of(self, tuple(self.bags if tables is None else tables))
        return [
            torch.empty(shape, dtype=torch.float32, device=device)
            if whole
            else torch.zeros(shape, dtype=torch.float32, device=device)
            for shape, whole in zip(self.outputs, covered, strict=True)
        ]

    def of(self, table: str) -> tuple[Bags, ...]:
        """Return the bags of one table, none if it fills no output.

        Args:
            table: The name of the table.

        Returns:
            The bags of its features, in the order of the table's occurrences.

        Raises:
            InputError: The name is not a string.
        """
        return self.bags.get(_check_name(table), ())

    def native(self, table: str) -> Sequence[tuple[Any, ...]]:
        """Return the bags of one table as arguments for the native module.

        Args:
            table: The name of the table.

        Returns:
            A tuple for each feature, none if the table fills no output.
        """
        return self.native_bags.get(_check_name(table), ())

    @cached_property
    def native_bags(self) -> dict[str, list[tuple[Any, ...]]]:
        """The bags of each table that fills an output, as arguments for the native module."""
        return {name: [own.native for own in bags] for name, bags in self.bags.items() if bags}

    def check(self, table: str, num_occurrences: int, dim: int) -> None:
        """Raise InputError unless the table's bags match its occurrences, its rows and the outputs.

        Args:
            table: The name of the table.
            num_occurrences: The number of its occurrences.
            dim: The number of columns of its rows.
        """
        self.check_ends(table, num_occurrences, dim)
        for bags in self.of(table):
            if bool((torch.diff(bags.offsets) < 0).any()):
                raise _descends(table, num_occurrences)

    def check_shapes(self, table: str, num_occurrences: int, dim: int) -> None:
        """Check everything but the values of offsets, weights and divisors, on any device.

        Args:
            table: The name of the table.
            num_occurrences: The number of its occurrences.
            dim: The number of columns of its rows.

        Raises:
            InputError: The bags do not match the occurrences, the rows or the outputs.
        """
        _check_count("num_occurrences", num_occurrences)
        _check_count("dim", dim)
        for bags in self.of(table):
            _check_shape(table, "offsets", bags.offsets, torch.int64, None)
            if bags.first is not None:
                _check_single(table, bags, num_occurrences)
            if bags.weights is not None:
                _check_shape(table, "weights", bags.weights, torch.float32, num_occurrences)
            if bags.divisor is not None:
                _check_shape(table, "divisor", bags.divisor, torch.float32, bags.num_bags)
            for part in bags.parts:
                self._check_part(table, part, bags, dim)

    def check_ends(self, table: str, num_occurrences: int, dim: int) -> list[tuple[int, int]]:
        """Check everything but the offsets between the first and the last.

        Args:
            table: The name of the table.
            num_occurrences: The number of its occurrences.
            dim: The number of columns of its rows.

        Returns:
            The first and the last offset of each feature.
        """
        _check_count("num_occurrences", num_occurrences)
        _check_count("dim", dim)
        found = []
        end = 0
        for bags in self.of(table):
            _check_vector(table, "offsets", bags.offsets, torch.int64, None)
            first, last = int(bags.offsets[0]), int(bags.offsets[-1])
            if not end <= first <= last <= num_occurrences:
                raise _descends(table, num_occurrences)
            if bags.first is not None:
                _check_single(table, bags, num_occurrences)
                if first != bags.first or last - first != bags.num_bags:
                    raise _not_single(table, bags)
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
            raise InputError(f"table {table!r}: there is no output number {part.output}")
        rows, columns = self.outputs[part.output]
        if not 0 <= part.start < part.end <= dim:
            raise InputError(
                f"table {table!r}: slice {part.start}:{part.end} is outside rows of {dim} columns"
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
            raise InputError(f"table {table!r}: a part is outside the columns of output {part.output}")


def covered(bags: Sequence[Bags], outputs: Sequence[tuple[int, int]]) -> list[bool]:
    """Find the outputs that need no zeros: those of which bags write every column."""
    written: list[list[tuple[int, int]]] = [[] for _ in outputs]
    for part in (p for b in bags for p in b.parts):
        if not part.accumulate and 0 <= part.output < len(written):
            written[part.output] += [(c.start, c.stop) for c in part.columns]
    return [_fills(w, columns) for w, (_, columns) in zip(written, outputs, strict=True)]


def _contiguous(value: Any) -> Any:
    """Return a contiguous tensor; the native module rejects anything else than a tensor."""
    return value.contiguous() if isinstance(value, Tensor) else value


def _check_name(table: Any) -> str:
    if not isinstance(table, str):
        raise InputError(f"table must be a name, got {type(table).__name__}")
    return table


def _check_device(device: Any) -> torch.device:
    if isinstance(device, str | torch.device):
        try:
            return torch.device(device)
        except RuntimeError:
            pass
    raise InputError(f"Pooling: device must be a torch.device or its name, got {device!r}")


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"{name} must be an integer >= 0, got {value!r}")


def _check_matrices(name: str, tensors: Any) -> list[Tensor]:
    if not isinstance(tensors, list | tuple):
        raise InputError(f"{name} must be a list of tensors, got {type(tensors).__name__}")
    return [_check_matrix(f"{name}[{k}]", tensor) for k, tensor in enumerate(tensors)]


def _check_matrix(name: str, tensor: Any) -> Tensor:
    if (
        not isinstance(tensor, Tensor)
        or not tensor.is_floating_point()
        or tensor.dim() != 2
        or tensor.layout != torch.strided
    ):
        raise InputError(f"{name} must be a dense float tensor with 2 dimensions")
    return tensor


def _check_bags(bags: Any, num_occurrences: int, dim: int, outputs: Sequence[Tensor]) -> tuple[Bags, ...]:
    """Check the bags of a twin, which accepts weights and divisors of any float type, on any device."""
    if not isinstance(bags, list | tuple) or not all(isinstance(each, Bags) for each in bags):
        raise InputError("bags must be a list of Bags")
    pooling = Pooling(tuple((tensor.shape[0], tensor.shape[1]) for tensor in outputs), {})
    for number, each in enumerate(bags):
        offsets = each.offsets
        if not isinstance(offsets, Tensor) or offsets.dtype != torch.int64 or offsets.dim() != 1:
            raise InputError(f"bags[{number}]: offsets must be int64 [bags + 1]")
        if not offsets.numel() or not 0 <= int(offsets[0]) <= int(offsets[-1]) <= num_occurrences:
            raise InputError(f"bags[{number}]: offsets must be within {num_occurrences} occurrences")
        for name, factor, size in (
            ("weights", each.weights, num_occurrences),
            ("divisor", each.divisor, each.num_bags),
        ):
            if factor is None:
                continue
            if not isinstance(factor, Tensor) or not factor.is_floating_point() or factor.shape != (size,):
                raise InputError(f"bags[{number}]: {name} must be float [{size}]")
        for part in each.parts:
            pooling._check_part(f"bags[{number}]", part, each, dim)
    return tuple(bags)


def _descends(table: str, num_occurrences: int) -> InputError:
    return InputError(
        f"table {table!r}: offsets must ascend from feature to feature within {num_occurrences} occurrences"
    )


def _check_single(table: str, bags: Bags, num_occurrences: int) -> None:
    """Raise InputError unless `first` and the number of bags are within the occurrences."""
    first = bags.first
    _check_count("first", first)
    assert first is not None
    if first + bags.num_bags > num_occurrences:
        raise _not_single(table, bags)


def _not_single(table: str, bags: Bags) -> InputError:
    return InputError(
        f"table {table!r}: first={bags.first} says that {bags.num_bags} bags have one occurrence each, but "
        "the offsets or ids do not; leave first out"
    )


def _bags_fit(bags: Bags, part: OutputSlice, rows: int) -> bool:
    """Return whether the bags fill the output's rows, once or, if shared, a number of times."""
    if not bags.shared:
        return bags.num_bags == part.inner * rows
    period, rest = divmod(bags.num_bags, part.inner)
    return rest == 0 and period >= 1 and rows % period == 0


def _check_vector(table: str, field: str, tensor: Tensor, dtype: torch.dtype, size: int | None) -> None:
    """Raise InputError unless `tensor` is a finite CPU vector of this type and size (None: not empty)."""
    _check_shape(table, field, tensor, dtype, size, on_cpu=True)
    if dtype.is_floating_point and not bool(torch.isfinite(tensor).all()):
        raise InputError(f"table {table!r}: {field} holds NaN or Inf")


def _check_shape(
    table: str, field: str, tensor: Tensor, dtype: torch.dtype, size: int | None, *, on_cpu: bool = False
) -> None:
    """Raise InputError unless `tensor` is a vector of this type and size (None: not empty)."""
    good = (
        isinstance(tensor, Tensor)
        and tensor.dtype == dtype
        and tensor.layout == torch.strided
        and (tensor.device.type == "cpu" or not on_cpu)
        and tensor.dim() == 1
        and (tensor.numel() >= 1 if size is None else tensor.numel() == size)
    )
    if not good:
        shape = "[bags + 1]" if size is None else f"[{size}]"
        name = str(dtype).removeprefix("torch.")
        place = " on the CPU" if on_cpu else ""
        raise InputError(f"table {table!r}: {field} must be {name} {shape}{place}")


def _fills(intervals: list[tuple[int, int]], width: int) -> bool:
    """Return whether the intervals cover 0:width."""
    reached = 0
    for start, end in sorted(intervals):
        if start > reached:
            return False
        reached = max(reached, end)
    return reached >= width


def pool(source: Tensor, bags: Sequence[Bags], outputs: Sequence[Tensor]) -> None:
    """Reduce rows into outputs: the torch twin of the native kernel.

    Args:
        source: float [occurrences, dim], a row for each occurrence of the table.
        bags: The bags of the table's features.
        outputs: The tensors to fill, [rows, columns] each.

    Raises:
        InputError: The bags do not match the rows or the outputs.
    """
    _check_matrix("source", source)
    outputs = _check_matrices("outputs", outputs)
    if any(tensor.device != source.device for tensor in outputs):
        raise InputError(f"source and outputs must be on one device, {source.device}")
    bags = _check_bags(bags, source.shape[0], source.shape[1], outputs)
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
    """Compute the gradient of each occurrence: the reverse of `pool`.

    Args:
        grads: The gradient of each output, [rows, columns].
        bags: The bags of the table's features.
        num_occurrences: The number of occurrences of the table.
        dim: The number of columns of a row.

    Returns:
        The gradients, float [occurrences, dim], and which occurrences are in an output, bool [occurrences].

    Raises:
        InputError: The bags do not match the gradients.
    """
    grads = _check_matrices("grads", grads)
    _check_count("num_occurrences", num_occurrences)
    _check_count("dim", dim)
    bags = _check_bags(bags, num_occurrences, dim, grads)
    like = grads[0] if grads else torch.empty(0, device="cpu")
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
    """Sum gradients of rows that repeat the same `period` rows, in order."""
    total = grads.new_zeros(period, *grads.shape[1:])
    for first in range(0, grads.shape[0], period):
        total += grads[first : first + period]
    return total
