"""The Shards contract: all tables of a model by name, one call for all, wherever they live.

`LocalShards` holds them in this process; placements over ranks and servers answer the same
calls. A `Lookup` is one look-up under way or done and the way back for its gradients; it is passed
along, never kept in a global, and used for one update.

Not here: features, combiners, modules. Shards see ids per table and, at most, a Pooling.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.distributed.ranks import RankGroup
from megalith.errors import InputError, UnknownNameError, UsageError
from megalith.ops.pooling import Pooling
from megalith.routing import Router
from megalith.table import Chunk, MemoryUse, Table, TableConfig, TableStats

Ids = Mapping[str, Tensor]
Rows = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Prepared:
    """Checked ids, ready for `lookup`. Plain data: a data worker may make it and send it over."""

    ids: Mapping[str, Tensor]


class Lookup(ABC):
    """One look-up of several tables: its rows, its pooled outputs, and the way back.

    ids: the ids asked for, int64 [n] per table. Applying gradients uses it up.
    """

    def __init__(self, ids: Mapping[str, Tensor]) -> None:
        self.ids = ids
        self.used = False
        self._versions = {name: version(x) for name, x in ids.items()}

    def check_unchanged(self) -> None:
        """Raises UsageError if an ids tensor was written to since the look-up."""
        for name, ids in self.ids.items():
            if version(ids) != self._versions[name]:
                raise UsageError(
                    f"table {name!r}: its ids were changed in place after the look-up; "
                    "keep them until the update, or look a copy up"
                )

    def wait_ids(self) -> None:
        """Returns when the ids have reached those who hold their rows; raises what went wrong on the way."""
        return

    def fetch(self) -> None:
        """Starts bringing the rows as they are now, where they have a way to come; `wait` waits for them."""
        return

    def give_up(self, error: Exception) -> None:
        """Tells other ranks that wait for this look-up's gradients that none will come, because of an error.

        Does nothing where there is nobody to tell, or they know.
        """
        return

    @abstractmethod
    def wait(self) -> None:
        """Returns when the rows have arrived; raises what went wrong on the way."""

    @abstractmethod
    def pool(self, pooling: Pooling) -> list[Tensor]:
        """The pooling's outputs, read straight from the rows."""

    @abstractmethod
    def gather(self, table: str) -> Tensor:
        """One table's rows, float32 [n, dim], in input order."""

    @property
    def rows(self) -> Mapping[str, Tensor]:
        """Rows by table, gathered when asked for."""
        return _LazyRows(self)

    def use(self) -> None:
        """Marks the look-up used; the second time raises UsageError."""
        if self.used:
            raise UsageError(
                "this Lookup has already been used for an update: look the ids up again "
                "(a second backward through the same forward is not possible)"
            )
        self.used = True


class _LazyRows(Mapping[str, Tensor]):
    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    def __getitem__(self, table: str) -> Tensor:
        if table not in self._lookup.ids:
            raise UnknownNameError(
                f"table {table!r} was not looked up (looked up: {', '.join(self._lookup.ids)})"
            )
        return self._lookup.gather(table)

    def __contains__(self, table: object) -> bool:
        return table in self._lookup.ids  # without gathering its rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._lookup.ids)

    def __len__(self) -> int:
        return len(self._lookup.ids)


