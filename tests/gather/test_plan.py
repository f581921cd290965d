"""Plans and who fetches whom."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith.errors import InputError
from megalith.gather.payload_schema import PayloadSchema
from megalith.gather.plan import (
    GatherConfig,
    GatherPlan,
    Location,
    OverlapConfig,
    Status,
    UpdateConfig,
    backfill,
    deal,
    partition,
)
from megalith.storage.json_codec import to_json

SCHEMA = "ab" * 32
uids = st.lists(st.integers(0, 60), max_size=40)
worlds = st.integers(1, 9)


def plan(primary: Any = (), reserve: Any = (), **more: Any) -> GatherPlan:
    return GatherPlan(
        run="r", window=5, schema=SCHEMA, primary=tuple(primary), reserve=tuple(reserve), **more
    )


def gathering(**more: Any) -> dict[str, Any]:
    return {"gather": GatherConfig(**more)}


# ---- the plan


def test_a_schema_and_numpy_uids_are_taken() -> None:
    schema = PayloadSchema.of({"w": torch.zeros(4, 4)})
    given = GatherPlan(run="r", window=5, schema=schema, primary=np.array([3, 1]), reserve=[np.int64(7)])
    named = GatherPlan(run="r", window=5, schema=schema.digest, primary=(3, 1), reserve=(7,))
    assert (given, given.to_bytes()) == (named, named.to_bytes())
    assert given.location(np.int64(3)) == Location("payloads/r/5/3.gather")


def test_repeated_uids_count_once_and_primaries_come_first() -> None:
    made = plan([3, 1, 3, 2], [2, 9, 9, 4, 1])
    assert made.primary == (3, 1, 2)
    assert made.reserve == (9, 4)


def test_places_have_a_default() -> None:
    made = plan([1, 2], locations={2: Location("x/y", "other"), 77: Location("unused")})
    assert made.location(1) == Location("payloads/r/5/1.gather", "default")
    assert made.location(2) == Location("x/y", "other")
    assert set(made.locations) == {2}
    with pytest.raises(InputError, match="plan: locations must be a dict by uid"):
        plan([1], locations=[1])


CONFIGS: list[dict[str, Any]] = [
    {"deadline": 1.0},
    {"grace": 1.0},
    {"max_object_bytes": 5},
    {"max_value": 2.0},
    {"min_peers": 2},
    {"backfill_rounds": 2},
    {"memory_budget": 7},
    {"formats": ("templar",)},
    {"require_weights": True},
    {"fingerprint_every": 3},
]


def test_digest_covers_every_field() -> None:
    base = plan([1, 2], [3])
    now = datetime(2026, 1, 2, tzinfo=UTC)
    changes: list[dict[str, Any]] = [
        {"run": "s"},
        {"window": 6},
        {"attempt": 1},
        {"schema": "cd" * 32},
        {"primary": (2, 1)},
        {"reserve": ()},
        {"locations": {1: Location("k")}},
        {"time_min": now},
        {"time_max": now},
        {"skip": True},
        {"weights": "ab" * 32},
        *map(dict, [gathering(**each).items() for each in CONFIGS]),
        {"update": UpdateConfig(lr=0.5)},
        {"overlap": OverlapConfig(threshold=0.3)},
    ]
    assert set(to_json(base)) == {key for change in changes for key in change}
    digests = [replace(base, **change).digest for change in changes]
    assert len({base.digest, *digests}) == len(changes) + 1
    names = {"gather": [next(iter(each)) for each in CONFIGS], "update": ["lr"], "overlap": ["threshold"]}
    for change in changes:
        (name,) = change
        expected = [] if name in ("attempt", "weights") else [name]
        expected = [names[name].pop(0)] if name in names else expected
        assert replace(base, **change).differences(base) == expected


def test_a_plan_travels_as_bytes() -> None:
    made = plan(
        [5, 1],
        [7],
        locations={1: Location("a/b", "s")},
        time_min=datetime(2026, 1, 1),
        time_max=datetime(2026, 1, 1, 3, tzinfo=timezone(timedelta(hours=2))),
        update=UpdateConfig(optimizer="nesterov", lr=0.1, rule="trimmed", trim=0.2),
        overlap=OverlapConfig(exclude="mega", tie="first"),
    )
    again = GatherPlan.from_bytes(made.to_bytes())
    assert again == made
    assert again.digest == made.digest
    assert again.time_max == datetime(2026, 1, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", ""),
        ("run", "a/b"),
        ("window", -1),
        ("schema", "x"),
        ("primary", [True]),
        ("primary", [2**63]),
        ("reserve", "1"),
        ("locations", {"1": {"store": "s"}}),
        ("locations", {"1": {"store": "", "key": "k"}}),
        ("locations", {"x": {"store": "s", "key": "k"}}),
        ("time_min", "yesterday"),
        ("time_max", "0001-01-01T00:00:00+23:59"),
        ("gather", {"deadline": -1}),
        ("gather", {"max_value": 0}),
        ("gather", {"max_value": 1e31}),
        ("gather", {"min_peers": 0}),
        ("gather", {"memory_budget": 0}),
        ("gather", {"formats": ["x"]}),
        ("gather", {"fingerprint_every": -1}),
        ("weights", "ab"),
        ("update", {}),
        ("overlap", None),
        ("more", 1),
    ],
)
def test_wrong_plans_are_refused(field: str, value: Any) -> None:
    data = to_json(plan([1], [2]))
    if field == "gather":
        (field,) = value
        data["gather"] |= value
    else:
        data |= {field: value}
    with pytest.raises(InputError, match=field if field != "locations" else "location"):
        GatherPlan.from_bytes(json.dumps(data).encode())


WRONG = {"optimizer": "adam", "lr": float("inf"), "momentum": 1.0, "rule": "max", "mean": "all", "trim": 0.5}


def test_wrong_settings_name_the_field() -> None:
    for field, value in {**WRONG, "clip": "max"}.items():
        with pytest.raises(InputError, match=f"^update: {field} must be"):
            UpdateConfig(**{field: value})
    for field in ("tie", "level", "exclude"):
        with pytest.raises(InputError, match=f"^overlap: {field} must be"):
            OverlapConfig(**{field: "x"})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="must be above 0 and ascend"):
        OverlapConfig(threshold=0.7)


# ---- the partition


@given(uids, uids, worlds)
def test_primaries_are_dealt_once_evenly_and_by_uid_alone(
    primary: list[int], reserve: list[int], world: int
) -> None:
    shares = partition(plan(primary, reserve), world)
    dealt = [uid for share in shares for uid in share]
    assert sorted(dealt) == sorted(set(primary))
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    assert partition(plan(list(reversed(primary)) + primary), world) == shares
    ranked = sorted(set(primary))
    assert all(ranked[i] in shares[i % world] for i in range(len(ranked)))


@given(uids, worlds, st.integers(0, 5))
def test_sizes_balance_bytes(primary: list[int], world: int, seed: int) -> None:
    sizes = {uid: (uid * 7919 + seed) % 100 for uid in set(primary)}
    shares = partition(plan(primary), world, sizes)
    assert sorted(u for share in shares for u in share) == sorted(set(primary))
    assert shares == partition(plan(sorted(primary)), world, sizes)
    loads = [sum(sizes[u] for u in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def test_largest_goes_first_ties_to_the_lower() -> None:
    assert partition(plan([1, 2, 3, 4]), 2, {1: 5, 2: 9, 3: 5, 4: 1}) == ((2, 4), (1, 3))


@given(uids, uids, st.data())
def test_replacements_are_untried_reserves_in_order(
    primary: list[int], reserve: list[int], data: st.DataObject
) -> None:
    made = plan(primary, reserve)
    accepted = data.draw(st.sets(st.sampled_from(made.primary))) if made.primary else set()
    tried = data.draw(st.sets(st.sampled_from(made.reserve))) if made.reserve else set()
    found = dict.fromkeys(made.primary, Status.CORRUPT) | dict.fromkeys(accepted, Status.OK)
    (chosen,) = backfill(made, [found | dict.fromkeys(tried, Status.CORRUPT)])
    assert not set(chosen) & ({*made.primary} | tried)
    assert len(chosen) == min(len(made.primary) - len(accepted), len(set(made.reserve) - tried))
    assert list(chosen) == [u for u in made.reserve if u in chosen]


def test_reserves_go_to_those_who_had_least() -> None:
    assert deal([10, 11, 12, 13], [3, 2, 3]) == ((11,), (10, 13), (12,))
    assert deal([], [0, 0]) == ((), ())
    with pytest.raises(InputError, match="the number of ranks must be"):
        deal([1], [])
