"""torch.distributed.checkpoint of a model with a collection, in one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from megalith import Adagrad, EmbeddingCollection, Feature, TableConfig
from megalith.nn import collection_state as state
from tests.nn.support import two_tables
from tests.table.support import assert_same_tables, whole


class Model(nn.Module):
    def __init__(self, engine: str = "cpu") -> None:
        super().__init__()
        self.embeddings = two_tables(engine)
        self.head = nn.Linear(6, 1)


def trained(engine: str = "cpu") -> Model:
    model = Model(engine)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    for step in range(3):
        ids = torch.arange(5) * (step + 1)
        out = model.embeddings({"user": ids, "item": -ids}, time=1000 + step)
        model.head(torch.cat([out["user"], out["item"]], 1)).sum().backward()
        optimizer.step()
    return model


def assert_same(actual: Model, expected: Model) -> None:
    assert actual.embeddings.global_step == expected.embeddings.global_step == 3
    for name, table in expected.embeddings.shards.local.items():
        assert_same_tables(whole(actual.embeddings.shards.local[name]), whole(table))
    assert torch.equal(actual.head.weight, expected.head.weight)


@pytest.fixture(autouse=True)
def without_process_group() -> Iterator[None]:
    """DCP warns that it assumes a single process, which is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def test_save_and_load_into_a_fresh_model_and_a_collection_alone(tmp_path: Path, engine: str) -> None:
    model, fresh, alone = trained(engine), Model(engine), Model(engine)
    assert isinstance(model.embeddings, Stateful)
    dcp.save({"model": model, "embeddings": model.embeddings}, checkpoint_id=tmp_path)
    dcp.load({"model": fresh}, checkpoint_id=tmp_path)
    assert_same(fresh, model)
    alone.head = model.head
    dcp.load({"embeddings": alone.embeddings}, checkpoint_id=tmp_path)
    assert_same(alone, model)


def test_load_into_a_model_that_has_other_rows(tmp_path: Path) -> None:
    model, other = trained(), trained()
    out = other.embeddings({"user": torch.arange(100, 200), "item": torch.arange(100, 200)})
    (out["user"].sum() + out["item"].sum()).backward()
    dcp.save({"model": model}, checkpoint_id=tmp_path)
    dcp.load({"model": other}, checkpoint_id=tmp_path)
    assert_same(other, model)


def test_tables_without_rows_empty_the_tables_that_load_them(tmp_path: Path) -> None:
    dcp.save({"model": Model()}, checkpoint_id=tmp_path)
    model = trained()
    dcp.load({"model": model}, checkpoint_id=tmp_path)
    assert [len(table) for table in model.embeddings.tables.values()] == [0, 0]
    assert model.embeddings.global_step == 0


def test_tables_with_another_dim_are_refused(tmp_path: Path) -> None:
    def with_dim(dim: int) -> EmbeddingCollection:
        return EmbeddingCollection([TableConfig("t", dim=dim, optimizer=Adagrad(0.1))], [Feature("a", "t")])

    saved, other = with_dim(4), with_dim(3)
    saved({"a": torch.arange(5)})["a"].sum().backward()
    dcp.save({"model": saved}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointException, match="Size mismatch between saved"):
        dcp.load({"model": other}, checkpoint_id=tmp_path)
    assert len(other.tables["t"]) == 0


def test_a_dcp_checkpoint_is_readable_without_megalith(tmp_path: Path) -> None:
    """The metadata and the tensors are torch's own types; dcp_to_torch_save makes a plain file of them."""
    model, fresh = trained(), Model()
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp")
    assert b"megalith" not in (tmp_path / "dcp" / ".metadata").read_bytes()
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "file")
    loaded = torch.load(tmp_path / "file", weights_only=True)
    assert all(type(value) is Tensor for value in loaded.values())
    fresh.load_state_dict(loaded)
    assert_same(fresh, model)


def test_async_save_keeps_what_was_there_when_it_began(tmp_path: Path) -> None:
    model, expected, fresh = trained(), trained(), Model()
    expected.load_state_dict(model.state_dict())
    staged = dcp.async_save({"model": model}, checkpoint_id=tmp_path, no_dist=True)
    out = model.embeddings({"user": torch.arange(3), "item": torch.arange(3)})
    out["user"].sum().backward()
    getattr(staged, "upload_completion", staged).result(timeout=60)
    dcp.load({"model": fresh}, checkpoint_id=tmp_path)
    assert_same(fresh, expected)


def test_torchs_model_state_dict_helpers(tmp_path: Path) -> None:
    model, fresh = trained(), Model()
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path)
    loaded = get_model_state_dict(fresh)
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_model_state_dict(fresh, loaded)
    assert_same(fresh, model)


def test_a_checkpoint_of_more_ranks_names_checkpoint_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(state, "world_size", lambda: 2)
        dcp.save({"model": trained()}, checkpoint_id=tmp_path)
    fresh = Model()
    before = fresh.head.weight.clone()
    with pytest.raises(
        CheckpointException, match=r"rank 0 of 1 \(at another world size: .*checkpoint\.load\)"
    ):
        dcp.load({"model": fresh}, checkpoint_id=tmp_path)
    assert torch.equal(fresh.head.weight, before)
    assert len(fresh.embeddings.shards.local["user"]) == 0
