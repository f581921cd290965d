"""Serving precisions: Monolith's vectors, and how far a value may be from what was trained."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith.errors import InputError
from megalith.serving.export import row_format as precisions
from megalith.serving.export.row_format import decode_numbers, encode_numbers, steps_for
from megalith.table.serving_precision import fixed_point_codes

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


@given(st.lists(FLOATS, min_size=1, max_size=20))
def test_int8_is_within_half_a_step(values: list[float]) -> None:
    rows = torch.tensor([values])
    steps = torch.tensor(steps_for([float(rows.abs().max())], "int8")).expand(len(values))
    error = (decode_numbers(encode_numbers(rows, "int8", steps), steps) - rows).abs()
    assert bool((error <= steps * (0.5 + 1e-4)).all())


@given(st.lists(FLOATS, min_size=1, max_size=20))
def test_float16_is_within_half_a_unit_of_its_last_place(values: list[float]) -> None:
    rows = torch.tensor([values])
    error = (decode_numbers(encode_numbers(rows, "float16", torch.ones(1)), torch.ones(1)) - rows).abs()
    assert bool((error <= rows.abs() * 2**-11 + 2**-25).all())


@given(st.lists(FLOATS, min_size=1, max_size=20))
def test_float32_is_exact(values: list[float]) -> None:
    rows = torch.tensor([values])
    assert torch.equal(decode_numbers(encode_numbers(rows, "float32", torch.ones(1)), torch.ones(1)), rows)


def test_a_table_of_zeros_and_one_of_tiny_values_read_as_zeros() -> None:
    for value in (0.0, 1e-44):
        rows = torch.full((3, 2), value)
        steps = torch.tensor(steps_for([float(rows.abs().max())], "int8")).expand(2)
        assert decode_numbers(encode_numbers(rows, "int8", steps), steps).abs().max() <= 1e-44


def test_what_float16_cannot_hold_is_refused() -> None:
    assert encode_numbers(torch.tensor([[65504.0]]), "float16", torch.ones(1)).isfinite().all()
    with pytest.raises(InputError, match="65536, beyond float16: export as float32"):
        encode_numbers(torch.tensor([[1.0, -65536.0]]), "float16", torch.ones(2))


@pytest.mark.parametrize("precision", precisions.PRECISIONS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_refused(precision: str, value: float) -> None:
    with pytest.raises(InputError, match="NaN or Inf"):
        encode_numbers(torch.tensor([[value]]), precision, torch.ones(1))


@pytest.mark.parametrize("precision", precisions.PRECISIONS)
def test_a_request_without_rows(precision: str) -> None:
    assert encode_numbers(torch.empty(0, 3), precision, torch.ones(3)).shape == (0, 3)


def test_an_unknown_precision_names_the_known_ones() -> None:
    with pytest.raises(InputError, match="float32, float16, int8, got 'int4'"):
        precisions.dtype_of("int4")
