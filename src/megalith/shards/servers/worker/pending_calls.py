"""PendingCall: a call of a server in progress, which can be made again if the connection is lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from megalith.shards.servers.channel.shared_segments import SegmentPool


class PendingCall:
    """A call in progress."""

    def __init__(
        self,
        send: Callable[[], Any],
        what: str,
        number: int = 0,
        *,
        repeatable: bool = True,
        limited: bool = True,
    ) -> None:
        self._send = send
        self.what = what
        self.number = number
        self.repeatable = repeatable
        self.limited = limited
        self.generation = 0
        self.reference = send()

    def send_again(self, generation: int) -> None:
        """Make the call again, after the connection was lost."""
        self.generation = generation
        self.reference = self._send()


class PendingRead(PendingCall):
    """A read in progress."""

    def __init__(self, send: Callable[[Tensor], Any], out: Tensor, pool: SegmentPool) -> None:
        self.out = out
        self.moved = False
        self._pool = pool
        self._send_to = send
        super().__init__(partial(send, out), "read")

    def send_again(self, generation: int) -> None:
        self.out, self.moved = self._pool.new(self.out.numel()), True
        self._send = partial(self._send_to, self.out)
        super().send_again(generation)
