"""Probability: each occurrence of an id without a row creates it with a fixed probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megalith.table.policies.policy import Admission, check_real


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
