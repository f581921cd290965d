"""Rows in exports: bytes, distance from what was trained, equal values of servers and training, overlays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith import SGD, FixedPoint, LocalShards, Normal, OneBit, Segment, TableConfig
from megalith.errors import InputError
from megalith.serving import Servable, export_model
from megalith.serving.export.frozen_rows import FrozenRows
from megalith.serving.export.overlay import PRESENT, Overlay
from megalith.serving.export.row_format import (
    PRECISIONS,
    RowFormat,
    RowPart,
    decode_numbers,
    encode_numbers,
    steps_for,
)
from megalith.table.serving_precision import fixed_point_codes
from tests.table.support import assert_same_bits, dyadic, ints

MIXED = RowFormat(
    (
        RowPart("float32", 1),
        RowPart("fixed_point", 3, 2.0 / 128),
        RowPart("float16", 2),
        RowPart("one_bit", 11, 0.25),
        RowPart("int8", 2, 0.5),
    )
)


def config(name: str = "t", **fields: Any) -> TableConfig:
    """Rows of 1 + 9 + 20 weights."""
    return TableConfig(
        name,
        segments=[
            Segment(1, optimizer=SGD(0.5)),
            Segment(9, optimizer=SGD(0.5), initializer=Normal(0.0, 1.0), serving=FixedPoint(2.0)),
            Segment(20, optimizer=SGD(0.5), initializer=Normal(0.0, 1.0), serving=OneBit(0.5)),
        ],
        **fields,
    )


def trained(*configs: TableConfig) -> LocalShards:
    shards = LocalShards(configs or (config(),))
    ids = torch.arange(0, 300, 3)
    for name, each in shards.configs.items():
        shards.apply_gradients({name: ids}, {name: dyadic(1, 100, each.dim)}, step=0)
    return shards


# ---- rows


def test_a_row_takes_the_bytes_of_its_parts() -> None:
    rows = dyadic(3, 40, MIXED.dim)

    stored = MIXED.encode(rows)

    assert (MIXED.dim, MIXED.row_bytes, MIXED.width, MIXED.dtype) == (19, 15, 15, torch.uint8)
    assert list(stored.shape) == [40, 4 + 3 + 4 + 2 + 2]
    assert_same_bits(stored[:, :4].contiguous().view(torch.float32), rows[:, :1])
    assert_same_bits(stored[:, 4:7].view(torch.int8).float() * (2.0 / 128), MIXED.decode(stored)[:, 1:4])
    assert_same_bits(MIXED.decode(stored)[:, 6:17], torch.where(rows[:, 6:17] > 0, 0.25, -0.25))
    assert torch.equal(MIXED.encode(MIXED.decode(stored)), stored)
    assert MIXED.encode(rows[:0]).shape == (0, 15)
    assert MIXED.decode(stored[:0]).shape == (0, 19)
    with pytest.raises(InputError, match="NaN or Inf"):
        MIXED.encode(torch.full((1, 19), torch.nan))


def test_rows_of_one_kind_of_numbers_are_a_matrix_of_that_type() -> None:
    for kind, dtype in (("float32", torch.float32), ("float16", torch.float16), ("int8", torch.int8)):
        format = RowFormat.uniform(kind, (3, 2), (1.0, 0.5))
        assert (format.dtype, format.width, format.codes) == (dtype, 5, None)
    assert MIXED.codes is not None
    assert [part.kind for part in MIXED.codes.parts] == [
        "float32",
        "fixed_point",
        "float32",
        "one_bit",
        "float32",
    ]


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        [["float32", 1]],
        [["int4", 1, 1.0]],
        [["float32", 0, 1.0]],
        [["float32", 1.5, 1.0]],
        [["int8", 1, -1.0]],
        [["int8", 1, "1"]],
        [["int8", 1, True]],
        [["fixed_point", 1, 1e-42]],
        [["one_bit", 1, float("inf")]],
        [[["float32"], 1, 1.0]],
    ],
)
def test_malformed_formats_are_refused(data: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        RowFormat.from_data(data)


# ---- exports


def test_an_export_serves_what_a_lookup_without_a_step_returns(tmp_path: Path) -> None:
    shards = trained(config(missing="zeros"))
    export_model(shards, tmp_path, name="m", version=1)

    servable = Servable(tmp_path / "1")

    ids = torch.arange(-3, 310)
    assert_same_bits(servable.lookup("t", ids), shards.local["t"].lookup(ids))
    table = servable.signature.tables["t"]
    assert table.kinds == ("float32", "fixed_point", "one_bit")
    assert table.steps == (1.0, 2.0 / 128, 0.5)
    assert table.format("float32").row_bytes == 4 + 9 + 3
    assert table.file is not None
    assert table.file.bytes < 100 * (16 + 8) + 33 * 8 + 512  # rows, ids, buckets, header
    reference = torch.empty(ids.numel(), table.dim)
    FrozenRows(tmp_path / "1" / table.file.path, table.format("float32")).read_reference(ids, reference)
    assert_same_bits(reference, shards.local["t"].lookup(ids))


def test_the_precision_of_an_export_is_that_of_other_segments(tmp_path: Path) -> None:
    pinned = TableConfig("p", dim=4, optimizer=SGD(0.5), serving="float32")
    half = TableConfig("h", dim=4, optimizer=SGD(0.5), serving="float16")
    plain = TableConfig("q", dim=4, optimizer=SGD(0.5))
    shards = trained(config(), pinned, half, plain)

    for precision in ("float32", "float16", "int8"):
        export_model(shards, tmp_path / precision, name="m", version=1, precision=precision)
        servable = Servable(tmp_path / precision / "1")
        tables = servable.signature.tables
        assert tables["t"].kinds == (precision, "fixed_point", "one_bit")
        assert (tables["p"].kinds, tables["h"].kinds, tables["q"].kinds) == (("float32",), ("float16",), None)
        ids = torch.arange(0, 300, 3)
        served, wanted = servable.lookup("t", ids), shards.local["t"].lookup(ids)
        assert_same_bits(served[:, 1:], wanted[:, 1:])
        assert float((served - wanted).abs().max()) < 0.02
        assert_same_bits(servable.lookup("p", ids), shards.local["p"].lookup(ids))
        assert_same_bits(servable.lookup("h", ids), shards.local["h"].lookup(ids).half().float())


def test_written_rows_are_served_as_their_codes(tmp_path: Path) -> None:
    shards = trained()
    export_model(shards, tmp_path, name="m", version=1)
    servable = Servable(tmp_path / "1")
    ids, rows = ints(3, 1000), dyadic(5, 2, 30)  # such as the floats of a Monolith client

    servable.apply({"t": (ids, rows)}, {"t": ints(6)})

    shards.assign({"t": (ids, rows)})
    assert_same_bits(servable.lookup("t", ids), shards.local["t"].lookup(ids))
    assert servable.lookup("t", ints(6)).tolist() == [[0.0] * 30]
    again = Servable(tmp_path / "1")
    again.inherit(servable.overlay)
    every = torch.arange(0, 1001)
    assert_same_bits(again.lookup("t", every), servable.lookup("t", every))
    assert again.overlay.rows_of("t") == 3  # rows that differ from the exported ones, and a removed one


def test_an_overlay_holds_codes_in_a_third_of_the_columns() -> None:
    overlay = Overlay({"t": 19}, codes={"t": MIXED})
    rows = dyadic(3, 40, 19)

    overlay.apply({"t": (torch.arange(40), rows)})

    assert overlay.widths["t"] == 5 + 1  # 15 bytes, and the flag
    read, flags = overlay.read("t", torch.arange(-1, 41))
    assert_same_bits(read[1:41], MIXED.decode(MIXED.encode(rows)))
    assert flags.tolist() == [0.0, *[PRESENT] * 40, 0.0]
    assert not read[0].any()
    assert not read[41].any()


# ---- numbers

FLOATS = st.floats(-1e4, 1e4, width=32)


def test_monoliths_vectors_of_r_5() -> None:
    step = 5 / 128
    values = torch.tensor([[100.0, -100.0, 0.0, 1.4 * step, -1.4 * step, 1.6 * step, -1.6 * step]])
    whole = fixed_point_codes(values, torch.full((7,), step))
    assert whole.tolist() == [[127, -128, 0, 1, -1, 2, -2]]
    decoded = decode_numbers(whole, torch.full((7,), step))
    assert float(decoded[0, 0]) < 5
    assert decoded[0].tolist() == [each * step for each in (127, -128, 0, 1, -1, 2, -2)]


def test_nan_is_zero_steps() -> None:
    assert fixed_point_codes(torch.tensor([[float("nan")]]), torch.ones(1)).tolist() == [[0]]


def test_the_largest_value_of_a_segment_is_127_steps() -> None:
    assert steps_for([2.54, 0.0], "int8") == [pytest.approx(0.02), 1.0]
    assert steps_for([2.54, 0.0], "float16") == [1.0, 1.0]


@pytest.mark.parametrize("precision", PRECISIONS)
@given(st.lists(FLOATS, min_size=1, max_size=20))
def test_a_value_is_within_half_a_unit_of_its_last_place(precision: str, values: list[float]) -> None:
    rows = torch.tensor([values])
    steps = torch.tensor(steps_for([float(rows.abs().max())], precision)).expand(len(values))
    error = (decode_numbers(encode_numbers(rows, precision, steps), steps) - rows).abs()
    bound = {"float32": 0.0, "float16": rows.abs() * 2**-11 + 2**-25, "int8": steps * (0.5 + 1e-4)}
    assert bool((error <= bound[precision]).all())


def test_a_table_of_zeros_and_one_of_tiny_values_read_as_zeros() -> None:
    for value in (0.0, 1e-44):
        rows = torch.full((3, 2), value)
        steps = torch.tensor(steps_for([float(rows.abs().max())], "int8")).expand(2)
        assert decode_numbers(encode_numbers(rows, "int8", steps), steps).abs().max() <= 1e-44


def test_what_float16_cannot_hold_is_refused() -> None:
    assert encode_numbers(torch.tensor([[65504.0]]), "float16", torch.ones(1)).isfinite().all()
    with pytest.raises(InputError, match="65536, beyond float16: export as float32"):
        encode_numbers(torch.tensor([[1.0, -65536.0]]), "float16", torch.ones(2))
