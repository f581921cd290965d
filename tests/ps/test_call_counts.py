"""How many calls a server gets, and how long lookups take there."""

from __future__ import annotations

import pytest

from megalith.ps.status import quantile
from megalith.ps.table_space import CallCounts


def test_calls_per_second_and_quantiles() -> None:
    counts = CallCounts()
    begin = counts._began
    for number in range(40):
        counts.add(begin + number / 2)
    assert counts.numbers(begin + 20)["requests_per_second"] == pytest.approx(2.0, abs=0.2)
    assert counts.numbers(begin + 60)["requests_per_second"] == 0
    assert quantile(counts.numbers()["lookup_seconds"], 0.5) is None
    for seconds in (0.0001, 0.0001, 0.03, 9.0):
        counts.add_lookup(seconds)
    histogram = counts.numbers()["lookup_seconds"]
    assert [quantile(histogram, part) for part in (0.5, 0.75, 1.0)] == [0.0005, 0.05, float("inf")]
    assert histogram["sum"] == pytest.approx(9.0302)
