"""A window on a fault server: peers good and bad, and the same gather on any number of ranks in this
process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch

from megalith.gather.fetch import RankOptions
from megalith.gather.payload_schema import PayloadSchema
from megalith.gather.plan import GatherPlan, Status, payload_key
from megalith.ops.matrix_chunks import pack_indices, unpack_indices
from megalith.storage.object_store import ObjectStore, open_object_store
from tests.gather.fault_server import FaultServer, ServerFault
from tests.gather.support import RUN, WINDOW, forged, peer_bytes, peer_update, plan_of, small_schema

OPENS = datetime(2026, 1, 2, tzinfo=UTC)
CLOSES = OPENS + timedelta(seconds=60)

EXPECTED = {
    "good": Status.OK,
    "flaky": Status.OK,
    "cut": Status.OK,
    "replaced": Status.OK,
    "missing": Status.NOT_FOUND,
    "early": Status.TOO_EARLY,
    "late": Status.TOO_LATE,
    "large": Status.TOO_LARGE,
    "changing": Status.CHANGED,
    "corrupt": Status.CORRUPT,
    "short": Status.CORRUPT,
    "schema": Status.INVALID_SCHEMA,
    "stolen": Status.INVALID_SCHEMA,
    "index": Status.INVALID_INDEX,
    "value": Status.INVALID_VALUE,
    "stall": Status.TIMEOUT,
    "drip": Status.SLOW,
    "denied": Status.DENIED,
    "down": Status.STORE_ERROR,
}
"""What each kind of peer comes to."""


@dataclass
class World:
    """One window. `peers` names the kind of each uid: a key of EXPECTED, or "copy:UID". Worlds with different
    prefixes share a server."""

    server: FaultServer
    schema: PayloadSchema = field(default_factory=small_schema)
    options: RankOptions = field(default_factory=lambda: RankOptions(request_timeout=0.3))
    prefix: str = ""

    @property
    def stores(self) -> dict[str, ObjectStore]:
        return {"default": open_object_store(f"s3://gather/{self.prefix}", endpoint=self.server.endpoint)}

    def plan(self, primary: Sequence[int], reserve: Sequence[int] = (), **more: Any) -> GatherPlan:
        settings: dict[str, Any] = {
            "time_min": OPENS,
            "time_max": CLOSES,
            "deadline": 20.0,
            "grace": 0.0,
            "max_object_bytes": 1 << 20,
            "memory_budget": 16 << 20,
        }
        return plan_of(self.schema, primary, reserve, **{**settings, **more})

    def add(self, peers: dict[int, str]) -> None:
        for uid, kind in peers.items():
            self.add_peer(uid, kind)

    def add_peer(self, uid: int, kind: str) -> None:
        key = self.prefix + payload_key(RUN, WINDOW, uid)
        when = {"early": OPENS - timedelta(seconds=1), "late": CLOSES + timedelta(seconds=1)}.get(
            kind, OPENS + timedelta(seconds=uid % 60)
        )
        if kind != "missing":
            self.server.put(key, self.content(uid, kind), when)
        self.server.fail(key, *self.faults(kind))

    def content(self, uid: int, kind: str) -> bytes:
        good = peer_bytes(self.schema, uid)
        if kind.startswith("copy:"):
            return peer_bytes(self.schema, uid, seed=int(kind.removeprefix("copy:")))
        if kind == "large":
            return good + bytes(2 << 20)
        if kind == "short":
            return good[:100]
        if kind == "corrupt":
            return good[:-1] + bytes([good[-1] ^ 1])
        if kind == "schema":
            return peer_bytes(small_schema(keep=4), uid)
        if kind == "stolen":
            return peer_bytes(self.schema, uid + 1)
        if kind == "index":
            spec = self.schema.parameters[0]
            rows = unpack_indices(peer_update(self.schema, uid).parameters[0].indices, spec.keep)
            rows[0, 1] = rows[0, 0]
            return forged(self.schema, uid, indices=pack_indices(rows))
        if kind == "value":
            return forged(
                self.schema, uid, lookup=torch.full((self.schema.parameters[0].bins,), float("nan"))
            )
        return good

    @staticmethod
    def faults(kind: str) -> list[ServerFault]:
        forever = 1 << 30
        return {
            "flaky": [ServerFault("status", "HEAD", code=503)],
            "cut": [ServerFault("truncate")],
            "replaced": [ServerFault("replace")],
            "changing": [ServerFault("replace", times=forever)],
            "stall": [ServerFault("stall", times=forever)],
            "drip": [ServerFault("drip", times=forever)],
            "denied": [ServerFault("status", "*", times=forever, code=403)],
            "down": [ServerFault("status", "*", times=forever, code=500)],
        }.get(kind, [])


def spool_options(directory: Path, **more: Any) -> RankOptions:
    return RankOptions(request_timeout=0.3, spool_directory=directory, spool_from=1, **more)
