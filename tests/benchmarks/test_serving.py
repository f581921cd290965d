"""The benchmark of serving runs from end to end, and says what it should; how fast is not for a test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serving.py"
LIMIT = 240.0


@pytest.mark.soak
def test_a_quick_run_measures_requests_sync_and_staleness(tmp_path: Path) -> None:
    output = tmp_path / "result.json"

    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--output", str(output)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )

    assert ended.returncode == 0, ended.stderr
    result = json.loads(output.read_text())
    loads = {(load["clients"], load["batch"], load["variant"]) for load in result["requests"]}
    assert loads == {
        (n, 1, name)
        for n in (1, 32)
        for name in ("megalith", "compiled", "infer", "pushed", "two processes", "plain", "lean")
    }
    assert all(load["per_second"] > 0 for load in result["requests"])
    assert min(result["sync"][name] for name in ("first", "one", "two", "raw")) > 0
    assert 0 < result["staleness"]["p50"] <= result["staleness"]["p99"]
    bars = {bar["name"]: bar["measured"] for bar in result["bars"]}
    assert {"requests/s, 32 clients: compiled / lean", "p99 / p50, 32 clients"} <= set(bars)
    assert min(bars.values()) > 0
    assert str(tmp_path) not in output.read_text()
