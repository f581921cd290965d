"""The cpu engine: the contract over the native module.

Every call passes tensors as they are and `torch.get_num_threads()` as the number of threads;
results do not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megalith.errors import InputError, NativeMissingError
from megalith.ops.pooling import Pooling
from megalith.table.initializers import table_key
from megalith.table.table import Table
from megalith.table.table_config import TableConfig
from megalith.table.table_data import MAX_CONSUMERS, Chunk, MemoryUse, Step, TableStats

try:
    from megalith import _native
except ImportError as error:
    raise NativeMissingError(
        "the cpu engine needs megalith's native module, which is not built here: run "
        "`pip install .` in a checkout (a C++17 compiler is enough), install a wheel, "
        'or use engine="reference"'
    ) from error


def set_huge_pages(on: bool) -> None:
    """Whether tables ask for 2 MiB pages from now on (the default).

    They make random access 1.5 to 3 times faster in large tables; on some virtual machines
    the first write of each page is slower.
    """
    _native.set_huge_pages(on)


class CpuTable(Table):
    """A table in native memory. See `Table`."""

    engine = "cpu"

    def __init__(
        self,
        config: TableConfig,
        *,
        engine: str = "cpu",
        seed: int = 0,
        kernels: str = "",
        max_rows: int = _native.MAX_ROWS,
    ) -> None:
        super().__init__(config, engine=engine, seed=seed)
        segments = [
            (
                segment.dim,
                segment.optimizer.name,
                list(segment.optimizer.hyper),
                segment.initializer.kind,
                *segment.initializer.params,
            )
            for segment in config.segments
        ]
        self._native = _native.Table(
            config.name,
            segments,
            key=table_key(seed, config.name),
            missing_zeros=config.missing == "zeros",
            max_rows=max_rows,
            kernels=kernels,
        )
        assert self._native.row_floats == config.row_floats
        assert _native.MAX_CONSUMERS == MAX_CONSUMERS

    @property
    def epoch(self) -> int:
        """See `Table.epoch`."""
        return self._native.epoch

    def __len__(self) -> int:
        return len(self._native)

    def stats(self) -> TableStats:
        """Numbers about the table."""
        rows, capacity, epoch, growing = self._native.shape()
        consumers = tuple(c for c in self._consumers if c is not None)
        return TableStats(self.name, self.engine, rows, capacity, growing, epoch, consumers)

    def memory(self) -> MemoryUse:
        """Bytes in use."""
        return MemoryUse(*self._native.memory())

    def clear(self) -> None:
        """Removes every row and gives the memory back."""
        self._native.clear()

    def reserve(self, n: int) -> None:
        """Makes room for n rows."""
        self._native.reserve(self.check_room(n))

    def _find(self, ids: Tensor) -> tuple[Tensor, int]:
        rows = torch.empty(ids.numel(), dtype=torch.int32)
        epoch = self._native.find(ids, rows, torch.get_num_threads())
        return rows, epoch

    def _read(self, rows: Tensor | None, epoch: int | None, ids: Tensor, out: Tensor | None = None) -> Tensor:
        out = torch.empty(ids.numel(), self.dim) if out is None else out
        self._native.read(rows, _epoch(epoch), ids, out, torch.get_num_threads())
        return out

    def _pool(
        self,
        rows: Tensor | None,
        epoch: int | None,
        ids: Tensor,
        pooling: Pooling,
        outputs: list[Tensor],
    ) -> None:
        bags = self._bags(pooling)
        with self._named():
            self._native.pool(rows, _epoch(epoch), ids, bags, outputs, torch.get_num_threads())

    def _update(
        self,
        rows: Tensor | None,
        epoch: int | None,
        ids: Tensor,
        grads: list[Tensor],
        pooling: Pooling | None,
        step: Step,
    ) -> None:
        bags = None if pooling is None else self._bags(pooling)
        gradients = grads[0] if pooling is None else grads
        threads = torch.get_num_threads()
        with self._named():
            self._native.update(rows, _epoch(epoch), ids, gradients, bags, *step, threads)

    def _assign(self, ids: Tensor, rows: Tensor, add: bool, time: int) -> None:
        self._native.assign(ids, rows, add, time, torch.get_num_threads())

    def _reinitialize(self, ids: Tensor, time: int) -> Tensor:
        status = torch.empty(ids.numel(), dtype=torch.int32)
        self._native.reinitialize(ids, time, status, torch.get_num_threads())
        return status

    def _remove(self, ids: Tensor) -> int:
        return self._native.remove(ids)

    def _restore(self, ids: Tensor, columns: list[Tensor], times: Tensor) -> None:
        self._native.restore(ids, columns, times, torch.get_num_threads())

    def _scan(self, chunk_size: int) -> Iterator[Chunk]:
        at = 0
        while at >= 0:
            chunk = self.new_chunk(min(chunk_size, max(1, len(self))))
            n, at = self._native.scan(at, chunk.ids, chunk.columns(), chunk.time)
            if n:
                yield chunk.part(0, n)

    def _begin_snapshot(self, consumer: int, touched_only: bool, room: int) -> tuple[int, int, Tensor]:
        rows, live, removed = self._native.begin_snapshot(consumer, touched_only, room)
        return rows, live, _ids_from(removed)

    def _read_snapshot(self, chunk: Chunk) -> int:
        return self._native.read_snapshot(chunk.ids, chunk.columns(), chunk.time)

    def _snapshot_pressure(self) -> float:
        return self._native.snapshot_pressure()

    def _end_snapshot(self, give_back: bool) -> float:
        return self._native.end_snapshot(give_back)

    def _track(self, consumer: int) -> None:
        self._native.track(consumer)

    def _untrack(self, consumer: int) -> None:
        self._native.untrack(consumer)

    def _drain(self, consumer: int) -> tuple[Tensor, Tensor]:
        updated, removed = self._native.drain(consumer)
        return _ids_from(updated), _ids_from(removed)

    def _mark(self, consumer: int, ids: Tensor) -> None:
        self._native.mark(consumer, ids)

    def _all_finite(self, tensor: Tensor) -> bool:
        return _native.all_finite(tensor, torch.get_num_threads())

    def _bags(self, pooling: Pooling) -> list[tuple[object, ...]]:
        return [bags.native for bags in pooling.of(self.name)]

    def _named(self) -> _Named:
        return _Named(self.name)


class _Named:
    """Puts the table's name before what the native module says about a pooling."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind in (InputError, ValueError, TypeError):
            raise InputError(f"table {self.name!r}: {error}") from None


def _epoch(epoch: int | None) -> int:
    return _native.UNKNOWN_EPOCH if epoch is None else epoch


def _ids_from(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(bytearray(data), dtype=torch.int64)
