"""Validation of the input of table calls.

Each check returns its argument in the form that engines take, or raises an error that names the table and the
argument. `Table` and the shards validate with these checks before they call an engine, so that nothing is
written unless the whole input of a call is valid.
"""

from __future__ import annotations

import time as clock
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megalith.bits import show_id_dtype
from megalith.errors import InputError, UnknownNameError, UsageError
from megalith.library import native_module
from megalith.ops.checks import as_integer, as_number
from megalith.ops.pooling import Pooling
from megalith.table.config import TableConfig
from megalith.table.optimizers import Optimizer
from megalith.table.schedules import FLOAT32_MAX
from megalith.table.table_data import MAX_TIME, Chunk, Step, Update

_NATIVE = native_module()


def check_table_name(table: str, known: Collection[str]) -> None:
    """Raise unless a table is known."""
    if not isinstance(table, str) or table not in known:
        names = ", ".join(map(repr, known)) or "none"
        raise UnknownNameError(f"unknown table {table!r} (known: {names})")


def check_by_table(value: Any, field: str, example: str) -> None:
    """Raise unless an argument maps table names to something."""
    if not isinstance(value, Mapping):
        raise InputError(f"{field} must map table names, such as {example}, got {type(value).__name__}")


def check_flag(value: Any, field: str) -> None:
    """Raise unless an argument is True or False."""
    if not isinstance(value, bool):
        raise InputError(f"{field} must be True or False, got {type(value).__name__}")


def are_plain_ids(tensors: Iterable[Any], device: torch.device) -> bool:
    """Return whether ids need no conversion; faster than `InputChecks.ids` for each table."""
    # returns: true if all of them are contiguous int64 [n] on that device.
    if device.type == "cpu":
        return _NATIVE is not None and bool(_NATIVE.are_ids(list(tensors)))
    for ids in tensors:
        if type(ids) is not Tensor or ids.dtype is not torch.int64 or ids.layout is not torch.strided:
            return False
        if ids.device != device or ids.dim() != 1 or not ids.is_contiguous():
            return False
    return True


def check_step(step: Any, where: str) -> int:
    """Check a global step."""
    at = as_integer(step)
    if at is None or not 0 <= at < 2**63:
        raise InputError(f"{where}: step must be an integer >= 0, got {step!r}")
    return at


def check_time(time: Any, where: str) -> int:
    """Check a time in seconds."""
    seconds = as_number(time)
    if seconds is None or not 0 <= seconds <= MAX_TIME:
        raise InputError(f"{where}: time must be seconds between 0 and {MAX_TIME}, got {time!r}")
    return int(seconds)


def check_numbers(where: str, step: Any, time: Any, scale: Any, clip_norm: Any) -> Update:
    """Check the numbers of an update."""
    at = check_step(step, where)
    factor = as_number(scale)
    if factor is None or not abs(factor) <= FLOAT32_MAX:
        raise InputError(f"{where}: scale must be finite, got {scale!r}")
    norm = 0.0 if clip_norm is None else as_number(clip_norm)
    if norm is None or not (clip_norm is None or 0 < norm <= FLOAT32_MAX):
        raise InputError(f"{where}: clip_norm must be positive and finite, got {clip_norm!r}")
    return Update(at, None if time is None else check_time(time, where), factor, norm)


def check_start(start: Any, where: str) -> None:
    """Check where a part of an eviction begins."""
    good = isinstance(start, int | float) and not isinstance(start, bool) and 0 <= start <= 1
    if start is not None and not good:
        raise InputError(f"{where}: start must be a number from 0 to 1, got {start!r}")


def check_pooling(pooling: Any) -> None:
    """Raise unless an argument is a Pooling. Engines and `Pooling.check` check its content."""
    if not isinstance(pooling, Pooling):
        raise InputError(f"pooling must be a Pooling, got {type(pooling).__name__}")


