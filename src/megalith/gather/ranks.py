"""The ranks of a gather: their exchanges, each with a timeout, and how those that are left go on without one
that died.

They talk over a gloo group of their own, beside the training's. A failed exchange raises `BrokenExchange`;
`reform` then finds out who is still there. One rank alone writes the list of those, so that survivors cannot
split into two groups. What is exchanged is not known here.
"""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    PrefixStore,
)
from torch.distributed.rendezvous import rendezvous

from megalith.errors import InputError, MegalithError, RankTimeoutError

_POLL = 0.05
_log = logging.getLogger("megalith.gather")


class BrokenExchange(MegalithError, RuntimeError):
    """An exchange that did not happen: a rank is gone, or did not come in time."""


def lost_key(rank: int) -> str:
    """Where a launcher notes, in the ranks' store, that this rank has ended."""
    return f"megalith/lost/{rank}"


class Ranks:
    """The ranks that gather together. `rank` is a name for life; `members` are those still there, ascending.

    timeout: seconds an exchange may wait for others, beside what the work before it may take. least: with
    fewer ranks left nobody goes on. has_ended: whether a rank is known to have ended; without it the others
    wait for the timeout.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        timeout: float = 60.0,
        least: int = 1,
        has_ended: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        if not 0 <= rank < world_size or timeout <= 0:
            raise InputError(f"rank {rank} of {world_size} with a timeout of {timeout} s cannot be")
        self.rank = rank
        self.members: tuple[int, ...] = tuple(range(world_size))
        self.timeout = timeout
        self.log: list[str] = []
        """Names of all exchanges so far: the same on all ranks that lived through them."""
        self._store = PrefixStore("megalith/gather", store)
        self._least = least
        self._has_ended = has_ended
        self._generation = 0
        self._group: Any = None
        self._connect("joining", timeout)
        # A group that is still there when the interpreter ends now and then aborts the process.
        atexit.register(_leave, weakref.ref(self))

    @classmethod
    def of_group(
        cls, group: dist.ProcessGroup | None = None, *, timeout: float = 60.0, least: int = 1
    ) -> Ranks:
        """The ranks of a process group, the default one if None; all of them call this.

        They outlive a lost rank if the group's store does: torchrun's and `megalith gather run`'s do.
        """
        given = group if group is not None else dist.group.WORLD
        if given is None:
            raise InputError("there is no process group: call torch.distributed.init_process_group first")
        return cls(given.get_group_store(), dist.get_rank(given), given.size(), timeout=timeout, least=least)

    @classmethod
    def join(cls, *, timeout: float = 60.0, least: int = 1) -> Ranks:
        """The ranks that a launcher started, by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
        try:
            store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0][:300]
            raise RankTimeoutError(f"this process cannot join other ranks: {reason}") from error
        return cls(
            store,
            rank,
            size,
            timeout=timeout,
            least=least,
            has_ended=lambda other: bool(store.check([lost_key(other)])),
        )

    @property
    def size(self) -> int:
        """How many are left."""
        return len(self.members)

    @property
    def place(self) -> int:
        """This rank's place among those left."""
        return self.members.index(self.rank)

    @property
    def leads(self) -> bool:
        """Whether this is the first of those left."""
        return self.members[0] == self.rank

    # ---- exchanges; all members call the same ones in the same order

    def exchange(self, what: str, data: bytes, *, patience: float = 0.0) -> list[bytes]:
        """Everybody's bytes, by place. patience: seconds of work that others may still have before it."""
        if self._group is None:
            self.log.append(what)
            return [data]
        sizes = self._all_gather(what, torch.tensor([len(data)]), patience)
        counts = [int(each) for each in sizes]
        own = torch.zeros(max(1, *counts), dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
        found = self._all_gather(what, own, 0.0)
        self.log.append(what)
        return [each[:count].numpy().tobytes() for each, count in zip(found, counts, strict=True)]

    def total(self, what: str, numbers: Tensor) -> Tensor:
        """The sum of everybody's int64 tensors."""
        if self._group is not None:
            options = AllreduceOptions()
            options.timeout = timedelta(seconds=self.timeout)
            with self._exchanging(what):
                self._group.allreduce([numbers], options).wait()
        self.log.append(what)
        return numbers

    def from_one(self, what: str, data: Tensor, place: int) -> Tensor:
        """Fills `data` with that of the rank at `place`."""
        if self._group is not None:
            options = BroadcastOptions()
            options.rootRank, options.timeout = place, timedelta(seconds=self.timeout)
            with self._exchanging(what):
                self._group.broadcast([data], options).wait()
        self.log.append(what)
        return data

    def all_to_all(self, what: str, data: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """What the others sent here, by place: one tensor of sum(receive) elements.

        data: what goes out, by place; send: elements for each; receive: elements from each.
        """
        if self._group is None:
            self.log.append(what)
            return data
        out = torch.empty(sum(receive), dtype=data.dtype)
        options = AllToAllOptions()
        options.timeout = timedelta(seconds=self.timeout)
        with self._exchanging(what):
            self._group.alltoall_base(out, data, list(receive), list(send), options).wait()
        self.log.append(what)
        return out

    # ---- losing a rank

    def reform(self, what: str, patience: float = 0.0) -> tuple[int, ...]:
        """A new group of those that are still there; the ranks that are not.

        what: the exchange that broke. patience: how long another may still be busy before it notices. Raises
        RankTimeoutError naming the missing if too few are left, or if the others went on without this rank.
        """
        before = self.members
        wait = self.timeout + patience
        for _ in range(len(before) + 1):
            self._leave()
            self._generation += 1
            self.members = self._who_is_here(what, wait)
            absent = tuple(rank for rank in before if rank not in self.members)
            if self.rank not in self.members:
                raise RankTimeoutError(
                    f"{what}: the others went on without rank {self.rank}, which came late"
                )
            if len(self.members) < self._least:
                raise RankTimeoutError(
                    f"{what}: rank {self.rank} waited for {_named(absent)}, which did not come within "
                    f"{wait:g} s; {len(self.members)} of at least {self._least} ranks are left"
                )
            try:
                self._connect(what, self.timeout)
            except BrokenExchange:
                continue
            if absent:
                _log.warning("%s: %s did not come; %d ranks go on", what, _named(absent), self.size)
            self.log.append(f"re-formed without {list(absent)}")
            return absent
        raise RankTimeoutError(f"{what}: rank {self.rank} finds no group of ranks that holds")

    def close(self) -> None:
        """Leaves for good: nobody waits for this rank any more."""
        self._leave()
        with suppress(RuntimeError):
            self._store.set(f"left/{self.rank}", "1")

    def _who_is_here(self, what: str, wait: float) -> tuple[int, ...]:
        """Signs, and returns the list that the first to sign made of those who did."""
        room = PrefixStore(f"generation-{self._generation}", self._store)
        try:
            first = room.add("first", 1) == 1
            room.set(f"here/{self.rank}", "1")
            if first:
                end = time.monotonic() + wait
                while time.monotonic() < end and not all(
                    room.check([f"here/{rank}"]) or self._is_gone(rank) for rank in self.members
                ):
                    time.sleep(_POLL)
                here = [rank for rank in self.members if room.check([f"here/{rank}"])]
                room.set("members", ",".join(map(str, here)))
            room.wait(["members"], timedelta(seconds=wait + self.timeout))
            return tuple(int(rank) for rank in room.get("members").decode().split(","))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0][:300]
            raise RankTimeoutError(
                f"{what}: rank {self.rank} could not learn who is left: {reason}"
            ) from error

    def _is_gone(self, rank: int) -> bool:
        return bool(self._store.check([f"left/{rank}"])) or self._has_ended(rank)

    def _connect(self, what: str, timeout: float) -> None:
        if self.size == 1:
            return
        room = PrefixStore(f"group-{self._generation}", self._store)
        limit = timedelta(seconds=timeout)
        with self._exchanging(what):
            self._group = dist.ProcessGroupGloo(room, self.place, self.size, limit)

    def _leave(self) -> None:
        # Closing its connections is how the others learn at once that this rank gave an exchange up.
        with suppress(RuntimeError):
            self._group = None

    def _all_gather(self, what: str, data: Tensor, patience: float) -> list[Tensor]:
        assert self._group is not None
        found = [torch.empty_like(data) for _ in self.members]
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=self.timeout + patience)
        with self._exchanging(what):
            self._group.allgather([found], [data], options).wait()
        return found

    @contextmanager
    def _exchanging(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).partition("\n")[0][:300]
            raise BrokenExchange(f"{what}: rank {self.rank} did not reach all others: {reason}") from error


def _leave(ranks: weakref.ref[Ranks]) -> None:
    there = ranks()
    if there is not None:
        there._leave()


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
