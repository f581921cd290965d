"""RunConfig: TOML files, flags, and their errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalith import TTL, Adam, Capacity, DelayCompensated, FixedPoint, MinCount, MinNorm, OneBit
from megalith.errors import InputError, UnknownNameError
from megalith.models import TableSettings
from megalith.table.optimizers import OPTIMIZERS
from megalith.training import RunConfig
from megalith.training.config import TABLE_OPTIMIZERS
from megalith.training.model import model_for

TOML = """
[data]
kind = "parquet"
path = "clicks/*.parquet"
batch_size = 64
[data.schema]
label = "click"
features = { user = "user_id", item = { column = "item_id", slot = 3 } }

[model]
name = "dlrm"
dim = 4
tables = { user = "people" }
options = { bottom = [8] }

[train]
table_optimizer = "adam"
table_lr = 1
"""


def test_flags_override_the_values_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TOML)
    config = RunConfig.from_toml(tmp_path / "run.toml").changed(train_epochs=3, model_dim=8, data_path=None)

    assert config.data.kind == "parquet"
    assert config.data.path == "clicks/*.parquet"
    assert config.data.schema["features"]["item"] == {"column": "item_id", "slot": 3}
    assert (config.model.name, config.model.dim, config.model.tables) == ("dlrm", 8, {"user": "people"})
    assert config.train.epochs == 3
    assert config.table_optimizer == Adam(1.0)
    assert RunConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("name", TABLE_OPTIMIZERS)
def test_optimizers_of_tables_are_those_of_the_table_package(name: str) -> None:
    train: dict[str, Any] = {"table_optimizer": name, "table_lr": 0.5}
    if name == "delay_compensated":
        train["table_options"] = "base=adam, eps=0.1, strength=0.2"
        assert RunConfig.from_dict({"train": train}).table_optimizer == DelayCompensated(
            Adam(0.5, eps=0.1), 0.2
        )
        return
    assert RunConfig.from_dict({"train": train}).table_optimizer == OPTIMIZERS[name](lr=0.5)
    assert {"adagrad", "adam", "ftrl", "momentum", "rowwise_adagrad", "sgd"} <= set(TABLE_OPTIMIZERS)


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        ({"trane": {}}, UnknownNameError, r"\[trane\].*known: data, model, train"),
        ({"train": {"epoch": 1}}, UnknownNameError, r"train\.epoch.*known: epochs"),
        ({"train": {"epochs": "2"}}, InputError, r"train\.epochs must be int"),
        ({"train": {"epochs": True}}, InputError, r"train\.epochs must be int"),
        ({"train": {"epochs": 0}}, InputError, "at least 1"),
        ({"train": {"threads": 0}}, InputError, r"train\.threads must be at least 1, got 0"),
        ({"train": {"threads": 100_000}}, InputError, r"train\.threads must be at most 1024, got 100000"),
        ({"data": {"batch_size": 0}}, InputError, r"data\.batch_size must be at least 1"),
        ({"model": {"dim": -1}}, InputError, r"model\.dim must be at least 1"),
        ({"train": {"lr": float("nan")}}, InputError, r"train\.lr must be a finite number"),
        ({"train": {"table_lr": float("inf")}}, InputError, r"train\.table_lr must be a finite number"),
        (
            {"train": {"save_interval": 0}},
            InputError,
            r"train\.save_interval must be a finite number above 0",
        ),
        ({"train": {"seed": -1}}, InputError, r"train\.seed must be from 0"),
        ({"train": {"lr": "fast"}}, InputError, r"train\.lr must be float"),
        ({"train": {"max_steps": 1.5}}, InputError, r"train\.max_steps must be int or nothing"),
        ({"train": {"table_optimizer": "adagrat"}}, InputError, r"table_optimizer must be one of .*adagrad"),
        (
            {"train": {"table_options": "beta=1"}},
            UnknownNameError,
            r"adagrad has no setting 'beta' \(known:.*eps",
        ),
        ({"train": {"table_options": "lr=1"}}, InputError, r"set train\.table_lr"),
        ({"train": {"table_options": "eps"}}, InputError, r"table_options must be SETTING=VALUE"),
        ({"train": {"table_options": "eps=1, eps=2"}}, InputError, r"table_options has eps twice"),
        ({"train": {"table_options": "eps=x"}}, InputError, r"table_options: .*eps"),
        ({"train": {"table_optimizer": "delay_compensated"}}, InputError, r"must have base=NAME"),
        (
            {"tables": {"user": {"trainable": 1}}},
            InputError,
            r"tables\.user\.trainable must be true or false",
        ),
        ({"data": {"kind": "tsv"}}, InputError, r"data\.kind must be one of movielens"),
        ({"data": {"on_error": "ignore"}}, InputError, "raise, skip"),
        ({"data": []}, InputError, r"\[data\] must be a section"),
        ({"model": {"features": "user"}}, InputError, r"model\.features must be list"),
    ],
)
def test_wrong_keys_and_values_are_named(data: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        RunConfig.from_dict(data)


def test_an_invalid_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.toml cannot be read"):
        RunConfig.from_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[data")
    with pytest.raises(InputError, match=r"bad\.toml is not valid TOML"):
        RunConfig.from_toml(tmp_path / "bad.toml")
    (tmp_path / "typo.toml").write_text("[data]\nkindd = 1")
    with pytest.raises(UnknownNameError, match=r"typo\.toml: config: unknown key data\.kindd"):
        RunConfig.from_toml(tmp_path / "typo.toml")


POLICIES = """
[train]
admission = "min_count=2"
eviction = "ttl=100, capacity=50, capacity.score=lfu"

