"""Pipeline: a loader's batches one ahead, so that exchanges between ranks run while the model computes.

A rank's step waits for other ranks when it looks up and when it updates. Here the next batch is read, and
its ids are sorted and sent, while this one's rows travel and the dense part computes; with `push`, gradients
travel while the caller goes on. The exchanges are those of the loop without it, made by the same thread in an
order that is the same on all ranks.

It changes when exchanges happen. What travels is `shards`' business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from megalith.distributed.absent_ranks import GRACE
from megalith.errors import InputError, MegalithError, UsageError
from megalith.nn.batch_forms import Started, StartedBatch
from megalith.nn.collection import EmbeddingCollection

MODES = ("ids", "rows")
_END = object()

Start = Callable[[Any], StartedBatch]


class Pipeline(Iterable[Any]):
    """The batches of a loader, their look-ups under way. Each `for` loop is an epoch of the loader.

    model: an EmbeddingCollection, or a module with some inside. loader: yields batches. mode: "ids" sends
    the next batch's ids ahead and fetches its rows after this batch's update: the same results as without a
    pipeline. "rows" fetches rows ahead as well: they miss the update of the batch before, stale by one
    step. push: gradients are sent and applied while the loop goes on, one step behind at most; rows fetched
    later have them, so results stay the same, and errors come a step later.

    A batch is yielded with `StartedBatch`es in place of its features, for the model's forward: those of a
    dataclass with `features` (`data.Batch`), the first of a tuple or list, or all of it. attach: for others,
    a function (batch, start) that gives the batch to yield, where start(features) is what it must hold.

    The update of a batch belongs into its turn of the loop. An error in reading or preparing a batch raises
    on all ranks, when the batch is due. A rank that leaves the loop early tells the others, which then raise
    RankFailedError at their next update or batch; where all leave at the same batch nobody does. The end of
    the loop waits for pushed gradients; leaving early leaves their errors to the next `shards.flush()`.
    Tables of one process (LocalShards) are read in forward: nothing to overlap, and never stale.
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
        if mode not in MODES:
            raise InputError(f"Pipeline: mode must be one of {', '.join(MODES)}, got {mode!r}")
        self._collections = [m for m in model.modules() if isinstance(m, EmbeddingCollection)]
        if not self._collections:
            raise InputError(f"Pipeline: {type(model).__name__} holds no EmbeddingCollection")
        self.loader = loader
        self.mode = mode
        self.push = push
        self._attach = _attach if attach is None else attach

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        pushed = [each.shards.push for each in self._collections]
        try:
            for each in self._collections:
                each.shards.push = each.shards.push or self.push
            yield from self._batches(iter(self.loader))
            for each in self._collections:
                each.shards.flush()
        finally:
            for each, before in zip(self._collections, pushed, strict=True):
                each.shards.push = before

    def _batches(self, source: Iterator[Any]) -> Iterator[Any]:
        ahead = self._begin(source)
        while ahead is not None:
            current = ahead
            if current.error is not None:
                raise current.error
            current.wait_ids()  # all ranks learn of a bad batch here, before they send the next one's ids
            current.fetch()
            ahead = self._begin(source)
            if ahead is not None and self.mode == "rows":
                ahead.fetch()
            trains = torch.is_grad_enabled()
            try:
                yield current.batch
            except BaseException:
                self._leave(current, ahead, trains)
                raise

    def _begin(self, source: Iterator[Any]) -> _Turn | None:
        """Reads the next batch and sends its ids; None at the end. Errors are kept for the batch's turn."""
        started: dict[EmbeddingCollection, Started] = {}
        silent = list(self._collections)  # those that have told the other ranks nothing of this batch

        def start(features: Any) -> StartedBatch:
            if not silent:
                raise UsageError("Pipeline: attach called start(features) twice for one batch")
            for own in [each.prepare(features) for each in self._collections]:
                each = silent.pop(0)
                started[each] = Started(own, each.shards.lookup(own.ids))
            return StartedBatch(features, started)

        try:
            batch = next(source, _END)
            if batch is _END:
                return None
            attached = self._attach(batch, start)
            if silent:
                raise UsageError("Pipeline: attach did not call start(features)")
            return _Turn(attached, list(started.values()))
        except Exception as error:
            for each in silent:  # or the other ranks would wait for this one
                with suppress(Exception):
                    each.shards.abort(error)
            return _Turn(None, [], error)

    # ---- leaving early

    def _leave(self, current: _Turn, ahead: _Turn | None, trains: bool) -> None:
        """Takes part in what other ranks do next, should they go on; waits some seconds for them."""
        if all(each.shards.world_size == 1 for each in self._collections):
            return
        # A thread, as the others may never come: an interrupted job must end soon.
        args = (current, ahead, trains)
        thread = threading.Thread(target=self._say_goodbye, args=args, name="megalith pipeline", daemon=True)
        thread.start()
        thread.join(GRACE.total_seconds())

    def _say_goodbye(self, current: _Turn, ahead: _Turn | None, trains: bool) -> None:
        """The calls of ranks that go on: this update, the next rows, the ids after them, the next update.

        Each that can says that this rank has failed. If all ranks leave here, all make these calls.
        """
        error = UsageError("it left the loop over a Pipeline before the end")
        with suppress(MegalithError):  # they know, or cannot be reached
            self._give_up(current, error, trains)
            if ahead is None or ahead.error is not None:
                return
            for _, lookup in ahead.lookups:
                lookup.wait()
            for each in self._collections:
                with suppress(UsageError):
                    each.shards.abort(error)
            self._give_up(ahead, error, trains)

    def _give_up(self, turn: _Turn, error: Exception, trains: bool) -> None:
        for each, (_, lookup) in zip(self._collections, turn.lookups, strict=True):
            if trains:
                each.give_up(lookup, error)


@dataclass(frozen=True)
class _Turn:
    """A batch of the loop and its look-ups, one a collection; or the error in place of it."""

    batch: Any
    lookups: Sequence[Started]
    error: Exception | None = None

    def wait_ids(self) -> None:
        for _, lookup in self.lookups:
            lookup.wait_ids()

    def fetch(self) -> None:
        for _, lookup in self.lookups:
            lookup.fetch()


def _attach(batch: Any, start: Start) -> Any:
    if is_dataclass(batch) and not isinstance(batch, type) and hasattr(batch, "features"):
        return replace(batch, features=start(batch.features))
    if type(batch) in (tuple, list) and batch:
        return type(batch)([start(batch[0]), *batch[1:]])
    return start(batch)
