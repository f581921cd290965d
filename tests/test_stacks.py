"""What is kept of a test that exceeds its time limit."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import stacks

CODE = """
import subprocess, time
def inner():
    print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
    time.sleep(1000)
inner()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_stacks_of_children_are_kept_and_their_children_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(stacks.FOLDER, str(tmp_path))
    monkeypatch.setattr(stacks, "_WRITE_SECONDS", 1.0)
    with subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert select.select([child.stdout], [], [], 60)[0], "the child has not started after 60 s"
            sleeper = int(child.stdout.readline())
            assert stacks.descendants(child.pid) == [sleeper]
            stacks.keep("test_x")
        finally:
            stacks.kill_tree(child.pid, itself=True)
    assert child.returncode == -signal.SIGKILL
    own = (tmp_path / f"{os.getpid()}.txt").read_text()
    assert own.startswith("test_x exceeded its time limit")
    assert f"\n{sleeper} sleep 1000" in own
    assert "in inner" in (tmp_path / f"{child.pid}.txt").read_text()
    deadline = time.monotonic() + 60
    while is_running(sleeper):  # a signal takes a moment
        assert time.monotonic() < deadline, f"process {sleeper} was not killed"
        time.sleep(0.01)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
