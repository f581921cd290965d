"""The step of a matrix by chunks: native code and plain torch, against the step of the whole matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith.ops import matrix_chunks
from megalith.ops.matrix_chunks import StepRule, from_chunks, step_chunks, to_chunks


def expected_step(
    weights: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, rule: StepRule
) -> tuple[torch.Tensor, torch.Tensor]:
    if rule == "sign":
        return weights - gradient.sign() * 0.3, momentum
    if rule == "sgd":
        return weights - gradient * 0.3, momentum
    later = momentum * 0.9 + gradient
    return weights - (later * 0.9 + gradient) * 0.3, later


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.sampled_from(["sgd", "nesterov", "sign"]),
    st.data(),
)
def test_a_step_covers_the_matrix(
    lines: int, columns: int, chunk: tuple[int, int], rule: StepRule, data: st.DataObject
) -> None:
    """A part of a matrix, stepped by all chunks of the whole, in pieces."""
    top = data.draw(st.integers(0, lines - 1))
    bottom = data.draw(st.integers(top + 1, lines))
    left = data.draw(st.integers(0, columns - 1))
    gradient, across = torch.randn(lines, columns), -(-columns // chunk[1])
    tiles = to_chunks(gradient, chunk)
    assert torch.equal(from_chunks(tiles, (lines, columns), chunk), gradient)
    start, momentum = torch.randn(bottom - top, columns - left), torch.randn(bottom - top, columns - left)
    expected = expected_step(start, momentum, gradient[top:bottom, left:], rule)
    cut = data.draw(st.integers(0, len(tiles)))
    for native in (True, False):
        weights, own = start.clone(), momentum.clone()
        with pytest.MonkeyPatch.context() as patch:
            if not native:
                patch.setattr(matrix_chunks, "native_module", lambda: None)
                patch.setattr(matrix_chunks, "_STEP_POSITIONS", 3 * chunk[0] * chunk[1])
            for first, piece in ((0, tiles[:cut]), (cut, tiles[cut:])):
                step_chunks(
                    piece,
                    weights,
                    own,
                    first=first,
                    across=across,
                    chunk=chunk,
                    corner=(top, left),
                    rule=rule,
                    lr=0.3,
                    beta=0.9,
                )
        assert torch.equal(weights, expected[0])
        assert torch.equal(own, expected[1])


def test_a_step_of_another_type_rounds_once() -> None:
    weights = torch.ones(2, 2, dtype=torch.bfloat16)
    gradient = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    step_chunks(gradient, weights, None, first=0, across=1, chunk=(2, 2), corner=(0, 0), rule="sgd", lr=0.5)
    assert torch.equal(weights, (1 - gradient.view(2, 2) * 0.5).to(torch.bfloat16))
