"""The Engine contract: storage and kernels of one table.

An engine receives validated input only (`megalith.table.validation`): ids are int64 [n], matrices are
float32, all contiguous and on the engine's device. The one exception is a `Pooling`: an engine validates the
part of its own table in the call that uses it, before it writes anything, because its kernel reads the
offsets anyway.

Every method may be called from several threads. Reads run in parallel; a write is atomic for readers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from megalith.ops.pooling import Pooling
from megalith.table.table_config import TableConfig
from megalith.table.table_data import Chunk, FoundRows, MemoryUse, Step


class Engine(ABC):
    """Storage and kernels of one table.

    Args:
        config: The config of the table.
        seed: Together with the table's name and an id it determines the initial row of that id.
    """

    engine: ClassVar[str]
    """The name of the engine, such as "cpu"."""

    def __init__(self, config: TableConfig, *, seed: int = 0) -> None:
        self.config = config
        self.name = config.name
        self.dim = config.dim
        self.seed = seed

    def new_chunk(self, n: int) -> Chunk:
        """Return an uninitialized chunk with the columns of this table.

        Args:
            n: Number of rows.

        Returns:
            The chunk: ids int64 [n], weights float32 [n, dim], a float32 [n, size] per state, times int64
            [n].
        """
        return Chunk(
            torch.empty(n, dtype=torch.int64),
            torch.empty(n, self.dim),
            {c.key: torch.empty(n, c.end - c.start) for c in self.config.state_columns},
            torch.empty(n, dtype=torch.int64),
        )

    # ---- hot calls

    @abstractmethod
    def find(self, ids: Tensor) -> FoundRows:
        """Find the rows of ids; never create one.

        Args:
            ids: int64 [n].

        Returns:
            Row numbers, int32 [n], -1 where an id has no row, and the epoch in which they are valid.
        """

    @abstractmethod
    def read(self, ids: Tensor, found: FoundRows | None = None, out: Tensor | None = None) -> Tensor:
        """Read weights.

        Args:
            ids: int64 [n].
            found: Rows of the ids, if they are known.
            out: float32 [n, dim] to fill, if the caller has it.

        Returns:
            float32 [n, dim]; an id without a row reads as `TableConfig.missing` defines.
        """

    @abstractmethod
    def pool(self, ids: Tensor, found: FoundRows | None, pooling: Pooling, outputs: list[Tensor]) -> None:
        """Read weights and reduce them into the outputs of a pooling.

        Args:
            ids: int64 [n].
            found: Rows of the ids, if they are known.
            pooling: Which occurrence goes to which output.
            outputs: float32, one per output; zero where no bag writes.
        """

    @abstractmethod
    def update(
        self,
        ids: Tensor,
        found: FoundRows | None,
        grads: list[Tensor],
        pooling: Pooling | None,
        step: Step,
    ) -> None:
        """Make one optimizer step per distinct id on its summed gradient; create missing rows.

        Args:
            ids: int64 [n].
            found: Rows of the ids, if they are known.
            grads: One tensor [n, dim], or with `pooling` one gradient per output. All finite.
            pooling: The pooling whose outputs the gradients belong to.
            step: Learning rates, time, scale and clip_norm.
        """

    # ---- rows

    @abstractmethod
    def assign(self, ids: Tensor, rows: Tensor, *, add: bool, time: int) -> None:
        """Set the weights of ids, or add to them, in input order; create missing rows.

        Args:
            ids: int64 [n]; may repeat.
            rows: float32 [n, dim], finite.
            add: Whether to add to the weights; a new row starts from its initial weights. False sets them.
            time: Seconds; becomes the last-update time of the rows.
        """

    @abstractmethod
    def reinitialize(self, ids: Tensor, time: int) -> Tensor:
        """Reset rows to their initial weights and state; create missing rows.

        Args:
            ids: int64 [n]; may repeat.
            time: Seconds; becomes the last-update time of the rows.

        Returns:
            int32 [n] in input order: 0 created, 1 existed.
        """

    @abstractmethod
    def remove(self, ids: Tensor) -> int:
        """Remove the rows of ids.

        Args:
            ids: int64 [n]; may repeat.

        Returns:
            Number of rows removed.
        """

    @abstractmethod
    def scan(self, chunk_size: int) -> Iterator[Chunk]:
        """Yield all rows in chunks. Each chunk is consistent; a row is yielded once unless it is removed.

        Args:
            chunk_size: Largest number of rows of a chunk.

        Yields:
            Chunks with their own memory.
        """

    @abstractmethod
    def restore(self, ids: Tensor, columns: list[Tensor], times: Tensor) -> None:
        """Write complete rows; an existing row is replaced.

        Args:
            ids: int64 [n]; the last of several equal ids wins.
            columns: Weights float32 [n, dim], then float32 [n, size] for each of the config's state columns.
            times: Last-update time of each row in seconds, int64 [n].
        """

    @abstractmethod
    def clear(self) -> None:
        """Remove every row and free the memory."""

    @abstractmethod
    def reserve(self, n: int) -> None:
        """Allocate memory, so that the table does not grow before it has more rows.

        Args:
            n: Number of rows, those that exist included.
        """

    # ---- snapshots; at most one is open

    @abstractmethod
    def begin_snapshot(self, consumer: int, touched_only: bool, room: int) -> tuple[int, int, Tensor]:
        """Start a snapshot.

        Args:
            consumer: Number of the consumer whose touched rows are drained, -1 for none.
            touched_only: Whether the snapshot holds only these rows.
            room: Number of changed rows that may be saved before writers wait.

        Returns:
            Rows in the snapshot, rows in the table, and removed ids, int64.
        """

    @abstractmethod
    def read_snapshot(self, chunk: Chunk) -> int:
        """Fill a chunk with the next rows of the open snapshot.

        Args:
            chunk: Receives the rows from its start.

        Returns:
            Number of rows written, at most the size of the chunk; 0 at the end.
        """

    @abstractmethod
    def snapshot_pressure(self) -> float:
        """Return the used part of the room for saved rows, 0 to 1."""

    @abstractmethod
    def end_snapshot(self, give_back: bool) -> float:
        """End the snapshot.

        Args:
            give_back: Whether the drained rows are marked as touched again.

        Returns:
            Seconds that writers waited for the reader.
        """

    # ---- touched rows of numbered consumers

    @abstractmethod
    def track(self, consumer: int) -> None:
        """Start to record touched rows for a consumer.

        Args:
            consumer: Number of the consumer, 0 to MAX_CONSUMERS - 1.
        """

    @abstractmethod
    def untrack(self, consumer: int) -> None:
        """Drop a consumer and its record.

        Args:
            consumer: Number of a tracked consumer.
        """

    @abstractmethod
    def drain(self, consumer: int) -> tuple[Tensor, Tensor]:
        """Return and clear the record of a consumer.

        Args:
            consumer: Number of a tracked consumer.

        Returns:
            Updated ids and removed ids since the last drain, int64 each; an id is in one of them.
        """

    @abstractmethod
    def mark(self, consumer: int, ids: Tensor) -> None:
        """Add ids to the record of a consumer.

        Args:
            consumer: Number of a tracked consumer.
            ids: int64 [n]; an id without a row counts as removed.
        """

    # ---- state

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Advances when row numbers may have become invalid: remove, restore, clear."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def shape(self) -> tuple[int, int, int, bool]:
        """Return rows, rows that fit before the index grows, epoch, and whether the index is growing.

        All four are of one moment.
        """

    @abstractmethod
    def memory(self) -> MemoryUse:
        """Return the bytes in use."""
