"""torch.distributed.checkpoint at two ranks: own rows come back; another world size needs the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from megalith import Adagrad, EmbeddingCollection, Feature, LocalShards, TableConfig
from megalith.integrations.dcp import TablesLoadPlanner
from megalith.shards import SyncShards
from tests.distributed.ranks import error_of, run_ranks
from tests.table.support import whole

ROWS = 10
Rows = dict[str, Any]


def new_model(spread: bool = False) -> nn.ModuleDict:
    """A table of its own for each rank, or one that is spread over the ranks."""
    torch.manual_seed(0)
    kind = SyncShards if spread else LocalShards
    shards = kind([TableConfig("t", dim=4, optimizer=Adagrad(0.5))])
    embeddings = EmbeddingCollection(shards, [Feature("a", "t")])
    return nn.ModuleDict({"embeddings": embeddings, "head": nn.Linear(4, 1)})


def trained(rank: int, spread: bool = False) -> nn.ModuleDict:
    """Rank r brings ids from 10 r on, r more of them than rank 0; with tables of their own, r more steps."""
    model = new_model(spread)
    ids = torch.arange(ROWS * rank, ROWS * (rank + 1) + rank)
    for step in range(2 if spread else 1 + rank):
        model["embeddings"]({"a": ids}, time=100 + step)["a"].square().sum().backward()
    with torch.no_grad():
        model["head"].weight.fill_(7.0)
    return model


def contents(model: nn.ModuleDict) -> Rows:
    embeddings = model["embeddings"]
    assert isinstance(embeddings, EmbeddingCollection)
    chunk = whole(embeddings.shards.local["t"])
    return {
        "step": embeddings.global_step,
        "ids": chunk.ids.tolist(),
        "rows": chunk.rows.tolist(),
        "sum": chunk.state["0/sum"].tolist(),
        "time": chunk.time.tolist(),
        "weight": plain(model["head"].weight),
    }


def plain(weight: Any) -> list[Any]:
    assert isinstance(weight, Tensor)
    return list(weight.tolist())


def load(model: nn.ModuleDict, path: Path) -> str:
    try:
        dcp.load({"model": model}, checkpoint_id=path)
    except CheckpointException as error:  # no Exception
        return str(error)
    return ""


def there_and_back(path: Path, spread: bool) -> tuple[Rows, Rows]:
    model, fresh = trained(dist.get_rank(), spread), new_model(spread)
    dcp.save({"model": model}, checkpoint_id=path)
    dcp.load({"model": fresh}, checkpoint_id=path)
    return contents(model), contents(fresh)


def on_a_rank(shared: Path, alone: Path) -> dict[str, Any]:
    own, spread = (there_and_back(shared / str(s), s) for s in (False, True))
    dcp.save(trained(dist.get_rank(), spread=True).state_dict(), checkpoint_id=shared / "flat")
    other = new_model()
    return {
        "own": own,
        "spread": spread,
        "told": load(other, alone),
        "rows": len(contents(other)["ids"]),
        "rerouted": rerouted(shared / "True"),
        "from one": resharded(alone),
        "full": [full_state(offload) for offload in (False, True)],
    }


def resharded(path: Path) -> Rows:
    """What a model of this number of ranks gets from the checkpoint of another one."""
    model = new_model(dist.is_initialized())
    dcp.load({"model": model}, checkpoint_id=path, planner=TablesLoadPlanner())
    return contents(model)


def full_state(offload: bool) -> str:
    """torch's recipe for a file of rank 0; with `offload` the other ranks get nothing."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
    model = trained(dist.get_rank(), spread=True)
    assert get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    return error_of(get_model_state_dict, model, options=options)


def rerouted(path: Path) -> str:
    """What is said where rows were routed otherwise."""
    shards = SyncShards([TableConfig("t", dim=4, optimizer=Adagrad(0.5))], router="hash_roundrobin")
    embeddings = EmbeddingCollection(shards, [Feature("a", "t")])
    model = nn.ModuleDict({"embeddings": embeddings, "head": nn.Linear(4, 1)})
    return error_of(dcp.load, {"model": model}, checkpoint_id=path)


