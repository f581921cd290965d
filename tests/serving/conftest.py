"""What the tests of serving share."""

from __future__ import annotations

import pytest

from megalith.serving.server import repository


@pytest.fixture(autouse=True)
def _without_trials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """test_bad_versions.py shows what a trial does; elsewhere each would cost the start of a process."""
    if request.path.name != "test_bad_versions.py":
        monkeypatch.setattr(repository, "run_canary", lambda directory, stopping: None)
