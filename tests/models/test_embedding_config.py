"""EmbeddingConfig: features to tables, shards of one's own, and what is refused."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch

from megalith import (
    TTL,
    Adagrad,
    Capacity,
    FirstN,
    FixedPoint,
    LocalShards,
    Mean,
    MinCount,
    OneBit,
    Ragged,
    Segment,
    Sum,
    TableConfig,
    Zeros,
)
from megalith.errors import InputError, UnknownNameError
from megalith.models import DCNv2, DeepFM, EmbeddingConfig, TableSettings


@pytest.mark.parametrize(
    ("config", "features"),
    [
        (EmbeddingConfig(["user", "tags"], dim=3), [("user", "user", Mean()), ("tags", "tags", Mean())]),
        (
            EmbeddingConfig({"item": Sum(), "similar": Mean()}, dim=3, tables={"similar": "item"}),
            [("item", "item", Sum()), ("similar", "item", Mean())],
        ),
    ],
)
def test_features_have_a_table_each_and_the_mean_unless_the_config_says_more(
    config: EmbeddingConfig, features: list[Any]
) -> None:
    embeddings = DCNv2(config).embeddings
    assert [(f.name, f.table, f.combiner) for f in embeddings.features] == features
    assert {name: each.dim for name, each in embeddings.configs.items()} == {t: 3 for _, t, _ in features}


def test_policies_of_all_tables_and_of_one() -> None:
    config = EmbeddingConfig(
        ["user", "item"],
        admission=MinCount(2),
        eviction=TTL(60),
        settings={"item": TableSettings(eviction=[Capacity(9)])},
        evict_every=30,
    )
    tables = DCNv2(config).embeddings.configs
    assert (tables["user"].admission, tables["user"].eviction) == (MinCount(2), (TTL(60),))
    assert (tables["item"].admission, tables["item"].eviction) == (None, (Capacity(9),))


def test_precision_of_all_tables_and_of_one() -> None:
    config = EmbeddingConfig(
        ["user", "item", "shop", "city"],
        precision="bfloat16",
        rounding="stochastic",
        settings={
            "item": TableSettings(precision="float32"),
            "shop": TableSettings(precision=["float16", "float16"], rounding="nearest"),
            "city": TableSettings(rounding="nearest"),
        },
    )
    tables = DeepFM(config).embeddings.configs
    found = {name: [(s.precision, s.rounding) for s in table.segments] for name, table in tables.items()}
    wide = ("float32", "nearest")
    assert found == {
        "user": [wide, ("bfloat16", "stochastic")],  # the first-order weight stays float32
        "item": [wide, wide],
        "shop": [("float16", "nearest"), ("float16", "nearest")],
        "city": [wide, ("bfloat16", "nearest")],
    }


def test_serving_precisions_of_tables() -> None:
    bits, byte = OneBit(0.5), FixedPoint(2.0)
    config = EmbeddingConfig(
        ["user", "item", "shop"],
        serving=byte,
        settings={
            "item": TableSettings(serving=bits, precision="bfloat16"),
            "shop": TableSettings(serving=["float16", None]),
        },
    )
    tables = DeepFM(config).embeddings.configs
    found = {name: [s.serving for s in table.segments] for name, table in tables.items()}
    assert found == {"user": [None, byte], "item": [None, bits], "shop": ["float16", None]}


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"precision": ["float16"]}, "table 'user': precision must be one value, or one for each of the 2"),
        ({"precision": "float8"}, "precision must be one of float32"),
        ({"precision": "float32", "rounding": "stochastic"}, "table 'user': float32 is not rounded"),
        ({"serving": [FixedPoint(2.0)]}, "table 'user': serving must be one value, or one for each of the 2"),
        ({"serving": "int8"}, "serving must be FixedPoint"),
    ],
)
def test_wrong_settings_of_a_table_are_named(own: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        DeepFM(EmbeddingConfig(["user"], settings={"user": TableSettings(**own)}))


def test_wrong_policies_are_named() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown table 'usr' \(known: 'user'\)"):
        DCNv2(EmbeddingConfig(["user"], settings={"usr": TableSettings()}))
    with pytest.raises(InputError, match="settings of table 'user'"):
        EmbeddingConfig(["user"], settings={"user": TTL(5)})  # type: ignore[dict-item]
    shards = LocalShards([TableConfig("user", dim=4, optimizer=Adagrad(0.1))])
    with pytest.raises(InputError, match="pass them in their configs"):
        DCNv2(EmbeddingConfig(["user"], dim=4, shards=shards, eviction=TTL(5)))


def test_shards_may_be_made_or_given() -> None:
    made = DeepFM(EmbeddingConfig(["a"], dim=2, shards=partial(LocalShards, engine="reference", seed=7)))
    assert made.embeddings.shards.local["a"].engine == "reference"
    row = [Segment(1, optimizer=Adagrad(), initializer=Zeros()), Segment(2, optimizer=Adagrad())]
    shards = LocalShards(
        [TableConfig("a", segments=row), TableConfig("other", dim=1, optimizer=Adagrad())], seed=7
    )
    given = DeepFM(EmbeddingConfig(["a"], dim=2, shards=shards))
    assert given.embeddings.shards is shards
    ids = {"a": Ragged.from_lists([[1], [2]])}
    assert torch.equal(given.embeddings(ids)["factors"], made.embeddings(ids)["factors"])


def test_shards_must_have_the_models_rows() -> None:
    shards = LocalShards([TableConfig("a", dim=3, optimizer=Adagrad())])
    with pytest.raises(
        InputError, match=r"table 'a' has segments with dims \[3\], but the model needs \[1, 2\]"
    ):
        DeepFM(EmbeddingConfig(["a"], dim=2, shards=shards))
    with pytest.raises(UnknownNameError, match=r"unknown table 'b' \(known: 'a'"):
        DCNv2(EmbeddingConfig(["b"], dim=3, shards=shards))
    with pytest.raises(InputError, match="engine and seed cannot be combined with Shards"):
        DCNv2(EmbeddingConfig(["a"], dim=3, shards=shards, seed=1))


@pytest.mark.parametrize(
    ("features", "options", "message"),
    [
        ("user", {}, "features must be a list of names, got 'user'"),
        ([], {}, "features must be a list of names"),
        (["a", "a"], {}, "names of features must differ"),
        ({"a": FirstN(3)}, {}, r"'a': combiner must be Sum\(\), Mean\(\) or Sqrtn\(\), got FirstN\(3\)"),
        ({"a": None}, {}, "feature 'a': combiner must be"),
        (["a"], {"tables": {"b": "t"}}, "tables: unknown feature 'b'"),
        (["a"], {"dim": 0}, "dim must be a positive integer"),
        (["a"], {"optimizer": "adam"}, "optimizer must be an Optimizer"),
    ],
)
def test_what_is_refused(features: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((InputError, UnknownNameError), match=message):
        EmbeddingConfig(features, **options)


def test_a_table_with_almost_the_name_of_another_is_reported() -> None:
    with pytest.warns(UserWarning, match=r"feature 'bought' is the only one of table 'itme'.* mean 'item'\?"):
        EmbeddingConfig(["item", "bought"], tables={"bought": "itme"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EmbeddingConfig(["item", "bought", "seen"], tables={"bought": "itme", "seen": "itme"})
        EmbeddingConfig(["item", "bought"], tables={"bought": "item"})
        EmbeddingConfig(["a", "b"], tables={"a": "item1", "b": "item2"})
        EmbeddingConfig(["item", "bought"], tables={"bought": "history"})


def test_features_of_one_table_have_ids_from_one_source() -> None:
    sources = {"a": "integer", "b": "xxhash64"}
    config = EmbeddingConfig(["a", "b", "c"], tables={"b": "a", "c": "a"}, id_sources=sources)
    with pytest.raises(InputError, match=r"'a' and 'b' share table 'a', but the ids of 'a' are integer"):
        DeepFM(config)
    DeepFM(EmbeddingConfig(["a", "b", "c"], tables={"c": "a"}, id_sources=sources))
