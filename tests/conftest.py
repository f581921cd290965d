"""Fixtures and settings all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# CI repeats the same examples, so that a change is judged by what it changes; runs at a desk look further.
settings.register_profile("desk", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "desk")

# One thread each: small tensors gain nothing from more, and tests that share a machine lose much. Tests about
# threads ask for them.
torch.set_num_threads(1)


@pytest.fixture(params=["reference", "cpu"])
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine in turn: the contract does not know which one it is."""
    name: str = request.param
    return name


@pytest.fixture
def restore_threads() -> Iterator[None]:
    """Lets a test change the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
