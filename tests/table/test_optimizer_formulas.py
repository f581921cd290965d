"""Every optimizer by its formula, one weight at a time in Python's floats."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from megalith.table.optimizers import OPTIMIZERS as REGISTERED
from tests.table.support import OPTIMIZERS, assert_close, train_rows, training_example

Formula = Callable[[list[float], list[list[float]]], list[float]]


def sgd(w: list[float], grads: list[list[float]], lr: float = 0.5) -> list[float]:
    for g in grads:
        w = [x - lr * d for x, d in zip(w, g, strict=True)]
    return w


def momentum(
    w: list[float],
    grads: list[list[float]],
    lr: float = 0.1,
    m: float = 0.9,
    decay: float = 0.01,
    nesterov: bool = False,
) -> list[float]:
    v = [0.0] * len(w)
    for g in grads:
        for i, d in enumerate(g):
            before, v[i] = v[i], m * v[i] - lr * (d + decay * w[i])
            w[i] += (1 + m) * v[i] - m * before if nesterov else v[i]
    return w


def nesterov(w: list[float], grads: list[list[float]]) -> list[float]:
    return momentum(w, grads, decay=0.0, nesterov=True)


def adagrad(w: list[float], grads: list[list[float]]) -> list[float]:
    n = [0.1] * len(w)
    for g in grads:
        for i, d in enumerate(g):
            d += 0.01 * w[i]
            n[i] += d * d
            w[i] -= 0.1 * d / (math.sqrt(n[i]) + 1e-10)
    return w


def rowwise_adagrad(w: list[float], grads: list[list[float]]) -> list[float]:
    n = 0.1
    for g in grads:
        decayed = [d + 0.01 * x for x, d in zip(w, g, strict=True)]
        n += sum(d * d for d in decayed) / len(w)
        w = [x - 0.1 * d / (math.sqrt(n) + 1e-8) for x, d in zip(w, decayed, strict=True)]
    return w


def adam(
    w: list[float],
    grads: list[list[float]],
    betas: tuple[float, float] = (0.9, 0.999),
    decay: float = 0.01,
    nesterov: bool = False,
    decoupled: float = 0.0,
    maximum: bool = False,
) -> list[float]:
    m, v, top = [0.0] * len(w), [0.0] * len(w), [0.0] * len(w)
    beta1, beta2 = betas
    for t, g in enumerate(grads, 1):
        rate = 0.1 * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        for i, d in enumerate(g):
            d += decay * w[i]
            w[i] *= 1 - 0.1 * decoupled
            m[i] += (d - m[i]) * (1 - beta1)
            v[i] += (d * d - v[i]) * (1 - beta2)
            top[i] = max(top[i], v[i]) if maximum else v[i]
            along = (1 - beta1) * d + beta1 * m[i] if nesterov else m[i]
            w[i] -= rate * along / (math.sqrt(top[i]) + 1e-8)
    return w


def lamb(w: list[float], grads: list[list[float]], decay: float = 0.01) -> list[float]:
    m, v = [0.0] * len(w), [0.0] * len(w)
    for t, g in enumerate(grads, 1):
        correction = math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        m = [0.9 * a + 0.1 * d for a, d in zip(m, g, strict=True)]
        v = [0.999 * a + 0.001 * d * d for a, d in zip(v, g, strict=True)]
        along = [correction * a / (math.sqrt(b) + 1e-8) + decay * x for a, b, x in zip(m, v, w, strict=True)]
        trust = math.hypot(*w) / math.hypot(*along)
        w = [x - 0.1 * trust * d for x, d in zip(w, along, strict=True)]
    return w


def lion(w: list[float], grads: list[list[float]]) -> list[float]:
    m = [0.0] * len(w)
    for g in grads:
        for i, d in enumerate(g):
            w[i] -= 0.1 * (math.copysign(1.0, 0.9 * m[i] + 0.1 * d) + 0.01 * w[i])
            m[i] = 0.99 * m[i] + 0.01 * d
    return w


def adadelta(w: list[float], grads: list[list[float]]) -> list[float]:
    a, u = [0.0] * len(w), [0.0] * len(w)
    for g in grads:
        for i, d in enumerate(g):
            d += 0.01 * w[i]
            a[i] = 0.9 * a[i] + 0.1 * d * d
            delta = math.sqrt(u[i] + 1e-3) / math.sqrt(a[i] + 1e-3) * d
            u[i] = 0.9 * u[i] + 0.1 * delta * delta
            w[i] -= delta
    return w


def rmsprop(w: list[float], grads: list[list[float]], new: float = 0.01) -> list[float]:
    n = [0.0] * len(w)
    for g in grads:
        for i, d in enumerate(g):
            d += 0.01 * w[i]
            n[i] = 0.99 * n[i] + new * d * d
            w[i] -= 0.1 * d / (math.sqrt(n[i]) + 1e-3)
    return w


def group_ftrl(w: list[float], grads: list[list[float]]) -> list[float]:
    lr, l1, l2 = 0.5, 1.0, 0.125
    n, z = [0.0] * len(w), [0.0] * len(w)
    for g in grads:
        for i, d in enumerate(g):
            sigma = (math.sqrt(n[i] + d * d) - math.sqrt(n[i])) / lr
            n[i] += d * d
            z[i] += d - sigma * w[i]
        norm = math.hypot(*z)
        for i in range(len(w)):
            value = lr * z[i] * (l1 - norm) / norm / (1.0 + math.sqrt(n[i]) + l2 * lr)
            w[i] = value if norm > l1 else 0.0
    return w


def group_adagrad(w: list[float], grads: list[list[float]]) -> list[float]:
    s, l2 = 0.1, 0.5
    for g in grads:
        decayed = [d + 0.01 * x for x, d in zip(w, g, strict=True)]
        s += max(d * d for d in decayed)
        rate = 0.1 / math.sqrt(s)
        z = [d - x / rate for x, d in zip(w, decayed, strict=True)]
        norm = math.hypot(*z)
        w = [-rate * (norm - l2) / norm * x if norm > l2 else 0.0 for x in z]
    return w


def dynamic_wd_adagrad(w: list[float], grads: list[list[float]]) -> list[float]:
    n = [0.1] * len(w)
    for g in grads:
        for i, d in enumerate(g):
            n[i] += d * d
            w[i] -= 0.1 / (math.sqrt(n[i]) + 1e-10) * d + 0.1 * 0.1 * w[i]
    return w


def moving_average(w: list[float], grads: list[list[float]]) -> list[float]:
    for g in grads:
        w = [0.8 * x + 0.2 * d for x, d in zip(w, g, strict=True)]
    return w


def delay_compensated(w: list[float], grads: list[list[float]]) -> list[float]:
    n, change = [0.1] * len(w), [0.0] * len(w)
    for g in grads:
        for i, d in enumerate(g):
            d += 0.5 * d * d * change[i]
            d += 0.01 * w[i]
            n[i] += d * d
            change[i] = -0.1 * d / (math.sqrt(n[i]) + 1e-10)
            w[i] += change[i]
    return w


def delay_compensated_adam(w: list[float], grads: list[list[float]]) -> list[float]:
    change = [0.0] * len(w)
    late: list[list[float]] = []
    start = list(w)
    for g in grads:
        late.append([d + 0.1 * d * d * c for d, c in zip(g, change, strict=True)])
        after = adam(list(start), late, decay=0.0, nesterov=True)
        change = [b - a for a, b in zip(w, after, strict=True)]
        w = after
    return w


def ftrl(w: list[float], grads: list[list[float]]) -> list[float]:
    lr, beta, l1, l2 = 0.5, 1.0, 0.25, 0.125
    n, z = [0.1] * len(w), [0.0] * len(w)
    for g in grads:
        for i, d in enumerate(g):
            sigma = (math.sqrt(n[i] + d * d) - math.sqrt(n[i])) / lr
            n[i] += d * d
            z[i] += d - sigma * w[i]
            shrunk = z[i] - math.copysign(l1, z[i])
            w[i] = -lr * shrunk / (math.sqrt(n[i]) + beta + l2 * lr) if abs(z[i]) > l1 else 0.0
    return w


FORMULAS: dict[str, Formula] = {
    "sgd": sgd,
    "momentum": momentum,
    "nesterov": nesterov,
    "adagrad": adagrad,
    "rowwise_adagrad": rowwise_adagrad,
    "adam": adam,
    "adam-row": adam,  # every row is updated in every step
    "adam-nesterov": lambda w, grads: adam(w, grads, decay=0.0, nesterov=True),
    "adamw": lambda w, grads: adam(w, grads, decay=0.0, decoupled=0.1),
    "amsgrad": lambda w, grads: adam(w, grads, (0.9, 0.5), decay=0.0, maximum=True),
    "amsgrad-row": lambda w, grads: adam(w, grads, (0.9, 0.5), maximum=True),
    "lamb": lamb,
    "lamb-row": lambda w, grads: lamb(w, grads, decay=0.0),
    "lion": lion,
    "adadelta": adadelta,
    "rmsprop": rmsprop,
    "rmsprop_v2": lambda w, grads: rmsprop(w, grads, new=1.0),
    "ftrl": ftrl,
    "group_ftrl": group_ftrl,
    "group_adagrad": group_adagrad,
    "dynamic_wd_adagrad": dynamic_wd_adagrad,
    "moving_average": moving_average,
    "delay_compensated": delay_compensated,
    "delay_compensated-adam": delay_compensated_adam,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_follows_its_formula(engine: str, name: str) -> None:
    for dim in (1, 8, 13):
        weights, grads = training_example(rows=3, dim=dim)
        expected = [
            FORMULAS[name](weights[row].tolist(), [g[row].tolist() for g in grads]) for row in range(3)
        ]

        table = train_rows(engine, OPTIMIZERS[name], weights, grads)

        assert_close(table.lookup(torch.arange(3)), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_every_registered_optimizer_has_a_formula_here() -> None:
    assert {o.name for o in OPTIMIZERS.values()} == set(REGISTERED) - {"batch_softmax"}
    assert FORMULAS.keys() == OPTIMIZERS.keys()
