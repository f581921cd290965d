"""Served models, their versions, and the statistics of each version.

A model passes its requests to the newest version, to one that its rules choose (versions.py), or to the one
that they name by number or label. Requests hold the version that they use. A retired version accepts no
further requests and is closed when the last one ends.

    ModelState   meaning                                          next
    LOADING      the version is being opened and warmed up        AVAILABLE, END
    AVAILABLE    the version answers requests                     UNLOADING
    UNLOADING    retired; requests in progress still use it       END
    END          closed, or failed to open (with the reason)      LOADING

The statistics are sums since the version was loaded, as Triton reports them:

    success      the whole request, from the choice of the version to its outputs
    fail         the same, for requests that raised an error
    input        reading the inputs
    queue        waiting for a batch and for other requests of it
    infer        the computation of its batch
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from megalith.errors import DiscoveryError, InputError, RemoteError
from megalith.serving.client.row_fetcher import RowFetcher
from megalith.serving.export.servable import Servable, predict_plain
from megalith.serving.export.signature import ENTRY, STANDALONE, Signature
from megalith.serving.server.batching import Batcher
from megalith.serving.server.inputs import InputReader, Rows
from megalith.serving.server.request_errors import Code, RequestError
from megalith.serving.server.server_config import ServerConfig
from megalith.serving.sync.subscriber import Subscriber
from megalith.serving.wire_names import ModelState

logger = logging.getLogger(__name__)


@dataclass
class StatisticSums:
    """Counts, and sums of nanoseconds."""

    successes: int = 0
    success_ns: int = 0
    failures: int = 0
    fail_ns: int = 0
    input_ns: int = 0
    waited_ns: int = 0
    """Time in which successful requests were queued or computed."""
    infer_ns: int = 0
    """Time of batches, counted for each of their requests."""
    rows: int = 0
    batches: int = 0
    last_ms: int = 0
    """When the last successful request ended, in milliseconds since 1970."""

    @property
    def queue_ns(self) -> int:
        """Time in which requests were not computed yet, or waited for others."""
        return max(0, self.waited_ns - self.infer_ns)


class VersionStatistics:
    """The statistics of one version. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = StatisticSums()

    def succeeded(self, rows: int, started: int, read: int, ended: int) -> None:
        """Count a request that was answered; times are those of `time.perf_counter_ns`."""
        with self._lock:
            sums = self._sums
            sums.successes += 1
            sums.rows += rows
            sums.success_ns += ended - started
            sums.input_ns += read - started
            sums.waited_ns += ended - read
            sums.last_ms = time.time_ns() // 1_000_000

    def failed(self, started: int) -> None:
        with self._lock:
            self._sums.failures += 1
            self._sums.fail_ns += time.perf_counter_ns() - started

    def computed(self, requests: int, nanoseconds: int) -> None:
        with self._lock:
            self._sums.batches += 1
            self._sums.infer_ns += requests * nanoseconds

    def sums(self) -> StatisticSums:
        with self._lock:
            return StatisticSums(**vars(self._sums))


Array = NDArray[np.generic]
Scores = tuple[dict[str, Array], int, int]
"""The outputs of a batch, and the first and last (exclusive) row of a request in them."""


