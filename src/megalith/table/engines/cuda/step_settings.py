"""Which rule of step_rules.py an optimizer has, and the numbers that the rule takes."""

from __future__ import annotations

from typing import NamedTuple

from megalith.table.engines.cuda import step_rules
from megalith.table.optimizers import (
    FTRL,
    LAMB,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    AMSGrad,
    BatchSoftmax,
    DelayCompensated,
    DynamicWdAdagrad,
    GroupAdagrad,
    GroupFTRL,
    Lion,
    Momentum,
    MovingAverage,
    Optimizer,
    RMSProp,
    RMSPropV2,
    RowWiseAdagrad,
)
from megalith.table.optimizers.adam import AdamSettings
from megalith.table.schedules import as_float32

NUM_SETTINGS = 6


class StepRule(NamedTuple):
    """The rule of one segment."""

    rule: int  # Number of the rule
    options: int  # Variants of the rule, as bits
    settings: tuple[float, ...]  # `NUM_SETTINGS` numbers
    delay: float = -1.0  # Strength of a `DelayCompensated` around the optimizer; -1 without one


def find_rule(optimizer: Optimizer) -> StepRule | None:
    if type(optimizer) is DelayCompensated:
        base = find_rule(optimizer.base)
        return None if base is None else base._replace(delay=optimizer.strength)
    rule, options, settings = _rule(optimizer)
    if not rule:
        return None
    return StepRule(rule, options, (*settings, *[0.0] * (NUM_SETTINGS - len(settings))))


def _rule(optimizer: Optimizer) -> tuple[int, int, tuple[float, ...]]:
    kind, o = type(optimizer), optimizer
    if kind is SGD:
        return step_rules.SGD.value, 0, ()
    if kind is Momentum:
        assert isinstance(o, Momentum)
        settings = (o.momentum, o.weight_decay, 1.0 + o.momentum)
        return step_rules.MOMENTUM.value, int(o.nesterov), settings
    if kind is Adagrad:
        return step_rules.ADAGRAD.value, 0, o.hyper
    if kind is RowWiseAdagrad:
        return step_rules.ROWWISE_ADAGRAD.value, 0, o.hyper
    if kind in (Adam, AdamW, AMSGrad, LAMB):
        assert isinstance(o, AdamSettings)
        beta1, beta2, new1, new2, eps, decay, _ = o.hyper
        numbers = (new1, new2, eps, decay, as_float32(beta1), as_float32(beta2))
        if not isinstance(o, Adam):
            return step_rules.LAMB.value, 8 * o.counts_rows, numbers
        options = o.nesterov + 2 * o.decoupled + 4 * o.keeps_maximum + 8 * o.counts_rows
        return step_rules.ADAM.value, options, numbers
    if kind in (FTRL, GroupFTRL):
        assert isinstance(o, FTRL)
        rule = step_rules.FTRL if kind is FTRL else step_rules.GROUP_FTRL
        return rule.value, 0, (o.beta, o.l1)
    if kind is GroupAdagrad:
        return step_rules.GROUP_ADAGRAD.value, 0, o.hyper
    if kind is BatchSoftmax:
        return step_rules.BATCH_SOFTMAX.value, 0, ()
    if kind is Lion:
        assert isinstance(o, Lion)
        beta1, beta2 = o.betas
        return step_rules.LION.value, 0, (beta1, 1 - beta1, beta2, 1 - beta2, o.weight_decay)
    if kind in (RMSProp, RMSPropV2):
        assert isinstance(o, RMSProp)
        return step_rules.RMSPROP.value, 0, (o.alpha, o.new_square, o.eps, o.weight_decay)
    if kind is Adadelta:
        assert isinstance(o, Adadelta)
        return step_rules.ADADELTA.value, 0, (o.rho, 1 - o.rho, o.eps, o.weight_decay)
    if kind is DynamicWdAdagrad:
        return step_rules.DYNAMIC_WD.value, 0, o.hyper[:2]
    if kind is MovingAverage:
        assert isinstance(o, MovingAverage)
        return step_rules.MOVING_AVERAGE.value, 0, (o.momentum, 1 - o.momentum)
    return 0, 0, ()


def step_numbers(optimizer: Optimizer, lr: float, step: int) -> tuple[float, float, float]:
    """Return the numbers of a rule that depend on the step."""
    if isinstance(optimizer, DelayCompensated):
        return step_numbers(optimizer.base, lr, step)
    if isinstance(optimizer, BatchSoftmax):
        return lr, float((step + 1) >> 24), float((step + 1) & (2**24 - 1))
    extra = 0.0
    if isinstance(optimizer, Adam) and optimizer.decoupled:
        extra = 1.0 - lr * optimizer.weight_decay
    elif isinstance(optimizer, FTRL):
        extra = optimizer.l2 * lr
    elif isinstance(optimizer, DynamicWdAdagrad):
        extra = lr * optimizer.hyper[2]
    return lr, optimizer.correction(step), extra
