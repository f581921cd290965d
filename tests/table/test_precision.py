"""Rows of float16 and bfloat16: rounding, equal bits on all engines and kernels, and what carries them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalith import (
    SGD,
    Adagrad,
    Capacity,
    Normal,
    Segment,
    Table,
    TableConfig,
    Uniform,
    _native,
)
from megalith.table.optimizers import Optimizer
from megalith.table.rounding import DTYPES, round_step
from tests.fixed_examples import fixed_examples
from tests.table.support import (
    OPTIMIZERS,
    assert_close,
    assert_same_bits,
    assert_same_tables,
    cpu_table,
    dyadic,
    summed,
    whole,
)

NARROW = ["float16", "bfloat16"]
ULP = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def narrow_config(precision: str, dim: int = 11, **fields: object) -> TableConfig:
    """A table of one segment whose SGD steps of dyadic gradients are exact in float32."""
    settings = {"optimizer": SGD(0.5), "initializer": Uniform()} | fields
    return TableConfig("t", dim=dim, precision=precision, **settings)  # type: ignore[arg-type]


def mixed_config(rounding: str = "nearest", optimizer: Optimizer | None = None) -> TableConfig:
    """Segments of all precisions, with odd dims, so that float32 weights follow a gap."""
    own = SGD(0.5) if optimizer is None else optimizer
    return TableConfig(
        "t",
        segments=[
            Segment(3, optimizer=own, precision="bfloat16", rounding=rounding),
            Segment(9, optimizer=Adagrad(0.1, initial_accumulator_value=0.1)),
            Segment(5, optimizer=own, initializer=Normal(0.0, 1.0), precision="float16", rounding=rounding),
            Segment(2, optimizer=own, precision="float16"),
        ],
    )


def all_tables(config: TableConfig) -> list[Table]:
    """The table on the reference engine, and on the cpu engine with each set of kernels of this CPU."""
    return [
        Table(config, engine="reference"),
        *(cpu_table(config, kernels=name) for name in _native.kernel_sets()),
    ]


def hard_values(precision: str) -> Tensor:
    """All values of a precision up to its largest, the halfway points between them, and their neighbours."""
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    exact = patterns.view(DTYPES[precision]).float()
    exact = exact[exact.isfinite()].unique()
    halves = (exact[1:].double() + exact[:-1].double()).div(2).float()
    far = torch.tensor([1e5, -1e5, 3.4e38, -3.4e38, 1e-45, -1e-45])
    near = [torch.nextafter(halves, torch.tensor(side)) for side in (torch.inf, -torch.inf)]
    values = torch.cat([exact, halves, *near, far])
    return values[values.isfinite()]


@pytest.mark.parametrize("precision", NARROW)
def test_assigned_rows_round_to_the_nearest_value_on_every_engine(precision: str) -> None:
    values = hard_values(precision)
    largest = torch.finfo(DTYPES[precision]).max
    dim = 3 * 8 + 5  # vectors and single weights
    rows = torch.cat([values, torch.zeros(-values.numel() % dim)]).view(-1, dim)
    ids = torch.arange(rows.shape[0])
    expected = rows.clamp(-largest, largest).to(DTYPES[precision]).float()

    for table in all_tables(narrow_config(precision, dim))[1:]:
        table.assign(ids, rows)
        assert_same_bits(table.lookup(ids), expected)
    reference = Table(narrow_config(precision, dim), engine="reference")
    reference.assign(ids[:200], rows[:200])
    assert_same_bits(reference.lookup(ids[:200]), expected[:200])


@pytest.mark.parametrize("precision", [*NARROW, "mixed"])
def test_an_initial_row_reads_the_same_before_and_after_its_creation(precision: str) -> None:
    config = mixed_config() if precision == "mixed" else narrow_config(precision, initializer=Normal(0, 1))
    ids = torch.arange(40)
    seen = []
    for table in all_tables(config):
        seen.append(table.lookup(ids))
        table.reinitialize(ids)
        assert_same_bits(table.lookup(ids), seen[-1])
        pooled = table.read(table.find(ids), ids, summed("t", torch.arange(41), config.dim))
        assert_same_bits(pooled[0], seen[-1])

    for other in seen[1:]:
        assert_same_bits(other, seen[0])
    wide = Table(
        replace_segments(config, precision="float32", rounding="nearest"), engine="reference"
    ).lookup(ids)
    start = 0
    for segment in config.segments:
        columns = slice(start, start + segment.dim)
        assert_same_bits(seen[0][:, columns], wide[:, columns].to(DTYPES[segment.precision]).float())
        start += segment.dim


def replace_segments(config: TableConfig, **fields: str) -> TableConfig:
    """The same table with other fields of all segments."""
    return TableConfig(config.name, segments=[replace(s, **fields) for s in config.segments])  # type: ignore[arg-type]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("precision", [*NARROW, "mixed"])
def test_steps_have_equal_bits_on_every_engine_if_the_optimizer_is_exact(
    precision: str, rounding: str
) -> None:
    config = (
        mixed_config(rounding) if precision == "mixed" else narrow_config(precision, 20, rounding=rounding)
    )
    exact = torch.ones(config.dim, dtype=torch.bool)
    if precision == "mixed":
        exact[3:12] = False  # the segment with Adagrad
    tables = all_tables(config)

    for step in range(6):
        ids = torch.arange(step, 40 + step)
        grads = dyadic(step, 40, config.dim) * 2.0**-9
        for table in tables:
            table.apply_gradients(ids, grads, step=step, time=step)

    expected, *others = (whole(table) for table in tables)
    for actual in others:
        assert_same_bits(actual.rows[:, exact].contiguous(), expected.rows[:, exact].contiguous())
        assert_close(actual.rows, expected.rows)
        start = 0
        for segment in config.segments:
            stored = actual.rows[:, start : start + segment.dim]
            assert_same_bits(stored.contiguous(), stored.to(DTYPES[segment.precision]).float())
            start += segment.dim


@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    precision=st.sampled_from(NARROW),
    dim=st.sampled_from([1, 8, 11, 64, 72]),
    seed=st.integers(0, 2**32 - 1),
)
@fixed_examples(25, 40)
def test_a_step_of_any_optimizer_differs_by_one_rounding_at_most(
    name: str, precision: str, dim: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(50, (120,), generator=generator)
    grads = torch.randn(120, dim, generator=generator)
    config = narrow_config(precision, dim, optimizer=OPTIMIZERS[name])
    tables = all_tables(config)

    for table in tables:
        table.apply_gradients(ids, grads, step=0, time=0)

    one, two, *others = map(whole, tables)
    for other in others:
        assert_same_tables(other, two)
    assert_close(two.rows, one.rows, rtol=ULP[precision], atol=2.0**-24)
    for key in one.state:
        assert_close(two.state[key], one.state[key])  # state stays float32
    wide = Table(narrow_config("float32", dim, optimizer=OPTIMIZERS[name]), engine="cpu")
    wide.assign(one.ids, Table(config).lookup(one.ids))  # the step starts at the rounded weights
    wide.apply_gradients(ids, grads, step=0, time=0)
    assert_close(two.rows, whole(wide).rows, rtol=ULP[precision], atol=2.0**-24)


@pytest.mark.parametrize("precision", NARROW)
def test_stochastic_rounding_has_no_bias_and_keeps_exact_values(precision: str) -> None:
    config = narrow_config(precision, 4, rounding="stochastic")
    unit = ULP[precision]
    wanted = torch.tensor([1.0 + unit / 4, -1.0 - 0.75 * unit, 1.0, 2.0**-24 * 0.3])
    ids = torch.arange(20000)

    rounded = round_step(config, 5, ids, wanted.expand(20000, 4), 3)

    mean = rounded.double().mean(dim=0)
    assert mean[0] == pytest.approx(1.0 + unit / 4, abs=0.02 * unit)
    assert mean[1] == pytest.approx(-1.0 - 0.75 * unit, abs=0.02 * unit)
    assert rounded[:, 0].unique().tolist() == [1.0, 1.0 + unit]
    assert rounded[:, 2].unique().tolist() == [1.0]
    assert mean[3] == pytest.approx(2.0**-24 * 0.3, rel=0.05)
    assert not torch.equal(rounded, round_step(config, 5, ids, wanted.expand(20000, 4), 4))
    assert not torch.equal(rounded, round_step(config, 6, ids, wanted.expand(20000, 4), 3))


def test_stochastic_rounding_does_not_depend_on_order_threads_or_engine() -> None:
    config = narrow_config("bfloat16", 16, rounding="stochastic")
    ids = torch.arange(9000)
    grads = dyadic(0, 9000, 16) * 2.0**-9
    shuffled = torch.randperm(9000, generator=torch.Generator().manual_seed(1))
    tables = [Table(config), Table(config), Table(config)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        tables[0].apply_gradients(ids, grads, step=7, time=0)
        torch.set_num_threads(3)
        tables[1].apply_gradients(ids[shuffled], grads[shuffled], step=7, time=0)
        for part in ids.split(1000):
            tables[2].apply_gradients(part, grads[part], step=7, time=0)
    finally:
        torch.set_num_threads(threads)

    expected = whole(tables[0])
    assert_same_tables(whole(tables[1]), expected)
    assert_same_tables(whole(tables[2]), expected)
    near = Table(narrow_config("bfloat16", 16))
    near.apply_gradients(ids, grads, step=7, time=0)
    assert not torch.equal(expected.rows, whole(near).rows)


@pytest.mark.parametrize("precision", [*NARROW, "mixed"])
def test_rows_survive_scan_restore_snapshots_and_compaction(precision: str) -> None:
    config = mixed_config("stochastic") if precision == "mixed" else narrow_config(precision)
    table = Table(config, engine="cpu")
    ids = torch.arange(9000)
    table.apply_gradients(ids, dyadic(1, 9000, config.dim) * 0.3, step=0, time=5)
    before = whole(table)

    with table.snapshot() as snapshot:
        table.apply_gradients(ids[:4000], torch.ones(4000, config.dim), step=1, time=6)
        chunks = list(snapshot.chunks(1000))
    copy = Table(config, engine="cpu")
    for chunk in chunks:
        copy.restore(chunk)
    assert_same_tables(whole(copy), before)

    copy.remove(ids[100:])
    while not copy.engine_impl.compact(500):
        pass
    assert_same_bits(copy.lookup(ids[:100]), before.rows[:100])
    wide = Table(replace_segments(config, precision="float32", rounding="nearest"), engine="cpu")
    for chunk in chunks:
        wide.restore(chunk)  # every value is exact in float32
    assert_same_bits(wide.lookup(ids), before.rows)


def test_a_narrow_row_takes_fewer_bytes() -> None:
    ids = torch.arange(1000)
    for config, weights in (
        (narrow_config("bfloat16", 64), 128),
        (narrow_config("float16", 5), 12),
        (mixed_config(), 6 + 2 + 36 + 14 + 2),
    ):
        table = Table(config, engine="cpu")
        table.reinitialize(ids)
        assert table.memory().rows == 1000 * weights
        assert config.row_bytes == weights + 4 * (config.row_floats - config.dim)
        assert table.memory().state == 4000 * (config.row_floats - config.dim)
    half = Table(narrow_config("bfloat16", 64, eviction=Capacity(max_bytes=10**6)))
    full = Table(narrow_config("float32", 64, eviction=Capacity(max_bytes=10**6)))
    assert (half.engine_impl.row_limit or 0) > 1.6 * (full.engine_impl.row_limit or 0)
