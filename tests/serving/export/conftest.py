"""Fixtures of the tests of exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalith.serving.export import exporter as module
from megalith.serving.export.program_export import ModelParts
from tests.serving.export.test_dense_program import Wide


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Exports write a program that was traced before: most tests are about the rest."""
    made = tmp_path_factory.mktemp("program") / "dense.pt2"
    entry = module.export_program(ModelParts(Wide()), made)
    data = made.read_bytes()

    def write(parts: Any, path: Path, **options: Any) -> Any:
        path.write_bytes(data)
        return entry

    monkeypatch.setattr(module, "export_program", write)
