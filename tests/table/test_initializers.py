"""Initial rows: a pure function of (seed, table, id, column) with the right distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalith import (
    SGD,
    Constant,
    Normal,
    Ones,
    Segment,
    Table,
    TableConfig,
    TruncatedNormal,
    Uniform,
    Zeros,
)
from megalith.errors import InputError
from megalith.table import Initializer
from megalith.table.initializers import initial_rows, table_key
from tests.fixed_examples import fixed_examples
from tests.table.support import EXTREME_IDS, HIGHEST, LOWEST, assert_same_bits, ints, sgd_table

RANDOM = [
    Uniform(),
    Uniform(-3.0, 5.0),
    Normal(),
    Normal(2.0, 3.0),
    TruncatedNormal(),
    TruncatedNormal(-1.0, 2.0),
]
FIXED = [Zeros(), Ones(), Constant(-0.25)]

# Recorded once. A change here changes every row of every model that was ever trained from.
GOLDEN = {
    (Uniform(), 0, "t", 0): ["0x1.d2b21cp-6", "-0x1.938cdp-8", "-0x1.2c35e8p-7"],
    (Uniform(), 0, "t", 1): ["0x1.74a3ccp-6", "-0x1.96cb16p-5", "-0x1.bb564p-6"],
    (Uniform(), 0, "t", -1): ["0x1.5b383ap-5", "0x1.b0937cp-6", "-0x1.98ebap-8"],
    (Uniform(), 0, "t", HIGHEST): ["-0x1.d7a9p-9", "0x1.8a4d5cp-6", "0x1.0e61eap-5"],
    (Uniform(), 0, "t", LOWEST): ["0x1.0034b2p-5", "-0x1.cdf6ap-8", "0x1.edea8cp-6"],
    (Uniform(), 7, "user", 1): ["0x1.8a68dap-5", "-0x1.86b3p-12", "0x1.01304ap-5"],
    (Normal(0.0, 1.0), 0, "t", 0): ["0x1.93ccf8p-1", "-0x1.3d5ff8p-3", "-0x1.da88ep-3"],
    (Normal(0.0, 1.0), 0, "t", 1): ["0x1.35cebap-1", "-0x1.5a1a9ep+1", "-0x1.7b4994p-1"],
    (Normal(0.0, 1.0), 0, "t", LOWEST): ["0x1.c6b278p-1", "-0x1.6bc4f2p-3", "0x1.b1973ap-1"],
    (Normal(0.0, 1.0), 7, "user", 1): ["0x1.0adb46p+1", "-0x1.320baep-7", "0x1.c8fc58p-1"],
    (TruncatedNormal(0.0, 1.0), 0, "t", 0): ["0x1.7d7ae8p-1", "-0x1.2ed374p-3", "-0x1.c49456p-3"],
    (TruncatedNormal(0.0, 1.0), 0, "t", 1): ["0x1.260102p-1", "-0x1.f15b12p+0", "-0x1.66cc6ep-1"],
    (TruncatedNormal(0.0, 1.0), 7, "user", 1): ["0x1.bed8b8p+0", "-0x1.241ebep-7", "0x1.ae4cbep-1"],
}


def table_of(
    initializer: Initializer, engine: str = "cpu", *, dim: int = 8, seed: int = 0, name: str = "t"
) -> Table:
    return sgd_table(engine, dim, initializer=initializer, seed=seed, name=name)


def draws(initializer: Initializer, ids: int = 20_000, columns: int = 8) -> Tensor:
    return table_of(initializer, dim=columns).lookup(torch.arange(ids)).double()


@pytest.mark.parametrize(
    ("case", "expected"), GOLDEN.items(), ids=[f"{type(c[0]).__name__}-{c[1:]}" for c in GOLDEN]
)
def test_the_generator_never_changes(
    engine: str, case: tuple[Initializer, int, str, int], expected: list[str]
) -> None:
    initializer, seed, name, id = case
    row = table_of(initializer, engine, dim=3, seed=seed, name=name).lookup(ints(id))

    assert row[0].tolist() == [float.fromhex(value) for value in expected]


def test_the_key_of_a_table_never_changes() -> None:
    assert table_key(0, "t") == 0x8BE09686ED2AD8ED
    assert table_key(7, "user") == 0x78289CD1CA991F42


@fixed_examples(30)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    name=st.text(min_size=1, max_size=8),
    ids=st.lists(st.integers(LOWEST, HIGHEST), min_size=1, max_size=8),
    initializer=st.sampled_from([*RANDOM, *FIXED]),
)
def test_both_engines_draw_the_same_bits_for_any_seed_name_and_id(
    seed: int, name: str, ids: list[int], initializer: Initializer
) -> None:
    tables = [table_of(initializer, e, dim=3, seed=seed, name=name) for e in ("cpu", "reference")]

    assert_same_bits(tables[0].lookup(ints(*ids)), tables[1].lookup(ints(*ids)))


@pytest.mark.parametrize("initializer", RANDOM, ids=repr)
def test_a_row_reads_the_same_before_its_creation_and_in_any_order_of_arrival(
    engine: str, initializer: Initializer
) -> None:
    ids = torch.cat([ints(*EXTREME_IDS), torch.arange(100, 130)])
    forwards, backwards = table_of(initializer, engine), table_of(initializer, engine)
    missing = forwards.lookup(ids)

    for id in ids:
        forwards.reinitialize(id[None], time=0)
    backwards.apply_gradients(ids.flip(0), torch.zeros(ids.numel(), 8), step=0, time=0)
    backwards.remove(ids[::2])
    backwards.reinitialize(ids[::2], time=0)

    assert_same_bits(forwards.lookup(ids), missing)
    assert_same_bits(backwards.lookup(ids), missing)


@pytest.mark.parametrize("initializer", RANDOM, ids=repr)
def test_another_seed_name_or_id_gives_another_row(engine: str, initializer: Initializer) -> None:
    ids = ints(*EXTREME_IDS)
    rows = [
        table_of(initializer, engine, seed=seed, name=name).lookup(ids)
        for seed in (0, 1, -1, 2**40)
        for name in ("t", "u", "t ")
    ]

    distinct = torch.unique(torch.cat(rows), dim=0)

    assert len(distinct) == 12 * len(EXTREME_IDS)


def test_a_column_draws_the_same_whatever_segment_it_is_in(engine: str) -> None:
    ids = torch.arange(50)
    one = Table(TableConfig("t", dim=8, optimizer=SGD()), engine=engine)
    segments = [Segment(3, optimizer=SGD()), Segment(5, optimizer=SGD())]
    two = Table(TableConfig("t", segments=segments), engine=engine)

    assert_same_bits(two.lookup(ids), one.lookup(ids))


def test_each_segment_has_its_own_initializer(engine: str) -> None:
    initializers = (Zeros(), Constant(3.0), Uniform(10.0, 11.0), Ones(), Constant(-0.25))
    segments = [Segment(dim, optimizer=SGD(), initializer=i) for dim, i in enumerate(initializers, 1)]
    rows = Table(TableConfig("t", segments=segments), engine=engine).lookup(ints(*EXTREME_IDS))

    for row in rows:
        assert row[:3].tolist() == [0.0, 3.0, 3.0]
        assert bool(((row[3:6] >= 10.0) & (row[3:6] <= 11.0)).all())
        assert row[6:].tolist() == [1.0] * 4 + [-0.25] * 5


# ---- distributions: 160,000 draws, bounds at about five standard errors


def test_uniform_fills_all_its_cells_alike() -> None:
    counts = torch.histc(draws(Uniform(0.0, 1.0)).float(), bins=256, min=0.0, max=1.0).double()

    expected = counts.sum() / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 255 + 5 * math.sqrt(2 * 255)


@fixed_examples(30)
@given(
    low=st.floats(-100, 100, width=32),
    span=st.floats(0, 100, width=32),
    id=st.integers(LOWEST, HIGHEST),
)
def test_uniform_never_leaves_its_range(low: float, span: float, id: int) -> None:
    initializer = Uniform(low, low + span)
    row = initial_rows(0, ints(id), [(64, initializer)])

    ends = torch.tensor([initializer.low, initializer.high], dtype=torch.float32)
    assert bool(((row >= ends[0]) & (row <= ends[1])).all())


@pytest.mark.parametrize("mass", [1.0, math.erf(math.sqrt(2))], ids=["normal", "truncated"])
def test_normal_draws_are_the_quantiles_of_the_uniform_ones(mass: float) -> None:
    # 640,000 draws reach more than four deviations into the tails.
    ids = torch.arange(10_000)
    cells = initial_rows(9, ids, [(64, Uniform(0.0, 1.0))]).double()
    normal = Normal(0.0, 1.0) if mass == 1.0 else TruncatedNormal(0.0, 1.0)
    z = initial_rows(9, ids, [(64, normal)]).double()

    middle = 2 * cells + 2.0**-24 - 1
    quantile = math.sqrt(2) * torch.special.erfinv(middle * mass)

    assert float((z - quantile).abs().max()) < 1e-5
    assert float(quantile.abs().max()) > (4.25 if mass == 1.0 else 1.9999)


def test_neighbouring_ids_and_columns_are_not_correlated() -> None:
    z = draws(Normal(0.0, 1.0))

    by_column = (z[:, :-1] * z[:, 1:]).mean()
    by_id = (z[:-1] * z[1:]).mean()
    # 5 / sqrt(number of products averaged)
    assert abs(float(by_column)) < 0.0135
    assert abs(float(by_id)) < 0.0126


# ---- what is refused


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39, "1", None])
def test_settings_are_finite_numbers(value: Any) -> None:
    for make, field in (
        (lambda: Constant(value), "Constant: value"),
        (lambda: Uniform(value, 1.0), "Uniform: low"),
        (lambda: Uniform(-1.0, value), "Uniform: high"),
        (lambda: Normal(value, 1.0), "Normal: mean"),
        (lambda: Normal(0.0, value), "Normal: std"),
        (lambda: TruncatedNormal(0.0, value), "TruncatedNormal: std"),
    ):
        with pytest.raises(InputError, match=field):
            make()


def test_a_range_is_not_upside_down_or_too_wide_and_a_deviation_not_negative() -> None:
    with pytest.raises(InputError, match="Uniform"):
        Uniform(-3e38, 3e38)  # wider than float32 reaches
    with pytest.raises(InputError, match=r"low 1\.0 is above high 0\.5"):
        Uniform(1.0, 0.5)
    for kind in (Normal, TruncatedNormal):
        with pytest.raises(InputError, match=f"{kind.__name__}: std must not be negative"):
            kind(0.0, -1.0)
