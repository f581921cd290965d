"""RowFetcher: the rows an entry server needs, from the ps parts that have them.

Each table's distinct ids are parted by the model's routing; every part is asked once, for all tables
together, and all parts at the same time. Rows come back in the order of the ids. More rows than a message
holds are asked for in pieces.

A part is asked for the version of the entry, since another may have its rows spread in another way; for the
newest, where that one is gone. A part refuses ids that are not its own, so no row is taken for missing
because it lies elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from megalith.errors import DiscoveryError, InputError, RemoteError, UnknownNameError
from megalith.ops.bucketing import dedup
from megalith.serving.client.channels import Channels
from megalith.serving.client.credentials import Credentials
from megalith.serving.client.failover import Attempt, Route, Targets, run
from megalith.serving.client.predict_client import (
    DEADLINE_MS,
    inputs_and_outputs,
    milliseconds,
    model_spec,
    read_outputs,
)
from megalith.serving.discovery.contract import Discovery
from megalith.serving.export.signature import Signature
from megalith.serving.proto.limits import MAX_BYTES
from megalith.serving.proto.tf_tensors import to_tensor_proto
from megalith.serving.wire_names import LOOKUP

MAX_PIECE_BYTES = MAX_BYTES
"""What the ids of a request, and the rows of its answer, may take: a part answers no more at once."""
_ID_BYTES, _WEIGHT_BYTES = 8, 4


@dataclass(frozen=True)
class _Piece:
    """What one request asks of a part. ids: int64 [n] by table; rows: float32 [n, dim], where they go."""

    shard: int
    ids: dict[str, Tensor]
    rows: dict[str, Tensor]


class RowFetcher:
    """{table: ids int64 [n]} -> {table: rows float32 [n, dim]}, fetched from the parts of a model.

    discovery: who serves "{model}:ps_0" and so on; started by the caller. fail_soft: a part that does not
    answer gives zeros, and is counted, instead of an error. deadline_ms: for a whole fetch. Threads may share
    one. Raises InputError for a model that has no ps parts.
    """

    def __init__(
        self,
        discovery: Discovery,
        signature: Signature,
        *,
        fail_soft: bool = False,
        deadline_ms: float = DEADLINE_MS,
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
        self._seconds = milliseconds(deadline_ms) / 1000
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
        """Parts that did not answer, or not for all ids, each time."""
        self.rows_missing_by_failure = 0
        """Distinct ids that got zeros because of that."""

    def __call__(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rows of the ids, in their order; an id that no part has gives zeros.

        Raises UnknownNameError for a table, InputError for ids, RemoteError or DiscoveryError for a part that
        does not answer in time.
        """
        distinct: dict[str, list[Tensor]] = {}
        inverse: dict[str, Tensor] = {}
        found: dict[str, Tensor] = {}
        for table, asked in ids.items():
            distinct[table], inverse[table] = self._parts(table, asked)
            found[table] = torch.zeros(sum(part.numel() for part in distinct[table]), self._dims[table])
        self._fetch(
            [piece for shard in range(len(self._targets)) for piece in self._cut(shard, distinct, found)]
        )
        return {table: found[table][inverse[table]] for table in ids}

    def close(self) -> None:
        """Ends it, fetches under way included; closing again is harmless."""
        for targets in self._targets:
            targets.close()
        self._channels.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        """What a part is asked for, none of it too large; usually one piece, and none if it has no ids."""
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
        """Fills the rows of the pieces."""
        attempts = []
        for piece in pieces:
            body = inputs_and_outputs(
                {f"{table}_id": to_tensor_proto(ids) for table, ids in piece.ids.items()}
            )
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
        names = {table: f"{table}_value" for table in piece.ids}
        outputs = read_outputs(attempt.result(), list(names.values()), service)
        for table, name in names.items():
            expected = list(piece.rows[table].shape)
            if outputs[name].dtype != torch.float32 or list(outputs[name].shape) != expected:
                raise RemoteError(
                    f"{service}: output {name!r} is {outputs[name].dtype} {list(outputs[name].shape)}, "
                    f"expected float32 {expected}",
                    code="INTERNAL",
                )
        for table, name in names.items():
            piece.rows[table].copy_(outputs[name])
