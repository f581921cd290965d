"""Fixtures and settings all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("megalith", deadline=None, print_blob=True)
settings.load_profile("megalith")


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
