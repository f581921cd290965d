"""Combiners on rows at hand: values, weights, gradients, torch.compile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from megalith import FirstN, Mean, Ragged, Sqrtn, Sum
from megalith.compat import monolith
from megalith.errors import InputError, UsageError
from megalith.nn import Combiner
from tests.fixed_examples import fixed_examples
from tests.nn.support import floats, ints

COMBINERS: list[Combiner] = [Sum(), Mean(), Sqrtn(), FirstN(2)]
each_combiner = pytest.mark.parametrize("combiner", COMBINERS, ids=repr)


def lengths(*rows: int, weights: Tensor | None = None) -> Ragged:
    """A column of rows this long."""
    return Ragged.from_lengths(torch.arange(sum(rows)), ints(*rows), weights)


# ---- vectors of the predecessor (reference 1.9)


def test_vectors_and_names_of_the_predecessor() -> None:
    assert Sum().combine(lengths(1, 2), floats([1], [2], [3])).tolist() == [[1], [5]]
    rows = floats([1], [2], [3], [4], [5], [6])
    assert FirstN(2).combine(lengths(1, 2, 3), rows).tolist() == [[[1], [0]], [[2], [3]], [[4], [5]]]
    assert issubclass(monolith.ReduceSum, Sum)
    assert issubclass(monolith.ReduceMean, Mean)


# ---- values


def test_weights() -> None:
    rows = floats([1], [2], [4])
    weighted = lengths(1, 2, weights=floats(0.5, 3, 1))

    assert Sum().combine(weighted, rows).tolist() == [[0.5], [10]]
    assert Mean().combine(weighted, rows).tolist() == [[1], [2.5]]  # sum(w x) / sum(w)
    expected = floats([1], [10 / math.sqrt(10)])  # sum(w x) / sqrt(sum(w^2))
    torch.testing.assert_close(Sqrtn().combine(weighted, rows), expected)
    assert FirstN(2).combine(weighted, rows).tolist() == [[[0.5], [0]], [[6], [4]]]
    assert FirstN(1).combine(weighted, rows).tolist() == [[[0.5]], [[6]]]


@pytest.mark.parametrize("combiner", [Mean(), Sqrtn()], ids=repr)
def test_weights_that_add_up_to_nothing_leave_the_sum(combiner: Combiner) -> None:
    rows = floats([1], [2], [4])
    assert combiner.combine(lengths(1, 2, weights=floats(0, 0, 0)), rows).tolist() == [[0], [0]]
    assert Mean().combine(lengths(3, weights=floats(1, 1, -2)), rows).tolist() == [[-5]]


@each_combiner
def test_empty_rows_are_zeros_and_an_empty_batch_is_empty(combiner: Combiner) -> None:
    out = combiner.combine(lengths(0, 1, 0), floats([7, 8]))
    assert out[0].count_nonzero() == out[2].count_nonzero() == 0
    assert out[1].flatten().tolist()[:2] == [7, 8]
    weighted = combiner.combine(lengths(0, 1, 0, weights=floats(1)), floats([7, 8]))
    assert torch.equal(weighted, out)

    nothing = combiner.combine(lengths(), torch.empty(0, 3))
    assert tuple(nothing.shape) == (0, *combiner.output_shape(3))
    no_values = combiner.combine(lengths(0, 0), torch.empty(0, 3))
    assert tuple(no_values.shape) == (2, *combiner.output_shape(3))
    assert no_values.count_nonzero() == 0


@pytest.mark.parametrize("n", [0, -1, 1.0, True, "2", None])
def test_first_n_needs_a_whole_number_of_at_least_one(n: Any) -> None:
    with pytest.raises(ValueError, match="FirstN: n must be an integer >= 1"):
        FirstN(n)


def test_combiners_are_values() -> None:
    assert Sum() == Sum() != Mean()
    assert FirstN(2) == FirstN(2) != FirstN(3)
    assert len({Sum(), Sum(), FirstN(2), FirstN(2), FirstN(3)}) == 3
    assert repr([Sum(), Mean(), Sqrtn(), FirstN(3)]) == "[Sum(), Mean(), Sqrtn(), FirstN(3)]"


@fixed_examples(40)
@given(
    rows=st.lists(st.lists(st.integers(-64, 64), max_size=4), max_size=5),
    combiner=st.sampled_from([*COMBINERS, FirstN(1), FirstN(5)]),
    weighted=st.booleans(),
)
def test_combine_is_what_it_says(rows: list[list[int]], combiner: Combiner, weighted: bool) -> None:
    flat = [x for row in rows for x in row]
    values = torch.tensor([[x, x / 2] for x in flat], dtype=torch.float32).view(-1, 2)
    weights = [[0.5 + k for k, _ in enumerate(row)] for row in rows]
    given_weights = torch.tensor([w for row in weights for w in row], dtype=torch.float32)

    out = combiner.combine(lengths(*map(len, rows), weights=given_weights if weighted else None), values)

    expected = []
    for row, own in zip(rows, weights, strict=True):
        own = own if weighted else [1.0] * len(row)
        scaled = [w * x for w, x in zip(own, row, strict=True)]
        if isinstance(combiner, FirstN):
            expected += [x for k in range(combiner.n) for x in (scaled[k : k + 1] or [0.0])]
        else:
            divisor = {Sum: 1.0, Mean: sum(own), Sqrtn: math.sqrt(sum(w * w for w in own))}[type(combiner)]
            expected.append(sum(scaled) / (divisor or 1.0))
    both = torch.tensor([[x, x / 2] for x in expected], dtype=torch.float32)
    torch.testing.assert_close(out.reshape(-1, 2), both.view(-1, 2), rtol=1e-6, atol=1e-6)


# ---- gradients


@each_combiner
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_gradients_are_those_of_the_values(combiner: Combiner, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    weights = torch.rand(6, dtype=torch.float64, generator=generator) if weighted else None
    column = lengths(1, 0, 3, 2, weights=weights)

    assert torch.autograd.gradcheck(lambda x: combiner.combine(column, x), rows)


def test_double_precision_is_kept() -> None:
    rows = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    weights = torch.tensor([0.1, 0.2], dtype=torch.float64)
    for combiner, expected in ((Mean(), 0.5 / 0.3), (Sqrtn(), 0.5 / math.sqrt(0.05))):
        out = combiner.combine(lengths(2, weights=weights), rows)
        torch.testing.assert_close(out, torch.tensor([[expected]], dtype=torch.float64), rtol=1e-15, atol=0)


@each_combiner
def test_weights_have_no_gradient_and_say_so(combiner: Combiner) -> None:
    with pytest.raises(UsageError, match="weights take no gradient"):
        combiner.combine(lengths(2, weights=torch.ones(2, requires_grad=True)), torch.ones(2, 1))


# ---- torch.compile


class Shapes:
    """A backend that runs graphs as they are and keeps the shapes of their outputs."""

    def __init__(self) -> None:
        self.graphs: list[list[tuple[Any, ...]]] = []

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        (output,) = [node for node in module.graph.nodes if node.op == "output"]
        self.graphs.append([tuple(node.meta["example_value"].shape) for node in output.args[0]])
        return module.forward


@pytest.fixture
def shapes() -> Iterator[Shapes]:
    torch.compiler.reset()
    yield Shapes()
    torch.compiler.reset()


# (lengths): no two sizes of a batch are equal, or torch takes them for one symbol.
BATCHES = [(1, 2, 0, 5), (3, 0, 2, 2, 4), (9, 0, 0, 1, 1, 6, 1, 3)]
DIM = 6


@pytest.mark.parametrize(
    ("combiner", "weighted"),
    [(Sum(), True), (Mean(), True), (Mean(), False), (Sqrtn(), True), (FirstN(2), False)],
    ids=repr,
)
def test_under_compile_the_batch_stays_symbolic(shapes: Shapes, combiner: Combiner, weighted: bool) -> None:
    table = nn.Embedding(32, DIM)

    @torch.compile(dynamic=True, fullgraph=True, backend=shapes)
    def combined(values: Tensor, splits: Tensor, weights: Tensor | None) -> Tensor:
        return combiner.combine(Ragged(values, splits, weights), table(values))

    for rows in BATCHES:
        column = lengths(*rows, weights=torch.rand(sum(rows)) if weighted else None)
        out = combined(column.values, column.row_splits, column.weights)
        assert torch.equal(out, combiner.combine(column, table(column.values)))

    (((batch, *rest),),) = shapes.graphs  # one graph with one output for all batch sizes
    assert isinstance(batch, torch.SymInt)
    assert rest == [*combiner.output_shape(DIM)]
    assert all(type(size) is int for size in rest)


@each_combiner
def test_what_is_not_a_column_or_not_rows_is_named(combiner: Any) -> None:
    column = Ragged.from_lists([[1, 2], [3]])
    with pytest.raises(InputError, match=r"a combiner needs a Ragged, got Tensor; see Ragged.from_lists"):
        combiner.combine(torch.tensor([1, 2, 3]), torch.ones(3, 2))
    for rows in (torch.ones(2, 1), torch.ones(4, 1), torch.ones(3), torch.ones(3, 1, 1)):
        with pytest.raises(InputError, match=r"rows must be \[3, dim\]"):
            combiner.combine(column, rows)
    with pytest.raises(InputError, match=r"rows must be a float tensor \[3, dim\], got list"):
        combiner.combine(column, [[1.0]])
    with pytest.raises(InputError, match="rows are on meta, the ids on cpu"):
        combiner.combine(column, torch.ones(3, 2, device="meta"))
