"""EmbeddingCollection: what goes in, what comes out, and what nobody writes."""

from __future__ import annotations

import doctest
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith import (
    SGD,
    EmbeddingCollection,
    Feature,
    FirstN,
    Layout,
    LocalShards,
    Mean,
    MinCount,
    Normal,
    Ragged,
    Slice,
    Sqrtn,
    Sum,
    TableConfig,
)
from megalith.errors import InputError, UnknownNameError
from megalith.ops import Pooling
from tests.nn.support import Keyed, assign, collection, column, contents, floats, ints, zeros

# ---- inputs


def torchrec_keyed(keys: list[str], values: Tensor, lengths: Tensor, weights: Tensor | None) -> Any:
    sparse = pytest.importorskip("torchrec.sparse.jagged_tensor", reason="torchrec is not installed")
    return sparse.KeyedJaggedTensor(keys, values, weights=weights, lengths=lengths)


def filled(*features: Feature, engine: str = "cpu", **options: Any) -> EmbeddingCollection:
    """Id n has the row [n, 10 n], n from 1 to 9."""
    made = collection(*features, dim=2, engine=engine, **options)
    assign(made, {n: [n, 10 * n] for n in range(1, 10)})
    return made


@pytest.mark.parametrize(
    "value",
    [
        column([1, 2], [], [3]),
        Ragged(ints(1, 2, 3).int(), torch.tensor([0, 2, 2, 3], dtype=torch.int32)),
        torch.tensor([[1, 2], [-1, -1], [3, -1]]),
        torch.tensor([[1, -1, 2], [-1, -1, -1], [-1, 3, -1]], dtype=torch.int32),  # pad anywhere
        torch.nested.nested_tensor([ints(1, 2), ints(), ints(3)], layout=torch.jagged),
    ],
    ids=["Ragged", "Ragged of int32", "padded", "padded int32", "nested"],
)
def test_a_column_may_come_as(engine: str, value: Any) -> None:
    out = filled(engine=engine)({"a": value})
    assert out["a"].tolist() == [[3, 30], [0, 0], [3, 30]]
    assert out["a"].dtype == torch.float32
    assert list(out) == ["a"]


def test_a_vector_is_an_id_each_and_has_no_padding(engine: str) -> None:
    made = filled(engine=engine)
    assign(made, {-1: [5, 5]})
    assert made({"a": ints(2, -1, 2)})["a"].tolist() == [[2, 20], [5, 5], [2, 20]]
    every_second = ints(1, 8, 2, 8, 3, 8)[::2]  # not contiguous
    assert made({"a": every_second})["a"].tolist() == [[1, 10], [2, 20], [3, 30]]


def test_each_feature_has_its_own_padding() -> None:
    made = filled(Feature("a", "t", pad=0), Feature("b", "t"))
    padded = torch.tensor([[1, 0], [2, 3]])
    assign(made, {0: [0.5, 0.5]})
    out = made({"a": padded, "b": padded})
    assert out["a"].tolist() == [[1, 10], [5, 50]]
    assert out["b"].tolist() == [[1.5, 10.5], [5, 50]]


