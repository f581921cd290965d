"""Tables of the cuda engine with rows in both kinds of memory: checkpoints, deltas, exports, pushed rows.

The kernels run in Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from megalith import Adagrad, EmbeddingCollection, Feature, Segment, TableConfig, checkpoint
from megalith.compat.monolith import DummySyncServer
from megalith.serving import Publisher, Servable, export_model
from megalith.serving.discovery import StaticDiscovery
from megalith.table import Chunk
from tests.table.engines.programs import everything

SEGMENTS = [Segment(2, optimizer=Adagrad(0.1)), Segment(2, optimizer=Adagrad(0.2), precision="float16")]


class Model(nn.Module):
    def __init__(self, engine: str, device_bytes: int | None) -> None:
        super().__init__()
        config = TableConfig("t", segments=SEGMENTS, device_bytes=device_bytes)
        self.embeddings = EmbeddingCollection([config], [Feature("x", "t")], engine=engine)
        self.head = nn.Linear(4, 1)

    def forward(self, columns: dict[str, Tensor]) -> Tensor:
        score: Tensor = self.head(self.embeddings(columns)["x"])[:, 0]
        return score

    def train_on(self, first: int) -> None:
        ids = torch.arange(first, first + 24) - 12
        self({"x": ids}).square().sum().backward()

    def rows(self) -> Chunk:
        return everything(self.embeddings.tables["t"])


def assert_same(got: Chunk, expected: Chunk) -> None:
    assert torch.equal(got.ids, expected.ids)
    assert torch.equal(got.time, expected.time)
    assert torch.equal(got.rows.view(torch.int32), expected.rows.view(torch.int32))
    assert all(torch.equal(got.state[key], expected.state[key]) for key in expected.state)


def test_a_checkpoint_and_a_delta_load_with_another_budget_and_engine(tmp_path: Path) -> None:
    model = Model("cuda", 1024)
    model.train_on(0)
    checkpoint.save(model, tmp_path / "save")
    model.train_on(20)
    model.embeddings.tables["t"].remove(torch.tensor([-12, 10]))
    checkpoint.save_delta(model, tmp_path / "save")
    use = model.embeddings.tables["t"].stats().host_tier
    assert use is not None
    assert min(use.device_rows, use.host_rows) > 0

    for other in (Model("reference", None), Model("cuda", 4096)):
        checkpoint.load(other, tmp_path / "save")
        assert_same(other.rows(), model.rows())


def test_an_export_and_pushed_rows_have_the_bits_of_the_table(tmp_path: Path) -> None:
    model = Model("cuda", 1024)
    model.train_on(0)
    columns = {"x": torch.arange(-12, 12)}
    servable = Servable(export_model(model, tmp_path, name="m", version=1) / "1")
    with torch.no_grad():
        (answer,) = servable.predict(columns).values()
        torch.testing.assert_close(answer, model.eval()(columns), rtol=1e-6, atol=1e-6)

    shards = model.embeddings.shards
    with DummySyncServer() as server:
        servers = StaticDiscovery([server.address])
        with Publisher(shards, servers, model_name="m", interval=10.0, protocol="monolith") as publisher:
            model.train().train_on(20)
            publisher.step()
            assert publisher.flush(timeout=60)
        inputs = [request.inputs for request in server.requests]
    ids = torch.cat([torch.as_tensor(each["t_id"]) for each in inputs])
    assert sorted(ids.tolist()) == list(range(8, 32))
    sent = torch.cat([torch.as_tensor(each["t_value"]).view(-1, 4) for each in inputs])
    assert torch.equal(sent, shards.local["t"].lookup(ids))
