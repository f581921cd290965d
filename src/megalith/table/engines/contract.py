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
        """Returns an uninitialized chunk of n rows with the columns of this table."""
        return Chunk(
            torch.empty(n, dtype=torch.int64),
            torch.empty(n, self.dim),
            {c.key: torch.empty(n, c.end - c.start) for c in self.config.state_columns},
            torch.empty(n, dtype=torch.int64),
        )

    # ---- hot calls

    @abstractmethod
    def find(self, ids: Tensor) -> FoundRows:
        """Returns the rows of ids; never creates one."""

    @abstractmethod
    def read(self, ids: Tensor, found: FoundRows | None = None, out: Tensor | None = None) -> Tensor:
        """Reads weights.

        Args:
            ids: int64 [n].
            found: Rows of the ids, if they are known.
            out: float32 [n, dim] to fill, if the caller has it.

        Returns:
            float32 [n, dim]; an id without a row reads as `TableConfig.missing` defines.
        """

    @abstractmethod
    def pool(self, ids: Tensor, found: FoundRows | None, pooling: Pooling, outputs: list[Tensor]) -> None:
        """Reads weights and reduces them into the outputs of a pooling.

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
        """Makes one optimizer step per distinct id on its summed gradient; creates missing rows.

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
        """Sets (or adds to) the weights of ids, float32 [n, dim], in input order."""

    @abstractmethod
    def reinitialize(self, ids: Tensor, time: int) -> Tensor:
        """Resets rows to their initial weights and state; int32 [n]: 0 created, 1 existed."""

    @abstractmethod
    def remove(self, ids: Tensor) -> int:
        """Removes the rows of ids; returns how many existed."""

    @abstractmethod
    def scan(self, chunk_size: int) -> Iterator[Chunk]:
        """Yields all rows in chunks. Each chunk is consistent."""

    @abstractmethod
    def restore(self, ids: Tensor, columns: list[Tensor], times: Tensor) -> None:
        """Writes complete rows: weights, then the config's state columns, and times int64 [n]."""

    @abstractmethod
    def clear(self) -> None:
        """Removes every row and frees the memory."""

    @abstractmethod
    def reserve(self, n: int) -> None:
        """Allocates room for n rows."""

    # ---- snapshots; at most one is open

    @abstractmethod
    def begin_snapshot(self, consumer: int, touched_only: bool, room: int) -> tuple[int, int, Tensor]:
        """Starts a snapshot.

        Args:
            consumer: Number of the consumer whose touched rows are drained, -1 for none.
            touched_only: Whether the snapshot holds only these rows.
            room: Number of changed rows that may be saved before writers wait.

        Returns:
            Rows in the snapshot, rows in the table, and removed ids, int64.
        """

    @abstractmethod
    def read_snapshot(self, chunk: Chunk) -> int:
        """Fills a chunk with the next rows; returns their number, 0 at the end."""

    @abstractmethod
    def snapshot_pressure(self) -> float:
        """Used part of the room for saved rows, 0 to 1."""

    @abstractmethod
    def end_snapshot(self, give_back: bool) -> float:
        """Ends the snapshot; returns the seconds that writers waited.

        Args:
            give_back: Whether the drained rows are marked as touched again.
        """

    # ---- touched rows of numbered consumers

    @abstractmethod
    def track(self, consumer: int) -> None:
        """Starts to record touched rows for a consumer."""

    @abstractmethod
    def untrack(self, consumer: int) -> None:
        """Drops a consumer and its record."""

    @abstractmethod
    def drain(self, consumer: int) -> tuple[Tensor, Tensor]:
        """Returns and clears the record: updated ids and removed ids, int64."""

    @abstractmethod
    def mark(self, consumer: int, ids: Tensor) -> None:
        """Adds ids to the record; an id without a row counts as removed."""

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
        """Rows, rows that fit before the index grows, epoch, and whether the index is growing, at one
        moment."""

    @abstractmethod
    def memory(self) -> MemoryUse:
        """Bytes in use."""
