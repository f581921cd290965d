"""The tables that the tests of the cuda engine run, and which tests run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from megalith import (
    FTRL,
    SGD,
    TTL,
    Adagrad,
    Adam,
    BatchSoftmax,
    Capacity,
    Constant,
    DelayCompensated,
    MinCount,
    Momentum,
    Normal,
    Probability,
    RowWiseAdagrad,
    Segment,
    TableConfig,
    TruncatedNormal,
    Uniform,
    Zeros,
)
from megalith.table import Optimizer
from tests.table.support import OPTIMIZERS as FOR_ANY_DIM

ON_GPU = torch.cuda.is_available()
Test = TypeVar("Test", bound=Callable[..., None])


def gpu_or_soak(test: Test) -> Test:
    """A test that runs on a GPU, and in Triton's interpreter, which is slow, only in `make soak`."""
    return test if ON_GPU else pytest.mark.soak(test)


def cases(values: Iterable[object], *in_interpreter: object) -> list[Any]:
    """Parameters of a test; without a GPU, those that are not in `in_interpreter` run only in `make soak`."""
    marks = () if ON_GPU else (pytest.mark.soak,)
    return [pytest.param(value, marks=() if value in in_interpreter else marks) for value in values]


class Halving(Optimizer):
    """A user's optimizer, which has no kernel."""

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        rows.copy_(0.5 * rows - lr * grads)


OPTIMIZERS: dict[str, Optimizer] = {
    **FOR_ANY_DIM,
    "batch_softmax": BatchSoftmax(),
    "delay_compensated_rowwise": DelayCompensated(RowWiseAdagrad(0.1, initial_accumulator_value=0.1)),
    "in_torch": Halving(0.1),
}
"""Every optimizer of the library with its variants, and one that runs in torch."""

CONFIGS: dict[str, TableConfig] = {
    "segments": TableConfig(
        "t",
        segments=[
            Segment(1, optimizer=FTRL(0.5, beta=1.0, l1=0.25), initializer=Zeros()),
            Segment(5, optimizer=Adam(0.1), initializer=Normal(0.0, 1.0)),
            Segment(3, optimizer=Adagrad(0.1, initial_accumulator_value=0.1)),
        ],
    ),
    "zeros": TableConfig("t", dim=6, optimizer=Adagrad(0.1), missing="zeros", initializer=Uniform()),
    "float16": TableConfig(
        "t",
        segments=[
            Segment(3, optimizer=SGD(0.5), precision="float16", rounding="stochastic"),
            Segment(2, optimizer=Momentum(0.1), initializer=Normal(0.0, 1.0)),
            Segment(4, optimizer=Adagrad(0.1), precision="bfloat16", initializer=TruncatedNormal(0.0, 1.0)),
        ],
    ),
    "in_torch": TableConfig(
        "t",
        segments=[Segment(4, optimizer=Halving(0.1)), Segment(2, optimizer=SGD(0.5), precision="bfloat16")],
        eviction=TTL(6),
    ),
    "ttl": TableConfig("t", dim=4, optimizer=SGD(0.5), eviction=TTL(5)),
    "min_count": TableConfig("t", dim=4, optimizer=Adam(0.1), admission=MinCount(3)),
    "few_counted": TableConfig(
        "t", dim=3, optimizer=SGD(0.5), admission=MinCount(3, max_ids=6), eviction=Capacity(rows=10)
    ),
    "probability": TableConfig("t", dim=4, optimizer=SGD(0.5), admission=Probability(0.4)),
    "lru": TableConfig("t", dim=3, optimizer=SGD(0.5), eviction=Capacity(rows=10)),
    "lfu": TableConfig("t", dim=3, optimizer=Adagrad(0.1), eviction=(TTL(9), Capacity(rows=10, score="lfu"))),
    "function": TableConfig(
        "t",
        dim=3,
        optimizer=SGD(0.5),
        initializer=Constant(0.5),
        eviction=Capacity(rows=10, score=lambda chunk: chunk.ids.to(float) % 7),
    ),
}
"""Segments, precisions, policies."""


def tables_of(dims: Sequence[int], optimizer: str, **options: object) -> list[TableConfig]:
    chosen = OPTIMIZERS[optimizer]
    return [TableConfig(f"t{dim}", dim=dim, optimizer=chosen, **options) for dim in dims]  # type: ignore[arg-type]


def segmented(name: str, widths: Sequence[int], precisions: Sequence[str]) -> TableConfig:
    optimizers = (FTRL(0.5, beta=1.0, l1=0.25), Adam(0.1), Adagrad(0.1, initial_accumulator_value=0.1))
    segments = [
        Segment(
            width,
            optimizer=optimizer,
            initializer=Normal(0.0, 1.0),
            precision=precision,
            rounding="stochastic" if precision == "float16" else "nearest",
        )
        for width, optimizer, precision in zip(widths, optimizers, precisions, strict=True)
    ]
    return TableConfig(name, segments=segments)


FLOATS, MIXED = ("float32",) * 3, ("float16", "float32", "bfloat16")
GROUPS: dict[str, list[TableConfig]] = {
    **{name: tables_of((5, 8, 6), name) for name in ("sgd", "adagrad", "rowwise_adagrad", "amsgrad_row")},
    **{name: tables_of((3, 4), name) for name in ("lamb_row", "group_adagrad", "delay_compensated_adam")},
    "wide": tables_of((300, 400), "adagrad"),
    "atomic": tables_of((5, 8), "adam", deterministic=False),
    "segments": [segmented(f"t{w}", w, FLOATS) for w in ((1, 5, 3), (1, 8, 4), (1, 6, 4))],
    "precisions": [segmented(f"t{w}", w, MIXED) for w in ((3, 5, 3), (4, 8, 4), (3, 8, 4))],
    "atomic_segments": [
        TableConfig(f"t{w}", segments=segmented("t", w, MIXED).segments, deterministic=False)
        for w in ((3, 5, 3), (4, 8, 4))
    ],
    "in_torch": [TableConfig(f"t{dim}", dim=dim, optimizer=Halving(0.1)) for dim in (3, 4)],
    "options": [
        TableConfig("a", dim=5, optimizer=Adagrad(0.1), missing="zeros"),
        TableConfig("b", dim=8, optimizer=Adagrad(0.5), initializer=Zeros(), device_bytes=4096),
        TableConfig("c", dim=7, optimizer=Adagrad(0.2), eviction=Capacity(rows=10**6, score="lfu")),
    ],
}
"""Tables that share launches."""
