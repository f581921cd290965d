"""The config of a run: a TOML file, or the flags of `megalith train`.

The fields of `DataConfig`, `ModelConfig` and `TrainConfig` are the keys of the TOML file and the flags of the
command; the docstring of a field is the help text of its flag. `RunConfig` holds these three sections and the
sections [tables.NAME], and checks all values at construction. Unknown keys and wrong types raise an error
that names the key. `check_options` compares [data.options] and [model.options] with the arguments of a class.

The values of policies, precisions and optimizers are parsed in `table_settings.py`.
"""

from __future__ import annotations

import inspect
import math
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from megalith.data import DenseColumn, Schema
from megalith.data.reader_registry import FILE_READERS
from megalith.errors import InputError, UnknownNameError
from megalith.models import TableSettings
from megalith.ops import checks
from megalith.ps.recovery import LOGS
from megalith.ps.shards import MODES as SERVER_MODES
from megalith.routing import MODES
from megalith.shards.row_encoding import check_wire
from megalith.table import Initializer, Uniform
from megalith.table.config import MISSING
from megalith.table.optimizers import OPTIMIZERS, Optimizer
from megalith.training.table_settings import (
    build_optimizer,
    check_one_of,
    needs_passes,
    parse_admission,
    parse_eviction,
    parse_initializer,
    parse_precision,
    parse_rounding,
    parse_serving,
    parse_tables,
)
from megalith.training.trackers import tracker_names


def check_options(
    where: str, options: Mapping[str, Any], target: Callable[..., Any], *, passed: Collection[str] = ()
) -> None:
    """Check that options are arguments of a class, and that no required argument is missing."""
    parameters = {
        name: each for name, each in inspect.signature(target).parameters.items() if name not in passed
    }
    known = f"known: {', '.join(parameters)}" if parameters else "there are no options"
    for name in options:
        if name not in parameters:
            raise UnknownNameError(f"config: {where}: unknown option {name!r} ({known})")
    for name, each in parameters.items():
        if each.default is inspect.Parameter.empty and name not in options:
            raise InputError(f"config: {where}: option {name!r} is required ({known})")


@dataclass(frozen=True)
class DataConfig:
    """The training and test data.

    Raises:
        InputError: A value has the wrong type.
    """

    kind: str = "movielens"
    """Kind of data: movielens, synthetic, parquet, csv, criteo or monolith."""
    path: str | list[str] | None = None
    """File, directory or pattern to train on, or several in their order (--path a --path b). For movielens,
    its directory; downloaded if not given."""
    test_path: str | list[str] | None = None
    """Data to evaluate on. Without it, movielens and synthetic data hold out their last part."""
    validation_path: str | list[str] | None = None
    """Data to validate on during training (--validate-every). Default: the data to evaluate on."""
    split_time: str | None = None
    """Time of the time column, such as 2026-11-08 or 2026-11-08T12:00 (UTC), or seconds since 1970. Rows of
    that time or later are not trained on: they are the data to validate on and, without test_path, to
    evaluate on."""
    batch_size: int = 1024
    """Rows per batch."""
    on_error: str = "raise"
    """What to do with a bad row: raise stops the run, skip counts the row and continues."""
    schema: dict[str, Any] = field(default_factory=dict)
    """Columns of parquet and csv files (see the guide "Data")."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the reader."""

    def __post_init__(self) -> None:
        _check_types("data", self)

    @property
    def split_seconds(self) -> int | None:
        """`split_time` in seconds since 1970."""
        given = self.split_time
        if given is None or given.isdecimal():
            return None if given is None else int(given)
        try:
            time = datetime.fromisoformat(given)
        except ValueError:
            raise InputError(
                "config: data.split_time must be a time such as 2026-11-08 or 2026-11-08T12:00, or seconds "
                f"since 1970, got {given!r}"
            ) from None
        return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp())

    @property
    def title(self) -> str:
        """The kind and the paths of the training data, for the user."""
        if self.path is None:
            return f"{self.kind} data"
        paths = [self.path] if isinstance(self.path, str) else self.path
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        return f"{self.kind} files {', '.join(paths[:3])}{more}"


