"""Integer division: the guarded forms equal torch's, except where torch ends the process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megalith.serving.export.compiled_program import compile_servable
from megalith.serving.export.exporter import export_model
from megalith.serving.export.program_safety import (
    divide,
    divide_in_place,
    divide_into,
    divides_integers,
    guard_divisions,
)
from megalith.serving.export.servable import Servable
from tests.serving.export.test_dense_program import Wide

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
MODES = ("trunc", "floor")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [*INTEGERS, torch.uint8, torch.float32])
@pytest.mark.parametrize("other", [torch.int64, torch.int8, torch.uint8])
def test_other_quotients_are_those_of_torch(kind: torch.dtype, other: torch.dtype, mode: str) -> None:
    dividend = torch.tensor([-128, -7, -1, 0, 1, 7, 127]).to(kind)
    divisor = torch.tensor([[-5], [-2], [3], [100], [200]]).to(other)
    expected = torch.div(dividend, divisor, rounding_mode=mode)
    found = divide(dividend, divisor, rounding_mode=mode)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", INTEGERS)
def test_the_smallest_integer_divided_by_minus_one_is_itself(kind: torch.dtype, mode: str) -> None:
    smallest = torch.iinfo(kind).min
    dividend, expected = torch.tensor([smallest, -6, 5], dtype=kind), [smallest, 6, -5]
    for divisor in (torch.tensor(-1, dtype=kind), torch.full((3,), -1, dtype=kind), -1):
        assert divide(dividend, divisor, rounding_mode=mode).tolist() == expected
    out = torch.zeros(3, dtype=kind)
    assert divide_into(dividend, -1, rounding_mode=mode, out=out) is out
    assert out.tolist() == expected
    assert divide_in_place(dividend, -1, rounding_mode=mode) is dividend
    assert dividend.tolist() == expected


def test_a_wider_divisor_widens_the_quotient() -> None:
    found = divide(torch.tensor([-(2**31)], dtype=torch.int32), torch.tensor([-1]), rounding_mode="trunc")
    assert (found.dtype, found.tolist()) == (torch.int64, [2**31])


def test_true_division_and_zero() -> None:
    assert divide(torch.tensor([3]), torch.tensor([2])).tolist() == [1.5]
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        divide(torch.tensor([3]), torch.tensor([0]), rounding_mode="trunc")


class Buckets(nn.Module):
    """Has four kinds of division of integers."""

    def forward(self, x: Tensor) -> Tensor:
        number = x.to(torch.int64)
        half = torch.div(number, 2, rounding_mode="trunc")
        half.div_(number, rounding_mode="trunc")
        return half // number + number % 5


class Floats(nn.Module):
    """Divides floats only."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.div(x, 2.0, rounding_mode="trunc") % 3.0


def traced(module: nn.Module) -> nn.Module:
    return torch.export.export(module, (torch.ones(2),)).module()


def test_every_division_of_a_program_is_guarded() -> None:
    program = traced(Buckets())
    assert divides_integers(program)
    guard_divisions(program)
    assert divides_integers(program)
    found = program(torch.tensor([-(2.0**63), 8.0]))
    assert found.tolist() == [-(2**63) % 5, 3]
    assert not divides_integers(traced(Floats()))


class Dividing(Wide):
    """Adds the quotient of integers that come from its rows."""

    def score(self, rows: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        number = rows["rows"].to(torch.int64)
        return super().score(rows, dense) + number[:, 0].div(number[:, 1] | 1, rounding_mode="trunc")


def test_a_program_that_divides_integers_is_not_compiled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    export_model(Dividing(), tmp_path, name="movies", version=1)
    assert not compile_servable(Servable(tmp_path / "1"), tmp_path / "cache")
    assert "divisions of integers" in caplog.text
    assert not (tmp_path / "cache").exists()
