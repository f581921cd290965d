"""Pooling: pure data, and the torch references that define what engines compute."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from megalith.errors import UsageError
from megalith.ops import Bags, OutputSlice, Pooling, pool, pool_rows, segment_sum, unpool
from megalith.ops.pooling import _pool_reference, _unpool_reference, op_arguments
from tests.fixed_examples import fixed_examples
from tests.ops.support import FLOATS, assert_same, assert_threads_do_not_show, ints, randn, strided

ROWS = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]])


def pooled(pooling: Pooling, source: Tensor, table: str = "t") -> list[list[list[float]]]:
    outputs = [torch.zeros(shape) for shape in pooling.outputs]
    pool(source, pooling.of(table), outputs)
    return [out.tolist() for out in outputs]


def one_feature(offsets: Tensor, part: OutputSlice, shape: tuple[int, int], **bags: Tensor) -> Pooling:
    return Pooling((shape,), {"t": (Bags(offsets, (part,), **bags),)})


# ---- the data


def test_a_table_that_fills_no_output_has_no_bags() -> None:
    pooling = Pooling.sum("t", ints(0, 1), 2)

    assert len(pooling.of("t")) == 1
    assert pooling.of("other") == ()


@pytest.mark.parametrize(
    "parts",
    [
        (OutputSlice(0, 0, 0, 2),),  # no part writes columns 2 and 3
        (OutputSlice(0, 0, 0, 2, accumulate=True), OutputSlice(0, 2, 0, 2, accumulate=True)),
        (),
    ],
    ids=["part of it", "only added to", "nothing"],
)
def test_new_outputs_are_zero_where_no_part_writes(parts: tuple[OutputSlice, ...]) -> None:
    pooling = Pooling(((256, 4),), {"t": (Bags(torch.arange(257), parts),)})
    torch.full((256, 4), 5.0)  # memory that a new output may be given again

    (out,) = pooling.new_outputs()

    assert out.dtype == torch.float32
    assert out.shape == (256, 4)
    written = torch.zeros(4, dtype=torch.bool)
    for part in parts:
        if not part.accumulate:
            written[part.column : part.column + part.end - part.start] = True
    assert bool((out[:, ~written] == 0).all())


# ---- pool


def test_each_bag_is_summed_in_order() -> None:
    source = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])

    # A 1 added while the sum is 1e8 is lost to rounding; added after the -1e8 it is not.
    assert pooled(Pooling.sum("t", ints(0, 4), 1), source) == [[[1.0]]]
    assert pooled(Pooling.sum("t", ints(0, 4), 1), source[[0, 2, 1, 3]]) == [[[2.0]]]


def test_features_write_over_or_add_in_their_order() -> None:
    def twice(accumulate: bool) -> Pooling:
        parts = (OutputSlice(0, 0, 0, 2), OutputSlice(0, 0, 0, 2, accumulate=accumulate))
        return Pooling(((1, 2),), {"t": (Bags(ints(0, 1), parts[:1]), Bags(ints(1, 2), parts[1:]))})

    assert pooled(twice(accumulate=True), ROWS) == [[[3.0, 30.0]]]
    assert pooled(twice(accumulate=False), ROWS) == [[[2.0, 20.0]]]


@pytest.mark.parametrize("mode", ["sum", "mean"])
@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    seed=st.integers(0, 2**32 - 1),
    weighted=st.booleans(),
)
def test_pooling_is_embedding_bag(mode: str, lengths: list[int], seed: int, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(lengths)
    offsets = torch.cat([ints(0), counts.cumsum(0)])
    n = int(offsets[-1])
    source = torch.randn(n, 3, generator=generator)
    bags: dict[str, Tensor] = {}
    weights = None
    if mode == "mean":  # torch weighs only sums
        bags["divisor"] = counts.clamp(min=1).float()
    elif weighted:
        weights = bags["weights"] = torch.randn(n, generator=generator)
    pooling = one_feature(offsets, OutputSlice(0, 0, 0, 3), (len(lengths), 3), **bags)
    (out,) = [torch.zeros(shape) for shape in pooling.outputs]

    pool(source, pooling.of("t"), [out])

    expected = torch.nn.functional.embedding_bag(
        torch.arange(n), source, offsets[:-1], mode=mode, per_sample_weights=weights
    )
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


# ---- unpool


def test_each_occurrence_gets_its_bags_gradient() -> None:
    pooling = Pooling.sum("t", ints(0, 2, 2, 3), 2)
    grads = [torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])]

    result, reached = unpool(grads, pooling.of("t"), 4, 2)

    assert result.tolist() == [[1.0, 2.0], [1.0, 2.0], [5.0, 6.0], [0.0, 0.0]]
    assert reached.tolist() == [True, True, True, False]


def test_an_occurrence_of_a_feature_without_outputs_still_takes_part() -> None:
    result, reached = unpool([], (Bags(ints(0, 1), ()),), 2, 2)

    assert result.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert reached.tolist() == [True, False]


# ---- pool_rows: rows of any memory, the reference's bits, gradients, every kind of bag, any thread count


THREE_ROWS = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])


# ---- by hand


def test_rows_are_summed_by_index_and_minus_one_is_a_row_of_zeros() -> None:
    bags = [Bags(ints(0, 3, 3, 5), (OutputSlice(0, 0, 0, 2),))]
    (out,) = pool_rows(THREE_ROWS, ints(2, 0, -1, -1, 1), bags, [(3, 2)])
    assert out.tolist() == [[4, 40], [0, 0], [2, 20]]
    (out,) = pool_rows(THREE_ROWS, None, [Bags(ints(0, 2, 3), (OutputSlice(0, 0, 1, 2),))], [(2, 1)])
    assert out.tolist() == [[30], [30]]


def test_an_index_into_a_flat_buffer_counts_elements() -> None:
    buffer = torch.arange(7.0)
    bags = [Bags(ints(0, 2), (OutputSlice(0, 0, 0, 4),)), Bags(ints(2, 3), (OutputSlice(1, 0, 0, 2),))]
    wide, narrow = pool_rows(buffer, ints(0, 3, 5), bags, [(1, 4), (1, 2)], dim=4)
    assert wide.tolist() == [[3, 5, 7, 9]]
    assert narrow.tolist() == [[5, 6]]  # at the end of the buffer: fewer than four elements remain


def test_weights_divisors_and_columns_left_alone() -> None:
    bags = Bags(
        ints(0, 2, 3),
        (OutputSlice(0, 1, 1, 2), OutputSlice(1, 0, 0, 2)),
        weights=torch.tensor([2, 0.5, 4], dtype=torch.float64),
        divisor=torch.tensor([4.0, 0.5]),
    )
    one, two = pool_rows(THREE_ROWS, ints(0, 1, 2), [bags], [(2, 3), (2, 2)])
    assert one.tolist() == [[0, 7.5, 0], [0, 240, 0]]
    assert two.tolist() == [[0.75, 7.5], [24, 240]]


def test_first_rows_side_by_side_with_a_step() -> None:
    parts = (OutputSlice(0, 0, 0, 1, inner=2, step=3),)
    (out,) = pool_rows(THREE_ROWS, ints(0, 1, 2, -1), [Bags(ints(0, 1, 2, 3, 4), parts)], [(2, 6)])
    assert out.tolist() == [[1, 0, 0, 2, 0, 0], [3, 0, 0, 0, 0, 0]]


def test_a_shared_feature_repeats_its_rows_and_sums_their_gradients() -> None:
    source = THREE_ROWS.clone().requires_grad_()
    bags = [
        Bags(ints(0, 4), (OutputSlice(0, 0, 0, 2),)),
        Bags(ints(4, 6), (OutputSlice(0, 0, 0, 2, accumulate=True),), shared=True),
    ]
    bags[0] = Bags(ints(0, 1, 2, 3, 4), bags[0].parts)
    (out,) = pool_rows(source, ints(0, 0, 0, 1, 1, 2), bags, [(4, 2)])
    assert out.tolist() == [[6, 60], [6, 60], [6, 60], [7, 70]]
    out.backward(torch.arange(1.0, 9.0).view(4, 2))
    assert source.grad is not None
    assert source.grad.tolist() == [[9, 12], [7 + 16, 8 + 20], [16, 20]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_types_are_summed_in_float32(dtype: torch.dtype) -> None:
    ones = torch.ones(4096, 1, dtype=dtype)
    assert segment_sum(ones, ints(0, 4096)).item() == 4096
    assert segment_sum(ones, ints(0, 4096)).dtype == dtype


def test_segment_sum() -> None:
    assert segment_sum(THREE_ROWS, ints(0, 2, 2, 3).int()).tolist() == [[3, 30], [0, 0], [3, 30]]
    assert segment_sum(THREE_ROWS[:0], ints(0, 0)).tolist() == [[0, 0]]
    assert segment_sum(THREE_ROWS[:0], ints(0)).shape == (0, 2)
    assert segment_sum(THREE_ROWS[:, :0], ints(0, 3)).shape == (1, 0)
    assert torch.equal(
        segment_sum(strided(THREE_ROWS), strided(ints(0, 1, 3))), segment_sum(THREE_ROWS, ints(0, 1, 3))
    )


def test_weights_refuse_a_gradient_rather_than_lose_it() -> None:
    weights = torch.ones(3, requires_grad=True)
    with pytest.raises(UsageError, match="weights take no gradient"):
        pool_rows(THREE_ROWS, None, [Bags(ints(0, 3), (OutputSlice(0, 0, 0, 2),), weights=weights)], [(1, 2)])


# ---- against the references


@dataclass
class Case:
    source: Tensor
    index: Tensor | None
    bags: list[Bags]
    outputs: list[tuple[int, int]]
    dim: int | None = None

    def __call__(self, source: Tensor | None = None) -> list[Tensor]:
        chosen = self.source if source is None else source
        return pool_rows(chosen, self.index, self.bags, self.outputs, dim=self.dim)

    @property
    def plan(self) -> tuple[object, ...]:
        width = self.source.shape[1] if self.dim is None else self.dim
        dtype = torch.promote_types(self.source.dtype, torch.float32)
        return self.index, width if self.dim is None else 1, width, *op_arguments(self.bags, dtype)

    def reference(self) -> list[Tensor]:
        wide = self.source.reshape(-1).to(torch.promote_types(self.source.dtype, torch.float32))
        sizes = [r for r, _ in self.outputs], [c for _, c in self.outputs]
        return [o.to(self.source.dtype) for o in _pool_reference(wide, *self.plan, *sizes, "index")]

    def reference_gradient(self, grads: list[Tensor]) -> Tensor:
        wide = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads]
        flat = _unpool_reference(wide, *self.plan, self.source.numel(), "index")
        return flat.view(self.source.shape).to(self.source.dtype)


@st.composite
def cases(draw: st.DrawFn, dtypes: list[torch.dtype] = FLOATS) -> Case:
    """Features of any kind: pooled or side by side, shared, weighted, averaged, added into one output."""
    seed, dtype = draw(st.integers(0, 2**16)), draw(st.sampled_from(dtypes))
    flat = draw(st.booleans())
    dim = draw(st.sampled_from([1, 3, 8, 16, 21, 40]))
    size = draw(st.integers(dim, 6 * dim)) if flat else draw(st.integers(1, 6)) * dim
    batch = draw(st.sampled_from([0, 1, 2, 4]))
    features: list[Bags] = []
    outputs: list[tuple[int, int]] = []
    added = draw(st.integers(1, min(dim, 9)))  # columns of output 0, which features are added into
    outputs.append((batch, added))
    indices: list[int] = []
    for _ in range(draw(st.integers(0, 4))):
        inner, shared = draw(st.sampled_from([1, 1, 3])), draw(st.booleans())
        period = draw(st.sampled_from([d for d in (1, 2, 4) if batch % d == 0])) if shared else batch
        lengths = [draw(st.integers(0, 3)) for _ in range(period * inner)]
        start = draw(st.integers(0, dim - 1))
        end = draw(st.integers(start + 1, dim))
        step = end - start + draw(st.integers(0, 2))
        column = draw(st.integers(0, 2))
        parts = [OutputSlice(len(outputs), column, start, end, inner, False, step if inner > 1 else 0)]
        outputs.append((batch, column + inner * step + 1))
        if inner == 1:
            parts.append(OutputSlice(0, 0, dim - added, dim, accumulate=True))
        reach = max(p.end for p in parts)
        last = size - reach if flat else size // dim - 1
        cuts = [len(indices)]
        for length in lengths:
            indices += [draw(st.integers(-1, last)) for _ in range(length)]
            cuts.append(len(indices))
        divisor = randn(seed + 1, len(lengths)).abs() + 0.5 if draw(st.booleans()) else None
        features.append(Bags(ints(*cuts), tuple(parts), divisor=divisor, shared=shared))
    weights = randn(seed + 2, len(indices))
    features = [replace(f, weights=weights) if draw(st.booleans()) else f for f in features]
    source = randn(seed, size if flat else size // dim, *([] if flat else [dim]), dtype=dtype)
    return Case(source, ints(*indices), features, outputs, dim if flat else None)


@fixed_examples(80, 150)
@given(case=cases())
def test_pooling_and_its_gradient_are_their_references(case: Case) -> None:
    outputs = case()
    assert_same(outputs, case.reference())
    assert_same(case(strided(case.source)), outputs)

    source = case.source.clone().requires_grad_()
    outputs = case(source)
    grads = [randn(k, *o.shape, dtype=o.dtype) for k, o in enumerate(outputs)]
    (actual,) = torch.autograd.grad(outputs, source, grads)
    assert_same(actual, case.reference_gradient(grads))


@fixed_examples(12, 30)
@given(case=cases([torch.float64]))
def test_gradcheck(case: Case) -> None:
    assert gradcheck(case, case.source.clone().requires_grad_())


# ---- threads


@pytest.mark.parametrize("dim", [8, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threads_do_not_show(dim: int, dtype: torch.dtype, restore_threads: None) -> None:
    batch, m = 3_000, 501
    per_row = torch.randint(0, 9, (batch,), generator=torch.Generator().manual_seed(0))
    cuts = torch.cat([ints(0), per_row.cumsum(0)])
    n = int(cuts[-1])
    assert n > 8192  # two shares of the gradient, several of the outputs
    first = n + torch.arange(3 * batch + 1)
    last = int(first[-1])
    index = torch.randint(-1, m, (last + 40,), generator=torch.Generator().manual_seed(1))
    weights = randn(2, last + 40)
    bags = [
        Bags(cuts, (OutputSlice(0, 0, 0, dim),), divisor=per_row.clamp(min=1).to(dtype)),
        Bags(first, (OutputSlice(1, 0, 1, dim, inner=3),), weights=weights),
        Bags(
            ints(last, last + 30), (OutputSlice(0, 0, 0, dim, accumulate=True),), weights=weights, shared=True
        ),
        Bags(last + 30 + torch.arange(11), (OutputSlice(2, 0, 0, 5),), shared=True),
    ]
    case = Case(
        randn(3, m, dim, dtype=dtype), index, bags, [(batch, dim), (batch, 3 * (dim - 1)), (batch, 5)]
    )
    source = case.source.clone().requires_grad_()

    def both() -> list[Tensor]:
        outputs = case(source)
        grads = [randn(k, *o.shape, dtype=dtype) for k, o in enumerate(outputs)]
        return [*outputs, *torch.autograd.grad(outputs, source, grads)]

    assert_threads_do_not_show(both)
    torch.set_num_threads(2)
    assert_same(case(), case.reference())


def test_threads_do_not_show_where_bags_of_one_row_are_added_to_it(restore_threads: None) -> None:
    # Three bags fill a row of the output that another bag fills alone: both are divided at the same rows.
    batch = 4_001
    bags = [
        Bags(torch.arange(batch + 1), (OutputSlice(0, 0, 0, 12),)),
        Bags(batch + torch.arange(3 * batch + 1), (OutputSlice(0, 0, 0, 4, inner=3, accumulate=True),)),
    ]
    case = Case(randn(0, 4 * batch, 12), None, bags, [(batch, 12)])

    assert_threads_do_not_show(case)

    assert_same(case(), case.reference())
