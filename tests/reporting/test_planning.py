"""planning: rows and traffic per rank for ids with and without patterns, and the advice given."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalith import Router
from megalith.reporting.planning import Forecast, Load, forecast

N = 50_000


def zipf(exponent: float, num_ids: int, draws: int = 200_000, seed: int = 42) -> Tensor:
    weights = torch.arange(1, num_ids + 1, dtype=torch.float64) ** -exponent
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(weights, draws, replacement=True, generator=generator) + 1


def kinds(result: Forecast) -> list[str]:
    return [advice.kind for advice in result.advice if advice.is_warning]


def text(result: Forecast, kind: str) -> str:
    (found,) = [advice.text for advice in result.advice if advice.kind == kind]
    return found


def test_a_load_in_numbers() -> None:
    load = Load([10, 30, 20, 20])
    assert (load.mean, load.imbalance, load.peak) == (20.0, 1.0, 1.5)
    assert (Load([0, 0]).imbalance, Load([0, 0]).peak) == (0.0, 1.0)


# The numbers that DynamicEmb's study of the same keys and hash found.
@pytest.mark.parametrize(("ranks", "imbalance"), [(4, 0.014), (8, 0.038), (64, 0.177), (128, 0.248)])
def test_multiples_of_the_ranks_all_fall_on_one(ranks: int, imbalance: float) -> None:
    result = forecast(torch.arange(N) * ranks, ranks=ranks)
    plain, hashed = result.modes["roundrobin"].rows, result.modes["hash_roundrobin"].rows
    assert plain.per_rank == [N] + [0] * (ranks - 1)
    assert plain.peak == plain.imbalance == ranks
    assert hashed.imbalance == pytest.approx(imbalance, abs=0.0006)
    assert result.recommended == "hash_roundrobin"
    assert f"all are 0 mod {ranks}" in text(result, "pattern")


@pytest.mark.parametrize(
    ("ids", "ranks", "stride"),
    [
        (torch.arange(N) * 8 + 3, 8, "3 mod 8"),
        (-torch.arange(1, N) * 4, 4, "0 mod 4"),
        (-torch.arange(1, N) * 6, 3, "mod 6"),
        (1_700_000_000_000 + torch.arange(N) * 1000, 8, "0 mod 1000"),
        ((1_700_000_000_000 + torch.arange(N) * 37) << 22, 16, "mod"),
        (torch.arange(N) * 12 + 1, 9, "1 mod 12"),
    ],
    ids=["residue", "negative", "negative, three ranks", "timestamps", "snowflakes", "common factor"],
)
def test_patterns_are_found_and_cured_by_hashing(ids: Tensor, ranks: int, stride: str) -> None:
    result = forecast(ids, ranks=ranks, batch_size=1000)
    assert kinds(result) == ["pattern"]
    assert stride in text(result, "pattern")
    assert "use hash_roundrobin" in text(result, "pattern")
    assert result.modes["hash_roundrobin"].rows.peak < 1.25 < result.modes["roundrobin"].rows.peak


def test_a_pattern_that_only_most_ids_follow_is_found_without_naming_a_stride() -> None:
    ids = torch.cat([torch.arange(N) * 8, torch.arange(1, N // 10)])
    result = forecast(ids, ranks=8)
    assert kinds(result) == ["pattern"]
    assert "mod" not in text(result, "pattern")


def test_frequent_ids_that_follow_a_pattern_are_found_by_their_traffic() -> None:
    ids = torch.arange(N)
    counts = torch.where(ids % 4 == 1, 20, 1)
    result = forecast(ids, ranks=4, counts=counts)
    assert result.modes["roundrobin"].rows.peak == 1.0
    assert kinds(result) == ["pattern"]
    assert "rank 1 has 87% of the traffic" in text(result, "pattern")


@pytest.mark.parametrize("ranks", [1, 2, 4, 7, 64])
@pytest.mark.parametrize(
    "ids",
    [torch.arange(N), -torch.arange(N), torch.arange(N) * 7919 + 2**40],
    ids=["dense", "negative", "prime stride"],
)
def test_ids_without_a_pattern_need_nothing(ids: Tensor, ranks: int) -> None:
    result = forecast(ids, ranks=ranks)
    assert [kind for kind in kinds(result) if kind != "continuous"] == []
    assert result.recommended == "roundrobin"


def test_random_ids_are_not_called_skewed_for_being_few() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (10, 100, 1000):
        result = forecast(torch.randint(-(2**62), 2**62, (size,), generator=generator), ranks=32)
        assert kinds(result) == []
        assert "use a larger sample" in text(result, "small sample")


def test_a_hot_id_is_named_with_its_share_and_hashing_is_not_the_cure() -> None:
    ids = zipf(1.5, 1000)
    result = forecast(ids, ranks=8)
    assert result.hottest[0].id == 1
    assert result.hottest[0].share == pytest.approx(0.39, abs=0.01)
    assert kinds(result) == ["hot ids"]
    printed = text(result, "hot ids")
    assert "hot ids 1 (39." in printed
    assert "Hashing does not help" in printed
    assert "once per batch" in printed
    assert "cache" in printed
    assert result.recommended == "roundrobin"


def test_sending_an_id_once_per_batch_cures_a_hot_id() -> None:
    result = forecast(zipf(1.5, 1000), ranks=4, batch_size=8192)
    sent = result.modes["roundrobin"].sent
    assert sent is not None
    assert sent.peak < 1.1
    assert kinds(result) == []
    assert "no action is needed" in text(result, "hot ids")


def test_an_id_in_every_small_batch_stays_hot() -> None:
    ids = torch.arange(40_000) // 2
    ids[::2] = -1
    result = forecast(ids, ranks=16, batch_size=4)
    assert kinds(result) == ["hot ids"]
    assert "larger batches" in text(result, "hot ids")


# ---- continuous


def test_the_block_size_is_derived_where_it_is_not_given() -> None:
    result = forecast(torch.arange(1000), ranks=3)
    assert result.modes["continuous"].block_size == 334
    assert result.modes["continuous"].rows.per_rank == [334, 334, 332]


@pytest.mark.parametrize("block", [20_000, 10**9])
def test_a_bad_block_size_gets_the_advice_of_a_good_one(block: int) -> None:
    result = forecast(torch.arange(N), ranks=4, block_size=block)
    assert kinds(result) == ["block size"]
    assert "use --block-size 12500" in text(result, "block size")


def test_ids_far_from_zero_have_no_block_size() -> None:
    result = forecast(10**12 + torch.arange(N), ranks=4, block_size=1 << 40)
    assert kinds(result) == ["continuous"]
    assert "with any block size" in text(result, "continuous")
    assert "use roundrobin" in text(result, "continuous")


def test_hot_neighbours_share_a_block() -> None:
    result = forecast(zipf(1.1, 10_000), ranks=4, batch_size=1024, block_size=2500)
    assert "next to each other" in text(result, "continuous")


# ---- counting


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3), min_size=1, max_size=60),
    st.integers(1, 9),
    st.integers(1, 10),
)
def test_counts_are_those_of_the_router(ids: list[int], ranks: int, batch_size: int) -> None:
    result = forecast(torch.tensor(ids), ranks=ranks, batch_size=batch_size)
    batches = [set(ids[i : i + batch_size]) for i in range(0, len(ids), batch_size)]
    for mode in result.modes.values():
        router = Router(mode.mode, ranks, block_size=mode.block_size)

        def owners(some: list[int], router: Router = router) -> list[int]:
            return torch.bincount(router.owner(torch.tensor(some)), minlength=ranks).tolist()

        assert mode.rows.per_rank == owners(list(set(ids)))
        assert mode.traffic is not None
        assert mode.traffic.per_rank == owners(ids)
        assert mode.sent is not None
        assert mode.sent.per_rank == owners([id for batch in batches for id in batch])
    assert result.occurrences == len(ids)
    assert sum(hot.occurrences for hot in result.hottest) <= len(ids)
