"""ServerConfig: every option of a model server, in Python and on the command line.

`megalith serve` makes its options from these dataclasses: a field is an option, and its docstring is the
option's help. This module imports neither grpc nor protobuf, so that the help needs no extras.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from megalith.errors import InputError
from megalith.ops import checks
from megalith.serving.client.credentials import Credentials
from megalith.serving.server.security import Security
from megalith.serving.wire_names import MAX_REQUEST_BYTES

_MAX_PORT = 65535
MAX_PREDICT_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How the server combines requests into batches.

    Raises:
        InputError: A value is out of range.
    """

    max_rows: int = 1024
    """Maximum number of rows computed at once; a larger request is split."""
    max_bytes: int = MAX_REQUEST_BYTES
    """Maximum bytes of embedding rows and dense values of a batch; a larger request is a batch of its own."""
    max_wait: float = 0.0
    """Seconds to wait for a fuller batch; 0 takes what is queued."""
    max_queue_rows: int = 16384
    """Maximum number of queued rows; further requests are refused."""
    max_queue_bytes: int = 4 * MAX_REQUEST_BYTES
    """Maximum bytes of embedding rows and dense values of the queued requests."""
    workers: int = 1
    """Number of compute threads for each version of a model."""
    threads: int | None = None
    """Number of torch threads of each compute thread. Default: as many as torch uses."""

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_bytes", "max_queue_rows", "max_queue_bytes", "workers", "threads"):
            _check_integer(self, name, 1)
        _check_seconds(self, "max_wait")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options of a `ModelServer`.

    Raises:
        InputError: A value is out of range.
        UsageError: Anyone beyond this machine could write to the model.
    """

    port: int = 0
    """Port of gRPC; 0 picks a free port."""
    http_port: int | None = None
    """Port of REST; 0 picks a free port. Default: no REST."""
    metrics_port: int | None = None
    """Port of Prometheus metrics; 0 picks a free port. Several processes take this one and the next ones.
    Default: no metrics."""
    processes: int = 1
    """Number of processes that share the ports, each with a part of the cores."""
    process_port: int = 0
    """First of the ports of single processes, which take pushes; 0 picks free ones."""
    pin_processes: bool = True
    """Run each of several processes on cores of its own."""
    host: str = "127.0.0.1"
    """Address that gRPC and REST listen on."""
    metrics_host: str = "127.0.0.1"
    """Address that the metrics listen on."""
    allow_writes: bool = False
    """Accept the rows that `megalith train --publish` pushes."""
    checkpoint: Path | None = None
    """Checkpoint of the run that pushes, to catch up from. Default: that of the run, if a run is served."""
    discovery: str | None = None
    """Where to register and to find servers: file:PATH, zk://HOST:PORT/ROOT, dns:NAME:PORT or static:..."""
    advertise: str | None = None
    """HOST:PORT by which others reach this server. Default: the address it listens on."""
    replica_id: int = -1
    """Number of this server among the replicas of its models."""
    fail_soft: bool = False
    """Use zeros for rows that an entry cannot fetch."""
    fetch_timeout: float = 1.0
    """Seconds in which an entry must fetch its rows."""
    max_concurrent: int = 128
    """Maximum number of requests in progress."""
    keep_versions: int | None = None
    """Number of the newest versions that are served. Default: 2 for ps parts, otherwise 1."""
    lame_duck_seconds: float = 0.0
    """Seconds for which a server that stops answers requests while its health is NOT_SERVING."""
    drain_seconds: float = 30.0
    """Seconds in which requests in progress may end when the server stops."""
    read_seconds: float = 5.0
    """Seconds in which the message of a gRPC call must arrive, up to 64 MiB for pushed rows."""
    poll_seconds: float = 1.0
    """Seconds between two checks of the directory for new versions."""
    carry_seconds: float = 60.0
    """Seconds for which pushed rows override those of a new version while no further push arrives."""
    max_request_bytes: int = MAX_REQUEST_BYTES
    """Maximum bytes of a request's tensors, and of the rows of its ids."""
    max_predict_bytes: int = MAX_PREDICT_BYTES
    """Maximum bytes of a message that asks for scores; rows of ids and writes may take max_request_bytes."""
    access_log: str | None = None
    """File to which a line of JSON is appended for each call; - is standard output. Default: no log."""
    accept_compressed: bool = False
    """Accept compressed requests: a small message may then take as much memory as the largest one."""
    tensor_content: bool = False
    """Return scores over TF Serving's gRPC as tensor_content, not in typed fields such as float_val."""
    in_memory: bool = False
    """Read the rows of a version into memory instead of mapping its files."""
    compiled: bool = False
    """Load the library that `megalith export --compile` wrote: it is code, so trust the exports."""
    fold_rows: int = 1 << 18
    """Pushed rows in memory from which they are moved to mapped files in the background."""
    fold_seconds: float = 300.0
    """Time between two such moves, at least: pushes are slower while rows move."""
    fold_directory: Path | None = None
    """Directory of these files, which need its disk space. Default: the system's directory of such files."""
    trial: str = "running"
    """When a version is first opened in a child process: always, running (if a model is served), or never."""
    refuse_nan: bool = False
    """Refuse requests whose dense values hold NaN or infinity."""
    freeze_gc: bool = False
    """Exclude what a version has loaded from Python's garbage collection, which would stall requests."""
    security: Security = field(default_factory=Security)
    """Token and TLS of this server."""
    batching: Batching = field(default_factory=Batching)
    """How requests are combined."""
    fetch_credentials: Credentials | None = None
    """What an entry presents to the servers of its rows."""

    def __post_init__(self) -> None:
        checks.one_of(self.trial, ("always", "running", "never"), "trial")
        for each in fields(self):  # by the text of their annotations, so that no new option is forgotten
            name, value = each.name, getattr(self, each.name)
            if each.type == "bool":
                checks.flag(value, name)
            elif each.type == "float":
                _check_seconds(self, name)
            elif each.type in ("str", "str | None") and (value is not None or each.type == "str"):
                checks.text(value, name)
            elif each.type == "Path | None" and value is not None:
                checks.path(value, name)
        for name in ("port", "http_port", "metrics_port", "process_port"):
            _check_integer(self, name, 0, _MAX_PORT)
        counts = (
            "processes",
            "max_concurrent",
            "keep_versions",
            "max_request_bytes",
            "max_predict_bytes",
            "fold_rows",
        )
        for name in counts:
            _check_integer(self, name, 1)
        for name in ("metrics_port", "process_port"):
            if (getattr(self, name) or 0) + self.processes - 1 > _MAX_PORT:
                raise InputError(f"{name} must leave ports for {self.processes} processes below {_MAX_PORT}")
        _check_integer(self, "replica_id", -1)
        checks.instance(self.security, Security, "security")
        checks.instance(self.batching, Batching, "batching")
        if self.fetch_credentials is not None:
            checks.instance(self.fetch_credentials, Credentials, "fetch_credentials")
        for name in ("fetch_timeout", "read_seconds"):
            if not getattr(self, name):
                raise InputError(f"{name} must be above 0")
        self.security.check_exposure(self.host, writes=self.allow_writes)


def _check_seconds(config: Any, name: str) -> None:
    """Raise InputError unless a field is a number of seconds, 0 or more."""
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise InputError(f"{name} must be a number of 0 or more, got {value!r}")


def _check_integer(config: Any, name: str, low: int, high: int | None = None) -> None:
    """Raise InputError unless a field is an integer of a range, or None where that is its default."""
    value = getattr(config, name)
    if value is None and getattr(type(config), name) is None:
        return
    valid = isinstance(value, int) and not isinstance(value, bool)
    if not valid or value < low or (high is not None and value > high):
        limit = f"of {low} or more" if high is None else f"from {low} to {high}"
        raise InputError(f"{name} must be an integer {limit}, got {value!r}")
