"""When a collection chooses its shards, in one process; tests/distributed has the same with ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

from megalith import SGD, EmbeddingCollection, Feature, LocalShards, TableConfig, checkpoint
from megalith.errors import UsageError

TABLE = TableConfig("t", dim=2, optimizer=SGD(1.0))
BATCH = {"a": torch.tensor([1, 2])}


def new() -> EmbeddingCollection:
    return EmbeddingCollection([TABLE], [Feature("a", "t")])


def test_the_first_forwards_of_several_threads_use_the_same_tables() -> None:
    threads = 4
    for _ in range(20):
        made, start = new(), Barrier(threads)

        def train(number: int, made: EmbeddingCollection = made, start: Barrier = start) -> None:
            start.wait(60)
            for size in (1, 2, 3):  # of other sizes, so that what is kept of a batch changes
                made({"a": torch.arange(size) + 10 * number})["a"].sum().backward()

        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(train, number) for number in range(threads)]:
                done.result(60)
        ids = torch.arange(threads)[:, None] * 10 + torch.arange(3)
        steps = torch.tensor([3.0, 2.0, 1.0]).repeat(threads)  # id k of a thread is in 3 - k of its forwards
        rows = LocalShards([TABLE]).lookup({"t": ids.flatten()}).rows["t"]
        for _ in range(3):
            rows -= (steps > 0)[:, None].float()
            steps -= 1
        assert made.shards.stats()["t"].rows == ids.numel()
        assert torch.equal(made.shards.lookup({"t": ids.flatten()}).rows["t"], rows)


USES: dict[str, Callable[[EmbeddingCollection, Path], Any]] = {
    "forward": lambda made, path: made(BATCH),
    "start": lambda made, path: made.start(BATCH),
    "prepare": lambda made, path: made.prepare(BATCH),
    "preparer": lambda made, path: made.preparer(),
    "shards": lambda made, path: made.shards,
    "tables": lambda made, path: made.tables,
    "load_state_dict": lambda made, path: made.load_state_dict(new().state_dict()),
    "checkpoint.save": lambda made, path: checkpoint.save(made, path / "new"),
    "checkpoint.load": lambda made, path: checkpoint.load(made, path / "saved"),
}
OTHER_CALLS: dict[str, Callable[[EmbeddingCollection], Any]] = {
    "repr": repr,
    "configs": lambda made: made.configs["t"],
    "features": lambda made: made.features,
    "state_dict": lambda made: made.state_dict(),
    "parameters": lambda made: list(made.parameters()),
    "to": lambda made: made.to("cpu"),
    "modes": lambda made: made.eval().train().zero_grad(),
}


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of torchrun, before init_process_group."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.parametrize("use", USES)
def test_under_a_launcher_the_first_use_names_init_process_group(
    use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(EmbeddingCollection(LocalShards([TABLE]), [Feature("a", "t")]), tmp_path / "saved")
    made = new()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"WORLD_SIZE is 2.*init_process_group.*LocalShards\(tables\)"):
        USES[use](made, tmp_path)


@pytest.mark.parametrize("call", OTHER_CALLS)
@pytest.mark.usefixtures("two_processes")
def test_other_calls_do_not_choose(call: str) -> None:
    OTHER_CALLS[call](new())


@pytest.mark.usefixtures("two_processes")
def test_given_local_shards_are_not_questioned() -> None:
    made = EmbeddingCollection(LocalShards([TABLE]), [Feature("a", "t")])
    made(BATCH)["a"].sum().backward()
    assert len(made.tables["t"]) == 2


@pytest.mark.parametrize(
    ("variables", "raises"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE is 4"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "SLURM_STEP_NUM_TASKS"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, None),  # the script of a job, not a step
        ({"WORLD_SIZE": "1", "RANK": "0"}, None),
        ({"WORLD_SIZE": "2"}, None),  # without a rank it is not from a launcher
    ],
)
def test_launchers(variables: dict[str, str], raises: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if raises is None:
        assert isinstance(new().shards, LocalShards)
    else:
        with pytest.raises(UsageError, match=raises):
            new().shards  # noqa: B018
