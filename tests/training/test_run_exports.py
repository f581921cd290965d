"""Exports of a run for its servers; tests/cli/test_serve.py has the rest."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from megalith.errors import ExportError
from megalith.training import export


def test_another_export_that_hangs_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "LOCK_SECONDS", 0.05)
    (tmp_path / "exports" / "clicks").mkdir(parents=True)
    with open(tmp_path / "exports" / "clicks" / ".lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ExportError, match=r"clicks/.lock: another process has held the lock .* 0.05 s"):
            export.export_newest(tmp_path, "clicks")
