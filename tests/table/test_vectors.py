"""The published expectations of Monolith's own tests, where they concern a table.

Those of PartitionedHashTable are in tests/nn/test_partitioned_vectors.py.

Section numbers are those of the project's notes on Monolith. Three decisions differ from it:
- a missing id reads as its initial row unless the table has missing="zeros" (Monolith: always
  zeros); the vectors that read missing ids set it;
- duplicates are summed before one step (Monolith without dedup: one step each). For SGD, the
  only optimizer in its vectors with duplicates, both give the same number;
- Adagrad has torch's eps of 1e-10 and an accumulator that starts at 0; the vectors set eps=0 and
  Monolith's accumulator.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megalith import (
    FTRL,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AMSGrad,
    BatchSoftmax,
    DelayCompensated,
    DynamicWdAdagrad,
    GroupAdagrad,
    GroupFTRL,
    Momentum,
    MovingAverage,
    PolynomialDecay,
    RMSProp,
    RMSPropV2,
    Segment,
    Table,
    TableConfig,
    Zeros,
)
from megalith.table import Optimizer
from tests.table.support import assert_close, ints, sgd_table, state_of

PAIRS = [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


# ---- 3.3: one step, then a second one, from zero weights


ADAM: dict[str, Any] = {
    "betas": (0.9, 0.99),
    "eps": 0.01,
    "bias_correction": "row",
}  # Monolith's; torch's are the defaults here
STEPS: dict[str, tuple[Optimizer, list[float], list[list[float]]]] = {
    "sgd": (SGD(0.1), [1.0], [[-0.1]]),
    # Monolith's AVX build forgets weight decay in the last factor of full blocks of 8;
    # the two columns with decay were its scalar tail, which has the formula right.
    "adagrad": (
        Adagrad(0.1, initial_accumulator_value=1.0, eps=0.0),
        [1.0, 2.0],
        [[-0.07071067, -0.08944272]],
    ),
    "adagrad-decay": (
        Adagrad(0.1, initial_accumulator_value=1.0, eps=0.0, weight_decay=0.1),
        [1.0, 2.0],
        [[-0.07071067, -0.08944272], [-0.128173, -0.155943]],
    ),
    "ftrl": (FTRL(0.01), [10.0, 1.0], [[-0.009995, -0.00953463], [-0.0170643, -0.0164353]]),
    "adam": (Adam(0.01, **ADAM), [10.0, 1.0], [[-0.00990099, -0.00909091], [-0.01983060, -0.01842895]]),
    "amsgrad": (AMSGrad(0.01, **ADAM), [10.0, 1.0], [[-0.00990099, -0.00909091], [-0.0198306, -0.01842895]]),
    "momentum": (Momentum(0.01), [10.0, 1.0], [[-0.1, -0.01], [-0.29, -0.029]]),
    "moving_average": (MovingAverage(), [10.0, 1.0], [[1.0, 0.1], [1.9, 0.19]]),
    "rmsprop": (RMSProp(0.01, alpha=0.9, eps=1.0), [10.0], [[-0.02402531], [-0.04268586]]),
    # Derived: n = 100, w = -0.01 / 11 * 10; n = 190, w -= 0.01 / (sqrt(190) + 1) * 10
    "rmsprop_v2": (RMSPropV2(0.01, alpha=0.9, eps=1.0), [10.0], [[-0.00909091], [-0.01585494]]),
    # Derived: n = 0.1 + 1, w = -0.1 / sqrt(1.1); n = 2.1, w -= 0.1 / sqrt(2.1) + 0.1 * 0.1 * w
    "dynamic_wd_adagrad": (
        DynamicWdAdagrad(0.1, initial_accumulator_value=0.1, eps=0.0, weight_decay=0.1),
        [1.0],
        [[-0.09534626], [-0.16339945]],
    ),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("repeat", [1, 9])
def test_optimizers_give_monoliths_numbers(engine: str, name: str, repeat: int) -> None:
    # The row is also tried nine times as wide: blocks of eight weights take another path.
    optimizer, gradient, expected = STEPS[name]
    table = sgd_table(engine, len(gradient) * repeat, optimizer=optimizer)

    for step, weights in enumerate(expected):
        table.apply_gradients(ints(1), torch.tensor([gradient * repeat]), step=step)
        assert_close(table.lookup(ints(1)), torch.tensor([weights * repeat]), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("l2", "gradient", "expected"),
    [
        (1.0, [10.0], [[-0.008182], [-0.014125]]),
        (0.0, [10.0, 1.0], [[-0.009091, -0.000909]]),
        (1000.0, [10.0, 1.0], [[0.0, 0.0]]),
    ],
)
def test_group_adagrad_gives_monoliths_numbers(
    engine: str, l2: float, gradient: list[float], expected: list[list[float]]
) -> None:
    optimizer = GroupAdagrad(0.01, initial_accumulator_value=0.0, beta=1.0, l2=l2)
    table = sgd_table(engine, len(gradient), optimizer=optimizer)
    for step, weights in enumerate(expected):
        table.apply_gradients(ints(1), torch.tensor([gradient]), step=step)
        assert_close(table.lookup(ints(1)), torch.tensor([weights]), rtol=1e-6, atol=1e-6)


def test_group_ftrl_from_its_derivation(engine: str) -> None:
    """Monolith's kernel is not public. z = (3, 4), |z| = 5, l1 = 1: w = -0.1 * z * 4 / 5 / (|z_i| + 1)."""
    table = sgd_table(engine, 2, optimizer=GroupFTRL(0.1, l1=1.0))
    table.apply_gradients(ints(1), torch.tensor([[3.0, 4.0]]), step=0)
    assert_close(table.lookup(ints(1)), torch.tensor([[-0.06, -0.064]]))


