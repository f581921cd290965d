"""SpaceMembers: the workers of a `TableSpace`: who they are, what they have written, and waits for them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from megalith.errors import ServerRestartedError, UsageError
from megalith.shards.servers.server.members import Member, Round
from megalith.shards.servers.server.waiters import Waiters
from megalith.shards.servers.server_messages import ServerWrite, SpaceSpec


class SpaceMembers:
    """See the module."""

    def __init__(self, spec: SpaceSpec, index: int) -> None:
        self.spec = spec
        self.members: dict[int, Member] = {}
        self.step = -1
        self.complete = False
        self._waiters = Waiters()
        self._round = Round()
        self._index = index
        self._incarnation = uuid.uuid4().hex

    @property
    def waiting(self) -> int:
        """The number of calls that wait for other workers."""
        return len(self._waiters)

    def state(self) -> dict[str, Any]:
        """Return the numbers of workers and steps as JSON data, without the pushes of a round in progress."""
        pushed = self._round.pushes
        members = {
            str(worker): {
                "session": member.session,
                "accepted": member.accepted - (worker in pushed),
                "pushes": member.pushes - (worker in pushed and pushed[worker].kind == "push"),
                "present": member.present,
                "observer": member.observer,
            }
            for worker, member in self.members.items()
        }
        return {"members": members, "step": self.step, "complete": self.complete}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Set the numbers of workers and steps."""
        self.members = {
            int(worker): Member(
                session=known["session"],
                accepted=known["accepted"],
                done=known["accepted"],
                pushes=known["pushes"],
                present=known["present"],
                observer=known["observer"],
            )
            for worker, known in state["members"].items()
        }
        self.step, self.complete = state["step"], state["complete"]

    def round_pushes(self) -> list[tuple[int, int, ServerWrite]]:
        """Return worker, number and push of the round in progress."""
        return [(w, self.members[w].accepted, push) for w, push in sorted(self._round.pushes.items())]

    def _member(self, worker: int, session: str) -> Member:
        """Return a worker. `session` is that of `join`, then "@" and the incarnation that it returned."""
        session, _, incarnation = session.partition("@")
        if incarnation and incarnation != self._incarnation:
            raise ServerRestartedError(
                f"server {self._index} was started again: worker {worker} must join it"
            )
        member = self.members.get(worker)
        if member is None:
            raise UsageError(f"worker {worker} has not joined server {self._index}")
        if member.session != session:
            raise UsageError(
                f"another ServerShards has joined server {self._index} as worker {worker}: give each worker "
                "its own number"
            )
        return member

    async def wait_for(self, worker: int, session: str, after: int) -> None:
        """Wait until a write of a worker is done."""
        member = self._member(worker, session)
        own = member.session
        await self._waiters.until(
            lambda: member.done >= after or member.session != own,
            self.spec.timeout,
            lambda: self._missing(f"server {self._index}: a call of worker {worker} waits for its push"),
        )
        self._member(worker, session)

    async def _wait_for_slowest(self, worker: int, session: str) -> None:
        member, bound = self._member(worker, session), self.spec.staleness
        own = member.session
        assert bound is not None

        def slowest() -> int:
            others = [x.pushes for w, x in self.members.items() if x.trains and w != worker]
            return min(others, default=member.pushes)

        await self._waiters.until(
            lambda: member.pushes - slowest() <= bound or member.session != own,
            self.spec.timeout,
            lambda: (
                f"server {self._index}: worker {worker} has made {member.pushes} steps and may be {bound} "
                f"ahead, but another worker has made {slowest()}"
            ),
        )
        self._member(worker, session)

    def _missing(self, what: str) -> str:
        absent = [w for w, x in self.members.items() if x.trains and w not in self._round.pushes]
        count = sum(member.trains for member in self.members.values())
        joined = "" if self.complete else f", and {count} of {self.spec.num_workers} workers have joined"
        return f"{what}; no gradients from workers {absent}{joined}"
