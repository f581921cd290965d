"""Reading ahead: a thread reads the next batches while the caller computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator

from megalith.data.batch import Batch

BATCHES = 2
"""Batches that wait for the caller."""
_SECONDS = 0.1
"""How often a thread that waits for room looks whether the caller has left."""


def read_ahead(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yields the same batches, read in a thread."""
    # Reading and computing overlap where the caller waits for a GPU. The reader is ahead of what was yielded:
    # `batch.position` tells where to continue, `reader.position` does not.
    waiting: queue.Queue[Batch | BaseException | None] = queue.Queue(BATCHES)
    left = threading.Event()
    thread = threading.Thread(target=_read, args=(batches, waiting, left), name="read-ahead", daemon=True)
    thread.start()
    try:
        while (batch := waiting.get()) is not None:
            if isinstance(batch, BaseException):
                raise batch
            yield batch
    finally:
        left.set()
        thread.join()


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
