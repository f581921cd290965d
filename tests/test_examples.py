"""The example scripts run on less data."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megalith import checkpoint
from tests.distributed.ranks import run_ranks

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_quickstart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quickstart = load("quickstart")
    quickstart.STEPS = 60

    quickstart.main(tmp_path)

    lines = capsys.readouterr().out.splitlines()
    results = [line for line in lines if line.startswith("AUC")]
    assert results[0] == results[1]  # before saving and after loading
    assert float(results[0].split()[1].rstrip(";")) > 0.6
    assert (tmp_path / "checkpoint" / "manifest.json").exists()


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_help_runs_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(EXAMPLES / f"{name}.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    with pytest.raises(SystemExit) as exited:
        runpy.run_path(path, run_name="__main__")
    assert exited.value.code == 0
    found = capsys.readouterr().out
    assert "usage:" in found.lower()
    if name == "many_ranks":
        assert "{continuous,roundrobin,hash_roundrobin}" in found
    assert not dist.is_initialized()
    assert not list(tmp_path.iterdir())


def test_online(capsys: pytest.CaptureFixture[str]) -> None:
    online = load("online")
    online.WARM_UP = 100

    online.main(seconds=2.0)

    head, *lines, last = capsys.readouterr().out.splitlines()
    assert head.split("   ")[1:] == ["rows pushed", "staleness", "AUC served", "AUC frozen"]
    cells = [line.replace(",", "").replace(" s ", " ").split() for line in lines]
    assert int(cells[-1][0]) > 100
    assert all(0.6 < float(value) < 0.9 for row in cells for value in row[-2:])
    found = re.search(r"differ by (\S+) at most", last)
    assert found is not None, last
    assert float(found[1]) < 1e-4


def test_the_notebook_runs_without_jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cells = json.loads((EXAMPLES / "first_model.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.ExitStack() as stack:
        scope: dict[str, Any] = {}
        stack.callback(lambda: [scope[name].close() for name in ("publisher", "client") if name in scope])
        stack.callback(lambda: scope["server"].stop() if "server" in scope else None)
        for number, source in enumerate(code):
            exec(compile(source, f"first_model.ipynb cell {number}", "exec"), scope)
    assert "AUC on the last day: 0." in printed.getvalue()
    assert "item-brand-new: 0." in printed.getvalue()


def one_of_many_ranks(folder: Path) -> str:
    """Runs the example in a rank that has a process group; returns what it prints."""
    many_ranks = load("many_ranks")
    many_ranks.init_process_group = lambda *_, **__: None
    many_ranks.dist = SimpleNamespace(destroy_process_group=lambda: None)
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    args = argparse.Namespace(dist_type="hash_roundrobin", run_dir=folder, batches=51, rows=256)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        many_ranks.main(args)
    return printed.getvalue()


def check_many_ranks(printed: str, folder: Path) -> None:
    found = re.search(r"hash_roundrobin on 2 ranks: AUC (0\.\d+)", printed)
    assert found is not None, printed
    assert float(found[1]) > 0.8
    assert "step 50, table user" in printed
    rows = {
        name: [int(n) for n in counts.split(", ")]
        for name, counts in re.findall(r"table (\w+): rows by rank \[(.*)\]", printed)
    }
    saved = checkpoint.read_manifest(folder / "checkpoint").tables()["embeddings.user"][-1]
    assert saved.routing.dist_type == "hash_roundrobin"
    assert sum(rows["user"]) == saved.live > 1000
    assert min(rows["user"]) > 0.4 * saved.live


def test_many_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(one_of_many_ranks, tmp_path)
    check_many_ranks(first, tmp_path)
    assert not second


@pytest.mark.soak
def test_many_ranks_with_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(EXAMPLES / "many_ranks.py"), "--dist-type", "hash_roundrobin", "--run-dir", str(tmp_path)]
    command += ["--batches", "51", "--rows", "256"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    check_many_ranks(done.stdout, tmp_path)
