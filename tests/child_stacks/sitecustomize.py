"""Imported by every Python process that a test starts; see `tests/stacks.py`."""

import faulthandler
import os
import signal
from contextlib import suppress

if "MEGALITH_TEST_STACKS" in os.environ:
    with suppress(OSError):  # the run that made the folder has ended
        _stacks = open(f"{os.environ['MEGALITH_TEST_STACKS']}/{os.getpid()}.txt", "a")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, _stacks, all_threads=True)
