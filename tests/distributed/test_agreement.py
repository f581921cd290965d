"""`agree`: work that succeeds on all ranks or raises on all ranks."""

from __future__ import annotations

import pytest

from megalith.distributed.ranks import Ranks, current_rank, has_process_group, world_size
from megalith.errors import CheckpointError, InputError, RankFailedError, UsageError


class TwoRanks(Ranks):
    """Rank 0 of two ranks; the other rank's outcome is given."""

    size = 2

    def __init__(self, other: object) -> None:
        self.other = other

    def gather(self, value: object) -> list[object]:
        return [value, self.other]


def fail() -> None:
    raise InputError("bad ids")


def test_one_process_runs_the_work_and_keeps_its_error() -> None:
    assert Ranks().agree(lambda: 5) == 5
    with pytest.raises(InputError, match=r"^bad ids$"):
        Ranks().agree(fail)


def test_the_result_of_this_rank_is_returned_when_all_succeed() -> None:
    assert TwoRanks(None).agree(lambda: 5) == 5


def test_the_rank_that_failed_raises_its_own_error() -> None:
    with pytest.raises(InputError, match=r"^bad ids$"):
        TwoRanks(("UsageError", "other")).agree(fail, error=CheckpointError)


def test_the_other_ranks_raise_the_callers_type_and_name_the_rank() -> None:
    with pytest.raises(RankFailedError, match=r"^rank 1: InputError: bad ids$"):
        TwoRanks(("InputError", "bad ids")).agree(lambda: 5)
    with pytest.raises(CheckpointError, match=r"^rank 1: InputError: bad ids$"):
        TwoRanks(("InputError", "bad ids")).agree(lambda: 5, error=CheckpointError)


def test_kept_types_are_raised_as_they_are() -> None:
    with pytest.raises(UsageError, match=r"^rank 1: too early$"):
        TwoRanks(("UsageError", "too early")).agree(lambda: 5, keep=(UsageError,))


def test_without_a_process_group_this_is_rank_0_of_1() -> None:
    assert (has_process_group(), current_rank(), world_size()) == (False, 0, 1)
