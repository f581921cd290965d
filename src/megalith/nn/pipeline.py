"""Pipeline: reads batches ahead, so that exchanges between ranks run while the model computes.

A step of a rank waits for other ranks when it looks up and when it updates. The pipeline overlaps these
waits; with depth d:

    batch k                                     batch k + d
    ids have arrived, rows are fetched
                                                read, ids are sorted and sent (mode "rows": rows are fetched)
    dense forward and backward
    gradients are sent (push: without waiting)

Ids depend on the data only, so they may be sent any number of batches ahead. Rows depend on all updates
before them: in mode "ids" they are fetched after the update of batch k - 1, whatever the depth.

The exchanges are those of the loop without a pipeline, made by the same thread in an order that is the same
on all ranks. The pipeline decides when exchanges happen, `shards` what they contain, and `LookupSeries` which
of them are left out after an error.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import is_dataclass, replace
from typing import Any

from torch import Tensor, nn

from megalith.distributed.ranks import ABSENCE_SECONDS
from megalith.errors import InputError, MegalithError, UsageError
from megalith.nn.collection import EmbeddingCollection, StartedBatch
from megalith.nn.compiled_batch import CompiledBatch
from megalith.ops import checks
from megalith.shards import Lookup, Shards
from megalith.shards.lookup import LookupSeries

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
        loader: Yields batches, the same number on all ranks.
        mode: "ids" sends the ids of the next batches ahead and fetches the rows of a batch after the update
            of the batch before it: the same results as without a pipeline. "rows" fetches rows ahead as well:
            they miss the updates of the `depth` batches before and are stale by `depth` steps.
        depth: The number of batches that are read ahead. The first batches of a loop have fewer before them.
        push: Send and apply gradients while the loop continues, at most one step behind. Rows that are
            fetched later include them, so results stay the same; errors are raised one step later.
        attach: For other batches, a function (batch, start) that returns the batch to yield, which must
            contain the result of start(features).

    Raises:
        InputError: For an unknown mode, a depth below 1, a push that is not a bool, or a model without an
            EmbeddingCollection.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        *,
        mode: str = "ids",
        depth: int = 1,
        push: bool = False,
        attach: Callable[[Any, Start], Any] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"Pipeline: model must be an nn.Module, got {type(model).__name__}")
        if not isinstance(mode, str) or mode not in MODES:
            raise InputError(f"Pipeline: mode must be one of {', '.join(MODES)}, got {mode!r}")
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise InputError(f"Pipeline: depth must be an integer of at least 1, got {depth!r}")
        self.collections = [m for m in model.modules() if isinstance(m, EmbeddingCollection)]
        if not self.collections:
            raise InputError(f"Pipeline: {type(model).__name__} contains no EmbeddingCollection")
        if isinstance(loader, Tensor) or not (isinstance(loader, Iterable) or hasattr(loader, "__getitem__")):
            raise InputError(f"Pipeline: loader must be iterable, got {type(loader).__name__}")
        checks.flag(push, "Pipeline: push")
        checks.callback(attach, "Pipeline: attach")
        self.loader = loader
        self.mode = mode
        self.depth = depth
        self.push = push
        self.attach = _attach if attach is None else attach

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        yield from _PipelineEpoch(self, iter(self.loader)).batches()
        for each in self.collections:
            each.shards.flush()


class _PipelineEpoch:
    """One loop over the batches of a loader."""

    def __init__(self, pipeline: Pipeline, source: Iterator[Any]) -> None:
        self._pipeline = pipeline
        self._collections = pipeline.collections
        self._source = source
        self._ahead: deque[_Ahead] = deque()
        self._ended = False  # nothing more is read: the source has ended, or a batch has failed
        self._series: dict[Shards, LookupSeries] = {}

    def batches(self) -> Iterator[Any]:
        self._fill(1)
        while self._ahead:
            batch, lookups = self._ahead.popleft().result()  # no limit: it is set
            for lookup in lookups:
                lookup.wait_ids()  # a bad batch of another rank raises here
            self._fetch(lookups)
            self._fill(self._pipeline.depth)
            trains = [each.trains for each in self._collections]
            try:
                yield batch
            except BaseException:
                self._leave(lookups, trains)
                raise

    def _fill(self, depth: int) -> None:
        """Read batches and send their ids, until `depth` batches are ahead."""
        while len(self._ahead) < depth and not self._ended:
            ahead = self._begin()
            if ahead is None:
                self._ended = True
                return
            self._ahead.append(ahead)
            if ahead.exception() is not None:
                self._ended = True
            elif self._pipeline.mode == "rows":
                self._fetch(ahead.result()[1])  # no limit: it is set

    def _fetch(self, lookups: list[Lookup]) -> None:
        for each, lookup in zip(self._collections, lookups, strict=True):
            lookup.step = each.lookup_step
            lookup.fetch()

    def _begin(self) -> _Ahead | None:
        """Read the next batch and send its ids; return None at the end."""
        ahead: _Ahead = Future()
        compiled: list[CompiledBatch] = []
        started: StartedBatch | None = None

        def start(features: Any) -> StartedBatch:
            nonlocal compiled, started
            if started is not None:
                raise UsageError("Pipeline: attach called start(features) twice for one batch")
            compiled = [each.prepare(features) for each in self._collections]
            started = StartedBatch(features, {})
            return started

        silent = list(self._collections)  # those that have sent nothing for this batch
        try:
            batch = next(self._source, _END)
            if batch is _END:
                return None
            attached = self._pipeline.attach(batch, start)
            if started is None:
                raise UsageError("Pipeline: attach did not call start(features)")
            lookups = []  # after attach: an error in it comes before anything is sent
            for each, own in zip(self._collections, compiled, strict=True):
                silent.pop(0)
                lookup = each.shards.lookup(own.prepared, series=self._series_of(each))
                lookup._attach(own, own.row_splits, self._pipeline.push)
                started.add(each, lookup)
                lookups.append(lookup)
            ahead.set_result((attached, lookups))
        except Exception as error:
            for each in silent:  # otherwise the other ranks would wait for this one
                with suppress(Exception):
                    each.shards.fail(error, series=self._series_of(each))
            ahead.set_exception(error)
        return ahead

    def _series_of(self, collection: EmbeddingCollection) -> LookupSeries:
        return self._series.setdefault(collection.shards, LookupSeries())

    # ---- leaving early

    def _leave(self, current: list[Lookup], trains: list[bool]) -> None:
        """Take part in the next calls of ranks that continue; wait some seconds for them."""
        if all(each.shards.world_size == 1 for each in self._collections):
            return
        # In a thread, as the other ranks may never make these calls: an interrupted job must end soon.
        thread = threading.Thread(
            target=self._fail_all, args=(current, trains), name="megalith pipeline", daemon=True
        )
        thread.start()
        thread.join(ABSENCE_SECONDS)

    def _fail_all(self, current: list[Lookup], trains: list[bool]) -> None:
        """Fail the first call of the ranks that continue which can fail."""
        # This is the update of the current batch or, if it was made, the next lookup, or the update after
        # that. The rows of a batch come between them and cannot fail. Once a call has failed, the series
        # leaves out all others. If all ranks leave here, all of them make these calls.
        error = UsageError("it left the loop over a Pipeline before the end")
        self._fail_updates(current, error, trains)
        for number, ahead in enumerate(self._ahead):
            if ahead.exception() is not None:
                return  # the other ranks raise at this batch
            lookups = ahead.result()[1]  # no limit: it is set
            for lookup in lookups:
                with suppress(MegalithError):  # the series has ended, or the ranks cannot be reached
                    lookup.wait()  # no limit: that of the exchange
            if number == 0 and any(each.is_open for each in self._series.values()) and self._has_more():
                for each in self._collections:
                    with suppress(MegalithError):
                        each.shards.fail(error, series=self._series_of(each), leave=True)
            self._fail_updates(lookups, error, trains)

    def _fail_updates(self, lookups: list[Lookup], error: Exception, trains: list[bool]) -> None:
        for each, lookup, training in zip(self._collections, lookups, trains, strict=True):
            if training:
                with suppress(MegalithError):  # the error itself, or that of the series
                    each.fail(lookup, error, leave=True)

    def _has_more(self) -> bool:
        """Whether the ranks that continue send the ids of another batch; all loaders are equally long."""
        if self._ended:
            return False
        try:
            return next(self._source, _END) is not _END
        except Exception:
            return True


def _attach(batch: Any, start: Start) -> Any:
    if is_dataclass(batch) and not isinstance(batch, type) and hasattr(batch, "features"):
        return replace(batch, features=start(batch.features))
    if type(batch) in (tuple, list) and batch:
        return type(batch)([start(batch[0]), *batch[1:]])
    return start(batch)
