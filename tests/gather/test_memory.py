"""Memory of whole phases as the operating system counts it: within the budget, not growing with peers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gather.memory_probe import BUDGET

pytest.importorskip("obstore")
PEERS = (8, 32, 128)
OVERHEAD = 4 << 20  # the interpreter's own objects, and what the allocator rounds up
ROOT = Path(__file__).parent.parent.parent


def probe(phase: str, directory: Path) -> list[dict[str, int]]:
    command = [sys.executable, "-m", "tests.gather.memory_probe", phase, str(directory), *map(str, PEERS)]
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, int]] = json.loads(done.stdout)
    return found


def fits(few: dict[str, int], many: dict[str, int]) -> bool:
    """Within the budget, and as good as level from few peers to many: well below a payload per peer."""
    slope = (many["grown"] - few["grown"]) / (many["peers"] - few["peers"])
    return many["grown"] <= BUDGET + OVERHEAD and slope <= 0.25 * many["payloads"] / many["peers"]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's clear_refs")
@pytest.mark.parametrize(("phase", "good"), [("fetch", True), ("update", True), ("all at once", False)])
def test_peak_of_a_phase(phase: str, good: bool, tmp_path: Path) -> None:
    found = probe(phase, tmp_path)
    assert found[-1]["payloads"] > 2 * BUDGET  # more than the budget passes through
    assert fits(found[0], found[-1]) is good, found
    assert all(each["ledger"] <= BUDGET for each in found)
