"""PeerWatch: which ranks have left, and how, from one TCP connection between every two ranks.

The operating system closes the connections of a process that ends, however it ends. A process that can still
run Python sends a text first:

    received before the end     the rank
    a text                      ended its program, with an error or without one, or freed its exchange
    nothing                     was killed, crashed, or called os._exit

The text begins with the number of exchanges that the rank completed: one that has completed the exchange in
which another rank waits is not the reason to wait.

If connections cannot be made (a firewall), ranks rely on their transport alone.
"""

from __future__ import annotations

import fcntl
import hmac
import logging
import os
import secrets
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing import util
from typing import Any

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0
_TOKEN_BYTES = 16
_LONGEST = 1000  # Bytes of a text
_VANISHED = "its process was killed, crashed or called os._exit"
_SIOCGIFADDR = 0x8915


class PeerWatch:
    """Connections to the other ranks. Construction is a collective call. One thread uses it."""

    def __init__(self, rank: int, size: int, gather: Callable[[Any], list[Any]], timeout: float) -> None:
        self._left: dict[int, tuple[int, str]] = {}
        self._completed = [0]
        self._sockets: dict[int, socket.socket] = {}
        with suppress(OSError):
            _connect(self._sockets, rank, size, gather, min(timeout, _CONNECT_SECONDS))
        if not all(gather(len(self._sockets) == size - 1)):
            logger.debug("rank %d: not all ranks can connect to each other", rank)
            _close(self._sockets)
        # It also runs in processes of multiprocessing, where atexit does not.
        util.Finalize(self, _leave, (self._sockets, self._completed), exitpriority=10)
        # A data worker that outlives this process must not keep its connections open.
        os.register_at_fork(after_in_child=_closer(weakref.ref(self)))

    def complete(self) -> None:
        """Note that this rank has completed an exchange; all ranks make the same ones."""
        self._completed[0] += 1

    def left(self, ranks: Collection[int], seconds: float = 0.0) -> dict[int, str]:
        """Return those of some ranks that left before they completed the exchange in progress, and how."""
        # It waits for the first of them for some seconds.
        deadline = time.monotonic() + seconds
        while True:
            for rank in self._sockets.keys() & set(ranks):
                self._read(rank)
            gone = {rank: self._left[rank] for rank in sorted(ranks) if rank in self._left}
            found = {rank: how for rank, (number, how) in gone.items() if number <= self._completed[0]}
            if found or time.monotonic() >= deadline:
                return found
            time.sleep(0.02)

    def _read(self, rank: int) -> None:
        try:
            text = self._sockets[rank].recv(_LONGEST)
        except BlockingIOError:
            return
        except OSError:
            text = b""
        number, _, how = text.decode(errors="replace").partition(" ")
        self._left[rank] = (int(number), how) if number.isdecimal() else (0, _VANISHED)
        self._sockets.pop(rank).close()


def _connect(
    sockets: dict[int, socket.socket],
    rank: int,
    size: int,
    gather: Callable[[Any], list[Any]],
    timeout: float,
) -> None:
    """Connect to all lower ranks, and accept the higher ones."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    try:
        server = socket.create_server((_own_address(), 0), backlog=size)
    except OSError:
        gather(None)
        raise
    with server:
        peers = gather((server.getsockname(), token))
        deadline = time.monotonic() + timeout
        for other in range(rank):
            if peers[other] is None:
                return
            address, other_token = peers[other]
            sockets[other] = socket.create_connection(address, timeout=timeout)
            sockets[other].sendall(other_token + rank.to_bytes(4, "little"))
        while len(sockets) < size - 1 and None not in peers:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            peer, _ = server.accept()
            peer.settimeout(1.0)
            with suppress(OSError):
                hello = peer.recv(_TOKEN_BYTES + 4)
                other = int.from_bytes(hello[_TOKEN_BYTES:], "little")
                if hmac.compare_digest(hello[:_TOKEN_BYTES], token) and rank < other < size:
                    sockets[other] = peer
    for peer in sockets.values():
        peer.setblocking(False)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # for a machine that vanishes


def _own_address() -> str:
    """Return the address of this machine that gloo uses too."""
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        request = struct.pack("256s", name.partition(",")[0].encode()[:15])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            return socket.inet_ntoa(fcntl.ioctl(asked, _SIOCGIFADDR, request)[20:24])
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _close(sockets: dict[int, socket.socket]) -> None:
    while sockets:
        sockets.popitem()[1].close()


def _closer(watch: weakref.ref[PeerWatch]) -> Callable[[], None]:
    def close() -> None:
        if (own := watch()) is not None:
            _close(own._sockets)

    return close


def _leave(sockets: dict[int, socket.socket], completed: list[int]) -> None:
    """Send the other ranks how this one leaves: its process ends, or the watch is freed."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    text = "its program ended"
    if not util.is_exiting():
        text = "it freed its part of these tables, so it makes no more calls"
    elif isinstance(error, SystemExit) and error.code:
        text = f"its program ended with sys.exit({error.code!r})"
    elif isinstance(error, Exception):
        text = f"its program ended with {type(error).__name__}: {error}"
    for peer in sockets.values():
        with suppress(OSError):
            peer.send(f"{completed[0]} {text}".encode(errors="replace")[:_LONGEST])
    _close(sockets)
