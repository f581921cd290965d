"""Pooling: which occurrence goes to which output, and how it is reduced.

A `Pooling` is pure data, compiled once per batch from features and layouts. Engines read a table's rows
directly into the outputs it describes, and use the same data in reverse to compute the gradient of each
occurrence. `pool` and `unpool` are the reference implementations in torch that define the result; every
sum runs in the order of the occurrences.

`pool_rows` does the same with any tensor: rows received from other shards, or rows that a user holds. It
is the op behind layouts and combiners.

This module does not depend on tables, engines or modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megalith.errors import InputError, UsageError
from megalith.library import define_op, native_module, new_tensor
from megalith.ops import checks
from megalith.ops.gather_rows import add_at, index_limit


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
        def move(tensor: Any) -> Any:
            has_data = isinstance(tensor, Tensor) and not tensor.is_meta
            return tensor.to(device, non_blocking=device.type != "cpu") if has_data else tensor

        tensors = move(self.offsets), self.parts, move(self.weights), move(self.divisor)
        return Bags(*tensors, self.shared, self.first)

    @cached_property
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
    """The outputs of one batch and the bags that fill them.

    Its tensors must not change: engines keep what they have derived from a pooling while it exists.
    """

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
    def tables(self) -> list[str]:
        """The tables that fill an output."""
        return [name for name, bags in self.bags.items() if bags]

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
    """Check the bags of a reference, which accepts weights and divisors of any float type, on any device."""
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
    """Reduce rows into outputs: the torch reference of the native kernel.

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


def pool_rows(
    source: Tensor,
    index: Tensor | None,
    bags: Sequence[Bags],
    outputs: Sequence[tuple[int, int]],
    *,
    dim: int | None = None,
    name: str = "index",
) -> list[Tensor]:
    """Read rows into pooled outputs. Differentiable in `source`.

    Args:
        source: float [m, dim], or a flat buffer if `dim` is given.
        index: int64 [n], the row of each occurrence; -1 is a row of zeros. For a flat buffer, the element
            where the row begins. None: occurrence i is row i.
        bags: As for a table in a `Pooling`, features in the order of the occurrences; weights and divisors
            of any float type.
        outputs: The shape (rows, columns) of each output.
        dim: For a flat buffer, the largest width of a row.
        name: The name of the index in error messages.

    Returns:
        A tensor for each shape.

    Raises:
        InputError: An index is out of range, or the bags do not match the occurrences or the outputs.
    """
    source, name = checks.floats(source, "source", None), checks.text(name, "name")
    flat = dim is not None
    if source.dim() != (1 if flat else 2):
        raise InputError("source must be [m, dim], or one dimension when dim is given")
    width = source.shape[1] if dim is None else checks.integer(dim, "dim", least=0)
    dtype = torch.promote_types(source.dtype, torch.float32)
    index = None if index is None else checks.int64(index, name)
    args = (index, 1 if flat else width, width, *op_arguments(_checked(bags), dtype))
    shapes = [
        checks.sizes(shape, f"outputs[{k}]", 0) for k, shape in enumerate(checks.as_list(outputs, "outputs"))
    ]
    if any(len(shape) != 2 for shape in shapes):
        raise InputError("outputs must hold a shape (rows, columns) for each output")
    rows, columns = [r for r, _ in shapes], [c for _, c in shapes]
    wide = source.reshape(-1).to(dtype)
    if torch.is_grad_enabled() and wide.requires_grad:
        results = list(_PoolRows.apply(wide, args, rows, columns, name))
    else:
        results = _pool(wide, *args, rows, columns, name)
    return [r.to(source.dtype) for r in results]


def pool_flat(
    source: Tensor,
    index: Tensor,
    bags: Sequence[Bags],
    outputs: Sequence[tuple[int, int]],
    dim: int,
    whole: Sequence[bool] | None = None,
    stride: int = 1,
) -> list[Tensor]:
    """Compute `pool_rows` of a flat float32 buffer, without gradients and without torch.compile."""
    # source: float32 [m]; index: int64 [n], where the row of each occurrence begins, in units of `stride`.
    if source.is_cpu and native_module() is not None:
        return _pool_into(source, index, stride, dim, bags, outputs, "index", whole)
    rows, columns = [r for r, _ in outputs], [c for _, c in outputs]
    pooled: list[Tensor] = _pool(
        source, index, stride, dim, *op_arguments(bags, torch.float32), rows, columns, "index"
    )
    return pooled


def unpool_flat(
    grads: Sequence[Tensor], index: Tensor, bags: Sequence[Bags], size: int, dim: int, stride: int = 1
) -> Tensor:
    """Compute the gradient of `pool_flat`; sums run in the order of the occurrences."""
    # index: int64 [n], as for `pool_flat`; returns: float32 [size].
    if index.is_cpu and native_module() is not None:
        return _unpool_into(grads, index, stride, dim, bags, size, "index")
    summed: Tensor = _unpool(
        list(grads), index, stride, dim, *op_arguments(bags, torch.float32), size, "index"
    )
    return summed


