"""Small models, peers and payloads for the tests of gather."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megalith.gather.compress import Compressed, compress
from megalith.gather.payload import Label, Payload
from megalith.gather.payload_schema import PayloadSchema
from megalith.gather.plan import GatherConfig, GatherPlan, Status
from megalith.gather.result import GatherResult, Record, make_partial, merge
from megalith.gather.validate import validate
from megalith.storage.bodies import Ledger, MemoryBody
from megalith.storage.json_codec import to_json

RUN = "run-a"
WINDOW = 3
GATHER = {field.name for field in fields(GatherConfig)}
SHAPES = {"linear.weight": (16, 24), "linear.bias": (16,), "odd": (7, 5), "scalar": ()}


def weights(seed: int = 0, shapes: dict[str, tuple[int, ...]] | None = None) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=make)
        for name, shape in (SHAPES if shapes is None else shapes).items()
    }


def small_schema(
    *, chunk: int = 8, keep: int = 6, bins: int = 4, dct: bool = False, **tables: int
) -> PayloadSchema:
    return PayloadSchema.of(weights(), chunk=chunk, keep=keep, bins=bins, dct=dct, tables=tables)


def table_rows(seed: int, dim: int, count: int = 12, most: int = 40) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    ids = torch.randperm(most, generator=make)[:count].sort().values - most // 2
    return ids, torch.randn(count, dim, generator=make)


def peer_update(schema: PayloadSchema, seed: int, scale: float = 1.0) -> Compressed:
    shapes = {spec.name: spec.shape for spec in schema.parameters}
    update = {name: tensor * scale for name, tensor in weights(seed + 1000, shapes).items()}
    tables = {t.name: table_rows(seed, t.dim) for t in schema.tables}
    return compress(update, schema, tables=tables)


@lru_cache(maxsize=512)
def peer_bytes(
    schema: PayloadSchema, uid: int, *, seed: int | None = None, window: int = WINDOW, run: str = RUN
) -> bytes:
    label = Label(run, window, uid, global_step=100 + uid)
    return peer_update(schema, uid if seed is None else seed).to_bytes(label)


def opened(data: bytes) -> Payload:
    return Payload.open(MemoryBody(data))


def forged(schema: PayloadSchema, uid: int, number: int = 0, **parts: Tensor) -> bytes:
    """A payload whose digests fit, with some parts of one parameter (or table: ids, rows) exchanged."""
    made = peer_update(schema, uid)
    tables = {"ids", "rows"} & set(parts)
    if tables:
        name = schema.tables[number].name
        ids, rows = made.tables[name]
        made.tables[name] = (parts.get("ids", ids), parts.get("rows", rows))
    else:
        packed = list(made.parameters)
        packed[number] = packed[number]._replace(**parts)
        made = replace(made, parameters=tuple(packed))
    return made.to_bytes(Label(RUN, WINDOW, uid, global_step=100 + uid))


def plan_of(
    schema: PayloadSchema, primary: Iterable[int], reserve: Iterable[int] = (), **more: Any
) -> GatherPlan:
    """A plan; `more` are fields of it or of its `gather`."""
    own = {name: more.pop(name) for name in GATHER & more.keys()}
    settings = {"run": RUN, "window": WINDOW, "schema": schema, **more}
    config = GatherConfig(**own)
    return GatherPlan(primary=tuple(primary), reserve=tuple(reserve), gather=config, **settings)


def checked(
    data: bytes, schema: PayloadSchema, uid: int, *, work_bytes: int = 1 << 22, **other: Any
) -> Payload:
    """`validate` with a large budget."""
    plan = plan_of(schema, [uid], **other)
    ledger = Ledger(1 << 30, "test")
    return validate(MemoryBody(data), schema, plan, uid, ledger=ledger, work_bytes=work_bytes)


def agreed(result: GatherResult) -> dict[str, Any]:
    """What must be equal for any number of ranks: everything except clocks and tries."""
    records = [replace(result.records[u], detail="", seconds=0, tries=0) for u in sorted(result.records)]
    return {
        "plan": replace(result.plan, attempt=0).digest,
        "uids": list(result.uids),
        "records": [to_json(each) for each in records],
        "accepted": [to_json(result.accepted[u]) for u in result.uids],
        "copies": [list(group) for group in result.copies],
        "success_rate": result.success_rate,
        "primary_success_rate": result.primary_success_rate,
        "reserve_used": result.reserve_used,
        "download_bytes": result.download_bytes,
    }


def gathered(
    schema: PayloadSchema, payloads: Mapping[int, bytes], *, reserve: Sequence[int] = (), **plan: Any
) -> GatherResult:
    """The result of a window in which these payloads were accepted, without a store."""
    primary = [uid for uid in payloads if uid not in reserve]
    made = plan_of(schema, primary, reserve, **{"memory_budget": 64 << 20, **plan})
    fetched = []
    for uid, data in payloads.items():
        found = checked(data, schema, uid)
        record = Record(
            uid,
            "reserve" if uid in reserve else "primary",
            Status.OK,
            bytes=len(data),
            last_modified=datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=uid),
            digest=found.header.digest,
            global_step=found.header.label.global_step,
        )
        fetched.append((record, found))
    return merge([make_partial(made, schema, payloads, fetched)])
