"""What holds for every model: shapes, both parts learn, any form of batch, compile, the update modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import Ragged
from megalith.errors import InputError, UnknownNameError
from megalith.models import MODELS, EmbeddingConfig, Model, forward_batch
from megalith.nn import Layout, Slice
from tests.models.support import known_ids, loss_of, make, synthetic_reader, train
from tests.nn.support import Keyed

every_model = pytest.mark.parametrize("name", MODELS)


@every_model
def test_training_lowers_the_loss(name: str) -> None:
    reader = synthetic_reader(num_dense=3, num_batches=80)
    losses = torch.tensor(train(make(name, num_dense=3), reader))
    assert losses[-20:].mean() < losses[:5].mean() - 0.03


@every_model
def test_gradients_reach_both_parts(name: str) -> None:
    model, batch = make(name, num_dense=3), synthetic_reader(num_dense=3).batch(0)
    shards = model.embeddings.shards
    ids = {f.name: {f.table: batch.features[f.name].values.unique()} for f in model.embeddings.features}
    before = {feature: dict(shards.lookup(own).rows) for feature, own in ids.items()}
    loss_of(model, batch).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()) == (name != "embeddings.rows_anchor"), name
    for feature, own in ids.items():
        for table, rows in shards.lookup(own).rows.items():
            assert bool((rows != before[feature][table]).any(1).all()), feature


@every_model
def test_features_come_in_any_order_and_form(name: str) -> None:
    model, batch = make(name).eval(), synthetic_reader(9).batch(0)
    expected = forward_batch(model, batch)
    assert (expected.shape, expected.dtype) == ((9,), torch.float32)
    assert model(dict.fromkeys(batch.features, Ragged.from_lists([]))).shape == (0,)
    turned = dict(reversed(batch.features.items())) | {"unknown": torch.zeros(2)}
    assert torch.equal(model(turned), expected)
    columns = list(batch.features.values())
    values, lengths = (torch.cat(x) for x in ([c.values for c in columns], [c.lengths() for c in columns]))
    assert torch.equal(model(Keyed(list(batch.features), values, lengths)), expected)
    plain: dict[str, Tensor] = {
        feature: column.to_padded(pad=-1) if feature == "tags" else column.values
        for feature, column in batch.features.items()
    }
    assert torch.equal(model(plain), expected)
    tags = batch.features["tags"]
    nested = torch.nested.nested_tensor_from_jagged(tags.values, tags.row_splits)
    assert torch.equal(model({**batch.features, "tags": nested}), expected)


@every_model
def test_dense_values_must_fit(name: str) -> None:
    batch = synthetic_reader(4, num_dense=3).batch(0)
    assert make(name)(batch.features, dense=batch.dense).shape == (4,)  # a model without leaves them alone
    model = make(name, num_dense=2)
    for dense, got in (
        (None, "None"),
        (batch.dense, r"torch.float32 \[4, 3\]"),
        (torch.zeros(4, 2).int(), "torch.int32"),
    ):
        with pytest.raises(InputError, match=rf"dense must be floats \[4, 2\], got {got}"):
            model(batch.features, dense=dense)


@every_model
def test_evaluation_writes_nothing(name: str) -> None:
    model = make(name, dropout=0.5).eval()
    batch = synthetic_reader(8).batch(0)
    assert torch.equal(forward_batch(model, batch), forward_batch(model, batch))
    loss_of(model, batch).backward()
    assert not any(known_ids(model).values())


@every_model
def test_time_becomes_the_rows_time(name: str) -> None:
    model = make(name)
    loss_of(model, synthetic_reader(8, start_time=1234).batch(0)).backward()
    (chunk,) = model.embeddings.shards.scan("user")
    assert set(chunk.time.tolist()) == {1234}


@pytest.mark.parametrize(
    "name", ["din", *(pytest.param(name, marks=pytest.mark.soak) for name in MODELS if name != "din")]
)
def test_the_compiled_dense_part_trains_alike(name: str) -> None:
    reader = synthetic_reader(16, num_dense=2)
    batches = [reader.batch(0), synthetic_reader(24, num_dense=2).batch(1), reader.batch(2)]
    plain, compiled = make(name, num_dense=2), make(name, num_dense=2)
    compiled.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    assert train(compiled, batches) == pytest.approx(train(plain, batches), rel=1e-5)
    assert known_ids(compiled) == known_ids(plain)
    assert set(compiled.state_dict()) == set(plain.state_dict())


@every_model
def test_the_whole_model_compiles_around_the_lookup(name: str) -> None:
    batch = synthetic_reader(16).batch(0)
    model = make(name)
    whole: Any = torch.compile(model, backend="eager")
    torch.testing.assert_close(whole(batch.features), model(batch.features))
    whole(batch.features).sum().backward()
    assert known_ids(model)["user"] == set(batch.features["user"].values.tolist())


@every_model
def test_autocast_trains(name: str, bfloat16_matmul: None) -> None:
    model, batch = make(name, num_dense=2), synthetic_reader(16, num_dense=2).batch(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, batch)
    loss.backward()
    assert bool(loss.isfinite())
    assert known_ids(model)["user"]


@every_model
def test_zero_grad_drops_both_parts(name: str) -> None:
    model = make(name, config={"update": "step"})
    loss_of(model, synthetic_reader(8).batch(0)).backward()
    model.zero_grad()
    model.embeddings.step()
    assert not any(known_ids(model).values())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("dcn", {}, r"unknown model 'dcn' \(known: 'deepfm', 'dlrm', 'dcnv2', 'din'\)"),
        ("dlrm", {"num_dense": -1}, "DLRM: num_dense must be an integer >= 0"),
        ("dlrm", {"num_dense": True}, "DLRM: num_dense must be an integer >= 0"),
        ("dcnv2", {"num_cross": 0}, "DCNv2: num_cross must be an integer of at least 1, got 0"),
    ],
)
def test_wrong_names_and_numbers_are_named(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises((InputError, UnknownNameError), match=words):
        make(name, **options)


def test_a_model_may_take_a_list_of_slices_and_dense_values() -> None:
    class Slices(Model):
        def __init__(self) -> None:
            super().__init__(num_dense=2)
            config = EmbeddingConfig(["item"], dim=4)
            cuts = [Slice("item", 0, 2), Slice("item", 2, 4)]
            self.embeddings = config.collection([Layout("parts", cuts, "none")])

        def score(self, rows: dict[str, Any], dense: Tensor | None) -> Tensor:
            assert dense is not None
            return rows["parts"][0].sum(1) + rows["parts"][1].sum(1) + dense.sum(1)

    model = Slices()
    assert model({"item": torch.arange(3)}, torch.ones(3, 2)).shape == (3,)
    with pytest.raises(InputError, match=r"dense must be floats \[3, 2\]"):
        model({"item": torch.arange(3)}, torch.ones(2, 2))