Outcome = tuple[list[dict[str, Any]], Path]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    shared, alone = tmp_path_factory.mktemp("shared"), tmp_path_factory.mktemp("alone")
    dcp.save({"model": trained(0)}, checkpoint_id=alone, no_dist=True)
    return run_ranks(on_a_rank, shared, alone), shared


def test_each_rank_gets_its_own_rows_back(outcome: Outcome) -> None:
    for rank, results in enumerate(outcome[0]):
        saved, loaded = results["own"]
        assert loaded == saved
        assert loaded["ids"] == list(range(ROWS * rank, ROWS * (rank + 1) + rank))
        assert loaded["step"] == 1 + rank
        assert set(loaded["time"]) == {100 + rank}
        assert loaded["weight"] == [[7.0] * 4]


def test_rows_of_a_table_spread_over_ranks(outcome: Outcome) -> None:
    for rank, results in enumerate(outcome[0]):
        saved, loaded = results["spread"]
        assert loaded == saved
        assert loaded["ids"] == list(range(rank, 2 * ROWS + 1, 2))
        assert loaded["step"] == 2


def test_a_full_state_dict_of_rows_on_several_ranks_is_refused(outcome: Outcome) -> None:
    for results in outcome[0]:
        for said in results["full"]:
            assert said.startswith("UsageError: ")
            assert "full_state_dict=True) saves the state_dict of rank 0 alone" in said
            assert "megalith.checkpoint.save(model, path)" in said


def test_rows_that_were_routed_otherwise_are_refused(outcome: Outcome) -> None:
    for results in outcome[0]:
        assert "Router('hash_roundrobin', 2) assigns to other ranks" in results["rerouted"]
        assert "checkpoint.load with reroute=True" in results["rerouted"]


def test_one_ranks_checkpoint_at_two_ranks_names_checkpoint_load(outcome: Outcome) -> None:
    for results in outcome[0]:
        expected = "rank 1 of 2 (at another world size: checkpoint.save and checkpoint.load)"
        assert expected in results["told"]
        assert results["rows"] == 0


def test_two_ranks_checkpoint_in_one_process_names_checkpoint_load(outcome: Outcome) -> None:
    model = new_model()
    told = load(model, outcome[1] / "False")
    assert "rank 0 of 1 (at another world size: checkpoint.save and checkpoint.load)" in told
    assert contents(model)["ids"] == []


def test_the_planner_gives_each_rank_its_rows_of_one_process(outcome: Outcome) -> None:
    alone = contents(trained(0))
    for rank, results in enumerate(outcome[0]):
        found = results["from one"]
        assert sorted(found["ids"]) == [i for i in alone["ids"] if i % 2 == rank]
        for i, row, total in zip(found["ids"], found["rows"], found["sum"], strict=True):
            assert row == alone["rows"][alone["ids"].index(i)]
            assert total == alone["sum"][alone["ids"].index(i)]
        assert (found["step"], found["weight"]) == (1, [[7.0] * 4])


def test_the_planner_gives_one_process_the_rows_of_all_ranks(outcome: Outcome) -> None:
    found, parts = resharded(outcome[1] / "True"), [results["spread"][0] for results in outcome[0]]
    assert found["ids"] == list(range(2 * ROWS + 1))
    for part in parts:
        assert [found["rows"][i] for i in part["ids"]] == part["rows"]
        assert [found["time"][i] for i in part["ids"]] == part["time"]
    assert (found["step"], found["weight"]) == (2, [[7.0] * 4])


def test_the_planner_needs_the_state_under_a_key(outcome: Outcome) -> None:
    with pytest.raises(CheckpointException, match="load the state under a key"):
        dcp.load(new_model().state_dict(), checkpoint_id=outcome[1] / "flat", planner=TablesLoadPlanner())
