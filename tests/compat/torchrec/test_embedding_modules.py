"""TorchRec's collections on Megalith's tables, without TorchRec; tests/integrations has them with it."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

import megalith
from megalith import (
    SGD,
    Adagrad,
    Adam,
    Constant,
    MinCount,
    Normal,
    Ones,
    Optimizer,
    Ragged,
    RowWiseAdagrad,
    Uniform,
    Zeros,
    checkpoint,
)
from megalith.compat.torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)
from megalith.errors import InputError, UnknownNameError, UsageError


def bag(name: str, *features: str, dim: int = 2, **fields: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(10, dim, name, feature_names=list(features), **fields)


def keyed(rows: dict[str, list[list[int]]], weights: list[float] | None = None) -> KeyedJaggedTensor:
    lists = [ids for lists in rows.values() for ids in lists]
    return KeyedJaggedTensor.from_lengths_sync(
        list(rows),
        torch.tensor([id for ids in lists for id in ids]),
        torch.tensor([len(ids) for ids in lists]),
        None if weights is None else torch.tensor(weights),
    )


def filled(collection: Any) -> Any:
    """The row of id k of a table is [k, k, ...], or [10 k, ...] in the second table."""
    for factor, (name, config) in zip((1.0, 10.0), collection.configs.items(), strict=False):
        ids = torch.arange(10)
        rows = factor * ids[:, None].float().expand(10, config.dim)
        collection.shards.assign({name: (ids, rows.contiguous())})
    return collection


# ---- forward


def test_a_keyed_tensor_holds_the_pooled_rows_of_each_key() -> None:
    tables = [bag("t1", "f1"), bag("t2", "f2", dim=3, pooling=PoolingType.MEAN)]
    collection = filled(EmbeddingBagCollection(tables, optimizer=SGD(0.1)))

    found = collection(keyed({"f2": [[3], [4], [5, 6]], "f1": [[0, 1], [], [2]], "other": [[1], [1], [1]]}))

    assert isinstance(found, KeyedTensor)
    assert (found.keys(), found.length_per_key(), found.offset_per_key()) == (["f1", "f2"], [2, 3], [0, 2, 5])
    assert found["f1"].tolist() == [[1, 1], [0, 0], [2, 2]]
    assert found.to_dict()["f2"][:, 0].tolist() == [30, 40, 55]
    assert found.values().dtype == torch.float32
    assert collection.embedding_bag_configs() == tables
    assert not collection.is_weighted()


def test_a_key_of_two_tables_has_two_outputs() -> None:
    collection = filled(EmbeddingBagCollection([bag("t1", "f1"), bag("t2", "f1", "f2")], optimizer=SGD(0.1)))
    found = collection(keyed({"f1": [[1]], "f2": [[2]]}))
    assert found.keys() == ["f1@t1", "f1@t2", "f2"]
    assert found.values().tolist() == [[1, 1, 10, 10, 20, 20]]


def test_a_table_without_feature_names_is_its_own_key() -> None:
    collection = filled(EmbeddingBagCollection([bag("t1")], optimizer=SGD(0.1)))
    assert collection(keyed({"t1": [[4]]})).keys() == ["t1"]


def test_weights_count_only_if_asked_for() -> None:
    features = keyed({"f1": [[1, 2], [3]]}, [0.5, 2.0, -1.0])
    plain, weighted = (
        filled(EmbeddingBagCollection([bag("t1", "f1")], each, optimizer=SGD(0.1))) for each in (False, True)
    )
    assert plain(features).values()[:, 0].tolist() == [3, 3]
    assert weighted(features).values()[:, 0].tolist() == [4.5, -3]
    prepared = plain.prepare(features)
    assert plain(prepared).values()[:, 0].tolist() == [3, 3]
    with pytest.raises(
        InputError, match="feature 'f1' has no weights, but the collection has is_weighted=True"
    ):
        weighted(keyed({"f1": [[1]]}))
    with pytest.raises(InputError, match="weighted mean use SUM, and divide the weights"):
        EmbeddingBagCollection([bag("t1", "f1", pooling=PoolingType.MEAN)], True)


def test_keys_with_different_numbers_of_rows() -> None:
    features = KeyedJaggedTensor(
        ["f1", "f2"],
        torch.tensor([1, 2, 3, 4, 5]),
        lengths=torch.tensor([2, 1, 2]),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["f2", "f1"], torch.tensor([[0, 0, 0], [1, 0, 1]])),
    )
    collection = filled(EmbeddingBagCollection([bag("t1", "f1", "f2")], optimizer=SGD(1.0)))

    found = collection(features)
    assert found.values()[:, [0, 2]].tolist() == [[3, 9], [3, 9], [3, 9]]
    found.values().sum().backward()  # id 3 is in two examples, 4 and 5 are in three

    rows = collection.tables["t1"].lookup(torch.arange(6))[:, 0].tolist()
    assert rows == [0, 0, 1, 1, 1, 2]
    no_inverse = KeyedJaggedTensor(["f1", "f2"], *features_of(features), stride_per_key_per_rank=[[2], [1]])
    with pytest.raises(InputError, match=r"the keys have .'f1': 2, 'f2': 1. rows: pass the inverse_indices"):
        collection(no_inverse)

    unpooled = filled(
        EmbeddingCollection([EmbeddingConfig(10, 2, "t1", feature_names=["f1", "f2"])], optimizer=SGD(1.0))
    )
    rows_of = unpooled(no_inverse)
    assert [each[:, 0].tolist() for each in rows_of["f1"].to_dense()] == [[1, 2], [3]]
    assert [each[:, 0].tolist() for each in rows_of["f2"].to_dense()] == [[4, 5]]


def features_of(features: KeyedJaggedTensor) -> tuple[Tensor, None, Tensor]:
    return features.values(), None, features.lengths()


def test_a_jagged_tensor_for_each_key() -> None:
    tables = [EmbeddingConfig(10, 2, name, feature_names=["f1"]) for name in ("t1", "t2")]
    collection = filled(EmbeddingCollection(tables, None, True, optimizer=SGD(1.0)))

    found = collection(keyed({"f1": [[1, 2], [], [3]]}))

    assert list(found) == ["f1@t1", "f1@t2"]
    assert collection.embedding_names_by_table() == [["f1@t1"], ["f1@t2"]]
    assert isinstance(found["f1@t2"], JaggedTensor)
    assert found["f1@t2"].values()[:, 0].tolist() == [10, 20, 30]
    assert found["f1@t2"].lengths().tolist() == [2, 0, 1]
    assert found["f1@t2"].weights().tolist() == [1, 2, 3]
    assert (collection.embedding_dim(), collection.need_indices()) == (2, True)
    found["f1@t1"].values().sum().backward()
    assert collection.tables["t1"].lookup(torch.tensor([1, 3]))[:, 0].tolist() == [0, 2]
    assert len(collection.tables["t2"]) == 10
    assert collection.tables["t2"].lookup(torch.tensor([1]))[0, 0] == 10


class Head(nn.Module):
    def __init__(self, collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        sums: Tensor = self.collection(features).values().sum(1)
        return sums


def test_a_model_can_be_traced_by_fx() -> None:
    """As TorchRec's train pipelines do; the collection is one call of the graph."""
    model = Head(filled(EmbeddingBagCollection([bag("t1", "f1")], optimizer=SGD(1.0))))
    traced = torch.fx.symbolic_trace(model)
    traced(keyed({"f1": [[1, 2], [3]]})).sum().backward()
    assert traced(keyed({"f1": [[1, 2], [3]]})).tolist() == [2, 4]


