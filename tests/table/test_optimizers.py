"""Optimizers: each by its formula, and against torch.optim where torch has it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    Momentum,
    Piecewise,
    PolynomialDecay,
    RowWiseAdagrad,
    Segment,
    Table,
    TableConfig,
    Uniform,
)
from megalith.errors import InputError
from megalith.table import Optimizer
from megalith.table.optimizers import OPTIMIZERS as REGISTERED
from tests.table.support import (
    OPTIMIZERS,
    assert_close,
    assert_same_bits,
    ints,
    sgd_table,
    state_of,
    unchanged,
    whole,
)

DIM = 5
STEPS = 6


def train(
    engine: str, optimizer: Optimizer, weights: Tensor, grads: list[Tensor], *, first_step: int = 0
) -> Table:
    """Rows 0..n-1 start at `weights` and take one step per gradient."""
    table = sgd_table(engine, weights.shape[1], optimizer=optimizer)
    ids = torch.arange(weights.shape[0])
    table.assign(ids, weights)
    for number, grad in enumerate(grads):
        table.apply_gradients(ids, grad, step=first_step + number)
    return table


def example(rows: int = 3, dim: int = DIM, steps: int = STEPS) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(rows * 1000 + dim)
    weights = torch.randn(rows, dim, generator=generator)
    return weights, [torch.randn(rows, dim, generator=generator) for _ in range(steps)]


# ---- the formulas, one weight at a time in Python's floats

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


def adam(w: list[float], grads: list[list[float]]) -> list[float]:
    m, v = [0.0] * len(w), [0.0] * len(w)
    for t, g in enumerate(grads, 1):
        rate = 0.1 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        for i, d in enumerate(g):
            d += 0.01 * w[i]
            m[i] += (d - m[i]) * (1 - 0.9)
            v[i] += (d * d - v[i]) * (1 - 0.999)
            w[i] -= rate * m[i] / (math.sqrt(v[i]) + 1e-8)
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
    "ftrl": ftrl,
}


@pytest.mark.parametrize("dim", [1, 8, 13])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_follows_its_formula(engine: str, name: str, dim: int) -> None:
    weights, grads = example(rows=3, dim=dim)
    expected = [FORMULAS[name](weights[row].tolist(), [g[row].tolist() for g in grads]) for row in range(3)]

    table = train(engine, OPTIMIZERS[name], weights, grads)

    assert_close(table.lookup(torch.arange(3)), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_every_registered_optimizer_has_a_formula_here() -> None:
    assert {o.name for o in OPTIMIZERS.values()} == set(REGISTERED)
    assert FORMULAS.keys() == OPTIMIZERS.keys()


# ---- torch.optim, 50 steps on the same dense rows


def trained_by_torch(
    make: Callable[[list[Tensor]], torch.optim.Optimizer], weights: Tensor, grads: list[Tensor]
) -> Tensor:
    parameter = torch.nn.Parameter(weights.clone())
    optimizer = make([parameter])
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize(
    ("optimizer", "make"),
    [
        (SGD(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (Adagrad(), torch.optim.Adagrad),
        (
            Adagrad(0.1, initial_accumulator_value=0.5, eps=1e-3, weight_decay=0.01),
            lambda p: torch.optim.Adagrad(
                p, lr=0.1, initial_accumulator_value=0.5, eps=1e-3, weight_decay=0.01
            ),
        ),
        (Momentum(0.01), lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)),
        (
            Momentum(0.01, momentum=0.8, weight_decay=0.1, nesterov=True),
            lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.8, weight_decay=0.1, nesterov=True),
        ),
        # eps is so small that it does not matter to which sqrt(v) it is added
        (Adam(0.01, eps=1e-30), lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-30)),
        (
            Adam(0.01, betas=(0.8, 0.99), eps=1e-30, weight_decay=0.1),
            lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99), eps=1e-30, weight_decay=0.1),
        ),
    ],
    ids=["sgd", "adagrad", "adagrad-all", "momentum", "nesterov", "adam", "adam-all"],
)
def test_dense_rows_train_as_in_torch(
    engine: str, optimizer: Optimizer, make: Callable[[list[Tensor]], torch.optim.Optimizer]
) -> None:
    weights, grads = example(rows=4, dim=20, steps=50)
    expected = trained_by_torch(make, weights, grads)

    table = train(engine, optimizer, weights, grads)

    assert_close(table.lookup(torch.arange(4)), expected, atol=1e-6)


def test_defaults_are_those_of_torch_where_torch_has_the_optimizer() -> None:
    parameter = [torch.nn.Parameter(torch.zeros(1))]
    for ours, theirs in (
        (SGD(), torch.optim.SGD(parameter)),
        (Adagrad(), torch.optim.Adagrad(parameter)),
        (Adam(), torch.optim.Adam(parameter)),
    ):
        for field, value in theirs.defaults.items():
            if hasattr(ours, field):
                assert getattr(ours, field) == value, (ours, field)


# ---- where rows live longer than a dense weight


def test_adam_counts_the_updates_of_each_row(engine: str) -> None:
    table = sgd_table(engine, 1, optimizer=Adam(0.1, eps=0.0))
    for step in range(5):
        table.apply_gradients(ints(1), torch.ones(1, 1), step=step)

    table.apply_gradients(ints(2), torch.ones(1, 1), step=5)

    # A first step has the size of the rate, however late it comes.
    assert table.lookup(ints(2)).item() == pytest.approx(-0.1, rel=1e-6)
    assert state_of(table, 1)["0/count"] == [5.0]
    assert state_of(table, 2)["0/count"] == [1.0]


def test_momentum_rests_while_a_row_is_not_trained(engine: str) -> None:
    table = sgd_table(engine, 1, optimizer=Momentum(1.0, momentum=0.5))
    table.apply_gradients(ints(1), torch.ones(1, 1), step=0)
    for step in range(1, 4):
        table.apply_gradients(ints(2), torch.ones(1, 1), step=step)
    assert table.lookup(ints(1)).item() == -1.0

    table.apply_gradients(ints(1), torch.ones(1, 1), step=4)

    assert table.lookup(ints(1)).item() == -2.5  # -1 - (1 + 0.5 * 1)


def test_momentum_keeps_the_rate_inside_the_velocity(engine: str) -> None:
    table = sgd_table(engine, 1, optimizer=Momentum(Piecewise((1,), (1.0, 0.0)), momentum=0.5))

    for step in range(3):
        table.apply_gradients(ints(1), torch.ones(1, 1), step=step)

    # The velocity of step 0 continues at half its size each step although the rate is 0.
    assert table.lookup(ints(1)).item() == -1.75


# ---- FTRL's l1


@pytest.mark.parametrize(
    ("gradient", "weight"),
    [
        (0.5, 0.0),
        (-0.5, 0.0),
        (1.0, 0.0),  # |z| = l1 is still zero
        (-1.0, 0.0),
        (3.0, -2 / 3),  # -lr * (z - l1) / sqrt(n), n = 9
        (-3.0, 2 / 3),
    ],
)
@pytest.mark.parametrize("dim", [1, 8, 11])
def test_ftrl_shrinks_towards_zero_by_l1_from_both_sides(
    engine: str, gradient: float, weight: float, dim: int
) -> None:
    table = sgd_table(engine, dim, optimizer=FTRL(1.0, initial_accumulator_value=0.0, l1=1.0))

    table.apply_gradients(ints(1), torch.full((1, dim), gradient), step=0)

    assert_close(table.lookup(ints(1)), torch.full((1, dim), weight))
    assert state_of(table, 1)["0/z"] == [gradient] * dim
    if weight == 0.0:
        assert_same_bits(table.lookup(ints(1)), torch.zeros(1, dim))


def test_ftrl_brings_a_trained_weight_back_to_exactly_zero(engine: str) -> None:
    table = sgd_table(engine, 1, optimizer=FTRL(1.0, initial_accumulator_value=0.0, l1=1.0))
    table.apply_gradients(ints(1), torch.tensor([[4.0]]), step=0)
    assert table.lookup(ints(1)).item() == -0.75

    # z = 4 + (-4.75) - (sqrt(38.5625) - 4) * -0.75 = 0.9074, below l1
    table.apply_gradients(ints(1), torch.tensor([[-4.75]]), step=1)

    assert table.lookup(ints(1)).item() == 0.0


def test_ftrl_starts_from_the_weights_it_finds(engine: str) -> None:
    table = sgd_table(engine, 1, optimizer=FTRL(1.0, initial_accumulator_value=0.0))
    table.assign(ints(1), torch.tensor([[3.0]]))

    table.apply_gradients(ints(1), torch.tensor([[2.0]]), step=0)

    # sigma = 2, z = 2 - 2 * 3 = -4, w = 4 / 2
    assert table.lookup(ints(1)).item() == 2.0


# ---- what every optimizer shares


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_duplicates_are_summed_before_one_step(engine: str, name: str) -> None:
    weights = torch.full((1, DIM), 0.5)
    apart = sgd_table(engine, DIM, optimizer=OPTIMIZERS[name])
    summed = sgd_table(engine, DIM, optimizer=OPTIMIZERS[name])
    for table in (apart, summed):
        table.assign(ints(7), weights, time=0)

    apart.apply_gradients(ints(7, 7, 7), torch.tensor([[1.0], [2.0], [-0.5]]).expand(3, DIM), step=0)
    summed.apply_gradients(ints(7), torch.full((1, DIM), 2.5), step=0)

    assert_same_bits(whole(apart).rows, whole(summed).rows)
    assert state_of(apart, 7) == state_of(summed, 7)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dim", [1, 8, 11])
def test_no_gradients_are_no_step(engine: str, name: str, dim: int) -> None:
    table = sgd_table(engine, dim, optimizer=OPTIMIZERS[name])
    table.assign(ints(1), torch.ones(1, dim))

    with unchanged(table):
        table.apply_gradients(ints(), torch.ones(0, dim), step=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scale_multiplies_the_summed_gradient(engine: str, name: str) -> None:
    scaled = sgd_table(engine, DIM, optimizer=OPTIMIZERS[name], initializer=Uniform())
    plain = sgd_table(engine, DIM, optimizer=OPTIMIZERS[name], initializer=Uniform())
    grads = torch.arange(2.0 * DIM).reshape(2, DIM)

    scaled.update(None, ints(1, 1), grads, step=0, scale=0.25)
    plain.update(None, ints(1), grads.sum(0, keepdim=True) * 0.25, step=0)

    assert_same_bits(scaled.lookup(ints(1)), plain.lookup(ints(1)))


@pytest.mark.parametrize("lr", [PolynomialDecay(1.0, 4, 0.0), lambda step: 1 - step / 4])
def test_the_rate_comes_from_the_step_of_each_call(engine: str, lr: Any) -> None:
    table = sgd_table(engine, 1, optimizer=SGD(lr))

    for step, weight in ((0, -1.0), (1, -1.75), (1, -2.5), (3, -2.75), (4, -2.75), (0, -3.75)):
        table.apply_gradients(ints(1), torch.ones(1, 1), step=step)
        assert table.lookup(ints(1)).item() == weight


def test_each_segment_has_its_own_optimizer_and_rate(engine: str) -> None:
    config = TableConfig(
        "t",
        segments=[
            Segment(1, optimizer=SGD(1.0), initializer=Uniform(0, 0)),
            Segment(2, optimizer=SGD(Piecewise((1,), (2.0, 4.0))), initializer=Uniform(0, 0)),
            Segment(1, optimizer=Adagrad(1.0, eps=0.0), initializer=Uniform(0, 0)),
        ],
    )
    table = Table(config, engine=engine)

    table.apply_gradients(ints(1), torch.tensor([[1.0, 2.0, 3.0, 4.0]]), step=0)
    assert table.lookup(ints(1)).tolist() == [[-1.0, -4.0, -6.0, -1.0]]
    table.apply_gradients(ints(1), torch.tensor([[1.0, 2.0, 3.0, 3.0]]), step=1)
    assert_close(table.lookup(ints(1)), torch.tensor([[-2.0, -12.0, -18.0, -1.6]]))


def test_a_rate_of_zero_leaves_weights_but_not_state(engine: str) -> None:
    table = sgd_table(engine, 1, optimizer=Adagrad(0.0))

    table.apply_gradients(ints(1), torch.full((1, 1), 3.0), step=0)

    assert table.lookup(ints(1)).item() == 0.0
    assert state_of(table, 1)["0/sum"] == [9.0]


# ---- what is refused


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "0.1", None])
@pytest.mark.parametrize(
    ("make", "field"),
    [
        *[(kind, "lr") for kind in (SGD, Momentum, Adagrad, RowWiseAdagrad, Adam, FTRL)],
        *[(Adagrad, f) for f in ("initial_accumulator_value", "eps", "weight_decay")],
        *[(RowWiseAdagrad, f) for f in ("initial_accumulator_value", "eps", "weight_decay")],
        *[(Adam, f) for f in ("eps", "weight_decay")],
        *[(FTRL, f) for f in ("initial_accumulator_value", "beta", "l1", "l2")],
        *[(Momentum, f) for f in ("momentum", "weight_decay")],
    ],
)
def test_settings_are_finite_and_not_negative(make: type[Optimizer], field: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{make.__name__}: {field}"):
        make(**{field: value})


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, math.nan), (0.9,), ()])
def test_adams_betas_are_two_numbers_below_one(betas: Any) -> None:
    with pytest.raises(InputError, match="Adam: betas"):
        Adam(betas=betas)


def test_momentum_is_below_one() -> None:
    with pytest.raises(InputError, match="Momentum: momentum"):
        Momentum(momentum=1.0)


def test_clip_norm_shortens_each_distinct_row_after_summing_and_scaling(engine: str) -> None:
    table = sgd_table(engine, 2)
    ids = torch.tensor([1, 2, 1])
    grads = torch.tensor([[3.0, 0.0], [0.3, 0.4], [0.0, 4.0]])

    table.update(None, ids, grads, step=0, scale=2.0, clip_norm=5.0)

    # Row 1: 2 * (3, 4) is 10 long and becomes (3, 4); row 2: 2 * (0.3, 0.4) is short enough.
    expected = torch.tensor([[-3.0, -4.0], [-0.6, -0.8]])
    torch.testing.assert_close(table.lookup(torch.tensor([1, 2])), expected)
    for wrong in (0.0, -1.0, float("nan"), float("inf"), "1"):
        with pytest.raises(InputError, match="clip_norm"):
            table.update(None, ids, grads, step=0, clip_norm=wrong)  # type: ignore[arg-type]
