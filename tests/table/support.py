"""Helpers of the table tests: complete tables as values, and comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megalith import (
    FTRL,
    LAMB,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    AMSGrad,
    DelayCompensated,
    DynamicWdAdagrad,
    GroupAdagrad,
    GroupFTRL,
    Lion,
    LocalShards,
    Momentum,
    MovingAverage,
    RMSProp,
    RMSPropV2,
    RowWiseAdagrad,
    Table,
    TableConfig,
    Zeros,
)
from megalith.ops import Bags, OutputSlice, Pooling
from megalith.table import Chunk, Initializer, Optimizer
from megalith.table.engines.group import EngineGroup
from megalith.table.table_data import FoundRows

if TYPE_CHECKING:  # the tests on a GPU run without the native module
    from megalith import _native
    from megalith.table.engines.cpu import CpuEngine


class TorchSGD(Optimizer):
    """SGD written in torch, which the cpu engine runs outside of the native table."""

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        rows -= lr * grads


LOWEST, HIGHEST = -(2**63), 2**63 - 1
EXTREME_IDS = (0, -1, 1, LOWEST, LOWEST + 1, HIGHEST, HIGHEST - 1, 2**32, -(2**32), 2**31)

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(0.5),
    "momentum": Momentum(0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": Momentum(0.1, momentum=0.9, nesterov=True),
    "adagrad": Adagrad(0.1, initial_accumulator_value=0.1, weight_decay=0.01),
    "rowwise_adagrad": RowWiseAdagrad(0.1, initial_accumulator_value=0.1, weight_decay=0.01),
    "adam": Adam(0.1, weight_decay=0.01),
    "adam_row": Adam(0.1, weight_decay=0.01, bias_correction="row"),
    "adam_nesterov": Adam(0.1, nesterov=True),
    "adamw": AdamW(0.1, weight_decay=0.1),
    "amsgrad": AMSGrad(0.1, betas=(0.9, 0.5)),
    "amsgrad_row": AMSGrad(0.1, betas=(0.9, 0.5), bias_correction="row", weight_decay=0.01),
    "lamb": LAMB(0.1, weight_decay=0.01),
    "lamb_row": LAMB(0.1, bias_correction="row"),
    "lion": Lion(0.1, weight_decay=0.01),
    "adadelta": Adadelta(weight_decay=0.01, eps=1e-3),
    "rmsprop": RMSProp(0.1, weight_decay=0.01, eps=1e-3),
    "rmsprop_v2": RMSPropV2(0.1, weight_decay=0.01, eps=1e-3),
    "ftrl": FTRL(0.5, beta=1.0, l1=0.25, l2=0.125),
    "group_ftrl": GroupFTRL(0.5, l1=1.0, l2=0.125),
    "group_adagrad": GroupAdagrad(0.1, l2=0.5, weight_decay=0.01),
    "dynamic_wd_adagrad": DynamicWdAdagrad(0.1, initial_accumulator_value=0.1, weight_decay=0.1),
    "moving_average": MovingAverage(momentum=0.8),
    "delay_compensated": DelayCompensated(
        Adagrad(0.1, initial_accumulator_value=0.1, weight_decay=0.01), strength=0.5
    ),
    "delay_compensated_adam": DelayCompensated(Adam(0.1, bias_correction="row", nesterov=True)),
}
"""Every optimizer of the library that trains rows of any dim, so without BatchSoftmax."""


def ints(*values: int) -> Tensor:
    """An int64 tensor."""
    return torch.tensor(values, dtype=torch.int64)


def sgd_table(
    engine: str,
    dim: int = 2,
    *,
    name: str = "t",
    optimizer: Optimizer | None = None,
    initializer: Initializer | None = None,
    missing: str = "initial",
    seed: int = 0,
) -> Table:
    """A table of one segment; by default SGD with rate 1 and initial rows of zeros."""
    config = TableConfig(
        name,
        dim=dim,
        optimizer=SGD(1.0) if optimizer is None else optimizer,
        initializer=Zeros() if initializer is None else initializer,
        missing=missing,
    )
    return Table(config, engine=engine, seed=seed)


def cpu_table(config: TableConfig, **options: Any) -> Table:
    """A table of the cpu engine with options that users do not have: kernels, max_rows."""
    from megalith.table.engines.cpu import CpuEngine

    table = Table(config)
    table.engine_impl = CpuEngine(config, **options)
    return table


def native_table(table: Table) -> _native.Table:
    """The native object of a table of the cpu engine."""
    engine: CpuEngine = table.engine_impl  # type: ignore[assignment]
    return engine._native


def summed(table: str, offsets: Tensor, dim: int, **bags: Tensor) -> Pooling:
    """Like Pooling.sum, with weights and divisor."""
    parts = (OutputSlice(0, 0, 0, dim),)
    return Pooling(((offsets.numel() - 1, dim),), {table: (Bags(offsets, parts, **bags),)})


def dyadic(seed: int, *shape: int) -> Tensor:
    """Multiples of 1/64 between -2 and 2: sums of them are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 129, shape, generator=generator).to(torch.float32) / 64


def life(table: Table) -> Chunk:
    """Flat, pooled, weighted and averaged training, some removal; then the whole table."""
    generator = torch.Generator().manual_seed(table.dim)
    offsets = torch.arange(0, 301, 5)
    for step in range(4):
        ids = torch.randint(-40, 40, (300,), generator=generator) << 33
        table.apply_gradients(ids, torch.randn(300, table.dim, generator=generator), step=step, time=step)
        grads = [torch.randn(60, table.dim, generator=generator)]
        for fields in (
            {},
            {"weights": torch.randn(300, generator=generator)},
            {"divisor": torch.full((60,), 5.0)},
        ):
            pooling = summed("t", offsets, table.dim, **fields)
            (out,) = table.read(table.find(ids), ids, pooling)
            table.update(table.find(ids), ids, grads, pooling, step=step, time=step)
            table.assign_add(ids[:60], out * 0.01, time=step)
        table.remove(ids[:5])
    return whole(table)


