"""RunConfig: everything a run needs to be repeated, from a TOML file and flags.

Plain data with checks: unknown keys and wrong types are errors that name the key and the known ones.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from megalith.errors import InputError, UnknownNameError
from megalith.table import FTRL, SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad

KINDS = ("movielens", "teacher", "parquet", "csv", "criteo", "monolith")
OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adagrad": Adagrad,
    "adam": Adam,
    "ftrl": FTRL,
    "rowwise_adagrad": RowWiseAdagrad,
    "sgd": SGD,
}


@dataclass(frozen=True)
class DataConfig:
    """Where samples come from."""

    kind: str = "movielens"
    """One of movielens, teacher, parquet, csv, criteo, monolith."""
    path: str | None = None
    """File, directory or pattern to train on; for movielens a directory that holds it (None: fetched)."""
    test_path: str | None = None
    """What to evaluate on; None holds back the last part of movielens and teacher data."""
    batch_size: int = 1024
    """Rows of a batch."""
    on_error: str = "raise"
    """"raise" stops at a bad row, "skip" counts it and goes on."""
    schema: dict[str, Any] = field(default_factory=dict)
    """For parquet and csv: which columns are what (see the guide of data)."""
    options: dict[str, Any] = field(default_factory=dict)
    """More arguments of the reader."""


@dataclass(frozen=True)
class ModelConfig:
    """Which model."""

    name: str = "deepfm"
    """One of deepfm, dlrm, dcnv2, din."""
    dim: int = 16
    """How wide an embedding is."""
    features: list[str] = field(default_factory=list)
    """The features to use; none: all the data has."""
    tables: dict[str, str] = field(default_factory=dict)
    """Feature -> table; a feature that is not named has a table of its own."""
    options: dict[str, Any] = field(default_factory=dict)
    """More arguments of the model's class, such as hidden = [64, 32]."""


@dataclass(frozen=True)
class TrainConfig:
    """How to train."""

    epochs: int = 1
    """Passes over the data."""
    max_steps: int | None = None
    """Stop after so many batches."""
    lr: float = 1e-3
    """Of Adam for the dense weights."""
    table_optimizer: str = "adagrad"
    """One of adagrad, adam, ftrl, rowwise_adagrad, sgd."""
    table_lr: float = 0.05
    """Of the tables."""
    engine: str = "cpu"
    """Of the tables: cpu or reference."""
    seed: int = 0
    """Of initial rows, dense weights and the order of samples."""
    threads: int | None = None
    """Of torch and the native module; None: as torch has it."""
    log_every: int = 50
    """Batches between lines of metrics.jsonl."""
    save_every: int | None = None
    """Batches between checkpoints; None: at the end and on Ctrl-C."""


@dataclass(frozen=True)
class RunConfig:
    """A whole run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        _one_of("data.kind", self.data.kind, KINDS)
        _one_of("data.on_error", self.data.on_error, ("raise", "skip"))
        _one_of("train.table_optimizer", self.train.table_optimizer, tuple(OPTIMIZERS))
        for name in ("epochs", "log_every"):
            if getattr(self.train, name) < 1:
                raise InputError(f"train.{name} must be at least 1, got {getattr(self.train, name)}")

    @property
    def table_optimizer(self) -> Optimizer:
        """The optimizer of all tables."""
        return OPTIMIZERS[self.train.table_optimizer](self.train.table_lr)

    def to_dict(self) -> dict[str, Any]:
        """A form that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunConfig:
        """What `to_dict` gave, or the content of a TOML file. Raises InputError naming a wrong key."""
        parts: dict[str, Any] = {"data": DataConfig, "model": ModelConfig, "train": TrainConfig}
        for key in data:
            if key not in parts:
                raise UnknownNameError(f"config: unknown section [{key}] (known: {', '.join(parts)})")
        return cls(**{name: _section(name, kind, data.get(name, {})) for name, kind in parts.items()})

    @classmethod
    def from_toml(cls, path: Path) -> RunConfig:
        """Reads a TOML file."""
        try:
            return cls.from_dict(tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is no TOML: {error}") from None
        except (InputError, UnknownNameError) as error:
            raise type(error)(f"{path}: {error}") from None

    def changed(self, **flags: Any) -> RunConfig:
        """With other values: `data_path=...`, `model_dim=...`, `train_epochs=...`; None leaves one alone."""
        parts: dict[str, dict[str, Any]] = {"data": {}, "model": {}, "train": {}}
        for flag, value in flags.items():
            section, _, name = flag.partition("_")
            if value is not None:
                parts[section][name] = value
        merged = {name: {**asdict(getattr(self, name)), **new} for name, new in parts.items()}
        return RunConfig.from_dict(merged)


def _section(name: str, kind: Any, data: Any) -> Any:
    if not isinstance(data, Mapping):
        raise InputError(f"config: [{name}] must be a section")
    known = [f.name for f in fields(kind)]
    hints = get_type_hints(kind)
    for key, value in data.items():
        if key not in known:
            raise UnknownNameError(f"config: unknown key {name}.{key} (known: {', '.join(known)})")
        allowed = tuple(getattr(t, "__origin__", t) for t in get_args(hints[key]) or (hints[key],))
        if getattr(hints[key], "__origin__", None) in (dict, list):
            allowed = (hints[key].__origin__,)
        if isinstance(value, int) and not isinstance(value, bool) and float in allowed:
            continue
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            wanted = " or ".join("nothing" if t is type(None) else t.__name__ for t in allowed)
            raise InputError(f"config: {name}.{key} must be {wanted}, got {value!r}")
    return replace(kind(), **data)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InputError(f"config: {name} must be one of {', '.join(known)}, got {value!r}")
