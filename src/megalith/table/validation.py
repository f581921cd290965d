"""The checks in front of every table call.

Each returns its argument in the form engines take, or raises an error that names the table and
the argument. Shards use them too, to check all tables of a call before the first is written.
"""

from __future__ import annotations

import time as clock
from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.errors import InputError, UnknownNameError, UsageError
from megalith.ops.pooling import Pooling
from megalith.table.schedules import FLOAT32_MAX
from megalith.table.table_config import TableConfig
from megalith.table.table_data import MAX_TIME, Step


class Checks:
    """A table's name, shape and consumers, and the checks that need no more than these."""

    engine: str

    def __init__(self, config: TableConfig) -> None:
        self.config = config
        self.name = config.name
        self.dim = config.dim
        self._consumers: list[str | None] = []

    def check_ids(self, ids: Tensor) -> Tensor:
        """Ids as a contiguous int64 [n] tensor on the CPU, or InputError."""
        if not isinstance(ids, Tensor):
            raise InputError(f"table {self.name!r}: ids must be a tensor, got {type(ids).__name__}")
        if ids.dtype not in (torch.int64, torch.int32):
            raise InputError(f"table {self.name!r}: ids must be int64 or int32, got {ids.dtype}")
        if ids.dim() != 1:
            raise InputError(f"table {self.name!r}: ids must have shape [n], got {list(ids.shape)}")
        self._check_place("ids", ids)
        return ids.contiguous() if ids.dtype == torch.int64 else ids.to(torch.int64).contiguous()

    def check_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Raises InputError unless `rows` is float32 [n, dim] for n ids."""
        self._check_matrix("rows", rows, ids.numel(), self.dim)

    def check_room(self, n: int) -> int:
        """A number of rows to reserve, or InputError."""
        if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < 2**31:
            raise InputError(f"table {self.name!r}: reserve takes 0 to 2^31 - 1 rows, got {n!r}")
        return n

    def check_time(self, time: float | None) -> int:
        """Whole seconds between 0 and 2^32 - 1; None is now."""
        if time is None:
            return int(clock.time())
        good = isinstance(time, int | float) and 0 <= time <= MAX_TIME
        if not good:
            raise InputError(
                f"table {self.name!r}: time must be seconds between 0 and {MAX_TIME}, got {time!r}"
            )
        return int(time)

    def check_grads(
        self, ids: Tensor, grads: Tensor | Sequence[Tensor], pooling: Pooling | None
    ) -> list[Tensor]:
        """Gradients as contiguous float32 tensors of the right shapes, all finite, or InputError."""
        if pooling is None:
            if not isinstance(grads, Tensor):
                raise InputError(f"table {self.name!r}: grads must be a tensor without pooling")
            self._check_matrix("grads", grads, ids.numel(), self.dim)
            checked = [plain(grads)]
        else:
            if not isinstance(grads, list | tuple):
                raise InputError(f"table {self.name!r}: with pooling, give grads as a list, one per output")
            self._check_outputs("grads", grads, pooling)
            checked = [plain(g) for g in grads]
        for number, grad in enumerate(checked):
            if not self._all_finite(grad):
                field = "grads" if pooling is None else f"grads of output {number}"
                raise InputError(f"table {self.name!r}: {field} hold NaN or Inf")
        return checked

    def check_step(self, step: int, time: float | None, scale: float, clip_norm: float | None = None) -> Step:
        """What an update at this step needs besides gradients, or an error that says what is wrong."""
        if not self.config.trainable:
            raise UsageError(f"table {self.name!r} is not trainable (TableConfig(trainable=False))")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise InputError(f"table {self.name!r}: step must be a whole number >= 0, got {step!r}")
        if not (isinstance(scale, int | float) and abs(scale) <= FLOAT32_MAX):
            raise InputError(f"table {self.name!r}: scale must be finite, got {scale!r}")
        if clip_norm is not None and not (
            isinstance(clip_norm, int | float) and 0 < clip_norm <= FLOAT32_MAX
        ):
            raise InputError(f"table {self.name!r}: clip_norm must be positive and finite, got {clip_norm!r}")
        try:
            rates = [segment.optimizer.rate(step) for segment in self.config.segments]
        except InputError as error:
            raise InputError(f"table {self.name!r}: {error}") from None
        return Step(rates, self.check_time(time), float(scale), float(clip_norm or 0.0))

    def _rows(self, rows: Tensor, ids: Tensor) -> Tensor:
        if not isinstance(rows, Tensor) or rows.dtype != torch.int32 or rows.shape != ids.shape:
            raise InputError(f"table {self.name!r}: rows must be int32 [{ids.numel()}], from find()")
        self._check_place("rows", rows)
        return rows.contiguous()

    def _check_place(self, field: str, tensor: Tensor) -> None:
        if tensor.is_cpu and tensor.layout is torch.strided:
            return
        if tensor.layout != torch.strided:
            raise InputError(f"table {self.name!r}: {field} must be dense, got {tensor.layout}")
        raise InputError(
            f"table {self.name!r}: {field} are on {tensor.device}, the {self.engine} engine "
            "needs them on the CPU"
        )

    def _check_matrix(self, field: str, tensor: Tensor, rows: int, columns: int) -> None:
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InputError(f"table {self.name!r}: {field} must be a float32 tensor, got {kind}")
        if tuple(tensor.shape) != (rows, columns):
            raise InputError(
                f"table {self.name!r}: {field} must have shape [{rows}, {columns}], got {list(tensor.shape)}"
            )
        self._check_place(field, tensor)

    def _check_outputs(self, field: str, tensors: Sequence[Tensor], pooling: Pooling) -> None:
        if len(tensors) != len(pooling.outputs):
            raise InputError(
                f"table {self.name!r}: {field} must hold {len(pooling.outputs)} tensors, "
                f"one per output, got {len(tensors)}"
            )
        for number, (tensor, shape) in enumerate(zip(tensors, pooling.outputs, strict=True)):
            self._check_matrix(f"{field}[{number}]", tensor, *shape)
        if field == "out" and not all(t.is_contiguous() for t in tensors):
            raise InputError(f"table {self.name!r}: out must be contiguous")

    def check_consumer(self, consumer: str) -> int:
        """A consumer's number, or UnknownNameError naming the known ones."""
        if consumer not in self._consumers:
            known = ", ".join(repr(c) for c in self._consumers if c is not None) or "none"
            raise UnknownNameError(
                f"table {self.name!r} has no consumer {consumer!r} (known: {known}); call track() first"
            )
        return self._consumers.index(consumer)

    def _all_finite(self, tensor: Tensor) -> bool:
        return bool(torch.isfinite(tensor).all())


def plain(tensor: Tensor) -> Tensor:
    """The same numbers without history or lazy negation, contiguous."""
    return tensor.detach().resolve_neg().contiguous()
