"""The parts of `make test-gpu`: every file that needs a GPU is in one, and a part has a time limit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import gpu_parts

ROOT = Path(__file__).parents[1]


def test_every_file_that_needs_a_gpu_is_in_a_part() -> None:
    parts = [*gpu_parts.test_parts(), *gpu_parts.memory_parts()]
    named = {word for part in parts for word in part.command if word.startswith("tests/")}
    assert all((ROOT / name).exists() for name in named)
    needed = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("gpu_*.py")}
    assert needed - {"tests/gpu_parts.py"} <= named


def test_a_part_ends_at_its_limit_and_fails() -> None:
    slow = gpu_parts.Part("slow", [sys.executable, "-c", "import time; time.sleep(600)"], {})
    outcome = gpu_parts.run(slow, 0.2)
    assert (outcome.code, outcome.summary) == (124, "ran out of time")


def test_a_part_that_does_not_exist_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_parts.main(["--parts", "ops,wheels"])
    assert "unknown parts ['wheels']" in capsys.readouterr().err
