"""SyntheticReader: pure batches, Zipf's law, new ids, drift, and that its labels can be learnt."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.data import SyntheticFeature, SyntheticReader
from megalith.errors import InputError
from tests.data.support import assert_same_batches, check_resume, rows_of


def reader(**options: object) -> SyntheticReader:
    return SyntheticReader(batch_size=64, **{"num_batches": 6, **options})  # type: ignore[arg-type]


@settings(max_examples=20)
@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 10**6))
def test_a_batch_is_a_pure_function_of_seed_and_number(seed: int, index: int) -> None:
    one = SyntheticReader(batch_size=8, seed=seed, num_dense=2)
    other = SyntheticReader(batch_size=8, seed=seed, num_dense=2)
    other.batch(index + 1)
    assert_same_batches([one.batch(index)], [other.batch(index)])
    assert torch.equal(one.batch(index).true_probability, other.batch(index).true_probability)
    assert rows_of([one.batch(index)]) != rows_of([one.batch(index + 1)])
    assert rows_of([one.batch(index)]) != rows_of([SyntheticReader(batch_size=8, seed=seed ^ 1).batch(index)])


def test_resume_shards_and_length() -> None:
    check_resume(reader)
    check_resume(lambda: reader().shard(1, 2))
    stream = rows_of(reader())
    assert len(stream) == reader().num_rows == 6 * 64
    for world in (2, 4):
        shards = [reader().shard(rank, world) for rank in range(world)]
        assert sum(shard.num_rows or 0 for shard in shards) == 6 * 64
        merged = [batch for shard in shards for batch in shard]
        merged.sort(key=lambda batch: batch.time or 0)
        assert rows_of(merged) == stream
    assert reader(num_batches=None).num_rows is None


def test_an_endless_stream_starts_anywhere() -> None:
    endless = SyntheticReader(batch_size=4)
    endless.seek(json.loads(json.dumps({"batch": 10**9, "shard": [0, 1]})))
    batch = next(iter(endless))
    assert batch.time == 10**9
    assert rows_of([batch]) == rows_of([endless.batch(10**9)])
    with pytest.raises(InputError, match="'batch' of a position"):
        endless.seek({"batch": "x", "shard": [0, 1]})


def test_the_content_of_a_batch() -> None:
    batch = SyntheticReader(batch_size=500, num_dense=3, start_time=1000, seconds_per_batch=60).batch(5)
    assert list(batch.features) == ["user", "item", "tags", "context"]
    assert batch.time == 1300
    assert batch.dense.shape == (500, 3)
    assert abs(batch.dense.mean().item()) < 0.1
    assert batch.features["user"].lengths().tolist() == [1] * 500
    assert set(batch.features["tags"].lengths().tolist()) == {0, 1, 2, 3, 4}
    assert set(batch.labels.tolist()) == {0.0, 1.0}
    moved = batch.to("cpu")
    assert torch.equal(moved.true_probability, batch.true_probability)


def test_labels_are_as_frequent_as_the_true_probabilities() -> None:
    batch = SyntheticReader(batch_size=40_000).batch(0)
    for low in (0.0, 0.2, 0.4, 0.6, 0.8):
        inside = (batch.true_probability >= low) & (batch.true_probability < low + 0.2)
        stated = batch.true_probability[inside].mean().item()
        assert batch.labels[inside].mean().item() == pytest.approx(stated, abs=0.03)


def test_ids_follow_zipfs_law() -> None:
    feature = SyntheticFeature(name="f", num_ids=1000, exponent=1.0)
    ids = SyntheticReader([feature], batch_size=60_000).batch(0).features["f"].values
    _, counts = torch.unique(ids, return_counts=True)
    counts = counts.sort(descending=True).values.double()
    assert len(counts) <= 1000
    # The law taken as continuous: rank k has log((k + 1) / k) / log(1001) of all.
    for k in (1, 2, 5, 20):
        share = torch.log(torch.tensor((k + 1) / k)) / torch.log(torch.tensor(1001.0))
        assert counts[k - 1].item() / 60_000 == pytest.approx(share.item(), rel=0.1)


def test_new_ids_appear_and_are_forgotten() -> None:
    feature = SyntheticFeature(name="f", num_ids=100, exponent=1.2, new_per_batch=10, fresh=0.5)
    stream = SyntheticReader([feature], batch_size=2000)
    early, late, later = (set(stream.batch(i).features["f"].values.tolist()) for i in (0, 50, 100))
    assert len(early) <= 100
    assert len(late - early) > 20
    assert len((late - early) & later) < 5  # rare ids of the beginning, met by chance
    assert len(early & late & later) > 50


def test_drift_changes_the_true_probabilities_periodically() -> None:
    still = SyntheticReader(batch_size=300)
    drifting = SyntheticReader(batch_size=300, drift_period=40)
    assert rows_of([drifting.batch(0)]) == rows_of([still.batch(0)])
    quarter, whole = (drifting.batch(i).true_probability for i in (10, 40))
    assert torch.allclose(whole, still.batch(40).true_probability, atol=1e-6)
    assert (quarter - still.batch(10).true_probability).abs().mean() > 0.1


def test_an_ids_weight_does_not_depend_on_its_batch() -> None:
    feature = SyntheticFeature(name="f", num_ids=20)
    stream = SyntheticReader([feature], batch_size=100)
    chance: dict[int, float] = {}
    for index in (0, 7, 10**6):
        batch = stream.batch(index)
        ids = batch.features["f"].values.tolist()
        for id, value in zip(ids, batch.true_probability.tolist(), strict=True):
            assert chance.setdefault(id, value) == value
    assert len(chance) == 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": []}, "features must have distinct names"),
        ({"features": [SyntheticFeature(name="a")] * 2}, "features must have distinct names"),
        ({"interaction": 1.5}, "interaction must be between"),
        ({"drift_period": 0}, "drift_period must be above 0"),
        ({"num_dense": -1}, "must be an integer of at least 0"),
    ],
)
def test_what_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SyntheticReader(batch_size=4, **options)  # type: ignore[arg-type]
