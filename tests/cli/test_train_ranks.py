"""megalith train under torchrun: a rank that is killed and restarted, signals, flags about ranks."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from megalith import checkpoint
from megalith.errors import CheckpointError
from megalith.training import RunConfig
from tests.cli.support import megalith, plain, words
from tests.forked import Forked, torchrun

pytestmark = pytest.mark.usefixtures("restore_threads")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        '[data]\nkind = "synthetic"\nbatch_size = 13\noptions = { num_batches = 50 }\n'
        "[model]\ndim = 2\noptions = { hidden = [4] }\n"
        "[train]\nmax_steps = 80\nepochs = 10000\nmicro_batches = 2\nsave_every = 5\nthreads = 1\n"
        "timeout = 8.0\n"
    )
    return path


def launched(tmp_path: Path, *arguments: object, restarts: int = 0) -> Forked:
    """Two ranks of `megalith train` under the agent of torchrun, in a process of its own."""
    return Forked(tmp_path / "output", torchrun, 2, restarts, "train", *arguments)


def step(run: Path) -> int:
    try:
        saved: int = checkpoint.read_manifest(run / "checkpoint").progress["step"]
        return saved
    except CheckpointError:
        return 0


def test_a_killed_rank_is_restarted_and_the_run_ends_as_if_nothing_had_happened(
    tmp_path: Path, config: Path
) -> None:
    run = tmp_path / "run"
    arguments = ("--config", config, "--run-dir", run, "--resume")  # starts, and continues when restarted
    with launched(tmp_path, *arguments, restarts=1) as launcher:
        launcher.wait_for(lambda: step(run) >= 5)
        ranks = launcher.children
        assert len(ranks) == 2
        before = step(run)
        os.kill(ranks[1], signal.SIGKILL)
        assert launcher.end() == 0, launcher.output
    assert before < 80
    assert step(run) == 80
    assert len(re.findall("deepfm on synthetic clicks.*, 2 ranks", launcher.output)) == 2  # rank 0 of each

    words("train", "--config", config, "--run", tmp_path / "alone")
    found = checkpoint.diff(run / "checkpoint", tmp_path / "alone/checkpoint")
    assert [table.changed for table in found.tables.values()] == [0, 0, 0, 0]
    assert (found.dense, found.optimizer) == ({}, False)
    assert (run / "report.html").exists()


def test_a_signal_to_the_launcher_stops_all_ranks_at_one_step_and_saves(tmp_path: Path, config: Path) -> None:
    run = tmp_path / "run"
    flags = ("--config", config, "--run-dir", run, "--max-steps", 100000, "--save-every", 100000)
    with launched(tmp_path, *flags, "--log-every", 1, "--comm-metrics=user") as launcher:
        log = run / "metrics.jsonl"
        launcher.wait_for(lambda: log.exists() and log.read_text().count("\n") >= 3)
        launcher.end(signal.SIGTERM)
    printed = re.findall(r"stopped after step ([\d,]+)", launcher.output)
    assert len(printed) == 1, launcher.output
    stopped = step(run)
    assert stopped == int(printed[0].replace(",", "")) >= 3
    on_one_rank = words("train", "--run", run, "--resume", "--max-steps", stopped + 2)
    assert "--comm-metrics has no effect" in on_one_rank


def test_resume_with_a_config_starts_or_continues_and_names_keys_that_cannot_change(
    tmp_path: Path, config: Path
) -> None:
    run = tmp_path / "run"
    flags = ("train", "--run", run, "--config", config, "--resume")
    for steps in (3, 4):
        words(*flags, "--max-steps", steps)
        assert step(run) == steps
    error = megalith(*flags, "--dim", 3).stderr
    assert "model.dim is 2 in the resumed run and 3 now" in error
    error = megalith(*flags, "--dist-type", "hash_roundrobin").stderr
    assert "train.dist_type is 'roundrobin' in the resumed run" in error
    nowhere = megalith("train", "--run", tmp_path / "none", "--resume")
    assert "no complete checkpoint" in nowhere.stderr  # without a config there is nothing to start


@pytest.mark.parametrize(
    ("flags", "tables"),
    [(("--comm-metrics",), None), (("--comm-metrics=user,item",), ["user", "item"])],
)
def test_comm_metrics_may_name_tables(
    tmp_path: Path, config: Path, flags: tuple[str, ...], tables: list[str] | None
) -> None:
    words("train", "--config", config, "--run", tmp_path / "run", "--max-steps", 1, *flags)
    saved = checkpoint.read_manifest(tmp_path / "run/checkpoint").progress["config"]
    assert saved["train"]["comm_metrics"] is not None
    assert RunConfig.from_dict(saved).measured_tables == tables


def test_ranks_without_a_master_address_get_an_error_with_the_remedy(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "2")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    result = megalith("train", "--config", config, "--run", tmp_path / "run")
    assert "OpenMPI started 2 ranks, but MASTER_ADDR is not set" in plain(result.stderr)
