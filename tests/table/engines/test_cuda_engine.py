"""The cuda engine against the reference engine: random programs of calls.

Without a GPU the kernels run in Triton's interpreter, at small sizes; `make test-gpu` runs larger ones.
"""

from __future__ import annotations

import pytest
import torch

from megalith import TableConfig, Uniform
from megalith.table import Optimizer
from tests.table.engines.cuda_configs import CONFIGS, OPTIMIZERS
from tests.table.engines.programs import Program

ON_GPU = torch.cuda.is_available()
SIZES = {"distinct": 3000, "batch": 5000} if ON_GPU else {"distinct": 12, "batch": 9}
CALLS = 60 if ON_GPU else 8


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_each_optimizer(name: str) -> None:
    optimizer: Optimizer = OPTIMIZERS[name]
    config = TableConfig("t", dim=5, optimizer=optimizer, initializer=Uniform())
    Program(config, 3, calls=("update", "lookup"), **SIZES).run(CALLS // 4)


@pytest.mark.parametrize("name", CONFIGS)
def test_programs_of_calls(name: str) -> None:
    for seed in range(4 if ON_GPU else 1):
        sizes = dict(SIZES) if CONFIGS[name].capacity is None else {"distinct": 20, "batch": 9}
        Program(CONFIGS[name], 11 + seed, **sizes).run(CALLS)
