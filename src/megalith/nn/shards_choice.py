"""ShardsChoice: where the tables of a collection are, decided at the first use that needs rows.

A list of tables becomes `SyncShards` over the default process group if it has more than one rank, and
`LocalShards` otherwise. Frameworks build a model before they create the process group, so the choice waits:

    state          a process group exists             no process group
    undecided      chosen at construction             waits; the first use chooses LocalShards, or raises
                                                      UsageError if a launcher started several processes
    LocalShards    of several ranks: UsageError       unchanged
    SyncShards     unchanged                          unchanged

Shards that the user passes are never questioned.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch.utils.data import get_worker_info

from megalith.distributed.ranks import has_process_group, world_size
from megalith.errors import InputError, UsageError
from megalith.nn.collection_state import check_trainer
from megalith.shards import LocalShards, Shards, SyncShards
from megalith.shards.contract import check_configs
from megalith.table import TableConfig
from megalith.table.engines import engine_class

logger = logging.getLogger(__name__)

_KEEP_LOCAL = "pass LocalShards(tables) instead of a list if each process should train its own tables"


class ShardsChoice:
    """The shards of a collection, or what is needed to choose them."""

    configs: Mapping[str, TableConfig]  # The configuration of each table, by name

    def __init__(self, tables: Sequence[TableConfig] | Shards, engine: str | None, seed: int | None) -> None:
        self._shards: Shards | None = None
        self._lock = threading.Lock()
        self._given = isinstance(tables, Shards)
        if isinstance(tables, Shards):
            if engine is not None or seed is not None:
                raise InputError(
                    "EmbeddingCollection: engine and seed cannot be combined with Shards: they have their own"
                )
            self._shards = tables
            self.configs = tables.configs
            return
        if not isinstance(tables, list | tuple):
            raise InputError(f"tables must be a list of TableConfig, or Shards, got {tables!r}")
        self.configs = MappingProxyType(check_configs(tables))
        self._engine = "cpu" if engine is None else engine
        self._seed = 0 if seed is None else seed
        engine_class(self._engine)
        if isinstance(self._seed, bool) or not isinstance(self._seed, int):
            raise InputError(f"EmbeddingCollection: seed must be an integer, got {seed!r}")
        if has_process_group():
            self._shards = self._choose()

    @property
    def decided(self) -> Shards | None:
        """The shards, or None if the choice has not been made."""
        return self._shards

    def shards(self) -> Shards:
        """Return the shards; make the choice if it has not been made."""
        # Over ranks the choice is a collective call, like construction after `init_process_group`.
        if self._shards is None:
            with self._lock:  # the first forwards of several threads must use the same tables
                if self._shards is None:
                    self._shards = self._choose()
        elif not self._given and isinstance(self._shards, LocalShards) and world_size() > 1:
            raise UsageError(
                f"EmbeddingCollection: tables {', '.join(map(repr, self.configs))} were used before the "
                f"process group of {world_size()} ranks existed, so they are tables of this process alone: "
                "call torch.distributed.init_process_group before the first use of the collection (a "
                f"forward, .shards, .tables, a load), or {_KEEP_LOCAL}"
            )
        return self._shards

    def _choose(self) -> Shards:
        configs = list(self.configs.values())
        if world_size() > 1:
            if get_worker_info() is not None:
                raise UsageError(
                    "EmbeddingCollection: a data worker cannot be the first to use the collection: read "
                    "collection.shards on all ranks before the DataLoader starts its workers"
                )
            check_trainer(world_size())
            logger.info("tables %s are distributed over %d ranks", ", ".join(self.configs), world_size())
            return SyncShards(configs, engine=self._engine, seed=self._seed)
        if not has_process_group():
            _check_launcher()
        return LocalShards(configs, engine=self._engine, seed=self._seed)


def _check_launcher() -> None:
    """Raise UsageError if a launcher started several processes; there is no process group."""
    for rank, size in (
        ("RANK", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        # Of a step: the variables of a job are set in its scripts and shells, which are single processes.
        ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
    ):
        if rank in os.environ and os.environ.get(size, "").isdecimal() and int(os.environ[size]) > 1:
            raise UsageError(
                f"EmbeddingCollection: {size} is {os.environ[size]}, but there is no process group, so every "
                "process would train its own tables: call torch.distributed.init_process_group before the "
                f"first use of the collection (a forward, .shards, .tables, a load), or {_KEEP_LOCAL}"
            )
