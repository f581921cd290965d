"""Errors that a server keeps for the writes of a worker."""

from __future__ import annotations

import pytest

from megalith.errors import UsageError
from megalith.ps.table_space import Member


def test_errors_that_are_no_longer_kept_raise_all_the_same() -> None:
    member = Member()
    for number in range(1, 1003):
        member.keep(number, UsageError(f"error {number}"))
    with pytest.raises(UsageError, match="error 1002"):
        member.raise_error(1002)
    for number in (1, 2):
        with pytest.raises(UsageError, match="no longer known"):
            member.raise_error(number)
    member.raise_error(1003)
    skipped = Member(accepted=5)
    skipped.skip(2000, UsageError("late"))
    for number, message in {1000: "no longer known", 1500: "late"}.items():
        with pytest.raises(UsageError, match=message):
            skipped.raise_error(number)
