"""Adam and the optimizers with its two moments: AdamW, AMSGrad and LAMB."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.table.optimizers.optimizer import Optimizer, State, sum_of_squares
from megalith.table.schedules import LearningRate, as_float32

BIAS_CORRECTIONS = ("step", "row")


@dataclass(frozen=True)
class AdamSettings(Optimizer):
    """The settings that Adam, AdamW, AMSGrad and LAMB share, and their bias correction."""

    lr: LearningRate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    bias_correction: str = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("eps", "weight_decay")
        name = type(self).__name__
        if not isinstance(self.betas, list | tuple) or len(self.betas) != 2:
            raise InputError(f"{name}: betas must be two numbers, got {self.betas!r}")
        object.__setattr__(self, "betas", tuple(self.betas))
        self._check_below_one("betas")
        if not isinstance(self.bias_correction, str) or self.bias_correction not in BIAS_CORRECTIONS:
            raise InputError(f'{name}: bias_correction must be "step" or "row", got {self.bias_correction!r}')

    @property
    def counts_rows(self) -> bool:
        """Whether each row keeps its own update count."""
        return self.bias_correction == "row"

    def correction(self, step: int) -> float:
        # Sqrt(1 - beta2^t) / (1 - beta1^t), t = step + 1.
        if self.counts_rows:
            return 1.0
        beta1, beta2 = self.betas
        return math.sqrt(1 - beta2 ** (step + 1)) / (1 - beta1 ** (step + 1))

    @property
    def hyper(self) -> tuple[float, ...]:
        """beta1, beta2, 1 - beta1, 1 - beta2, eps, weight decay, options."""
        return (*self.betas, *self._complements, self.eps, self.weight_decay, float(self.counts_rows))

    def states(self, dim: int) -> tuple[State, ...]:
        # Both moments, and by row the update count.
        count = (State("count", 1),) if self.counts_rows else ()
        return (State("m", dim), State("v", dim), *count)

    @property
    def _complements(self) -> tuple[float, float]:
        # The row form uses betas in float32 throughout, so that its correction matches its averages.
        round_to = as_float32 if self.counts_rows else float
        beta1, beta2 = self.betas
        return 1.0 - round_to(beta1), 1.0 - round_to(beta2)

    def _average(self, grads: Tensor, state: Mapping[str, Tensor], step: int) -> Tensor:
        """Update both moments; return the bias correction, [] or [n, 1]."""
        new1, new2 = self._complements
        m, v = state["m"], state["v"]
        m.copy_(m + (grads - m) * new1)
        v.copy_(v + (grads * grads - v) * new2)
        if not self.counts_rows:
            return torch.tensor(self.correction(step), dtype=torch.float32, device="cpu")
        state["count"].add_(1.0)
        t = state["count"].double()
        beta1, beta2 = (as_float32(beta) for beta in self.betas)
        return ((1.0 - beta2**t).sqrt() / (1.0 - beta1**t)).float()


@dataclass(frozen=True)
class Adam(AdamSettings):
    """m += (g - m)(1 - beta1); v += (g^2 - v)(1 - beta2); w -= r * m / (sqrt(v) + eps).

    r = lr * sqrt(1 - beta2^t) / (1 - beta1^t), and g includes weight_decay * w. By default t is the global
    step + 1 and the results are those of torch.optim.SparseAdam. With bias_correction="row", t counts the
    updates of the row, as in Monolith: each row then keeps one more float, and rare ids take smaller first
    steps. eps is added to the uncorrected sqrt(v) in both.

    Args:
        lr: The learning rate.
        betas: beta1 and beta2, each in [0, 1).
        eps: Added to sqrt(v).
        weight_decay: Factor of the weight that is added to its gradient.
        bias_correction: "step" or "row".
        nesterov: Whether (1 - beta1) * g + beta1 * m replaces m in the step.
    """

    nesterov: bool = False
    name: ClassVar[str] = "adam"
    decoupled: ClassVar[bool] = False
    """Whether the weight decay shrinks the weight instead of adding to its gradient."""
    keeps_maximum: ClassVar[bool] = False
    """Whether the largest v of each weight replaces v in the step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_flag("nesterov")

    @property
    def hyper(self) -> tuple[float, ...]:
        *rest, options = super().hyper
        return (*rest, options + 2 * bool(self.nesterov) + 4 * self.decoupled)

    def states(self, dim: int) -> tuple[State, ...]:
        # Both moments, for AMSGrad the largest v, and by row the update count.
        m, v, *count = super().states(dim)
        return (m, v, State("v_max", dim), *count) if self.keeps_maximum else (m, v, *count)

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        if not self.decoupled:
            grads = grads + self.weight_decay * rows
        rate = lr * self._average(grads, state, step)
        m, v = state["m"], state["v"]
        if self.nesterov:
            m = self._complements[0] * grads + self.betas[0] * m
        if self.keeps_maximum:
            v = state["v_max"].copy_(torch.maximum(state["v_max"], v))
        keep = 1.0 - lr * self.weight_decay if self.decoupled else 1.0
        rows.copy_(keep * rows - rate * m / (v.sqrt() + self.eps))


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay: w is multiplied by 1 - lr * weight_decay before the step.

    As torch.optim.AdamW, except that eps is added to the uncorrected sqrt(v) as in `Adam`, and that only the
    rows of an update decay.

    Args:
        lr: The learning rate.
        betas: beta1 and beta2, each in [0, 1).
        eps: Added to sqrt(v).
        weight_decay: lr * weight_decay is the part of the weight that a step removes.
        bias_correction: "step" or "row", see `Adam`.
        nesterov: As for `Adam`.
    """

    weight_decay: float = 1e-2
    name: ClassVar[str] = "adamw"
    decoupled: ClassVar[bool] = True


@dataclass(frozen=True)
class AMSGrad(Adam):
    """Adam whose divisor is sqrt of the largest v so far, so that the step of a weight never grows again.

    As torch.optim.Adam(amsgrad=True), except that eps is added to the uncorrected root as in `Adam`.

    Args:
        lr: The learning rate.
        betas: beta1 and beta2, each in [0, 1).
        eps: Added to the root.
        weight_decay: Factor of the weight that is added to its gradient.
        bias_correction: "step" or "row", see `Adam`.
        nesterov: As for `Adam`.
    """

    name: ClassVar[str] = "amsgrad"
    keeps_maximum: ClassVar[bool] = True


@dataclass(frozen=True)
class LAMB(AdamSettings):
    """d = c * m / (sqrt(v) + eps) + weight_decay * w; w -= lr * |w| / |d| * d, with Adam's m and v.

    c is Adam's bias correction. The trust ratio |w| / |d| is computed per row and segment, as in FBGEMM; it
    is 1 where either length is 0.

    Args:
        lr: The learning rate.
        betas: beta1 and beta2, each in [0, 1).
        eps: Added to sqrt(v).
        weight_decay: Factor of the weight in d.
        bias_correction: "step" or "row", see `Adam`.
    """

    name: ClassVar[str] = "lamb"

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        correction = self._average(grads, state, step)
        direction = correction * state["m"] / (state["v"].sqrt() + self.eps) + self.weight_decay * rows
        length, along = (sum_of_squares(x).sqrt()[:, None] for x in (rows, direction))
        trust = torch.where((length > 0) & (along > 0), length / along, 1.0)
        rows.copy_(rows - lr * trust * direction)
