"""Agreement: work that succeeds on all ranks or raises on all ranks.

A rank that fails alone would leave the others waiting in their next collective call. `agree` exchanges the
outcomes first, so that every rank knows of every failure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megalith.distributed.ranks import RankGroup
from megalith.errors import MegalithError, RankFailedError

T = TypeVar("T")


def agree(
    ranks: RankGroup,
    work: Callable[[], T],
    *,
    error: type[MegalithError] = RankFailedError,
    keep: tuple[type[MegalithError], ...] = (),
) -> T:
    """Run a function on every rank; if it fails on one, raise on all. A collective call."""
    if ranks.size == 1:
        return work()
    failure: Exception | None = None
    try:
        result = work()
    except Exception as raised:
        failure = raised
    outcomes = ranks.gather(failure and (type(failure).__name__, str(failure)))
    if failure is not None:
        raise failure
    for rank, outcome in enumerate(outcomes):
        if outcome is not None:
            name, text = outcome
            kept = next((kind for kind in keep if kind.__name__ == name), None)
            raise (kept or error)(f"rank {rank}: {text if kept else f'{name}: {text}'}")
    return result
