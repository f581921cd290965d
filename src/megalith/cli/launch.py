"""Launch: a command as one of the ranks that a launcher started, or alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from megalith.distributed.launcher_environment import LaunchWarning, RankSetup, configure
from megalith.distributed.process_group import init_process_group


@contextmanager
def launched(run: Path, timeout: float) -> Iterator[RankSetup]:
    """This process's place, joined with the other ranks where there are several.

    run: the directory all of them share. timeout: seconds to wait for the others.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no launcher", LaunchWarning)
        setup = configure(run, merge_checkpoints=True, device="cpu")
    init_process_group(setup, timeout=timeout)
    yield setup
    if setup.size > 1:
        # Not after an error: the other ranks may be anywhere, and the process is about to end.
        dist.destroy_process_group()