@dataclass(frozen=True)
class ModelConfig:
    """The model.

    Raises:
        InputError: A value has the wrong type.
    """

    name: str = "deepfm"
    """Kind of model: deepfm, dlrm, dcnv2 or din."""
    dim: int = 16
    """Embedding dimension."""
    features: list[str] = field(default_factory=list)
    """Features to use. Empty: all features of the data."""
    tables: dict[str, str] = field(default_factory=dict)
    """Feature -> table. A feature that is not listed has its own table."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the model's class, such as hidden = [64, 32]."""

    def __post_init__(self) -> None:
        _check_types("model", self)


@dataclass(frozen=True)
class TrainConfig:
    """The training loop, checkpoints, ranks and publishing.

    Raises:
        InputError: A value has the wrong type.
    """

    epochs: int = 1
    """Number of passes over the data. A run that continues another one (--from) counts its own."""
    max_steps: int | None = None
    """Stop after this number of batches. A run that continues another one (--from) counts its own."""
    lr: float = 1e-3
    """Learning rate of Adam for the dense weights."""
    table_optimizer: str = "adagrad"
    """Optimizer of the tables, such as adagrad, adam, ftrl, momentum, rowwise_adagrad or sgd."""
    table_lr: float = 0.05
    """Learning rate of the tables."""
    table_options: str | None = None
    """Further settings of the optimizer of the tables: eps=1e-6,bias_correction=row,betas=0.9:0.99. For
    delay_compensated: base=NAME, strength, and settings of the base."""
    admission: str | None = None
    """Which ids get a row, in tables without their own section: min_count=3 (after three occurrences) or
    probability=0.1. Default: all."""
    eviction: str | None = None
    """Which rows are removed, in tables without their own section: ttl=SECONDS, min_norm=NORM, capacity=ROWS,
    several separated by commas, further arguments as in capacity.score=lfu. Default: none."""
    evict_every: int = 1000
    """Number of batches in which ttl and min_norm pass over the tables, a small part after each batch."""
    initializer: str | None = None
    """How the embeddings of a new row are drawn, in tables without their own value: zeros, ones, constant=X,
    uniform=LOW (further arguments as in uniform.high=0.05), normal=MEAN or truncated_normal=MEAN (as in
    normal.std=0.01). Default: uniform from -0.05 to 0.05."""
    missing: str = "initial"
    """What an id without a row reads as, in tables without their own value: initial (its initial row) or
    zeros."""
    precision: str = "float32"
    """Stored type of embeddings, in tables without their own value: float32, float16 or bfloat16."""
    rounding: str = "nearest"
    """How an update rounds embeddings of 16 bits: nearest or stochastic."""
    serving: str | None = None
    """How servers store embeddings, in tables without their own value: fixed_point=RANGE (a byte each),
    one_bit=AMPLITUDE (a bit each; further arguments as in one_bit.step_size=100), float16 or float32.
    Training sees what fixed_point and one_bit serve. Default: the precision of the export."""
    huge_pages: bool = True
    """Ask for pages of 2 MiB for tables without their own value. They make random access in large tables
    faster and take more memory for small ones."""
    device_bytes: int = 0
    """On a GPU, largest number of bytes of a table's rows in GPU memory, in tables without their own value;
    rows beyond it are in pinned host memory. 0: no limit."""
    deterministic: bool = True
    """On a GPU, add the gradients of a row in a fixed order, so that two runs give the same bits. --fast adds
    with atomic operations instead; measure which one is faster for your data."""
    engine: str = "cpu"
    """Engine of the tables: cpu or reference. On a GPU, cpu means cuda."""
    device: str = "cpu"
    """Where the tables and the dense weights are: cpu, cuda (a GPU), or auto (a GPU if there is one)."""
    seed: int = 0
    """Seed of initial rows, dense weights and the order of samples."""
    threads: int | None = None
    """Number of threads of torch and the native module. Default: one for steps of fewer than 65,536 ids
    (rows of a batch times features), where a second one gains little; else one per 32,768 ids, at most
    torch's setting (OMP_NUM_THREADS, or the number of cores). On a busy machine 1 is often the fastest."""
    log_every: int = 50
    """Batches between two lines of metrics.jsonl."""
    tracker: str | None = None
    """Where metrics go besides metrics.jsonl and TensorBoard: wandb, mlflow, opentelemetry, prometheus (or
    prometheus:HOST:PORT, default 127.0.0.1:9464), several separated by commas. An empty value: nowhere."""
    progressive: str | None = None
    """Score each batch before the model is trained on it, and report AUC and log loss by period: hour, day or
    week of the time column, or a number of batches. In one process also for rows with ids that have no row
    yet."""
    validate_every: int | None = None
    """Batches between two validations, which are lines of metrics.jsonl and a curve in the report. Default:
    none."""
    metric: str = "log_loss"
    """What makes a validation better than another: log_loss (lower) or auc (higher)."""
    patience: int | None = None
    """Stop early: end the run after this number of validations without a better one."""
    keep_best: bool = False
    """Keep the checkpoint of the best validation in RUN/best."""
    save_every: int | None = None
    """Batches between two checkpoints. Default: see --save-interval. A run also saves at its end and on
    Ctrl-C."""
    save_interval: float = 600.0
    """Seconds between two checkpoints if save_every is not given. On several ranks the run saves at the next
    line of metrics.jsonl."""
    save_async: bool = False
    """Continue training while a checkpoint is written."""
    keep_last: int | None = None
    """Number of newest checkpoints to keep in RUN/checkpoints."""
    keep_every: int | None = None
    """Also keep the checkpoint of every step that is a multiple of this number."""
    micro_batches: int | None = None
    """Micro-batches per step over all ranks, a power of two. Any number of ranks that divides it computes the
    same bits. Default: one per rank."""
    dist_type: str = "roundrobin"
    """How rows are distributed over ranks: continuous, roundrobin or hash_roundrobin."""
    block_size: int | None = None
    """Number of consecutive ids per rank with dist_type continuous."""
    wire: str = "float32"
    """Precision of the exchange between ranks: float32, float16, bfloat16, int8 (rows only), or for example
    rows=int8,grads=float16."""
    comm_metrics: str | None = None
    """Measure the exchange between ranks: * for all tables, or table names separated by commas."""
    timeout: float = 600.0
    """Seconds that ranks, or workers and parameter servers, wait for each other; a run on a GPU waits as long
    for a batch."""
    servers: int = 0
    """Number of parameter servers, processes of Ray that hold the tables. 0: the training process holds them,
    or its ranks."""
    workers: int = 1
    """Number of workers that train with --servers, processes of Ray. Each reads its own share of the data."""
    server_mode: str = "async"
    """When parameter servers apply the gradients of a worker: async, when they arrive (each worker trains on
    batches of its own), or sync, when those of all workers have arrived (they share each batch)."""
    staleness: int | None = None
    """With --mode async, how many batches a worker may be ahead of the slowest. Default: any number."""
    server_log: str = "async"
    """What parameter servers record of updates, for a server that ends: none (all since the last checkpoint
    are lost), async (those of the last 0.2 s are lost) or sync (nothing is lost)."""
    ray_address: str | None = None
    """Address of a Ray cluster for servers and workers, which must see the data and the run's directory under
    the same paths. Default: processes of this machine."""
    publish: str | None = None
    """Push changed rows to the servers of this discovery: static:HOST:PORT,..., file:PATH,
    dns:NAME:PORT or zk://HOST:PORT/ROOT. An empty value stops pushing in a resumed run."""
    publish_interval: float = 10.0
    """Seconds between two pushes."""
    publish_name: str | None = None
    """Name of the model on the servers. Default: the kind of model."""
    publish_token_file: str | None = None
    """File with the token that the servers require."""
    publish_ca_file: str | None = None
    """File with PEM certificates to verify the servers with. Pushes then use TLS."""

    def __post_init__(self) -> None:
        _check_types("train", self)