def test_a_mapping_of_columns_is_a_batch_too() -> None:
    collection = filled(EmbeddingBagCollection([bag("t1", "f1")], optimizer=SGD(0.1)))
    found = collection({"f1": torch.tensor([4, 5]), "label": None})
    assert found["f1"][:, 0].tolist() == [4, 5]


# ---- configs


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Uniform(-(0.1**0.5), 0.1**0.5)),
        ({"weight_init_min": -1.0, "weight_init_max": 2.0}, Uniform(-1.0, 2.0)),
        ({"init_fn": partial(nn.init.uniform_, a=-0.5, b=0.25)}, Uniform(-0.5, 0.25)),
        ({"init_fn": nn.init.uniform_}, Uniform(0.0, 1.0)),
        ({"init_fn": partial(nn.init.normal_, std=0.5)}, Normal(0.0, 0.5)),
        ({"init_fn": partial(nn.init.constant_, val=3.0)}, Constant(3.0)),
        ({"init_fn": nn.init.zeros_}, Zeros()),
        ({"init_fn": nn.init.ones_}, Ones()),
    ],
)
def test_initial_rows(fields: dict[str, Any], expected: object) -> None:
    collection = EmbeddingBagCollection([bag("t1", "f1", **fields)], optimizer=SGD(0.1))
    assert collection.configs["t1"].segments[0].initializer == expected


