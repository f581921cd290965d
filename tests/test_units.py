"""units: numbers as people read them."""

from __future__ import annotations

import pytest

from megalith.units import DAY, YEAR, byte_unit, show_bytes, show_number, show_short, show_span, show_time


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (1536, "1.5 KiB"),
        (64 << 20, "64.0 MiB"),
        (5 << 50, "5,120.0 TiB"),
    ],
)
def test_bytes(count: int, text: str) -> None:
    assert show_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 seconds"),
        (1, "1 second"),
        (27.04, "27 seconds"),
        (5400, "1.5 hours"),
        (DAY, "1 day"),
        (25 * YEAR, "25 years"),
        (1000 * YEAR, "1000 years"),
    ],
)
def test_spans(seconds: float, text: str) -> None:
    assert show_span(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234567, "1,234,567"), (12345.678, "12,346"), (0.123456, "0.1235"), (float("nan"), "not finite")],
)
def test_numbers(value: float, text: str) -> None:
    assert show_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (1.2e6, "1.2M"),
        (-3000, "-3k"),
        (1e-9, "1e-9"),
        (2.5e17, "2.5e17"),
        (999, "999"),
    ],
)
def test_axis_numbers(value: float, text: str) -> None:
    assert show_short(value) == text


def test_moments_and_those_no_calendar_has() -> None:
    assert show_time(1_000_000_000) == "2001-09-09 01:46:40 UTC"
    assert show_time(10**17) == "100000000000000000 s"


def test_units_of_bytes() -> None:
    assert byte_unit(0) == ("bytes", 1)
    assert byte_unit(3 << 20) == ("MiB", 1 << 20)
