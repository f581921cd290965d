"""A signal to all processes of a run on parameter servers, as a service manager may send it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from megalith import checkpoint

LIMIT = 240.0
"""Seconds; Ray itself ends a process after 60 that has lost it."""


def session_of(number: int) -> list[int]:
    """The processes of a session that have not ended, without zombies."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, session, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(session) == number and state != "Z":
                found.append(int(folder.name))
    return found


def wait_until(what: Callable[[], bool], message: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not what():
        assert time.monotonic() < deadline, message
        time.sleep(0.05)


@pytest.mark.soak  # 24 s of the CPU; `make test` stops a run with SIGINT
@pytest.mark.timeout(2 * LIMIT + 60)
def test_sigterm_to_all_processes_ends_the_run_and_leaves_none(tmp_path: Path) -> None:
    """Ray's own processes end too, so the run may lose its servers before or after it has saved."""
    run, output = tmp_path / "run", tmp_path / "output"
    flags = ["--data", "synthetic", "--epochs", "1000", "--batch-size", "32", "--log-every", "1"]
    command = [sys.executable, "-m", "megalith", "train", *flags, "--servers", "1", "--run", str(run)]
    with open(output, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        log = run / "metrics.jsonl"
        wait_until(lambda: process.poll() is not None or (log.exists() and log.stat().st_size > 0), "no step")
        assert process.poll() is None, output.read_text()
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(LIMIT)
        wait_until(lambda: not session_of(process.pid), "processes are left")
    finally:
        for each in session_of(process.pid):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        process.wait(LIMIT)
    text = output.read_text()
    assert process.returncode in (130, 1), text
    if process.returncode == 130:  # saved in time, as nearly always
        step = checkpoint.read_manifest(run / "checkpoint").progress["step"]
        assert f"stopped after step {step}" in text
        assert not (run / "servers").exists()
