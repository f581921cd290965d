"""Windows that every number of ranks must come to the same end with, and how a rank plays them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.gather import (
    ElasticRanks,
    OuterUpdate,
    OverlapConfig,
    PayloadSchema,
    RankOptions,
    UpdateConfig,
    WindowReport,
    metrics,
    open_object_store,
    run_window,
)
from tests.gather.support import agreed, small_schema, weights
from tests.gather.world import World


@dataclass(frozen=True)
class Scenario:
    """peers: kind by uid. more: fields of the plan."""

    name: str
    peers: Mapping[int, str]
    primary: Sequence[int]
    reserve: Sequence[int] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    schema: PayloadSchema = field(default_factory=small_schema)
    skip: bool = False


WIDE: dict[str, tuple[int, ...]] = {"wide": (1000, 512), "bias": (16,)}
GOOD = dict.fromkeys(range(1, 10), "good")

SCENARIOS = [
    Scenario("all good", GOOD, range(1, 8)),
    *(
        Scenario(f"one {kind}", {**GOOD, 3: kind}, range(1, 6), (8, 9))
        for kind in ("cut", "replaced", "changing", "missing", "down")
    ),
    Scenario("copies on different ranks", {**GOOD, 2: "copy:1"}, range(1, 6)),
    Scenario("copies on one rank", {**GOOD, 5: "copy:1"}, range(1, 8)),
    Scenario(
        "copies left out",
        {**GOOD, 2: "copy:1", 6: "copy:3"},
        range(1, 8),
        more={"overlap": OverlapConfig(exclude="max")},
    ),
    Scenario("all peers of a rank are bad", {**GOOD, 2: "corrupt", 4: "index", 6: "early"}, range(1, 7)),
    Scenario("repeated uids, a uid in both lists", {**GOOD, 2: "value"}, (3, 1, 2, 3, 1), (1, 9, 9, 8)),
    Scenario("nobody is wanted", GOOD, ()),
    Scenario("nobody is good", dict.fromkeys(range(1, 6), "corrupt"), range(1, 6)),
    Scenario("more ranks than peers", GOOD, (4,)),
    Scenario("too few reserves", {1: "good", 2: "late", 3: "large", 4: "good"}, (1, 2, 3), (4,)),
    Scenario("reserves are bad, too", {1: "good", 2: "late", 8: "schema", 9: "stolen"}, (1, 2), (8, 9)),
    Scenario(
        "two rounds of reserves",
        {**GOOD, 2: "late", 8: "corrupt"},
        (1, 2, 3),
        (8, 9),
        more={"backfill_rounds": 2},
    ),
    Scenario("too few peers", {**GOOD, 2: "corrupt"}, (1, 2), more={"min_peers": 2}),
    Scenario(
        "a budget that forces small blocks",
        GOOD,
        range(1, 8),
        more={"memory_budget": 4 << 20},
        schema=PayloadSchema.of(weights(shapes=WIDE), chunk=8, keep=6),
    ),
    Scenario("the operator skips", GOOD, (1, 2, 3), skip=True),
    Scenario("nesterov", GOOD, range(1, 6), more={"update": UpdateConfig(optimizer="nesterov", lr=0.7)}),
    Scenario(
        "trimmed mean over peers",
        GOOD,
        range(1, 8),
        more={"update": UpdateConfig(rule="trimmed", trim=0.2, mean="peers", optimizer="sign")},
    ),
    Scenario("median", GOOD, range(1, 8), more={"update": UpdateConfig(rule="median")}),
    Scenario(
        "a sample of rows", {**GOOD, 6: "copy:1"}, range(1, 8), more={"overlap": OverlapConfig(sample=0.5)}
    ),
    Scenario("cosine transform", GOOD, range(1, 6), schema=small_schema(dct=True)),
    Scenario("tables", {**GOOD, 2: "corrupt"}, range(1, 6), (8,), schema=small_schema(users=3, items=2)),
]


def world_of(scenario: Scenario, server: Any) -> World:
    """The scenario's own part of a server that all share."""
    return World(server, schema=scenario.schema, prefix=f"{SCENARIOS.index(scenario)}/")


def play(scenario: Scenario, endpoint: str, artifacts: Path, ranks: ElasticRanks | None) -> dict[str, Any]:
    """One rank's part of a scenario; what it came to, without clocks."""
    world = world_of(scenario, SimpleNamespace(bucket="gather", endpoint=endpoint))
    plan = world.plan(scenario.primary, scenario.reserve, skip=scenario.skip, **scenario.more)
    parameters = weights(shapes={spec.name: spec.shape for spec in scenario.schema.parameters})
    update, tables = OuterUpdate(scenario.schema), []

    def apply_rows(table: str, ids: Tensor, change: Tensor) -> None:
        tables.append((table, ids.tolist(), change.tolist()))

    report = run_window(
        plan if ranks is None or ranks.leads else None,
        parameters,
        update,
        world.stores,
        ranks=ranks,
        artifacts=open_object_store(artifacts),
        tables=apply_rows,
        options=RankOptions(request_timeout=10.0),
    )
    if report.update is not None:
        assert report.update.peak_bytes <= plan.gather.memory_budget
    return facts(report, update, parameters) | {"tables": tables}


def facts(report: WindowReport, update: OuterUpdate, parameters: dict[str, Tensor]) -> dict[str, Any]:
    result, overlap = report.result, report.overlap
    found = metrics(result, overlap=overlap)
    del found["gather/seconds"]
    return {
        "result": agreed(result),
        "duplicates": result.duplicate_uids,
        "lines": [line.split(" tries=")[0] for line in result.lines()],
        "metrics": found,
        "gram": None if overlap is None else overlap.gram.tolist(),
        "pairs": None if overlap is None else overlap.pairs,
        "reason": report.decision.reason.name,
        "detail": report.decision.detail,
        "factors": None if report.update is None else report.update.factors,
        "excluded": None if report.update is None else report.update.excluded,
        "outer_step": update.outer_step,
        "weights": update.fingerprint(parameters).hash,
    }


def play_all(endpoint: str, folder: str) -> tuple[list[dict[str, Any]], list[str]]:
    """All scenarios, one after another, as one rank; and the exchanges it took part in."""
    torch.set_num_threads(1)
    ranks = ElasticRanks.of_group(timeout=60.0) if dist.get_world_size() > 1 else None
    found = [
        play(scenario, endpoint, Path(folder) / str(number), ranks)
        for number, scenario in enumerate(SCENARIOS)
    ]
    return found, [] if ranks is None else ranks.log
