"""Models in tests are small: a second thread costs more than it helps."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(restore_threads: None) -> None:
    torch.set_num_threads(1)