def segment_sum(values: Tensor, row_splits: Tensor) -> Tensor:
    """Sum the rows of each segment. Differentiable.

    Args:
        values: float [n, d].
        row_splits: int64 [segments + 1], ascending from 0 to n.

    Returns:
        [segments, d].
    """
    values = checks.floats(values, "values", (None, None))
    row_splits = checks.splits(row_splits, "row_splits", values.shape[0])
    dim = values.shape[1]
    if dim == 0:
        return values.reshape(-1).view(row_splits.shape[0] - 1, 0)
    bags = Bags(row_splits, (OutputSlice(0, 0, 0, dim),))
    return pool_rows(values, None, [bags], [(row_splits.shape[0] - 1, dim)], name="values")[0]


def _checked(bags: Sequence[Bags]) -> list[Bags]:
    """Check the dtypes and shapes of the bags' tensors; the op checks their values."""
    for number, each in enumerate(checks.as_list(bags, "bags")):
        if not isinstance(each, Bags):
            raise InputError(f"bags[{number}] must be Bags, got {checks.kind(each)}")
        offsets = checks.integers(each.offsets, f"bags[{number}].offsets")
        if each.weights is not None:
            checks.floats(each.weights, f"bags[{number}].weights", (None,))
        if each.divisor is not None:
            checks.floats(each.divisor, f"bags[{number}].divisor", (offsets.shape[0] - 1,))
    return list(bags)


def op_arguments(bags: Sequence[Bags], dtype: torch.dtype) -> tuple[Any, ...]:
    weights = next((b.weights for b in bags if b.weights is not None), None)
    if any(b.weights is not None and b.weights is not weights for b in bags):
        raise InputError("weights: all features of a call must share one tensor, a weight per occurrence")
    if weights is not None and weights.requires_grad:
        raise UsageError("weights take no gradient here: multiply the rows instead")
    return (
        [b.offsets.to(torch.int64) for b in bags],
        [_divisor(b, dtype) for b in bags],
        [int(b.weights is not None) for b in bags],
        None if weights is None else weights.to(dtype),
        _parts_tensor(bags),
    )


def _divisor(bags: Bags, dtype: torch.dtype) -> Tensor:
    if bags.divisor is None:
        return torch.empty(0, dtype=dtype, device=bags.offsets.device)
    return bags.divisor.to(dtype)


def _parts_tensor(bags: Sequence[Bags]) -> Tensor:
    """int64 [parts, 9]: feature, output, column, start, end, inner, accumulate, step, shared."""
    rows = [
        [f, p.output, p.column, p.start, p.end, p.inner, int(p.accumulate), p.step, int(b.shared)]
        for f, b in enumerate(bags)
        for p in b.parts
    ]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 9)


def _bags(
    offsets: list[Tensor], divisors: list[Tensor], weighted: list[int], weights: Tensor | None, parts: Tensor
) -> list[Bags]:
    of: list[list[OutputSlice]] = [[] for _ in offsets]
    shared = [False] * len(offsets)
    for feature, output, column, start, end, inner, accumulate, step, is_shared in parts.tolist():
        of[feature].append(OutputSlice(output, column, start, end, inner, bool(accumulate), step))
        shared[feature] = bool(is_shared)
    return [
        Bags(o, tuple(p), weights if w else None, d if d.numel() else None, s)
        for o, p, w, d, s in zip(offsets, of, weighted, divisors, shared, strict=True)
    ]


def _pool_native(source: Tensor, index: Any, stride: int, dim: int, *plan: Any) -> list[Tensor]:
    *described, rows, columns, name = plan
    return _pool_into(
        source, index, stride, dim, _bags(*described), list(zip(rows, columns, strict=True)), name
    )


def _pool_into(
    source: Tensor,
    index: Tensor | None,
    stride: int,
    dim: int,
    bags: Sequence[Bags],
    shapes: Sequence[tuple[int, int]],
    name: str,
    whole: Sequence[bool] | None = None,
) -> list[Tensor]:
    native: Any = native_module()
    whole = covered(bags, shapes) if whole is None else whole
    outputs = [
        new_tensor(*shape, dtype=source.dtype, zero=not filled)
        for shape, filled in zip(shapes, whole, strict=True)
    ]
    index = None if index is None else index.contiguous()
    forms = [b.native for b in bags]
    native.pool(source.contiguous(), index, stride, dim, forms, outputs, name, torch.get_num_threads())
    return outputs


