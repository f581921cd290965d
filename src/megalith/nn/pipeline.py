"""Pipeline: reads batches one ahead, so that exchanges between ranks run while the model computes.

A step of a rank waits for other ranks when it looks up and when it updates. The pipeline overlaps these
waits:

    batch k                                     batch k + 1
    ids have arrived, rows are fetched
                                                read, ids are sorted and sent (mode "rows": rows are fetched)
    dense forward and backward
    gradients are sent (push: without waiting)

The exchanges are those of the loop without a pipeline, made by the same thread in an order that is the same
on all ranks. The pipeline decides when exchanges happen, `shards` what they contain.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import nn

from megalith.distributed.absent_ranks import GRACE
from megalith.errors import InputError, MegalithError, UsageError
from megalith.nn.batch_lookup import BatchLookup, StartedBatch
from megalith.nn.collection import EmbeddingCollection
from megalith.shards import Lookup

MODES = ("ids", "rows")
_END = object()

Start = Callable[[Any], StartedBatch]
_Ahead = Future[tuple[Any, list[Lookup]]]
"""The batch to yield and its lookups, one per collection, or the error to raise instead."""


class Pipeline(Iterable[Any]):
    """The batches of a loader, with their lookups in progress. Each `for` loop is an epoch of the loader.

    A batch is yielded with a `StartedBatch` in place of its features, for the forward of the model: the
    features of a dataclass with `features` (`data.Batch`), the first item of a tuple or list, or the whole
    batch.

    Make the update of a batch in its iteration of the loop. An error in reading or preparing a batch raises
    on all ranks, in the iteration of that batch. If a rank leaves the loop early, the others raise
    RankFailedError at their next update or batch; if all ranks leave at the same batch, none raises. The end
    of the loop waits for pushed gradients; after leaving early, the next `shards.flush()` raises their
    errors. Tables of one process (LocalShards) are read in forward: there is nothing to overlap, and rows are
    never stale.

    Args:
        model: An EmbeddingCollection, or a module that contains some.
        loader: Yields batches.
        mode: "ids" sends the ids of the next batch ahead and fetches its rows after the update of this batch:
            the same results as without a pipeline. "rows" fetches rows ahead as well: they miss the update of
            the batch before and are stale by one step.
        push: Send and apply gradients while the loop continues, at most one step behind. Rows that are
            fetched later include them, so results stay the same; errors are raised one step later.
        attach: For other batches, a function (batch, start) that returns the batch to yield, which must
            contain the result of start(features).

    Raises:
        InputError: For an unknown mode, or a model without an EmbeddingCollection.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        *,
        mode: str = "ids",
        push: bool = False,
        attach: Callable[[Any, Start], Any] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"Pipeline: model must be an nn.Module, got {type(model).__name__}")
        if not isinstance(mode, str) or mode not in MODES:
            raise InputError(f"Pipeline: mode must be one of {', '.join(MODES)}, got {mode!r}")
        self._collections = [m for m in model.modules() if isinstance(m, EmbeddingCollection)]
        if not self._collections:
            raise InputError(f"Pipeline: {type(model).__name__} contains no EmbeddingCollection")
        self.loader = loader
        self.mode = mode
        self.push = push
        self._attach = _attach if attach is None else attach

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches(iter(self.loader))
        for each in self._collections:
            each.shards.flush()

    def _batches(self, source: Iterator[Any]) -> Iterator[Any]:
        ahead = self._begin(source)
        while ahead is not None:
            batch, lookups = ahead.result()
            for lookup in lookups:
                lookup.wait_ids()  # all ranks learn of a bad batch here, before they send the next ids
            for lookup in lookups:
                lookup.fetch()
            ahead = self._begin(source)
            if ahead is not None and ahead.exception() is None and self.mode == "rows":
                for lookup in ahead.result()[1]:
                    lookup.fetch()
            trains = torch.is_grad_enabled()
            try:
                yield batch
            except BaseException:
                self._leave(lookups, ahead, trains)
                raise

    def _begin(self, source: Iterator[Any]) -> _Ahead | None:
        """Reads the next batch and sends its ids; returns None at the end."""
        started: dict[EmbeddingCollection, BatchLookup] = {}
        silent = list(self._collections)  # those that have sent nothing for this batch
        ahead: _Ahead = Future()

        def start(features: Any) -> StartedBatch:
            if not silent:
                raise UsageError("Pipeline: attach called start(features) twice for one batch")
            for compiled in [each.prepare(features) for each in self._collections]:
                each = silent.pop(0)
                lookup = each.shards.lookup(compiled.prepared)
                started[each] = BatchLookup(compiled, lookup, self.push)
            return StartedBatch(features, started)

        try:
            batch = next(source, _END)
            if batch is _END:
                return None
            attached = self._attach(batch, start)
            if silent:
                raise UsageError("Pipeline: attach did not call start(features)")
            ahead.set_result((attached, [each.lookup for each in started.values()]))
        except Exception as error:
            for each in silent:  # otherwise the other ranks would wait for this one
                with suppress(Exception):
                    each.shards.fail(error)
            ahead.set_exception(error)
        return ahead

    # ---- leaving early

    def _leave(self, current: list[Lookup], ahead: _Ahead | None, trains: bool) -> None:
        """Takes part in the next calls of ranks that continue; waits some seconds for them."""
        if all(each.shards.world_size == 1 for each in self._collections):
            return
        # In a thread, as the other ranks may never make these calls: an interrupted job must end soon.
        args = (current, ahead, trains)
        thread = threading.Thread(target=self._fail_all, args=args, name="megalith pipeline", daemon=True)
        thread.start()
        thread.join(GRACE)

    def _fail_all(self, current: list[Lookup], ahead: _Ahead | None, trains: bool) -> None:
        """Fails the calls of ranks that continue: this update, the next lookup, the update after it.

        The rows of the next batch come between them and cannot fail. If all ranks leave here, all of them
        make these calls.
        """
        error = UsageError("it left the loop over a Pipeline before the end")
        with suppress(MegalithError):  # the other ranks know of it, or cannot be reached
            self._fail_updates(current, error, trains)
            if ahead is None or ahead.exception() is not None:
                return
            lookups = ahead.result()[1]
            for lookup in lookups:
                lookup.wait()
            for each in self._collections:
                with suppress(UsageError):
                    each.shards.fail(error)
            self._fail_updates(lookups, error, trains)

    def _fail_updates(self, lookups: list[Lookup], error: Exception, trains: bool) -> None:
        for each, lookup in zip(self._collections, lookups, strict=True):
            if trains:
                with suppress(UsageError):  # the error itself
                    each.fail(lookup, error)


def _attach(batch: Any, start: Start) -> Any:
    if is_dataclass(batch) and not isinstance(batch, type) and hasattr(batch, "features"):
        return replace(batch, features=start(batch.features))
    if type(batch) in (tuple, list) and batch:
        return type(batch)([start(batch[0]), *batch[1:]])
    return start(batch)
