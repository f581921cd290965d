"""The benchmark of sync intervals: it measures through real servers, and the docs show what it measured."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "sync_interval.py"
IMAGES = ROOT / "docs" / "images"
INTERVALS = ["10 s", "1 min", "10 min", "no sync"]


@pytest.mark.soak
def test_a_quick_run_scores_and_pushes_to_every_replica(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    result = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--output", str(result), "--plots", str(tmp_path)]

    subprocess.run(command, check=True, capture_output=True, timeout=280)

    content = json.loads(result.read_text())
    (feed,) = content["feeds"]
    (outcome,) = feed["outcomes"]
    assert list(outcome["auc"]) == ["trainer", *INTERVALS]
    assert outcome["auc"]["10 s"] > outcome["auc"]["10 min"] > outcome["auc"]["no sync"] > 0.6
    pushed = outcome["rows_pushed"]
    assert pushed["10 s"] > pushed["1 min"] > pushed["10 min"] > pushed["no sync"] == 0
    for name in ("sync-interval.svg", "sync-interval-lost.svg"):
        assert ElementTree.parse(tmp_path / name).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def newest_result() -> Path:
    return max((ROOT / "benchmarks" / "results").glob("sync_interval-*.json"))


def test_the_committed_result_has_the_order_of_the_paper_for_every_seed() -> None:
    content = json.loads(newest_result().read_text())
    outcomes = content["feeds"][0]["outcomes"]
    assert len(outcomes) >= 3
    for outcome in outcomes:
        aucs = [outcome["auc"][name] for name in INTERVALS]
        assert aucs == sorted(aucs, reverse=True)
        assert len(set(aucs)) == len(aucs)
    assert [bar["verdict"] for bar in content["bars"] if bar["required"] is not None] == ["met"] * 3


def test_the_plots_of_the_docs_are_those_of_the_committed_result(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("grpc")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("sync_interval", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sync_interval", benchmark)
    spec.loader.exec_module(benchmark)

    plots = benchmark.draw(json.loads(newest_result().read_text()))

    for name, svg in plots.items():
        assert (IMAGES / name).read_text() == svg, f"draw it again: {SCRIPT.name} --draw RESULT"
