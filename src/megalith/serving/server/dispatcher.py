"""Dispatch: from a request, whatever protocol it came by, to the model it names and back.

Every request passes here: it is counted, timed, refused while the server is full or shutting down, and what
goes wrong becomes a RequestError with the code its client gets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from megalith.errors import InputError
from megalith.serving.proto.tf_tensors import Strings
from megalith.serving.server.batching import Alive
from megalith.serving.server.inputs import InputReader, Rows
from megalith.serving.server.repository import Repository
from megalith.serving.server.request_errors import Code, RequestError, as_request_error
from megalith.serving.server.served_model import Array, ServedModel, lookup_rows
from megalith.serving.server.server_metrics import UNKNOWN, Metrics
from megalith.serving.wire_names import LOOKUP, PREDICT, SIGNATURES

MAX_TIMEOUT = 3600.0

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Question:
    """What a request asks to be scored."""

    read: Callable[[InputReader], Rows]
    """Reads its rows."""
    outputs: Sequence[str] = ()
    """Those wanted; none means all."""
    timeout: float | None = None
    """Seconds until nobody waits for the answer; None if it names no deadline."""


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Outputs by name, each [rows], and the version that gave them."""

    model: str
    version: int
    outputs: dict[str, Array]


class Dispatcher:
    """Requests to the models of a repository.

    max_concurrent: requests under way at once. timeout: seconds for those that name no deadline.
    """

    def __init__(
        self,
        repository: Repository,
        metrics: Metrics,
        *,
        allow_writes: bool,
        max_bytes: int,
        max_concurrent: int,
        timeout: float = 60.0,
    ) -> None:
        self.repository = repository
        self.metrics = metrics
        self.allow_writes = allow_writes
        self.max_bytes = max_bytes
        self._max_concurrent = max_concurrent
        self._timeout = timeout
        self._changed = threading.Condition()
        self._running = 0
        self._closing = False

    @property
    def ready(self) -> bool:
        """Whether requests are answered."""
        return not self._closing and any(model.available for model in self.repository.models)

    @property
    def closing(self) -> bool:
        """Whether the server is about to end."""
        return self._closing

    def predict(
        self,
        name: str,
        version: int | None,
        asks: Callable[[], Question],
        *,
        alive: Alive | None = None,
    ) -> ScoreResult:
        """Scores of a request's rows. asks: called when the request is admitted, not before."""

        def work(model: ServedModel) -> ScoreResult:
            with model.version(version) as found:
                if not found.signature.predicts:
                    raise RequestError(
                        Code.INVALID_ARGUMENT,
                        f"{model.name} holds rows: ask it with signature {LOOKUP!r}, or its entry for scores",
                    )
                question = asks()
                rows = question.read(found.reader)
                for feature in found.reader.missing(rows):
                    self.metrics.missing_feature(model.name, feature)
                scores = found.predict(rows, timeout=self._seconds(question.timeout), alive=alive)
                return ScoreResult(found.signature.name, found.number, _picked(scores, question.outputs))

        return self.run(name, PREDICT, work)

    def lookup(
        self,
        name: str,
        version: int | None,
        inputs: Callable[[], Mapping[str, Tensor | Strings]],
        *,
        timeout: float | None = None,
    ) -> tuple[int, dict[str, Tensor]]:
        """The rows of ids, and the version they are of."""

        def work(model: ServedModel) -> tuple[int, dict[str, Tensor]]:
            _check_in_time(timeout)
            with model.version(version) as found:
                return found.number, lookup_rows(found, inputs(), max_bytes=self.max_bytes)

        return self.run(name, LOOKUP, work)

    def write(
        self,
        name: str,
        signature: str,
        inputs: Callable[[], Mapping[str, Tensor | Strings]],
        metadata: Mapping[str, str],
        *,
        timeout: float | None = None,
    ) -> dict[str, Tensor | Strings]:
        """A push of training's, or a question about pushes."""

        def work(model: ServedModel) -> dict[str, Tensor | Strings]:
            _check_in_time(timeout)
            if not self.allow_writes or model.subscriber is None:
                raise RequestError(
                    Code.PERMISSION_DENIED,
                    "this server takes no writes; --follow allows them",
                )
            if not model.writers.acquire(timeout=self._seconds(timeout)):
                raise RequestError(Code.DEADLINE_EXCEEDED, f"{model.name}: too many writes at once")
            try:
                answer: dict[str, Tensor | Strings] = model.subscriber.handle(signature, inputs(), metadata)
                return answer
            finally:
                model.writers.release()

        return self.run(name, signature, work)

    def run(self, name: str, signature: str, work: Callable[[ServedModel], Answer]) -> Answer:
        """Does a request's work with the model it names. Raises RequestError, whatever went wrong."""
        started = time.perf_counter()
        label, code = UNKNOWN, "OK"
        try:
            self._enter()
            try:
                model = self.repository.find(name)
                label = model.name
                return work(model)
            finally:
                self._leave()
        except Exception as error:
            status, text = as_request_error(error, f"{signature} of {label}")
            code = status.name
            raise RequestError(status, text) from None
        finally:
            shown = signature if signature in SIGNATURES else UNKNOWN
            self.metrics.request(label, shown, code, time.perf_counter() - started)

    def refused(self, error: Exception) -> RequestError:
        """The end of a request that could not even be read."""
        status, text = as_request_error(error, "a request")
        self.metrics.request(UNKNOWN, UNKNOWN, status.name, 0.0)
        return RequestError(status, text)

    def close(self, timeout: float) -> bool:
        """Refuses what comes, and waits for what is under way; False if some of it still is."""
        with self._changed:
            self._closing = True
            return self._changed.wait_for(lambda: not self._running, timeout)

    def _seconds(self, timeout: float | None) -> float:
        return min(self._timeout if timeout is None else timeout, MAX_TIMEOUT)

    def _enter(self) -> None:
        with self._changed:
            if self._closing:
                raise RequestError(Code.UNAVAILABLE, "the server is shutting down")
            if self._running >= self._max_concurrent:
                raise RequestError(
                    Code.RESOURCE_EXHAUSTED,
                    f"{self._running} requests are under way; try again later",
                )
            self._running += 1

    def _leave(self) -> None:
        with self._changed:
            self._running -= 1
            if self._closing:
                self._changed.notify_all()


def _check_in_time(timeout: float | None) -> None:
    if timeout is not None and timeout <= 0:
        raise RequestError(Code.DEADLINE_EXCEEDED, "the deadline passed before the request was looked at")


def _picked(scores: dict[str, Array], wanted: Sequence[str]) -> dict[str, Array]:
    if not wanted:
        return scores
    for name in wanted:
        if name not in scores:
            raise InputError(f"output {name[:100]!r} is unknown; the model gives {', '.join(scores)}")
    return {name: scores[name] for name in dict.fromkeys(wanted)}


def unknown_signature(name: str) -> RequestError:
    """The error for a signature that no model has."""
    return RequestError(
        Code.INVALID_ARGUMENT, f"signature {name[:100]!r} is unknown; there is {', '.join(SIGNATURES)}"
    )
