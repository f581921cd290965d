"""Metrics of binary predictions: AUC, log loss and calibration, in plain torch.

Labels are 0 or 1. Scores may be logits or probabilities where only their order matters. Sums are float64, on
the CPU. An undefined result (a class without rows, or no rows) is NaN; wrong input raises InputError.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.errors import InputError

_BFLOATS = 2**16


def auc(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> float:
    """Return the area under the ROC curve, exactly."""
    # It is the probability that a random positive scores above a random negative, where a tie counts half:
    # the Mann-Whitney statistic divided by the number of pairs.
    #
    # scores: float [n], not NaN; labels: [n], 0 or 1; weights: [n], not negative.
    return _exact(*_checked(scores, labels, weights))


class AUC:
    """The exact `auc` of any number of batches. It keeps all scores and labels."""

    def __init__(self) -> None:
        self._chunks: list[tuple[Tensor, Tensor, Tensor]] = []

    def update(self, scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch."""
        self._chunks.append(_checked(scores, labels, weights))

    def compute(self) -> float:
        """Return the AUC of all batches."""
        if not self._chunks:
            return math.nan
        return _exact(*(torch.cat(column) for column in zip(*self._chunks, strict=True)))

    def reset(self) -> None:
        """Remove all batches."""
        self._chunks.clear()


class BinnedAUC:
    """The AUC of scores rounded to bfloat16, in bounded memory (1 MB), for progress bars.

    Rounding keeps the order of scores; scores that differ by less than 0.8 % may become ties.
    """

    def __init__(self) -> None:
        self.reset()

    def update(self, scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch."""
        scores, labels, weights = _checked(scores, labels, weights)
        # Read as integers, floats of one sign are in order; the order of negative ones is reversed here.
        bits = scores.to(torch.bfloat16).view(torch.int16).long()
        order = torch.where(bits >= 0, bits, -(bits + _BFLOATS // 2)) + _BFLOATS // 2
        _add_by_class(self.sums, order, labels, weights)

    def compute(self) -> float:
        """Return the AUC of all batches."""
        return _area(self.sums)

    def reset(self) -> None:
        """Remove all batches."""
        self.sums = torch.zeros(2, _BFLOATS, dtype=torch.float64, device="cpu")


def log_loss(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> float:
    """Return the mean of -ln(predicted probability of the label)."""
    # logits: float [n], not NaN; labels: [n], 0 or 1; weights: [n], not negative.
    logits, labels, weights = _checked(logits, labels, weights)
    wrong = torch.where(labels, -logits, logits).double()
    losses = torch.logaddexp(wrong, torch.zeros_like(wrong))
    return _ratio(losses @ weights, weights.sum())


@dataclass(frozen=True, eq=False)
class CalibrationBins:
    """Predictions and labels in bins of the predicted probability."""

    predicted: Tensor  # Mean predicted probability of each bin, float64 [bins]; NaN if the bin is empty
    observed: Tensor  # Mean label of each bin, float64 [bins]; NaN if the bin is empty
    weight: Tensor  # Number of rows of each bin, or the sum of their weights, float64 [bins]
    ratio: float  # Mean prediction divided by mean label of all rows; above 1 the model predicts too much


class Calibration:
    """Predicted probabilities and observed labels of any number of batches, in bins of equal width."""

    def __init__(self, num_bins: int = 20) -> None:
        if isinstance(num_bins, bool) or not isinstance(num_bins, int) or num_bins < 1:
            raise InputError(f"Calibration: num_bins must be at least 1, got {num_bins!r}")
        self.num_bins = num_bins
        self.reset()

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch."""
        logits, labels, weights = _checked(logits, labels, weights)
        predicted = logits.double().sigmoid()
        bins = (predicted * self.num_bins).long().clamp(max=self.num_bins - 1)
        for row, values in enumerate((predicted * weights, labels * weights, weights)):
            self._sums[row].index_add_(0, bins, values)

    def compute(self) -> CalibrationBins:
        """Return the bins of all batches."""
        predicted, observed, weight = self._sums
        ratio = _ratio(predicted.sum(), observed.sum())
        return CalibrationBins(predicted / weight, observed / weight, weight.clone(), ratio)

    def reset(self) -> None:
        """Remove all batches."""
        self._sums = torch.zeros(3, self.num_bins, dtype=torch.float64, device="cpu")


# ---- helpers


def _checked(scores: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return copies on the CPU: scores float32 or float64 [n], labels bool [n], weights float64 [n]."""
    given = {"scores": scores, "labels": labels} | ({} if weights is None else {"weights": weights})
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
            raise InputError(f"metrics: {name} must be a dense tensor, got {type(tensor).__name__}")
        if tensor.is_complex():
            raise InputError(f"metrics: {name} must be real numbers, got {tensor.dtype}")
    shape = list(scores.shape)
    if scores.dim() != 1 or not scores.is_floating_point():
        raise InputError(f"metrics: scores must be float [n], got {scores.dtype} {shape}")
    if list(labels.shape) != shape:
        raise InputError(f"metrics: labels must have shape {shape} like scores, got {list(labels.shape)}")
    scores, labels = scores.detach().cpu(), labels.detach().cpu()
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32), copy=True)
    if bool(scores.isnan().any()):
        raise InputError("metrics: scores hold NaN")
    positive = labels == 1
    if not bool((positive | (labels == 0)).all()):
        raise InputError("metrics: labels must be 0 or 1")
    if weights is None:
        return scores, positive, torch.ones(1, dtype=torch.float64, device="cpu").expand(shape)
    if list(weights.shape) != shape:
        raise InputError(f"metrics: weights must have shape {shape} like scores, got {list(weights.shape)}")
    weights = weights.detach().cpu().to(torch.float64, copy=True)
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        raise InputError("metrics: weights must be finite and not negative")
    return scores, positive, weights


def _exact(scores: Tensor, labels: Tensor, weights: Tensor) -> float:
    order = scores.argsort()
    _, group = torch.unique_consecutive(scores[order], return_inverse=True)
    sums = torch.zeros(2, int(group[-1]) + 1 if len(group) else 0, dtype=torch.float64, device="cpu")
    _add_by_class(sums, group, labels[order], weights[order])
    return _area(sums)


def _add_by_class(sums: Tensor, group: Tensor, labels: Tensor, weights: Tensor) -> None:
    """Add the weights of positives and of negatives of each group to sums, float64 [2, groups]."""
    sums[0].index_add_(0, group, weights * labels)
    sums[1].index_add_(0, group, weights * ~labels)


def _area(sums: Tensor) -> float:
    """Return the AUC of positives and negatives in groups of ascending score, float64 [2, groups]."""
    positive, negative = sums
    below = negative.cumsum(0) - negative / 2
    return _ratio(positive @ below, positive.sum() * negative.sum())


def _ratio(value: Tensor, by: Tensor) -> float:
    return float(value / by) if by else math.nan
