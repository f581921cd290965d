"""PendingCall: a call of a server in progress, which can be made again if the connection is lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from megalith.shards.servers.channel.shared_segments import SegmentPool


class PendingCall:
    """A call in progress.

    Args:
        send: Makes the call and returns Ray's reference to its result, or a ChannelReply.
        what: The call, for messages.
        number: The number of a write; 0: another call.
        repeatable: Whether it can be made again on a server that was started again.
        limited: Whether it may take only as long as the link waits for an answer.

    Attributes:
        reference: What `send` has returned.
        generation: How often the server had been started again when the call was made.
    """

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
        """Make the call again, after the connection was lost.

        Args:
            generation: See the class.
        """
        self.generation = generation
        self.reference = self._send()


class PendingRead(PendingCall):
    """A read in progress.

    Args:
        send: Makes the call, given where the rows go.
        out: uint8, where they go.
        pool: Memory that is shared with servers of this node.

    Attributes:
        out: Where the rows are when the call has ended.
        moved: Whether that is another place than the first.
    """

    def __init__(self, send: Callable[[Tensor], Any], out: Tensor, pool: SegmentPool) -> None:
        self.out = out
        self.moved = False
        self._pool = pool
        self._send_to = send
        super().__init__(partial(send, out), "read")

    def send_again(self, generation: int) -> None:
        """Make the call again; the rows go to other memory, because a server may still write to the first.

        Args:
            generation: See `PendingCall`.
        """
        self.out, self.moved = self._pool.new(self.out.numel()), True
        self._send = partial(self._send_to, self.out)
        super().send_again(generation)
