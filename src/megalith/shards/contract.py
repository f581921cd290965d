"""The Shards contract: all tables of a model by name, one call for all of them, wherever they are stored.

`LocalShards` keeps them in this process; other placements spread them over ranks or servers and offer the
same calls. `lookup.py` holds the contract of a `Lookup`. A `Recorder` observes the exchanges between ranks.
`Shards.each_part` runs functions where the rows are; they receive a `ShardsPart`.

Features, combiners and modules are not handled here: shards receive ids per table and, at most, a Pooling.

A collective call is one that all ranks make in the same order. A rank that cannot take part calls `fail`,
so that the call raises on all ranks instead of leaving the others waiting:

    on the rank that calls fail(error)    on the other ranks, in the same call
    raises error                          raises RankFailedError with the rank and the text of the error
"""

from __future__ import annotations

import re
import time as clock
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from inspect import isfunction
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from megalith.distributed.ranks import Ranks
from megalith.errors import InputError, UsageError
from megalith.ops.checks import as_number
from megalith.ops.pooling import Pooling
from megalith.routing import Router
from megalith.shards.lookup import Lookup, LookupSeries, PreparedIds, check_lookup_step
from megalith.table import Chunk, MemoryUse, Table, TableConfig, TableStats
from megalith.table.table_data import MAX_TIME, Update
from megalith.table.validation import (
    InputChecks,
    check_by_table,
    check_flag,
    check_numbers,
    check_pooling,
    check_step,
    check_table_name,
)

if TYPE_CHECKING:
    from megalith.shards.local import LocalShards
    from megalith.shards.preparer import LocalPreparer
    from megalith.shards.routed_lookup import JointPooling
    from megalith.table.table_data import RowCounters

EXCHANGES = ("sizes", "ids", "rows", "gradients")
"""The exchanges of a training step, in order."""


@runtime_checkable
class Recorder(Protocol):
    """Receives numbers in the thread of the exchange, so its methods must be fast.

    Counts are int64 [ranks, tables], with the tables in the order of the configs, and include this rank.
    """

    def requested(self, call: str, occurrences: Mapping[str, int], out: Tensor, into: Tensor) -> None:
        """Record that ids were exchanged."""

    def sent(self, exchange: str, out: Tensor, into: Tensor, row_bytes: Sequence[int]) -> None:
        """Record what was sent and received."""

    def waited(self, exchange: str, seconds: float) -> None:
        """Record the time of an exchange."""

    def read(self, misses: Mapping[str, int]) -> None:
        """Record that rows were read."""

    def created(self, table: str, rows: int) -> None:
        """Record that an update created rows."""


class PartOperation(Protocol):
    """What a function keeps at a part between calls."""

    def abandon(self) -> None:
        """End it: the worker that made the calls has left, or another process has taken its number."""


@dataclass
class ShardsPart:
    """The tables of one process, or their part there.

    Attributes:
        shards: The tables.
        index: The number of the part: the rank, or the number of the server.
        count: The number of parts.
        kept: What functions keep between calls, by their own keys.
        loads: Tables that are being loaded; the value identifies the load.
        recovery: Records saves, if a server can start again from them.
        saved_at: When the last complete save of this part ended, in seconds since 1970; None: not yet.
        counted: What the counters of a table had before the rows came here from a checkpoint or another
            server, less what restoring them has counted.
    """

    shards: LocalShards
    index: int = 0
    count: int = 1
    kept: dict[str, PartOperation] = field(default_factory=dict)
    loads: dict[str, object] = field(default_factory=dict)
    recovery: PartRecovery | None = None
    saved_at: float | None = None
    counted: dict[str, RowCounters] = field(default_factory=dict)


class PartRecovery(Protocol):
    """What a save or load reports to the server of a part."""

    def frozen(self, id: str, place: Any) -> None:
        """Report that a save has frozen the rows."""

    def ended(self, id: str, *, complete: bool) -> None:
        """Report the end of a save."""


