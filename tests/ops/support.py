"""What the tests of ops share: awkward ids, awkward tensors, and equality to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

LOWEST, HIGHEST = -(2**63), 2**63 - 1
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int32, torch.int64]

# Few enough for repeats, and the ends of the range.
SOME_IDS = st.one_of(st.integers(-3, 12), st.sampled_from([LOWEST, LOWEST + 1, HIGHEST, HIGHEST - 1, 2**32]))
INT32_IDS = st.one_of(st.integers(-3, 12), st.sampled_from([-(2**31), 2**31 - 1]))


@st.composite
def id_tensors(draw: st.DrawFn, max_size: int = 40) -> Tensor:
    """int64 or int32 [n], contiguous or not."""
    dtype = draw(st.sampled_from(INTEGERS))
    values = draw(st.lists(SOME_IDS if dtype == torch.int64 else INT32_IDS, max_size=max_size))
    tensor = torch.tensor(values, dtype=dtype)
    return strided(tensor) if draw(st.booleans()) else tensor


@st.composite
def splits(draw: st.DrawFn, n: int, max_rows: int = 6) -> Tensor:
    """int64 [rows + 1] from 0 to n."""
    cuts = sorted(draw(st.lists(st.integers(0, n), min_size=1, max_size=max_rows)))
    return torch.tensor([0, *cuts[1:], n])


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def strided(tensor: Tensor) -> Tensor:
    """Equal, with gaps between its elements."""
    wide = torch.stack([tensor, torch.zeros_like(tensor)], -1)
    return wide[..., 0]


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, device="cpu").to(dtype)
    return values.to(torch.get_default_device())


def assert_same(actual: Any, expected: Any) -> None:
    """Tensors (or lists and tuples of them) equal in type, shape and every bit."""
    if not isinstance(expected, Tensor):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            assert_same(a, e)
        return
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    a, e = (
        torch.cat([x.detach().flatten(), x.new_zeros(1)]) for x in (actual, expected)
    )  # surely contiguous
    assert torch.equal(a.view(torch.uint8), e.view(torch.uint8)), (actual, expected)


def with_threads(*counts: int) -> Iterator[int]:
    """Sets the number of threads to each in turn; use the fixture restore_threads."""
    for count in counts:
        torch.set_num_threads(count)
        yield count


def assert_threads_do_not_show(compute: Callable[[], Any]) -> None:
    """The same bits from one thread and from two; use the fixture restore_threads."""
    one, two = ([*compute()] for _ in with_threads(1, 2))
    assert_same(two, one)
