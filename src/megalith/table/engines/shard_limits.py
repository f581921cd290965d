"""ShardLimits: how much one shard of a table may hold, from the policies of the table.

`Capacity(max_bytes=...)` limits all bytes that `Table.memory` reports. A table never exceeds it, because the
bytes are divided in advance, with the largest size that each part can have:

| part | bytes |
| --- | --- |
| an empty table | `FIXED_BYTES` |
| the logs of evicted and refused ids | 1/128 each, or less: a log never needs more than 8 MiB |
| ids without a row that `MinCount` counts | `COUNTED_BYTES` for each of `max_ids`, at most a quarter |
| rows, with the candidates of a score function | the rest |

Two things are not included, because they do not belong to rows and go away when they are read: the ids
removed since a consumer's last drain (8 bytes each), and copies of rows for an open snapshot
(`buffer_bytes`).
"""

from __future__ import annotations

from typing import NamedTuple

from megalith.errors import InputError
from megalith.table.policies import Capacity, MinCount
from megalith.table.table_config import TableConfig

MAX_LOG = 1 << 20
"""Largest number of ids of a log."""
FIXED_BYTES = 8192
"""Bytes of a table without rows: a page for each index."""
INDEX_BYTES = 48
"""Largest number of bytes of the index per row, also while it grows."""
SIDE_BYTES = 18
"""Bytes of id, time, flags and the list of free places per row."""
SCORED_BYTES = 8
"""Largest number of bytes per row of the candidates of a score function (score_search.py)."""
COUNTED_BYTES = 76
"""Largest number of bytes of an id that is counted, its place in the index included."""


class ShardLimits(NamedTuple):
    """The limits of one shard."""

    rows: int | None  # Number of rows; None without a `Capacity`
    log_ids: int  # Number of ids of each log
    counted_ids: int  # Number of ids that `MinCount` counts; 0 without it


def shard_limits(config: TableConfig, num_shards: int) -> ShardLimits:
    """Compute the limits of one shard."""
    capacity = config.capacity
    counted_ids = config.admission.max_ids if isinstance(config.admission, MinCount) else 0
    if capacity is None or capacity.max_bytes is None:
        return ShardLimits(_rows(capacity, num_shards), MAX_LOG, counted_ids)
    room = capacity.max_bytes // num_shards
    log_ids = max(1, min(MAX_LOG, room // 128 // 8))
    if counted_ids:
        counted_ids = max(1, min(counted_ids, room // 4 // COUNTED_BYTES))
    per_row = config.row_bytes + INDEX_BYTES + SIDE_BYTES + (8 if config.counted else 0)
    per_row += SCORED_BYTES if callable(capacity.score) else 0
    fit = (room - FIXED_BYTES - 16 * log_ids - COUNTED_BYTES * counted_ids) // per_row
    if fit < 1:
        # The logs and the counted ids take an id each at least, and 1/64 and a quarter of all bytes at most.
        rest = 47 if counted_ids else 63
        least = num_shards * -(-64 * (FIXED_BYTES + per_row + 16 + COUNTED_BYTES) // rest)
        raise InputError(
            f"table {config.name!r}: Capacity(max_bytes={capacity.max_bytes}) has no room for a row"
            f"{f' on each of {num_shards} shards' if num_shards > 1 else ''}; {least} are enough"
        )
    wanted = _rows(capacity, num_shards)
    return ShardLimits(fit if wanted is None else min(fit, wanted), log_ids, counted_ids)


def _rows(capacity: Capacity | None, num_shards: int) -> int | None:
    return None if capacity is None or capacity.rows is None else max(1, -(-capacity.rows // num_shards))
