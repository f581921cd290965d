"""import_torch: weights of nn.Embedding and nn.EmbeddingBag; ids are row numbers; torch.optim state."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from megalith import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    EmbeddingCollection,
    Feature,
    Mean,
    Ragged,
    Segment,
    TableConfig,
)
from megalith.checkpoint import importers as shared
from megalith.checkpoint.importers import import_torch
from megalith.errors import CheckpointError, InputError, UnknownNameError
from tests.compat.importing import collection, rows, state, times

PLAIN = TableConfig("user", dim=2, optimizer=SGD(0.1))
WEIGHT = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


def test_a_models_embeddings(engine: str) -> None:
    model = nn.ModuleDict({"users": nn.Embedding(5, 2), "tags": nn.EmbeddingBag(7, 3, mode="mean")})
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    made = collection(PLAIN, TableConfig("tag", dim=3, optimizer=SGD(0.1)), engine=engine)
    names = {"user": "users.weight", "tag": "tags.weight"}

    report = import_torch(made, torch.load(file, weights_only=True), tables=names, time=7)

    assert rows(made, "user") == dict(enumerate(model["users"].weight.tolist()))
    assert rows(made, "tag") == dict(enumerate(model["tags"].weight.tolist()))
    assert set(times(made, "user").values()) == {7}
    assert report.rows == report.kept == {"user": 5, "tag": 7}
    assert report.left_out == {}


def test_the_collection_computes_what_the_module_did() -> None:
    bag = nn.EmbeddingBag(20, 4, mode="mean")
    made = EmbeddingCollection([TableConfig("t", dim=4, optimizer=SGD(0.1))], [Feature("a", "t", Mean())])
    import_torch(made, bag.state_dict(), tables={"t": "weight"})
    column = Ragged.from_lists([[3, 1, 3], [], [19]])
    expected = bag(column.values, column.row_splits[:-1])
    torch.testing.assert_close(made.eval()({"a": column})["a"], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_other_float_types_and_bounded_chunks(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(shared, "CHUNK_BYTES", 100)
    weight = torch.arange(200.0).view(100, 2)
    made = collection(PLAIN)
    import_torch(made, {"w": weight.to(dtype).t().contiguous().t()}, tables={"user": "w"})
    assert rows(made, "user") == dict(enumerate(weight.tolist()))
    assert import_torch(collection(PLAIN), {"w": weight[:0]}, tables={"user": "w"}).kept == {"user": 0}


# ---- optimizer state


def train(optimizer: torch.optim.Optimizer, embedding: nn.Embedding, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        (embedding(torch.arange(3)) * (step + 1)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("theirs", "ours"), [(torch.optim.Adagrad, Adagrad), (torch.optim.Adam, Adam)], ids=["adagrad", "adam"]
)
def test_training_continues_where_torch_stopped(theirs: Any, ours: Any) -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(3, 2)
    optimizer = theirs(embedding.parameters(), lr=0.1)
    train(optimizer, embedding, 4)
    made = collection(TableConfig("user", dim=2, optimizer=ours(0.1)))
    given = {"user": optimizer.state[embedding.weight]}
    report = import_torch(made, embedding.state_dict(), tables={"user": "weight"}, optimizer_state=given)
    if ours is Adam:
        assert "global_step to" in report.left_out.pop("user: step")
    assert report.left_out == {}
    gradient = torch.ones(3, 2)
    made.shards.apply_gradients({"user": torch.arange(3)}, {"user": gradient}, step=4)
    embedding.weight.grad = gradient
    optimizer.step()
    got = torch.tensor(list(rows(made, "user").values()))
    torch.testing.assert_close(got, embedding.weight.detach(), rtol=1e-5, atol=1e-5)


def test_adams_moments_and_step() -> None:
    embedding = nn.Embedding(3, 2)
    optimizer = torch.optim.Adam(embedding.parameters(), lr=0.1)
    train(optimizer, embedding, 4)
    kept = optimizer.state[embedding.weight]
    by_row = Adam(0.1, bias_correction="row")
    segments = [Segment(1, optimizer=by_row), Segment(1, optimizer=by_row)]
    made = collection(TableConfig("user", segments=segments))
    import_torch(made, embedding.state_dict(), tables={"user": "weight"}, optimizer_state={"user": kept})
    assert state(made, "user", "0/count") == state(made, "user", "1/count") == {0: [4], 1: [4], 2: [4]}
    assert state(made, "user", "1/m") == dict(enumerate(kept["exp_avg"][:, 1:].tolist()))
    assert state(made, "user", "0/v") == dict(enumerate(kept["exp_avg_sq"][:, :1].tolist()))


def test_without_optimizer_state_it_starts_fresh_and_is_reported() -> None:
    made = collection(TableConfig("user", dim=2, optimizer=Adagrad(0.1, initial_accumulator_value=0.5)))
    report = import_torch(made, {"w": WEIGHT}, tables={"user": "w"})
    assert state(made, "user", "0/sum") == {i: [0.5, 0.5] for i in range(3)}
    assert report.left_out == {"user: optimizer state": "optimizer_state was not given, so it starts fresh"}


@pytest.mark.parametrize(
    ("optimizer", "given", "message"),
    [
        (Adam(0.1), {"sum": WEIGHT}, r"lacks \['exp_avg', 'exp_avg_sq'\]"),
        (SGD(0.1), {"momentum_buffer": WEIGHT}, r"has \['momentum_buffer'\], which sgd does not use"),
        (FTRL(0.1), {}, "torch.optim has no state that ftrl could continue"),
        (Adagrad(0.1), {"sum": WEIGHT[:2]}, r"'sum' is \[2, 2\], expected \[3, 2\]"),
    ],
    ids=["lacks", "too much", "none", "shape"],
)
def test_state_that_does_not_match(optimizer: Any, given: dict[str, Any], message: str) -> None:
    made = collection(TableConfig("user", dim=2, optimizer=optimizer))
    with pytest.raises(InputError, match=message):
        import_torch(made, {"w": WEIGHT}, tables={"user": "w"}, optimizer_state={"user": given})
    assert rows(made, "user") == {}


# ---- errors


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (None, "the state_dict has no key 'w' .its matrices: 'other'."),
        (WEIGHT[:, :1], r"state_dict\['w'\] is \[3, 1\], the table needs \[rows, 2\]"),
        (WEIGHT[0], r"is \[2\], the table needs"),
        (WEIGHT.long(), "must hold dense floats, got torch.int64"),
        (WEIGHT.to_sparse(), "must hold dense floats, got torch.float32, torch.sparse_coo"),
        (WEIGHT.to("meta"), "must hold dense floats, .* on meta"),
        ([1.0, 2.0], "is a list, not a plain tensor"),
    ],
)
def test_weights_that_do_not_match(weight: Any, message: str) -> None:
    saved = {"other": WEIGHT} | ({} if weight is None else {"w": weight})
    made = collection(PLAIN, TableConfig("item", dim=2, optimizer=SGD(0.1)))
    with pytest.raises(InputError, match=message):
        import_torch(made, saved, tables={"item": "other", "user": "w"})
    assert rows(made, "item") == {}


def test_rows_that_are_not_finite() -> None:
    weight = WEIGHT.clone()
    weight[1, 0] = torch.nan
    made = collection(PLAIN)
    words = r"state_dict\['w'\]: the row of id 1 \(table 'user'\) contains NaN"
    with pytest.raises(CheckpointError, match=words):
        import_torch(made, {"w": weight}, tables={"user": "w"})
    report = import_torch(made, {"w": weight}, tables={"user": "w"}, on_error="skip")
    assert sorted(rows(made, "user")) == [0, 2]
    assert report.left_out == {"user: 1 rows": "they contain NaN or Inf"}


def test_arguments() -> None:
    made = collection(PLAIN)
    with pytest.raises(InputError, match="tables must map tables to names in the source"):
        import_torch(made, {"w": WEIGHT}, tables=["user"])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="state_dict must map names to tensors, got Embedding"):
        import_torch(made, nn.Embedding(3, 2), tables={"user": "w"})  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="unknown table 'users'"):
        import_torch(made, {"w": WEIGHT}, tables={"users": "w"})
    with pytest.raises(InputError, match=r"optimizer_state is given for \['item'\], which are not in tables"):
        import_torch(made, {"w": WEIGHT}, tables={"user": "w"}, optimizer_state={"item": {}})


def test_rows_of_given_ids() -> None:
    made = collection(PLAIN)
    given = torch.tensor([70, -5, 2**62])
    import_torch(made, {"w": WEIGHT}, tables={"user": "w"}, ids={"user": given})
    assert rows(made, "user") == dict(zip(given.tolist(), WEIGHT.tolist(), strict=True))
    for ids, message in (
        ({"user": given[:2]}, r"import_torch: ids are \[2\], but the weight has 3 rows: one id per row"),
        ({"user": torch.tensor([1, 2, 1])}, "ids: 1 occurs twice: ids must be distinct"),
        ({"user": torch.ones(3)}, "import_torch: ids must be"),
        ({"item": given}, r"ids are given for \['item'\], which are not in tables"),
    ):
        with pytest.raises(InputError, match=message):
            import_torch(collection(PLAIN), {"w": WEIGHT}, tables={"user": "w"}, ids=ids)
