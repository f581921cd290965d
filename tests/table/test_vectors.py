"""The published expectations of Monolith's own tests, where they concern a table.

Section numbers are those of the project's notes on Monolith. Three decisions differ from it:
- a missing id reads as its initial row unless the table has missing="zeros" (Monolith: always
  zeros); the vectors that read missing ids set it;
- duplicates are summed before one step (Monolith without dedup: one step each). For SGD, the
  only optimizer in its vectors with duplicates, both give the same number;
- Adagrad has torch's eps of 1e-10 and an accumulator that starts at 0; the vectors set eps=0 and
  Monolith's accumulator.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalith import (
    FTRL,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AMSGrad,
    BatchSoftmax,
    Constant,
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
from megalith.ops import Bags, OutputSlice, Pooling
from megalith.table import Optimizer
from tests.table.support import assert_close, ints, sgd_table, state_of


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


# ---- 3.3: one step, then a second one, from zero weights


@pytest.mark.parametrize(
    ("optimizer", "gradient", "expected"),
    [
        (SGD(0.1), [1.0], [[-0.1]]),
        (
            Adagrad(0.1, initial_accumulator_value=1.0, eps=0.0),
            [1.0, 2.0],
            [[-0.07071067, -0.08944272]],
        ),
        (
            # Monolith's AVX build forgets weight decay in the last factor of full blocks of 8;
            # these two columns were its scalar tail, which has the formula right.
            Adagrad(0.1, initial_accumulator_value=1.0, eps=0.0, weight_decay=0.1),
            [1.0, 2.0],
            [[-0.07071067, -0.08944272], [-0.128173, -0.155943]],
        ),
        (FTRL(0.01), [10.0, 1.0], [[-0.009995, -0.00953463], [-0.0170643, -0.0164353]]),
        (
            # Monolith's betas and eps; torch's are the defaults here.
            Adam(0.01, betas=(0.9, 0.99), eps=0.01, bias_correction="row"),
            [10.0, 1.0],
            [[-0.00990099, -0.00909091], [-0.01983060, -0.01842895]],
        ),
        (
            AMSGrad(0.01, betas=(0.9, 0.99), eps=0.01, bias_correction="row"),
            [10.0, 1.0],
            [[-0.00990099, -0.00909091], [-0.01983060, -0.01842895]],
        ),
        (Momentum(0.01), [10.0, 1.0], [[-0.1, -0.01], [-0.29, -0.029]]),
        (MovingAverage(), [10.0, 1.0], [[1.0, 0.1], [1.9, 0.19]]),
        (RMSProp(0.01, alpha=0.9, eps=1.0), [10.0], [[-0.02402531], [-0.04268586]]),
        # Derived: n = 100, w = -0.01 / 11 * 10; n = 190, w -= 0.01 / (sqrt(190) + 1) * 10
        (RMSPropV2(0.01, alpha=0.9, eps=1.0), [10.0], [[-0.00909091], [-0.01585494]]),
        # Derived: n = 0.1 + 1, w = -0.1 / sqrt(1.1); n = 2.1, w -= 0.1 / sqrt(2.1) + 0.1 * 0.1 * w
        (
            DynamicWdAdagrad(0.1, initial_accumulator_value=0.1, eps=0.0, weight_decay=0.1),
            [1.0],
            [[-0.09534626], [-0.16339945]],
        ),
    ],
    ids=[
        "sgd",
        "adagrad",
        "adagrad-decay",
        "ftrl",
        "adam",
        "amsgrad",
        "momentum",
        "moving_average",
        "rmsprop",
        "rmsprop_v2",
        "dynamic_wd_adagrad",
    ],
)
@pytest.mark.parametrize("repeat", [1, 9])
def test_optimizers_give_monoliths_numbers(
    engine: str, optimizer: Optimizer, gradient: list[float], expected: list[list[float]], repeat: int
) -> None:
    # The row is also tried nine times as wide: blocks of eight weights take another path.
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


def test_ftrls_accumulator_after_one_step(engine: str) -> None:
    table = sgd_table(engine, 2, optimizer=FTRL(0.01))

    table.apply_gradients(ints(1), torch.tensor([[10.0, 1.0]]), step=0)

    assert state_of(table, 1)["0/sum"] == pytest.approx([100.1, 1.1])


def test_an_entry_of_two_segments_takes_a_rate_each(engine: str) -> None:
    segments = [
        Segment(1, optimizer=SGD(1.0), initializer=Zeros()),
        Segment(2, optimizer=SGD(2.0), initializer=Zeros()),
    ]
    table = Table(TableConfig("t", segments=segments), engine=engine)

    table.apply_gradients(ints(1), torch.tensor([[1.0, 2.0, 3.0]]), step=0)

    assert table.lookup(ints(1)).tolist() == [[-1.0, -4.0, -6.0]]


# ---- 1.5: DistributedHashTable, SGD with rate 1 from zeros


def test_assign_add_then_lookup(engine: str) -> None:
    table = sgd_table(engine)
    rows = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])

    table.assign_add(ints(1, 2, 3), rows)

    assert table.lookup(ints(1, 2, 3)).tolist() == rows.tolist()


def test_assign_overwrites(engine: str) -> None:
    table = sgd_table(engine)
    rows = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])

    table.assign(ints(1, 2, 3), rows)
    table.assign(ints(2, 3, 4), rows)

    assert table.lookup(ints(1, 2, 3, 4)).tolist() == [[1, 1], [1, 1], [2, 2], [3, 3]]


def test_lookup_of_duplicates(engine: str) -> None:
    table = sgd_table(engine)
    table.assign(ints(1, 2, 3), torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]))

    assert table.lookup(ints(1, 1, 3)).tolist() == [[1, 1], [1, 1], [3, 3]]


def test_apply_gradients(engine: str) -> None:
    table = sgd_table(engine, 1)

    table.apply_gradients(ints(0, 1), column(2, 2), step=0)

    assert table.lookup(ints(0, 1)).tolist() == [[-2], [-2]]


def test_rate_from_a_growing_decay(engine: str) -> None:
    table = sgd_table(engine, 1, optimizer=SGD(PolynomialDecay(1.0, 10, 2.0)))

    table.apply_gradients(ints(0, 1), column(2, 2), step=0)
    assert table.lookup(ints(0, 1)).tolist() == [[-2], [-2]]
    table.apply_gradients(ints(0, 1), column(2, 2), step=1)
    assert_close(table.lookup(ints(0, 1)), column(-4.2, -4.2))


def test_gradients_of_duplicates_add_up(engine: str) -> None:
    table = sgd_table(engine, 1)
    ids = ints(0, 3, 0, 1)

    table.apply_gradients(ids, column(2, 2, 2, 2), step=0)

    assert table.lookup(ids).tolist() == [[-4], [-2], [-4], [-2]]


def test_gradients_may_go_to_other_ids_than_were_looked_up(engine: str) -> None:
    table = sgd_table(engine, 1)
    table.lookup(ints(1, 0))

    table.apply_gradients(ints(1, 1), column(-2, -2), step=0)

    assert table.lookup(ints(1, 0)).tolist() == [[4], [0]]


# ---- 1.5: DistributedMultiTypeHashTable, one slot at a time


@pytest.mark.parametrize(
    ("ids", "rows"), [([1, 2], [[-1.0], [-2.0]]), ([3], [[-3.0, -3.0]])], ids=["slot 1", "slot 2"]
)
def test_half_the_value_as_gradient_halves_it(engine: str, ids: list[int], rows: list[list[float]]) -> None:
    values = torch.tensor(rows)
    table = sgd_table(engine, values.shape[1])
    table.assign_add(ints(*ids), values)

    table.apply_gradients(ints(*ids), values / 2, step=0)
    assert table.lookup(ints(*ids)).tolist() == (values / 2).tolist()
    table.apply_gradients(ints(*ids), values / 2, step=1)
    assert table.lookup(ints(*ids)).tolist() == (values * 0).tolist()


def test_a_decay_overshoots_in_its_second_step(engine: str) -> None:
    table = sgd_table(engine, 1, optimizer=SGD(PolynomialDecay(1.0, 10, 2.0)))
    table.assign_add(ints(1, 2), column(-1, -2))

    for step in (0, 1):
        table.apply_gradients(ints(1, 2), column(-0.5, -1), step=step)

    assert_close(table.lookup(ints(1, 2)), column(0.05, 0.1))


def test_reinitialize_distinguishes_new_ids_from_old_ones(engine: str) -> None:
    table = sgd_table(engine, 1)
    table.assign(ints(1, 2), column(-1, -2))

    status = table.reinitialize(ints(1, 2, 3))

    assert status.tolist() == [1, 1, 0]
    assert table.lookup(ints(1, 2, 3)).tolist() == [[0], [0], [0]]


# ---- 1.5: PartitionedHashTable: three features, three layouts

SEGMENTS = {"uid": (1, 4), "gid": (1, 4, 8), "cid": (1, 4, 8)}


def partitioned(engine: str, value: float) -> tuple[dict[str, Table], dict[str, Tensor], Pooling]:
    """Rows 0, 1, ... (twice the width of a row of them) hold `value`; batch row i asks for
    uid 3i, gid 3i + 1 and cid 3i + 2. Outputs: bias [6, 3], vec [6, 12], deep [6, 16]."""
    tables, ids, bags = {}, {}, {}
    columns = [0, 0, 0]
    for number, (name, dims) in enumerate(SEGMENTS.items()):
        segments = [
            Segment(
                dim,
                # Monolith's defaults: both accumulators start at 0.1, Adagrad without eps
                optimizer=FTRL(1.0)
                if position == 0
                else Adagrad(1.0, initial_accumulator_value=0.1, eps=0.0),
                initializer=Zeros(),
            )
            for position, dim in enumerate(dims)
        ]
        tables[name] = Table(TableConfig(name, segments=segments, missing="zeros"), engine=engine)
        known = torch.arange(2 * sum(dims))
        tables[name].assign(known, torch.full((known.numel(), sum(dims)), value))
        ids[name] = torch.arange(6) * 3 + number
        parts, start = [], 0
        for output, dim in enumerate(dims):
            parts.append(OutputSlice(output, columns[output], start, start + dim))
            columns[output] += dim
            start += dim
        bags[name] = (Bags(torch.arange(7), tuple(parts)),)
    return tables, ids, Pooling(((6, 3), (6, 12), (6, 16)), bags)


def test_layouts_of_three_features(engine: str) -> None:
    tables, ids, pooling = partitioned(engine, 2.0)
    outputs = pooling.new_outputs()

    for name, table in tables.items():
        table.read(table.find(ids[name]), ids[name], pooling, out=outputs)

    # uid 12 and 15 are beyond the ten rows assigned and read as zeros.
    bias, vec = torch.full((6, 3), 2.0), torch.full((6, 12), 2.0)
    bias[4:, 0] = 0.0
    vec[4:, :4] = 0.0
    assert outputs[0].tolist() == bias.tolist()
    assert outputs[1].tolist() == vec.tolist()
    assert outputs[2].tolist() == torch.full((6, 16), 2.0).tolist()


def test_gradients_of_layouts(engine: str) -> None:
    tables, ids, pooling = partitioned(engine, 3.0)
    grads = [torch.full(shape, 2.0) for shape in pooling.outputs]

    for name, table in tables.items():
        table.update(table.find(ids[name]), ids[name], grads, pooling, step=0)

    n = 0.1 + 2.0 * 2.0
    ftrl = -(2.0 - (math.sqrt(n) - math.sqrt(0.1)) * 3.0) / math.sqrt(n)
    adagrad = 3.0 - 2.0 / math.sqrt(n)
    for name, table in tables.items():
        known = ids[name][:4]
        expected = torch.full((4, table.dim), adagrad)
        expected[:, 0] = ftrl
        assert_close(table.lookup(known), expected)


# ---- 1.7: MultiTypeHashTable, one slot at a time


def test_gradients_without_a_lookup_create_rows(engine: str) -> None:
    table = sgd_table(engine, missing="zeros", initializer=Constant(0.0))

    table.apply_gradients(ints(2, 2), torch.tensor([[1.1, 3.1], [2.2, 4.2]]), step=0)

    assert_close(table.lookup(ints(1, 2)), torch.tensor([[0.0, 0.0], [-3.3, -7.3]]))


def test_a_tenth_of_the_rate_gives_a_tenth_of_the_step(engine: str) -> None:
    table = sgd_table(engine, 2, optimizer=SGD(PolynomialDecay(0.1, 10, 1.1)))

    table.apply_gradients(ints(1, 2), torch.tensor([[1.0, 3.0], [2.0, 4.0]]), step=0)

    assert_close(table.lookup(ints(1, 2)), torch.tensor([[-0.1, -0.3], [-0.2, -0.4]]))


def test_two_features_of_one_table_share_a_row(engine: str) -> None:
    table = sgd_table(engine, 1)

    table.assign_add(ints(1, 1), column(2, 4))
    assert table.lookup(ints(1, 1)).tolist() == [[6], [6]]
    table.apply_gradients(ints(1, 1), column(1, 1), step=0)
    assert table.lookup(ints(1)).tolist() == [[4]]


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

    table.apply_gradients(ints(0, 0, 1), column(-1, -1, -1), step=1)

    assert_close(table.lookup(ints(0, 1)), column(0.04, 0.02))


# ---- 3.13: the Python table


def test_a_vocabulary_of_two(engine: str) -> None:
    table = sgd_table(engine, 1, missing="zeros")

    table.assign_add(ints(0, 1), column(1, 1))

    assert table.lookup(ints(0, 1, 2)).tolist() == [[1], [1], [0]]
    assert len(table) == 2


@pytest.mark.parametrize(
    ("dim", "ids", "expected"),
    [
        (1, [0, 0, 1], [0.2, 0.1]),
        (10, [0, 1, 0, 1, 0], [0.3, 0.2]),
        (1, [1, 0, 1], [0.1, 0.2]),
    ],
    ids=["basic", "dedup", "different ids"],
)
def test_gradients_of_minus_the_embedding(
    engine: str, dim: int, ids: list[int], expected: list[float]
) -> None:
    table = sgd_table(engine, dim, optimizer=SGD(0.1))

    table.apply_gradients(ints(*ids), torch.full((len(ids), dim), -1.0), step=0)

    assert_close(table.lookup(ints(0, 1)), torch.tensor(expected)[:, None].expand(2, dim))


def test_reinitialize_after_two_of_three_exist(engine: str) -> None:
    table = sgd_table(engine)
    table.assign(ints(2, 3), torch.ones(2, 2))

    assert table.reinitialize(ints(1, 2, 3)).tolist() == [0, 1, 1]
    assert table.lookup(ints(1, 2, 3)).tolist() == [[0, 0]] * 3
