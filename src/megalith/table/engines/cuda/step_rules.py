"""The optimizers that have a kernel: the number, settings and step of each rule.

A step reads the weights and states of one row (or segment of a row), and writes them back. Its formula is
that of `Optimizer.update`, operation by operation; only sums over the columns of a row may add in another
order. An optimizer without a rule here, such as a user's, runs through `Optimizer.update` in torch on the
device (updates.py).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

from megalith.table import optimizers
from megalith.table.engines.cuda.triton_runtime import tl, triton
from megalith.table.optimizers import Optimizer
from megalith.table.optimizers.adam import AdamSettings
from megalith.table.schedules import as_float32

SGD = tl.constexpr(1)
MOMENTUM = tl.constexpr(2)
ADAGRAD = tl.constexpr(3)
ROWWISE_ADAGRAD = tl.constexpr(4)
ADAM = tl.constexpr(5)
FTRL = tl.constexpr(6)
LION = tl.constexpr(7)
RMSPROP = tl.constexpr(8)
ADADELTA = tl.constexpr(9)
DYNAMIC_WD = tl.constexpr(10)
MOVING_AVERAGE = tl.constexpr(11)
LAMB = tl.constexpr(12)
GROUP_ADAGRAD = tl.constexpr(13)
GROUP_FTRL = tl.constexpr(14)
BATCH_SOFTMAX = tl.constexpr(15)

# Options of ADAM and LAMB, as bits: 1 Nesterov, 2 decoupled weight decay, 4 the largest v, 8 counts rows.


@triton.jit
def optimizer_step(
    weight, grad, state, column, wide, lr, factor, extra, h0, h1, h2, h3, h4, h5,
    width, RULE: tl.constexpr, OPTIONS: tl.constexpr, DELAY: tl.constexpr,
):  # fmt: skip
    """Return the weights after a step; changes the states at `state`.

    `h0` to `h5` are the settings, `lr` and `factor` the rate and the bias correction, and `extra` a number
    that depends on the rate; `step_numbers` computes them. DELAY is the strength of `DelayCompensated`,
    whose state precedes that of the rule; -1 without it. `width` is the number of weights, a tensor.
    """
    if DELAY >= 0:
        change = tl.load(state + column, mask=wide, other=0.0)
        grad = grad + DELAY * (grad * grad) * change
        result = rule_step(
            weight, grad, state + width, column, wide, lr, factor, extra, h0, h1, h2, h3, h4, h5, width,
            RULE, OPTIONS,
        )  # fmt: skip
        tl.store(state + column, result - weight, mask=wide)
        return result
    else:
        return rule_step(
            weight, grad, state, column, wide, lr, factor, extra, h0, h1, h2, h3, h4, h5, width, RULE, OPTIONS
        )


@triton.jit
def power(base, exponent):
    """base ** exponent in float64, for an integer exponent up to 2^24: the largest update count of a row."""
    result = tl.full((), 1.0, tl.float64)
    for _ in tl.static_range(25):
        result = tl.where((exponent & 1) == 1, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


@triton.jit
def row_correction(count, beta1, beta2):
    """Advance the update count of a row; return its bias correction."""
    updates = tl.load(count) + 1.0
    tl.store(count, updates)
    t = updates.to(tl.int32)
    root = tl.sqrt(1.0 - power(tl.full((), beta2, tl.float64), t))
    return (root / (1.0 - power(tl.full((), beta1, tl.float64), t))).to(tl.float32)


@triton.jit
def norm(values, wide):
    return tl.sqrt_rn(tl.sum(tl.where(wide, values * values, 0.0), 0))


@triton.jit
def rule_step(
    weight, grad, state, column, wide, lr, factor, extra, h0, h1, h2, h3, h4, h5, width,
    RULE: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    first = state + column
    second = first + width
    result = weight
    if RULE == SGD:
        result = weight - lr * grad
    elif RULE == MOMENTUM:  # momentum, weight decay, 1 + momentum
        before = tl.load(first, mask=wide, other=0.0)
        velocity = h0 * before - lr * (grad + h1 * weight)
        tl.store(first, velocity, mask=wide)
        if OPTIONS == 1:
            velocity = h2 * velocity - h0 * before
        result = weight + velocity
    elif RULE == ADAGRAD:  # eps, weight decay
        grad = grad + h1 * weight
        total = tl.load(first, mask=wide, other=0.0) + grad * grad
        tl.store(first, total, mask=wide)
        result = weight - tl.div_rn(lr * grad, tl.sqrt_rn(total) + h0)
    elif RULE == ROWWISE_ADAGRAD:  # eps, weight decay
        grad = tl.where(wide, grad + h1 * weight, 0.0)
        total = tl.load(state) + tl.div_rn(tl.sum(grad * grad, 0), width.to(tl.float32))
        tl.store(state, total)
        result = weight - tl.div_rn(lr * grad, tl.sqrt_rn(total) + h0)
    elif RULE == ADAM:  # 1 - beta1, 1 - beta2, eps, weight decay, beta1, beta2
        if OPTIONS & 2 == 0:
            grad = grad + h3 * weight
        m = tl.load(first, mask=wide, other=0.0)
        v = tl.load(second, mask=wide, other=0.0)
        m = m + (grad - m) * h0
        v = v + (grad * grad - v) * h1
        tl.store(first, m, mask=wide)
        tl.store(second, v, mask=wide)
        if OPTIONS & 1 != 0:
            m = h0 * grad + h4 * m
        if OPTIONS & 4 != 0:
            third = second + width
            v = tl.maximum(tl.load(third, mask=wide, other=0.0), v)
            tl.store(third, v, mask=wide)
        if OPTIONS & 8 != 0:
            factor = row_correction(state + (2 + OPTIONS // 4 % 2) * width, h4, h5)
        rate = lr * factor
        if OPTIONS & 2 != 0:
            weight = extra * weight
        result = weight - tl.div_rn(rate * m, tl.sqrt_rn(v) + h2)
    elif RULE == FTRL:  # beta, l1
        before = tl.load(first, mask=wide, other=0.0)
        total = before + grad * grad
        sigma = tl.div_rn(tl.sqrt_rn(total) - tl.sqrt_rn(before), lr)
        z = tl.load(second, mask=wide, other=0.0) + (grad - sigma * weight)
        tl.store(first, total, mask=wide)
        tl.store(second, z, mask=wide)
        shrunk = tl.where(z < 0, z + h1, z - h1)
        value = tl.div_rn(-lr * shrunk, tl.sqrt_rn(total) + h0 + extra)
        result = tl.where(tl.abs(z) > h1, value, 0.0)
    elif RULE == LION:  # beta1, 1 - beta1, beta2, 1 - beta2, weight decay
        m = tl.load(first, mask=wide, other=0.0)
        mixed = h0 * m + h1 * grad
        sign = (mixed > 0).to(tl.float32) - (mixed < 0).to(tl.float32)
        tl.store(first, h2 * m + h3 * grad, mask=wide)
        result = weight - lr * (sign + h4 * weight)
    elif RULE == RMSPROP:  # alpha, factor of the new square, eps, weight decay
        grad = grad + h3 * weight
        total = h0 * tl.load(first, mask=wide, other=0.0) + h1 * (grad * grad)
        tl.store(first, total, mask=wide)
        result = weight - tl.div_rn(lr * grad, tl.sqrt_rn(total) + h2)
    elif RULE == ADADELTA:  # rho, 1 - rho, eps, weight decay
        grad = grad + h3 * weight
        a = h0 * tl.load(first, mask=wide, other=0.0) + h1 * (grad * grad)
        u = tl.load(second, mask=wide, other=0.0)
        delta = tl.div_rn(tl.sqrt_rn(u + h2), tl.sqrt_rn(a + h2)) * grad
        tl.store(first, a, mask=wide)
        tl.store(second, h0 * u + h1 * (delta * delta), mask=wide)
        result = weight - lr * delta
    elif RULE == DYNAMIC_WD:  # eps, coupled decay
        grad = grad + h1 * weight
        total = tl.load(first, mask=wide, other=0.0) + grad * grad
        tl.store(first, total, mask=wide)
        result = weight - (tl.div_rn(lr * grad, tl.sqrt_rn(total) + h0) + extra * weight)
    elif RULE == MOVING_AVERAGE:  # momentum, 1 - momentum
        result = h0 * weight + h1 * grad
    elif RULE == LAMB:  # 1 - beta1, 1 - beta2, eps, weight decay, beta1, beta2
        m = tl.load(first, mask=wide, other=0.0)
        v = tl.load(second, mask=wide, other=0.0)
        m = m + (grad - m) * h0
        v = v + (grad * grad - v) * h1
        tl.store(first, m, mask=wide)
        tl.store(second, v, mask=wide)
        if OPTIONS & 8 != 0:
            factor = row_correction(state + 2 * width, h4, h5)
        direction = tl.div_rn(factor * m, tl.sqrt_rn(v) + h2) + h3 * weight
        length = norm(weight, wide)
        along = norm(direction, wide)
        trust = tl.where((length > 0) & (along > 0), tl.div_rn(length, along), 1.0)
        result = weight - lr * trust * direction
    elif RULE == GROUP_ADAGRAD:  # beta, l2, weight decay
        grad = grad + h2 * weight
        total = tl.load(state) + tl.max(tl.where(wide, grad * grad, 0.0), 0)
        tl.store(state, total)
        rate = tl.div_rn(lr, h0 + tl.sqrt_rn(total))
        z = grad - tl.div_rn(weight, rate)
        length = norm(z, wide)
        value = -rate * tl.div_rn(length - h1, length) * z
        result = tl.where(length <= h1, 0.0, value)
    elif RULE == GROUP_FTRL:  # beta, l1
        before = tl.load(first, mask=wide, other=0.0)
        total = before + grad * grad
        sigma = tl.div_rn(tl.sqrt_rn(total) - tl.sqrt_rn(before), lr)
        z = tl.load(second, mask=wide, other=0.0) + (grad - sigma * weight)
        tl.store(first, total, mask=wide)
        tl.store(second, z, mask=wide)
        length = norm(z, wide)
        value = -lr * tl.div_rn(length - h1, length) * z
        value = tl.div_rn(value, tl.sqrt_rn(total) + h0 + extra)
        result = tl.where(length <= h1, 0.0, tl.where(z == 0, 0.0, value))
    elif RULE == BATCH_SOFTMAX:  # factor and extra are the two parts of the step
        high = tl.load(state).to(tl.int64)
        before = high * 16777216 + tl.load(state + 1).to(tl.int64)
        interval = (factor.to(tl.int64) * 16777216 + extra.to(tl.int64) - before).to(tl.float32)
        tl.store(state, factor)
        tl.store(state + 1, extra)
        result = (1.0 - lr) * weight + lr * interval
    return result


NUM_SETTINGS = 6


class StepRule(NamedTuple):
    rule: int  # Number of the rule
    options: int  # Variants of the rule, as bits
    settings: tuple[float, ...]  # `NUM_SETTINGS` numbers
    delay: float = -1.0  # Strength of a `DelayCompensated` around the optimizer; -1 without one


def find_rule(optimizer: Optimizer) -> StepRule | None:
    if type(optimizer) is optimizers.DelayCompensated:
        base = find_rule(optimizer.base)
        return None if base is None else base._replace(delay=optimizer.strength)
    rule, options, settings = _rule(optimizer)
    if not rule:
        return None
    return StepRule(rule, options, (*settings, *[0.0] * (NUM_SETTINGS - len(settings))))


def _rule(o: Optimizer) -> tuple[int, int, tuple[float, ...]]:
    if type(o) is optimizers.SGD:
        return SGD.value, 0, ()
    if type(o) is optimizers.Momentum:
        settings = (o.momentum, o.weight_decay, 1.0 + o.momentum)
        return MOMENTUM.value, int(o.nesterov), settings
    if type(o) is optimizers.Adagrad:
        return ADAGRAD.value, 0, o.hyper
    if type(o) is optimizers.RowWiseAdagrad:
        return ROWWISE_ADAGRAD.value, 0, o.hyper
    if type(o) in (optimizers.Adam, optimizers.AdamW, optimizers.AMSGrad, optimizers.LAMB):
        assert isinstance(o, AdamSettings)
        beta1, beta2, new1, new2, eps, decay, _ = o.hyper
        numbers = (new1, new2, eps, decay, as_float32(beta1), as_float32(beta2))
        if not isinstance(o, optimizers.Adam):
            return LAMB.value, 8 * o.counts_rows, numbers
        options = o.nesterov + 2 * o.decoupled + 4 * o.keeps_maximum + 8 * o.counts_rows
        return ADAM.value, options, numbers
    if type(o) in (optimizers.FTRL, optimizers.GroupFTRL):
        assert isinstance(o, optimizers.FTRL)
        rule = FTRL if type(o) is optimizers.FTRL else GROUP_FTRL
        return rule.value, 0, (o.beta, o.l1)
    if type(o) is optimizers.GroupAdagrad:
        return GROUP_ADAGRAD.value, 0, o.hyper
    if type(o) is optimizers.BatchSoftmax:
        return BATCH_SOFTMAX.value, 0, ()
    if type(o) is optimizers.Lion:
        beta1, beta2 = o.betas
        return LION.value, 0, (beta1, 1 - beta1, beta2, 1 - beta2, o.weight_decay)
    if type(o) in (optimizers.RMSProp, optimizers.RMSPropV2):
        assert isinstance(o, optimizers.RMSProp)
        return RMSPROP.value, 0, (o.alpha, o.new_square, o.eps, o.weight_decay)
    if type(o) is optimizers.Adadelta:
        return ADADELTA.value, 0, (o.rho, 1 - o.rho, o.eps, o.weight_decay)
    if type(o) is optimizers.DynamicWdAdagrad:
        return DYNAMIC_WD.value, 0, o.hyper[:2]
    if type(o) is optimizers.MovingAverage:
        return MOVING_AVERAGE.value, 0, (o.momentum, 1 - o.momentum)
    return 0, 0, ()


def step_numbers(optimizer: Optimizer, lr: float, step: int) -> tuple[float, float, float]:
    """Return the numbers of a rule that depend on the step: rate, bias correction, and `extra`."""
    if isinstance(optimizer, optimizers.DelayCompensated):
        return step_numbers(optimizer.base, lr, step)
    if isinstance(optimizer, optimizers.BatchSoftmax):
        return lr, float((step + 1) >> 24), float((step + 1) & (2**24 - 1))
    extra = 0.0
    if isinstance(optimizer, optimizers.Adam) and optimizer.decoupled:
        extra = 1.0 - lr * optimizer.weight_decay
    elif isinstance(optimizer, optimizers.FTRL):
        extra = optimizer.l2 * lr
    elif isinstance(optimizer, optimizers.DynamicWdAdagrad):
        extra = lr * optimizer.hyper[2]
    return lr, optimizer.correction(step), extra
