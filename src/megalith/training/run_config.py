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
from megalith.routing import MODES
from megalith.shards.wire import check_wire
from megalith.table import FTRL, SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad

KINDS = ("movielens", "teacher", "parquet", "csv", "criteo", "monolith")
OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adagrad": Adagrad,
    "adam": Adam,
    "ftrl": FTRL,
    "rowwise_adagrad": RowWiseAdagrad,
    "sgd": SGD,
}

MAY_CHANGE = (
    "epochs",
    "max_steps",
    "threads",
    "log_every",
    "save_every",
    "save_async",
    "keep_last",
    "keep_every",
    "micro_batches",
    "block_size",
    "wire",
    "comm_metrics",
    "timeout",
    "publish",
    "publish_interval",
    "publish_name",
    "publish_token_file",
    "publish_ca_file",
)
"""Keys of [train] that a resumed run may set anew."""


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
    save_async: bool = False
    """Go on training while a checkpoint is being written; the last save is waited for."""
    keep_last: int | None = None
    """Keep so many of the newest checkpoints in checkpoints/; None, and no keep_every: only the newest."""
    keep_every: int | None = None
    """Keep the checkpoints of steps that this divides, too."""
    micro_batches: int | None = None
    """Micro-batches of a step on all ranks, a power of two: same bits on any number of ranks that divides it;
    None: one a rank."""
    dist_type: str = "roundrobin"
    """How rows are spread over ranks: continuous, roundrobin or hash_roundrobin."""
    block_size: int | None = None
    """For continuous: ids of a block, which one rank has."""
    wire: str = "float32"
    """Precision between ranks: float32, float16, bfloat16, int8 (rows alone), or rows=int8,grads=float16."""
    comm_metrics: str | None = None
    """Measure what travels: * for all tables, or names with commas between them."""
    timeout: float = 600.0
    """Seconds that ranks wait for each other."""
    publish: str | None = None
    """Push changes to servers found by this discovery: static:host:port, file:path, zk://...; "": do not."""
    publish_interval: float = 10.0
    """Seconds between pushes."""
    publish_name: str | None = None
    """What servers call the model; None: the kind of model."""
    publish_token_file: str | None = None
    """A file with the token that servers ask for."""
    publish_ca_file: str | None = None
    """A file with the certificates that vouch for servers; pushes then travel by TLS."""


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
        for name in ("epochs", "log_every", "save_every", "keep_last", "keep_every"):
            value = getattr(self.train, name)
            if value is not None and value < 1:
                raise InputError(f"train.{name} must be at least 1, got {value}")
        self._check_ranks()

    def _check_ranks(self) -> None:
        """What concerns many ranks; checked for one too, which may be resumed on many."""
        train = self.train
        _one_of("train.dist_type", train.dist_type, MODES)
        if (train.dist_type == "continuous") != (train.block_size is not None):
            raise InputError(
                "config: train.dist_type = continuous needs train.block_size (--block-size), the ids of a "
                f"block, and no other mode has one; got {train.dist_type} and {train.block_size}"
            )
        for name in ("block_size", "timeout", "publish_interval"):
            value = getattr(train, name)
            if value is not None and not value > 0:
                raise InputError(f"config: train.{name} must be above 0, got {value}")
        micro = train.micro_batches
        if micro is not None and (micro < 1 or micro & (micro - 1)):
            raise InputError(f"config: train.micro_batches must be a power of two, got {micro}")
        try:
            check_wire(self.wire)
        except InputError as error:
            raise InputError(f"config: train.wire: {error}") from None

    @property
    def table_optimizer(self) -> Optimizer:
        """The optimizer of all tables."""
        return OPTIMIZERS[self.train.table_optimizer](self.train.table_lr)

    @property
    def wire(self) -> str | dict[str, str]:
        """As SyncShards takes it."""
        pairs = [part.partition("=") for part in self.train.wire.split(",")]
        return {key.strip(): value.strip() for key, _, value in pairs} if pairs[0][1] else self.train.wire

    @property
    def measured_tables(self) -> list[str] | None:
        """The tables that train.comm_metrics names; None: all."""
        named = self.train.comm_metrics
        return None if named in (None, "*") else [name.strip() for name in named.split(",")]

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

    def resumed(self, changes: Mapping[str, Any]) -> RunConfig:
        """With keys of [train] set anew, some of MAY_CHANGE; others raise InputError."""
        for key in changes:
            if key not in MAY_CHANGE:
                raise InputError(
                    f"train.{key} cannot change when a run is resumed; may: {', '.join(MAY_CHANGE)}"
                )
        own = self.to_dict()
        return RunConfig.from_dict({**own, "train": {**own["train"], **changes}})

    def changes_to(self, wanted: RunConfig) -> dict[str, Any]:
        """What `resumed` needs to make this run's config the wanted one, the fitted schema excepted.

        Raises InputError naming a key that differs and cannot change.
        """
        changes = {}
        here, there = self.to_dict(), wanted.to_dict()
        for section, values in there.items():
            for key, value in values.items():
                if value == here[section][key] or (section, key) == ("data", "schema"):
                    continue
                if section != "train" or key not in MAY_CHANGE:
                    raise InputError(
                        f"{section}.{key} is {here[section][key]!r} in the run that is resumed and "
                        f"{value!r} now: it cannot change; start over, or choose another directory"
                    )
                changes[key] = value
        return changes


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
