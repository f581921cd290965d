"""RowFetcher: the rows an entry server needs, from the ps parts that have them.

Each table's distinct ids are parted by the model's routing; every part is asked once, for all tables
together, and all parts at the same time. Rows come back in the order of the ids.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from megalith.errors import DiscoveryError, InputError, RemoteError, UnknownNameError
from megalith.ops.bucketing import dedup
from megalith.serving.client.channels import Channels, Credentials
from megalith.serving.client.failover import Attempt, Route, Targets, run
from megalith.serving.client.predict import (
    DEADLINE_MS,
    inputs_and_outputs,
    milliseconds,
    model_spec,
    read_outputs,
)
from megalith.serving.discovery.contract import Discovery
from megalith.serving.exported.signature import Signature
from megalith.serving.proto.tensors import to_tensor_proto

LOOKUP = "lookup"

Parts = dict[str, list[Tensor]]
"""Of each table: a tensor for each shard."""


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
        self._specs = [model_spec(service, LOOKUP) for service in services]
        self._counting = threading.Lock()
        self.failed_shards = 0
        """Parts that did not answer, each time."""
        self.rows_missing_by_failure = 0
        """Distinct ids that got zeros because of that."""

    def __call__(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rows of the ids, in their order; an id that no part has gives zeros.

        Raises UnknownNameError for a table, InputError for ids, RemoteError or DiscoveryError for a part that
        does not answer in time.
        """
        distinct: Parts = {}
        inverse: dict[str, Tensor] = {}
        for table, asked in ids.items():
            distinct[table], inverse[table] = self._parts(table, asked)
        found = self._fetch(distinct)
        return {table: torch.cat(found[table])[inverse[table]] for table in ids}

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

    def _fetch(self, distinct: Parts) -> Parts:
        attempts: dict[int, Attempt] = {}
        for shard, (targets, spec) in enumerate(zip(self._targets, self._specs, strict=True)):
            inputs = {
                f"{table}_id": to_tensor_proto(parts[shard])
                for table, parts in distinct.items()
                if parts[shard].numel()
            }
            if inputs:
                attempts[shard] = Attempt([Route(targets, spec + inputs_and_outputs(inputs))])
        run(list(attempts.values()), self._seconds)
        found: Parts = {
            table: [torch.zeros(part.numel(), self._dims[table]) for part in parts]
            for table, parts in distinct.items()
        }
        for shard, attempt in attempts.items():
            asked = {table: parts[shard] for table, parts in distinct.items() if parts[shard].numel()}
            try:
                rows = self._read(attempt, asked, self._targets[shard].service)
            except (RemoteError, DiscoveryError):
                if not self._fail_soft:
                    raise
                with self._counting:
                    self.failed_shards += 1
                    self.rows_missing_by_failure += sum(part.numel() for part in asked.values())
            else:
                for table, values in rows.items():
                    found[table][shard] = values
        return found

    def _read(self, attempt: Attempt, asked: Mapping[str, Tensor], service: str) -> dict[str, Tensor]:
        names = {table: f"{table}_value" for table in asked}
        outputs = read_outputs(attempt.result(), list(names.values()), service)
        for table, name in names.items():
            expected = [asked[table].numel(), self._dims[table]]
            if outputs[name].dtype != torch.float32 or list(outputs[name].shape) != expected:
                raise RemoteError(
                    f"{service}: output {name!r} is {outputs[name].dtype} {list(outputs[name].shape)}, "
                    f"expected float32 {expected}",
                    code="INTERNAL",
                )
        return {table: outputs[name] for table, name in names.items()}