@pytest.mark.parametrize("make", [Keyed, torchrec_keyed], ids=["duck", "torchrec"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_a_keyed_jagged_tensor(make: Callable[..., Any], weighted: bool) -> None:
    weights = floats(1, 0.5, 2, 9) if weighted else None
    keyed = make(["b", "a", "c"], ints(4, 2, 3, 9), torch.tensor([1, 0, 0, 2, 0, 1]), weights)
    made = filled(Feature("a", "t"), Feature("b", "t"))

    out = made(keyed)

    assert out["a"].tolist() == [[0, 0], [7, 70] if weighted else [5, 50]]
    assert out["b"].tolist() == [[4, 40], [0, 0]]


def test_other_keys_are_left_alone() -> None:
    batch = {"label": floats(1, 0), "a": ints(1, 2), "text": ["x", "y"]}
    assert filled()(batch)["a"].tolist() == [[1, 10], [2, 20]]


# ---- outputs


def test_combiners(engine: str) -> None:
    features = [
        Feature("sum", "t", Sum()),
        Feature("mean", "t", Mean()),
        Feature("sqrtn", "t", Sqrtn()),
        Feature("first", "t", FirstN(2)),
        Feature("rows", "t", None),
    ]
    made = filled(*features, engine=engine)
    one = column([1, 2, 3, 6], [], [4])

    out = made({f.name: one for f in features})

    assert out["sum"].tolist() == [[12, 120], [0, 0], [4, 40]]
    assert out["mean"].tolist() == [[3, 30], [0, 0], [4, 40]]
    assert out["sqrtn"].tolist() == [[6, 60], [0, 0], [4, 40]]
    assert out["first"].tolist() == [[[1, 10], [2, 20]], [[0, 0], [0, 0]], [[4, 40], [0, 0]]]
    assert isinstance(out["rows"], Ragged)
    assert out["rows"].to_lists() == [[[1, 10], [2, 20], [3, 30], [6, 60]], [], [[4, 40]]]


def test_weights_of_some_features(engine: str) -> None:
    features = [Feature(c.__name__.lower(), "t", c()) for c in (Sum, Mean, Sqrtn)]
    features += [Feature("first", "t", FirstN(1)), Feature("rows", "t", None), Feature("plain", "t", Mean())]
    made = filled(*features, engine=engine)
    weighted = column([1, 3], [2], [], weights=[[3.0, 4.0], [0.5], []])
    batch: dict[str, Any] = {f.name: weighted for f in features} | {"plain": column([1, 3], [2], [])}

    out = made(batch)

    assert out["sum"].tolist() == [[15, 150], [1, 10], [0, 0]]
    torch.testing.assert_close(out["mean"], floats([15 / 7, 150 / 7], [2, 20], [0, 0]))
    torch.testing.assert_close(out["sqrtn"], floats([3, 30], [2, 20], [0, 0]))
    assert out["first"].tolist() == [[[3, 30]], [[1, 10]], [[0, 0]]]
    assert out["plain"].tolist() == [[2, 20], [2, 20], [0, 0]]
    assert out["rows"].values.tolist() == [[1, 10], [3, 30], [2, 20]]  # unchanged, with the weights
    assert out["rows"].weights.tolist() == [3, 4, 0.5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_of_any_float_type(dtype: torch.dtype) -> None:
    out = filled()({"a": Ragged(ints(1, 2), ints(0, 2), torch.tensor([0.5, 2.0], dtype=dtype))})
    assert out["a"].tolist() == [[4.5, 45]]


def test_a_shared_feature_stands_for_the_whole_batch(engine: str) -> None:
    user = Feature("user", "t", Mean(), shared=True)
    made = filled(user, Feature("item", "t"), engine=engine)

    out = made({"user": column([1, 3]), "item": ints(4, 5, 6)})

    assert out["user"].tolist() == [[2, 20]] * 3
    (out["user"] * floats([1], [2], [4])).sum().backward()  # 7 in all, half for each id
    assert contents(made)[1] == [1 - 3.5, 10 - 3.5]
    assert contents(made)[3] == [3 - 3.5, 30 - 3.5]
    alone = filled(Feature("user", "t", FirstN(2), shared=True), engine=engine)
    assert alone({"user": ints(1)})["user"].tolist() == [[[1, 10], [0, 0]]]


def layouts_of(kind: str) -> list[Layout]:
    return [
        Layout("x", [Slice("a", 0, 1), Slice("b", 1, 2), Slice("a", 1, 2)], kind=kind),
        Layout("y", [Slice("user", 0, 2), Slice("b", 0, 2)], kind=kind),
    ]


@pytest.mark.parametrize(
    ("kind", "x", "y"),
    [
        ("concat", [[1, 70, 10], [2, 40, 20]], [[5, 50, 7, 70], [5, 50, 4, 40]]),
        (
            "stack",
            [[[1], [70], [10]], [[2], [40], [20]]],
            [[[5, 50], [7, 70]], [[5, 50], [4, 40]]],
        ),
        ("add", [[81], [62]], [[12, 120], [9, 90]]),
        ("none", [[[1], [2]], [[70], [40]], [[10], [20]]], [[[5, 50], [5, 50]], [[7, 70], [4, 40]]]),
    ],
)
def test_layouts(engine: str, kind: str, x: Any, y: Any) -> None:
    features = [Feature("a", "t"), Feature("b", "u"), Feature("user", "t", shared=True)]
    made = EmbeddingCollection(
        [zeros("t", 2), zeros("u", 2)], features, layouts=layouts_of(kind), engine=engine
    )
    for table in ("t", "u"):
        assign(made, {n: [n, 10 * n] for n in range(1, 10)}, table)

    out = made({"a": ints(1, 2), "b": column([3, 4], [4]), "user": ints(5)})

    as_lists = {
        name: [v.tolist() for v in value] if isinstance(value, list) else value.tolist()
        for name, value in out.items()
    }
    assert as_lists == {"x": x, "y": y}
    parts = [v for value in out.values() for v in (value if isinstance(value, list) else [value])]
    torch.cat([p.flatten() for p in parts]).sum().backward()
    # Every column of a was used once, column 0 of b once and column 1 twice, user once per example.
    assert contents(made)[1] == [0, 9]
    assert contents(made)[5] == [3, 48]
    assert contents(made, "u") == {
        n: [n - uses, 10 * n - 2 * uses] if (uses := {3: 1, 4: 2}.get(n, 0)) else [n, 10 * n]
        for n in range(1, 10)
    }


def test_an_empty_batch_and_a_batch_without_ids(engine: str) -> None:
    features = [
        Feature("a", "t", Mean()),
        Feature("first", "t", FirstN(3)),
        Feature("rows", "t", None),
    ]
    made = collection(*features, dim=2, engine=engine)
    for rows in (0, 2):
        empty = column(*[[] for _ in range(rows)])
        out = made({"a": empty, "first": empty, "rows": empty})
        assert out["a"].shape == (rows, 2)
        assert out["first"].shape == (rows, 3, 2)
        assert len(out["rows"]) == rows
        (out["a"].sum() + out["first"].sum() + out["rows"].values.sum()).backward()
    assert contents(made) == {}
    assert made.global_step == 2


def test_a_shared_feature_of_an_empty_batch(engine: str) -> None:
    made = collection(Feature("a", "t"), Feature("user", "t", shared=True), dim=2, engine=engine)
    out = made({"a": column(), "user": ints(1)})
    assert out["user"].shape == (0, 2)
    out["user"].sum().backward()
    assert contents(made) == {1: [0, 0]}


# ---- ids that take part


def test_cut_occurrences_are_not_created(engine: str) -> None:
    made = collection(Feature("a", "t", FirstN(2)), engine=engine)
    made({"a": column([1, 2, 3, 4], [5], [3])})["a"].sum().backward()
    assert contents(made) == {1: [-1], 2: [-1], 5: [-1], 3: [-1]}  # 3 by its last occurrence alone


@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_feature_without_a_gradient_writes_nothing(engine: str, update: str) -> None:
    tables = [zeros(admission=MinCount(1)), zeros("other"), zeros("frozen", trainable=False)]
    features = [Feature("a", "t"), Feature("b", "t"), Feature("c", "other"), Feature("d", "frozen")]
    made = EmbeddingCollection(tables, features, engine=engine, update=update)
    batch = {"a": ints(1), "b": ints(2), "c": ints(3), "d": ints(4)}
    made(batch)["a"].sum().backward()
    if update == "step":
        made.step()
    assert contents(made) == {1: [-1]}
    assert made.shards.stats()["t"].counters.pending == 0
    made(batch)["b"].sum().backward()
    made(batch)["c"].sum().backward()  # with update="step", another forward of the same step
    if update == "step":
        made.step()
    assert contents(made) == {1: [-1], 2: [-1]}
    assert contents(made, "other") == {3: [-1]}
    assert contents(made, "frozen") == {}


def test_a_feature_in_several_layouts_is_written_if_one_has_a_gradient() -> None:
    slices = {"whole": [Slice("a", 0, 2), Slice("b", 0, 2)], "half": [Slice("b", 0, 1)]}
    layouts = [Layout(name, parts, kind="concat") for name, parts in slices.items()]
    made = collection(Feature("a", "t"), Feature("b", "t"), dim=2, layouts=layouts)
    made({"a": ints(1), "b": ints(2)})["half"].sum().backward()
    assert contents(made) == {2: [-1, 0]}


def test_features_of_one_table_make_one_step_per_id(engine: str) -> None:
    made = collection(Feature("a", "t"), Feature("b", "t"), engine=engine)
    assign(made, {7: [3]})
    out = made({"a": ints(7, 1), "b": column([7, 7], [2])})
    assert out["a"].tolist() == [[3], [0]]
    assert out["b"].tolist() == [[6], [0]]
    (out["a"].sum() + 10 * out["b"].sum()).backward()
    assert contents(made) == {7: [3 - 21], 1: [-1], 2: [-10]}
    assert made.global_step == 1


# ---- nothing is written


@pytest.mark.parametrize("missing", ["initial", "zeros"])
def test_eval_never_writes_and_reads_what_missing_says(engine: str, missing: str) -> None:
    config = TableConfig("t", dim=4, optimizer=SGD(1.0), initializer=Normal(), missing=missing)
    made = EmbeddingCollection([config], [Feature("a", "t")], engine=engine, seed=3)
    initial = LocalShards(
        [TableConfig("t", dim=4, optimizer=SGD(1.0), initializer=Normal())], engine=engine, seed=3
    )
    assign(made, {1: [1, 2, 3, 4]})
    made.eval()

    out = made({"a": ints(1, 2)})["a"]

    assert not out.requires_grad
    assert out[0].tolist() == [1, 2, 3, 4]
    fresh = initial.lookup({"t": ints(2)}).rows["t"][0]
    assert torch.equal(out[1], fresh if missing == "initial" else torch.zeros(4))
    assert contents(made) == {1: [1, 2, 3, 4]}
    assert made.global_step == 0


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_written(without: Callable[[], Any]) -> None:
    made = collection()
    with without():
        assert not made({"a": ints(1)})["a"].requires_grad
    assert contents(made) == {}
    made({"a": ints(1)})["a"].sum().backward()  # and afterwards it trains
    assert contents(made) == {1: [-1]}


@pytest.mark.parametrize("update", ["backward", "step"])
def test_tables_that_are_not_trainable_are_read_only(engine: str, update: str) -> None:
    tables = [zeros("t"), zeros("frozen", trainable=False)]
    features = [Feature("a", "t"), Feature("b", "frozen")]
    made = EmbeddingCollection(tables, features, update=update, engine=engine)
    assign(made, {1: [5]}, "frozen")
    for _ in range(2):
        out = made({"a": ints(1), "b": ints(1)})
        assert out["b"].tolist() == [[5]]
        (out["a"] + out["b"]).sum().backward()
    if update == "step":
        made.step()
    assert contents(made) == {1: [-2]}
    assert contents(made, "frozen") == {1: [5]}
    alone = EmbeddingCollection([zeros(trainable=False)], [Feature("a", "t")])
    alone({"a": ints(1)})["a"].sum().backward()
    assert contents(alone) == {}


# ---- freezing


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("of", ["collection", "model", "parameters"])
def test_freezing_freezes_and_unfreezing_unfreezes(engine: str, update: str, of: str) -> None:
    made = collection(engine=engine, update=update, evict_every=40)
    head = nn.Linear(1, 1)
    model = nn.ModuleList([made, head])

    def set_frozen(frozen: bool) -> None:
        if of == "parameters":
            for parameter in model.parameters():
                parameter.requires_grad = not frozen
        else:
            (made if of == "collection" else model).requires_grad_(not frozen)
        head.requires_grad_(True)

    def step(*ids: int) -> None:
        head(made({"a": ints(*ids)})["a"]).sum().backward()
        if update == "step":
            made.step()

    step(1)
    before = contents(made)
    set_frozen(True)
    step(1, 2)
    step(1, 2)
    assert contents(made) == before
    assert made.global_step == 1
    assert not made({"a": ints(1)})["a"].requires_grad
    set_frozen(False)
    step(2)
    assert contents(made).keys() == {1, 2}
    assert made.global_step == 2


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "Adafactor", "LBFGS", "NAdam", "Rprop"])
def test_optimizers_and_clipping_that_meet_the_anchor_change_nothing(name: str) -> None:
    made, head = collection(), nn.Linear(1, 1)
    model = nn.ModuleList([made, head])
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = head(made({"a": ints(1, 2)})["a"]).square().sum()
        loss.backward()
        return loss

    for norm in (2.0, math.inf):
        closure()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=norm)
        optimizer.step(closure)
    optimizer.load_state_dict(optimizer.state_dict())
    assert [p.tolist() for p in made.parameters()] == [[0]]
    assert len(contents(made)) == 2


