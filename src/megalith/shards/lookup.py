"""The Lookup contract: one lookup, in progress or done, and the way back for its gradients.

A lookup is passed along, never kept in a global, and used for one update. Each placement of the tables has
its own class.

A `LookupSeries` is a sequence of lookups that all ranks make ahead of earlier updates. A rank that stops
must not leave the others waiting for it. Lookups that are made ahead are in progress when a rank finds an
error, so a series defines which of its exchanges still take place:

    event on any rank                              later lookups    rows and updates of earlier lookups
    a lookup fails (its batch is bad)              not made         made
    a rank leaves: it fails a lookup or update     not made         not made

All ranks take part in the exchange that fails, and all later exchanges come after it on every rank. So
every rank leaves out the same exchanges, which raise the error of the event instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from megalith.errors import UnknownNameError, UsageError
from megalith.ops.pooling import Pooling

if TYPE_CHECKING:
    from megalith.shards.contract import Shards


@dataclass(frozen=True)
class PreparedIds:
    """Validated ids, ready for `lookup`. Plain data: a data worker can make it and send it.

    Attributes:
        ids: int64 [n] per table.
    """

    ids: Mapping[str, Tensor]


class Lookup(ABC):
    """One lookup of several tables: its rows, its pooled outputs, and the way back for gradients.

    Applying gradients uses it up.

    Attributes:
        shards: The shards that made it.
        ids: The ids that were looked up, int64 [n] per table.
        used: Whether gradients were applied.
        step: The global step of the training that reads the rows, for tables with a view
            (`Segment.serving`); None: the rows are those that servers return. Rows that were fetched keep
            the step that they were fetched with.
        batch: What the ids were compiled from, for the caller.
        time: The last-update time of the rows in seconds, for the update; None: the clock of the owner.
        push: Whether the update returns while gradients are sent.
        grads: Gradients of outputs that wait for the update; None: backward has not run.
        trained: The pooling of the outputs that have gradients.
        backward: The number of the backward that made the gradients.
    """

    batch: Any = None
    time: float | None = None
    push: bool = False
    grads: Sequence[Tensor] | None = None
    trained: Pooling
    backward: int = -1

    def __init__(self, shards: Shards, ids: Mapping[str, Tensor], step: int | None = None) -> None:
        self.shards = shards
        self.ids = ids
        self.used = False
        self.step = step
        self._versions = versions(ids.values())
        self._splits: Mapping[str, Tensor] = {}
        self._splits_versions: list[int] = []

    def _attach(self, batch: Any, row_splits: Mapping[str, Tensor], push: bool = False) -> None:
        """Set what the ids were compiled from; row_splits, by feature, must not change before the update."""
        self.batch, self.push = batch, push
        if row_splits:
            self._splits, self._splits_versions = row_splits, versions(row_splits.values())

    def check_unchanged(self) -> None:
        """Raise UsageError if ids or row_splits were modified in place since the lookup."""
        now = versions(self.ids.values())
        if now != self._versions:
            pairs = zip(self.ids, now, self._versions, strict=True)
            name = next(name for name, new, old in pairs if new != old)
            raise UsageError(
                f"table {name!r}: its ids were changed in place after the lookup; "
                "keep them until the update, or look up a copy"
            )
        splits = self._splits
        if splits and (changed := versions(splits.values())) != self._splits_versions:
            pairs = zip(splits, changed, self._splits_versions, strict=True)
            name = next(name for name, new, old in pairs if new != old)
            raise UsageError(
                f"feature {name!r}: its row_splits were changed in place after forward; keep them until "
                "the update"
            )

    def check_table(self, table: str) -> None:
        """Raise UnknownNameError, which lists the known tables, if a table was not looked up.

        Args:
            table: The name of the table.
        """
        if not isinstance(table, str) or table not in self.ids:
            raise UnknownNameError(f"table {table!r} was not looked up (looked up: {', '.join(self.ids)})")

    @property
    def moved(self) -> bool:
        """Whether the tables were moved to other servers since: the ids must be looked up again."""
        return False

    def wait_ids(self) -> None:
        """Wait until the ids have reached the owners of their rows; raise the error if that failed."""
        return

    def fetch(self) -> None:
        """Start to fetch the rows as they are now, if they are elsewhere; `wait` waits for them."""
        return

    def fail(self, error: Exception, *, leave: bool = False) -> NoReturn:
        """Fail the update of this lookup: no gradients will come from this rank.

        The other ranks raise RankFailedError in their `apply_gradients` of this lookup. If the update has
        been made or has failed before, the other ranks do not wait for it and nothing is sent.

        Args:
            error: The reason.
            leave: Whether this rank leaves the series of this lookup; see `LookupSeries`.

        Raises:
            Exception: Always; it is `error`, unless the exchange with the other ranks fails.
        """
        raise error

    @abstractmethod
    def check_fits(self, pooling: Pooling) -> None:
        """Raise InputError if a pooling does not fit: it reads another table, or the ids or rows differ.

        Args:
            pooling: The pooling of an update.
        """

    @abstractmethod
    def wait(self) -> None:
        """Wait until the rows have arrived; raise the error if that failed."""

    @abstractmethod
    def pool(self, pooling: Pooling) -> list[Tensor]:
        """Read and reduce rows, without a copy of the rows of each occurrence.

        Args:
            pooling: Which occurrence goes to which output, and how it is reduced.

        Returns:
            One tensor per output of the pooling, float32.
        """

    @abstractmethod
    def gather(self, table: str) -> Tensor:
        """Read the rows of one table.

        Args:
            table: The name of the table.

        Returns:
            float32 [n, dim], one row per id, in input order.
        """

    @property
    def rows(self) -> Mapping[str, Tensor]:
        """The rows by table, float32 [n, dim]; each table is gathered when it is read."""
        return _LazyRows(self)

    def use(self) -> None:
        """Mark the lookup as used; raise UsageError the second time."""
        if self.used:
            raise UsageError(
                "this Lookup has already been used for an update: look up the ids again "
                "(a second backward through the same forward is not possible)"
            )
        self.used = True


class _LazyRows(Mapping[str, Tensor]):
    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    def __getitem__(self, table: str) -> Tensor:
        return self._lookup.gather(table)

    def __contains__(self, table: object) -> bool:
        return table in self._lookup.ids  # without gathering its rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._lookup.ids)

    def __len__(self) -> int:
        return len(self._lookup.ids)


def versions(tensors: Collection[Tensor]) -> list[int]:
    """Return how often each tensor was modified in place."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def check_lookup_step(lookup: Lookup, stepwise: Collection[str]) -> None:
    """Check that rows whose view changes with the step were read for training."""
    wrong = [name for name in stepwise if name in lookup.ids] if lookup.step is None else []
    if wrong:
        raise UsageError(
            f"table {wrong[0]!r}: what a lookup returns depends on the step (OneBit); pass step= to lookup, "
            "the step of the update"
        )


class LookupSeries:
    """The state of one series. Pass the same object to each of its lookups, in the same order on all ranks.

    It belongs to a loop, not to the shards: lookups of a loop that has ended may still be in progress when
    the next one begins. Lookups without a loop have none. The thread of the exchange changes it; other
    threads read it after they have waited for an exchange.
    """

    def __init__(self) -> None:
        self._lookup_error: Exception | None = None
        self._leave_error: Exception | None = None

    @property
    def is_open(self) -> bool:
        """Whether further lookups of the series are made."""
        return self._lookup_error is None and self._leave_error is None

    def check_lookup(self) -> None:
        """Raise the error of the series if a lookup has failed or a rank has left."""
        self.check()
        if self._lookup_error is not None:
            raise self._lookup_error

    def check(self) -> None:
        """Raise the error of the series if a rank has left."""
        if self._leave_error is not None:
            raise self._leave_error

    def fail_lookups(self, error: Exception) -> None:
        """Record that a lookup has failed."""
        self._lookup_error = self._lookup_error or error

    def leave(self, error: Exception) -> None:
        """Record that a rank has left."""
        self._leave_error = self._leave_error or error
