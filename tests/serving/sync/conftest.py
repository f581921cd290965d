"""Fixtures of the tests of parameter sync."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from megalith.models import Model
from megalith.serving.export.servable import Servable
from megalith.serving.sync.subscriber import Subscriber
from tests.serving.sync.subscriber_calls import begin
from tests.serving.sync_support import Online, Trainer, export_version, make_model, make_start


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


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    """A trained model and its export, of save "one". Tests do not change them."""
    model = make_model()
    Trainer(model).step(5)
    out = tmp_path_factory.mktemp("export")
    export_version(model, out, base="one")
    export_version(model, out, base="two", version=2)
    return model, out


@pytest.fixture
def served(exported: tuple[Model, Path]) -> Iterator[Servable]:
    """The first version of it."""
    servable = Servable(exported[1] / "1")
    yield servable
    servable.close()


@pytest.fixture
def subscriber(served: Servable) -> Subscriber:
    """It follows a session from the save "one"; the next message of that session is number 2."""
    subscriber = Subscriber(served)
    begin(subscriber)
    return subscriber
