"""Reading ahead: a thread reads the next batches while the caller computes."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable, Iterator

from megalith.data.batch import Batch

logger = logging.getLogger(__name__)
BATCHES = 2
"""Batches that wait for the caller."""
LEAVE_SECONDS = 10.0
"""How long a loop that is left waits for the read in progress."""
_SECONDS = 0.1
"""How often a thread that waits for room looks whether the caller has left."""


def read_ahead(batches: Iterable[Batch], *, timeout: float = 600.0) -> Iterator[Batch]:
    """Yield the same batches, read in a thread; TimeoutError if one takes more than `timeout` seconds."""
    # Reading and computing overlap where the caller waits for a GPU. The reader is ahead of what was yielded:
    # `batch.position` tells where to continue, `reader.position` does not.
    waiting: queue.Queue[Batch | BaseException | None] = queue.Queue(BATCHES)
    left = threading.Event()
    thread = threading.Thread(target=_read, args=(batches, waiting, left), name="read-ahead", daemon=True)
    thread.start()
    source = type(batches).__name__
    try:
        while True:
            try:
                batch = waiting.get(timeout=timeout)
            except queue.Empty:
                raise TimeoutError(
                    f"{source}: no batch was read within {timeout:g} s: check the storage it reads from, or "
                    "raise the limit, which is train.timeout in a run"
                ) from None
            if batch is None:
                return
            if isinstance(batch, BaseException):
                raise batch
            yield batch
    finally:
        left.set()
        thread.join(LEAVE_SECONDS)
        if thread.is_alive():
            logger.warning(
                "%s: its thread still reads a batch %g s after the loop was left; it ends after that read",
                source,
                LEAVE_SECONDS,
            )


def _read(
    batches: Iterable[Batch], waiting: queue.Queue[Batch | BaseException | None], left: threading.Event
) -> None:
    try:
        for batch in batches:
            if not _put(waiting, batch, left):
                return
    except BaseException as error:
        _put(waiting, error, left)
    else:
        _put(waiting, None, left)


def _put(
    waiting: queue.Queue[Batch | BaseException | None],
    item: Batch | BaseException | None,
    left: threading.Event,
) -> bool:
    """Passes an item on; returns False if the caller has left."""
    while not left.is_set():
        try:
            waiting.put(item, timeout=_SECONDS)
            return True
        except queue.Full:
            continue
    return False
