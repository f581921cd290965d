"""Metrics against what they mean, written out with loops and numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from megalith.errors import InputError
from megalith.metrics import AUC, BinnedAUC, Calibration, auc, log_loss
from tests.fixed_examples import fixed_examples

LOGITS = st.sampled_from([-30.0, -2.5, -1.0, -0.0, 0.0, 1e-9, 0.5, 2.0, 40.0]) | st.floats(-50, 50, width=32)
WEIGHTS = st.sampled_from([0.0, 0.5, 1.0, 3.0])
ROWS = st.lists(st.tuples(LOGITS, st.booleans(), WEIGHTS), min_size=0, max_size=30)


@pytest.fixture(autouse=True)
def one_thread(restore_threads: None) -> None:
    """Columns of some rows gain nothing by a second thread."""
    torch.set_num_threads(1)


def columns(rows: list[tuple[float, bool, float]]) -> tuple[Tensor, Tensor, Tensor]:
    scores, labels, weights = zip(*rows, strict=True) if rows else ((), (), ())
    return torch.tensor(scores), torch.tensor(labels).float(), torch.tensor(weights)


def pairs_auc(scores: Tensor, labels: Tensor, weights: Tensor) -> float:
    """Every positive against every negative."""
    won = total = 0.0
    rows = list(zip(scores.tolist(), labels.tolist(), weights.tolist(), strict=True))
    for s, _, w in (row for row in rows if row[1]):
        for t, _, v in (row for row in rows if not row[1]):
            won += w * v * (1.0 if s > t else 0.5 if s == t else 0.0)
            total += w * v
    return won / total if total else math.nan


def same(a: float, b: float) -> None:
    assert a == pytest.approx(b, rel=1e-12, abs=1e-12, nan_ok=True)


# ---- AUC


@fixed_examples(40)
@given(ROWS)
def test_auc_is_the_share_of_pairs_in_order(rows: list[Any]) -> None:
    scores, labels, weights = columns(rows)
    same(auc(scores, labels, weights), pairs_auc(scores, labels, weights))
    same(auc(scores, labels), pairs_auc(scores, labels, torch.ones(len(rows))))


def test_auc_of_infinite_scores_and_labels_of_any_type() -> None:
    for dtype in (torch.float32, torch.bool, torch.int64):
        labels = torch.tensor([0, 0, 1]).to(dtype)
        assert auc(torch.tensor([-math.inf, 0.0, math.inf]), labels) == 1.0


def test_auc_of_many_rows_is_that_of_ranks() -> None:
    """Mann and Whitney's U by numpy's ranks, without ties."""
    rng = np.random.default_rng(0)
    scores, labels = rng.permutation(200_000).astype(np.float64), rng.random(200_000) < 0.1
    ranks = scores.argsort().argsort() + 1
    positives = int(labels.sum())
    u = int(ranks[labels].sum()) - positives * (positives + 1) // 2
    expected = u / (positives * (len(labels) - positives))
    assert auc(torch.from_numpy(scores), torch.from_numpy(labels)) == expected


@fixed_examples(40)
@given(st.lists(ROWS, max_size=4))
def test_auc_in_chunks_is_the_auc_of_all(chunks: list[list[Any]]) -> None:
    metric = AUC()
    for chunk in chunks:
        metric.update(*columns(chunk))
    same(metric.compute(), auc(*columns([row for chunk in chunks for row in chunk])))
    metric.reset()
    assert math.isnan(metric.compute())


@fixed_examples(40)
@given(st.lists(ROWS, max_size=4))
def test_binned_auc_is_the_auc_of_rounded_scores(chunks: list[list[Any]]) -> None:
    metric = BinnedAUC()
    for chunk in chunks:
        metric.update(*columns(chunk))
    scores, labels, weights = columns([row for chunk in chunks for row in chunk])
    same(metric.compute(), auc(scores.bfloat16(), labels, weights))
    metric.reset()
    assert math.isnan(metric.compute())


@fixed_examples(40)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=20))
def test_binned_auc_keeps_the_order_of_all_floats(scores: list[float]) -> None:
    given_scores = torch.tensor(scores)
    labels = torch.arange(len(scores)) % 2
    metric = BinnedAUC()
    metric.update(given_scores, labels)
    same(metric.compute(), auc(given_scores.bfloat16(), labels))


# ---- log loss


@fixed_examples(40)
@given(ROWS)
def test_log_loss_is_the_mean_surprise(rows: list[Any]) -> None:
    logits, labels, weights = columns(rows)
    z, y, w = (column.double().numpy() for column in (logits, labels, weights))
    surprise = np.log1p(np.exp(np.where(y == 1, -z, z)))
    same(log_loss(logits, labels), float(surprise.mean()) if len(rows) else math.nan)
    same(log_loss(logits, labels, weights), float((surprise * w).sum() / w.sum()) if w.sum() else math.nan)


def test_log_loss_of_large_logits_is_finite() -> None:
    same(log_loss(torch.tensor([1000.0, -1000.0]), torch.tensor([0, 0])), 500.0)


# ---- calibration


@fixed_examples(40)
@given(st.lists(ROWS, max_size=3), st.integers(1, 7))
def test_calibration_is_means_by_bin(chunks: list[list[Any]], num_bins: int) -> None:
    metric = Calibration(num_bins)
    for chunk in chunks:
        metric.update(*columns(chunk))
    bins = metric.compute()
    logits, labels, weights = columns([row for chunk in chunks for row in chunk])
    chance = 1 / (1 + np.exp(-logits.double().numpy()))
    assume(not np.isclose(chance * num_bins % 1, 0, atol=1e-9).any() or num_bins == 1)
    place = np.minimum((chance * num_bins).astype(int), num_bins - 1)
    y, w = labels.numpy(), weights.double().numpy()
    for k in range(num_bins):
        weight = w[place == k].sum()
        assert bins.weight[k].item() == weight
        for found, values in ((bins.predicted, chance), (bins.observed, y)):
            expected = (values * w)[place == k].sum() / weight if weight else math.nan
            same(found[k].item(), expected)
    came = (y * w).sum()
    same(bins.ratio, (chance * w).sum() / came if came else math.nan)


def test_calibration_of_certain_rows_and_of_later_ones() -> None:
    metric = Calibration(num_bins=2)
    metric.update(torch.tensor([0.2, 0.8]).logit(), torch.tensor([0, 1]))
    bins = metric.compute()
    metric.update(torch.tensor([100.0]), torch.tensor([1]))  # a probability of 1 is in the last bin
    assert metric.compute().weight.tolist() == [1, 2]
    assert bins.weight.tolist() == [1, 1]  # what was computed stays
    metric.reset()
    assert math.isnan(metric.compute().ratio)


# ---- input


@pytest.mark.parametrize("take", [auc, log_loss, AUC().update, BinnedAUC().update, Calibration().update])
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([1.0, math.nan], [0, 1]), "scores hold NaN"),
        (([1, 2], [0, 1]), r"scores must be float \[n\], got torch.int64 \[2\]"),
        (([[1.0], [2.0]], [0, 1]), r"got torch.float32 \[2, 1\]"),
        (([1.0, 2.0], [0, 1, 1]), r"labels must have shape \[2\] like scores, got \[3\]"),
        (([1.0, 2.0], [0.0, 0.5]), "labels must be 0 or 1"),
        (([1.0, 2.0], [0.0, math.nan]), "labels must be 0 or 1"),
        (([1.0, 2.0], [0, 1], [1.0]), r"weights must have shape \[2\] like scores, got \[1\]"),
        (([1.0, 2.0], [0, 1], [1.0, -1.0]), "weights must be finite and not negative"),
        (([1.0, 2.0], [0, 1], [1.0, math.inf]), "weights must be finite"),
    ],
)
def test_wrong_input_raises(take: Any, columns: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        take(*map(torch.tensor, columns))


def test_scores_may_carry_gradients_and_be_half() -> None:
    labels = torch.tensor([0, 1])
    logits = torch.tensor([-1.0, 1.0], requires_grad=True)
    assert auc(logits, labels) == auc(logits.half(), labels) == 1.0
    assert log_loss(logits.bfloat16(), labels) == pytest.approx(math.log1p(math.exp(-1)))
