"""save, save_delta and async_save: write a model to a directory or an object store."""

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
from megalith.errors import InputError
from megalith.ops import checks
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
    """Save a model: the rows of all its collections, its dense weights, and the given extras.

    Memory beyond the tables: three pieces of 32 MiB, and up to 64 MiB of rows that change in the meantime.

    Args:
        model: The model. With several ranks all of them call `save`; each writes its own rows. Sharded dense
            weights (DTensors) are gathered and written whole by rank 0.
        path: A directory, a URL such as "s3://bucket/prefix", or a store. An existing checkpoint is replaced
            when the new one is complete.
        optimizer: The optimizer of the dense weights; its state is saved too.
        progress: JSON data of the caller (step, data position, `rng_state()`); with several ranks, rank 0's.
        precision: The precision of the stored weights. "float16" and "bfloat16" lose digits.
        deltas: Whether tables track changes from now on, for `save_delta` to this path. False leaves an
            earlier chain as it is.
        on_rows: Called with the number of rows written so far.
        timeout: Seconds to wait for other ranks.

    Returns:
        The manifest of the checkpoint.

    Raises:
        InputError: An option has the wrong type or value or differs between ranks, or progress is not JSON
            data of at most 97 levels.
        UsageError: Another save of the model is in progress, or the placement of a sharded weight cannot be
            saved.
        CheckpointError: Another rank failed or did not finish in time. The previous checkpoint remains.
        OSError: The files cannot be written. The previous checkpoint remains.
    """
    options = SaveOptions(optimizer, progress, precision, on_rows, timeout, track=deltas, delta=False)
    return SaveJob(model, path, options).run()


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
    """Add the rows changed and the ids removed since the last save or load to that checkpoint.

    Dense weights, and the optimizer's state if given, are saved completely.

    Args:
        model: The model.
        path: The directory, URL or store of the checkpoint.
        optimizer: The optimizer of the dense weights; its state is saved too.
        progress: JSON data of the caller, see `save`.
        precision: The precision of the stored weights, see `save`.
        on_rows: Called with the number of rows written so far.
        timeout: Seconds to wait for other ranks.

    Returns:
        The manifest of the checkpoint with the new delta.

    Raises:
        UsageError: The model was last saved to or loaded from another path.
        CheckpointError: The checkpoint was changed since then. See `save` for the other errors.
    """
    options = SaveOptions(optimizer, progress, precision, on_rows, timeout, track=True, delta=True)
    return SaveJob(model, path, options).run()


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
    on_complete: Callable[[], object] | None = None,
) -> SaveHandle:
    """Save a model in another thread while training continues.

    The model is saved as it is at the time of the call. A model can have one save in progress at a time.

    Args:
        model: The model.
        path: A directory, a URL or a store.
        delta: Do what `save_delta` does instead of `save`.
        optimizer: The optimizer of the dense weights; its state is saved too.
        progress: JSON data of the caller, see `save`.
        precision: The precision of the stored weights, see `save`.
        deltas: Whether tables track changes from now on, see `save`.
        on_rows: Called with the number of rows written so far.
        timeout: Seconds to wait for other ranks.
        on_complete: Called when the checkpoint is complete. Like `on_rows`, it runs in the other thread.

    Returns:
        A handle to wait on, as soon as the state of the model is frozen.

    Raises:
        UsageError: Another save of the model is in progress.
    """
    began = clock.perf_counter()
    options = SaveOptions(
        optimizer,
        progress,
        precision,
        on_rows,
        timeout,
        track=delta is True or deltas,
        delta=delta,
        on_complete=on_complete,
    )
    return SaveHandle(SaveJob(model, path, options), clock.perf_counter() - began, on_complete)


class SaveHandle:
    """A save in progress, the result of `async_save`. It starts the thread that writes.

    Args:
        job: The save; its state is frozen.
        frozen: Seconds for which the call of `async_save` held up training.
        on_complete: Called in the other thread when the checkpoint is complete, or None.

    Attributes:
        id: The id of the save in the manifest.
    """

    def __init__(self, job: SaveJob, frozen: float, on_complete: Callable[[], object] | None) -> None:
        self.id = job.id
        self.frozen = frozen
        self._on_complete = on_complete
        self._job = job
        self._result: Manifest | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="megalith save")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._job.run()
            if self._on_complete is not None:
                self._on_complete()
        except BaseException as error:
            self._error = error  # raised by wait()

    @property
    def waited(self) -> float:
        """Seconds for which training waited because rows changed faster than they were written.

        Final when the save has ended.
        """
        return self._job.waited

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Manifest:
        """Wait for the end of the save.

        Args:
            timeout: Seconds to wait; None waits until the save has ended.

        Returns:
            The manifest of the complete checkpoint.

        Raises:
            TimeoutError: The save has not ended in time; it continues.
            Exception: The error of the save, if it failed.
        """
        if timeout is not None and not checks.number(timeout, "wait: timeout") >= 0:
            raise InputError(f"wait: timeout must be a number of seconds of 0 or more, got {timeout}")
        self._thread.join(None if timeout is None else float(timeout))
        if self._thread.is_alive():
            raise TimeoutError(f"the save has not ended within {timeout} s")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result
