"""RunConfig: TOML files, flags, and their errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalith import (
    FTRL,
    TTL,
    Adagrad,
    Adam,
    Capacity,
    Constant,
    DelayCompensated,
    FixedPoint,
    MinCount,
    MinNorm,
    Momentum,
    Normal,
    OneBit,
    Uniform,
    Zeros,
)
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


def test_optimizers_of_tables_are_those_of_the_table_package() -> None:
    for name in TABLE_OPTIMIZERS:
        train: dict[str, Any] = {"table_optimizer": name, "table_lr": 0.5}
        expected = None if name == "delay_compensated" else OPTIMIZERS[name](lr=0.5)
        if expected is None:
            train["table_options"] = "base=adam, eps=0.1, strength=0.2"
            expected = DelayCompensated(Adam(0.5, eps=0.1), 0.2)
        assert RunConfig.from_dict({"train": train}).table_optimizer == expected
    assert {"adagrad", "adam", "ftrl", "momentum", "rowwise_adagrad", "sgd"} <= set(TABLE_OPTIMIZERS)


WRONG_TRAIN: list[tuple[dict[str, Any], str]] = [
    ({"epoch": 1}, r"train\.epoch.*known: epochs"),
    ({"epochs": "2"}, r"train\.epochs must be int"),
    ({"epochs": True}, r"train\.epochs must be int"),
    ({"epochs": 0}, r"train\.epochs must be at least 1, got 0"),
    ({"threads": 100_000}, r"train\.threads must be at most 1024, got 100000"),
    ({"lr": "fast"}, r"train\.lr must be float"),
    ({"lr": float("nan")}, r"train\.lr must be a finite number"),
    ({"save_interval": 0}, r"train\.save_interval must be a finite number above 0"),
    ({"seed": -1}, r"train\.seed must be from 0"),
    ({"max_steps": 1.5}, r"train\.max_steps must be int or nothing"),
    ({"table_optimizer": "adagrat"}, r"table_optimizer must be one of .*adagrad"),
    ({"table_optimizer": "delay_compensated"}, r"must have base=NAME"),
    ({"table_options": "beta=1"}, r"adagrad has no setting 'beta' \(known:.*eps"),
    ({"table_options": "lr=1"}, r"set train\.table_lr"),
    ({"table_options": "eps"}, r"table_options must be SETTING=VALUE"),
    ({"table_options": "eps=1, eps=2"}, r"table_options has eps twice"),
    ({"table_options": "eps=x"}, r"table_options: .*eps"),
    # Precisions and policies.
    ({"precision": "float8"}, r"train\.precision must be one of float32, float16, bfloat16, got 'float8'"),
    ({"initializer": "normal.mean"}, r"train\.initializer: unknown initializer 'normal\.mean'"),
    ({"missing": "none"}, r"train\.missing must be one of initial, zeros"),
    ({"rounding": "up"}, r"train\.rounding must be one of nearest, stochastic"),
    ({"rounding": "stochastic"}, r"train\.rounding .* float32 is not rounded"),
    ({"serving": "int8"}, r"train\.serving must be one of float32, .*fixed_point=VALUE"),
    ({"serving": "r8=1"}, r"train\.serving: unknown precision 'r8'"),
    ({"serving": "fixed_point=-1"}, r"train\.serving\.fixed_point: .*range must be"),
    ({"serving": "fixed_point=1, one_bit=1"}, r"train\.serving has 2 precisions"),
    ({"eviction": "tl=5"}, r"train\.eviction: unknown policy 'tl' .*ttl, min_norm"),
    ({"admission": "ttl=5"}, "known: min_count, probability"),
    ({"eviction": "ttl"}, r"train\.eviction must be POLICY=VALUE"),
    ({"eviction": "ttl=5,ttl=6"}, "has ttl twice"),
    ({"eviction": "ttl=5,ttl.seconds=6"}, r"eviction\.ttl\.seconds is given twice"),
    ({"eviction": "ttl=soon"}, r"eviction\.ttl: TTL: seconds must be .*'soon'"),
    ({"admission": "min_count=2,probability=0.5"}, "at most one"),
    ({"eviction": "capacity.score=lru"}, "Capacity: pass rows or max_bytes"),
    # Ranks.
    ({"dist_type": "continuous"}, r"continuous requires train\.block_size \(--block-size\)"),
    ({"block_size": 10}, "no other mode allows it; got roundrobin and 10"),
    ({"dist_type": "modulo"}, r"train\.dist_type must be one of continuous, roundrobin, hash_roundrobin"),
    ({"micro_batches": 3}, r"train\.micro_batches must be a power of two, got 3"),
    ({"wire": "int4"}, r"train\.wire: wire must be one precision"),
    ({"wire": "rows=int8,grads=int8"}, "grads: float32, float16, bfloat16"),
    ({"timeout": 0}, r"train\.timeout must be a finite number above 0"),
    # Parameter servers.
    ({"servers": -1}, r"train\.servers must be at least 1, or 0 to keep the tables"),
    ({"workers": 2}, r"workers need parameter servers: add --servers 1, or start ranks with torchrun"),
    ({"servers": 1, "server_mode": "fast"}, r"train\.server_mode must be one of async, sync"),
    ({"servers": 1, "server_log": "some"}, r"train\.server_log must be one of none, async, sync"),
    ({"servers": 1, "staleness": -1}, r"train\.staleness must be 0 or more"),
    ({"servers": 1, "staleness": 1, "server_mode": "sync"}, "staleness is for train.server_mode = async"),
    ({"servers": 1, "micro_batches": 2}, r"micro_batches needs train\.server_mode = sync"),
    ({"servers": 1, "workers": 3, "micro_batches": 4, "server_mode": "sync"}, "not a multiple of 3 workers"),
    # Memory of a GPU.
    ({"device": "cuda", "device_bytes": -1}, r"train\.device_bytes must be .* 0 for no limit"),
    ({"device_bytes": 1 << 30}, "train.device is cpu: add --device cuda, or set it to 0"),
    ({"deterministic": False}, r"\(--fast\) is for tables on a GPU, .* or --deterministic"),
]
WRONG_TABLE: list[tuple[Any, str]] = [
    (5, r"\[tables\.t\] must be a section"),
    ({"evict": 5}, r"tables\.t\.evict .*admission, eviction"),
    ({"trainable": 1}, r"tables\.t\.trainable must be true or false"),
    ({"precision": ["float16", 3]}, r"tables\.t\.precision must be one of float32, .*got 3"),
    ({"precision": []}, r"tables\.t\.precision must be one of"),
    ({"precision": "float32", "rounding": "stochastic"}, r"tables\.t\.rounding .* float32 is not rounded"),
    ({"serving": {"one_bit": {"size": 3}}}, r"unknown key 'size'"),
    ({"eviction": [1]}, r"tables\.t\.eviction must be text"),
    ({"eviction": {"ttl": {"secs": 5}}}, r"t\.eviction\.ttl: unknown key 'secs' \(known: seconds, per_s"),
    ({"eviction": {"ttl": {"per_slot": {"3": 5}}}}, r"eviction\.ttl needs seconds"),
    ({"eviction": {"ttl": {"seconds": 5, "per_slot": {"x": 5}}}}, r"ttl: TTL: a slot is an integer .*'x'"),
    ({"device_bytes": 5}, r"tables\.t\.device_bytes limits GPU memory"),
    ({"device_bytes": True}, r"tables\.t\.device_bytes must be an integer"),
    ({"deterministic": False}, r"tables\.t\.deterministic = false"),
    ({"optimizer": "adm"}, r"tables\.t\.optimizer: unknown optimizer 'adm' \(known: sgd, "),
    ({"optimizer": "adam=fast"}, r"tables\.t\.optimizer\.adam: .*lr"),
    ({"optimizer": {"adam": {"epsilon": 1}}}, r"unknown key 'epsilon' \(known: lr, betas, eps"),
    ({"optimizer": "adam=1, sgd=1"}, "has 2 optimizers, but a table has at most one"),
    ({"initializer": "gauss"}, r"tables\.t\.initializer: unknown initializer 'gauss' \(known: zeros, ones"),
    ({"initializer": "zeros=1"}, r"tables\.t\.initializer\.zeros has no argument, got 1"),
    ({"initializer": ["normal.std=-1"]}, r"initializer\.normal: Normal: std must not be negative"),
    ({"missing": "none"}, r"tables\.t\.missing must be one of initial, zeros"),
    ({"dist_type": "continuous"}, r"tables\.t\.dist_type must be one of roundrobin, hash_roundrobin"),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"trane": {}}, r"\[trane\].*known: data, model, train"),
    ({"data": []}, r"\[data\] must be a section"),
    ({"data": {"kind": "tsv"}}, r"data\.kind must be one of movielens"),
    ({"data": {"on_error": "ignore"}}, "raise, skip"),
    ({"model": {"features": "user"}}, r"model\.features must be list"),
    ({"tables": []}, r"\[tables\] must be a section"),
    *(({"train": train}, words) for train, words in WRONG_TRAIN),
    *(({"train": {"precision": "float16"}, "tables": {"t": t}}, words) for t, words in WRONG_TABLE),
]


@pytest.mark.parametrize(("data", "words"), WRONG)
def test_wrong_keys_and_values_are_named(data: dict[str, Any], words: str) -> None:
    with pytest.raises((InputError, UnknownNameError), match=words):
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


def test_precisions_of_tables() -> None:
    tables = {
        "user": {"precision": "float32", "serving": "one_bit=0.5, one_bit.step_size=10"},
        "item": {"precision": ["float32", "float16"], "serving": ["float32", {"fixed_point": {"range": 4}}]},
        "shop": {},
    }
    train = {"precision": "bfloat16", "rounding": "stochastic", "serving": "fixed_point=2"}
    config = RunConfig.from_dict({"train": train, "tables": tables})

    bits, bytes_ = OneBit(0.5, step_size=10), FixedPoint(4.0)
    assert config.shared_settings == TableSettings(None, (), "bfloat16", "stochastic", FixedPoint(2.0))
    assert config.table_settings == {
        "user": TableSettings(None, (), "float32", None, bits),
        "item": TableSettings(None, (), ["float32", "float16"], None, ["float32", bytes_]),
        "shop": TableSettings(None, (), None, None, None),
    }
    assert RunConfig.from_dict(config.to_dict()) == config
    changes = {"rounding": "nearest", "serving": "float16"}
    assert config.changes_to(config.changed(train_rounding="nearest", train_serving="float16")) == changes


def test_all_settings_of_tables_reach_the_tables() -> None:
    train = {
        "table_optimizer": "adagrad",
        "table_lr": 0.5,
        "initializer": "normal=1, normal.std=0.5",
        "missing": "zeros",
    }
    tables = {
        "user": {"optimizer": "adam", "initializer": "zeros", "missing": "initial"},
        "item": {"optimizer": ["ftrl=0.1, ftrl.beta=2", "adam.eps=1e-6, adam.betas=0.8:0.9"]},
        "shop": {
            "optimizer": {"momentum": {"lr": 0.2, "nesterov": True}},
            "initializer": [{"constant": 2.0}, "uniform=-1, uniform.high=1"],
            "dist_type": "hash_roundrobin",
        },
    }
    config = RunConfig.from_dict({"train": train, "tables": tables, "model": {"dim": 4}})
    found = model_for(config, ["user", "item", "shop", "city"], 0).embeddings.configs
    rows = {
        name: [(each.optimizer, each.initializer) for each in own.segments] for name, own in found.items()
    }
    assert rows == {
        "user": [(Adam(0.5), Zeros()), (Adam(0.5), Zeros())],
        "item": [
            (FTRL(0.1, beta=2.0), Zeros()),
            (Adam(0.5, eps=1e-6, betas=(0.8, 0.9)), Normal(1.0, 0.5)),
        ],
        "shop": [
            (Momentum(0.2, nesterov=True), Constant(2.0)),
            (Momentum(0.2, nesterov=True), Uniform(-1.0, 1.0)),
        ],
        "city": [(Adagrad(0.5), Zeros()), (Adagrad(0.5), Normal(1.0, 0.5))],
    }
    assert {name: own.missing for name, own in found.items()} == {
        **dict.fromkeys(found, "zeros"),
        "user": "initial",
    }
    assert [own.dist_type for own in found.values()].count("hash_roundrobin") == 1
    assert RunConfig.from_dict(config.to_dict()) == config


def test_policies_may_change_when_a_run_is_resumed() -> None:
    saved = RunConfig.from_dict({"tables": {"user": {"eviction": "ttl=5"}}})
    wanted = RunConfig.from_dict({"train": {"admission": "probability=0.5"}, "tables": {"user": {}}})

    changes = saved.changes_to(wanted)

    assert changes == {"admission": "probability=0.5", "tables": {"user": {}}}
    assert saved.resumed(changes) == wanted
    assert "tables" not in saved.changes_to(saved.changed(train_epochs=2))


def test_settings_of_gpu_memory_reach_the_tables() -> None:
    train = {"device": "auto", "device_bytes": 4096, "deterministic": False}
    tables = {"user": {"device_bytes": 0, "deterministic": True}}
    config = RunConfig.from_dict({"train": train, "tables": tables})
    configs = model_for(config, ["user", "item"], 0).embeddings.shards.configs
    found = {name: (own.device_bytes, own.deterministic) for name, own in configs.items()}
    assert found == {"user": (None, True), "item": (4096, False)}
    changed = config.changed(train_device="cpu", train_device_bytes=0, train_deterministic=True)
    assert config.changes_to(changed) == {"device": "cpu", "device_bytes": 0, "deterministic": True}
