"""megalith gather: ranks that outlive each other, windows shown, simulations that end in the same weights."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from megalith.compat.templar import write_payload
from megalith.gather import (
    GatherConfig,
    GatherPlan,
    Label,
    OuterUpdate,
    PayloadSchema,
    compress,
    open_object_store,
    publish,
    run_window,
)
from megalith.gather.simulation import Simulation, run_rank
from tests.cli.support import megalith, plain
from tests.gather.fault_server import FaultServer


def run(*arguments: str) -> Result:
    return megalith("gather", *arguments)


# ---- simulate


def test_the_weights_are_the_same_for_any_number_of_ranks(tmp_path: Path) -> None:
    simulation = Simulation(peers=12, seed=5, windows=2, latency=0.0, faults={"corrupt": 0.2, "copy": 0.2})
    simulation.fill(tmp_path)
    alone = run_rank(simulation, tmp_path, None, None)
    common = ["--peers", "12", "--seed", "5", "--windows", "2", "--latency", "0.01"]
    done = run("simulate", *common, "--ranks", "2", "--faults", "corrupt=0.2,copy=0.2")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == f"weights {alone}"
    assert any("gather/status/CORRUPT" in line for line in lines)
    assert any("left out for copying" in line for line in lines)
    assert any("skipped uid" in line and "CORRUPT: " in line for line in lines)


def test_faults_depend_on_the_seed_alone() -> None:
    one, two = Simulation(peers=50, seed=1), Simulation(peers=50, seed=1)
    assert one.faults_of(0) == two.faults_of(0) != Simulation(peers=50, seed=2).faults_of(0)
    assert one.faults_of(0) != one.faults_of(1)


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ("fire=0.1", "unknown fault 'fire'"),
        ("corrupt", "not NAME=SHARE"),
        ("corrupt=2", "at most 1 together"),
    ],
)
def test_faults_that_cannot_be_are_refused(faults: str, said: str) -> None:
    result = run("simulate", "--faults", faults)
    assert result.exit_code == 1
    assert said in plain(result.stderr)


# ---- run

SCRIPT = """
import os, signal, sys
from megalith.gather import ElasticRanks
from megalith.distributed.ranks import BrokenExchange
ranks = ElasticRanks.join(timeout=1000.0)  # longer than the test may take: nobody waits for the dead
if ranks.rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    ranks.exchange("hello", b"x")
except BrokenExchange:
    ranks.reform("hello")
left = ranks.exchange("left", str(ranks.rank).encode())
os.write(1, f"{sys.argv[1]} {left}\\n".encode())  # one write: two ranks share the pipe
"""


def test_survivors_go_on_when_a_rank_dies(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run("run", "--ranks", "3", "--least", "2", str(script), "--say")
    assert done.exit_code == 0, done.stderr
    printed = capfd.readouterr().out.splitlines()  # the ranks write to the real stdout
    assert printed == ["--say [b'1', b'2']"] * 2
    assert "rank 0 was killed by signal 9; 2 others continue" in done.stderr


def test_too_few_good_ends_are_an_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; sys.exit(3 if os.environ['RANK'] == '1' else 0)")
    done = run("run", "--ranks", "2", "--least", "2", str(script))
    assert done.exit_code == 1
    assert "rank 1 ended with code 3" in done.stderr
    assert "0 others" not in done.stderr
    assert "1 of 2 ranks succeeded, 2 must" in done.stderr


def test_sigterm_ends_the_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "open(os.path.join(sys.argv[1], os.environ['RANK']), 'w').write(str(os.getpid()))\n"
        "time.sleep(120)\n"
    )

    def stop() -> None:
        while len(list(tmp_path.glob("[01]"))) < 2 or not all(p.read_text() for p in tmp_path.glob("[01]")):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    assert run("run", "--ranks", "2", str(script), str(tmp_path)).exit_code == 128 + signal.SIGTERM
    for path in tmp_path.glob("[01]"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


# ---- inspect


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A window with two payloads, one of them damaged, and its artifact."""
    folder = tmp_path_factory.mktemp("store")
    weights = {"w": torch.zeros(8, 8)}
    schema = PayloadSchema.of(weights, chunk=4, keep=4)
    for uid in (1, 2):
        update = {"w": torch.randn(8, 8, generator=torch.Generator().manual_seed(uid))}
        publish(open_object_store(folder), compress(update, schema), Label("demo", 5, uid, global_step=7))
    (folder / "payloads/demo/5/2.gather").write_bytes(b"not a payload" * 10)
    plan = GatherPlan(run="demo", window=5, schema=schema, primary=(1, 2), gather=GatherConfig(deadline=5.0))
    stores = {"default": open_object_store(folder)}
    run_window(plan, weights, OuterUpdate(schema), stores, artifacts=open_object_store(folder))
    return folder


def test_a_payload(store: Path) -> None:
    path = str(store / "payloads/demo/5/1.gather")
    found = json.loads(run("inspect", path, "--json").stdout)
    assert (found["kind"], found["run"], found["window"], found["uid"]) == ("payload", "demo", 5, 1)
    parameter = {"name": "w", "shape": [8, 8], "chunk": [4, 4], "keep": 4, "bins": 4, "dct": False}
    assert found["parameters"][0] == parameter
    assert "global_step      7" in run("inspect", path).stdout


def test_a_torch_file_of_templar(tmp_path: Path) -> None:
    schema = PayloadSchema.of({"w": torch.zeros(8, 8)}, chunk=4, keep=4, padding=False)
    made = compress({"w": torch.ones(8, 8)}, schema)
    path = tmp_path / "gradient-5-1-v2.pt"
    path.write_bytes(write_payload(made, Label("demo", 5, 1, global_step=7)))
    found = json.loads(run("inspect", str(path), "--json").stdout)
    assert (found["kind"], found["global_step"], found["metadata"]) == ("templar payload", 7, {"window": 5})
    assert found["keys"] == ["metadata", "widxs", "wquant_params", "wvals"]
    assert "templar payload" in run("inspect", path.as_uri()).stdout


def test_credentials_are_options_of_inspect() -> None:
    with FaultServer() as server:
        server.put("peers/payloads/demo/5/1.gather", b"x" * 100)
        place = f"s3://{server.bucket}/peers"
        options = ["--endpoint", server.endpoint, "--access-key-id", "a", "--secret-access-key", "b"]
        found = run("inspect", place, "--run", "demo", "--window", "5", "--json", *options)
        assert [each["bytes"] for each in json.loads(found.stdout)["payloads"]] == [100]


def test_an_artifact(store: Path) -> None:
    found = json.loads(run("inspect", str(store / "artifacts/demo/decisions/first.json"), "--json").stdout)
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


def test_places_and_files_that_are_nothing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content, more, said in (
        (None, (), "is not a file, a directory or the URL"),
        (None, ("--run", "x", "--window", "1"), "is not a file, a directory or the URL"),
        (b"MEGAGATH and nothing more", (), "file: "),
        (b"hello", (), "neither a payload, a torch file nor a manifest"),
    ):
        if content is not None:
            path.write_bytes(content)
        result = run("inspect", str(path), *more)
        assert result.exit_code == 1
        assert said in plain(result.stderr)
