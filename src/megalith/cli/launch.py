"""launched: joins a command with the other ranks that a launcher started."""

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
    """Creates the process group of the launcher's ranks. Without a launcher there is one rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no launcher", LaunchWarning)
        setup = configure(run, merge_checkpoints=True, device="cpu")
    init_process_group(setup, timeout=timeout)
    yield setup
    if setup.size > 1:
        # Not after an error: the state of the other ranks is unknown, and the process is about to exit.
        dist.destroy_process_group()
