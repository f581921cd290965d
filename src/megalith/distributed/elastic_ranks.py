"""ElasticRanks: an elastic group of ranks, which continues without a rank that dies; and its launcher.

The ranks use their own gloo group, in addition to that of the training. A failed exchange raises
`BrokenExchange`; `reform` then finds out which ranks are still there:

    broken exchange -> every rank that is left leaves the group and registers in the store for the next
                       generation
                    -> the first to register waits for the others, then writes the list of members
                    -> all read this one list, so that they cannot split into two groups -> new group

`launch_ranks` starts ranks on this machine. It hosts the store at which they connect, so that the store
outlives every rank, and records there which ranks have exited, so that no rank waits for them. Other
launchers end all ranks when one fails. What is exchanged is not handled here.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import subprocess
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    PrefixStore,
    Store,
)
from torch.distributed.rendezvous import TCPStore, rendezvous  # type: ignore[attr-defined]

from megalith.distributed.ranks import BrokenExchange, Ranks
from megalith.errors import InputError, MegalithError, RankFailedError, RankTimeoutError
from megalith.ops import checks

T = TypeVar("T")
_POLL = 0.05
_log = logging.getLogger("megalith.gather")


def lost_key(rank: int) -> str:
    """Return the key under which a launcher records, in the ranks' store, that a rank has ended."""
    return f"megalith/lost/{rank}"


