"""progress: a bar for what takes long, and only for that."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from megalith.cli import output


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal shows."""
    text = io.StringIO()
    monkeypatch.setattr(output, "console", lambda stderr: Console(file=text, force_terminal=True))
    return text


def alarms() -> list[threading.Timer]:
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    return [timer for timer in timers if not timer.name.startswith("pytest_timeout")]


def test_no_bar_for_what_is_quick(screen: io.StringIO) -> None:
    with output.progress("counting", 10) as advance:
        advance(10)
    assert screen.getvalue() == ""
    assert alarms() == []


def test_a_bar_even_before_anything_is_done(screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "PATIENCE", 0.0)
    with output.progress("waiting", None):
        for alarm in alarms():
            alarm.join(60)
    assert "waiting" in screen.getvalue()


def test_the_bar_ends_where_the_work_fails(screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "PATIENCE", -1.0)

    def fail() -> None:
        with output.progress("counting", 10) as advance:
            advance(1)
            raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        fail()
    assert "\x1b[?25h" in screen.getvalue()  # the cursor is back
    assert alarms() == []
