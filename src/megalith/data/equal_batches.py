"""pad_to_equal_batches: the same number of batches on every rank, however unequal their data.

Ranks that exchange rows must make the same calls. A rank that runs out of data continues with empty batches
until all ranks have run out. What a model does with an empty batch is not handled here.

Before each batch, every rank sends its status and the time and rows of its batch in one all-reduce:

    status         meaning                               what this rank yields
    _READY         it has a batch                        its batch
    _DONE          it has no more batches                an empty batch, if another rank is ready
    _NO_COLUMNS    the same, and it never had a batch    the same; a ready rank broadcasts its columns first
    _FAILED        its loader raised an error            it raises; the others raise RankFailedError

The columns of a batch are sent as JSON with names, dtypes and widths, no data (`describe_columns`). It comes
from another process and is validated by `make_empty_batch`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import fields, replace
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.data.batch import Batch, Position
from megalith.distributed.ranks import has_process_group, naming_absent_ranks, wait_for_all_ranks
from megalith.errors import InputError, MegalithError, RankFailedError, UsageError
from megalith.ops import checks
from megalith.ragged import Ragged
from megalith.storage.json_codec import parse_json

_INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "bool")
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_TYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in (*_INTEGERS, *_FLOATS)}
_MAX_DIMS, _MAX_WIDTH = 8, 1 << 31
_COLUMNS = ("labels", "dense", "weights")


def describe_columns(batch: Batch) -> bytes:
    """Return the columns of a batch as JSON: {"features": {name: {"values", "weights"}}, "labels", ...}."""
    # A column is [dtype, widths after the first dimension], or null if the batch does not have it.
    features = {
        name: {"values": _describe_column(ragged.values), "weights": _describe_column(ragged.weights)}
        for name, ragged in batch.features.items()
    }
    return json.dumps(
        {"features": features, **{c: _describe_column(getattr(batch, c)) for c in _COLUMNS}}
    ).encode()


def make_empty_batch(text: bytes, *, where: str) -> Batch:
    """Return a batch with zero rows and the described columns, on the CPU, without time and position."""
    try:
        found = parse_json(text)
        features = {
            str(name): Ragged(
                _required_column(each["values"]),
                torch.zeros(1, dtype=torch.int64, device="cpu"),
                _empty_column(each["weights"]),
            )
            for name, each in found["features"].items()
        }
        return Batch(
            features,
            _required_column(found["labels"]),
            _empty_column(found["dense"]),
            _empty_column(found["weights"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise InputError(f"{where} sent an invalid description of the columns of a batch: {error}") from None


def _describe_column(column: Tensor | None) -> list[Any] | None:
    return None if column is None else [str(column.dtype).removeprefix("torch."), list(column.shape[1:])]


def _required_column(column: Any) -> Tensor:
    made = _empty_column(column)
    if made is None:
        raise ValueError("a required column is missing")
    return made


def _empty_column(column: Any) -> Tensor | None:
    if column is None:
        return None
    name, widths = column
    if not isinstance(widths, list) or len(widths) > _MAX_DIMS:
        raise ValueError(f"widths must be a list of at most {_MAX_DIMS} integers")
    for width in widths:
        if type(width) is not int or not 0 <= width <= _MAX_WIDTH:
            raise ValueError(f"a width must be an integer from 0 to {_MAX_WIDTH}, got {width!r}")
    if name not in _TYPES:
        raise ValueError(f"unknown dtype {name!r}")
    return torch.empty(0, *widths, dtype=_TYPES[name], device="cpu")


TIMEOUT = 600.0
"""How many seconds a rank waits for the next batch of the others, by default."""

_READY, _DONE, _NO_COLUMNS, _FAILED = range(4)
_NO_TIME = -(2**63)
_MAX_DESCRIPTION = 1 << 24


def pad_to_equal_batches(
    loader: Iterable[Batch], group: dist.ProcessGroup | None = None, *, timeout: float = TIMEOUT
) -> EqualBatchLoader:
    """Return the batches of a loader, then empty ones until the loaders of all ranks have run out.

    This is a collective call, and so is every batch: all ranks of the group make it once and iterate equally
    often, to the end or to the same batch. With one rank, or without a process group, it adds nothing.

    Args:
        loader: The batches of this rank.
        group: The process group; None: the default group.
        timeout: Seconds to wait for the other ranks.

    Returns:
        An iterable that yields as many batches on every rank.

    Raises:
        InputError: For a timeout that is not positive.
        UsageError: If this process is not in the group.
        RankTimeoutError: If a rank does not arrive in time; it names this rank and the absent ones.
    """
    return EqualBatchLoader(loader, group, timeout=timeout)


class EqualBatchLoader(Iterable[Batch]):
    """The result of `pad_to_equal_batches`; each `for` loop is an epoch of the loader.

    An empty batch has the columns of this rank's batches with zero rows: the same features, dtypes, widths
    and device. A rank that has not had a batch receives the columns from the lowest rank that has one (a
    plain Batch on the CPU). The time of an empty batch is the newest of the other ranks' batches at that
    turn; its position is that of this rank's last batch.

    Each batch costs one all-reduce of 24 bytes per rank over a separate gloo group: about 0.5 ms at 2 ranks
    and 2.5 ms at 4 ranks that share two cores. If the loader of a rank raises, that error is raised there and
    RankFailedError on the others, at that batch.

    Args:
        loader: The batches of this rank.
        group: The process group; None: the default group.
        timeout: Seconds to wait for the other ranks.

    Attributes:
        sizes: Number of rows of the last batch on each rank. Empty before the first batch and with one rank.
    """

    def __init__(
        self, loader: Iterable[Batch], group: dist.ProcessGroup | None = None, *, timeout: float = TIMEOUT
    ) -> None:
        if isinstance(loader, Tensor) or not (isinstance(loader, Iterable) or hasattr(loader, "__getitem__")):
            raise InputError(f"pad_to_equal_batches: loader must be iterable, got {type(loader).__name__}")
        self.loader = loader
        self.timeout = checks.seconds(timeout, "pad_to_equal_batches: timeout")
        self.sizes: list[int] = []
        self._group: dist.ProcessGroup | None = None
        self._epoch = 0
        if has_process_group():
            parent = dist.group.WORLD if group is None else group
            if not isinstance(parent, dist.ProcessGroup):
                raise UsageError(
                    "pad_to_equal_batches: this process is not in the process group that was passed"
                )
            if dist.get_world_size(parent) > 1:
                self._group = _own_group(parent, timeout)

    def __iter__(self) -> Iterator[Batch]:
        if self._group is None:
            yield from self.loader
            return
        self._epoch += 1
        exchange = _EpochExchange(self._group, self._epoch, self.timeout)
        source = _each(self.loader)
        empty: Batch | None = None
        position: Position | None = None
        for turn in count():
            own = self._pull(source, exchange, turn)
            if own is not None:
                empty = _emptied(own) if empty is None else empty
                position = own.position
            status = _READY if own is not None else _NO_COLUMNS if empty is None else _DONE
            statuses, times, self.sizes = exchange.statuses(turn, status, own)
            if failed := [rank for rank, each in enumerate(statuses) if each == _FAILED]:
                raise RankFailedError(
                    f"pad_to_equal_batches: batch {turn} of epoch {self._epoch}: rank "
                    f"{exchange.ranks[failed[0]]} failed to read it, so rank {exchange.rank} "
                    "stops too; see the error on that rank"
                )
            if _READY not in statuses:
                return
            if _NO_COLUMNS in statuses:
                received = exchange.columns(turn, statuses.index(_READY), own)
                empty = received if empty is None else empty
            if own is not None:
                yield own
            else:
                assert empty is not None
                if position is None:
                    position = dict(getattr(self.loader, "position", {}))
                newest = max((time for time in times if time is not None), default=None)
                yield replace(empty, time=newest, position=dict(position))

    def _pull(self, source: Iterator[Batch], exchange: _EpochExchange, turn: int) -> Batch | None:
        """Return the next batch or None; reports an error to the other ranks before raising it."""
        try:
            own = next(source, None)
            if own is not None and not isinstance(own, Batch):
                raise InputError(
                    f"pad_to_equal_batches: the loader must yield Batches, got {type(own).__name__}"
                )
            return own
        except Exception:
            with suppress(MegalithError):  # the error of this rank matters more than absent ranks
                exchange.statuses(turn, _FAILED, None)
            raise


class _EpochExchange:
    def __init__(self, group: dist.ProcessGroup, epoch: int, timeout: float) -> None:
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self.index = dist.get_rank(group)
        self.rank = self.ranks[self.index]
        self._epoch = epoch
        self._timeout = timeout

    def statuses(
        self, turn: int, status: int, own: Batch | None
    ) -> tuple[list[int], list[int | None], list[int]]:
        """Return the statuses, times and numbers of rows of all ranks of the group."""
        time = None if own is None else own.time
        shared = torch.zeros(len(self.ranks), 3, dtype=torch.int64, device="cpu")
        shared[self.index, 0] = status
        shared[self.index, 1] = _NO_TIME if time is None else time
        shared[self.index, 2] = 0 if own is None else len(own)
        with self._watched(turn, "status"):
            dist.all_reduce(shared, group=self.group)  # each rank fills its own row; the others are 0
        statuses, times, sizes = shared.t().tolist()
        return statuses, [None if time == _NO_TIME else time for time in times], sizes

    def columns(self, turn: int, source_rank: int, own: Batch | None) -> Batch:
        """Return an empty batch with the columns of a rank that has a batch."""
        text = describe_columns(own) if own is not None and self.index == source_rank else b""
        length = torch.tensor(len(text), device="cpu")
        with self._watched(turn, "columns"):
            dist.broadcast(length, group=self.group, group_src=source_rank)
            if not 0 < int(length) <= _MAX_DESCRIPTION:
                raise InputError(
                    f"pad_to_equal_batches: rank {self.ranks[source_rank]} sent a description of its columns "
                    f"with {int(length)} bytes"
                )
            data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
            if text:
                data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
            dist.broadcast(data, group=self.group, group_src=source_rank)
        return make_empty_batch(
            data.numpy().tobytes(), where=f"pad_to_equal_batches: rank {self.ranks[source_rank]}"
        )

    def _watched(self, turn: int, what: str) -> AbstractContextManager[None]:
        where = f"pad_to_equal_batches: batch {turn} of epoch {self._epoch}"
        return naming_absent_ranks(
            self.group, where, f"equal batches/{self._epoch}/{turn}/{what}", self._timeout
        )


def _own_group(parent: dist.ProcessGroup, timeout: float) -> dist.ProcessGroup:
    """Return a gloo group of the same ranks, so that exchanges do not interleave with those of the model."""
    turn = parent.get_group_store().add(f"pad_to_equal_batches/{dist.get_rank(parent)}", 1)
    wait_for_all_ranks(parent, "pad_to_equal_batches", f"pad_to_equal_batches/{turn}", timeout)
    ranks = dist.get_process_group_ranks(parent)
    made = dist.new_group(
        ranks, timeout=timedelta(seconds=timeout), backend="gloo", use_local_synchronization=True
    )
    assert isinstance(made, dist.ProcessGroup)
    return made


def _each(loader: Iterable[Batch]) -> Iterator[Batch]:
    """Yield from the loader; it is opened with the first batch, where errors are reported to other ranks."""
    yield from loader


def _emptied(batch: Batch) -> Batch:
    """Return the batch without rows, as a copy: a view would keep the memory of the batch."""
    changed: dict[str, Any] = {
        "features": {name: _no_rows(ragged) for name, ragged in batch.features.items()}
    }
    for each in fields(batch):
        value = getattr(batch, each.name)
        if isinstance(value, Tensor):
            changed[each.name] = value[:0].clone()
    return replace(batch, **changed)


def _no_rows(ragged: Ragged) -> Ragged:
    weights = None if ragged.weights is None else ragged.weights[:0].clone()
    return Ragged(ragged.values[:0].clone(), torch.zeros_like(ragged.row_splits[:1]), weights)
