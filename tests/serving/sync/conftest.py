"""Fixtures of the tests of parameter sync."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.serving.sync_support import Online, make_start


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and the export of it: where trainers and servers begin. Tests do not write to it."""
    return make_start(tmp_path_factory.mktemp("start"))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what a test has opened."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def online(start: Path, stack: ExitStack) -> Online:
    """A model in training, its servers and publishers."""
    return Online(start, stack)
