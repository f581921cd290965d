"""Calls of gather and of Templar's formats."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalith import SGD, LocalShards, TableConfig, gather
from megalith.compat import templar
from megalith.gather import ElasticRanks, ErrorFeedback, GatherPlan, Label, OuterUpdate, PayloadSchema
from megalith.storage.bodies import MemoryBody
from tests.gather.support import RUN, WINDOW, gathered, peer_bytes, peer_update
from tests.valid_calls.sweep import Arguments, Call, Fresh, calls, methods

SHAPES = {"w": (4, 4), "b": (4,)}
UIDS = (1, 2)


def weights() -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in SHAPES.items()}


QUICK = gather.GatherConfig(deadline=0.2)
SCHEMA = PayloadSchema.of(weights(), chunk=4, keep=4, padding=False)
TABLED = PayloadSchema.of(weights(), chunk=4, keep=4, tables={"a": 2})


def plan(**more: Any) -> GatherPlan:
    return GatherPlan(run=RUN, window=WINDOW, schema=SCHEMA, primary=UIDS, gather=QUICK, **more)


def result(schema: PayloadSchema = SCHEMA) -> gather.GatherResult:
    return gathered(schema, {uid: peer_bytes(schema, uid) for uid in UIDS}, memory_budget=8 << 20)


def store_with_peers() -> gather.ObjectStore:
    store = gather.open_object_store("memory://")
    for uid in UIDS:
        gather.publish(store, peer_update(SCHEMA, uid), Label(RUN, WINDOW, uid))
    return store


def shards() -> LocalShards:
    return LocalShards([TableConfig("a", dim=2, optimizer=SGD(0.1))])


NAMES: Arguments = {"run": RUN, "window": WINDOW, "uid": 1}


def plan_calls() -> Iterator[Call]:
    yield GatherPlan, {"run": RUN, "window": 3, "schema": SCHEMA.digest, "primary": UIDS, "reserve": (7,)}
    text = plan().to_bytes()
    yield from methods(plan, {"*": {"uid": 1, "other": plan(), "text": text}})
    yield GatherPlan.from_bytes, {"text": text}
    yield from calls(gather.GatherConfig, gather.UpdateConfig, gather.OverlapConfig, gather.RankOptions)
    yield from methods(gather.OverlapConfig, {"level_of": {"shared": 1, "total": 2}})
    yield gather.Location, {"key": "k"}
    yield from calls(Label, gather.payload_key, **NAMES)
    yield from calls(PayloadSchema, PayloadSchema.of, parameters=SCHEMA.parameters, model=weights())
    yield from methods(lambda: SCHEMA, {"*": {"model": weights()}})
    yield gather.partition, {"plan": plan(), "world_size": 2, "sizes": {1: 5}}


def peer_calls() -> Iterator[Call]:
    update = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    rows = {"a": (torch.tensor([1, 2]), torch.ones(2, 2))}
    yield gather.compress, {"update": update, "schema": TABLED, "tables": rows, "feedback": ErrorFeedback()}
    made = peer_update(SCHEMA, 1)
    label = Label(RUN, WINDOW, 1)
    yield gather.decompress, {"source": made}

    def feedback() -> ErrorFeedback:
        found = ErrorFeedback()
        gather.compress(update, SCHEMA, feedback=found)
        return found

    yield ErrorFeedback, {}
    yield from methods(feedback, {"*": {"compressed": made, "state": {"w": torch.zeros(4, 4)}}})
    empty = Fresh(lambda: gather.open_object_store("memory://"))
    yield from calls(gather.publish, store=empty, compressed=made, label=label, deadline=5.0)
    yield gather.peek, {"store": store_with_peers(), "key": gather.payload_key(RUN, WINDOW, 1)}
    yield gather.open_object_store, {"place": "memory://"}
    yield gather.PeerTables, {"local": shards(), "shared": shards()}
    yield from methods(lambda: gather.PeerTables(shards(), shards()))


def window_calls() -> Iterator[Call]:
    stores = {"default": store_with_peers()}
    given = {"plan": plan(), "schema": SCHEMA, "stores": stores}
    yield from calls(gather.gather, gather.Gatherer, **given)
    made = partial(gather.Gatherer, **given)
    yield from methods(made, {"*": {"uids": UIDS, "plan": plan(), "ranks": ElasticRanks.alone()}})
    found, partial_sum = result(), made().partial()
    text = {"text": partial_sum.to_bytes(), "plan": plan(), "schema": SCHEMA}
    yield from methods(lambda: partial_sum, {"from_bytes": text})
    yield gather.Partial.from_bytes, text
    yield from methods(result, {"*": {"uids": UIDS}})
    yield gather.merge, {"partials": [partial_sum]}
    overlap = gather.find_overlap(found)
    yield gather.find_overlap, {"gathered": found, "matrix": overlap.gram}
    yield gather.metrics, {"gathered": found, "scores": {1: 0.5}, "overlap": overlap}
    yield gather.decide, {"gathered": found}
    yield OuterUpdate, {"schema": SCHEMA}
    update: Arguments = {"parameters": weights(), "gathered": found, "ranks": ElasticRanks.alone()}
    update |= {"plan": plan(), "state": OuterUpdate(SCHEMA).state_dict()}
    yield from methods(lambda: OuterUpdate(SCHEMA), {"*": update})
    one = {"store": torch._C._distributed_c10d.HashStore(), "rank": 0, "world_size": 1, "timeout": 0.1}
    yield ElasticRanks, one
    yield from calls(ElasticRanks.alone, ElasticRanks.of_group)
    yield from methods(ElasticRanks.alone, {"or_alone": {"ranks": None}})


def run_calls() -> Iterator[Call]:
    peers, artifacts = store_with_peers(), gather.open_object_store("memory://")
    update, stores = Fresh(lambda: OuterUpdate(SCHEMA)), {"default": peers}
    window = {"plan": plan(), "stores": stores}
    yield gather.run_window, window | {"update": update, "parameters": weights()}
    yield from calls(gather.Artifacts, gather.Artifacts.of, store=artifacts, given=artifacts)
    report = gather.run_window(update=update.make(), parameters=weights(), artifacts=artifacts, **window)
    assert report.decision.go
    yield gather.write_artifact, {"report": report, "artifacts": artifacts, "stores": stores}
    stored = {"artifacts": artifacts, "run": RUN}
    yield gather.read_artifact_manifest, stored | {"window": WINDOW}
    yield from calls(gather.catch_up, **stored, parameters=Fresh(weights), update=update)
    yield gather.prune_artifacts, stored | {"keep": 1}


def templar_calls() -> Iterator[Call]:
    made, label, found = peer_update(SCHEMA, 1), Label(RUN, WINDOW, 1), result()
    expected = {"schema": SCHEMA, "run": RUN, "window": WINDOW}
    keys = [templar.gradient_key, templar.aggregator_key, templar.peer_locations]
    yield from calls(*keys, window=3, uid=1, uids=UIDS, version="2.1")
    bucket = {"name": "b", "account_id": "a", "access_key_id": "k", "secret_access_key": "s"}
    yield templar.peer_stores, {"commitments": {1: bucket}}
    yield templar.write_payload, {"source": made, "label": label}
    data = templar.write_payload(made, label)
    yield templar.read_payload, {**expected, "data": data, "uid": 1}
    yield templar.convert_payload, {**expected, "body": MemoryBody(data), "file": Fresh(io.BytesIO), "uid": 1}
    results = [templar.gather_result, templar.templar_metrics, templar.write_aggregator]
    yield from calls(*results, gathered=found)
    yield templar.read_aggregator, {**expected, "data": templar.write_aggregator(found)}