def test_a_model_on_the_meta_device_gets_its_anchor_with_its_weights() -> None:
    with torch.device("meta"):
        model = nn.ModuleList([collection(), nn.Linear(1, 1)])
    full = nn.ModuleList([collection(), nn.Linear(1, 1)]).state_dict()
    model.load_state_dict(full, assign=True)
    assert [p.is_meta for p in model.parameters()] == [False] * 3
    model.to_empty(device="cpu")
    for module in (model[0], model[1]):
        module.reset_parameters()  # type: ignore[operator]
    assert model[0].rows_anchor.tolist() == [0]  # type: ignore[union-attr,operator]


# ---- the module


def test_its_parameter_is_an_anchor_and_it_shows_what_it_is() -> None:
    made = filled(Feature("a", "t"), Feature("b", "t"), update="step")
    assert {name: p.tolist() for name, p in made.named_parameters()} == {"rows_anchor": [0]}
    assert list(made.buffers()) == []
    assert [f.name for f in made.features] == ["a", "b"]
    assert repr(made) == "EmbeddingCollection(features=['a', 'b'], tables=t (2), update='step')"


def test_outputs_may_be_changed_in_place() -> None:
    made = filled()
    out = made({"a": ints(1, 2)})["a"]
    out *= 3
    out.sum().backward()
    assert contents(made)[1] == [-2, 7]