def test_table_options_and_precision() -> None:
    options = {"t1": {"admission": MinCount(2), "initializer": Ones(), "optimizer": Adagrad(0.5)}}
    tables = [bag("t1", "f1", data_type="FP16"), bag("t2", "f2", data_type="BF16")]
    configs = EmbeddingBagCollection(tables, optimizer=SGD(0.1), table_options=options).configs
    assert configs["t1"].admission == MinCount(2)
    assert configs["t1"].segments[0].initializer == Ones()
    assert [c.segments[0].optimizer for c in configs.values()] == [Adagrad(0.5), SGD(0.1)]
    assert [c.precision for c in configs.values()] == ["float16", "bfloat16"]


class CountBasedEvictionPolicy:
    pass


WRONG_CONFIGS = {
    "init": (
        {"init_fn": lambda weight: weight.zero_()},
        "fills a whole weight, but a row must follow from its id",
    ),
    "xavier": (
        {"init_fn": nn.init.xavier_uniform_},
        "use uniform_, normal_, constant_, zeros_, ones_ of torch",
    ),
    "dtype": ({"data_type": "INT8"}, "data_type must be FP32, FP16, BF16, got 'INT8'"),
    "pooling": ({"pooling": PoolingType.NONE}, "pooling must be SUM, or MEAN"),
}


@pytest.mark.parametrize(("fields", "message"), WRONG_CONFIGS.values(), ids=WRONG_CONFIGS)
def test_values_without_counterpart_raise(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"table 't1': .*{message}"):
        EmbeddingBagCollection([bag("t1", "f1", **fields)], optimizer=SGD(0.1))


def test_other_wrong_arguments() -> None:
    policy = bag("t1", "f1")
    policy.virtual_table_eviction_policy = CountBasedEvictionPolicy()  # type: ignore[attr-defined]
    with pytest.raises(
        InputError, match=r'CountBasedEvictionPolicy is not converted: .*"eviction": megalith.TTL'
    ):
        EmbeddingBagCollection([policy], optimizer=SGD(0.1))
    with pytest.raises(
        InputError, match="tables must be a list of EmbeddingBagConfig or EmbeddingConfig, got 't1'"
    ):
        EmbeddingBagCollection(["t1"], optimizer=SGD(0.1))
    with pytest.raises(UnknownNameError, match=r"table_options are given for \['t3'\]"):
        EmbeddingBagCollection([bag("t1", "f1")], optimizer=SGD(0.1), table_options={"t3": {}})
    with pytest.raises(
        InputError, match=r"optimizer must be one of Megalith, such as megalith.Adagrad\(0.1\), got SG"
    ):
        EmbeddingBagCollection([bag("t1")], optimizer=torch.optim.SGD([torch.ones(1)]))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="several tables are named 't1'"):
        EmbeddingBagCollection([bag("t1"), bag("t1")], optimizer=SGD(0.1))
    two = [EmbeddingConfig(10, 2, "t1"), EmbeddingConfig(10, 3, "t2")]
    with pytest.raises(
        InputError, match="EmbeddingBagCollection needs an EmbeddingBagConfig, got EmbeddingConfig"
    ):
        EmbeddingBagCollection(two, optimizer=SGD(0.1))
    with pytest.raises(
        RuntimeError, match=r"embedding_bags.t1.weight is a weight of TorchRec: fill the tables with"
    ):
        EmbeddingBagCollection([bag("t1")], optimizer=SGD(0.1)).load_state_dict(
            {"embedding_bags.t1.weight": torch.ones(10, 2)}
        )
    with pytest.raises(InputError, match=r"all tables need the same embedding_dim, got .'t1': 2, 't2': 3"):
        EmbeddingCollection(two, optimizer=SGD(0.1))


