"""Pooling: pure data, its checks, and the torch references that define what engines compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalith.errors import InputError
from megalith.ops import Bags, OutputSlice, Pooling, pool, unpool

ROWS = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]])


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


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


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_unpool_is_the_backward_of_pool(data: st.DataObject, seed: int) -> None:
    dim, rows = 4, data.draw(st.integers(1, 3))
    n = data.draw(st.integers(0, 10))
    generator = torch.Generator().manual_seed(seed)
    features, columns, begin = [], 0, 0
    for _ in range(data.draw(st.integers(1, 3))):
        inner = data.draw(st.sampled_from([1, 2]))
        bags = inner * rows
        cuts = data.draw(st.lists(st.integers(begin, n), min_size=bags + 1, max_size=bags + 1))
        offsets = sorted(cuts)
        begin = offsets[-1]
        start = data.draw(st.integers(0, dim - 1))
        end = data.draw(st.integers(start + 1, dim))
        parts = (
            OutputSlice(0, columns, start, end, inner),
            OutputSlice(1, 0, 0, 1, inner, accumulate=True),
        )
        columns += inner * (end - start)
        weights = torch.randn(n, generator=generator) if data.draw(st.booleans()) else None
        divisor = torch.rand(bags, generator=generator) + 1 if data.draw(st.booleans()) else None
        features.append(Bags(ints(*offsets), parts, weights, divisor))
    pooling = Pooling(((rows, columns), (rows, 2)), {"t": tuple(features)})
    pooling.check("t", n, dim)
    source = torch.randn(n, dim, generator=generator, requires_grad=True)
    grads = [torch.randn(shape, generator=generator) for shape in pooling.outputs]

    outputs = [torch.zeros(shape) for shape in pooling.outputs]
    pool(source, pooling.of("t"), outputs)
    loss = sum((out * grad).sum() for out, grad in zip(outputs, grads, strict=True))
    (expected,) = torch.autograd.grad(loss + 0 * source.sum(), source)
    actual, reached = unpool(grads, pooling.of("t"), n, dim)

    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert bool((expected[~reached] == 0).all())


# ---- check


def test_a_matching_pooling_passes() -> None:
    pooling = one_feature(
        ints(0, 1, 3, 3), OutputSlice(0, 1, 0, 2), (3, 4), weights=torch.ones(3), divisor=torch.ones(3)
    )

    pooling.check("t", 3, 2)
    pooling.check("other", 0, 1)


@pytest.mark.parametrize(
    ("offsets", "tensors", "part", "message"),
    [
        (ints(0, 2, 1), {}, {}, "offsets must ascend"),
        (ints(-1, 1, 2), {}, {}, "offsets must ascend"),
        (ints(0, 1, 4), {}, {}, "within 3 occurrences"),
        (ints(0, 1, 3).int(), {}, {}, "offsets must be int64"),
        (ints(0, 1, 3)[None], {}, {}, "offsets must be int64"),
        (ints(), {}, {}, "offsets must be int64"),
        ([0, 1, 3], {}, {}, "offsets must be int64"),
        (ints(0, 3), {}, {}, "1 bags do not fill 2 output rows"),
        (ints(0, 1, 3), {"weights": torch.ones(2)}, {}, r"weights must be float32 \[3\]"),
        (ints(0, 1, 3), {"weights": torch.ones(3).double()}, {}, "weights must be float32"),
        (ints(0, 1, 3), {"divisor": torch.ones(3)}, {}, r"divisor must be float32 \[2\]"),
        (ints(0, 1, 3), {"divisor": [1.0, 1.0]}, {}, r"divisor must be float32 \[2\]"),
        (ints(0, 1, 3), {}, {"output": 1}, "no output number 1"),
        (ints(0, 1, 3), {}, {"output": -1}, "no output number -1"),
        (ints(0, 1, 3), {}, {"end": 3}, "slice 0:3 is outside rows of 2 columns"),
        (ints(0, 1, 3), {}, {"start": -1}, "slice -1:2"),
        (ints(0, 1, 3), {}, {"start": 2}, "slice 2:2"),
        (ints(0, 1, 3), {}, {"inner": 0}, "bags do not fill"),
        (ints(0, 1, 3), {}, {"inner": 2}, "bags do not fill"),
        (ints(0, 1, 3), {}, {"column": -1}, "outside the columns of output 0"),
        (ints(0, 1, 3), {}, {"column": 1}, "outside the columns of output 0"),
    ],
)
def test_a_pooling_that_does_not_match_raises(
    offsets: Any, tensors: dict[str, Any], part: dict[str, Any], message: str
) -> None:
    fields = {"output": 0, "column": 0, "start": 0, "end": 2, **part}
    pooling = Pooling(((2, 2),), {"user": (Bags(offsets, (OutputSlice(**fields),), **tensors),)})

    with pytest.raises(InputError, match=message) as raised:
        pooling.check("user", 3, 2)
    assert "'user'" in str(raised.value)


def test_features_of_a_table_follow_each_other() -> None:
    part = (OutputSlice(0, 0, 0, 2),)
    pooling = Pooling(((1, 2),), {"t": (Bags(ints(0, 2), part), Bags(ints(1, 3), part))})

    with pytest.raises(InputError, match="ascend from feature to feature"):
        pooling.check("t", 3, 2)
