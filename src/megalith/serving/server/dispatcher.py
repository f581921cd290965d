"""Dispatcher: passes each request, of any protocol, to the model that it names.

Every request is admitted here, in the event loop. It is counted and timed, and refused while the server is
full or shutting down. Any error becomes a RequestError with the status code that the client gets. The memory
of a burst of large requests is returned to the operating system with malloc_trim; otherwise the allocator
would keep it forever.

Nothing here blocks the event loop for long: health and metrics are answered however busy the server is.

    work                                          runs in
    reading a small request                       the event loop
    scores                                        the threads of the version; a small request that is alone
                                                  and takes little time, the event loop (batching.py)
    reading a large request, looking up rows      READ_THREADS threads
    writes                                        WRITE_THREADS threads

Requests for the rows of ids have the inputs and outputs of Monolith's two signatures:

    signature     inputs                                    outputs
    lookup        {table}: int64 [n], for any tables        {table}: float32 [n, dim]
    raw_lookup    id: int64 [n], id_split: int64 [T + 1]    flat_emb: float32 [sum of n_t * dim_t]

raw_lookup has the ids of all T tables of the model, concatenated in the order of the sorted table names; the
ids of table t are `id[id_split[t]:id_split[t + 1]]`. Its output has the rows in the same order, flat.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.library import return_freed_memory
from megalith.serving.export.servable import Servable
from megalith.serving.proto.tf_tensors import Strings
from megalith.serving.server.access_log import AccessLog
from megalith.serving.server.batching import WorkerThreads
from megalith.serving.server.inputs import InputReader, Inputs, Rows
from megalith.serving.server.repository import Repository
from megalith.serving.server.request_errors import Code, RequestError, as_request_error
from megalith.serving.server.security import Permission
from megalith.serving.server.served_model import Array, ServedModel
from megalith.serving.server.server_config import ServerConfig
from megalith.serving.server.server_metrics import UNKNOWN, Metrics
from megalith.serving.sync.push_messages import split_by_table
from megalith.serving.wire_names import LOOKUP, PREDICT, RAW_LOOKUP, SIGNATURES

BURST_BYTES = 256 << 20
"""Bytes of large requests after which freed memory is returned."""
LARGE_BYTES = 1 << 20
UNTRIMMED_BYTES = 64 << 20
"""Freed memory that stays for the next requests."""


class MallocTrimmer:
    """Counts the bytes of large requests, and returns memory after many of them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._received = 0

    def received(self, size: int) -> None:
        if size >= LARGE_BYTES:
            with self._lock:
                self._received += size

    def release(self) -> bool:
        """Return freed memory if there was a burst since the last call; return whether there was."""
        with self._lock:
            if self._received < BURST_BYTES:
                return False
            self._received = 0
        return_freed_memory(UNTRIMMED_BYTES)
        return True


FLAT_ROWS = "flat_emb"


def lookup_rows(
    servable: Servable,
    inputs: Mapping[str, Tensor | Strings],
    *,
    signature: str,
    outputs: Sequence[str] = (),
    max_bytes: int,
) -> dict[str, Tensor]:
    """Return the rows of the ids of a request."""
    dims = servable.signature.dims
    raw = signature == RAW_LOOKUP
    ids = _raw_ids(inputs, dims) if raw else _ids_by_table(inputs, dims)
    _check_outputs(outputs, [FLAT_ROWS] if raw else list(ids), signature)
    size = sum(4 * each.numel() * dims[table] for table, each in ids.items())
    if size > max_bytes:
        raise InputError(
            f"{signature}: the rows would take {size} bytes, more than the limit of {max_bytes}; "
            "request fewer ids"
        )
    if raw:
        flat = [servable.lookup(table, each).reshape(-1) for table, each in ids.items()]
        return {FLAT_ROWS: torch.cat([torch.empty(0, device="cpu"), *flat])}
    return {table: servable.lookup(table, each) for table, each in ids.items() if table in (outputs or ids)}


