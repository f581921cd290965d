"""ShardsPart: one part of the tables of a model, in the process that holds it.

`Shards.each_part` runs functions where the rows are; they receive the part. `PartRecovery` is what a save
or load reports to if the part is on a server that can start again from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from megalith.shards.local import LocalShards
    from megalith.table.table_data import RowCounters


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