def _pool_reference(source: Tensor, index: Any, stride: int, dim: int, *plan: Any) -> list[Tensor]:
    *described, rows, columns, name = plan
    outputs = [source.new_zeros(r, c) for r, c in zip(rows, columns, strict=True)]
    bags = _bags(*described)
    index = _index_reference(source, index, stride, dim, name)
    _check_reference(bags, list(zip(rows, columns, strict=True)), index, source.shape[0], stride, dim, name)
    padded = torch.nn.functional.pad(source, (0, dim))  # the last rows of a flat buffer may be narrower
    pool(torch.where(index[:, None] >= 0, padded[_elements(index, stride, dim)], 0), bags, outputs)
    return outputs


def _unpool_native(grads: list[Tensor], index: Any, stride: int, dim: int, *plan: Any) -> Tensor:
    *described, size, name = plan
    return _unpool_into(grads, index, stride, dim, _bags(*described), size, name)


def _unpool_into(
    grads: Sequence[Tensor],
    index: Tensor | None,
    stride: int,
    dim: int,
    bags: Sequence[Bags],
    size: int,
    name: str,
) -> Tensor:
    native: Any = native_module()
    out = new_tensor(size, dtype=grads[0].dtype, zero=True)
    index = None if index is None else index.contiguous()
    forms = [b.native for b in bags]
    flat = [g.contiguous() for g in grads]
    native.unpool(out, index, stride, dim, forms, flat, name, torch.get_num_threads())
    return out


def _unpool_reference(grads: list[Tensor], index: Any, stride: int, dim: int, *plan: Any) -> Tensor:
    *described, size, name = plan
    bags = _bags(*described)
    out = grads[0].new_zeros(size + dim)
    index = _index_reference(out[:size], index, stride, dim, name)
    _check_reference(bags, [tuple(g.shape) for g in grads], index, size, stride, dim, name)
    result, reached = unpool(grads, bags, index.shape[0], dim)
    keep = (index >= 0) & reached
    if stride == dim and size % dim == 0:
        add_at(out.view(-1, dim), index[keep], result[keep])
    else:
        add_at(out, _elements(index[keep], stride, dim).flatten(), result[keep].flatten())
    return out[:size].clone()


def _index_reference(source: Tensor, index: Tensor | None, stride: int, dim: int, name: str) -> Tensor:
    """Check the index; without one, return the number of every row."""
    if index is None:
        return torch.arange(index_limit(source.shape[0], stride, dim), device=source.device)
    checks.index_range(index, -1, index_limit(source.shape[0], stride, 1), name)
    return index


def _elements(index: Tensor, stride: int, dim: int) -> Tensor:
    return (index.clamp(min=0) * stride)[:, None] + torch.arange(dim, device=index.device)


def _check_reference(
    bags: list[Bags], shapes: Any, index: Tensor, size: int, stride: int, dim: int, name: str
) -> None:
    """Raise InputError unless the bags match the occurrences and every row has the columns of its parts."""
    plain = tuple(Bags(b.offsets.cpu(), b.parts, shared=b.shared) for b in bags)
    Pooling(tuple(shapes), {name: plain}).check(name, index.shape[0], dim)
    for b in bags:
        own = slice(int(b.offsets[0]), int(b.offsets[-1]))
        reach = max((p.end for p in b.parts), default=0)
        checks.index_range(index[own], -1, index_limit(size, stride, reach), name)
        if b.weights is not None:
            weights = checks.floats(b.weights, "weights", (index.shape[0],))
            checks.require(torch.isfinite(weights[own]), "weights: NaN or Inf")
        if b.divisor is not None:
            checks.require(torch.isfinite(b.divisor), "divisor: NaN or Inf")
            checks.require(b.divisor != 0, "divisor: zero")


_PLAN = (
    "Tensor? index, SymInt stride, SymInt dim, Tensor[] offsets, Tensor[] divisors, int[] weighted,"
    " Tensor? weights, Tensor parts"
)
_pool = define_op(
    f"pool(Tensor source, {_PLAN}, SymInt[] rows, SymInt[] columns, str name) -> Tensor[]",
    native=_pool_native,
    reference=_pool_reference,
    fake=lambda source, *plan: [source.new_empty(r, c) for r, c in zip(plan[-3], plan[-2], strict=True)],
)
_unpool = define_op(
    f"unpool(Tensor[] grads, {_PLAN}, SymInt size, str name) -> Tensor",
    native=_unpool_native,
    reference=_unpool_reference,
    fake=lambda grads, *plan: grads[0].new_empty(plan[-2]),
)


class _PoolRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, args: Any, rows: Any, columns: Any, name: str) -> Any:
        ctx.args, ctx.size, ctx.name = args, source.shape[0], name
        return tuple(_pool(source, *args, rows, columns, name))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _unpool(list(grads), *ctx.args, ctx.size, ctx.name), None, None, None, None