class ElasticRanks(Ranks):
    """Ranks that work together and survive each other.

    Args:
        store: A store of torch.distributed that all ranks reach.
        rank: The rank of this process; it never changes.
        world_size: The number of ranks at the start.
        timeout: Seconds that an exchange may wait for others, in addition to the work before it.
        least: With fewer ranks left, the work ends.
        has_ended: Returns whether a rank is known to have ended; without it the others wait for the timeout.

    Attributes:
        members: The ranks that are left, ascending.
        size: Their number.
        log: The names of all exchanges so far, equal on all ranks that took part in them.
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
        checks.instance(store, Store, "store")
        checks.integer(least, "ranks: least")
        if checks.integer(rank, "rank", 0) >= checks.integer(world_size, "world_size"):
            raise InputError(f"rank must be below world_size={world_size}, got {rank}")
        checks.seconds(timeout, "ranks: timeout")
        self.rank = rank
        self._set_members(range(world_size))
        self.timeout = timeout
        self.log: list[str] = []
        self._store = PrefixStore("megalith/gather", store)
        self._least = least
        self._has_ended = has_ended
        self._generation = 0
        self._group: Any = None
        self._connect("joining", timeout)
        if world_size > 1:
            # A group that still exists when the interpreter ends sometimes aborts the process.
            atexit.register(_leave_at_exit, weakref.ref(self))

    @classmethod
    def alone(cls) -> ElasticRanks:
        """Return the ranks of a process that works alone: itself."""
        return cls(dist.HashStore(), 0, 1)  # type: ignore[attr-defined]

    @classmethod
    def or_alone(cls, ranks: ElasticRanks | None) -> ElasticRanks:
        """Return given ranks, or those of a process that works alone.

        Args:
            ranks: The ranks, or None.

        Returns:
            The ranks.
        """
        return cls.alone() if ranks is None else checks.instance(ranks, ElasticRanks, "ranks")

    @classmethod
    def of_group(
        cls, group: dist.ProcessGroup | None = None, *, timeout: float = 60.0, least: int = 1
    ) -> ElasticRanks:
        """Return the ranks of a process group. A collective call.

        They survive a lost rank if the group's store does: the stores of torchrun and of
        `megalith gather run` do.

        Args:
            group: The group; None: the default group.
            timeout: See the class.
            least: See the class.

        Returns:
            The ranks.

        Raises:
            InputError: There is no process group.
        """
        given = group if group is not None else dist.group.WORLD
        if given is None:
            raise InputError("there is no process group: call torch.distributed.init_process_group first")
        checks.instance(given, dist.ProcessGroup, "group")
        return cls(given.get_group_store(), dist.get_rank(given), given.size(), timeout=timeout, least=least)

    @classmethod
    def join(cls, *, timeout: float = 60.0, least: int = 1) -> ElasticRanks:
        """Return the ranks that a launcher started, by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

        Args:
            timeout: See the class.
            least: See the class.

        Returns:
            The ranks.

        Raises:
            RankTimeoutError: The variables are not set, or others do not connect in time.
        """
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

    def _set_members(self, members: Iterable[int]) -> None:
        self.members: tuple[int, ...] = tuple(members)
        self.size = len(self.members)

    @property
    def place(self) -> int:
        """The index of this rank in `members`."""
        return self.members.index(self.rank)

    @property
    def leads(self) -> bool:
        """Whether this rank is the first member."""
        return self.members[0] == self.rank

    # ---- exchanges; all members call the same ones in the same order

    def exchange(self, what: str, data: bytes, *, patience: float = 0.0) -> list[bytes]:
        """Return the bytes of all members.

        Args:
            what: The name of the exchange.
            data: The bytes of this rank.
            patience: Seconds of work that other ranks may still have before it.

        Returns:
            The bytes of each member, by place.

        Raises:
            BrokenExchange: A rank is gone or late, here as in every exchange.
        """
        if self._group is None:
            self.log.append(what)
            return [data]
        sizes = self._all_gather(what, torch.tensor([len(data)], device="cpu"), patience)
        counts = [int(each) for each in sizes]
        own = torch.zeros(max(1, *counts), dtype=torch.uint8, device="cpu")
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
        found = self._all_gather(what, own, 0.0)
        self.log.append(what)
        return [each[:count].numpy().tobytes() for each, count in zip(found, counts, strict=True)]

    def gather(self, value: Any, what: str = "values", *, patience: float = 0.0) -> list[Any]:
        """Return the values of all members.

        Args:
            value: JSON data of this rank.
            what: The name of the exchange.
            patience: Seconds of work that other ranks may still have before it.

        Returns:
            The value of each member, by place.
        """
        data = json.dumps(value, allow_nan=False).encode()
        return [json.loads(each) for each in self.exchange(what, data, patience=patience)]

    def agree(
        self,
        work: Callable[[], T],
        what: str = "agreement",
        *,
        error: type[MegalithError] = RankFailedError,
        keep: tuple[type[MegalithError], ...] = (),
        patience: float = 0.0,
    ) -> T:
        """Run a function on every rank; if it fails on one, raise on all.

        Args:
            work: The function. It may do different work on each rank.
            what: The name of the exchange.
            error: The error that is raised on the other ranks.
            keep: Errors of `work` that are raised as they are on the other ranks.
            patience: Seconds that it may take longer on another rank.

        Returns:
            The result of `work` on this rank.

        Raises:
            Exception: The error of `work` itself, on the ranks where it failed.
            RankFailedError: On the other ranks; the message names the first rank that failed, and its error.
        """
        outcomes = partial(self.gather, what=what, patience=patience)
        return self._agree(work, outcomes, error, keep, f"{what}: ")

    def _numbers(self) -> Sequence[int]:
        return self.members

    def total(self, what: str, numbers: Tensor) -> Tensor:
        """Add the tensors of all members, in place.

        Args:
            what: The name of the exchange.
            numbers: A tensor of one shape and dtype on all ranks. Sums of floats depend on the number of
                ranks, but are equal on all of them.

        Returns:
            `numbers`, which holds the sum.
        """
        if self._group is not None:
            options = AllreduceOptions()
            options.timeout = timedelta(seconds=self.timeout)
            with self._exchanging(what):
                self._group.allreduce([numbers], options).wait()  # no limit: in options
        self.log.append(what)
        return numbers

    def from_one(self, what: str, data: Tensor, place: int) -> Tensor:
        """Send a tensor from one member to all.

        Args:
            what: The name of the exchange.
            data: What is sent at `place`; elsewhere a contiguous tensor that receives it.
            place: The place of the sender.

        Returns:
            `data`.
        """
        if self._group is not None:
            options = BroadcastOptions()
            options.rootRank, options.timeout = place, timedelta(seconds=self.timeout)
            with self._exchanging(what):
                self._group.broadcast([data], options).wait()  # no limit: in options
        self.log.append(what)
        return data

    def all_to_all(self, data: Tensor, send: Sequence[int], receive: Sequence[int], what: str) -> Tensor:
        """Send a different part of a tensor to each member.

        Args:
            data: What is sent, by place, [sum(send)].
            send: The number of elements for each member.
            receive: The number of elements from each member.
            what: The name of the exchange.

        Returns:
            What was received, by place, [sum(receive)]. A process alone gets `data` itself.
        """
        if self._group is None:
            self.log.append(what)
            return data
        out = torch.empty(sum(receive), dtype=data.dtype, device="cpu")
        options = AllToAllOptions()
        options.timeout = timedelta(seconds=self.timeout)
        with self._exchanging(what):
            self._group.alltoall_base(
                out, data, list(receive), list(send), options
            ).wait()  # no limit: in options
        self.log.append(what)
        return out

    # ---- losing a rank

    def reform(self, what: str, patience: float = 0.0) -> tuple[int, ...]:
        """Form a new group of the ranks that are still there.

        Args:
            what: The exchange that failed.
            patience: Seconds that another rank may still be busy before it notices.

        Returns:
            The ranks that are lost.

        Raises:
            RankTimeoutError: Too few are left (it names the missing), or the others went on without this
                rank.
        """
        before = self.members
        wait, start = self.timeout + patience, time.monotonic()
        for _ in range(len(before) + 1):
            self._leave()
            self._generation += 1
            self._set_members(self._who_is_here(what, wait))
            absent = tuple(rank for rank in before if rank not in self.members)
            if self.rank not in self.members:
                raise RankTimeoutError(
                    f"{what}: the others went on without rank {self.rank}, which came late"
                )
            if len(self.members) < self._least:
                raise RankTimeoutError(
                    f"{what}: rank {self.rank} waited {time.monotonic() - start:.1f} s for {_named(absent)}, "
                    f"which did not come; {len(self.members)} of at least {self._least} ranks are left"
                )
            try:
                self._connect(what, self.timeout)
            except BrokenExchange:
                continue
            if absent:
                _log.warning("%s: %s did not come; %d ranks go on", what, _named(absent), self.size)
            self.log.append(f"re-formed without {list(absent)}")
            return absent
        raise RankTimeoutError(f"{what}: rank {self.rank} could not form a group that stays connected")

    def close(self) -> None:
        """Leave for good: no other rank waits for this one any more."""
        self._leave()
        with suppress(RuntimeError):
            self._store.set(f"left/{self.rank}", "1")

    def _who_is_here(self, what: str, wait: float) -> tuple[int, ...]:
        """Sign, and return the list that the first to sign made of those who did."""
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
            self._group.allgather([found], [data], options).wait()  # no limit: in options
        return found

    @contextmanager
    def _exchanging(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).partition("\n")[0][:300]
            raise BrokenExchange(f"{what}: rank {self.rank} did not reach all others: {reason}") from error


def _leave_at_exit(ranks: weakref.ref[ElasticRanks]) -> None:
    there = ranks()
    if there is not None:
        there._leave()


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


_END_SECONDS = 5.0
_STORE_PREFIXES = ("", "/worker/attempt_0")
"""The prefixes under which ranks see the store that a launcher hosts; they depend on torch's version."""