def _check_types(name: str, section: Any) -> None:
    hints = get_type_hints(type(section))
    for key, value in vars(section).items():
        hint = hints[key]
        kinds = (hint,) if get_origin(hint) in (dict, list) else get_args(hint) or (hint,)
        allowed = tuple(get_origin(kind) or kind for kind in kinds)
        if isinstance(value, int) and not isinstance(value, bool) and float in allowed:
            continue
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            wanted = " or ".join("nothing" if t is type(None) else t.__name__ for t in allowed)
            raise InputError(f"config: {name}.{key} must be {wanted}, got {value!r}")
        if isinstance(value, list) and not all(isinstance(each, str) for each in value):
            raise InputError(f"config: {name}.{key} must be a list of texts, got {value!r}")


KINDS = ("movielens", "synthetic", *FILE_READERS)
TABLE_OPTIMIZERS = tuple(sorted(OPTIMIZERS))
"""The optimizers of tables that a run can choose by name."""

PERIODS = {"hour": 3600, "day": 86_400, "week": 604_800}
"""Seconds of a period by its name."""
MAX_THREADS = 1024
METRICS = ("log_loss", "auc")

MAY_CHANGE = (
    *("admission", "eviction", "evict_every", "precision", "rounding", "serving", "initializer", "missing"),
    *("huge_pages", "device_bytes", "deterministic", "epochs", "max_steps", "device", "threads"),
    *("log_every", "tracker", "progressive", "save_every", "save_interval", "save_async"),
    *("keep_last", "keep_every"),
    *("validate_every", "patience", "keep_best"),
    *("micro_batches", "block_size", "wire", "comm_metrics", "timeout"),
    *("servers", "workers", "server_mode", "staleness", "server_log", "ray_address"),
    *("publish", "publish_interval", "publish_name", "publish_token_file", "publish_ca_file"),
)
"""Keys of [train] that may change when a run is resumed; the sections [tables.NAME] may change too."""