class InputChecks:
    """The checks of one table. They need only its config, so they also run in a data worker."""

    def __init__(self, config: TableConfig, device: torch.device | None = None) -> None:
        self.config = config
        self.name = config.name
        self.dim = config.dim
        self.device = torch.device("cpu") if device is None else device
        optimizers = [segment.optimizer for segment in config.segments]
        constant = all(type(o.lr) is float and type(o).rate is Optimizer.rate for o in optimizers)
        self.constant_rates = [float(o.rate(0)) for o in optimizers] if constant else None

    def ids(self, ids: Tensor, *, move: bool = True) -> Tensor:
        """Check ids."""
        # ids: int64 or int32 [n]; returns: the ids as a contiguous int64 [n] tensor.
        if not isinstance(ids, Tensor):
            raise InputError(f"table {self.name!r}: ids must be a tensor, got {type(ids).__name__}")
        if ids.dtype not in (torch.int64, torch.int32):
            kind = show_id_dtype(ids.dtype)
            raise InputError(f"table {self.name!r}: ids must be int64 or int32, got {kind}")
        if ids.dim() != 1:
            raise InputError(f"table {self.name!r}: ids must have shape [n], got {list(ids.shape)}")
        self.storage("ids", ids)
        ids = ids.contiguous() if ids.dtype == torch.int64 else ids.to(torch.int64).contiguous()
        return self._moved(ids) if move else ids

    def found(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Check row numbers that `Table.find` returned."""
        # ids: int64 [n], the ids that were found; rows: int32 [n].
        if not isinstance(rows, Tensor) or rows.dtype != torch.int32 or rows.shape != ids.shape:
            raise InputError(f"table {self.name!r}: rows must be int32 [{ids.numel()}], from find()")
        self.storage("rows", rows)
        return self._moved(rows.contiguous())

    def rows(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Check weights to assign or to add."""
        # ids: int64 [n]; rows: float32 [n, dim].
        checked = self._matrix("rows", rows, ids.numel(), self.dim)
        if not _all_finite(checked):
            raise InputError(f"table {self.name!r}: rows hold NaN or Inf")
        return self._moved(checked)

    def ids_and_rows(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Check what an assign over several tables passes for this table."""
        # pair: ids int64 or int32 [n] and rows float32 [n, dim]; returns: the ids as int64 [n] and the rows,
        # both contiguous.
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InputError(
                f"table {self.name!r}: assign takes a pair (ids, rows) per table, got {type(pair).__name__}"
            )
        ids = self.ids(pair[0])
        return ids, self.rows(ids, pair[1])

    def outputs(self, tensors: Sequence[Tensor], pooling: Pooling) -> list[Tensor]:
        """Check tensors that a pooling is to fill."""
        if not isinstance(tensors, list | tuple):
            raise InputError(f"table {self.name!r}: out must be a list of tensors, one per output")
        self._matrices("out", tensors, pooling)
        if not all(tensor.is_contiguous() and tensor.device == self.device for tensor in tensors):
            raise InputError(f"table {self.name!r}: out must be contiguous and on {self.device}")
        return list(tensors)

    def grads(self, ids: Tensor, grads: Tensor | Sequence[Tensor], pooling: Pooling | None) -> list[Tensor]:
        """Check gradients."""
        # ids: int64 [n]; grads: float32 [n, dim], or with `pooling` a list of one gradient per output.
        if pooling is None:
            if not isinstance(grads, Tensor):
                raise InputError(f"table {self.name!r}: grads must be a tensor without pooling")
            checked = [self._matrix("grads", grads, ids.numel(), self.dim, strided=True)]
        else:
            check_pooling(pooling)
            if not isinstance(grads, list | tuple):
                raise InputError(f"table {self.name!r}: with pooling, grads must be a list, one per output")
            checked = self._matrices("grads", grads, pooling, strided=True)
        self.finite(checked, pooling is not None)
        return [self._moved(grad) for grad in checked]

    def finite(self, grads: Sequence[Tensor], pooled: bool) -> None:
        """Raise InputError if a gradient is not finite. On a GPU the kernels skip and count such rows."""
        for number, grad in enumerate(grads):
            if grad.is_cpu and not _all_finite(grad):
                field = f"grads of output {number}" if pooled else "grads"
                raise InputError(f"table {self.name!r}: {field} hold NaN or Inf")

    def epoch(self, epoch: int | None) -> int | None:
        """Check an epoch that the caller remembered."""
        if epoch is not None and (isinstance(epoch, bool) or not isinstance(epoch, int)):
            raise InputError(
                f"table {self.name!r}: epoch must be an integer, from Table.epoch, got {epoch!r}"
            )
        return epoch

    def step(self, step: int, time: float | None, scale: float, clip_norm: float | None) -> Step:
        """Check the numbers of an update and evaluate the learning rates."""
        self.trainable()
        at, seconds, factor, norm, *_ = check_numbers(f"table {self.name!r}", step, time, scale, clip_norm)
        return Step(self.rates(at), self.time(seconds), factor, norm, at)

    def trainable(self) -> None:
        """Raise UsageError if the table is not trainable."""
        if not self.config.trainable:
            raise UsageError(f"table {self.name!r} is not trainable (TableConfig(trainable=False))")

    def rates(self, step: int) -> list[float]:
        """Return the learning rate of each segment."""
        if self.constant_rates is not None:
            return list(self.constant_rates)
        rates = []
        for number, segment in enumerate(self.config.segments):
            try:
                rates.append(segment.optimizer.rate(step))
            except InputError as error:
                raise InputError(f"table {self.name!r}, segment {number}: {error}") from error.__cause__
        return rates

    def time(self, time: float | None) -> int:
        """Check a time; None: now."""
        return int(clock.time()) if time is None else check_time(time, f"table {self.name!r}")

    def row_count(self, n: int, call: str = "reserve") -> int:
        """Check a number of rows to reserve or allocate."""
        if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < 2**31:
            raise InputError(f"table {self.name!r}: {call} takes 0 to 2^31 - 1 rows, got {n!r}")
        return n

    def chunk(self, chunk: Chunk) -> Chunk:
        """Check a chunk of complete rows."""
        if not isinstance(chunk, Chunk):
            raise InputError(
                f"table {self.name!r}: restore takes a Chunk, as scan() yields it, got {type(chunk).__name__}"
            )
        if not isinstance(chunk.state, Mapping):
            raise InputError(f"table {self.name!r}: the state of a chunk must be a dict of tensors")
        ids = self.ids(chunk.ids, move=False).cpu()
        n = ids.numel()
        rows = self._matrix("rows", chunk.rows, n, self.dim).cpu()  # as stored: may hold an overflow
        known = {column.key for column in self.config.state_columns}
        if set(chunk.state) != known:
            given = sorted(map(str, chunk.state))
            raise InputError(f"table {self.name!r}: chunk has state {given}, expected {sorted(known)}")
        state = {
            column.key: self._matrix(
                f"state {column.key}", chunk.state[column.key], n, column.end - column.start
            ).cpu()
            for column in self.config.state_columns
        }
        times = self._small_integers("time", chunk.time, n).cpu()
        counts = steps = None
        if self.config.counted:
            once, first = (
                torch.ones(n, dtype=torch.int64, device="cpu"),
                torch.zeros(n, dtype=torch.int64, device="cpu"),
            )
            counts = once if chunk.count is None else self._small_integers("count", chunk.count, n).cpu()
            steps = first if chunk.step is None else self._small_integers("step", chunk.step, n).cpu()
        return Chunk(ids, rows, state, times, counts, steps)

    def occurrences(self, ids: Tensor, counts: Tensor) -> Tensor:
        """Check how often ids occurred."""
        # ids: int64 [n]; counts: int64 [n], positive.
        counts = self._small_integers("counts", counts, ids.numel())
        if counts.numel() and int(counts.min()) < 1:
            raise InputError(f"table {self.name!r}: counts must be positive, got {int(counts.min())}")
        return counts

    def flags(self, flags: Tensor, n: int, policy: str) -> Tensor:
        """Check which rows an eviction policy finds expired."""
        # flags: bool [n].
        if not isinstance(flags, Tensor) or flags.dtype != torch.bool or tuple(flags.shape) != (n,):
            raise InputError(f"table {self.name!r}: policy {policy!r} must return bool [{n}] from expired()")
        return flags

    def _small_integers(self, field: str, values: Tensor, n: int) -> Tensor:
        if not isinstance(values, Tensor) or values.dtype != torch.int64 or tuple(values.shape) != (n,):
            raise InputError(f"table {self.name!r}: {field} must be int64 [{n}]")
        self.storage(field, values)
        low, high = torch.aminmax(values) if n else (0, 0)
        if not 0 <= int(low) <= int(high) <= MAX_TIME:
            raise InputError(f"table {self.name!r}: {field} must be between 0 and {MAX_TIME}")
        return values.contiguous()

    def storage(self, field: str, tensor: Tensor) -> None:
        """Raise InputError unless a tensor is dense, on the CPU or on the device of the table."""
        if tensor.layout is not torch.strided:
            raise InputError(f"table {self.name!r}: {field} must be dense, got {tensor.layout}")
        if not tensor.is_cpu and tensor.device != self.device:
            place = "the CPU" if self.device.type == "cpu" else f"the CPU or {self.device}"
            raise InputError(f"table {self.name!r}: {field} must be on {place}, got {tensor.device}")

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device == self.device else tensor.to(self.device, non_blocking=True)

    def _matrix(self, field: str, tensor: Tensor, rows: int, columns: int, strided: bool = False) -> Tensor:
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InputError(f"table {self.name!r}: {field} must be a float32 tensor, got {kind}")
        if tuple(tensor.shape) != (rows, columns):
            raise InputError(
                f"table {self.name!r}: {field} must have shape [{rows}, {columns}], got {list(tensor.shape)}"
            )
        self.storage(field, tensor)
        return contiguous_rows(tensor) if strided else plain(tensor)

    def _matrices(
        self, field: str, tensors: Sequence[Tensor], pooling: Pooling, strided: bool = False
    ) -> list[Tensor]:
        if len(tensors) != len(pooling.outputs):
            raise InputError(
                f"table {self.name!r}: {field} must hold {len(pooling.outputs)} tensors, "
                f"one per output, got {len(tensors)}"
            )
        pairs = zip(tensors, pooling.outputs, strict=True)
        return [
            self._matrix(f"{field}[{k}]", tensor, *shape, strided) for k, (tensor, shape) in enumerate(pairs)
        ]


def plain(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor as native code reads them."""
    return tensor.detach().resolve_neg().contiguous()


def contiguous_rows(tensor: Tensor) -> Tensor:
    """Return the numbers of a matrix as native code reads gradients."""
    if tensor.requires_grad or tensor.is_neg():
        tensor = tensor.detach().resolve_neg()
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _all_finite(tensor: Tensor) -> bool:
    if _NATIVE is None or not tensor.is_cpu:
        return bool(torch.isfinite(tensor).all())
    return bool(_NATIVE.all_finite(tensor, torch.get_num_threads()))
