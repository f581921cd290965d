"""The lock of a run's directory, and the numbers of its sessions."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
from pathlib import Path

import pytest

from megalith.training.directory import LOCK_FILE, RunLock


def test_numbers_of_sessions_rise_also_if_the_clock_does_not(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock:
        first = lock.next_session()
        assert lock.next_session() > first
    far = 10**18
    (tmp_path / LOCK_FILE).write_text(f"{far}\n")
    with RunLock(tmp_path) as lock:
        assert lock.next_session() == far + 1
    (tmp_path / LOCK_FILE).write_text("not a number, and longer than any")
    with RunLock(tmp_path) as lock:
        assert lock.next_session() > first


def test_a_file_system_without_locks_is_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    with RunLock(tmp_path) as lock, RunLock(tmp_path):
        assert lock.next_session() > 0


def test_a_process_that_was_forked_does_not_hold_the_lock(tmp_path: Path) -> None:
    """A data worker may live a little longer than a trainer that was killed."""
    with RunLock(tmp_path) as lock:
        held, ends = os.pipe(), os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(60)
            os.write(held[1], b"1" if lock._file is None else b"0")
            os.read(ends[0], 1)
            os._exit(0)
        assert select.select([held[0]], [], [], 60)[0], "the child has not answered after 60 s"
        assert os.read(held[0], 1) == b"1"
    try:
        with RunLock(tmp_path):  # the child process is still alive
            pass
    finally:
        os.write(ends[1], b"1")
        os.waitpid(child, 0)
        for end in (*held, *ends):
            os.close(end)
