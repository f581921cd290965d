"""Canary: opens an exported version and computes its examples in a child process, before a server opens it.

The checks of an archive (program_safety.py) allow only ops that compute. A program can still end a process:
it may need more memory than there is, and torch does not check everything. If the child process fails, the
version is refused and the server continues. This module is also the program of the child process.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from megalith.errors import ExportError, MegalithError
from megalith.serving.export.servable import Fetch, Servable
from megalith.serving.export.signature import ENTRY, Signature

logger = logging.getLogger(__name__)

CANARY_SECONDS = 600.0
_POLL_SECONDS = 0.1
# Exit status of a child process that raised an error of Megalith, which opening the version raises again
REFUSED = 3


def run_canary(directory: Path, stopping: threading.Event, *, compiled: bool = False) -> None:
    """Open a version in a child process."""
    # -P: no modules of the working directory
    command = [sys.executable, "-P", "-m", __name__, str(directory), *(["compiled"] if compiled else [])]
    path = os.pathsep.join(each for each in sys.path if each)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    try:
        child = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
    except OSError as error:
        logger.warning("%s is opened without a trial: %s", directory, error)
        return
    waited = 0.0
    try:
        while (status := _status(child)) is None:
            waited += _POLL_SECONDS
            if stopping.is_set():
                return
            if waited > CANARY_SECONDS:
                raise ExportError(
                    f"{directory}: a trial in a child process took over {CANARY_SECONDS:g} seconds"
                )
    finally:  # also if a signal ends the server
        child.kill()
        child.wait()  # no limit: it is killed
    if status < 0:
        name = signal.Signals(-status).name
        raise ExportError(f"{directory}: opening it and computing its examples ends a process with {name}")


def _status(child: subprocess.Popen[bytes]) -> int | None:
    try:
        return child.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _run(directory: Path, *, compiled: bool = False) -> None:
    """Open a version and compute its examples; an entry gets rows of zeros."""
    fetch: Fetch | None = None
    if Signature.read(directory).part == ENTRY:
        fetch = lambda ids: {}  # noqa: E731  `warm_up` does not call it
    # The server itself compares the checksums.
    Servable(directory, fetch=fetch, verify_files=False, compiled=compiled).warm_up()


def _die_first() -> None:
    """Ask the kernel to end this process, not the server, if there is too little memory for both."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    _die_first()
    try:
        _run(Path(sys.argv[1]), compiled="compiled" in sys.argv[2:])
    except MegalithError:
        sys.exit(REFUSED)
