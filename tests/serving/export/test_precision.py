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


@pytest.mark.parametrize("precision", precisions.PRECISIONS)
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