MAY_CHANGE_WITH_DATA = (*MAY_CHANGE, "lr", "table_lr", "metric", "seed")
"""Keys of [train] that may change when a run continues another one with other data, as [data] may."""

FIXED_DATA = ("kind", "path", "test_path", "validation_path", "split_time", "schema", "options")
"""Keys of [data] that belong to a trained model, or that `eval` and `predict` take as arguments."""


@dataclass(frozen=True)
class RunConfig:
    """The config of a run.

    Raises:
        InputError: A value is out of range or two values contradict each other; the message names the key.
    """

    data: DataConfig = field(default_factory=DataConfig)
    """Section [data]."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Section [model]."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Section [train]."""
    tables: dict[str, Any] = field(default_factory=dict)
    """Sections [tables.NAME]: the fields of `megalith.models.TableSettings` for single tables. Optimizers,
    initializers, policies and `serving` are text as in [train], or sections such as
    [tables.user.eviction.ttl]; `optimizer`, `initializer`, `precision` and `serving` may be lists with one
    value for each segment of a row. A key that is missing has the value of [train]."""

    def __post_init__(self) -> None:
        for name, kind in _SECTIONS.items():
            checks.instance(getattr(self, name), kind, f"config: [{name}]")
        check_one_of(self.data.kind, KINDS, "data.kind")
        check_one_of(self.data.on_error, ("raise", "skip"), "data.on_error")
        check_one_of(self.train.table_optimizer, TABLE_OPTIMIZERS, "train.table_optimizer")
        check_one_of(self.train.device, ("cpu", "cuda", "auto"), "train.device")
        check_one_of(self.train.metric, METRICS, "train.metric")
        tracker_names(self.train.tracker)
        for name in ("patience", "keep_best"):
            if getattr(self.train, name) and self.train.validate_every is None:
                flag = name.replace("_", "-")
                raise InputError(
                    f"config: train.{name} (--{flag}) needs validations: set train.validate_every "
                    "(--validate-every) to the number of batches between two of them"
                )
        counts = ["epochs", "max_steps", "evict_every", "threads", "log_every"]
        counts += ["save_every", "keep_last", "keep_every", "validate_every", "patience"]
        at_least_1 = {f"train.{name}": getattr(self.train, name) for name in counts}
        at_least_1 |= {"data.batch_size": self.data.batch_size, "model.dim": self.model.dim}
        for key, value in at_least_1.items():
            if value is not None and value < 1:
                raise InputError(f"config: {key} must be at least 1, got {value}")
        if self.train.threads is not None and self.train.threads > MAX_THREADS:
            raise InputError(
                f"config: train.threads must be at most {MAX_THREADS}, got {self.train.threads}: more "
                "threads than cores make a run slower"
            )
        if not 0 <= self.train.seed < 2**63:
            raise InputError(f"config: train.seed must be from 0 to 2^63 - 1, got {self.train.seed}")
        for name in ("lr", "table_lr"):
            rate = getattr(self.train, name)
            if not (math.isfinite(rate) and rate >= 0):
                raise InputError(f"config: train.{name} must be a finite number of 0 or more, got {rate}")
        _ = self.data.split_seconds, self.period  # raises for wrong values
        self._check_ranks()
        self._check_servers()
        if not isinstance(self.tables, Mapping):
            raise InputError("config: [tables] must be a section")
        check_one_of(self.train.missing, MISSING, "train.missing")
        _ = self.shared_settings, self.initializer  # raises for wrong values
        _ = self.table_settings, self.table_optimizer
        self._check_gpu_settings()

    def _check_gpu_settings(self) -> None:
        """Check the settings that only tables on a GPU have."""
        train = self.train
        given = [("train", train.device_bytes, train.deterministic)]
        given += [
            (f"tables.{name}", own.device_bytes or 0, own.deterministic is not False)
            for name, own in self.table_settings.items()
        ]
        for where, size, deterministic in given:
            if size < 0:
                raise InputError(
                    f"config: {where}.device_bytes must be at least 1, or 0 for no limit; got {size}"
                )
            if train.device != "cpu" or train.engine == "cuda":
                continue
            if size:
                raise InputError(
                    f"config: {where}.device_bytes limits GPU memory, but train.device is cpu: add --device "
                    "cuda, or set it to 0"
                )
            if not deterministic:
                raise InputError(
                    f"config: {where}.deterministic = false (--fast) is for tables on a GPU, but "
                    "train.device is cpu, where sums always have a fixed order: add --device cuda, or "
                    "--deterministic"
                )

    def _check_ranks(self) -> None:
        """Check the keys of multi-rank runs, on one rank too: the run may be resumed on several ranks."""
        train = self.train
        check_one_of(train.dist_type, MODES, "train.dist_type")
        if (train.dist_type == "continuous") != (train.block_size is not None):
            raise InputError(
                "config: train.dist_type = continuous requires train.block_size (--block-size), and no other "
                f"mode allows it; got {train.dist_type} and {train.block_size}"
            )
        for name in ("block_size", "timeout", "publish_interval", "save_interval"):
            value = getattr(train, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"config: train.{name} must be a finite number above 0, got {value}")
        micro = train.micro_batches
        if micro is not None and (micro < 1 or micro & (micro - 1)):
            raise InputError(f"config: train.micro_batches must be a power of two, got {micro}")
        try:
            check_wire(self.wire)
        except InputError as error:
            raise InputError(f"config: train.wire: {error}") from None

    def _check_servers(self) -> None:
        train = self.train
        check_one_of(train.server_mode, SERVER_MODES, "train.server_mode")
        check_one_of(train.server_log, LOGS, "train.server_log")
        if train.servers < 0:
            raise InputError(
                f"config: train.servers must be at least 1, or 0 to keep the tables in the training process; "
                f"got {train.servers}"
            )
        if train.workers < 1:
            raise InputError(f"config: train.workers must be at least 1, got {train.workers}")
        if train.workers > 1 and not train.servers:
            raise InputError(
                f"config: train.workers is {train.workers}, but workers need parameter servers: add "
                "--servers 1, or start ranks with torchrun"
            )
        if train.staleness is not None and train.staleness < 0:
            raise InputError(f"config: train.staleness must be 0 or more, got {train.staleness}")
        synchronous = train.server_mode == "sync"
        if train.staleness is not None and synchronous:
            raise InputError("config: train.staleness is for train.server_mode = async: no worker is ahead")
        if train.servers and train.micro_batches is not None:
            if not synchronous:
                raise InputError("config: train.micro_batches needs train.server_mode = sync (--mode sync)")
            if train.micro_batches % train.workers:
                raise InputError(
                    f"config: train.micro_batches is {train.micro_batches}, which is not a multiple of "
                    f"{train.workers} workers"
                )

    @property
    def table_optimizer(self) -> Optimizer:
        """The optimizer of the tables."""
        train = self.train
        return build_optimizer(train.table_optimizer, train.table_lr, train.table_options)

    @property
    def shared_settings(self) -> TableSettings:
        """The policies and the precision of tables without their own section."""
        train = self.train
        return TableSettings(
            parse_admission(train.admission, "train.admission"),
            parse_eviction(train.eviction, "train.eviction"),
            parse_precision(train.precision, "train.precision"),
            parse_rounding(train.rounding, train.precision, "train.rounding"),
            parse_serving(train.serving, "train.serving"),
        )

    @property
    def initializer(self) -> Initializer:
        """The initializer of the embeddings."""
        return parse_initializer(self.train.initializer, "train.initializer") or Uniform()

    @property
    def table_settings(self) -> dict[str, TableSettings]:
        """The settings of the tables with their own section."""
        return parse_tables(self.tables, self.shared_settings, self.train.table_lr)

    @property
    def evict_every(self) -> int | None:
        """`train.evict_every`, or None if no policy needs passes over a table."""
        used = (self.shared_settings, *self.table_settings.values())
        return self.train.evict_every if any(needs_passes(tuple(p.eviction)) for p in used) else None

    @property
    def period(self) -> tuple[str, int] | None:
        """`train.progressive`: the unit of a period, "seconds" or "steps", and their number."""
        given = self.train.progressive
        if given is None:
            return None
        if given in PERIODS:
            return "seconds", PERIODS[given]
        if given.isdecimal() and int(given):
            return "steps", int(given)
        raise InputError(
            f"config: train.progressive must be {', '.join(PERIODS)} or a number of batches, got {given!r}"
        )

    @property
    def wire(self) -> str | dict[str, str]:
        """`train.wire` in the form that SyncShards takes."""
        pairs = [part.partition("=") for part in self.train.wire.split(",")]
        return {key.strip(): value.strip() for key, _, value in pairs} if pairs[0][1] else self.train.wire

    @property
    def measured_tables(self) -> list[str] | None:
        """The tables that train.comm_metrics names. None: all."""
        named = self.train.comm_metrics
        return None if named in (None, "*") else [name.strip() for name in named.split(",")]

    def to_dict(self) -> dict[str, Any]:
        """Return the config as JSON-compatible dicts, one per section."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunConfig:
        """Create a config from the output of `to_dict` or the content of a TOML file.

        Args:
            data: Section -> keys. Keys that are missing have their default.

        Returns:
            The config.

        Raises:
            UnknownNameError: A section or key does not exist.
            InputError: A value has the wrong type or is out of range.
        """
        if not isinstance(data, Mapping):
            raise InputError(f"config: expected sections by name, got {type(data).__name__}")
        for key in data:
            if key not in (*_SECTIONS, "tables"):
                known = ", ".join((*_SECTIONS, "tables"))
                raise UnknownNameError(f"config: unknown section [{key}] (known: {known})")
        sections = {name: _section(name, kind, data.get(name, {})) for name, kind in _SECTIONS.items()}
        return cls(**sections, tables=data.get("tables", {}))

    @classmethod
    def from_toml(cls, path: Path) -> RunConfig:
        """Read a TOML file.

        Args:
            path: The file.

        Returns:
            The config.

        Raises:
            InputError: The file cannot be read, is not TOML, or a value is wrong.
            UnknownNameError: A section or key does not exist.
        """
        path = checks.path(path, "config: path")
        try:
            return cls.from_dict(tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not valid TOML: {error}") from None
        except (InputError, UnknownNameError) as error:
            raise type(error)(f"{path}: {error}") from None

    def changed(self, **flags: Any) -> RunConfig:
        """Return a copy with other values.

        Args:
            **flags: Values by section and key: `data_path=...`, `model_dim=...`, `train_epochs=...`. None
                keeps the current value.

        Returns:
            A new config.

        Raises:
            UnknownNameError: A section or key does not exist.
            InputError: A value has the wrong type or is out of range.
        """
        parts: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
        for flag, value in flags.items():
            section, _, name = flag.partition("_")
            if section not in parts:
                known = ", ".join(f"{part}_..." for part in parts)
                raise UnknownNameError(f"config: unknown key {flag!r} (known: {known})")
            if value is not None:
                parts[section][name] = value
        merged = {name: {**asdict(getattr(self, name)), **new} for name, new in parts.items()}
        return RunConfig.from_dict({**merged, "tables": self.tables})

    def resumed(self, changes: Mapping[str, Any]) -> RunConfig:
        """Return the config of a resumed run.

        Args:
            changes: New values of keys of [train]; "tables": all sections [tables.NAME].

        Returns:
            A new config.

        Raises:
            InputError: A key is not one of `MAY_CHANGE`.
        """
        changes = dict(checks.mapping(changes, "resume: changes", '{"epochs": 2}'))
        own = self.to_dict()
        tables = changes.pop("tables", own["tables"])
        for key in changes:
            if key not in MAY_CHANGE:
                raise InputError(
                    f"train.{key} cannot change when a run is resumed; these can: {', '.join(MAY_CHANGE)}"
                )
        return RunConfig.from_dict({**own, "train": {**own["train"], **changes}, "tables": tables})

    def changes_to(self, wanted: RunConfig) -> dict[str, Any]:
        """Return the changes for `resumed` that turn this config into the wanted one.

        The schema is not compared: this config holds the fitted one.

        Args:
            wanted: The wanted config.

        Returns:
            New values by key of [train]; "tables": the sections [tables.NAME], if they differ.

        Raises:
            InputError: A key differs that cannot change when a run is resumed.
        """
        checks.instance(wanted, RunConfig, "config: wanted")
        here, there = self.to_dict(), wanted.to_dict()
        own_tables, tables = here.pop("tables"), there.pop("tables")
        changes = {} if tables == own_tables else {"tables": tables}
        for section, values in there.items():
            for key, value in values.items():
                if value == here[section][key] or (section, key) == ("data", "schema"):
                    continue
                if section != "train" or key not in MAY_CHANGE:
                    remedy = "start over, or choose another directory"
                    if section == "data":
                        remedy = "--from trains the model of a run on other data"
                    raise InputError(
                        f"{section}.{key} is {here[section][key]!r} in the resumed run and {value!r} now; it "
                        f"cannot change when a run is resumed; {remedy}"
                    )
                changes[key] = value
        return changes

    def continued(self, wanted: RunConfig) -> RunConfig:
        """Return the config of a run that trains the model of this one on other data.

        Args:
            wanted: The wanted config. [data] may differ: its schema may name other columns for the same
                features, and it gets the fitted means and the kinds of ids of this config. In [train],
                `MAY_CHANGE_WITH_DATA` lists the keys that may differ; [tables.NAME] may differ too.

        Returns:
            A new config.

        Raises:
            InputError: A key differs that belongs to the model; the message names it.
        """
        checks.instance(wanted, RunConfig, "config: wanted")
        here, there = self.to_dict(), wanted.to_dict()
        for section in ("model", "train"):
            for key, value in there[section].items():
                if value != here[section][key] and (section == "model" or key not in MAY_CHANGE_WITH_DATA):
                    raise InputError(
                        f"{section}.{key} is {here[section][key]!r} in the run that is continued and "
                        f"{value!r} now; it belongs to the trained model: leave it out, or start a new run"
                    )
        return wanted.changed(data_schema=_continued_schema(self.data.schema, wanted.data.schema))


def _continued_schema(own: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the wanted columns with the fitted means and kinds of ids of a trained model."""
    if not wanted or not own or wanted == own:
        return wanted or own
    old, new = Schema.from_dict(own), Schema.from_dict({"label": None, **wanted})
    if list(old.feature_columns) != list(new.feature_columns):
        raise InputError(
            f"config: [data.schema] has the features {', '.join(new.feature_columns) or 'none'}, but the run "
            f"that is continued has {', '.join(old.feature_columns) or 'none'}: name the same features in "
            'the same order; a column of another name is user = "user_id" (--features user=user_id)'
        )
    features = {}
    for name, column in new.feature_columns.items():
        before = old.feature_columns[name]
        if column.slot != before.slot:
            raise InputError(
                f"config: [data.schema]: feature {name!r} has slot {column.slot}, but slot {before.slot} in "
                "the run that is continued: its ids would name other rows"
            )
        features[name] = replace(column, ids=before.ids)
    if [_kind(column) for column in old.dense_columns] != [_kind(column) for column in new.dense_columns]:
        raise InputError(
            "config: [data.schema] has other dense columns than the run that is continued: it needs "
            f"{len(old.dense_columns)} with the same normalise and indicator, in the same order"
        )
    dense = [
        replace(column, mean=before.mean, std=before.std)
        for column, before in zip(new.dense_columns, old.dense_columns, strict=True)
    ]
    return replace(new, features=features, dense=dense).to_dict()


def _kind(column: DenseColumn) -> tuple[str, bool]:
    return column.normalise, column.indicator


def _section(name: str, kind: Any, data: Any) -> Any:
    if not isinstance(data, Mapping):
        raise InputError(f"config: [{name}] must be a section")
    known = [f.name for f in fields(kind)]
    for key in data:
        if key not in known:
            raise UnknownNameError(f"config: unknown key {name}.{key} (known: {', '.join(known)})")
    return kind(**data)


_SECTIONS: Mapping[str, type] = {"data": DataConfig, "model": ModelConfig, "train": TrainConfig}