def test_shards_are_used_as_they_are(engine: str) -> None:
    shards = LocalShards([zeros(), zeros("other")], engine=engine, seed=5)
    made = EmbeddingCollection(shards, [Feature("a", "t")])
    assert made.shards is shards
    made({"a": ints(1)})["a"].sum().backward()
    assert len(shards.local["t"]) == 1
    assert len(shards.local["other"]) == 0
    assert list(made.tables) == ["t", "other"]
    assert made.tables["t"] is shards.local["t"]


# ---- one id per example


def test_batches_of_one_id_per_example_share_a_pooling() -> None:
    tables = [zeros("t"), zeros("u")]
    features = [Feature("a", "t"), Feature("b", "t"), Feature("c", "u", Mean())]
    model = EmbeddingCollection(tables, features)

    def pooling(**columns: Any) -> Pooling:
        return model.prepare(columns).pooling

    first = pooling(a=ints(1, 2), b=ints(3, 4), c=ints(5, 6))

    assert pooling(a=ints(7, 8), b=ints(9, 9), c=ints(1, 1)) is first
    # Columns with row_splits of their own.
    assert pooling(a=column([1], [2]), b=column([3], [4]), c=column([5], [6])) is first
    # Three ids in three rows, but not one each.
    uneven = pooling(a=column([1, 2], [], [3]), b=ints(4, 5, 6), c=ints(7, 8, 9))
    assert uneven.bags["t"][0].offsets.tolist() == [0, 2, 2, 3]
    # Weights, and another number of examples.
    weighted = column([1], [2], weights=[[2.0], [3.0]])
    assert pooling(a=weighted, b=ints(3, 4), c=ints(5, 6)).bags["t"][0].weights is not None
    assert pooling(a=ints(1), b=ints(2), c=ints(3)).outputs == ((1, 1), (1, 1), (1, 1))