class Shards(ABC):
    """All tables of a model. See the module for what a placement must keep to."""

    configs: Mapping[str, TableConfig]
    local: Mapping[str, Table]
    ranks: RankGroup = RankGroup()
    push: bool = False
    """Whether `apply_gradients` may return while gradients travel; where they do not, it says nothing."""

    @property
    def world_size(self) -> int:
        """How many processes hold a part of the tables."""
        return self.ranks.size

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return self.ranks.rank

    def router(self, table: str) -> Router | None:
        """How a table's ids are spread over ranks; None where this process holds them all."""
        self.check_name(table)
        return None

    # ---- a batch

    @property
    @abstractmethod
    def preparer(self) -> Callable[..., Prepared]:
        """`prepare` as an object that can be pickled and sent to a data worker."""

    def abort(self, error: Exception, call: str = "lookup") -> None:
        """Tells other ranks, if there are any, that this one cannot make this call because of an error."""
        return

    @abstractmethod
    def prepare(self, ids: Ids, *, missing_ok: bool = False) -> Prepared:
        """The part of a look-up that needs no table: checks (and, where ids travel, dedup and routing)."""

    @abstractmethod
    def lookup(self, ids: Ids | Prepared, *, missing_ok: bool = False) -> Lookup:
        """Starts looking up int64 or int32 ids [n] per table; may return before rows arrive.

        An unknown table raises UnknownNameError (a KeyError), or is skipped with `missing_ok`.
        """

    @abstractmethod
    def apply_gradients(
        self,
        lookup: Lookup | Ids,
        grads: Mapping[str, Tensor] | Sequence[Tensor],
        *,
        step: int,
        time: float | None = None,
        scale: float = 1.0,
        clip_norm: float | None = None,
        pooling: Pooling | None = None,
    ) -> None:
        """One optimizer step per distinct id, summed over everything given.

        grads: float32 [n, dim] per table, or with `pooling` one gradient per output. A table of the
        look-up without gradients is left alone. scale, clip_norm: of each distinct id's summed gradient, as
        in `Table.update`. Nothing is written if any input is wrong.
        """

    @abstractmethod
    def flush(self) -> None:
        """Waits for everything under way, updates and look-ups, and raises the errors of updates."""

    # ---- rows

    @abstractmethod
    def assign(self, rows: Rows, *, time: float | None = None) -> None:
        """Sets weights: {table: (ids, rows)}."""

    @abstractmethod
    def assign_add(self, rows: Rows, *, time: float | None = None) -> None:
        """Adds to weights: {table: (ids, rows)}."""

    @abstractmethod
    def reinitialize(
        self, ids: Ids, *, time: float | None = None, missing_ok: bool = False
    ) -> dict[str, Tensor]:
        """Back to initial rows; int32 status per id in input order.

        0 created, 1 existed, -1 for every id of an unknown table (with `missing_ok`).
        """

    @abstractmethod
    def remove(self, ids: Ids) -> dict[str, int]:
        """Forgets ids; how many had a row, per table."""

    @abstractmethod
    def evict(self, now: float | None = None) -> dict[str, Tensor]:
        """Applies eviction policies; the removed ids per table."""

    @abstractmethod
    def scan(self, table: str, chunk_size: int = 65536) -> Iterator[Chunk]:
        """Walks one table's rows."""

    @abstractmethod
    def restore(self, table: str, chunk: Chunk) -> None:
        """Writes whole rows back."""

    @abstractmethod
    def clear(self) -> None:
        """Empties every table."""

    @abstractmethod
    def reserve(self, rows: Mapping[str, int]) -> None:
        """Makes room: {table: rows}."""

    # ---- touched rows, stats

    @abstractmethod
    def track(self, consumer: str) -> None:
        """Starts remembering changes of every table for a consumer."""

    @abstractmethod
    def untrack(self, consumer: str) -> None:
        """Forgets a consumer."""

    @abstractmethod
    def drain_touched(self, consumer: str) -> dict[str, tuple[Tensor, Tensor]]:
        """(updated, removed) ids per table since the last drain."""

    @abstractmethod
    def mark_touched(self, consumer: str, ids: Ids) -> None:
        """Gives ids back to a consumer."""

    @abstractmethod
    def stats(self) -> dict[str, TableStats]:
        """Numbers per table."""

    @abstractmethod
    def memory(self) -> dict[str, MemoryUse]:
        """Bytes per table."""

    # ---- checks that every placement shares

    def check_name(self, table: str) -> None:
        """Raises UnknownNameError, naming the known tables."""
        if table not in self.configs:
            known = ", ".join(map(repr, self.configs)) or "none"
            raise UnknownNameError(f"unknown table {table!r} (known: {known})")

    def known(self, names: Mapping[str, object], missing_ok: bool) -> list[str]:
        """The names that are tables; others raise, or are skipped with `missing_ok`."""
        if not missing_ok:
            for name in names:
                self.check_name(name)
        return [name for name in names if name in self.configs]


def check_configs(configs: Sequence[TableConfig]) -> dict[str, TableConfig]:
    """Configs by name. Raises InputError for a duplicate or something else."""
    by_name: dict[str, TableConfig] = {}
    for config in configs:
        if not isinstance(config, TableConfig):
            raise InputError(f"shards need TableConfigs, got {config!r}")
        if config.name in by_name:
            raise InputError(f"two tables are named {config.name!r}: names must differ")
        by_name[config.name] = config
    return by_name


def version(tensor: Tensor) -> int:
    """How often a tensor was written to in place (0 where torch does not count)."""
    return 0 if tensor.is_inference() else tensor._version


def missing_status(ids: Tensor) -> Tensor:
    """The status of ids whose table does not exist."""
    return torch.full((ids.numel(),), -1, dtype=torch.int32)
