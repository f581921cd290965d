"""Served models: versions that answer, and the model they are versions of.

A version is used by requests while they run; it is closed when it has been retired and nobody uses it. A
model hands its requests to the newest version, or to the one they name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.errors import DiscoveryError, InputError, RemoteError
from megalith.serving.client.row_fetcher import RowFetcher
from megalith.serving.export.servable import Servable
from megalith.serving.export.signature import ENTRY, STANDALONE, Signature
from megalith.serving.model_state import ModelState
from megalith.serving.server.batching import Alive, Batcher, Batching
from megalith.serving.server.inputs import InputReader, Rows
from megalith.serving.server.request_errors import Code, RequestError
from megalith.serving.sync.subscriber import Subscriber

Array = NDArray[np.generic]
Scores = tuple[dict[str, Array], int, int]
"""The outputs of a batch, and which of their rows are a request's."""

MAX_WRITERS = 8
"""Writes of a model under way at once; each holds a thread of the server's."""


class Version:
    """A version of a model that answers requests. fetcher: where an entry's rows come from."""

    def __init__(
        self,
        servable: Servable,
        batching: Batching,
        *,
        max_bytes: int,
        on_batch: Callable[[int], object] = lambda rows: None,
        fetcher: RowFetcher | None = None,
    ) -> None:
        self.servable = servable
        self.fetcher = fetcher
        self.signature = servable.signature
        self.number = servable.signature.version
        self.reader = InputReader(servable.signature, max_bytes=max_bytes)
        self._max_rows = batching.max_rows
        self._batcher: Batcher[Rows, Scores] = Batcher(
            self._compute,
            batching,
            name=f"{self.signature.name}-{self.number}",
            joins=self.signature.batchable,
            on_batch=on_batch,
        )
        self._unused = threading.Condition()
        self._users = 0
        self._retired = False
        self._left_behind = False
        self._on_end: Callable[[], object] = lambda: None

    @property
    def queued_rows(self) -> int:
        """Rows that wait to be computed."""
        return self._batcher.queued_rows

    @contextmanager
    def used(self) -> Iterator[bool]:
        """Keeps the version open meanwhile; gives False if it has been retired already."""
        with self._unused:
            usable = not self._retired
            self._users += usable
        try:
            yield usable
        finally:
            if usable:
                with self._unused:
                    self._users -= 1
                    self._unused.notify_all()
                    last = self._left_behind and not self._users
                if last:
                    self._close()

    def predict(self, rows: Rows, *, timeout: float, alive: Alive | None = None) -> dict[str, Array]:
        """Outputs by name, each [rows]. Raises RequestError, InputError, or what the model raises."""
        if not rows.count:
            return {name: np.empty(0, np.float32) for name in self.signature.outputs}
        self._batcher.check(rows.count, self.reader.cost(rows))
        end = time.monotonic() + timeout
        parts = [
            self._score(piece, end - time.monotonic(), alive)
            for piece in self.reader.pieces(rows, self._max_rows)
        ]
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _score(self, rows: Rows, timeout: float, alive: Alive | None) -> dict[str, Array]:
        cost = self.reader.cost(rows)
        outputs, begin, end = self._batcher.submit(rows, rows.count, cost=cost, timeout=timeout, alive=alive)
        return {name: array[begin:end] for name, array in outputs.items()}

    def retire(self, timeout: float = 0.0, on_end: Callable[[], object] = lambda: None) -> None:
        """Lets nobody else use it; closes it when nobody does any more, then calls `on_end`.

        Waits for that at most `timeout` seconds: later, its last user closes it.
        """
        with self._unused:
            self._retired, self._on_end = True, on_end
            idle = self._unused.wait_for(lambda: not self._users, timeout)
            self._left_behind = not idle
        if idle:
            self._close()

    def _close(self) -> None:
        self._batcher.close()
        self.servable.close()
        if self.fetcher is not None:
            self.fetcher.close()
        self._on_end()

    def _compute(self, batch: Sequence[Rows]) -> Sequence[Scores | Exception]:
        try:
            features, dense = self.reader.join(batch)
            outputs = self.servable.predict(features, dense)
        except Exception as error:
            if len(batch) == 1 or _is_absence(error):
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


def _is_absence(error: Exception) -> bool:
    """Whether a part of the model did not answer: no fault of a request's, nor mended by asking for each."""
    if isinstance(error, RemoteError):
        return error.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
    return isinstance(error, DiscoveryError)


@dataclass(frozen=True)
class VersionStatus:
    """Where a version is in its life, and what went wrong."""

    state: ModelState
    error: str = ""


