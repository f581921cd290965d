"""Room for rows under a `Capacity`: the check before an update, and eviction by a score function.

Rows with low scores are found by score_search.py. Named scores are ranked by the engines themselves:
native/table_evict.hpp and reference_policies.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalith.errors import TableFullError
from megalith.ops.pooling import Pooling
from megalith.table.engines.torch_step import distinct_ids
from megalith.table.table_data import Step

if TYPE_CHECKING:
    from megalith.table.engines.contract import Engine


def check_room(
    engine: Engine, ids: Tensor, pooling: Pooling | None, step: Step, occurrences: Tensor | None
) -> None:
    """Raise if the rows of an update cannot fit. An update of several tables asks all of them first."""
    capacity, limit = engine.config.capacity, engine.row_limit
    if capacity is None or limit is None or len(engine) + ids.numel() <= limit:
        return
    if capacity.score is not None and ids.numel() <= limit:
        return  # other rows can make room
    distinct, seen = distinct_ids(ids, pooling, engine.name, occurrences)
    new = ~engine.has_rows(distinct)
    needed = int((new & engine.admitted(distinct, seen, step.step)).sum())
    needed += len(engine) if capacity.score is None else int(engine.has_rows(torch.unique(ids)).sum())
    if needed > limit:
        raise TableFullError(
            f"table {engine.name!r} holds {len(engine)} rows, and this call needs {needed} in all, but its "
            f"Capacity is {limit} rows; raise it"
        )


def make_room(engine: Engine, ids: Tensor, new: int) -> None:
    """Remove rows with low results of a score function."""
    # ids: int64 [n], the ids of the write that needs room.
    limit = engine.row_limit
    assert limit is not None
    assert engine.score_search is not None
    distinct = torch.unique(ids)
    wanted = int(engine.has_rows(distinct).sum()) + new
    if wanted > limit:
        raise TableFullError(
            f"table {engine.name!r}: a call needs {wanted} rows, but Capacity is {limit} rows; raise it"
        )
    engine.score_search.make_room(len(engine) + new - limit, distinct)