def whole(table: Table, chunk_size: int = 65536) -> Chunk:
    """All rows of a table, by ascending id."""
    chunks = list(table.scan(chunk_size))
    if not chunks:
        empty = {c.key: torch.empty(0, c.end - c.start) for c in table.config.state_columns}
        return Chunk(ints(), torch.empty(0, table.dim), empty, ints())
    ids = torch.cat([c.ids for c in chunks])
    order = torch.argsort(ids)
    assert torch.unique(ids).numel() == ids.numel() == len(table), "scan: each row exactly once"
    return Chunk(
        ids[order],
        torch.cat([c.rows for c in chunks])[order],
        {key: torch.cat([c.state[key] for c in chunks])[order] for key in chunks[0].state},
        torch.cat([c.time for c in chunks])[order],
    )


Found = tuple[dict[str, Tensor], dict[str, FoundRows], Tensor]


def found_blocks(shards: LocalShards, counts: Tensor) -> Found:
    """Ids for peers that ask for counts[peer, table], where they are, and their rows read table by table."""
    generator, device = torch.Generator().manual_seed(1), next(iter(shards.local.values())).engine_impl.device
    drawn = [torch.randint(0, 20, (n,), generator=generator) for n in counts.sum(0).tolist()]
    ids = {name: own.to(device) for name, own in zip(shards.local, drawn, strict=True)}
    shards.assign({n: (own[:3], torch.randn(own[:3].numel(), shards.local[n].dim)) for n, own in ids.items()})
    found = shards.engines.find({name: own for name, own in ids.items() if own.numel()})
    rows = torch.empty(sum(own.numel() * shards.local[name].dim for name, own in ids.items()), device=device)
    EngineGroup.read_blocks(shards.engines, ids, found, counts, rows, step=0)
    return ids, found, rows


def contents(chunks: list[Chunk]) -> dict[int, list[float]]:
    """All columns of chunks by id; each id may come once."""
    rows: dict[int, list[float]] = {}
    for chunk in chunks:
        counted = [x[:, None].float() for x in (chunk.time, chunk.count, chunk.step) if x is not None]
        wide = torch.cat([*chunk.columns(), *counted], 1)
        for id, row in zip(chunk.ids.tolist(), wide.tolist(), strict=True):
            assert id not in rows
            rows[id] = row
    return rows


def bits(values: Tensor) -> Tensor:
    """Floats as their bit patterns, so that -0.0 is not 0.0 and NaN is itself."""
    return values.detach().contiguous().view(torch.int32)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal to the last bit."""
    assert actual.dtype == expected.dtype == torch.float32
    assert actual.shape == expected.shape
    different = (bits(actual) != bits(expected)).nonzero()
    assert different.numel() == 0, (
        f"{len(different)} values differ, first at {different[0].tolist()}: "
        f"{actual[tuple(different[0])]} != {expected[tuple(different[0])]}"
    )


def assert_same_tables(actual: Chunk, expected: Chunk) -> None:
    """Checks that both hold the same ids with the same weights, state and times, bit for bit."""
    assert actual.ids.tolist() == expected.ids.tolist()
    assert actual.time.tolist() == expected.time.tolist()
    assert_same_bits(actual.rows, expected.rows)
    assert actual.state.keys() == expected.state.keys()
    for key in expected.state:
        assert_same_bits(actual.state[key], expected.state[key])


def assert_close(actual: Tensor, expected: Tensor, rtol: float = 1e-6, atol: float = 1e-7) -> None:
    """Equal within the tolerance for optimizer steps."""
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


@contextmanager
def unchanged(table: Table) -> Iterator[None]:
    """Checks that the code inside the `with` block does not change the table."""
    before, epoch = whole(table), table.epoch
    yield
    assert_same_tables(whole(table), before)
    assert table.epoch == epoch


def as_sets(drained: tuple[Tensor, Tensor]) -> tuple[set[int], set[int]]:
    """Updated and removed ids of a drain; each id may come once."""
    assert all(ids.dtype == torch.int64 and ids.dim() == 1 for ids in drained)
    updated, removed = (ids.tolist() for ids in drained)
    assert len(set(updated)) == len(updated)
    assert len(set(removed)) == len(removed)
    return set(updated), set(removed)


def state_of(table: Table, id: int) -> Mapping[str, list[float]]:
    """The optimizer state of one id."""
    all_rows = whole(table)
    at = all_rows.ids.tolist().index(id)
    return {key: values[at].tolist() for key, values in all_rows.state.items()}


def train_rows(
    engine: str, optimizer: Optimizer, weights: Tensor, grads: list[Tensor], *, first_step: int = 0
) -> Table:
    """Rows 0..n-1 start at `weights` and take one step per gradient."""
    table = sgd_table(engine, weights.shape[1], optimizer=optimizer)
    ids = torch.arange(weights.shape[0])
    table.assign(ids, weights)
    for number, grad in enumerate(grads):
        table.apply_gradients(ids, grad, step=first_step + number)
    return table


def training_example(rows: int = 3, dim: int = 5, steps: int = 6) -> tuple[Tensor, list[Tensor]]:
    """Weights [rows, dim] and one gradient per step."""
    generator = torch.Generator().manual_seed(rows * 1000 + dim)
    weights = torch.randn(rows, dim, generator=generator)
    return weights, [torch.randn(rows, dim, generator=generator) for _ in range(steps)]