Ids = Mapping[str, Tensor]
Rows = Mapping[str, tuple[Tensor, Tensor]]
Result = TypeVar("Result")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Shards(ABC):
    """All tables of a model.

    Attributes:
        configs: The configuration of each table, by name.
        local: The tables, or parts of tables, of this process.
        checks: The validation of each table's input, by name.
        stepwise: The tables of which lookups depend on their step.
        ranks: The processes that hold a part of the tables.
        preparer: `prepare` as an object that can be pickled and sent to a data worker.
        device: Where outputs of a lookup are, and where gradients are taken without a copy.
    """

    configs: Mapping[str, TableConfig]
    local: Mapping[str, Table]
    checks: Mapping[str, InputChecks]
    stepwise: Sequence[str] = ()
    last_joint: tuple[Pooling, JointPooling] | None = None  # of the last lookup, if rows are elsewhere
    ranks: Ranks = Ranks()
    preparer: LocalPreparer
    device: torch.device = torch.device("cpu")

    @cached_property
    def dims(self) -> dict[str, int]:
        """The dim of each table, by name."""
        return {name: config.dim for name, config in self.configs.items()}

    @cached_property
    def _constant_rates(self) -> dict[str, list[float]]:
        """The learning rates of the trainable tables whose rates are numbers."""
        rates = {name: own.constant_rates for name, own in self.checks.items() if own.config.trainable}
        return {name: own for name, own in rates.items() if own is not None}

    @property
    def world_size(self) -> int:
        """The number of processes that hold a part of the tables."""
        return self.ranks.size

    @property
    def rank(self) -> int:
        """The rank of this process among them."""
        return self.ranks.rank

    @property
    def sources(self) -> int:
        """The number of processes whose gradients are summed in one step."""
        return self.ranks.size

    @property
    def holds_rows(self) -> bool:
        """Whether the rows that this process is responsible for are in this process, in `local`."""
        return True

    @abstractmethod
    def each_part(
        self, function: Callable[..., Result], *args: Any, background: bool = False
    ) -> list[Result]:
        """Run a function where the rows are, for every part that this process is responsible for.

        Args:
            function: It receives a `ShardsPart`, then `args`. If the part is in another process, the function
                and everything that it takes and returns is sent there; it must be a function of a module.
            args: Further arguments.
            background: Whether other calls may continue while it runs elsewhere.

        Returns:
            The result of each part: one, or one per server.
        """

    def router(self, table: str) -> Router | None:
        """Return how the ids of a table are spread over ranks.

        Args:
            table: The name of the table.

        Returns:
            The router; None if this process holds all ids.

        Raises:
            UnknownNameError: There is no such table.
        """
        self.check_name(table)
        return None

    # ---- a batch

    def fail(
        self,
        error: Exception,
        call: str = "lookup",
        *,
        series: LookupSeries | None = None,
        leave: bool = False,
    ) -> NoReturn:
        """Fail a collective call that this rank cannot make.

        The other ranks raise RankFailedError in the same call; nothing is written anywhere.

        Args:
            error: The reason.
            call: The name of the method that the other ranks call.
            series: The series of the lookup that fails, if it has one.
            leave: Whether this rank leaves the series.

        Raises:
            Exception: Always; it is `error`, unless the exchange with the other ranks fails.
        """
        raise error

    def prepare(self, ids: Ids, *, missing_ok: bool = False) -> PreparedIds:
        """Do the part of a lookup that needs no table: validation and, if ids travel, dedup and routing.

        Args:
            ids: int64 or int32 [n] per table.
            missing_ok: Skip unknown tables instead of raising.

        Returns:
            What `lookup` takes instead of the ids. It can be pickled.

        Raises:
            UnknownNameError: For an unknown table.
            InputError: For ids of a wrong dtype, shape or device.
        """
        return self.preparer(ids, missing_ok=missing_ok)

    def lookup(
        self,
        ids: Ids | PreparedIds,
        *,
        missing_ok: bool = False,
        series: LookupSeries | None = None,
        step: int | None = None,
    ) -> Lookup:
        """Start to look up ids; it may return before rows arrive.

        Args:
            ids: int64 or int32 [n] per table, or the result of `prepare`.
            missing_ok: Skip unknown tables instead of raising.
            series: The series of this lookup, if it is made ahead of updates; see `LookupSeries`.
            step: The global step of the training that reads the rows; see `Lookup.step`.

        Returns:
            The lookup, in progress or done.

        Raises:
            UnknownNameError: For an unknown table (a KeyError).
        """
        return self._lookup(self._prepared(ids, missing_ok), series=series, step=self._check_step(step))

    @staticmethod
    def _check_step(step: int | None) -> int | None:
        return None if step is None else check_step(step, "lookup")

    @abstractmethod
    def _prepared(self, ids: Ids | PreparedIds, missing_ok: bool) -> PreparedIds:
        """Check the ids of a lookup, or those that another process has prepared."""

    @abstractmethod
    def _lookup(
        self, prepared: PreparedIds, *, series: LookupSeries | None = None, step: int | None = None
    ) -> Lookup:
        """Start to look up ids that the preparer of these shards has prepared."""

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
        occurrences: Mapping[str, Tensor] | None = None,
        wait: bool = True,
    ) -> None:
        """Make one optimizer step per distinct id, with the gradients of all its occurrences summed.

        Nothing is written if any input is wrong. A table of the lookup without gradients stays unchanged.

        Args:
            lookup: The lookup to update, or int64 ids [n] per table.
            grads: float32 [n, dim] per table or, with `pooling`, one gradient per output.
            step: The global step, from 0.
            time: The last-update time of the rows in seconds; None: the clock of their owner.
            scale: Multiplies the summed gradient of each distinct id.
            clip_norm: Limits the norm of the summed gradient of each distinct id.
            pooling: The pooling that made the outputs.
            occurrences: Without pooling, how many occurrences each id stands for, int64 [n] per table, for
                admission policies: gradients of several occurrences may be summed already. A table without
                an entry counts one each.
            wait: Whether to wait until the gradients are applied. With False, placements over several
                processes may return earlier; `flush` waits and raises the errors.
        """
        own = lookup if isinstance(lookup, Lookup) else self._look_up_to_update(lookup, step)
        if own.shards is not self:
            self._fail_update(None, InputError("this Lookup belongs to another Shards object"))
        try:
            check_flag(wait, "wait")
            own.check_unchanged()
            check_lookup_step(own, self.stepwise)
            checked = self._check_gradients(own, grads, pooling)
            update = self._check_numbers(checked, step, time, scale, clip_norm)
            counts = self._check_occurrences(own.ids, occurrences, pooling)
        except Exception as error:
            self._fail_update(own, error)
        self._update(own, checked, pooling, update._replace(occurrences=counts), wait)

    @abstractmethod
    def _look_up_to_update(self, ids: Ids, step: int) -> Lookup:
        """Look up the ids of an update that has no lookup."""

    def _fail_update(self, lookup: Lookup | None, error: Exception) -> NoReturn:
        """Raise an error in an update, on all ranks that take part. None: the lookup of other shards."""
        raise error

    @abstractmethod
    def _update(
        self,
        lookup: Lookup,
        gradients: Mapping[str, list[Tensor]],
        pooling: Pooling | None,
        update: Update,
        wait: bool,
    ) -> None:
        """Apply validated gradients, in the form of `EngineGroup.update`; fill in the learning rates."""

    def _check_gradients(
        self, lookup: Lookup, grads: Mapping[str, Tensor] | Sequence[Tensor], pooling: Pooling | None
    ) -> dict[str, list[Tensor]]:
        """Check the gradients of an update; with a pooling all of its tables have the same list."""
        if pooling is None:
            if not isinstance(grads, Mapping):
                raise InputError("without pooling, grads must map tables to tensors")
            for name in self.known(grads, missing_ok=False):
                if name not in lookup.ids:
                    raise InputError(f"table {name!r}: gradients for a table that was not looked up")
            return {
                name: self.checks[name].grads(lookup.ids[name], grad, None) for name, grad in grads.items()
            }
        check_pooling(pooling)
        if not isinstance(grads, list | tuple):
            raise InputError("with pooling, grads must be a list of one gradient per output")
        lookup.check_fits(pooling)
        names = [name for name in lookup.ids if pooling.bags.get(name)]
        if not names:
            return {}
        checked = self.checks[names[0]].grads(lookup.ids[names[0]], grads, pooling)
        return dict.fromkeys(names, checked)

    def _check_numbers(
        self,
        tables: Collection[str],
        step: int,
        time: float | None,
        scale: float,
        clip_norm: float | None,
    ) -> Update:
        """Check the numbers of an update of these tables."""
        for name in tables:
            self.checks[name].trainable()
        # They are checked without gradients too; an error names a table that has some.
        named = next(iter(tables), next(iter(self.checks), None))
        where = "apply_gradients" if named is None else f"table {named!r}"
        return check_numbers(where, step, time, scale, clip_norm)

    def _rates(self, tables: Set[str], step: int) -> dict[str, list[float]]:
        """Return the learning rates of tables, perhaps of others too: the same object if all are constant."""
        if tables <= self._constant_rates.keys():
            return self._constant_rates
        return {name: self.checks[name].rates(step) for name in tables}

    @abstractmethod
    def flush(self) -> None:
        """Wait for all updates and lookups in progress, and raise the errors of the updates."""

    # ---- rows

    @abstractmethod
    def assign(self, rows: Rows, *, time: float | None = None) -> None:
        """Set the weights of rows.

        Args:
            rows: (ids int64 [n], rows float32 [n, dim]) per table. Of repeated ids the last one wins.
            time: The last-update time in seconds; None: the clock of the owner.
        """

    @abstractmethod
    def assign_add(self, rows: Rows, *, time: float | None = None) -> None:
        """Add to the weights of rows.

        Args:
            rows: (ids int64 [n], rows float32 [n, dim]) per table. Repeated ids are added in order.
            time: The last-update time in seconds; None: the clock of the owner.
        """

    @abstractmethod
    def reinitialize(
        self, ids: Ids, *, time: float | None = None, missing_ok: bool = False
    ) -> dict[str, Tensor]:
        """Reset rows to their initial values.

        Args:
            ids: int64 or int32 [n] per table.
            time: The last-update time in seconds; None: the clock of the owner.
            missing_ok: Report unknown tables by their status instead of raising.

        Returns:
            int32 [n] per table, in input order: 0 created, 1 existed, -1 unknown table (with `missing_ok`).
        """

    @abstractmethod
    def remove(self, ids: Ids) -> dict[str, int]:
        """Remove ids.

        Args:
            ids: int64 or int32 [n] per table.

        Returns:
            The number of ids that had a row, per table.
        """

    def latest_time(self, time: float | None) -> int:
        """Agree on a time. A collective call over ranks.

        Args:
            time: Seconds; None: the clock.

        Returns:
            The latest time of all ranks, in whole seconds.
        """
        seconds = clock.time() if time is None else as_number(time)
        if seconds is None or not 0 <= seconds <= MAX_TIME:
            raise InputError(f"time must be seconds between 0 and {MAX_TIME}, got {time!r}")
        return int(seconds)

    def evict(self, now: float | None = None) -> dict[str, Tensor]:
        """Remove the rows that the eviction policies find expired. A collective call over ranks.

        Args:
            now: The current time in seconds; None: the clock. Over ranks the latest one counts.

        Returns:
            The removed ids of this rank, int64 [n] per table.
        """
        seconds = self.latest_time(now)
        return {name: table.evict(seconds) for name, table in self.local.items()}

    def evict_part(self, now: float, *, parts: int, start: float | None = None) -> dict[str, Tensor]:
        """Continue a pass of `evict` over the rows of this rank; not a collective call.

        Args:
            now: Time in seconds, equal on all ranks: see `latest_time`.
            parts: Into how many calls a pass is divided.
            start: As for `Table.evict_part`.

        Returns:
            The removed ids, int64 [n] per table.
        """
        if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
            raise InputError(f"evict_part: parts must be a positive integer, got {parts!r}")
        return {
            name: table.evict_part(now, rows=-(-len(table) // parts) or 1, start=start)
            for name, table in self.local.items()
        }

    @abstractmethod
    def scan(self, table: str, chunk_size: int = 65536) -> Iterator[Chunk]:
        """Iterate over the rows of one table.

        Args:
            table: The name of the table.
            chunk_size: The number of rows of a chunk.

        Returns:
            An iterator over chunks of complete rows, with optimizer state and time.
        """

    @abstractmethod
    def restore(self, table: str, chunk: Chunk) -> None:
        """Write complete rows, with optimizer state and time.

        Args:
            table: The name of the table.
            chunk: The rows, as `scan` returns them.
        """

    @abstractmethod
    def clear(self) -> None:
        """Remove all rows of all tables."""

    @abstractmethod
    def reserve(self, rows: Mapping[str, int]) -> None:
        """Reserve memory.

        Args:
            rows: The number of rows per table.
        """

    # ---- touched rows, stats

    @abstractmethod
    def track(self, consumer: str) -> None:
        """Start to record the changed ids of all tables for a consumer.

        Args:
            consumer: The name of the consumer.
        """

    @abstractmethod
    def untrack(self, consumer: str) -> None:
        """Stop recording for a consumer.

        Args:
            consumer: The name of the consumer.
        """

    @abstractmethod
    def drain_touched(self, consumer: str) -> dict[str, tuple[Tensor, Tensor]]:
        """Take the ids that have changed since the last drain.

        Args:
            consumer: The name of the consumer.

        Returns:
            (updated, removed) ids per table, int64 [n] each.
        """

    @abstractmethod
    def mark_touched(self, consumer: str, ids: Ids) -> None:
        """Return ids to a consumer, for its next drain.

        Args:
            consumer: The name of the consumer.
            ids: int64 or int32 [n] per table.
        """

    def add_recorder(self, recorder: Recorder) -> None:
        """Start to report the exchanges between ranks to a recorder. Shards have one at most.

        Args:
            recorder: The recorder, such as a `CommMetrics`.

        Raises:
            InputError: It is not a Recorder.
            UsageError: There is one already, or these shards exchange nothing.
        """
        raise UsageError(f"{type(self).__name__} has no exchanges to record: its tables are in this process")

    def remove_recorder(self, recorder: Recorder) -> None:
        """Stop reporting to a recorder. Nothing happens if it was not added.

        Args:
            recorder: The recorder.
        """
        return

    @abstractmethod
    def stats(self) -> dict[str, TableStats]:
        """Return counters per table."""

    @abstractmethod
    def memory(self) -> dict[str, MemoryUse]:
        """Return memory use in bytes per table."""

    # ---- validation that all placements share

    def check_name(self, table: str) -> None:
        """Raise UnknownNameError, which lists the known tables, if there is no such table.

        Args:
            table: The name of the table.
        """
        check_table_name(table, self.configs)

    def _check_occurrences(
        self, ids: Ids, occurrences: Mapping[str, Tensor] | None, pooling: Pooling | None
    ) -> dict[str, Tensor]:
        """Check the occurrences of an update without pooling."""
        if occurrences is None:
            return {}
        if pooling is not None:
            raise InputError("apply_gradients: occurrences are for gradients without pooling")
        check_by_table(ids, "ids", "{'user': ids}")
        check_by_table(occurrences, "occurrences", "{'user': counts}")
        checked = {}
        for name in self.known(occurrences, missing_ok=False):
            if name not in ids:
                raise InputError(f"table {name!r}: occurrences of a table without ids")
            checks = self.checks[name]
            checked[name] = checks.occurrences(checks.ids(ids[name]), occurrences[name])
        return checked

    def known(self, names: Collection[str], missing_ok: bool) -> list[str]:
        """Return the names that are tables.

        Args:
            names: Names of tables.
            missing_ok: Skip unknown names instead of raising UnknownNameError.

        Returns:
            The known names, in the order of `names`.

        Raises:
            UnknownNameError: A name is unknown, without `missing_ok`.
            InputError: `names` is not a collection of names.
        """
        if isinstance(names, str) or not isinstance(names, Collection) or isinstance(names, Tensor):
            raise InputError(f"names must be a list of table names, got {type(names).__name__}")
        check_flag(missing_ok, "missing_ok")
        if not missing_ok:
            for name in names:
                self.check_name(name)
        return [name for name in names if isinstance(name, str) and name in self.configs]


def check_configs(configs: Sequence[TableConfig]) -> dict[str, TableConfig]:
    """Check the configs of shards."""
    by_name: dict[str, TableConfig] = {}
    if isinstance(configs, str | bytes | Mapping | Tensor) or not isinstance(configs, Collection | Iterator):
        raise InputError(f"shards need a list of TableConfigs, got {type(configs).__name__}")
    for config in configs:
        if not isinstance(config, TableConfig):
            raise InputError(f"shards need TableConfigs, got {config!r}")
        if config.name in by_name:
            raise InputError(f"two tables are named {config.name!r}: names must differ")
        by_name[config.name] = config
    return by_name


def row_shares(shards: Shards, rows: Mapping[str, int], parts: int) -> dict[str, int]:
    """Check the rows of `Shards.reserve`."""
    check_by_table(rows, "rows", "{'user': 1000}")
    known = shards.known(rows, missing_ok=False)
    return {name: -(-shards.checks[name].row_count(rows[name]) // parts) for name in known}


def described(*options: object) -> str:
    """Return text by which processes compare their tables and options."""
    return _ADDRESS.sub("", repr(options))


def missing_status(ids: Tensor) -> Tensor:
    """Return the status of ids whose table does not exist."""
    # ids: [n], the ids that the caller passed; returns: -1 for each id, int32 [n].
    return torch.full((ids.numel(),), -1, dtype=torch.int32, device="cpu")


def check_function(function: Any) -> None:
    """Check the function of `Shards.each_part`."""
    if not isfunction(function):
        raise InputError(f"each_part takes a function of a ShardsPart, got {type(function).__name__}")
