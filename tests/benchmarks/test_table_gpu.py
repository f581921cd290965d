"""The benchmark of the cuda engine: each section runs at a small size in Triton's interpreter, and a section
that fails does not lose the results of the others."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benchmark() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("table_gpu")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        for name in ("table_gpu", "gpu_workloads", "gpu_timing", "harness"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def run(benchmark: Any) -> Any:
    tables = {"slots": 1 << 8, "tables": 1, "table_ids": 16, "id_range": 1000, "features": 2, "batch": 8}
    tables |= {"feature_rows": 30, "host_rows": 256, "host_ids": 64, "scan_rows": 500, "copy_bytes": 1 << 10}
    once = dict.fromkeys(("warmup", "steps", "rounds", "profiled"), 1)
    sizes = importlib.import_module("gpu_workloads").Sizes(**tables, **once)
    return benchmark.GpuRun(True, sizes)


REQUIRED = {
    "find": [
        *(f"find + gather, dim {dim}, billion rows/s" for dim in (16, 64, 128)),
        "find or insert, half new, billion/s",
    ],
    "step": ["10 tables, Adam, ms", "10 tables, SGD, ms"],
    "pooled": ["pooled model, embedding part, ms", "26 nn.EmbeddingBag / ours", "one nn.EmbeddingBag / ours"],
    "host": ["host tier, step / time of its bytes over the bus"],
    "scan": [],
    "kernels": [],
}


@pytest.mark.soak
@pytest.mark.parametrize("section", list(REQUIRED))
def test_a_section_measures_its_targets(benchmark: Any, run: Any, section: str) -> None:
    run.bars.clear()
    benchmark.SECTIONS[section](run)

    assert section in run.sections
    assert sorted(bar.name for bar in run.bars if bar.required is not None) == sorted(REQUIRED[section])
    names = {bar.name for bar in run.bars}
    if section == "step":
        assert {f"10 tables, {o}{c}, 1 % new, ms" for o in ("Adam", "SGD") for c in ("", ", fast")} <= names
    if section == "find":
        assert {f"find + gather, 1 % new, dim {dim}, billion rows/s" for dim in (16, 64, 128)} <= names
    if section == "pooled":
        assert {f"pooled model{c}, embedding part, 1 % new, ms" for c in ("", ", fast")} <= names
    if section == "scan":
        for way in ("scan", "snapshot", "restore"):
            assert f"{way}, part of the speed of a pinned copy" in names
    if section == "host":
        own = run.sections["host"]["deterministic"]
        assert own["rows"] == 256
        assert 0 < own["rows_on_gpu"] < 256
        assert own["bytes_read_per_step"] >= own["bytes_written_per_step"] > 0
        assert 0 < own["hit_rate"] < 1


def test_a_section_that_fails_keeps_the_others(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harness = sys.modules["harness"]

    def good(run: Any) -> None:
        run.sections["good"] = 7
        run.bar("speed", 2.0, 1.0)

    def bad(run: Any) -> None:
        raise ValueError("no such kernel")

    path = tmp_path / "result.json"
    sections = {"bad": bad, "good": good}
    with pytest.raises(SystemExit) as ended:
        harness.run_sections("x", ["--output", str(path)], harness.Run, sections, ("torch",))

    assert ended.value.code == "section bad failed: ValueError: no such kernel"  # printed, with status 1
    content = json.loads(path.read_text())
    assert content["errors"] == {"bad": "ValueError: no such kernel"}
    assert content["sections"] == {"good": 7}
    assert [bar["verdict"] for bar in content["bars"]] == ["met"]
    assert "no such kernel" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_says_that_it_needs_a_gpu(benchmark: Any) -> None:
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        benchmark.main([])