def test_batch_softmax_after_its_first_step(engine: str) -> None:
    """Monolith counts steps from 1: its step 1 is our step 0."""
    table = sgd_table(engine, 1, optimizer=BatchSoftmax(0.1))
    table.apply_gradients(ints(1), torch.ones(1, 1), step=0)
    assert table.lookup(ints(1)).item() == pytest.approx(0.1)


def test_delay_compensation_of_adadelta(engine: str) -> None:
    """Monolith passes the weights that the gradient was computed from: 0.1, then 0. Here the row keeps its
    last change, so the first -0.1 is restored and the second one is the step itself."""
    base = Adadelta(0.01, rho=0.9, eps=0.01)
    table = sgd_table(engine, 2, optimizer=DelayCompensated(base, strength=0.1))
    table.assign(ints(1), torch.zeros(1, 2))
    chunk = next(iter(table.scan()))
    table.restore(replace(chunk, state={**chunk.state, "0/change": torch.full((1, 2), -0.1)}))

    table.apply_gradients(ints(1), torch.tensor([[10.0, 1.0]]), step=0)
    assert_close(table.lookup(ints(1)), torch.tensor([[-0.0031603, -0.00301233]]), rtol=2e-5)
    assert state_of(table, 1)["0/square_avg"][0] == pytest.approx(8.1)
    table.apply_gradients(ints(1), torch.tensor([[10.0, 1.0]]), step=1)
    assert_close(table.lookup(ints(1)), torch.tensor([[-0.0065548, -0.00611400]]), rtol=2e-5)


def test_ftrls_accumulator_after_one_step_and_two_segments_with_a_rate_each(engine: str) -> None:
    table = sgd_table(engine, 2, optimizer=FTRL(0.01))
    table.apply_gradients(ints(1), torch.tensor([[10.0, 1.0]]), step=0)
    assert state_of(table, 1)["0/sum"] == pytest.approx([100.1, 1.1])

    segments = [Segment(dim, optimizer=SGD(dim), initializer=Zeros()) for dim in (1, 2)]
    table = Table(TableConfig("t", segments=segments), engine=engine)
    table.apply_gradients(ints(1), torch.tensor([[1.0, 2.0, 3.0]]), step=0)
    assert table.lookup(ints(1)).tolist() == [[-1.0, -4.0, -6.0]]


# ---- 1.5 DistributedHashTable and DistributedMultiTypeHashTable, 1.7 MultiTypeHashTable, 3.6 rates, 3.13 the
# Python table; one slot at a time, SGD from zeros

GROWING = PolynomialDecay(1.0, 10, 2.0)
TENTH = PolynomialDecay(0.1, 10, 1.1)
Call = tuple[str, list[int], list[list[float]]]
"""The method, its ids and rows; the first gradients are those of step 0."""

