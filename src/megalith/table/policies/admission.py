"""Admission policies: which new ids of an update get a row.

`MinCount` admits an id by its number of occurrences, `Probability` at random. They hold settings only.
The engines decide, for speed: native/table_admit.hpp and engines/reference_policies.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megalith.errors import InputError
from megalith.table.policies.policy import Admission, check_integer, check_real

MAX_COUNT = 2**32 - 1


@dataclass(frozen=True)
class MinCount(Admission):
    """Creates the row of an id in the call in which the total of its occurrences reaches `n`.

    That call applies the whole summed gradient of the id; the gradients of earlier calls are dropped. Counts
    are exact for up to `max_ids` ids without a row. Beyond that the ids that were counted first are dropped;
    `Table.stats` reports how many.

    Args:
        n: Number of occurrences that creates a row. 1 admits every id.
        max_ids: Largest number of ids that are counted, for each shard. A counted id takes about 45 bytes. A
            `Capacity` with `max_bytes` may lower it.

    Raises:
        InputError: An argument is not an integer, or it is out of range.
    """

    n: int
    max_ids: int = 1 << 24
    name: ClassVar[str] = "min_count"

    def __post_init__(self) -> None:
        if check_integer("MinCount: n", self.n, 1) > MAX_COUNT:
            raise InputError(f"MinCount: n must be at most {MAX_COUNT}, got {self.n}")
        check_integer("MinCount: max_ids", self.max_ids, 1)


@dataclass(frozen=True)
class Probability(Admission):
    """Creates a row with probability `p` for each occurrence of the id; needs no memory for counts.

    The draw is a function of the seed, the table, the id, the step and the number of the occurrence, so a run
    can be repeated. An id occurs 1 / p times on average before it has a row.

    Args:
        p: Probability, above 0 and at most 1.

    Raises:
        InputError: `p` is not a number, or it is out of range.
    """

    p: float
    name: ClassVar[str] = "probability"

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", check_real("Probability: p", self.p, above=0, most=1))

    @property
    def limit(self) -> int:
        """The limit below which 24 random bits admit an id, 1 to 2^24."""
        return max(1, round(self.p * 2**24))
