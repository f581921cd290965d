"""The table contract: what every engine does.

`Table(config, engine=...)` gives an engine's table. This file puts the checks of `checks` in front
of each call and composes calls of each other; an engine supplies the methods that begin with an
underscore and may assume that what reaches it is right. Nothing is written before everything is
checked.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from megalith.errors import InputError, UsageError
from megalith.ops.pooling import Pooling
from megalith.table.snapshot import Snapshot
from megalith.table.table_config import TableConfig
from megalith.table.table_data import MAX_CONSUMERS, MAX_TIME, Chunk, MemoryUse, Step, TableStats
from megalith.table.validation import Checks, plain

DEFAULT_CHUNK = 65536
SNAPSHOT_BYTES = 64 << 20


class Table(Checks):
    """A row for any 64-bit id, created when it is first trained.

    config: name, segments, optimizers. engine: "cpu" (native) or "reference" (plain torch). seed:
    with the table's name and an id it fixes that id's initial row.

    Many threads may call one table: reads run beside reads, a write is atomic for readers.
    """

    def __new__(cls, *_: Any, **options: Any) -> Table:
        """Picks the engine's class."""
        if cls is not Table:
            return super().__new__(cls)
        from megalith.table.engines.registry import engine_class

        return super().__new__(engine_class(options.get("engine", "cpu")))

    def __init__(self, config: TableConfig, *, engine: str = "cpu", seed: int = 0) -> None:
        if not isinstance(config, TableConfig):
            raise InputError(f"Table: config must be a TableConfig, got {config!r}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise InputError(f"table {config.name!r}: seed must be an integer, got {seed!r}")
        super().__init__(config)
        self.seed = seed
        self._consumers_lock = threading.Lock()

    # ---- the three primitives

    def find(self, ids: Tensor) -> Tensor:
        """Row numbers, int32 [n]; -1 where an id has no row. Good until `epoch` changes.

        ids: int64 or int32 [n].
        """
        return self._find(self.check_ids(ids))[0]

    def read(
        self,
        rows: Tensor,
        ids: Tensor,
        pooling: Pooling | None = None,
        *,
        epoch: int | None = None,
        out: Sequence[Tensor] | None = None,
    ) -> Any:
        """Weights of found rows: float32 [n, dim], or with `pooling` the list of its outputs.

        rows: int32 [n] from `find`. epoch: the table's epoch before that `find`. Rows of this epoch are
        trusted, of another one found again; without it each row is checked. out: outputs to fill, already
        zeroed where no bag reaches.
        """
        ids = self.check_ids(ids)
        rows = self._rows(rows, ids)
        if pooling is None:
            return self._read(rows, epoch, ids)
        outputs = pooling.new_outputs([self.name]) if out is None else list(out)
        self._check_outputs("out", outputs, pooling)
        self._pool(rows, epoch, ids, pooling, outputs)
        return outputs

    def update(
        self,
        rows: Tensor | None,
        ids: Tensor,
        grads: Tensor | Sequence[Tensor],
        pooling: Pooling | None = None,
        *,
        step: int,
        time: float | None = None,
        scale: float = 1.0,
        clip_norm: float | None = None,
        epoch: int | None = None,
    ) -> None:
        """One optimizer step per distinct id on its summed gradient; creates missing rows.

        grads: float32 [n, dim], or with `pooling` one gradient per output. rows, epoch: as in
        `read`; without rows they are found. step: learning rates are evaluated from it. time: seconds,
        becomes the rows' last-update time (None: now). scale: multiplies each summed gradient; clip_norm then
        shortens it to this L2 norm over the whole row.
        Raises InputError before anything is written if an argument is wrong or a gradient not finite;
        a sum of finite gradients that overflows is not caught.
        """
        ids = self.check_ids(ids)
        rows = None if rows is None else self._rows(rows, ids)
        checked = self.check_grads(ids, grads, pooling)
        checked_step = self.check_step(step, time, scale, clip_norm)
        self._update(rows, epoch, ids, checked, pooling, checked_step)

    def find_with_epoch(self, ids: Tensor) -> tuple[Tensor, int]:
        """`find`, and the epoch its row numbers belong to."""
        return self._find(self.check_ids(ids))

    def read_into(self, rows: Tensor, epoch: int, ids: Tensor, out: Tensor) -> None:
        """`read` without checks, into float32 [n, dim], for callers that have what `find_with_epoch` gave."""
        self._read(rows, epoch, ids, out)

    def update_checked(
        self,
        rows: Tensor | None,
        ids: Tensor,
        grads: list[Tensor],
        pooling: Pooling | None,
        step: Step,
        *,
        epoch: int | None,
    ) -> None:
        """`update` with what check_ids, check_grads and check_step gave, for callers of several tables."""
        self._update(rows, epoch, ids, grads, pooling, step)

    # ---- composed calls

    def lookup(self, ids: Tensor) -> Tensor:
        """Weights, float32 [n, dim]. Never inserts; a missing id reads as the config's `missing` says."""
        return self._read(None, None, self.check_ids(ids))

    def apply_gradients(self, ids: Tensor, grads: Tensor, *, step: int, time: float | None = None) -> None:
        """`update` without rows: duplicates are summed in input order, missing rows created."""
        self.update(None, ids, grads, step=step, time=time)

    def assign(self, ids: Tensor, rows: Tensor, *, time: float | None = None) -> None:
        """Sets weights, float32 [n, dim]; of duplicates the last stays.

        A new row gets fresh optimizer state, an existing one keeps its own.
        """
        self._write(ids, rows, add=False, time=time)

    def assign_add(self, ids: Tensor, rows: Tensor, *, time: float | None = None) -> None:
        """Adds to weights, float32 [n, dim], duplicates in order; a new row starts from its initial one."""
        self._write(ids, rows, add=True, time=time)

    def reinitialize(self, ids: Tensor, *, time: float | None = None) -> Tensor:
        """Puts rows back to their initial weights and state. int32 [n]: 0 created, 1 existed."""
        return self._reinitialize(self.check_ids(ids), self.check_time(time))

    def remove(self, ids: Tensor) -> int:
        """Forgets ids; returns how many had a row. Their memory is reused."""
        return self._remove(self.check_ids(ids))

    def evict(self, now: float | None = None) -> Tensor:
        """Removes what the config's eviction policies say and returns those ids (none without a policy)."""
        self.check_time(now)
        return torch.empty(0, dtype=torch.int64)

    def scan(self, chunk_size: int = DEFAULT_CHUNK) -> Iterator[Chunk]:
        """Walks all rows in chunks. Each chunk is consistent; rows that stay put come exactly once."""
        if chunk_size < 1:
            raise InputError(f"table {self.name!r}: chunk_size must be positive, got {chunk_size}")
        return self._scan(chunk_size)

    def restore(self, chunk: Chunk) -> None:
        """Writes whole rows back, optimizer state and time included; existing ids are replaced."""
        ids = self.check_ids(chunk.ids)
        n = ids.numel()
        self._check_matrix("rows", chunk.rows, n, self.dim)
        known = {column.key for column in self.config.state_columns}
        if set(chunk.state) != known:
            raise InputError(
                f"table {self.name!r}: chunk has state {sorted(chunk.state)}, expected {sorted(known)}"
            )
        columns = [plain(chunk.rows)]
        for column in self.config.state_columns:
            piece = chunk.state[column.key]
            self._check_matrix(f"state {column.key}", piece, n, column.end - column.start)
            columns.append(plain(piece))
        times = chunk.time
        if not isinstance(times, Tensor) or times.dtype != torch.int64 or tuple(times.shape) != (n,):
            raise InputError(f"table {self.name!r}: time must be int64 [{n}]")
        self._check_place("time", times)
        if n and not 0 <= int(times.min()) <= int(times.max()) <= MAX_TIME:
            raise InputError(f"table {self.name!r}: time must be between 0 and {MAX_TIME}")
        self._restore(ids, columns, times.contiguous())

    def snapshot(
        self, *, consumer: str | None = None, touched_only: bool = False, buffer_bytes: int = SNAPSHOT_BYTES
    ) -> Snapshot:
        """The table as it is now, to be read while others go on writing. One at a time.

        consumer: drains its touched rows; with touched_only the snapshot holds just those. buffer_bytes: of
        rows set aside because they change before they were read; when it is full, writers wait.
        """
        row_bytes = 4 * self.config.row_floats + 12
        room = max(1, buffer_bytes // row_bytes)
        with self._consumers_lock:
            if touched_only and consumer is None:
                raise InputError(f"table {self.name!r}: a snapshot of touched rows needs a consumer")
            number = -1 if consumer is None else self.check_consumer(consumer)
            return Snapshot(self, *self._begin_snapshot(number, touched_only, room))

    def _write(self, ids: Tensor, rows: Tensor, *, add: bool, time: float | None) -> None:
        ids = self.check_ids(ids)
        self.check_rows(ids, rows)
        self._assign(ids, plain(rows), add, self.check_time(time))

    def new_chunk(self, n: int) -> Chunk:
        """A chunk of n rows in this table's shape, not filled."""
        return Chunk(
            torch.empty(n, dtype=torch.int64),
            torch.empty(n, self.dim),
            {c.key: torch.empty(n, c.end - c.start) for c in self.config.state_columns},
            torch.empty(n, dtype=torch.int64),
        )

    # ---- touched rows

    def track(self, consumer: str) -> None:
        """Starts remembering, for this consumer, which rows change. Again is no error."""
        if not isinstance(consumer, str) or not consumer:
            raise InputError(f"table {self.name!r}: a consumer needs a name, got {consumer!r}")
        with self._consumers_lock:
            if consumer in self._consumers:
                return
            number = self._consumers.index(None) if None in self._consumers else len(self._consumers)
            if number == MAX_CONSUMERS:
                raise UsageError(
                    f"table {self.name!r} already has {MAX_CONSUMERS} consumers: "
                    f"{', '.join(map(str, self._consumers))}; untrack one first"
                )
            self._track(number)
            self._consumers[number : number + 1] = [consumer]

    def untrack(self, consumer: str) -> None:
        """Forgets a consumer and what it has not drained."""
        with self._consumers_lock:
            number = self.check_consumer(consumer)
            self._untrack(number)
            self._consumers[number] = None

    def drain_touched(self, consumer: str) -> tuple[Tensor, Tensor]:
        """Ids written and ids removed since this consumer's last drain, int64 each, and forgets them."""
        with self._consumers_lock:
            return self._drain(self.check_consumer(consumer))

    def mark_touched(self, consumer: str, ids: Tensor) -> None:
        """Gives ids back to a consumer, for instance after a failed send.

        An id that has no row any more counts as removed.
        """
        ids = self.check_ids(ids)
        with self._consumers_lock:
            self._mark(self.check_consumer(consumer), ids)

    # ---- looking at the table

    def __contains__(self, id: object) -> bool:
        try:
            id = operator.index(id)  # type: ignore[arg-type]
        except TypeError:
            return False
        if not -(2**63) <= id < 2**63:
            return False
        return bool((self.find(torch.tensor([id], dtype=torch.int64)) >= 0).item())

    @property
    def epoch(self) -> int:
        """Changes when row numbers may have lost their meaning: remove, evict, restore, clear."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def stats(self) -> TableStats:
        """Numbers about the table."""
        raise NotImplementedError

    def memory(self) -> MemoryUse:
        """Bytes in use."""
        raise NotImplementedError

    def clear(self) -> None:
        """Removes every row and gives the memory back."""
        raise NotImplementedError

    def reserve(self, n: int) -> None:
        """Makes room for n rows, so that no growth happens on the way there."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"Table({self.config!r}, engine={self.engine!r}, rows={len(self)})"

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            f"table {self.name!r} cannot be copied or pickled: use scan() and restore(), or pass ids and rows"
        )

    # ---- what an engine supplies; arguments are checked, ids int64 [n], contiguous

    def _find(self, ids: Tensor) -> tuple[Tensor, int]:
        """Rows and the epoch they belong to."""
        raise NotImplementedError

    def _read(self, rows: Tensor | None, epoch: int | None, ids: Tensor, out: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def _pool(
        self,
        rows: Tensor | None,
        epoch: int | None,
        ids: Tensor,
        pooling: Pooling,
        outputs: list[Tensor],
    ) -> None:
        raise NotImplementedError

    def _update(
        self,
        rows: Tensor | None,
        epoch: int | None,
        ids: Tensor,
        grads: list[Tensor],
        pooling: Pooling | None,
        step: Step,
    ) -> None:
        raise NotImplementedError

    def _assign(self, ids: Tensor, rows: Tensor, add: bool, time: int) -> None:
        raise NotImplementedError

    def _reinitialize(self, ids: Tensor, time: int) -> Tensor:
        raise NotImplementedError

    def _remove(self, ids: Tensor) -> int:
        raise NotImplementedError

    def _restore(self, ids: Tensor, columns: list[Tensor], times: Tensor) -> None:
        """columns: weights, then the config's state columns."""
        raise NotImplementedError

    def _begin_snapshot(self, consumer: int, touched_only: bool, room: int) -> tuple[int, int, Tensor]:
        """Rows it holds, rows of the whole table, and ids removed. consumer: -1 for none. room: rows that may
        be set aside."""
        raise NotImplementedError

    def _read_snapshot(self, chunk: Chunk) -> int:
        raise NotImplementedError

    def _snapshot_pressure(self) -> float:
        """How full the room for rows set aside is, 0 to 1."""
        raise NotImplementedError

    def _end_snapshot(self, give_back: bool) -> float:
        """Seconds that writers waited."""
        raise NotImplementedError

    def _scan(self, chunk_size: int) -> Iterator[Chunk]:
        raise NotImplementedError

    def _track(self, consumer: int) -> None:
        raise NotImplementedError

    def _untrack(self, consumer: int) -> None:
        raise NotImplementedError

    def _drain(self, consumer: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _mark(self, consumer: int, ids: Tensor) -> None:
        raise NotImplementedError