CALLS: dict[str, tuple[PolynomialDecay | float, list[Call], list[int], list[list[float]]]] = {
    "assign_add": (1.0, [("assign_add", [1, 2, 3], PAIRS)], [1, 2, 3], PAIRS),
    "assign overwrites": (
        1.0,
        [("assign", [1, 2, 3], PAIRS), ("assign", [2, 3, 4], PAIRS)],
        [1, 2, 3, 4],
        [[1, 1], [1, 1], [2, 2], [3, 3]],
    ),
    "lookup of duplicates": (1.0, [("assign", [1, 2, 3], PAIRS)], [1, 1, 3], [[1, 1], [1, 1], [3, 3]]),
    "gradients": (1.0, [("gradients", [0, 1], [[2], [2]])], [0, 1], [[-2], [-2]]),
    "a growing rate": (
        GROWING,
        [("gradients", [0, 1], [[2], [2]]), ("gradients", [0, 1], [[2], [2]])],
        [0, 1],
        [[-4.2], [-4.2]],
    ),
    "gradients of duplicates": (
        1.0,
        [("gradients", [0, 3, 0, 1], [[2]] * 4)],
        [0, 3, 0, 1],
        [[-4], [-2], [-4], [-2]],
    ),
    "gradients of one of two": (1.0, [("gradients", [1, 1], [[-2], [-2]])], [1, 0], [[4], [0]]),
    "a decay overshoots in its second step": (
        GROWING,
        [("assign_add", [1, 2], [[-1], [-2]]), *[("gradients", [1, 2], [[-0.5], [-1]])] * 2],
        [1, 2],
        [[0.05], [0.1]],
    ),
    "reinitialize, one of three is new": (
        1.0,
        [("assign", [1, 2], [[-1], [-2]]), ("reinitialize", [1, 2, 3], [[1], [1], [0]])],
        [1, 2, 3],
        [[0]] * 3,
    ),
    "reinitialize, two of three exist": (
        1.0,
        [("assign", [2, 3], [[1, 1]] * 2), ("reinitialize", [1, 2, 3], [[0], [1], [1]])],
        [1, 2, 3],
        [[0, 0]] * 3,
    ),
    "gradients without a lookup": (
        1.0,
        [("gradients", [2, 2], [[1.1, 3.1], [2.2, 4.2]])],
        [1, 2],
        [[0, 0], [-3.3, -7.3]],
    ),
    "a tenth of the rate": (
        TENTH,
        [("gradients", [1, 2], [[1, 3], [2, 4]])],
        [1, 2],
        [[-0.1, -0.3], [-0.2, -0.4]],
    ),
    "two features share a row": (
        1.0,
        [("assign_add", [1, 1], [[2], [4]]), ("gradients", [1, 1], [[1], [1]])],
        [1, 1],
        [[4], [4]],
    ),
    "a vocabulary of two": (1.0, [("assign_add", [0, 1], [[1], [1]])], [0, 1, 2], [[1], [1], [0]]),
    "minus the embedding": (0.1, [("gradients", [0, 0, 1], [[-1]] * 3)], [0, 1], [[0.2], [0.1]]),
    "minus the embedding, dedup": (
        0.1,
        [("gradients", [0, 1, 0, 1, 0], [[-1] * 10] * 5)],
        [0, 1],
        [[0.3] * 10, [0.2] * 10],
    ),
    "minus the embedding, other ids": (0.1, [("gradients", [1, 0, 1], [[-1]] * 3)], [0, 1], [[0.1], [0.2]]),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_give_monoliths_rows(engine: str, case: str) -> None:
    rate, calls, ids, expected = CALLS[case]
    table = sgd_table(engine, len(expected[0]), optimizer=SGD(rate), missing="zeros")
    step = 0

    for method, keys, rows in calls:
        if method == "gradients":
            table.apply_gradients(ints(*keys), torch.tensor(rows, dtype=torch.float32), step=step)
            step += 1
        elif method == "reinitialize":
            assert table.reinitialize(ints(*keys))[:, None].tolist() == rows
        else:
            getattr(table, method)(ints(*keys), torch.tensor(rows, dtype=torch.float32))

    assert_close(table.lookup(ints(*ids)), torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize(("ids", "rows"), [([1, 2], [[-1.0], [-2.0]]), ([3], [[-3.0, -3.0]])])
def test_half_the_value_as_gradient_halves_it(engine: str, ids: list[int], rows: list[list[float]]) -> None:
    values = torch.tensor(rows)
    table = sgd_table(engine, values.shape[1])
    table.assign_add(ints(*ids), values)

    for step, left in enumerate((0.5, 0.0)):
        table.apply_gradients(ints(*ids), values / 2, step=step)
        assert table.lookup(ints(*ids)).tolist() == (values * left).tolist()


# ---- 3.6: learning rates


def test_rates_of_a_growing_decay() -> None:
    schedule = PolynomialDecay(0.01, 10, 0.11)

    assert schedule(1) == pytest.approx(0.02)
    assert schedule(2) == pytest.approx(0.03)


def test_adagrad_under_a_decay(engine: str) -> None:
    # Monolith's test never advances the global step: the rate stays 3.
    optimizer = Adagrad(PolynomialDecay(3.0, 10, 11.0), initial_accumulator_value=0.1, eps=0.0)
    table = sgd_table(engine, 2, optimizer=optimizer)
    table.assign(ints(0, 1), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))

    for _ in range(3):
        table.apply_gradients(ints(0, 1), torch.tensor([[0.1, 0.1], [0.01, 0.01]]), step=0)

    expected = [[-1.60260987, -0.60260987], [2.71567917, 3.71567917]]
    assert_close(table.lookup(ints(0, 1)), torch.tensor(expected), atol=1e-6)


def test_a_table_under_a_decay(engine: str) -> None:
    table = sgd_table(engine, 1, optimizer=SGD(PolynomialDecay(0.01, 10, 0.11)))

    table.apply_gradients(ints(0, 0, 1), -torch.ones(3, 1), step=1)

    assert_close(table.lookup(ints(0, 1)), torch.tensor([[0.04], [0.02]]))