class ServedModel:
    """A model, or one part of it, and its versions. Threads may share it.

    name: what requests call it. root: the directory its versions are in, for people.
    """

    def __init__(self, name: str, root: str) -> None:
        self.name = name
        self.root = root
        self.subscriber: Subscriber | None = None
        self.writers = threading.BoundedSemaphore(MAX_WRITERS)
        self._lock = threading.Lock()
        self._versions: dict[int, Version] = {}
        self._status: dict[int, VersionStatus] = {}
        self._newest: Version | None = None

    @property
    def newest(self) -> Version | None:
        """The version that requests get unless they name one; None before there is any."""
        return self._newest

    @property
    def versions(self) -> dict[int, Version]:
        """Those that answer, by number."""
        with self._lock:
            return dict(sorted(self._versions.items()))

    @property
    def statuses(self) -> dict[int, VersionStatus]:
        """Every version seen, newest first."""
        with self._lock:
            return dict(sorted(self._status.items(), reverse=True))

    @property
    def available(self) -> bool:
        """Whether it answers."""
        return self._newest is not None

    def set_status(self, number: int, state: ModelState, error: str = "") -> None:
        """Notes where a version is; old ends are forgotten."""
        with self._lock:
            self._status[number] = VersionStatus(state, error)
            ended = [n for n, status in sorted(self._status.items()) if status.state == ModelState.END]
            for old in ended[:-16]:
                del self._status[old]

    def add(self, version: Version) -> None:
        """Lets a version answer; the highest number is the newest."""
        with self._lock:
            self._versions[version.number] = version
            self._newest = self._versions[max(self._versions)]
        self.set_status(version.number, ModelState.AVAILABLE)

    def remove(self, number: int, timeout: float = 0.0) -> None:
        """Takes a version away from new requests; it ends with its last one, which is waited for so long."""
        with self._lock:
            version = self._versions.pop(number)
            self._newest = self._versions[max(self._versions)] if self._versions else None
        self.set_status(number, ModelState.UNLOADING)
        version.retire(timeout, lambda: self._ended(number))

    def _ended(self, number: int) -> None:
        if number not in self.versions:  # another one may have come under its number
            self.set_status(number, ModelState.END)

    @contextmanager
    def version(self, number: int | None) -> Iterator[Version]:
        """A version for the time of one request; None is the newest. Raises RequestError if there is none.

        0 is the newest too where no version has that number: some clients send it for none.
        """
        while True:
            with self._lock:
                found = self._newest if number is None else self._versions.get(number)
                found = found or (None if number else self._newest)
            if found is None:
                raise self._absent(number)
            with found.used() as usable:
                if usable:
                    yield found
                    return

    def _absent(self, number: int | None) -> RequestError:
        if number is None:
            return RequestError(Code.UNAVAILABLE, f"model {self.name!r} has no version that answers")
        known = ", ".join(map(str, self.versions)) or "none"
        return RequestError(Code.NOT_FOUND, f"model {self.name!r} has no version {number}; it has {known}")


def names_of(signature: Signature) -> list[str]:
    """What requests may call a model: a standalone one by each part it stands for."""
    model = signature.model
    if signature.part == STANDALONE:
        return [model, f"{model}:{STANDALONE}", f"{model}:{ENTRY}", f"{model}:ps_0"]
    return [signature.name]


def services_of(signature: Signature) -> list[str]:
    """What discovery calls it."""
    return [name for name in names_of(signature) if ":" in name]


def lookup_rows(version: Version, inputs: Mapping[str, Any], *, max_bytes: int) -> dict[str, Tensor]:
    """`{table}_id` int64 [n] -> `{table}_value` float32 [n, dim].

    max_bytes: what the rows may take together. Raises InputError, naming the input.
    """
    tables = version.signature.tables
    outputs = {}
    left = max_bytes
    for name, ids in inputs.items():
        table = name.removesuffix("_id")
        if not name.endswith("_id") or table not in tables:
            known = ", ".join(f"{table}_id" for table in list(tables)[:20])
            raise InputError(f"input {name[:100]!r} is unknown; lookup takes {known}")
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
            raise InputError(f"input {name!r} must be int64 [ids]")
        left -= 4 * ids.numel() * tables[table].dim
        if left < 0:
            raise InputError(
                f"the rows of {name!r} would take more than {max_bytes} bytes; ask for fewer ids"
            )
        outputs[f"{table}_value"] = version.servable.lookup(table, ids)
    return outputs
