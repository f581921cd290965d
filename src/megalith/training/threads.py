"""The number of threads of a run, chosen by the amount of work of a step.

Threads that wait for each other cost more than they gain in small steps, and far more on a busy machine: the
step then waits for whichever thread has no core. Measured with DeepFM, dim 16, on 2 cores: one-thread time
divided by two-thread time, in CPU time of the main thread (what an idle machine would show) and in wall time
while other processes used both cores.

    ids per step (rows x features)      CPU time    wall time, busy machine
      4,096  (1,024 rows x 4)              1.04         0.98
     26,624  (1,024 rows x 26)             1.10         0.65
     65,536  (16,384 rows x 4)             1.72         0.90
    106,496  (4,096 rows x 26)             1.33         0.30
    425,984  (16,384 rows x 26)            1.89         1.08
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

IDS_PER_THREAD = 32_768
"""A step of fewer than two times this number of ids uses one thread."""


def threads_for(rows: int, features: int, most: int) -> int:
    """Returns the number of threads for a step.

    Args:
        rows: Number of rows of the step on this rank.
        features: Number of features.
        most: Largest number of threads.
    """
    return max(1, min(most, rows * features // IDS_PER_THREAD))


@contextmanager
def using_threads(number: int) -> Iterator[None]:
    """Sets the number of threads of torch, and restores it at the end.

    Args:
        number: The number of threads.
    """
    before = torch.get_num_threads()
    if number != before:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number != before:
            torch.set_num_threads(before)
