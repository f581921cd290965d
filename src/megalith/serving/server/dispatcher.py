"""Dispatcher: passes each request, of any protocol, to the model that it names.

Every request is admitted here. It is counted and timed, and refused while the server is full or shutting
down. Any error becomes a RequestError with the status code that the client gets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from torch import Tensor

from megalith.errors import InputError
from megalith.serving.proto.tf_tensors import Strings
from megalith.serving.server.access_log import AccessLog
from megalith.serving.server.batching import Alive
from megalith.serving.server.freed_memory import FreedMemory
from megalith.serving.server.inputs import InputReader, Inputs, Rows
from megalith.serving.server.repository import Repository
from megalith.serving.server.request_errors import Code, RequestError, as_request_error
from megalith.serving.server.row_lookup import lookup_rows
from megalith.serving.server.security import Permission
from megalith.serving.server.served_model import Array, ServedModel
from megalith.serving.server.server_config import ServerConfig
from megalith.serving.server.server_metrics import UNKNOWN, Metrics
from megalith.serving.wire_names import LOOKUP, PREDICT, SIGNATURES

DEFAULT_TIMEOUT, MAX_TIMEOUT = 60.0, 3600.0
"""Seconds of a request without a deadline, and the longest deadline."""


class ScoreRequest(Protocol):
    """A request for scores, as a protocol received it."""

    model: str
    version: int | str | None
    """Number or label; None: the newest version, or what the model's rules choose."""
    key: str | None
    """Requests with the same key get the same version; None: any."""
    outputs: Sequence[str]
    """Names of the outputs to return; empty: all. Valid after `read`."""
    timeout: float | None
    """Seconds until the client stops waiting; None: no deadline. Valid after `read`."""
    alive: Alive | None
    """Whether the client still waits."""
    reports_missing: bool
    """Whether the response must give the number of ids without a row."""

    def read(self, reader: InputReader, /) -> Rows:
        """Read the rows; called once, after the request is admitted."""


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Outputs by name, each [rows, ...], and the version that computed them."""

    version: int
    outputs: dict[str, Array]
    missing_ids: dict[str, int] | None = None
    """Feature -> number of its ids without a row; None unless the request asked for it."""


class Dispatcher:
    """Passes requests to the models of a repository."""

    def __init__(self, repository: Repository, metrics: Metrics, config: ServerConfig) -> None:
        self.repository = repository
        self.metrics = metrics
        self.allow_writes = config.allow_writes
        self.max_bytes = config.max_request_bytes
        self.max_predict_bytes = config.max_predict_bytes
        self.typed_outputs = not config.tensor_content
        self.memory = FreedMemory()
        self.access_log = None if config.access_log is None else AccessLog(config.access_log)
        self._security = config.security
        self._max_concurrent = config.max_concurrent
        self._changed = threading.Condition()
        self._running = 0
        self._closing = False
        self._leaving = False

    @property
    def ready(self) -> bool:
        """Whether some model is available and the server is not shutting down."""
        return not self._leaving and any(model.available for model in self.repository.models)

    @property
    def closing(self) -> bool:
        """Whether the server is shutting down."""
        return self._closing

    def permit(self, authorization: str | bytes | None, permission: Permission) -> None:
        """Check what a client may do."""
        if not self._security.requires_token or self._security.permits(authorization, permission):
            return
        known = self._security.admits(authorization)
        text = (
            f"this call needs {'another' if known else 'a'} token: the {permission.value.replace('_', ' ')}"
        )
        raise self.reject(RequestError(Code.PERMISSION_DENIED if known else Code.UNAUTHENTICATED, text))

    def check_size(self, size: int) -> None:
        """Check the bytes of a request that is to be parsed."""
        self.memory.received(size)
        if size > self.max_predict_bytes:
            raise self.reject(
                RequestError(
                    Code.RESOURCE_EXHAUSTED,
                    f"the request has {size} bytes, more than {self.max_predict_bytes}; send it in parts",
                )
            )

    def predict(self, request: ScoreRequest) -> ScoreResult:
        """Compute the scores of a request's rows."""
        with (
            self.admit(request.model, PREDICT) as model,
            model.version(request.version, point=model.point(request.key)) as version,
        ):
            if not version.signature.predicts:
                raise RequestError(
                    Code.INVALID_ARGUMENT,
                    f"{model.name} serves rows: use signature {LOOKUP!r}, or request scores from its entry",
                )
            if self.access_log is not None:
                self.access_log.note(version=version.number)
            started = time.perf_counter_ns()
            try:
                rows = request.read(version.reader)
                for feature in version.reader.missing(rows):
                    self.metrics.missing_feature(model.name, feature)
                read = time.perf_counter_ns()
                scores = version.predict(rows, timeout=_seconds(request.timeout), alive=request.alive)
                ended = time.perf_counter_ns()
                outputs = _select_outputs(scores, request.outputs)
                missing = version.count_missing(rows) if request.reports_missing else None
            except Exception:
                version.statistics.failed(started)
                raise
            version.statistics.succeeded(rows.count, started, read, ended)
            return ScoreResult(version.number, outputs, missing)

    def lookup(
        self,
        name: str,
        version: int | str | None,
        read: Callable[[], Inputs],
        *,
        signature: str = LOOKUP,
        outputs: Sequence[str] = (),
        timeout: float | None = None,
    ) -> tuple[int, dict[str, Tensor]]:
        """Return the rows of the ids that a request holds."""
        with self.admit(name, signature) as model:
            _check_deadline(timeout)
            with model.version(version) as found:
                return found.number, lookup_rows(
                    found.servable, read(), signature=signature, outputs=outputs, max_bytes=self.max_bytes
                )

    def write(
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
            _check_deadline(timeout)
            if not self.allow_writes or model.subscriber is None:
                raise RequestError(
                    Code.PERMISSION_DENIED,
                    "this server accepts no writes; start it with --follow, in Python with "
                    "ServerConfig(allow_writes=True)",
                )
            if not model.writers.acquire(timeout=_seconds(timeout)):
                raise RequestError(Code.DEADLINE_EXCEEDED, f"{model.name}: too many writes at once")
            try:
                response: dict[str, Tensor | Strings] = model.subscriber.handle(signature, read(), metadata)
                return response
            finally:
                model.writers.release()

    def admit(self, name: str, signature: str) -> _Admission:
        """Admit a request."""
        return _Admission(self, name, signature)

    def reject(self, error: Exception) -> RequestError:
        """Count a request that cannot be parsed."""
        status, text = as_request_error(error, "a request")
        self.metrics.request(UNKNOWN, UNKNOWN, status.name, 0.0)
        return RequestError(status, text)

    def leave(self) -> None:
        """Report that the server is not ready any more; requests are still answered."""
        self._leaving = True

    def close(self, timeout: float) -> bool:
        """Refuse new requests and wait for those in progress."""
        with self._changed:
            self._closing = self._leaving = True
            return self._changed.wait_for(lambda: not self._running, timeout)

    def _enter(self) -> None:
        """Register a request; raise RequestError if the server is full or shutting down."""
        with self._changed:
            if self._closing:
                raise RequestError(Code.UNAVAILABLE, "the server is shutting down")
            if self._running >= self._max_concurrent:
                raise RequestError(
                    Code.RESOURCE_EXHAUSTED, f"{self._running} requests are in progress; try again later"
                )
            self._running += 1

    def _leave(self) -> None:
        """Register the end of a request."""
        with self._changed:
            self._running -= 1
            if self._closing:
                self._changed.notify_all()


class _Admission:
    """One request between its admission and its end."""

    __slots__ = ("_dispatcher", "_label", "_name", "_signature", "_started")

    def __init__(self, dispatcher: Dispatcher, name: str, signature: str) -> None:
        self._dispatcher, self._name, self._signature = dispatcher, name, signature
        self._label = UNKNOWN
        self._started = time.perf_counter()

    def __enter__(self) -> ServedModel:
        try:
            self._dispatcher._enter()
        except RequestError as error:
            raise self._end(error) from None
        try:
            model = self._dispatcher.repository.find(self._name)
        except Exception as error:
            self._dispatcher._leave()
            raise self._end(error) from None
        self._label = model.name
        return model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._dispatcher._leave()
        if isinstance(error, Exception):
            raise self._end(error) from None
        self._count("OK")

    def _end(self, error: Exception) -> RequestError:
        status, text = as_request_error(error, f"{self._signature} of {self._label}")
        self._count(status.name)
        return RequestError(status, text)

    def _count(self, code: str) -> None:
        signature = self._signature if self._signature in SIGNATURES else UNKNOWN
        if self._dispatcher.access_log is not None:
            self._dispatcher.access_log.note(model=self._label, signature=self._signature)
        self._dispatcher.metrics.request(self._label, signature, code, time.perf_counter() - self._started)


def unknown_signature(name: str) -> RequestError:
    """Return the error for a signature that no model has."""
    known = ", ".join(SIGNATURES)
    return RequestError(Code.INVALID_ARGUMENT, f"signature {name[:100]!r} is unknown; use one of {known}")


def _seconds(timeout: float | None) -> float:
    return min(DEFAULT_TIMEOUT if timeout is None else timeout, MAX_TIMEOUT)


def _check_deadline(timeout: float | None) -> None:
    if timeout is not None and timeout <= 0:
        raise RequestError(Code.DEADLINE_EXCEEDED, "the deadline passed before the request was read")


def _select_outputs(scores: dict[str, Array], names: Sequence[str]) -> dict[str, Array]:
    if not names:
        return scores
    for name in names:
        if name not in scores:
            raise InputError(f"output {name[:100]!r} is unknown; the model returns {', '.join(scores)}")
    return {name: scores[name] for name in dict.fromkeys(names)}
