"""Serving precisions: codes, what lookups return, gradients of views, and equal results on all engines."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalith import (
    SGD,
    Adagrad,
    Constant,
    EmbeddingCollection,
    Feature,
    FixedPoint,
    LocalShards,
    Mean,
    Normal,
    OneBit,
    Ragged,
    Segment,
    Sum,
    Table,
    TableConfig,
    _native,
)
from megalith.errors import InputError, UsageError
from megalith.table import Optimizer, ServingPrecision
from megalith.table.serving_precision import tanh
from tests.fixed_examples import fixed_examples
from tests.table.support import (
    TorchSGD,
    assert_close,
    assert_same_bits,
    cpu_table,
    dyadic,
    ints,
    summed,
    whole,
)

ENGINES = ["reference", "cpu"]
ANY_ROWS = torch.cat([dyadic(0, 40, 11), torch.randn(40, 11, generator=torch.Generator().manual_seed(1))])


def mixed_config(missing: str = "initial", optimizer: Optimizer | None = None) -> TableConfig:
    """Segments with and without a view."""
    own = SGD(0.5) if optimizer is None else optimizer
    return TableConfig(
        "t",
        segments=[
            Segment(3, optimizer=own, initializer=Normal(0.0, 1.0), serving=FixedPoint(2.0)),
            Segment(2, optimizer=Adagrad(0.1, initial_accumulator_value=0.1), serving="float16"),
            Segment(6, optimizer=own, initializer=Normal(0.0, 1.0), serving=OneBit(0.5, step_size=4)),
        ],
        missing=missing,
    )


def one_segment(serving: ServingPrecision | str | None, dim: int = 2, **fields: object) -> TableConfig:
    return TableConfig("t", dim=dim, optimizer=SGD(1.0), serving=serving, **fields)  # type: ignore[arg-type]


# ---- codes


def test_fixed_point_has_the_vectors_of_monolith() -> None:
    precision = FixedPoint(5.0)
    step = 5.0 / 128
    rows = torch.tensor([[100.0, 0.0, 1.4 * step, -1.4 * step, 1.6 * step, -1.6 * step, -100.0]])

    codes = precision.encode(rows)

    assert codes.view(torch.int8).tolist() == [[127, 0, 1, -1, 2, -2, -128]]
    assert_close(precision.served(rows)[0], torch.tensor([127.0, 0, 1, -1, 2, -2, -128]) * step)
    assert float(precision.served(rows)[0, 0]) < 5.0
    assert_same_bits(precision.served(torch.tensor([[-0.1 * step]])), torch.zeros(1, 1))  # no negative zero
    assert precision.served(torch.tensor([[math.nan]])).tolist() == [[0.0]]


def test_one_bit_has_the_vectors_of_monolith() -> None:
    precision = OneBit(1.0)
    rows = torch.tensor([[100.0, 0.1, 1e-5, 0.0, -1e-5, -0.1, -100.0]])

    assert precision.served(rows).tolist() == [[1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0]]
    assert precision.encode(rows).tolist() == [[0b111]]


@pytest.mark.parametrize("dim", [1, 7, 8, 9, 64])
def test_one_bit_packs_eight_weights_in_a_byte(dim: int) -> None:
    precision = OneBit(0.25)
    rows = dyadic(dim, 50, dim)

    codes = precision.encode(rows)

    assert codes.dtype == torch.uint8
    assert list(codes.shape) == [50, -(-dim // 8)]
    assert_same_bits(precision.decode(codes, dim), torch.where(rows > 0, 0.25, -0.25))


@pytest.mark.parametrize("range", [1.0, 5.0, 0.3, 1e-30, 3e38])
def test_all_codes_survive_decoding(range: float) -> None:
    precision = FixedPoint(range)
    codes = torch.arange(-128, 128).to(torch.int8).view(torch.uint8)[None]

    served = precision.decode(codes, 256)

    assert torch.equal(precision.encode(served), codes)
    assert_same_bits(precision.trained(served, 7), served)
    assert FixedPoint.from_unit(precision.unit) == precision


# ---- the scale and tanh of OneBit


def test_the_scale_is_a_function_of_the_step() -> None:
    precision = OneBit(0.1, init_scale=2.0, max_scale=10.0, step_size=100)

    assert precision.scale(0) == precision.scale(99) == 2.0
    assert precision.scale(100) == precision.scale(199) == pytest.approx(2 * math.sqrt(1.5))
    assert precision.scale(200) == pytest.approx(2 * math.sqrt(2))
    assert precision.scale(10**6) == precision.scale(2**62) == 10.0


def test_tanh_is_accurate_and_bounded() -> None:
    x = torch.cat([torch.linspace(-12, 12, 200_001), torch.logspace(-38, 2, 10_001), torch.tensor([0.0])])
    exact = torch.tanh(x.double())
    near = exact.abs().float()
    unit = torch.nextafter(near, torch.tensor(torch.inf)).double() - near.double()  # to the next float32

    error = (tanh(x).double() - exact).abs() / unit

    assert float(error.max()) <= 6.0
    assert float(tanh(x).abs().max()) == 1.0
    assert tanh(torch.tensor([torch.inf, -torch.inf, -0.0])).tolist() == [1.0, -1.0, 0.0]
    assert bool(tanh(torch.tensor([math.nan])).isnan())


def test_tanh_does_not_depend_on_the_place_in_a_tensor() -> None:
    x = torch.randn(1001, generator=torch.Generator().manual_seed(3))

    every = tanh(x)

    for begin, end in ((0, 1), (1, 4), (7, 30), (1000, 1001)):
        assert_same_bits(tanh(x[begin:end]), every[begin:end])
    assert_same_bits(tanh(x.view(7, 143)[:, 3:90]), every.view(7, 143)[:, 3:90])


# ---- lookups


@pytest.mark.parametrize("engine", ENGINES)
def test_lookups_return_the_view_and_everything_else_the_stored_rows(engine: str) -> None:
    table = Table(mixed_config(), engine=engine)
    ids, rows = torch.arange(80), ANY_ROWS
    scaled = torch.tanh(rows[:, 5:].double() * OneBit(0.5, step_size=4).scale(9)).float() * 0.5

    table.assign(ids, rows)

    served, trained = table.lookup(ids), table.lookup(ids, step=9)
    assert_same_bits(served[:, :3], FixedPoint(2.0).served(rows[:, :3]))
    assert_same_bits(trained[:, :3], served[:, :3])
    for found in (served, trained):
        assert_same_bits(found[:, 3:5], rows[:, 3:5])
    assert_same_bits(served[:, 5:], torch.where(rows[:, 5:] > 0, 0.5, -0.5))
    assert_close(trained[:, 5:], scaled)
    assert_same_bits(table.lookup(ids, stored=True), rows)
    assert_same_bits(whole(table).rows, rows)
    with table.snapshot() as snapshot:
        assert_same_bits(next(snapshot.chunks(100)).rows.sum(0), rows[snapshot_order(table)].sum(0))

    table.assign_add(ids[:2], torch.ones(2, 11))  # adds to the stored weights
    assert_same_bits(table.lookup(ids[:2], stored=True), rows[:2] + 1.0)


def snapshot_order(table: Table) -> Tensor:
    """The order of the rows of a scan."""
    return torch.cat([chunk.ids for chunk in table.scan()])


@pytest.mark.parametrize("engine", ENGINES)
def test_ids_without_a_row_read_as_the_view_of_their_initial_row_or_as_zeros(engine: str) -> None:
    ids = ints(5, 6)
    initial = Table(mixed_config(), engine=engine)
    before = [initial.lookup(ids), initial.lookup(ids, step=3)]
    initial.reinitialize(ids)
    assert_same_bits(initial.lookup(ids), before[0])
    assert_same_bits(initial.lookup(ids, step=3), before[1])

    zeros = Table(mixed_config("zeros"), engine=engine)
    zeros.assign(ids[:1], torch.zeros(1, 11))
    assert zeros.lookup(ids).tolist() == [[0.0] * 5 + [-0.5] * 6, [0.0] * 11]  # a stored zero is negative
    assert zeros.lookup(ids, step=3).tolist() == [[0.0] * 11] * 2
    pooled = zeros.read(zeros.find(ids), ids, summed("t", ints(0, 1, 2), 11))
    assert_same_bits(pooled[0], zeros.lookup(ids))


@given(
    seed=st.integers(0, 2**32 - 1),
    step=st.one_of(st.none(), st.integers(0, 10**6)),
    missing=st.sampled_from(["initial", "zeros"]),
)
@fixed_examples(8, 30)
def test_equal_rows_read_with_equal_bits_on_all_engines(seed: int, step: int | None, missing: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    magnitudes = 10.0 ** torch.randint(-5, 3, (30, 1), generator=generator)
    rows = torch.randn(30, 11, generator=generator) * magnitudes
    ids = torch.randint(0, 40, (60,), generator=generator)  # some have no row
    pooling = summed("t", ints(0, 7, 7, 31, 60), 11, weights=torch.randn(60, generator=generator))
    seen = []
    config = mixed_config(missing)
    for table in (Table(config, engine="reference"), Table(config), cpu_table(config, kernels="portable")):
        table.assign(torch.arange(30), rows)
        outputs = table.read(table.find(ids), ids, pooling, step=step)
        seen.append([table.lookup(ids, step=step), table.read(table.find(ids), ids, step=step), *outputs])

    for other in seen[1:]:
        for actual, expected in zip(other, seen[0], strict=True):
            assert_same_bits(actual, expected)


# ---- gradients


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_pass_straight_through_fixed_point(engine: str) -> None:
    table = Table(one_segment(FixedPoint(1.0), initializer=Constant(0.3)), engine=engine)

    table.apply_gradients(ints(4, 4), torch.tensor([[0.25, -8.0], [0.25, 0.0]]), step=0)

    assert table.lookup(ints(4), stored=True).tolist() == [[pytest.approx(-0.2), pytest.approx(8.3)]]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_gradients_of_one_bit_are_those_of_autograd(engine: str, clip_norm: float | None) -> None:
    precision = OneBit(0.5, init_scale=1.5, step_size=10)
    table = Table(one_segment(precision, 6, initializer=Normal(0.0, 1.0)), engine=engine)
    before = table.lookup(ints(4, 9), stored=True)  # one row exists, the other is created by the step
    table.reinitialize(ints(4))
    grads = dyadic(2, 3, 6)

    weights = before.double().requires_grad_()
    view = 0.5 * torch.tanh(weights * precision.scale(25))
    (view * torch.stack([grads[0] + grads[2], grads[1]]) * 0.25).sum().backward()
    assert weights.grad is not None
    wanted = weights.grad
    if clip_norm is not None:  # of the gradient of the stored weights
        wanted = wanted * (clip_norm / wanted.norm(dim=1, keepdim=True)).clamp(max=1.0)

    table.update(None, ints(4, 9, 4), grads, step=25, scale=0.25, clip_norm=clip_norm)

    assert_close(table.lookup(ints(4, 9), stored=True), (before - wanted).float(), rtol=2e-6, atol=1e-7)


def test_an_optimizer_written_in_torch_gets_the_same_gradients() -> None:
    ids, grads = torch.arange(20), dyadic(5, 20, 11)
    seen = []
    for optimizer in (SGD(0.5), TorchSGD(0.5)):
        for engine in ENGINES:
            table = Table(mixed_config(optimizer=optimizer), engine=engine)
            table.apply_gradients(ids, grads, step=3, time=0)
            seen.append(whole(table).rows)

    for other in seen[1:]:
        assert_same_bits(other[:, 5:], seen[0][:, 5:])


# ---- collections and shards


@pytest.mark.parametrize("engine", ENGINES)
def test_a_forward_sees_the_view_of_its_step_and_evaluation_what_is_served(engine: str) -> None:
    precision = OneBit(0.5, init_scale=2.0, step_size=1)
    config = one_segment(precision, 4, initializer=Normal(0.0, 1.0))
    model = EmbeddingCollection([config], [Feature("a", "t", Sum())], engine=engine)
    batch = {"a": Ragged.from_lists([[1, 2], [2]])}
    for step in range(3):
        rows = model.tables["t"].lookup(ints(1, 2), stored=True)
        view = precision.trained(rows, step)
        out = model(batch)["a"]
        assert_same_bits(out.detach(), torch.stack([view[0] + view[1], view[1]]))
        out.sum().backward()
        gradient = precision.gradient(torch.tensor([[1.0] * 4, [2.0] * 4]), rows, step)
        assert_close(model.tables["t"].lookup(ints(1, 2), stored=True), rows - gradient)

    served = precision.served(model.tables["t"].lookup(ints(1, 2), stored=True))
    with torch.no_grad():
        assert_same_bits(model(batch)["a"][1], served[1])
    model.eval()
    assert_same_bits(model(batch)["a"], torch.stack([served[0] + served[1], served[1]]))


def test_one_step_of_several_forwards_multiplies_the_sum() -> None:
    config = one_segment(OneBit(0.5, step_size=1), 4, initializer=Normal(0.0, 1.0))
    whole_batch, parts = (
        EmbeddingCollection([config], [Feature("a", "t", Mean())], update="step") for _ in range(2)
    )
    for _ in range(3):
        whole_batch({"a": torch.tensor([1, 2, 1, 3])})["a"].sum().backward()
        whole_batch.step()
        for part in ([1, 2], [1, 3]):
            parts({"a": torch.tensor(part)})["a"].sum().backward()
        parts.step()

    assert_same_bits(whole(parts.tables["t"]).rows, whole(whole_batch.tables["t"]).rows)


def test_shards_need_the_step_of_a_lookup_that_trains_one_bit() -> None:
    shards = LocalShards([one_segment(OneBit(0.5), 2), TableConfig("u", dim=2, optimizer=SGD(1.0))])
    ids, grads = {"t": ints(1)}, {"t": torch.ones(1, 2)}
    with pytest.raises(UsageError, match="pass step= to lookup"):
        shards.apply_gradients(shards.lookup(ids), grads, step=3)
    assert len(shards.local["t"]) == 0

    shards.apply_gradients(shards.lookup(ids, step=3), grads, step=3)
    shards.apply_gradients(ids, grads, step=4)  # without a lookup
    shards.apply_gradients(shards.lookup({"u": ints(1)}), {"u": torch.ones(1, 2)}, step=5)
    for bad in (-1, 1.5, "3"):
        with pytest.raises(InputError, match="step must be an integer"):
            shards.lookup(ids, step=bad)  # type: ignore[arg-type]


# ---- configs


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedPoint(0.0), "FixedPoint: range must be from"),
        (lambda: FixedPoint(1e-40), "FixedPoint: range must be from"),
        (lambda: OneBit(-1.0), "OneBit: amplitude must be a positive"),
        (lambda: OneBit(1.0, init_scale=math.nan), "OneBit: init_scale must be a positive"),
        (lambda: OneBit(1e30, max_scale=1e30), "amplitude \\* max_scale"),
        (lambda: OneBit(1.0, step_size=0), "OneBit: step_size must be a positive integer"),
        (lambda: one_segment("int8"), "serving must be FixedPoint"),
        (lambda: one_segment("bfloat16"), "serving must be FixedPoint"),
        (lambda: TableConfig("t", segments=[Segment(2, optimizer=SGD(1.0))], serving="float16"), "not both"),
    ],
)
def test_wrong_settings_are_refused(make: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("step", [None, 3, 9000])
@pytest.mark.parametrize(
    "precision", [FixedPoint(2.0), FixedPoint(0.3), OneBit(0.5)], ids=["dyadic", "decimal", "one_bit"]
)
def test_native_views_and_slopes_have_the_bits_of_torch(
    precision: ServingPrecision, step: int | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1000, 13, generator=generator)
    rows *= 10.0 ** torch.randint(-8, 5, (1000, 1), generator=generator)
    rows[0, :3] = torch.tensor([-0.0, 0.0, 3e38])
    view, first, second = precision.native_view(step)
    seen, grads = rows.clone(), torch.randn(1000, 13, generator=generator)

    _native.view_rows(seen, [(view, 2, 13, first, second)], 2)

    wanted = rows.clone()
    own = rows[:, 2:]
    wanted[:, 2:] = precision.served(own) if step is None else precision.trained(own, step)
    assert_same_bits(seen, wanted)
    if step is not None:
        expected = precision.gradient(grads, rows, step)
        _native.view_slopes(grads, rows, [(view, 0, 13, first, second)], [precision.slope(step)], 2)
        assert_same_bits(grads, expected)


def test_the_native_module_refuses_columns_outside_the_rows() -> None:
    rows, grads = torch.ones(3, 4), torch.ones(3, 4)
    good = (2, 0, 4, 1.0, 0.5)
    for bad in ((3, 0, 4, 1.0, 1.0), (0, -1, 4, 1.0, 1.0), (0, 0, 5, 1.0, 1.0), (0, 3, 2, 1.0, 1.0)):
        with pytest.raises((ValueError, InputError), match="parts"):
            _native.view_rows(rows, [bad], 1)
    with pytest.raises((ValueError, InputError), match="factors"):
        _native.view_slopes(grads, rows, [good], [], 1)
    with pytest.raises((ValueError, InputError), match="gradients"):
        _native.view_slopes(grads[:2], rows, [good], [1.0], 1)
    assert torch.equal(rows, torch.ones(3, 4))