[tables.user]
admission = ""
[tables.user.eviction.ttl]
seconds = 9
per_slot = { 3 = 4.5 }
[tables.item]
eviction = { capacity = 7, min_norm = { norm = 0.5 } }
"""


def test_policies_of_tables(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(POLICIES)
    config = RunConfig.from_toml(tmp_path / "run.toml")

    shared = TableSettings(MinCount(2), (TTL(100), Capacity(50, score="lfu")), "float32", "nearest")
    assert config.shared_settings == shared
    assert config.table_settings == {
        "user": TableSettings(None, (TTL(9, per_slot={3: 4.5}),)),
        "item": TableSettings(MinCount(2), (Capacity(7), MinNorm(0.5))),
    }
    assert config.evict_every == 1000
    assert RunConfig.from_dict(config.to_dict()) == config
    assert config.changed(train_epochs=2).table_settings == config.table_settings
    assert RunConfig.from_dict({"train": {"eviction": "capacity=5"}}).evict_every is None


def test_precision_of_tables() -> None:
    train = {"precision": "bfloat16", "rounding": "stochastic"}
    tables = {"user": {"precision": "float32"}, "item": {"precision": ["float32", "float16"]}}
    config = RunConfig.from_dict({"train": train, "tables": tables})

    assert config.shared_settings == TableSettings(None, (), "bfloat16", "stochastic")
    assert config.table_settings["user"] == TableSettings(None, (), "float32", None)
    assert config.table_settings["item"] == TableSettings(None, (), ["float32", "float16"], None)
    assert RunConfig.from_dict(config.to_dict()) == config
    assert config.changes_to(config.changed(train_rounding="nearest")) == {"rounding": "nearest"}


def test_serving_precision_of_tables() -> None:
    tables = {
        "user": {"serving": "one_bit=0.5, one_bit.step_size=10"},
        "item": {"serving": ["float32", {"fixed_point": {"range": 4}}]},
        "shop": {},
    }
    config = RunConfig.from_dict({"train": {"serving": "fixed_point=2"}, "tables": tables})

    assert config.shared_settings.serving == FixedPoint(2.0)
    found = {name: settings.serving for name, settings in config.table_settings.items()}
    assert found == {"user": OneBit(0.5, step_size=10), "item": ["float32", FixedPoint(4.0)], "shop": None}
    assert RunConfig.from_dict(config.to_dict()) == config
    assert config.changes_to(config.changed(train_serving="float16")) == {"serving": "float16"}


def test_policies_may_change_when_a_run_is_resumed() -> None:
    saved = RunConfig.from_dict({"tables": {"user": {"eviction": "ttl=5"}}})
    wanted = RunConfig.from_dict({"train": {"admission": "probability=0.5"}, "tables": {"user": {}}})

    changes = saved.changes_to(wanted)

    assert changes == {"admission": "probability=0.5", "tables": {"user": {}}}
    assert saved.resumed(changes) == wanted
    assert "tables" not in saved.changes_to(saved.changed(train_epochs=2))


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (
            {"train": {"precision": "float8"}},
            InputError,
            r"train\.precision must be one of float32, float16, bfloat16, got 'float8'",
        ),
        (
            {"tables": {"user": {"precision": ["float16", 3]}}},
            InputError,
            r"tables\.user\.precision must be one of float32, .*got 3",
        ),
        ({"tables": {"user": {"precision": []}}}, InputError, r"tables\.user\.precision must be one of"),
        ({"train": {"rounding": "up"}}, InputError, r"train\.rounding must be one of nearest, stochastic"),
        ({"train": {"rounding": "stochastic"}}, InputError, r"train\.rounding .* float32 is not rounded"),
        (
            {"train": {"serving": "int8"}},
            InputError,
            r"train\.serving must be one of float32, .*fixed_point=VALUE",
        ),
        ({"train": {"serving": "r8=1"}}, UnknownNameError, r"train\.serving: unknown precision 'r8'"),
        (
            {"train": {"serving": "fixed_point=-1"}},
            InputError,
            r"train\.serving\.fixed_point: .*range must be",
        ),
        ({"train": {"serving": "fixed_point=1, one_bit=1"}}, InputError, r"train\.serving has 2 precisions"),
        ({"tables": {"t": {"serving": {"one_bit": {"size": 3}}}}}, UnknownNameError, r"unknown key 'size'"),
        (
            {
                "train": {"precision": "float16"},
                "tables": {"t": {"precision": "float32", "rounding": "stochastic"}},
            },
            InputError,
            r"tables\.t\.rounding .* float32 is not rounded",
        ),
        (
            {"train": {"eviction": "tl=5"}},
            UnknownNameError,
            r"train\.eviction: unknown policy 'tl' .*ttl, min_norm",
        ),
        ({"train": {"admission": "ttl=5"}}, UnknownNameError, "known: min_count, probability"),
        ({"train": {"eviction": "ttl"}}, InputError, r"train\.eviction must be POLICY=VALUE"),
        ({"train": {"eviction": "ttl=5,ttl=6"}}, InputError, "has ttl twice"),
        (
            {"train": {"eviction": "ttl=5,ttl.seconds=6"}},
            InputError,
            r"eviction\.ttl\.seconds is given twice",
        ),
        ({"train": {"eviction": "ttl=soon"}}, InputError, r"eviction\.ttl: TTL: seconds must be .*'soon'"),
        ({"train": {"eviction": 5}}, InputError, r"train\.eviction must be str or nothing"),
        ({"train": {"evict_every": 0}}, InputError, r"train\.evict_every must be at least 1"),
        ({"train": {"admission": "min_count=2,probability=0.5"}}, InputError, "at most one"),
        ({"train": {"eviction": "capacity.score=lru"}}, InputError, "Capacity: pass rows or max_bytes"),
        ({"tables": []}, InputError, r"\[tables\] must be a section"),
        ({"tables": {"user": 5}}, InputError, r"\[tables\.user\] must be a section"),
        ({"tables": {"user": {"evict": 5}}}, UnknownNameError, r"tables\.user\.evict .*admission, eviction"),
        ({"tables": {"user": {"eviction": [1]}}}, InputError, r"tables\.user\.eviction must be text"),
        (
            {"tables": {"user": {"eviction": {"ttl": {"secs": 5}}}}},
            UnknownNameError,
            r"tables\.user\.eviction\.ttl: unknown key 'secs' \(known: seconds, per_slot\)",
        ),
        (
            {"tables": {"user": {"eviction": {"ttl": {"per_slot": {"3": 5}}}}}},
            InputError,
            r"eviction\.ttl needs seconds",
        ),
        (
            {"tables": {"user": {"eviction": {"ttl": {"seconds": 5, "per_slot": {"x": 5}}}}}},
            InputError,
            r"eviction\.ttl: TTL: a slot is an integer .*'x'",
        ),
    ],
)
def test_wrong_policies_are_named(data: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        RunConfig.from_dict(data)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"servers": -1}, r"train\.servers must be at least 1, or 0 to keep the tables"),
        ({"servers": 1, "workers": 0}, r"train\.workers must be at least 1, got 0"),
        ({"workers": 2}, r"workers need parameter servers: add --servers 1, or start ranks with torchrun"),
        ({"servers": 1, "server_mode": "fast"}, r"train\.server_mode must be one of async, sync"),
        ({"servers": 1, "server_log": "some"}, r"train\.server_log must be one of none, async, sync"),
        ({"servers": 1, "staleness": -1}, r"train\.staleness must be 0 or more"),
        ({"servers": 1, "staleness": 1, "server_mode": "sync"}, "staleness is for train.server_mode = async"),
        ({"servers": 1, "micro_batches": 2}, r"micro_batches needs train\.server_mode = sync"),
        (
            {"servers": 1, "workers": 3, "micro_batches": 4, "server_mode": "sync"},
            "4, which is not a multiple of 3 workers",
        ),
    ],
)
def test_wrong_keys_of_servers_are_named(train: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        RunConfig.from_dict({"train": train})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"train": {"device": "cuda", "device_bytes": -1}}, r"train\.device_bytes must be .* 0 for no limit"),
        ({"train": {"device_bytes": 1 << 30}}, "train.device is cpu: add --device cuda, or set it to 0"),
        ({"train": {"device_bytes": "1"}}, r"train\.device_bytes must be int"),
        ({"train": {"deterministic": False}}, r"\(--fast\) is for tables on a GPU, .* or --deterministic"),
        ({"tables": {"user": {"device_bytes": 5}}}, r"tables\.user\.device_bytes limits GPU memory"),
        ({"tables": {"user": {"device_bytes": True}}}, r"tables\.user\.device_bytes must be an integer"),
        ({"tables": {"user": {"deterministic": False}}}, r"tables\.user\.deterministic = false"),
        ({"tables": {"user": {"deterministic": 1}}}, r"tables\.user\.deterministic must be true or false"),
    ],
)
def test_wrong_settings_of_gpu_memory_are_named(data: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        RunConfig.from_dict(data)


def test_settings_of_gpu_memory_reach_the_tables() -> None:
    config = RunConfig.from_dict(
        {
            "train": {"device": "auto", "device_bytes": 4096, "deterministic": False},
            "tables": {"user": {"device_bytes": 0, "deterministic": True}},
        }
    )
    model = model_for(config, ["user", "item"], 0)
    found = {
        name: (own.device_bytes, own.deterministic) for name, own in model.embeddings.shards.configs.items()
    }
    assert found == {"user": (None, True), "item": (4096, False)}
    changed = config.changed(train_device="cpu", train_device_bytes=0, train_deterministic=True)
    assert config.changes_to(changed) == {"device": "cpu", "device_bytes": 0, "deterministic": True}
