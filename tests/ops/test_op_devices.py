"""The ops on the device that is there, a GPU or the CPU, give the results of the references on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import Ragged, Router
from megalith.ops import (
    Bags,
    OutputSlice,
    bucketize,
    dedup,
    gather,
    gather_pieces,
    match,
    place_rows,
    pool_rows,
    scatter_pieces,
    scatter_sum,
    segment_sum,
    split_rows,
)
from megalith.routing import MODES
from tests.op_implementations import use_references
from tests.ops.support import HIGHEST, LOWEST, assert_same

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N = 100_000 if DEVICE == "cuda" else 500


class Inputs:
    """The same random tensors on any device. Floats are multiples of 1/64: sums are exact in any order."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(0)

    def ids(self, n: int = N, dtype: torch.dtype = torch.int64) -> Tensor:
        ids = torch.randint(-n // 4, n // 4, (n,), generator=self._generator)
        if dtype == torch.int64:
            ids[:4] = torch.tensor([LOWEST, HIGHEST, 0, -1])
        return ids.to(dtype).to(self.device)

    def index(self, below: int, n: int = N) -> Tensor:
        return torch.randint(0, below, (n,), generator=self._generator).to(self.device)

    def floats(self, *shape: int) -> Tensor:
        values = torch.randint(-128, 129, shape, generator=self._generator).to(torch.float32) / 64
        return values.to(self.device).requires_grad_()

    def splits(self, rows: int, n: int = N) -> Tensor:
        inner = torch.randint(0, n + 1, (rows - 1,), generator=self._generator).sort().values
        return torch.cat([torch.tensor([0]), inner, torch.tensor([n])]).to(self.device)


def with_gradients(outputs: list[Tensor], *sources: Tensor) -> list[Tensor]:
    """Outputs, and the gradients of a sum of them with different factors."""
    total = sum(((k + 1) * out).sum() for k, out in enumerate(outputs))
    assert isinstance(total, Tensor)
    return [*outputs, *torch.autograd.grad(total, sources)]


def deduped(inputs: Inputs, dtype: torch.dtype, mode: str) -> list[Tensor]:
    router = Router(mode, 5, block_size=3 if mode == "continuous" else None)
    found = dedup(inputs.ids(dtype=dtype), inputs.splits(3), router, widths=[4, 2, 1])
    assert found.offsets is not None
    return [found.ids, found.first, found.counts, found.inverse, found.offsets]


def bucketized(inputs: Inputs) -> list[Tensor]:
    column = Ragged(inputs.ids(), inputs.splits(50), inputs.floats(N).detach())
    found = bucketize(column, Router("hash_roundrobin", 4))
    assert found.weights is not None
    return [found.lengths, found.indices, found.weights, found.permute]


def pooled(inputs: Inputs, weighted: bool) -> list[Tensor]:
    source, rows = inputs.floats(300, 8), 40
    cuts = inputs.splits(2 * rows)
    weights = inputs.floats(N).detach() if weighted else None
    divisor = torch.full((rows,), 4.0, device=inputs.device) if weighted else None
    bags = [
        Bags(cuts[: rows + 1], (OutputSlice(0, 0, 0, 8), OutputSlice(1, 0, 2, 5)), weights, divisor),
        Bags(cuts[rows:], (OutputSlice(0, 0, 0, 8, accumulate=True),)),
    ]
    index = inputs.index(301) - 1  # -1 is a row of zeros
    return with_gradients(pool_rows(source, index, bags, [(rows, 8), (rows, 3)]), source)


def split(inputs: Inputs) -> list[Tensor]:
    rows = inputs.floats(N, 3)
    return with_gradients(split_rows(rows, inputs.index(4), 4), rows)


def placed(inputs: Inputs) -> list[Tensor]:
    rows, order = inputs.floats(N, 3), inputs.index(2**40).argsort(stable=True)
    return with_gradients([place_rows(rows, order)], rows)


def gathered(inputs: Inputs) -> list[Tensor]:
    source = inputs.floats(70, 6)
    pieces = gather_pieces(source, [inputs.index(400), inputs.index(400)], [6, 3])
    return with_gradients([gather(source, inputs.index(70)), *pieces], source)


def scattered(inputs: Inputs) -> list[Tensor]:
    rows, wide = inputs.floats(N, 4), inputs.floats(N, 2)
    sums = scatter_sum(rows, inputs.index(90), 90)
    pieces = scatter_pieces([rows, wide], [inputs.index(500), inputs.index(500)], 600)
    return with_gradients([sums, pieces], rows, wide)


def summed(inputs: Inputs) -> list[Tensor]:
    values = inputs.floats(N, 5)
    return with_gradients([segment_sum(values, inputs.splits(60))], values)


def matched(inputs: Inputs) -> list[Tensor]:
    return [match(inputs.ids(), inputs.ids(), missing_ok=True)]


def owned(inputs: Inputs, dtype: torch.dtype, mode: str, skip: bool) -> list[Tensor]:
    router = Router(mode, 7, block_size=1000 if mode == "continuous" else None, skip_first=skip)
    ids = inputs.ids(dtype=dtype)
    return [router.owner(ids), *([router.local_index(ids)] if mode == "continuous" else [])]


CASES: dict[str, Callable[[Inputs], list[Tensor]]] = {
    "bucketize": bucketized,
    "pool": lambda inputs: pooled(inputs, False),
    "pool with weights": lambda inputs: pooled(inputs, True),
    "split": split,
    "place": placed,
    "gather": gathered,
    "scatter": scattered,
    "segment sum": summed,
    "match": matched,
}
for _type in (torch.int64, torch.int32):
    for _mode in MODES:
        CASES[f"dedup {_mode} {_type}"] = lambda inputs, t=_type, m=_mode: deduped(inputs, t, m)  # type: ignore[misc]
        for _skip in (False, True):
            CASES[f"owner {_mode} {_type} {_skip}"] = (  # type: ignore[misc]
                lambda inputs, t=_type, m=_mode, s=_skip: owned(inputs, t, m, s)
            )


@pytest.mark.parametrize("name", CASES)
def test_an_op_on_the_device_equals_its_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    actual: list[Any] = CASES[name](Inputs(DEVICE))
    assert {tensor.device.type for tensor in actual} == {DEVICE}
    use_references(monkeypatch)
    monkeypatch.setattr(Router, "owner", Router.owner_reference)
    expected = CASES[name](Inputs("cpu"))
    assert_same([tensor.cpu() for tensor in actual], expected)
