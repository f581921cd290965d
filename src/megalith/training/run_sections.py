"""The sections of a run's config: the keys of its TOML file, and the flags of `megalith train`.

The docstring of a field is the help text of its flag.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

from megalith.errors import InputError


@dataclass(frozen=True)
class DataConfig:
    """The training and test data.

    Raises:
        InputError: A value has the wrong type.
    """

    kind: str = "movielens"
    """Kind of data: movielens, synthetic, parquet, csv, criteo or monolith."""
    path: str | None = None
    """File, directory or pattern to train on. For movielens, its directory; downloaded if not given."""
    test_path: str | None = None
    """Data to evaluate on. Without it, movielens and synthetic data hold out their last part."""
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
    """Number of passes over the data."""
    max_steps: int | None = None
    """Stop after this number of batches."""
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
    """Seconds that ranks, or workers and parameter servers, wait for each other."""
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
        allowed = tuple(getattr(t, "__origin__", t) for t in get_args(hints[key]) or (hints[key],))
        if getattr(hints[key], "__origin__", None) in (dict, list):
            allowed = (hints[key].__origin__,)
        if isinstance(value, int) and not isinstance(value, bool) and float in allowed:
            continue
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            wanted = " or ".join("nothing" if t is type(None) else t.__name__ for t in allowed)
            raise InputError(f"config: {name}.{key} must be {wanted}, got {value!r}")
