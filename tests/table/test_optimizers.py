"""Optimizers against torch.optim, and what each adds: states, rates, refused settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import (
    FTRL,
    LAMB,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    AMSGrad,
    BatchSoftmax,
    Constant,
    DelayCompensated,
    DynamicWdAdagrad,
    GroupAdagrad,
    GroupFTRL,
    Lion,
    Momentum,
    MovingAverage,
    Piecewise,
    RMSProp,
    Segment,
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
    train_rows,
    training_example,
    unchanged,
    whole,
)

DIM = 5


# ---- torch.optim, 50 steps on the same dense rows


IN_TORCH: dict[str, tuple[Optimizer, Any, dict[str, Any]]] = {
    "sgd": (SGD(0.1), torch.optim.SGD, {"lr": 0.1}),
    "adagrad": (Adagrad(), torch.optim.Adagrad, {}),
    "adagrad-all": (
        Adagrad(0.1, initial_accumulator_value=0.5, eps=1e-3, weight_decay=0.01),
        torch.optim.Adagrad,
        {"lr": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-3, "weight_decay": 0.01},
    ),
    "momentum": (Momentum(0.01), torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "nesterov": (
        Momentum(0.01, momentum=0.8, weight_decay=0.1, nesterov=True),
        torch.optim.SGD,
        {"lr": 0.01, "momentum": 0.8, "weight_decay": 0.1, "nesterov": True},
    ),
    # torch's dense optimizers add eps to the corrected root: here it is too small to matter
    "adam": (Adam(0.01, eps=1e-30), torch.optim.Adam, {"lr": 0.01, "eps": 1e-30}),
    "adam-all": (
        Adam(0.01, betas=(0.8, 0.99), eps=1e-30, weight_decay=0.1),
        torch.optim.Adam,
        {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-30, "weight_decay": 0.1},
    ),
    "adamw": (
        AdamW(0.01, eps=1e-30, weight_decay=0.1),
        torch.optim.AdamW,
        {"lr": 0.01, "eps": 1e-30, "weight_decay": 0.1},
    ),
    "amsgrad": (
        AMSGrad(0.01, betas=(0.8, 0.5), eps=1e-30, weight_decay=0.1),
        torch.optim.Adam,
        {"lr": 0.01, "betas": (0.8, 0.5), "eps": 1e-30, "weight_decay": 0.1, "amsgrad": True},
    ),
    "adadelta": (Adadelta(), torch.optim.Adadelta, {}),
    "adadelta-all": (
        Adadelta(0.5, rho=0.8, eps=1e-3, weight_decay=0.1),
        torch.optim.Adadelta,
        {"lr": 0.5, "rho": 0.8, "eps": 1e-3, "weight_decay": 0.1},
    ),
    "rmsprop": (RMSProp(), torch.optim.RMSprop, {}),
    "rmsprop-all": (
        RMSProp(0.01, alpha=0.8, eps=1e-3, weight_decay=0.1),
        torch.optim.RMSprop,
        {"lr": 0.01, "alpha": 0.8, "eps": 1e-3, "weight_decay": 0.1},
    ),
    "dynamic_wd_adagrad": (
        DynamicWdAdagrad(0.1, weight_decay=0.01, decoupled=False),
        torch.optim.Adagrad,
        {"lr": 0.1, "weight_decay": 0.01},
    ),
}


@pytest.mark.parametrize("name", IN_TORCH)
def test_dense_rows_train_as_in_torch(engine: str, name: str) -> None:
    optimizer, kind, settings = IN_TORCH[name]
    weights, grads = training_example(rows=4, dim=20, steps=50)
    parameter = torch.nn.Parameter(weights.clone())
    oracle = kind([parameter], **settings)
    for grad in grads:
        parameter.grad = grad.clone()
        oracle.step()

    table = train_rows(engine, optimizer, weights, grads)

    assert_close(table.lookup(torch.arange(4)), parameter.detach(), atol=1e-6)


def test_defaults_are_those_of_torch_where_torch_has_the_optimizer() -> None:
    parameter = [torch.nn.Parameter(torch.zeros(1))]
    for ours, theirs in (
        (SGD(), torch.optim.SGD(parameter)),
        (Adagrad(), torch.optim.Adagrad(parameter)),
        (Adam(), torch.optim.Adam(parameter)),
        (Adam(), torch.optim.SparseAdam(parameter)),
        (AdamW(), torch.optim.AdamW(parameter)),
        (AMSGrad(), torch.optim.Adam(parameter)),
        (Adadelta(), torch.optim.Adadelta(parameter)),
        (RMSProp(), torch.optim.RMSprop(parameter)),
    ):
        for field, value in theirs.defaults.items():
            if hasattr(ours, field):
                assert getattr(ours, field) == value, (ours, field)


# ---- where rows live longer than a dense weight


def sparse_adam_program(ids: int, dim: int) -> list[tuple[Tensor, Tensor]]:
    """100 steps with duplicates; a third of the ids first appear after step 60."""
    generator = torch.Generator().manual_seed(5)
    steps = []
    for step in range(100):
        limit = ids if step > 60 else 2 * ids // 3
        chosen = torch.randint(0, limit, (6,), generator=generator)
        steps.append((chosen, torch.randn(6, dim, generator=generator)))
    return steps


def test_adam_trains_as_sparse_adam(engine: str) -> None:
    dim = 11  # a vector of eight and single weights
    weights = torch.randn(30, dim, generator=torch.Generator().manual_seed(1))
    embedding = torch.nn.Embedding(30, dim, sparse=True, _weight=weights.clone())
    oracle = torch.optim.SparseAdam(embedding.parameters(), lr=0.05)
    table = sgd_table(engine, dim, optimizer=Adam(0.05))
    table.assign(torch.arange(30), weights)

    for step, (ids, grads) in enumerate(sparse_adam_program(30, dim)):
        oracle.zero_grad()
        (embedding(ids) * grads).sum().backward()
        oracle.step()
        table.apply_gradients(ids, grads, step=step)

    assert_close(table.lookup(torch.arange(30)), embedding.weight.detach(), rtol=2e-6, atol=2e-6)
    assert "0/count" not in whole(table).state


@pytest.mark.parametrize("kind", [Adam, AdamW, AMSGrad, LAMB])
def test_a_table_added_later_takes_t_from_the_step(engine: str, kind: type[Adam]) -> None:
    early, late = (sgd_table(engine, 1, optimizer=kind(0.1)) for _ in range(2))
    for table, step in ((early, 0), (late, 999)):
        table.assign(ints(1), torch.ones(1, 1))
        table.apply_gradients(ints(1), torch.ones(1, 1), step=step)

    step_sizes = [1 - t.lookup(ints(1)).item() for t in (early, late)]
    if kind is LAMB:  # the trust ratio removes the length of the step
        assert step_sizes == pytest.approx([0.1, 0.1])
    else:
        expected = math.sqrt(1 - 0.999**1000) / (1 - 0.9**1000) * 0.1 * 0.1 / math.sqrt(0.001)
        decay = 0.1 * 0.01 if kind is AdamW else 0.0
        assert step_sizes == pytest.approx([0.1 + decay, expected + decay], rel=1e-5)


@pytest.mark.parametrize("kind", [Adam, AdamW, AMSGrad, LAMB])
def test_only_the_row_form_keeps_a_count(kind: type[Adam]) -> None:
    names = {form: [s.name for s in kind(bias_correction=form).states(2)] for form in ("step", "row")}
    assert names["row"] == [*names["step"], "count"]
    assert "count" not in names["step"]
    for wrong in ("rows", "", None, 1):
        with pytest.raises(InputError, match=f"{kind.__name__}: bias_correction"):
            kind(bias_correction=wrong)  # type: ignore[arg-type]


def test_the_two_forms_of_adam_do_not_take_each_others_rows(engine: str) -> None:
    by_step, by_row = (sgd_table(engine, 1, optimizer=Adam(bias_correction=f)) for f in ("step", "row"))
    for source, target in ((by_step, by_row), (by_row, by_step)):
        source.apply_gradients(ints(1), torch.ones(1, 1), step=0)
        with unchanged(target), pytest.raises(InputError, match="chunk has state"):
            target.restore(whole(source))


def test_adam_by_row_counts_the_updates_of_each_row(engine: str) -> None:
    table = sgd_table(engine, 1, optimizer=Adam(0.1, eps=0.0, bias_correction="row"))
    for step in range(5):
        table.apply_gradients(ints(1), torch.ones(1, 1), step=step)

    table.apply_gradients(ints(2), torch.ones(1, 1), step=5)

    # A first step has the size of the rate, however late it comes.
    assert table.lookup(ints(2)).item() == pytest.approx(-0.1, rel=1e-6)
    assert state_of(table, 1)["0/count"] == [5.0]
    assert state_of(table, 2)["0/count"] == [1.0]


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


# ---- what every optimizer shares


# A moving average has no rate; a delay compensation has that of its base.
RATED = [name for name in OPTIMIZERS if not name.startswith(("moving_average", "delay_compensated"))]


@pytest.mark.parametrize("name", RATED)
def test_every_optimizer_uses_the_rate_of_the_step(engine: str, name: str) -> None:
    rates = {0: 0.25, 7: 0.125}
    scheduled = sgd_table(engine, DIM, optimizer=replace(OPTIMIZERS[name], lr=lambda step: rates[step]))
    grads = torch.linspace(-1, 1, DIM)[None]
    weights = []
    for step, rate in rates.items():
        fixed = sgd_table(engine, DIM, optimizer=replace(OPTIMIZERS[name], lr=rate))
        if weights:
            fixed.restore(whole(scheduled))
        for table in (scheduled, fixed):
            table.apply_gradients(ints(1), grads, step=step)
        weights.append(scheduled.lookup(ints(1)))
        assert_same_bits(weights[-1], fixed.lookup(ints(1)))

    other = sgd_table(engine, DIM, optimizer=replace(OPTIMIZERS[name], lr=rates[7]))
    other.apply_gradients(ints(1), grads, step=0)
    assert not torch.equal(other.lookup(ints(1)), weights[0])


# ---- what is refused


NUMBERS = [
    (kind, field.name)
    for kind in REGISTERED.values()
    for field in fields(kind)
    if kind is not DelayCompensated and isinstance(field.default, float)
]


@pytest.mark.parametrize(("kind", "field"), NUMBERS)
def test_settings_are_finite_and_not_negative(kind: type[Optimizer], field: str) -> None:
    for value in (-0.1, math.nan, math.inf, "0.1", None):
        with pytest.raises(InputError, match=f"{kind.__name__}: {field}"):
            kind(**{field: value})


def test_settings_that_are_refused_by_their_meaning() -> None:
    for betas in ((1.0, 0.9), (0.99999999, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, math.nan), (0.9,), ()):
        for kind in (Adam, AdamW, AMSGrad, LAMB, Lion):
            with pytest.raises(InputError, match=f"{kind.__name__}: betas"):
                kind(betas=betas)  # type: ignore[arg-type]
    averages: list[tuple[Any, str]] = [(Momentum, "momentum"), (MovingAverage, "momentum")]
    for average, field in (*averages, (RMSProp, "alpha"), (Adadelta, "rho")):
        with pytest.raises(InputError, match=f"{average.__name__}: {field}"):
            average(**{field: 1.0})
    for base in (None, 0.1, SGD, DelayCompensated(SGD())):
        with pytest.raises(InputError, match="DelayCompensated: base"):
            DelayCompensated(base)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="DelayCompensated: strength"):
        DelayCompensated(SGD(), strength=-1.0)


@pytest.mark.parametrize("kind", [FTRL, GroupFTRL, GroupAdagrad])
def test_a_rate_of_zero_is_refused_where_the_formula_divides_by_it(engine: str, kind: type[FTRL]) -> None:
    for zero in (0.0, 1e-50):  # the second is 0 in float32
        table = sgd_table(engine, 1, optimizer=kind(zero))
        message = f"table 't'.*{kind.__name__}: learning rate at step 0 is 0"
        with unchanged(table), pytest.raises(InputError, match=message):
            table.apply_gradients(ints(1), torch.ones(1, 1), step=0)


def test_delay_compensation_takes_the_rate_of_its_base(engine: str) -> None:
    table = sgd_table(engine, 1, optimizer=DelayCompensated(SGD(Piecewise((1,), (1.0, 0.5))), 0.25))
    for step in range(2):
        table.apply_gradients(ints(1), torch.full((1, 1), 2.0), step=step)

    # Step 0: no change yet, w = -2. Step 1: g = 2 + 0.25 * 4 * -2 = 0.
    assert table.lookup(ints(1)).item() == -2.0
    assert state_of(table, 1)["0/change"] == [0.0]


# ---- BatchSoftmax


def test_batch_softmax_averages_the_interval_between_occurrences(engine: str) -> None:
    table = sgd_table(engine, 1, optimizer=BatchSoftmax(0.5), initializer=Constant(8.0))

    # Interval 4 from step -1, then 10; the gradient does not matter.
    table.apply_gradients(ints(1), torch.ones(1, 1), step=3)
    assert table.lookup(ints(1)).item() == 6.0
    table.apply_gradients(ints(1, 1), torch.zeros(2, 1), step=13)
    assert table.lookup(ints(1)).item() == 8.0


def test_batch_softmax_counts_steps_exactly_beyond_two_to_the_24(engine: str) -> None:
    table = sgd_table(engine, 1, optimizer=BatchSoftmax(1.0))
    for step in (2**40 + 1, 2**40 + 4):
        table.apply_gradients(ints(1), torch.zeros(1, 1), step=step)
    assert table.lookup(ints(1)).item() == 3.0
    assert state_of(table, 1) == {"0/step_high": [2.0**16], "0/step_low": [5.0]}
    with pytest.raises(InputError, match="BatchSoftmax: the segment must have dim 1"):
        Segment(2, optimizer=BatchSoftmax())


# ---- rows that become zero as a whole


@pytest.mark.parametrize("optimizer", [GroupFTRL(0.1, l1=100.0), GroupAdagrad(0.1, l2=1000.0)])
def test_a_penalty_sets_a_whole_row_to_zero(engine: str, optimizer: Optimizer) -> None:
    table = sgd_table(engine, 9, optimizer=optimizer)
    table.assign(ints(1), torch.full((1, 9), 0.125))
    table.apply_gradients(ints(1), torch.arange(9.0)[None], step=0)
    assert_same_bits(table.lookup(ints(1)), torch.zeros(1, 9))


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("kind", [GroupFTRL, GroupAdagrad])
def test_columns_without_gradients_stay_finite(engine: str, kind: type[GroupFTRL], beta: float) -> None:
    table = sgd_table(engine, 3, optimizer=kind(0.1, initial_accumulator_value=0.0, beta=beta))
    for gradient in ([[0.0, 0.0, 0.0]], [[1.0, 0.0, -1.0]]):
        table.apply_gradients(ints(1), torch.tensor(gradient), step=0)
        rows = table.lookup(ints(1))
        assert bool(rows.isfinite().all())
        assert rows[0, 1].item() == 0.0


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


# ---- every optimizer by its formula, one weight at a time in Python's floats


Formula = Callable[[list[float], list[list[float]]], list[float]]


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


def rmsprop_v2(w: list[float], grads: list[list[float]]) -> list[float]:
    n = [0.0] * len(w)
    for g in grads:
        for i, d in enumerate(g):
            d += 0.01 * w[i]
            n[i] = 0.99 * n[i] + d * d
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
    "rowwise_adagrad": rowwise_adagrad,
    "adam": adam,
    "adam_row": adam,  # every row is updated in every step
    "adam_nesterov": lambda w, grads: adam(w, grads, decay=0.0, nesterov=True),
    "adamw": lambda w, grads: adam(w, grads, decay=0.0, decoupled=0.1),
    "amsgrad": lambda w, grads: adam(w, grads, (0.9, 0.5), decay=0.0, maximum=True),
    "amsgrad_row": lambda w, grads: adam(w, grads, (0.9, 0.5), maximum=True),
    "lamb": lamb,
    "lamb_row": lambda w, grads: lamb(w, grads, decay=0.0),
    "lion": lion,
    "rmsprop_v2": rmsprop_v2,
    "ftrl": ftrl,
    "group_ftrl": group_ftrl,
    "group_adagrad": group_adagrad,
    "dynamic_wd_adagrad": dynamic_wd_adagrad,
    "moving_average": moving_average,
    "delay_compensated": delay_compensated,
    "delay_compensated_adam": delay_compensated_adam,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_optimizers_that_torch_does_not_have_follow_their_formula(engine: str, name: str) -> None:
    for dim in (1, 8, 13):
        weights, grads = training_example(rows=3, dim=dim)
        expected = [
            FORMULAS[name](weights[row].tolist(), [g[row].tolist() for g in grads]) for row in range(3)
        ]

        table = train_rows(engine, OPTIMIZERS[name], weights, grads)

        assert_close(table.lookup(torch.arange(3)), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_every_registered_optimizer_is_compared_with_torch_or_a_formula() -> None:
    assert {o.name for o in OPTIMIZERS.values()} == set(REGISTERED) - {"batch_softmax"}
    assert FORMULAS.keys() | IN_TORCH.keys() >= OPTIMIZERS.keys()
