"""megalith gather: ranks that outlive each other, windows shown, simulations that end in the same weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from megalith.cli.gather import app
from megalith.gather import (
    Label,
    OuterUpdate,
    Plan,
    Schema,
    compress,
    local_store,
    publish,
    run_window,
)
from megalith.gather.faultserver import FaultServer
from megalith.gather.simulation import Simulation, run_rank

SECONDS = 240


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def megalith(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a process: its ranks write to the real stdout."""
    command = [sys.executable, "-m", "megalith", "gather", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.mark.parametrize("command", ["run", "inspect", "simulate"])
def test_help_has_examples(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"megalith gather {command}" in result.stdout


# ---- simulate


def test_the_weights_are_the_same_for_any_number_of_ranks() -> None:
    simulation = Simulation(peers=12, seed=5, windows=2, latency=0.0, faults={"corrupt": 0.2, "copy": 0.2})
    with FaultServer() as server:
        simulation.fill(server)
        alone = run_rank(simulation, server.endpoint, None, None)
    common = ["--peers", "12", "--seed", "5", "--windows", "2", "--latency", "0.01"]
    done = megalith("simulate", *common, "--ranks", "3", "--faults", "corrupt=0.2,copy=0.2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == f"weights {alone}"
    assert any("gather/status/CORRUPT" in line for line in lines)
    assert any("left out for copying" in line for line in lines)


def test_faults_depend_on_the_seed_alone() -> None:
    one, two = Simulation(peers=50, seed=1), Simulation(peers=50, seed=1)
    assert one.fault_of(0) == two.fault_of(0) != Simulation(peers=50, seed=2).fault_of(0)
    assert one.fault_of(0) != one.fault_of(1)


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ("fire=0.1", "unknown fault 'fire'"),
        ("corrupt", "not NAME=SHARE"),
        ("corrupt=2", "1 in all at most"),
    ],
)
def test_faults_that_cannot_be_are_refused(faults: str, said: str) -> None:
    result = run("simulate", "--faults", faults)
    assert result.exit_code == 1
    assert said in " ".join(result.stderr.split())


# ---- run

SCRIPT = """
import os, signal, sys
from megalith.gather import Ranks
from megalith.gather.ranks import BrokenExchange
ranks = Ranks.join(timeout=1000.0)  # longer than the test may take: nobody waits for the dead
if ranks.rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    ranks.exchange("hello", b"x")
except BrokenExchange:
    ranks.reform("hello")
left = ranks.exchange("left", str(ranks.rank).encode())
os.write(1, f"{sys.argv[1]} {left}\\n".encode())  # one write: two ranks share the pipe
"""


def test_survivors_go_on_when_a_rank_dies(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = megalith("run", "--ranks", "3", "--least", "2", str(script), "--say")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["--say [b'1', b'2']"] * 2
    assert "rank 0 was killed by signal 9; the others go on" in done.stderr


def test_too_few_good_ends_are_an_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; sys.exit(3 if os.environ['RANK'] == '1' else 0)")
    done = megalith("run", "--ranks", "2", "--least", "2", str(script))
    assert done.returncode == 1
    assert "rank 1 ended with code 3" in done.stderr
    assert "1 of 2 ranks ended well, 2 must" in done.stderr


# ---- inspect


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A window with two payloads, one of them damaged, and its artifact."""
    folder = tmp_path_factory.mktemp("store")
    weights = {"w": torch.zeros(8, 8)}
    schema = Schema.of(weights, chunk=4, keep=4)
    for uid in (1, 2):
        update = {"w": torch.randn(8, 8, generator=torch.Generator().manual_seed(uid))}
        publish(local_store(folder), compress(update, schema), Label("demo", 5, uid, global_step=7))
    (folder / "payloads/demo/5/2.gather").write_bytes(b"not a payload" * 10)
    plan = Plan(run="demo", window=5, schema=schema.digest, primary=(1, 2), deadline=5.0)
    stores = {"default": local_store(folder)}
    run_window(plan, weights, OuterUpdate(schema), stores, artifacts=local_store(folder))
    return folder


def test_a_payload(store: Path) -> None:
    path = str(store / "payloads/demo/5/1.gather")
    found = json.loads(run("inspect", path, "--json").stdout)
    assert (found["kind"], found["run"], found["window"], found["uid"]) == ("payload", "demo", 5, 1)
    assert found["parameters"][0] == {
        "name": "w",
        "shape": [8, 8],
        "chunk": [4, 4],
        "keep": 4,
        "bins": 4,
        "dct": False,
    }
    assert "global_step      7" in run("inspect", path).stdout


def test_an_artifact(store: Path) -> None:
    found = json.loads(run("inspect", str(store / "artifacts/demo/5/manifest.json"), "--json").stdout)
    assert (found["kind"], found["reason"], found["uids"]) == ("artifact", "GO", [1])
    assert found["skipped"] == {"2": "CORRUPT"}


def test_a_window_of_a_store(store: Path) -> None:
    found = json.loads(run("inspect", str(store), "--run", "demo", "--window", "5", "--json").stdout)
    assert [each["uid"] for each in found["payloads"]] == [1, None]
    assert found["payloads"][1]["problem"].startswith("CORRUPT")
    assert found["artifact"]["uids"] == [1]
    shown = run("inspect", str(store), "--run", "demo", "--window", "6").stdout
    assert "0 payloads" in shown
    assert "no artifact" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/nowhere/at/all"], "is no file; a store needs --run and --window"),
        (["/nowhere/at/all", "--run", "x", "--window", "1"], "is no directory and no address"),
    ],
)
def test_places_that_are_nothing_are_refused(arguments: list[str], said: str) -> None:
    result = run("inspect", *arguments)
    assert result.exit_code == 1
    assert said in " ".join(result.stderr.split())


def test_a_file_that_is_neither_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"MEGAGATH and nothing more")
    assert run("inspect", str(path)).exit_code == 1
    path.write_bytes(b"hello")
    assert "neither a payload nor a manifest" in " ".join(run("inspect", str(path)).stderr.split())
