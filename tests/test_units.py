"""units: numbers as people read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megalith.units import DAY, YEAR, byte_unit, show_bytes, show_number, show_short, show_span, show_time


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (show_bytes, 0, "0 bytes"),
        (show_bytes, 1023, "1,023 bytes"),
        (show_bytes, 1536, "1.5 KiB"),
        (show_bytes, 64 << 20, "64.0 MiB"),
        (show_bytes, 5 << 50, "5,120.0 TiB"),
        (show_span, 0, "0 seconds"),
        (show_span, 1, "1 second"),
        (show_span, 27.04, "27 seconds"),
        (show_span, 5400, "1.5 hours"),
        (show_span, DAY, "1 day"),
        (show_span, 25 * YEAR, "25 years"),
        (show_span, 1000 * YEAR, "1000 years"),
        (show_number, 1234567, "1,234,567"),
        (show_number, 12345.678, "12,346"),
        (show_number, 0.123456, "0.1235"),
        (show_number, float("nan"), "not finite"),
        (show_short, 0, "0"),
        (show_short, 0.25, "0.25"),
        (show_short, 1.2e6, "1.2M"),
        (show_short, -3000, "-3k"),
        (show_short, 1e-9, "1e-9"),
        (show_short, 2.5e17, "2.5e17"),
        (show_short, 999, "999"),
        (show_time, 1_000_000_000, "2001-09-09 01:46:40 UTC"),
        (show_time, 10**17, "100000000000000000 s"),  # no calendar has it
        (byte_unit, 0, ("bytes", 1)),
        (byte_unit, 3 << 20, ("MiB", 1 << 20)),
    ],
)
def test_a_number_as_people_read_it(show: Callable[[Any], Any], value: float, text: Any) -> None:
    assert show(value) == text
