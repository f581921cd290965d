"""The example scripts run as they stand, on less data."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_quickstart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("quickstart", EXAMPLES / "quickstart.py")
    assert spec is not None
    assert spec.loader is not None
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    quickstart.STEPS = 60

    quickstart.main(tmp_path)

    lines = capsys.readouterr().out.splitlines()
    results = [line for line in lines if line.startswith("AUC")]
    assert results[0] == results[1]  # before saving and after loading
    assert float(results[0].split()[1].rstrip(";")) > 0.6
    assert (tmp_path / "checkpoint" / "manifest.json").exists()