def _ids_by_table(inputs: Mapping[str, Tensor | Strings], dims: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the inputs of `lookup` by table; raise InputError."""
    found = {}
    for table, ids in inputs.items():
        if table not in dims:
            raise InputError(f"input {table[:100]!r} is unknown; lookup takes {_shorten(dims)}")
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
            raise InputError(f"input {table!r} must be int64 [ids]")
        found[table] = ids
    return found


def _raw_ids(inputs: Mapping[str, Tensor | Strings], dims: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the inputs of `raw_lookup` by table, for all tables in their order; raise InputError."""
    left = dict(inputs)
    tables = sorted(dims)
    ids = split_by_table(left, "id", "id_split", len(tables))
    if left:
        raise InputError(f"input {min(left)[:100]!r} is unknown; raw_lookup takes id, id_split")
    return dict(zip(tables, ids, strict=True))


def _check_outputs(names: Sequence[str], known: Sequence[str], signature: str) -> None:
    for name in names:
        if name not in known:
            raise InputError(
                f"output {name[:100]!r} is unknown; this {signature} returns {_shorten(known) or 'nothing'}"
            )


def _shorten(names: Mapping[str, int] | Sequence[str]) -> str:
    return ", ".join(list(names)[:20])


DEFAULT_TIMEOUT, MAX_TIMEOUT = 60.0, 3600.0
"""Seconds of a request without a deadline, and the longest deadline."""
READ_THREADS, WRITE_THREADS = 4, 8
MAX_JSON_BYTES = 4 << 20
"""Parsed JSON takes up to 25 times its size in memory, so large tensors must be sent as bytes."""
INLINE_BYTES = 1 << 15
"""Larger requests, and responses as JSON, are read and written in a thread."""
Result = TypeVar("Result")


@dataclass(slots=True)
class ScoreRequest:
    """A request for scores, as a protocol received it."""

    model: str
    version: int | str | None
    """Number or label; None: the newest version."""
    size: int
    """Bytes of its message."""
    read: Callable[[InputReader], Rows]
    """Reads the rows; called once, after the request is admitted. It may set the fields below."""
    outputs: Sequence[str] = ()
    """Names of the outputs to return; empty: all."""
    timeout: float | None = None
    """Seconds until the client stops waiting; None: no deadline."""
    reports_missing: bool = False
    """Whether the response must give the number of ids without a row."""


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Outputs by name, each [rows, ...], and the version that computed them."""

    version: int
    outputs: dict[str, Array]
    missing_ids: dict[str, int] | None = None
    """Feature -> number of its ids without a row; None unless the request asked for it."""


class Dispatcher:
    def __init__(self, repository: Repository, metrics: Metrics, config: ServerConfig) -> None:
        self.repository = repository
        self.metrics = metrics
        self.allow_writes = config.allow_writes
        self.max_bytes = config.max_request_bytes
        self.max_predict_bytes = config.max_predict_bytes
        self._small = min(INLINE_BYTES, config.max_predict_bytes)
        self.typed_outputs = not config.tensor_content
        self.memory = MallocTrimmer()
        self.access_log = None if config.access_log is None else AccessLog(config.access_log)
        self.requires_token = config.security.requires_token
        self._security = config.security
        self._max_concurrent = config.max_concurrent
        self._readers = WorkerThreads(READ_THREADS, "read")
        self._writers = WorkerThreads(WRITE_THREADS, "write") if config.allow_writes else None
        self._running = 0
        self._drained: asyncio.Event | None = None
        self.closing = False
        """Whether the server is shutting down."""
        self._leaving = False

    @property
    def ready(self) -> bool:
        """Whether some model is available and the server is not shutting down."""
        return not self._leaving and any(model.available for model in self.repository.models)

    def permit(self, authorization: str | bytes | None, permission: Permission) -> None:
        if not self.requires_token or self._security.permits(authorization, permission):
            return
        known = self._security.admits(authorization)
        text = (
            f"this call needs {'another' if known else 'a'} token: the {permission.value.replace('_', ' ')}"
        )
        raise self.reject(RequestError(Code.PERMISSION_DENIED if known else Code.UNAUTHENTICATED, text))

    def check_size(self, size: int) -> None:
        if size < LARGE_BYTES and size <= self.max_predict_bytes:
            return
        self.memory.received(size)
        if size > self.max_predict_bytes:
            raise self.reject(
                RequestError(
                    Code.RESOURCE_EXHAUSTED,
                    f"the request has {size} bytes, more than {self.max_predict_bytes}; send it in parts",
                )
            )

    async def in_thread(self, work: Callable[[], Result], size: int, timeout: float | None = None) -> Result:
        """Run work that would block the event loop in a thread; at once if it is small."""
        if size <= INLINE_BYTES:
            return work()
        return await self._readers.run(work, _seconds(timeout))

    async def predict(self, request: ScoreRequest) -> ScoreResult:
        if request.size > self._small:
            self.check_size(request.size)
        with self.admit(request.model, PREDICT) as model:
            version = model.acquire(request.version)  # no limit: it does not wait
            started = time.perf_counter_ns()
            try:
                if not version.signature.predicts:
                    raise RequestError(
                        Code.INVALID_ARGUMENT,
                        f"{model.name} serves rows: use signature {LOOKUP!r}, or request scores from its "
                        "entry",
                    )
                if self.access_log is not None:
                    self.access_log.note(version=version.number)
                if request.size <= INLINE_BYTES:
                    rows = request.read(version.reader)
                else:
                    seconds = _seconds(request.timeout)  # reading may set another
                    rows = await self._readers.run(lambda: request.read(version.reader), seconds)
                if rows.plain is None:
                    for feature in version.reader.missing(rows):
                        self.metrics.missing_feature(model.name, feature)
                read = time.perf_counter_ns()
                outputs = await version.predict(rows, _seconds(request.timeout))
                ended = time.perf_counter_ns()
                if request.outputs:
                    outputs = _select_outputs(outputs, request.outputs)
                missing = None
                if request.reports_missing:
                    missing = await self._readers.run(lambda: version.count_missing(rows), DEFAULT_TIMEOUT)
                version.statistics.succeeded(rows.count, started, read, ended)
                return ScoreResult(version.number, outputs, missing)
            except BaseException:  # also if the client no longer waits
                version.statistics.failed(started)
                raise
            finally:
                version.release()

    async def lookup(
        self,
        name: str,
        version: int | str | None,
        read: Callable[[], Inputs],
        *,
        signature: str = LOOKUP,
        outputs: Sequence[str] = (),
        timeout: float | None = None,
    ) -> tuple[int, dict[str, Tensor]]:
        with self.admit(name, signature) as model:

            def look_up() -> tuple[int, dict[str, Tensor]]:
                with model.version(version) as found:  # here: the caller may leave before this ends
                    return found.number, lookup_rows(
                        found.servable, read(), signature=signature, outputs=outputs, max_bytes=self.max_bytes
                    )

            return await self._readers.run(look_up, _seconds(timeout))

    async def write(
        self,
        name: str,
        signature: str,
        read: Callable[[], Inputs],
        metadata: Mapping[str, str],
        *,
        timeout: float | None = None,
    ) -> dict[str, Tensor | Strings]:
        """Pass a message of a publisher to the model's subscriber."""
        with self.admit(name, signature) as model:
            subscriber = model.subscriber
            if self._writers is None or subscriber is None:
                raise RequestError(
                    Code.PERMISSION_DENIED,
                    "this server accepts no writes; start it with --follow, in Python with "
                    "ServerConfig(allow_writes=True)",
                )
            return await self._writers.run(
                lambda: dict(subscriber.handle(signature, read(), metadata)), _seconds(timeout)
            )

    @contextmanager
    def admit(self, name: str, signature: str) -> Iterator[ServedModel]:
        """Give the model of a request; count the request, and turn its error into a RequestError."""
        started, label, code = time.perf_counter(), UNKNOWN, "OK"
        try:
            if self.closing:
                raise RequestError(Code.UNAVAILABLE, "the server is shutting down")
            if self._running >= self._max_concurrent:
                raise RequestError(
                    Code.RESOURCE_EXHAUSTED, f"{self._running} requests are in progress; try again later"
                )
            self._running += 1
            try:
                model = self.repository.find(name)
                label = model.name
                yield model
            finally:
                self._running -= 1
                if not self._running and self._drained is not None:
                    self._drained.set()
        except Exception as error:
            status, text = as_request_error(error, f"{signature} of {label}")
            code = status.name
            raise RequestError(status, text) from None
        except asyncio.CancelledError:
            code = Code.CANCELLED.name
            raise
        finally:
            if self.access_log is not None:
                self.access_log.note(model=label, signature=signature)
            known = signature if signature in SIGNATURES else UNKNOWN
            self.metrics.request(label, known, code, time.perf_counter() - started)

    def reject(self, error: Exception) -> RequestError:
        """Count a request that cannot be parsed."""
        status, text = as_request_error(error, "a request")
        self.metrics.request(UNKNOWN, UNKNOWN, status.name, 0.0)
        return RequestError(status, text)

    def leave(self) -> None:
        """Report that the server is not ready any more; requests are still answered."""
        self._leaving = True

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait for those in progress; return whether all of them ended."""
        self.closing = self._leaving = True
        if self._running:
            self._drained = asyncio.Event()
            try:
                async with asyncio.timeout(timeout):
                    await self._drained.wait()  # no limit: that of the line above
            except TimeoutError:
                return False
        return True

    def close(self) -> None:
        """End the threads, after `drain`."""
        for threads in (self._readers, self._writers):
            if threads is not None:
                threads.close()
        if self.access_log is not None:
            self.access_log.close()


def unknown_signature(name: str) -> RequestError:
    known = ", ".join(SIGNATURES)
    return RequestError(Code.INVALID_ARGUMENT, f"signature {name[:100]!r} is unknown; use one of {known}")


def _seconds(timeout: float | None) -> float:
    return min(DEFAULT_TIMEOUT if timeout is None else timeout, MAX_TIMEOUT)


def _select_outputs(scores: dict[str, Array], names: Sequence[str]) -> dict[str, Array]:
    for name in names:
        if name not in scores:
            raise InputError(f"output {name[:100]!r} is unknown; the model returns {', '.join(scores)}")
    return {name: scores[name] for name in dict.fromkeys(names)}
