"""Stacks of a test that exceeds its time limit: of its threads, and of all processes it has started.

Every Python process that a test starts imports `child_stacks/sitecustomize.py`, which registers SIGUSR1 to
write the stacks of all threads to a file in the folder named by MEGALITH_TEST_STACKS.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

FOLDER = "MEGALITH_TEST_STACKS"
_WRITE_SECONDS = 3.0


def descendants(process: int) -> list[int]:
    """The processes that a process has started and those that these have started; none without /proc."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [process]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def kill_tree(process: int, *, itself: bool) -> None:
    """Kills what a process has started: what stays could hold a port, a lock or a pipe of the run."""
    for each in [process] * itself + descendants(process):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def keep(test: str) -> None:
    """Writes the stacks of this process and of its descendants."""
    folder = Path(os.environ[FOLDER])
    started = descendants(os.getpid())
    with open(folder / f"{os.getpid()}.txt", "a") as file:
        file.write(f"{test} exceeded its time limit. Processes it has started:\n")
        for each in started:
            with suppress(OSError):
                words = (
                    Path(f"/proc/{each}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                file.write(f"{each} {words[:200]}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    for each in started:
        with suppress(OSError):
            if _catches(each, signal.SIGUSR1):  # which ends a process that does not
                os.kill(each, signal.SIGUSR1)
    time.sleep(_WRITE_SECONDS)


def _catches(process: int, number: int) -> bool:
    status = Path(f"/proc/{process}/status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)
