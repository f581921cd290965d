"""save, save_delta, async_save: a model into a directory or an object store."""

from __future__ import annotations

import threading
import time as clock
from collections.abc import Callable
from os import PathLike
from typing import Any

import torch
from torch import nn

from megalith.checkpoint.manifest import Manifest
from megalith.checkpoint.save_job import SaveJob, SaveOptions
from megalith.storage.store import Store

TIMEOUT = 1800.0


def save(
    model: nn.Module,
    path: str | PathLike[str] | Store,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    progress: dict[str, Any] | None = None,
    precision: str = "float32",
    deltas: bool = True,
    on_rows: Callable[[int], None] | None = None,
    timeout: float = TIMEOUT,
) -> Manifest:
    """Saves a model: rows of all its collections, dense weights, and what else is given.

    path: a directory or an address like "s3://bucket/prefix"; a checkpoint that is there is replaced when the
    new one is complete. optimizer: of the dense weights. progress: JSON-able data of the caller's (step, data
    position, `rng_state()`); with many ranks, rank 0's. precision: of stored weights; "float16" and
    "bfloat16" lose digits. deltas: tables remember what changes from now on, for `save_delta` to this path;
    False leaves an earlier chain as it is. on_rows: called with the number of rows written so far.
    timeout: seconds to wait for other ranks.
    Memory beyond the tables: three pieces of 32 MiB, and up to 64 MiB of rows that change meanwhile.
    """
    return SaveJob(
        model,
        path,
        SaveOptions(
            optimizer=optimizer,
            progress=progress,
            precision=precision,
            track=deltas,
            delta=False,
            on_rows=on_rows,
            timeout=timeout,
        ),
    ).run()


def save_delta(
    model: nn.Module,
    path: str | PathLike[str] | Store,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    progress: dict[str, Any] | None = None,
    precision: str = "float32",
    on_rows: Callable[[int], None] | None = None,
    timeout: float = TIMEOUT,
) -> Manifest:
    """Adds to the checkpoint this model last saved or loaded: rows changed and ids removed since.

    Dense weights, and the optimizer if given, are saved whole. Raises UsageError if the model's last save or
    load was elsewhere, CheckpointError if that checkpoint has changed since. Arguments as of `save`.
    """
    return SaveJob(
        model,
        path,
        SaveOptions(
            optimizer=optimizer,
            progress=progress,
            precision=precision,
            track=True,
            delta=True,
            on_rows=on_rows,
            timeout=timeout,
        ),
    ).run()


def async_save(
    model: nn.Module,
    path: str | PathLike[str] | Store,
    *,
    delta: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    progress: dict[str, Any] | None = None,
    precision: str = "float32",
    deltas: bool = True,
    on_rows: Callable[[int], None] | None = None,
    timeout: float = TIMEOUT,
    then: Callable[[], object] | None = None,
) -> SaveHandle:
    """`save`, or with delta=True `save_delta`, while training goes on. Returns once everything is frozen.

    What is saved is the model as it is now. A model has one save under way at a time: another raises
    UsageError. on_rows, and `then` once the checkpoint is complete, are called from another thread.
    """
    began = clock.perf_counter()
    options = SaveOptions(
        optimizer=optimizer,
        progress=progress,
        precision=precision,
        track=deltas or delta,
        delta=delta,
        on_rows=on_rows,
        timeout=timeout,
    )
    return SaveHandle(SaveJob(model, path, options), clock.perf_counter() - began, then)


class SaveHandle:
    """A save under way. id: what its manifest will call it. frozen: seconds until training could go on."""

    def __init__(self, job: SaveJob, frozen: float, then: Callable[[], object] | None) -> None:
        self.id = job.id
        self.frozen = frozen
        self._then = then
        self._job = job
        self._result: Manifest | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="megalith save")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._job.run()
            if self._then is not None:
                self._then()
        except BaseException as error:
            self._error = error  # for whoever waits

    @property
    def waited(self) -> float:
        """Seconds training stood still, as rows changed faster than they were written; known at the end."""
        return self._job.waited

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Manifest:
        """The manifest, once the checkpoint is complete; raises what went wrong, or TimeoutError."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the save has not ended within {timeout} s")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result