# ---- optimizers


class TorchRecsRowWiseAdagrad(torch.optim.Adagrad):
    """A class with the name and the settings of torchrec.optim.rowwise_adagrad.RowWiseAdagrad."""


TorchRecsRowWiseAdagrad.__name__ = "RowWiseAdagrad"


@pytest.mark.parametrize(
    ("theirs", "settings", "ours"),
    [
        (torch.optim.SGD, {"lr": 0.5}, SGD(0.5)),
        (torch.optim.Adagrad, {"lr": 0.5}, Adagrad(0.5, eps=1e-10)),
        (
            torch.optim.Adagrad,
            {"lr": 0.5, "eps": 0.1, "initial_accumulator_value": 0.2},
            Adagrad(0.5, 0.2, 0.1),
        ),
        (TorchRecsRowWiseAdagrad, {"lr": 0.5}, RowWiseAdagrad(0.5, eps=1e-10)),
        (torch.optim.Adam, {"betas": (0.5, 0.75)}, Adam(1e-3, (0.5, 0.75))),
        (torch.optim.SparseAdam, {"lr": 0.5}, Adam(0.5)),
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else "",
)
def test_the_optimizer_of_apply_optimizer_in_backward(
    theirs: type[torch.optim.Optimizer], settings: dict[str, Any], ours: Optimizer
) -> None:
    collection = EmbeddingBagCollection([bag("t1", "f1"), bag("t2", "f2")])
    apply_optimizer_in_backward(theirs, collection.parameters(), settings)
    for _ in range(2):
        collection(keyed({"f1": [[1]], "f2": [[2]]})).values().sum().backward()
    assert [config.segments[0].optimizer for config in collection.configs.values()] == [ours, ours]
    assert collection.global_step == 2
    assert len(collection.tables["t1"]) == 1


def test_ddp_does_not_take_over_the_optimizer() -> None:
    """It makes the steps of parameters that have one, with an accelerator; those of the rows are ours."""
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    try:
        collection = EmbeddingBagCollection([bag("t1", "f1")])
        apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
        nn.parallel.DistributedDataParallel(collection)(keyed({"f1": [[1]]})).values().sum().backward()
    finally:
        dist.destroy_process_group()
    assert collection.configs["t1"].segments[0].optimizer == SGD(0.1)
    assert len(collection.tables["t1"]) == 1


def test_rows_without_an_optimizer_are_not_trained_silently() -> None:
    features = keyed({"f1": [[1]]})
    collection = EmbeddingBagCollection([bag("t1", "f1")])
    torch.optim.SGD(collection.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="its tables have no optimizer: pass optimizer=meg"):
        collection(features)
    with pytest.raises(UsageError, match="its tables have no optimizer"):
        collection.shards  # noqa: B018
    given = EmbeddingBagCollection([bag("t1", "f1")], optimizer=SGD(0.1))
    apply_optimizer_in_backward(torch.optim.SGD, given.parameters(), {"lr": 0.1})
    with pytest.raises(UsageError, match="its rows have an optimizer already: call apply_opt"):
        given(features)
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, r"SGD with .'momentum': 0.9. is not converted"),
        (torch.optim.RMSprop, {}, r"RMSprop is not converted \(known: SGD, Adagrad"),
    ]
    for theirs, settings, message in wrong:
        collection = EmbeddingBagCollection([bag("t1", "f1")])
        apply_optimizer_in_backward(theirs, collection.parameters(), settings)
        with pytest.raises(InputError, match=message):
            collection(features)


