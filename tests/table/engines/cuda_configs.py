"""The tables that the tests of the cuda engine run, and which tests run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from megalith import (
    FTRL,
    LAMB,
    SGD,
    TTL,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    AMSGrad,
    BatchSoftmax,
    Capacity,
    Constant,
    DelayCompensated,
    DynamicWdAdagrad,
    GroupAdagrad,
    GroupFTRL,
    Lion,
    MinCount,
    Momentum,
    MovingAverage,
    Normal,
    Probability,
    RMSProp,
    RMSPropV2,
    RowWiseAdagrad,
    Segment,
    TableConfig,
    TruncatedNormal,
    Uniform,
    Zeros,
)
from megalith.table import Optimizer

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
    "sgd": SGD(0.5),
    "momentum": Momentum(0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": Momentum(0.1, momentum=0.9, nesterov=True),
    "adagrad": Adagrad(0.1, initial_accumulator_value=0.1, weight_decay=0.01),
    "rowwise_adagrad": RowWiseAdagrad(0.1, initial_accumulator_value=0.1, weight_decay=0.01),
    "adam": Adam(0.1, weight_decay=0.01),
    "adam_nesterov": Adam(0.1, nesterov=True),
    "adam_row": Adam(0.1, weight_decay=0.01, bias_correction="row"),
    "amsgrad_row": AMSGrad(0.1, betas=(0.9, 0.5), bias_correction="row"),
    "adamw": AdamW(0.1, weight_decay=0.1),
    "amsgrad": AMSGrad(0.1, betas=(0.9, 0.5)),
    "ftrl": FTRL(0.5, beta=1.0, l1=0.25, l2=0.125),
    "lion": Lion(0.1, weight_decay=0.01),
    "rmsprop": RMSProp(0.1, weight_decay=0.01, eps=1e-3),
    "rmsprop_v2": RMSPropV2(0.1, weight_decay=0.01, eps=1e-3),
    "adadelta": Adadelta(weight_decay=0.01, eps=1e-3),
    "dynamic_wd_adagrad": DynamicWdAdagrad(0.1, initial_accumulator_value=0.1, weight_decay=0.1),
    "moving_average": MovingAverage(momentum=0.8),
    "lamb": LAMB(0.1, weight_decay=0.01),
    "lamb_row": LAMB(0.1, bias_correction="row"),
    "group_adagrad": GroupAdagrad(0.1, l2=0.5, weight_decay=0.01),
    "group_ftrl": GroupFTRL(0.5, l1=1.0, l2=0.125),
    "batch_softmax": BatchSoftmax(),
    "delay_compensated": DelayCompensated(Adagrad(0.1, initial_accumulator_value=0.1), strength=0.5),
    "delay_compensated_adam": DelayCompensated(Adam(0.1, bias_correction="row", nesterov=True)),
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
