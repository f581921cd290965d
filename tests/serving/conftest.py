"""What the tests of serving share."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalith.serving.server import repository
from tests.serving.exports import export_version


@pytest.fixture(autouse=True)
def _without_trials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """test_bad_versions.py shows what a trial does; elsewhere each would cost the start of a process."""
    if request.path.name != "test_bad_versions.py":
        monkeypatch.setattr(repository, "run_canary", lambda *_, **options: None)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 1 of the small model, which no test changes."""
    out = tmp_path_factory.mktemp("exported")
    export_version(out)
    return out
