"""The number of threads of a run, chosen by the amount of work of a step.

Threads that wait for each other gain little in small steps, and on a busy machine a step waits for whichever
thread has no core. Measured on 2 cores with DeepFM, dim 16: one-thread time divided by two-thread time, the
minimum of 15 to 18 steps. CPU time is that of the main thread with passive waiting, an estimate of an idle
machine; no idle machine was measured. Wall time is from another run while other processes used both cores
(load 5), and is noisy.

    ids per step (rows x features)      CPU time    wall time, busy machine
      4,096  (1,024 rows x 4)              1.04         0.98
     16,384  (4,096 rows x 4)              1.34         1.12
     26,624  (1,024 rows x 26)             1.10         0.65
     65,536  (16,384 rows x 4)             1.72         0.90
    106,496  (4,096 rows x 26)             1.33         0.30
    262,144  (65,536 rows x 4)             1.74         0.37
    425,984  (16,384 rows x 26)            1.89         1.08

The limit gives up some speed between 16,384 and 65,536 ids on an idle machine. Above it, several threads can
still be slower than one on a busy machine: set train.threads = 1 there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megalith.training.run_config import RunConfig

IDS_PER_THREAD = 32_768
"""A step of fewer than two times this number of ids uses one thread."""


def threads_for(rows: int, features: int, most: int) -> int:
    """Return the number of threads for a step."""
    return max(1, min(most, rows * features // IDS_PER_THREAD))


def threads_of(config: RunConfig, features: Sequence[str], ranks: int = 1) -> int:
    """Return the number of threads of torch for the steps of a run."""
    given = config.train.threads
    if given is not None:
        return given
    rows = -(-config.data.batch_size // ranks)
    return threads_for(rows, len(config.model.features or features), most=torch.get_num_threads())


@contextmanager
def using_threads(number: int) -> Iterator[None]:
    """Sets the number of threads of torch, and restores it at the end."""
    before = torch.get_num_threads()
    if number != before:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number != before:
            torch.set_num_threads(before)
