"""Merging: one result for any number of ranks, whatever went wrong; and what is decided from it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.distributed.tensor_parts import fingerprint
from megalith.errors import InputError
from megalith.gather.overlap import find_overlap
from megalith.gather.plan import GatherPlan, Status
from megalith.gather.result import (
    Decision,
    Partial,
    Record,
    SkipReason,
    as_result,
    decide,
    make_partial,
    merge,
)
from megalith.gather.update import OuterUpdate
from megalith.gather.window import metrics
from tests.gather.support import agreed, checked, peer_bytes, plan_of, small_schema, weights

pytest.importorskip("obstore")
SCHEMA = small_schema()


# ---- merging


def part(
    plan: GatherPlan, uids: dict[int, Status], *, rank: int = 0, world_size: int = 2, seed: int | None = None
) -> Partial:
    fetched = []
    for uid, status in uids.items():
        tier: Any = "primary" if uid in plan.primary else "reserve"
        if status is Status.OK:
            data = peer_bytes(SCHEMA, uid, seed=seed)
            found = checked(data, SCHEMA, uid)
            record = Record(uid, tier, status, bytes=len(data), digest=found.header.digest, global_step=uid)
            fetched.append((record, found))
        else:
            fetched.append((Record(uid, tier, status, "why"), None))
    return make_partial(plan, SCHEMA, uids, fetched, rank=rank, world_size=world_size, seconds=rank + 1.0)


def plan(primary: Any, reserve: Any = (), **more: Any) -> GatherPlan:
    return plan_of(SCHEMA, primary, reserve, **more)


OK = Status.OK


def test_a_rank_without_valid_peers_still_counts_its_skipped() -> None:
    made = plan([1, 2, 3])
    empty = part(made, {2: Status.NOT_FOUND}, rank=1)
    assert (empty.uids, empty.skipped_uids) == ((), (2,))
    nothing = part(made, {}, rank=2)
    assert (nothing.uids, nothing.skipped_uids) == ((), ())
    result = merge([part(made, {1: OK, 3: OK}), empty, nothing])
    assert (result.uids, result.skipped_uids) == ((1, 3), (2,))
    assert result.success_rate == 2 / 3
    assert result.time == 3.0
    assert result.global_steps == (1, 3)


def test_canonical_order_is_primaries_then_reserves() -> None:
    made = plan([9, 4], [2, 7, 1])
    result = merge([part(made, {9: OK, 7: OK}, rank=1), part(made, {4: OK, 2: OK})])
    assert result.uids == result.actual == (4, 9, 2, 7)
    assert result.intended == (9, 4)
    assert result.reserve_used == 2
    assert (result.success_rate, result.primary_success_rate) == (2.0, 1.0)


@given(st.permutations(range(4)))
def test_the_order_of_partials_does_not_matter(order: list[int]) -> None:
    made = plan([1, 2, 3, 4], [5])
    parts = [
        part(made, {u: OK if u != 3 else Status.CORRUPT}, rank=u - 1, world_size=4) for u in (1, 2, 3, 4)
    ]
    assert agreed(merge([parts[i] for i in order])) == agreed(merge(parts))


def test_a_uid_twice_counts_once_and_is_reported() -> None:
    made = plan([1, 2])
    result = merge([part(made, {1: OK}), part(made, {1: Status.TIMEOUT, 2: OK}, rank=1)])
    assert (result.uids, result.duplicate_uids) == ((1, 2), (1,))
    assert result.records[1].status is OK


def test_two_versions_of_one_payload_drop_the_peer() -> None:
    made = plan([1, 2])
    result = merge([part(made, {1: OK}), part(made, {1: OK, 2: OK}, rank=1, seed=5)])
    assert (result.uids, result.skipped_uids, result.conflicts) == ((2,), (1,), (1,))
    assert result.records[1].status is Status.DIGEST_CONFLICT
    assert result.to_penalise == ()


def test_a_lost_ranks_uids_are_taken_from_the_next_attempt() -> None:
    made = plan([1, 2, 3])
    lost = make_partial(made, SCHEMA, [2, 3], [], rank=1, world_size=2, error="killed")
    assert {record.status for record in lost.records.values()} == {Status.RANK_LOST}
    again = part(replace(made, attempt=1), {2: OK, 3: Status.NOT_FOUND}, rank=0)
    result = merge([part(made, {1: OK}), lost, again])
    assert (result.uids, result.skipped_uids, result.duplicate_uids) == ((1, 2), (3,), ())
    assert result.plan.attempt == 1
    assert agreed(result) == agreed(merge([part(made, {1: OK, 2: OK, 3: Status.NOT_FOUND})]))


def test_peers_of_a_rank_without_a_partial_are_lost_and_not_forgotten() -> None:
    made = plan([1, 2, 3, 4])
    first, second = part(made, {1: OK, 3: OK}), part(made, {2: OK, 4: Status.CORRUPT}, rank=1)
    incomplete = merge([first])
    assert (incomplete.uids, incomplete.skipped_uids) == ((1, 3), (2, 4))
    assert {incomplete.records[uid].status for uid in (2, 4)} == {Status.RANK_LOST}
    assert incomplete.records[2].detail == "its rank gave no partial"
    assert incomplete.to_penalise == ()
    assert merge([first, second]).uids == (1, 2, 3)


def test_partials_of_different_plans_do_not_merge() -> None:
    with pytest.raises(InputError, match="rank 0 gathered by another plan"):
        merge([part(plan([1]), {1: OK}), part(plan([1], deadline=1.0), {}, rank=1)])
    with pytest.raises(InputError, match="nothing to merge"):
        merge([])


# ---- the control part


def test_a_partial_travels_without_its_payloads() -> None:
    made = plan([1, 2, 3])
    sent = part(made, {1: OK, 2: Status.INVALID_INDEX, 3: OK}, rank=1)
    got = Partial.from_bytes(sent.to_bytes(), made, SCHEMA)
    assert got.payloads == {}
    assert got.to_bytes() == sent.to_bytes()
    assert (got.uids, got.skipped_uids, got.download_bytes) == ((1, 3), (2,), sent.download_bytes)
    assert agreed(merge([got])) == agreed(merge([sent]))
    assert got.accepted == sent.accepted
    with pytest.raises(InputError, match="is not in this process"):
        OuterUpdate(SCHEMA).apply(weights(), got)


def test_records_keep_every_field_on_the_way() -> None:
    made = plan([1])
    written = datetime(2026, 1, 1, 2, tzinfo=UTC)
    record = Record(1, "primary", Status.TIMEOUT, "slow", 5, 3, written, "e", "a" * 64, 9, 0.25)
    sent = make_partial(made, SCHEMA, [1], [(record, None)])
    assert Partial.from_bytes(sent.to_bytes(), made, SCHEMA).records == {1: record}


@given(st.data())
def test_damaged_control_parts_are_refused_or_read(data: st.DataObject) -> None:
    made = plan([1, 2])
    text = part(made, {1: OK, 2: Status.CORRUPT}).to_bytes()
    at = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:at] + bytes([data.draw(st.integers(0, 255))]) + text[at + 1 :]
    with suppress(InputError):  # and nothing else; some damage leads to another partial
        Partial.from_bytes(damaged, made, SCHEMA)


def test_a_partial_of_another_plan_is_refused() -> None:
    with pytest.raises(InputError, match="field plan must be"):
        Partial.from_bytes(part(plan([1]), {1: OK}).to_bytes(), plan([2]), SCHEMA)


# ---- consumers


def test_consumers_take_an_aggregate_or_partials() -> None:
    made = plan([1, 2, 3])
    parts = [part(made, {1: OK, 3: OK}), part(made, {2: OK}, rank=1)]
    whole = merge(parts)
    results = []
    for given_ in (whole, parts, merge([part(made, {1: OK, 2: OK, 3: OK})])):
        tensors = weights()
        OuterUpdate(SCHEMA).apply(tensors, given_)
        results.append(
            (
                fingerprint(tensors).hash,
                find_overlap(given_).pairs,
                as_result(given_).norm_medians,
                {k: v for k, v in metrics(given_).items() if k != "gather/seconds"},
                as_result(given_).lines(),
            )
        )
    assert results[0] == results[1] == results[2]
    assert as_result(parts[1]).uids == (2,)


def test_metrics_are_numbers_by_name() -> None:
    made = plan([1, 2, 3], [8])
    result = merge([part(made, {1: OK, 2: Status.CORRUPT, 3: Status.TIMEOUT, 8: OK})])
    found = metrics(result, scores={1: 4.0, 2: 2.0, 8: 1.0}, overlap=find_overlap(result))
    assert found["gather/success_rate"] == pytest.approx(200 / 3)
    assert found["gather/primary_success_rate"] == pytest.approx(100 / 3)
    assert found["gather/reserve_used"] == 1
    assert (found["gather/intended_mean"], found["gather/actual_mean"]) == (2.0, 2.5)
    assert found["gather/status/CORRUPT"] == found["gather/status/TIMEOUT"] == 1
    assert found["overlap/pairs_checked"] == 1
    assert found["gather/min_median_norm"] <= found["gather/max_median_norm"]
    assert result.to_penalise == (2,)
    assert "uid=2 tier=primary status=CORRUPT bytes=0 tries=0 detail='why'" in result.lines()[1]


# ---- the decision


def decided(uids: dict[int, Status], *, min_peers: int = 1, **options: Any) -> Decision:
    return decide(part(plan(uids, min_peers=min_peers), uids), **options)


def test_decisions() -> None:
    assert decided({1: OK}).go
    assert decided({1: Status.CORRUPT}).reason is SkipReason.NO_PEERS
    assert decided({1: OK, 2: Status.CORRUPT}, min_peers=2).reason is SkipReason.BELOW_MIN_PEERS
    assert decided({1: OK, 2: Status.RANK_LOST}, min_peers=2).reason is SkipReason.RANK_LOST
    assert decided({1: OK}, excluded=[1]).reason is SkipReason.NO_PEERS
    assert decided({1: OK}, refuse=SkipReason.OPERATOR).reason is SkipReason.OPERATOR
    made = plan([1])
    conflict = [part(made, {1: OK}), part(made, {1: OK}, rank=1, seed=9)]
    assert decide(conflict).reason is SkipReason.DIGEST_CONFLICT