def test_it_is_a_collection_of_megalith(tmp_path: Any) -> None:
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection([bag("t1", "f1")], optimizer=Adagrad(0.5))})
    model["ebc"](keyed({"f1": [[1], [2**60]]})).values().sum().backward()
    checkpoint.save(model, tmp_path / "saved")
    fresh = nn.ModuleDict({"ebc": EmbeddingBagCollection([bag("t1", "f1")], optimizer=Adagrad(0.5))})
    checkpoint.load(fresh, tmp_path / "saved")
    features = keyed({"f1": [[1], [2**60], [5]]})
    assert torch.equal(fresh["ebc"](features).values(), model["ebc"](features).values())
    model["ebc"].requires_grad_(False)
    model["ebc"](features)
    assert len(model["ebc"].tables["t1"]) == 2


def test_torchrec_is_never_imported() -> None:
    pattern = re.compile(r"^\s*(import|from) torchrec\b|import_module\(.torchrec", re.MULTILINE)
    sources = Path(megalith.__file__).parent.rglob("*.py")
    assert [str(path) for path in sources if pattern.search(path.read_text())] == []


# ---- jagged tensors


def test_a_keyed_jagged_tensor_of_offsets() -> None:
    features = KeyedJaggedTensor.from_offsets_sync(
        ["f1", "f2"], torch.arange(8), torch.tensor([0, 2, 2, 3, 4, 5, 8])
    )
    assert (features.stride(), features.stride_per_key()) == (3, [3, 3])
    assert features.lengths().tolist() == [2, 0, 1, 1, 1, 3]
    assert features.offsets().tolist() == [0, 2, 2, 3, 4, 5, 8]
    assert features.weights_or_none() is None
    f2 = features.to_dict()["f2"]
    assert (f2.offsets().tolist(), f2.weights_or_none()) == ([0, 1, 2, 5], None)
    assert f2.to_padded_dense(2, -1).tolist() == [[3, -1], [4, -1], [5, 6]]
    with pytest.raises(InputError, match="it has no weights; pass weights="):
        features.weights()
    with pytest.raises(UnknownNameError, match=r"no key 'f3' \(known: 'f1', 'f2'\)"):
        features["f3"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lengths": torch.tensor([1, 1, 1])}, "3 lengths"),
        ({"lengths": torch.tensor([1, 1])}, "lengths add up to 2, but there are 3 values"),
        ({}, "pass either lengths or offsets"),
        ({"lengths": torch.tensor([2, 1]), "stride_per_key_per_rank": [[1], [2]]}, "but there are 2 lengths"),
        ({"lengths": torch.tensor([2, 1]), "weights": torch.ones(2)}, r"weights must have the shape \[3\]"),
    ],
)
def test_a_keyed_jagged_tensor_that_does_not_fit(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        KeyedJaggedTensor(["f1", "f2"], torch.tensor([1, 2, 3]), **given)


def test_a_core_collection_reads_different_numbers_of_rows() -> None:
    features = KeyedJaggedTensor(
        ["a", "b"], torch.arange(4), lengths=torch.tensor([1, 1, 1, 1]), stride_per_key_per_rank=[[3], [1]]
    )
    assert {key: column.to_lists() for key, column in Ragged.from_keyed(features).items()} == {
        "a": [[0], [1], [2]],
        "b": [[3]],
    }
