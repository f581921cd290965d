"""Overlap: exact counts against plain sets, findings, and who is blamed."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.errors import BudgetError, InputError
from megalith.gather.overlap import excluded_uids, find_overlap
from megalith.gather.payload_schema import PayloadSchema
from megalith.gather.plan import GatherConfig, OverlapConfig
from megalith.gather.result import GatherResult
from megalith.ops.matrix_chunks import STEP_BYTES, common_positions, pack_indices
from tests.gather import naive
from tests.gather.support import forged, gathered, peer_bytes, small_schema

SCHEMA = small_schema()


def window(
    seeds: dict[int, int], schema: PayloadSchema = SCHEMA, **plan: Any
) -> tuple[GatherResult, dict[int, bytes]]:
    data = {uid: peer_bytes(schema, uid, seed=seed) for uid, seed in seeds.items()}
    return gathered(schema, data, **plan), data


def gram(result: GatherResult, memory_budget: int | None = None) -> torch.Tensor:
    config = result.plan.gather if memory_budget is None else GatherConfig(memory_budget=memory_budget)
    plan = replace(result.plan, gather=config)
    return find_overlap(replace(result, plan=plan)).gram


def at(result: GatherResult, **seconds: int) -> GatherResult:
    """The same result with other times of writing: u3=7 is uid 3 at second 7."""
    times = {int(name[1:]): datetime(2026, 1, 1, 0, 0, s, tzinfo=UTC) for name, s in seconds.items()}
    records = {
        uid: replace(record, last_modified=times.get(uid, record.last_modified))
        for uid, record in result.records.items()
    }
    return replace(result, records=records)


@pytest.mark.parametrize("full_rows", [False, True])
def test_counts_are_those_of_sets(full_rows: bool) -> None:
    result, data = window({1: 1, 2: 2, 3: 1, 9: 9}, overlap=OverlapConfig(full_rows=full_rows))
    matrix = gram(result)
    read = [naive.read(data[uid]) for uid in result.uids]
    for i, a in enumerate(read):
        for j, b in enumerate(read):
            assert matrix[i, j] == naive.shared_positions(a, b, skip_full=not full_rows)


@given(st.integers(0, 12), st.integers(1, 7), st.integers(1, 4), st.integers(0, 10**6))
def test_block_counts_are_those_of_sets(peers: int, keep: int, rows: int, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    sent = [torch.rand(rows, 9, generator=make).argsort(1)[:, :keep].sort(1).values for _ in range(peers)]
    matrix = common_positions([pack_indices(each) for each in sent], keep, 9)
    assert matrix.shape == (peers, peers)
    for i in range(peers):
        for j in range(peers):
            shared = sum(len({*a} & {*b}) for a, b in zip(sent[i].tolist(), sent[j].tolist(), strict=True))
            assert matrix[i, j] == shared


def test_value_of_a_pair_is_the_baselines() -> None:
    result, data = window({1: 1, 2: 2, 3: 3}, overlap=OverlapConfig(full_rows=True))
    overlap = find_overlap(result)
    for (i, a), (j, b) in combinations(enumerate(result.uids), 2):
        expected = naive.baseline_overlap(naive.read(data[a]), naive.read(data[b]))
        assert int(overlap.gram[i, j]) / overlap.total == pytest.approx(expected, rel=1e-12)


@given(st.integers(1, 40))
@settings(max_examples=20)
def test_budgets_change_nothing(rows: int) -> None:
    result, _ = window({1: 1, 2: 2, 3: 1})
    assert torch.equal(gram(result, memory_budget=STEP_BYTES + 8192 * rows), gram(result))


def test_a_copy_is_found_and_the_later_one_blamed() -> None:
    result, _ = window({1: 1, 2: 2, 5: 1})
    overlap = find_overlap(result)
    assert [(p.first, p.second, p.overlap, p.level, p.offender) for p in overlap.pairs] == [
        (1, 5, 1.0, "mega", 5)
    ]
    assert overlap.levels == {5: "mega"}
    assert (overlap.pairs_checked, overlap.maximum) == (3, 1.0)
    assert overlap.ratio_high == 1 / 3
    assert 0 < overlap.minimum <= overlap.mean < 1
    assert result.copies == ((1, 5),)
    assert find_overlap(at(result, u1=30, u5=2)).levels == {1: "mega"}


def test_ties_blame_the_later_uid_or_as_the_baseline_the_first() -> None:
    for tie, blamed in (("later", 5), ("first", 1)):
        result, _ = window({1: 1, 5: 1}, overlap=OverlapConfig(tie=tie))  # type: ignore[arg-type]
        overlap = find_overlap(at(result, u1=3, u5=3))
        assert (set(overlap.levels), overlap.minimum) == ({blamed}, 1.0)


def test_canonical_order_puts_reserves_last() -> None:
    data = {uid: peer_bytes(SCHEMA, uid, seed=1) for uid in (1, 5)}
    result = at(gathered(SCHEMA, data, reserve=(1,)), u1=3, u5=3)
    assert result.uids == (5, 1)
    assert set(find_overlap(result).levels) == {1}


def test_levels_go_by_the_worst_pair_or_as_the_baseline_by_the_last() -> None:
    schema = PayloadSchema.of({"w": torch.zeros(8, 64)}, chunk=8, keep=8)

    def sharing(uid: int, rows: int) -> bytes:
        """Rows of positions 0 to 7, the rest of 56 to 63."""
        indices = torch.arange(56, 64).repeat(8, 1)
        indices[:rows] = torch.arange(8)
        return forged(schema, uid, indices=pack_indices(indices))

    data = {1: sharing(1, 8), 2: sharing(2, 8), 3: sharing(3, 4)}
    for level, expected in (("worst", {2: "mega", 3: "max"}), ("last", {2: "max", 3: "max"})):
        result = gathered(schema, data, overlap=OverlapConfig(level=level))  # type: ignore[arg-type]
        overlap = find_overlap(at(result, u1=1, u2=9, u3=2))
        assert [(p.first, p.second, p.overlap, p.level, p.offender) for p in overlap.pairs] == [
            (1, 2, 1.0, "mega", 2),
            (1, 3, 0.5, "max", 3),
            (2, 3, 0.5, "max", 2),
        ]
        assert overlap.levels == expected


def test_excluded_are_those_from_a_level_on() -> None:
    result, _ = window({1: 1, 2: 2, 5: 1}, overlap=OverlapConfig(exclude="max"))
    overlap = find_overlap(result)
    assert excluded_uids(overlap, result.plan.overlap) == (5,)
    assert excluded_uids(overlap, OverlapConfig()) == ()
    assert overlap.at_least("high") == (5,)


@given(st.integers(1, 10**12), st.integers(1, 999))
def test_thresholds_are_exact(total: int, thousandths: int) -> None:
    config = OverlapConfig(threshold=thousandths / 1000, max_from=1.0, mega_from=1.0)
    limit = Fraction(thousandths, 1000) * total
    least = -(-limit.numerator // limit.denominator)
    if least < total:
        assert config.level_of(least, total) == "high"
    assert config.level_of(least - 1, total) is None


def test_few_peers_and_uninformative_models_have_no_findings() -> None:
    for seeds in ({}, {1: 1}):
        overlap = find_overlap(window(seeds)[0])
        assert (overlap.pairs_checked, overlap.mean, overlap.minimum, overlap.maximum) == (0, 0.0, 0.0, 0.0)
    schema = PayloadSchema.of({"b": torch.zeros(8)})
    result, _ = window({1: 1, 2: 2}, schema)
    overlap = find_overlap(result)
    assert (overlap.pairs_checked, overlap.total, overlap.pairs, result.copies) == (1, 0, (), ())


def test_a_sample_finds_the_copies_and_counts_them_exactly() -> None:
    schema = PayloadSchema.of({"w": torch.zeros(256, 512)}, chunk=16, keep=16)
    seeds = {uid: uid % 5 for uid in range(9)}
    exact = find_overlap(window(seeds, schema)[0])
    result, _ = window(seeds, schema, overlap=OverlapConfig(sample=0.25, margin=0.2))
    sampled = find_overlap(result)
    assert (exact.exact, sampled.exact) == (True, False)
    assert (sampled.pairs, sampled.levels) == (exact.pairs, exact.levels)
    assert len(exact.pairs) == 4
    assert not torch.equal(sampled.gram, exact.gram)
    assert abs(sampled.mean - exact.mean) < 0.02


def test_wrong_arguments_are_named() -> None:
    result, _ = window({1: 1, 2: 2})
    with pytest.raises(InputError, match="of 2 peers must have"):
        find_overlap(result, torch.zeros(3, 3, dtype=torch.int64))
    with pytest.raises(BudgetError, match="raise memory_budget"):
        gram(result, memory_budget=200)
    with pytest.raises(InputError, match="the payload of uid 1 is not in this process"):
        gram(replace(result, payloads={}))
