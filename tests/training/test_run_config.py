"""RunConfig: TOML files, flags, and their errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalith import Adam
from megalith.errors import InputError, UnknownNameError
from megalith.table.optimizers import OPTIMIZERS
from megalith.training import RunConfig
from megalith.training.run_config import TABLE_OPTIMIZERS

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
    config = RunConfig.from_dict({"train": {"table_optimizer": name, "table_lr": 0.5}})
    assert config.table_optimizer == OPTIMIZERS[name](lr=0.5)
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
