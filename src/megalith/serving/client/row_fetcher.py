"""RowFetcher: fetches the rows that an entry server needs from the ps parts.

The distinct ids of each table are grouped by the model's routing. Every part gets one request for all tables,
and all parts are requested at the same time; more rows than fit into a message take several requests. The
rows are returned in the order of the ids.

A part is asked for the entry's version, because another version may distribute rows differently; if that
version is gone, for its newest one. A part refuses ids that it does not own, so a row on another part never
reads as missing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from megalith.errors import DiscoveryError, InputError, RemoteError, UnknownNameError
from megalith.ops.bucketing import dedup
from megalith.serving.client.channels import Attempt, Channels, Route, Targets, run
from megalith.serving.client.credentials import Credentials
from megalith.serving.client.predict_client import (
    DEFAULT_TIMEOUT,
    check_timeout,
    inputs_and_outputs,
    model_spec,
    read_outputs,
)
from megalith.serving.discovery.contract import Discovery
from megalith.serving.export.signature import Signature
from megalith.serving.proto.limits import MAX_BYTES
from megalith.serving.proto.tf_tensors import to_tensor_proto
from megalith.serving.wire_names import LOOKUP

MAX_PIECE_BYTES = MAX_BYTES
"""Maximum bytes of the ids of a request, and of the rows of its response; the limit of a part."""
_ID_BYTES, _WEIGHT_BYTES = 8, 4


@dataclass(frozen=True)
class _Piece:
    """One request to a part: ids int64 [n] by table, and where their rows float32 [n, dim] go."""

    shard: int
    ids: dict[str, Tensor]
    rows: dict[str, Tensor]


class RowFetcher:
    """Fetches rows from the ps parts of a model. Thread-safe."""

    def __init__(
        self,
        discovery: Discovery,
        signature: Signature,
        *,
        fail_soft: bool = False,
        timeout: float = DEFAULT_TIMEOUT,
        credentials: Credentials | None = None,
    ) -> None:
        if signature.sub_graph_num < 1:
            raise InputError(f"{signature.name}: this model has no ps parts to fetch rows from")
        for name, table in signature.tables.items():
            if table.router().num_shards > signature.sub_graph_num:
                raise InputError(
                    f"{signature.name}: table {name!r} is routed to {table.router().num_shards} parts, "
                    f"but there are {signature.sub_graph_num}"
                )
        self._seconds = check_timeout(timeout)
        self._fail_soft = fail_soft
        self._dims = {name: table.dim for name, table in signature.tables.items()}
        self._routers = {name: table.router() for name, table in signature.tables.items()}
        self._channels = Channels(credentials)
        services = [f"{signature.model}:ps_{shard}" for shard in range(signature.sub_graph_num)]
        self._targets = [Targets(discovery, service, self._channels) for service in services]
        versions = (signature.version, -1)
        self._specs = [[model_spec(service, LOOKUP, version) for version in versions] for service in services]
        self._counting = threading.Lock()
        self.failed_shards = 0
        """Number of times a part failed to answer for some or all ids."""
        self.rows_missing_by_failure = 0
        """Number of distinct ids that read as zeros because of that."""

    def __call__(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Fetch the rows of ids; an id without a row reads as zeros."""
        # ids: table -> int64 [n]; returns: table -> float32 [n, dim], in the order of the ids.
        distinct: dict[str, list[Tensor]] = {}
        inverse: dict[str, Tensor] = {}
        found: dict[str, Tensor] = {}
        for table, asked in ids.items():
            distinct[table], inverse[table] = self._parts(table, asked)
            found[table] = torch.zeros(
                sum(part.numel() for part in distinct[table]), self._dims[table], device="cpu"
            )
        self._fetch(
            [piece for shard in range(len(self._targets)) for piece in self._cut(shard, distinct, found)]
        )
        return {table: found[table][inverse[table]] for table in ids}

    def close(self) -> None:
        for targets in self._targets:
            targets.close()
        self._channels.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _parts(self, table: str, ids: Tensor) -> tuple[list[Tensor], Tensor]:
        if table not in self._routers:
            raise UnknownNameError(f"table {table!r} is unknown; known tables: {', '.join(self._routers)}")
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
            raise InputError(f"table {table!r}: ids must be an int64 tensor [n]")
        deduped = dedup(ids, router=self._routers[table])
        counts = deduped.counts[:, 0].tolist()
        # A table may be routed to fewer parts than the model has.
        counts += [0] * (len(self._targets) - len(counts))
        return list(deduped.ids.split(counts)), deduped.inverse

    def _cut(
        self, shard: int, distinct: Mapping[str, list[Tensor]], found: Mapping[str, Tensor]
    ) -> Iterator[_Piece]:
        """Yield the requests to a part, none of them too large; usually one, and none without ids."""
        piece, left = _Piece(shard, {}, {}), MAX_PIECE_BYTES
        for table, parts in distinct.items():
            ids, begin = parts[shard], sum(part.numel() for part in parts[:shard])
            rows = found[table][begin : begin + ids.numel()]
            size = max(_ID_BYTES, _WEIGHT_BYTES * self._dims[table])
            while ids.numel():
                if left < size and piece.ids:
                    yield piece
                    piece, left = _Piece(shard, {}, {}), MAX_PIECE_BYTES
                count = max(left // size, 1)
                piece.ids[table], piece.rows[table] = ids[:count], rows[:count]
                left -= size * piece.ids[table].numel()
                ids, rows = ids[count:], rows[count:]
        if piece.ids:
            yield piece

    def _fetch(self, pieces: list[_Piece]) -> None:
        """Send the requests and copy the rows of their responses."""
        attempts = []
        for piece in pieces:
            body = inputs_and_outputs({table: to_tensor_proto(ids) for table, ids in piece.ids.items()})
            targets = self._targets[piece.shard]
            attempts.append(Attempt([Route(targets, spec + body) for spec in self._specs[piece.shard]]))
        run(attempts, self._seconds)
        failed: set[int] = set()
        missing = 0
        for piece, attempt in zip(pieces, attempts, strict=True):
            try:
                self._read(attempt, piece)
            except (RemoteError, DiscoveryError):
                if not self._fail_soft:
                    raise
                failed.add(piece.shard)
                missing += sum(ids.numel() for ids in piece.ids.values())
        if failed:
            with self._counting:
                self.failed_shards += len(failed)
                self.rows_missing_by_failure += missing

    def _read(self, attempt: Attempt, piece: _Piece) -> None:
        service = self._targets[piece.shard].service
        outputs = read_outputs(attempt.result(), list(piece.ids), service)  # no limit: it is done
        for table, rows in outputs.items():
            expected = list(piece.rows[table].shape)
            if rows.dtype != torch.float32 or list(rows.shape) != expected:
                raise RemoteError(
                    f"{service}: output {table!r} is {rows.dtype} {list(rows.shape)}, "
                    f"expected float32 {expected}",
                    code="INTERNAL",
                )
        for table, rows in outputs.items():
            piece.rows[table].copy_(rows)