@dataclass(frozen=True)
class EndedRank:
    """How a rank ended."""

    rank: int
    code: int  # Its exit code: 0 is success, a negative one is a signal
    running: int  # The number of ranks that are still running


def launch_ranks(
    command: Sequence[str],
    ranks: int,
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
    on_end: Callable[[EndedRank], None] = lambda ended: None,
    on_wait: Callable[[], None] = lambda: None,
) -> list[EndedRank]:
    """Run a command as several ranks and wait until all have ended."""
    # Ranks that still run when this call is left by an exception are ended too.
    checks.integer(ranks, "launch: ranks")
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    rooms = [PrefixStore(room, server) if room else server for room in _STORE_PREFIXES]
    running: dict[int, subprocess.Popen[bytes]] = {}
    done: dict[int, EndedRank] = {}
    end = None if timeout is None else time.monotonic() + timeout
    try:
        for rank in range(ranks):
            own = _rank_environment(rank, ranks, server.port)
            running[rank] = subprocess.Popen(command, env={**os.environ, **own, **(environment or {})})
        while running:
            for rank, process in list(running.items()):
                code = process.poll()
                if code is not None:
                    del running[rank]
                    done[rank] = EndedRank(rank, code, len(running))
                    for room in rooms:
                        room.set(lost_key(rank), str(code))
                    on_end(done[rank])
            on_wait()
            if end is not None and time.monotonic() > end:
                _end_processes(running.values())
                end = None
            time.sleep(_POLL)
    finally:
        _end_processes(running.values())
    return [done[rank] for rank in sorted(done)]


def _rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables by which ranks connect, as torchrun sets them."""
    size = str(ranks)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def _end_processes(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    listed = list(processes)
    for process in listed:
        process.terminate()
    for process in listed:
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()  # no limit: it was killed