def test_columns_of_one_id_per_example_train_like_tensors(engine: str) -> None:
    found = []
    for make in (lambda *ids: ints(*ids), lambda *ids: column(*([i] for i in ids))):
        model = EmbeddingCollection(
            [zeros("t"), zeros("u")], [Feature("a", "t"), Feature("b", "t"), Feature("c", "u")], engine=engine
        )
        for step in range(3):
            out = model({"a": make(1, 2), "b": make(2, 3 + step), "c": make(5, 5)})
            (out["a"] + 2 * out["b"] + 3 * out["c"]).sum().backward()
        found.append((contents(model, "t"), contents(model, "u")))

    assert found[0] == found[1]
    assert found[0][0][2] == [-9.0]
    assert found[0][1] == {5: [-18.0]}


def test_shared_row_splits_that_were_changed_are_not_used_again() -> None:
    model = collection()
    splits = model.prepare({"a": ints(1, 2)}).columns["a"].row_splits
    splits[1] = 2

    assert model.prepare({"a": ints(1, 2)}).pooling.bags["t"][0].offsets.tolist() == [0, 1, 2]


# ---- the documentation


def test_the_example_in_the_docstring_prints_what_it_says() -> None:
    (example,) = (
        test for test in doctest.DocTestFinder(recurse=False).find(EmbeddingCollection, "EmbeddingCollection")
    )
    results = doctest.DocTestRunner().run(example)
    assert (results.attempted, results.failed) == (9, 0)


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_of_another_dtype_are_pooled_and_summed_in_float32(
    engine: str, dtype: torch.dtype, update: str
) -> None:
    options: dict[str, Any] = {"engine": engine, "update": update, "dim": 3}
    features = Feature("a", "t"), Feature("rows", "t", None)
    plain, other = collection(*features, **options), collection(*features, **options, output_dtype=dtype)
    rows = {n: [n / 7, 1 / (n + 1), 1000.5] for n in range(4)}
    batch = {"a": column([1, 2, 2], [], [3]), "rows": column([0], [1, 3], [2])}
    for made in (plain, other):
        assign(made, rows)
    expected, out = plain(batch), other(batch)
    assert out["a"].dtype is out["rows"].values.dtype is dtype
    assert torch.equal(out["a"], expected["a"].to(dtype))
    assert torch.equal(out["rows"].values, expected["rows"].values.to(dtype))
    grad = torch.tensor([[1.0, 3e-3, 257.0]], dtype=dtype).expand(3, 3)
    out["a"].backward(grad)
    expected["a"].backward(grad.float())
    if update == "step":
        for made in (plain, other):
            made.step()
    assert contents(other) == contents(plain) != rows
    assert other.eval()(batch)["a"].dtype is dtype


def test_an_output_dtype_is_a_float_type() -> None:
    with pytest.raises(InputError, match="output_dtype must be one of"):
        collection(Feature("a", "t"), output_dtype=torch.float64)


def test_a_mapping_with_defaults_does_not_stand_for_a_missing_feature() -> None:
    made = collection(Feature("a", "t"), Feature("b", "t"))
    made({"a": ints(1), "b": ints(2)})
    with pytest.raises(UnknownNameError, match="feature 'b' is not in the batch"):
        made(defaultdict(lambda: ints(9), a=ints(3)))
