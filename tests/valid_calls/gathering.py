"""Calls of gather and of Templar's formats."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megalith import SGD, LocalShards, TableConfig, gather
from megalith.compat import templar
from megalith.gather import (
    ElasticRanks,
    ErrorFeedback,
    FetchOptions,
    GatherPlan,
    GatherResult,
    Label,
    Location,
    OuterUpdate,
    OverlapConfig,
    ParameterSpec,
    PayloadSchema,
    Status,
    TableSpec,
    UpdateConfig,
)
from megalith.storage.bodies import MemoryBody
from tests.gather.support import RUN, WINDOW, gathered, peer_bytes, peer_update
from tests.valid_calls.sweep import Call, Fresh, methods

SHAPES = {"w": (4, 4), "b": (4,)}
UIDS = (1, 2)


def weights() -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in SHAPES.items()}


SCHEMA = PayloadSchema.of(weights(), chunk=4, keep=4, padding=False)
TABLED = PayloadSchema.of(weights(), chunk=4, keep=4, tables={"a": 2})


def plan(**more: Any) -> GatherPlan:
    return GatherPlan(run=RUN, window=WINDOW, schema=SCHEMA.digest, primary=UIDS, deadline=0.2, **more)


def result(schema: PayloadSchema = SCHEMA) -> GatherResult:
    return gathered(schema, {uid: peer_bytes(schema, uid) for uid in UIDS}, memory_budget=8 << 20)


def store_with_peers() -> gather.ObjectStore:
    store = gather.open_object_store("memory://")
    for uid in UIDS:
        gather.publish(store, peer_update(SCHEMA, uid), Label(RUN, WINDOW, uid))
    return store


def shards() -> LocalShards:
    return LocalShards([TableConfig("a", dim=2, optimizer=SGD(0.1))])


def plan_calls() -> Iterator[Call]:
    yield GatherPlan, {"run": RUN, "window": 3, "schema": SCHEMA.digest, "primary": UIDS, "reserve": (7,)}
    yield from methods(
        plan,
        {
            "location": {"uid": 1},
            "differences": {"other": plan()},
            "from_bytes": {"text": plan().to_bytes()},
        },
    )
    yield GatherPlan.from_bytes, {"text": plan().to_bytes()}
    yield UpdateConfig, {}
    yield OverlapConfig, {}
    yield from methods(OverlapConfig, {"level_of": {"shared": 1, "total": 2}})
    yield Location, {"key": "k"}
    yield Label, {"run": RUN, "window": 3, "uid": 1}
    yield FetchOptions, {}
    yield ParameterSpec, {"name": "w", "shape": (4, 4), "chunk": (2, 2), "keep": 2}
    yield TableSpec, {"name": "t", "dim": 2}
    yield PayloadSchema, {"parameters": SCHEMA.parameters}
    yield PayloadSchema.of, {"model": weights()}
    yield from methods(lambda: SCHEMA, {"of": {"model": weights()}})
    yield gather.payload_key, {"run": RUN, "window": 3, "uid": 1}
    yield gather.partition, {"plan": plan(), "world_size": 2, "sizes": {1: 5}}
    yield gather.backfill, {"plan": plan(reserve=(7,)), "statuses": [{1: Status.OK, 2: Status.CORRUPT}]}
    yield gather.deal, {"uids": UIDS, "attempted": [0, 1]}


def peer_calls() -> Iterator[Call]:
    update = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    rows = {"a": (torch.tensor([1, 2]), torch.ones(2, 2))}
    yield gather.compress, {"update": update, "schema": TABLED, "tables": rows, "feedback": ErrorFeedback()}
    made = peer_update(SCHEMA, 1)
    label = Label(RUN, WINDOW, 1)
    file = Fresh(io.BytesIO)
    yield from methods(lambda: made, {"write": {"file": file, "label": label}, "to_bytes": {"label": label}})
    yield gather.decompress, {"source": made}

    def feedback() -> ErrorFeedback:
        found = ErrorFeedback()
        gather.compress(update, SCHEMA, feedback=found)
        return found

    yield ErrorFeedback, {}
    yield from methods(
        feedback, {"give_back": {"compressed": made}, "load_state_dict": {"state": {"w": torch.zeros(4, 4)}}}
    )
    yield (
        gather.publish,
        {
            "store": Fresh(lambda: gather.open_object_store("memory://")),
            "compressed": made,
            "label": label,
            "deadline": 5.0,
        },
    )
    yield gather.peek, {"store": store_with_peers(), "key": gather.payload_key(RUN, WINDOW, 1)}
    yield gather.open_object_store, {"place": "memory://"}
    data, span = peer_bytes(TABLED, 1), {"number": 0, "start": 0, "stop": 1}
    parts = dict.fromkeys(("indices", "codes", "ids", "rows"), span)
    yield from methods(
        lambda: gather.Payload.open(MemoryBody(data)),
        {**parts, "lookup": {"number": 0}, "open": {"body": MemoryBody(data)}},
    )
    yield gather.Payload.open, {"body": MemoryBody(data)}
    yield gather.PeerTables, {"local": shards(), "shared": shards()}
    yield from methods(lambda: gather.PeerTables(shards(), shards()))


def window_calls() -> Iterator[Call]:
    stores = {"default": store_with_peers()}
    given = {"plan": plan(), "schema": SCHEMA, "stores": stores}
    yield gather.gather, given
    yield gather.Gatherer, given
    yield from methods(
        lambda: gather.Gatherer(plan(), SCHEMA, stores),
        {
            "fetch": {"uids": UIDS},
            "fetch_async": {"uids": UIDS},
            "use_plan": {"plan": plan()},
            "merge_with": {"ranks": ElasticRanks.alone()},
        },
    )
    found = result()
    (partial,) = [gather.Gatherer(plan(), SCHEMA, stores).partial()]
    text = {"text": partial.to_bytes(), "plan": plan(), "schema": SCHEMA}
    yield from methods(lambda: partial, {"from_bytes": text})
    yield gather.Partial.from_bytes, text
    yield from methods(
        result,
        {"norm_table": {"uids": UIDS}, "held": {"uids": UIDS}},
    )
    yield gather.merge, {"partials": [partial]}
    overlap = gather.find_overlap(found)
    yield gather.find_overlap, {"gathered": found, "matrix": overlap.gram}
    yield from methods(lambda: overlap, {"at_least": {"level": "max"}})
    yield gather.excluded_uids, {"overlap": overlap, "config": OverlapConfig()}
    yield gather.decide, {"gathered": found}
    yield gather.norm_medians, {"gathered": found}
    yield gather.metrics, {"gathered": found, "scores": {1: 0.5}, "overlap": overlap}
    yield gather.to_penalise, {"gathered": found}
    yield gather.lines, {"gathered": found}
    yield gather.fingerprint, {"parameters": weights()}
    yield from methods(lambda: gather.fingerprint(weights()))
    yield OuterUpdate, {"schema": SCHEMA}
    yield from methods(
        lambda: OuterUpdate(SCHEMA),
        {
            "apply": {"parameters": weights(), "gathered": found},
            "parts": {"parameters": weights(), "ranks": ElasticRanks.alone()},
            "check_window": {"plan": plan()},
            "fingerprint": {"parameters": weights()},
            "load_state_dict": {"state": OuterUpdate(SCHEMA).state_dict()},
        },
    )
    one = {"store": torch._C._distributed_c10d.HashStore(), "rank": 0, "world_size": 1, "timeout": 0.1}
    yield ElasticRanks, one
    yield ElasticRanks.alone, {}
    yield ElasticRanks.of_group, {}
    yield from methods(ElasticRanks.alone, {"or_alone": {"ranks": None}})


def run_calls() -> Iterator[Call]:
    peers, artifacts = store_with_peers(), gather.open_object_store("memory://")
    window = {
        "plan": plan(),
        "parameters": weights(),
        "update": Fresh(lambda: OuterUpdate(SCHEMA)),
        "stores": {"default": peers},
    }
    yield gather.run_window, window
    report = gather.run_window(
        plan(), weights(), OuterUpdate(SCHEMA), {"default": peers}, artifacts=artifacts
    )
    assert report.decision.go
    kept = {"store": artifacts, "run": RUN}
    yield gather.read_artifact_manifest, {**kept, "window": WINDOW}
    manifest = gather.read_artifact_manifest(artifacts, RUN, WINDOW)
    assert manifest is not None
    yield gather.load_artifact, {"store": artifacts, "manifest": manifest}
    yield from methods(lambda: manifest, {"from_bytes": {"text": manifest.to_bytes(), "where": "here"}})
    yield gather.ArtifactManifest.from_bytes, {"text": manifest.to_bytes(), "where": "here"}
    yield (
        gather.catch_up,
        {
            **kept,
            "windows": [WINDOW],
            "parameters": Fresh(weights),
            "update": Fresh(lambda: OuterUpdate(SCHEMA)),
        },
    )
    yield gather.prune_artifacts, {**kept, "keep": 1}


def templar_calls() -> Iterator[Call]:
    made, label, found = peer_update(SCHEMA, 1), Label(RUN, WINDOW, 1), result()
    data = templar.write_payload(made, label)
    expected = {"schema": SCHEMA, "run": RUN, "window": WINDOW}
    yield templar.gradient_key, {"window": 3, "uid": 1, "version": "2.1"}
    yield templar.aggregator_key, {"window": 3, "version": "2.1"}
    yield templar.peer_locations, {"window": 3, "uids": UIDS, "version": "2.1"}
    bucket = {"name": "b", "account_id": "a", "access_key_id": "k", "secret_access_key": "s"}
    yield templar.peer_stores, {"commitments": {1: bucket}}
    yield templar.write_payload, {"source": made, "label": label}
    yield templar.read_payload, {**expected, "data": data, "uid": 1}
    yield templar.convert_payload, {**expected, "body": MemoryBody(data), "file": Fresh(io.BytesIO), "uid": 1}
    yield templar.state_lists, {"gathered": found}
    yield templar.gather_result, {"gathered": found}
    yield templar.templar_metrics, {"gathered": found}
    yield templar.write_aggregator, {"gathered": found}
    yield templar.read_aggregator, {**expected, "data": templar.write_aggregator(found)}