class Version:
    def __init__(
        self,
        servable: Servable,
        config: ServerConfig,
        *,
        on_batch: Callable[[int], object] = lambda rows: None,
        fetcher: RowFetcher | None = None,
    ) -> None:
        self.servable = servable
        self.fetcher = fetcher
        self.signature = servable.signature
        self.number = servable.signature.version
        self.reader = InputReader(
            servable.signature, max_bytes=config.max_request_bytes, refuse_nan=config.refuse_nan
        )
        self.statistics = VersionStatistics()
        self._predict_plain = partial(predict_plain, servable)
        self._max_rows = config.batching.max_rows
        self._ended = threading.Event()
        self._batcher: Batcher[Rows, Scores] = Batcher(
            self._compute,
            config.batching,
            name=f"{self.signature.name}-{self.number}",
            combines=self.signature.batchable,
            inline=fetcher is None,  # other servers may take long to answer
            on_batch=on_batch,
            on_end=self._close,
        )
        self._lock = threading.Lock()
        self._users = 0
        self._retired = False
        self._on_end: Callable[[], object] = lambda: None

    @property
    def queued_rows(self) -> int:
        return self._batcher.queued_rows

    def acquire(self) -> bool:
        """Keep the version open until `release`; return False if it has been retired."""
        with self._lock:
            self._users += not self._retired
            return not self._retired

    def release(self) -> None:
        """Release the version; the last user of a retired version closes it."""
        with self._lock:
            self._users -= 1
            last = self._retired and not self._users
        if last:
            self._batcher.close()

    async def predict(self, rows: Rows, timeout: float) -> dict[str, Array]:
        """Compute the scores of a request, together with those of other requests."""
        if not rows.count:
            return {each.name: np.empty((0, *each.shape), each.dtype) for each in self.signature.outputs}
        if rows.count > self._max_rows:
            return await self._predict_pieces(rows, timeout)
        outputs, begin, end = await self._batcher.submit(rows, rows.count, cost=rows.cost, timeout=timeout)
        return {name: array[begin:end] for name, array in outputs.items()}

    async def _predict_pieces(self, rows: Rows, timeout: float) -> dict[str, Array]:
        if self.signature.joint_rows:
            raise InputError(
                f"{self.signature.name} computes the rows of a request together: a request has at most "
                f"{self._max_rows} rows, not {rows.count} (--max-batch-rows, in Python Batching(max_rows=))"
            )
        self._batcher.check(rows.count, rows.cost)
        end = time.monotonic() + timeout
        parts = [
            await self.predict(piece, end - time.monotonic())
            for piece in self.reader.pieces(rows, self._max_rows)
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def count_missing(self, rows: Rows) -> dict[str, int]:
        """Count the ids of a request that have no row."""
        with self._lock:  # the caller has acquired it, but may leave before this ends
            if not rows.count or not self._users:
                return {}
            self._users += 1
        try:
            return self.servable.count_missing(self.reader.join([rows])[0])
        finally:
            self.release()

    def retire(self, on_end: Callable[[], object] = lambda: None) -> None:
        """Accept no further requests, and close the version when the last request has ended."""
        with self._lock:
            self._retired, self._on_end = True, on_end
            idle = not self._users
        if idle:
            self._batcher.close()

    def join(self, timeout: float) -> None:
        """Wait until a version that is retired is closed."""
        if not self._ended.wait(timeout):
            logger.error(
                "%s version %d: its last requests have not ended in %g s; they end with this process",
                self.signature.name,
                self.number,
                timeout,
            )

    def _close(self) -> None:
        """Close what the version has opened; the last of its threads calls it."""
        self.servable.close()
        if self.fetcher is not None:
            self.fetcher.close()
        self._on_end()
        self._ended.set()

    def _compute(self, batch: Sequence[Rows]) -> Sequence[Scores | Exception]:
        try:
            started = time.perf_counter_ns()
            plain = [rows.plain for rows in batch if rows.plain is not None]
            if len(plain) == len(batch) and self.servable.plain_features:
                size = sum([rows.count for rows in batch])
                outputs = self._predict_plain(plain, size, self.reader.join_dense(batch))
            else:
                outputs = self.servable.predict(*self.reader.join(batch))
            self.statistics.computed(len(batch), time.perf_counter_ns() - started)
        except Exception as error:
            if len(batch) == 1 or _is_unavailable(error):
                return [error] * len(batch)
            # One bad request must not fail the others.
            return [result for rows in batch for result in self._compute([rows])]
        arrays = {name: tensor.numpy() for name, tensor in outputs.items()}
        results: list[Scores | Exception] = []
        begin = 0
        for rows in batch:
            results.append((arrays, begin, begin + rows.count))
            begin += rows.count
        return results


def _is_unavailable(error: Exception) -> bool:
    """Return whether a part of the model did not answer, so that splitting the batch would not help."""
    if isinstance(error, RemoteError):
        return error.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
    return isinstance(error, DiscoveryError)


@dataclass(frozen=True)
class VersionStatus:
    """State of a version, and why it ended."""

    state: ModelState
    error: str = ""


class ServedModel:
    """A model, or one part of it, and its versions. Thread-safe."""

    def __init__(self, name: str, root: str) -> None:
        self.name = name
        self.root = root
        self.subscriber: Subscriber | None = None
        self.labels: dict[str, int] = {}
        self._lock = threading.Lock()
        self._versions: dict[int, Version] = {}
        self._status: dict[int, VersionStatus] = {}
        self._newest: Version | None = None

    @property
    def newest(self) -> Version | None:
        """The version with the highest number; None while no version is available."""
        return self._newest

    @property
    def versions(self) -> dict[int, Version]:
        """The available versions by number."""
        with self._lock:
            return dict(sorted(self._versions.items()))

    @property
    def statuses(self) -> dict[int, VersionStatus]:
        """The status of every known version, newest first."""
        with self._lock:
            return dict(sorted(self._status.items(), reverse=True))

    def statuses_of(self, wanted: int | str | None) -> dict[int, VersionStatus]:
        """Return the status of some versions. Raise RequestError if the one that is named is unknown."""
        number = self._labelled(wanted) if isinstance(wanted, str) else wanted or None
        found = self.statuses
        if number is None:
            return found
        if number not in found:
            raise RequestError(Code.NOT_FOUND, f"model {self.name!r} has no version {number}")
        return {number: found[number]}

    @property
    def available(self) -> bool:
        return self._newest is not None

    def set_status(self, number: int, state: ModelState, error: str = "") -> None:
        """Set the status of a version; only the newest 16 ended versions are kept."""
        with self._lock:
            self._status[number] = VersionStatus(state, error)
            ended = [n for n, status in sorted(self._status.items()) if status.state == ModelState.END]
            for old in ended[:-16]:
                del self._status[old]

    def add(self, version: Version) -> None:
        """Make a version available; the highest number is the newest."""
        with self._lock:
            self._versions[version.number] = version
            self._newest = self._versions[max(self._versions)]
        self.set_status(version.number, ModelState.AVAILABLE)

    def remove(self, number: int) -> Version:
        """Retire a version."""
        with self._lock:
            version = self._versions.pop(number)
            self._newest = self._versions[max(self._versions)] if self._versions else None
        self.set_status(number, ModelState.UNLOADING)
        version.retire(lambda: self._ended(number))
        return version

    def _ended(self, number: int) -> None:
        if number not in self.versions:  # the same number may have been loaded again
            self.set_status(number, ModelState.END)

    @contextmanager
    def version(self, wanted: int | str | None) -> Iterator[Version]:
        """Give a version for the time of one request. Raise RequestError if there is none."""
        found = self.acquire(wanted)  # no limit: it does not wait
        try:
            yield found
        finally:
            found.release()

    def acquire(self, wanted: int | str | None) -> Version:
        """Return a version, which the caller releases. Raise RequestError if there is none."""
        number = self._labelled(wanted) if isinstance(wanted, str) else wanted
        while True:
            with self._lock:
                found = None if number is None else self._versions.get(number)
                if found is None and not wanted:
                    found = self._newest
            if found is None:
                raise self._not_found(number)
            if found.acquire():  # no limit: it does not wait
                return found

    def _labelled(self, label: str) -> int:
        labels = self.labels  # the next poll may replace them
        if label in labels:
            return labels[label]
        known = ", ".join(list(labels)[:20]) or "none"
        raise RequestError(
            Code.NOT_FOUND,
            f"model {self.name!r} has no version label {label[:100]!r}; its labels are {known} "
            "(`megalith versions` sets them)",
        )

    def _not_found(self, number: int | None) -> RequestError:
        if number is None:
            return RequestError(Code.UNAVAILABLE, f"model {self.name!r} has no available version")
        known = ", ".join(map(str, self.versions)) or "none"
        return RequestError(Code.NOT_FOUND, f"model {self.name!r} has no version {number}; it has {known}")


def names_of(signature: Signature) -> list[str]:
    """Return the names of a model in requests."""
    if signature.part != STANDALONE:
        return [signature.name]
    parts = [STANDALONE, ENTRY, "ps_0"] if signature.predicts else [STANDALONE, "ps_0"]
    return [signature.model, *(f"{signature.model}:{part}" for part in parts)]


def services_of(signature: Signature) -> list[str]:
    return [name for name in names_of(signature) if ":" in name]
