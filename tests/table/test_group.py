"""Calls over all tables at once: the bits of one call per table, for any layout, precision and policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalith import SGD, Adagrad, Adam, LocalShards, MinCount, Normal, Table, TableConfig
from megalith.errors import InputError, UnknownNameError, UsageError
from megalith.ops import Bags, OutputSlice, Pooling
from megalith.table import Optimizer
from tests.fixed_examples import fixed_examples
from tests.table.support import assert_same_bits, assert_same_tables, ints, whole


class Halving(Optimizer):
    """A step written in torch."""

    def update(self, rows: Tensor, grads: Tensor, state: object, lr: float, step: int) -> None:
        rows -= lr * (grads + rows / 2)


CONFIGS = st.builds(
    TableConfig,
    st.just("t"),
    dim=st.sampled_from([1, 3, 8, 16, 20, 70]),
    optimizer=st.sampled_from([SGD(0.1), Adagrad(0.1), Adam(0.1), Halving(0.1)]),
    initializer=st.just(Normal()),
    precision=st.sampled_from(["float32", "float16", "bfloat16"]),
    missing=st.sampled_from(["initial", "zeros"]),
    admission=st.sampled_from([None, None, MinCount(2)]),
)


@dataclass
class Batch:
    """Ids by table, how they are pooled, and a gradient per output."""

    ids: dict[str, Tensor]
    pooling: Pooling
    grads: list[Tensor]


def make_batch(configs: list[TableConfig], rows: int, seed: int) -> Batch:
    """Two features per table: side by side in one output, and their first columns added up in another."""
    generator = torch.Generator().manual_seed(seed)

    def below(n: int, *shape: int) -> Tensor:
        return torch.randint(0, n, shape, generator=generator)

    width = sum(config.dim for config in configs)
    ids: dict[str, Tensor] = {}
    bags: dict[str, tuple[Bags, ...]] = {}
    column = 0
    for number, config in enumerate(configs):
        ends = below(3, 2 * rows + 2).cumsum(0)  # some bags are empty; a gap between the features
        first, second = ends[: rows + 1], ends[rows + 1 :]
        n = int(ends[-1]) + number  # some occurrences are in no bag
        ids[config.name] = below(40 + 10 * rows, n) << 40
        weights = torch.randn(n, generator=generator) if number % 2 else None
        divisor = 1.0 + below(5, rows).float() if number % 3 else None
        whole_row = OutputSlice(0, column, 0, config.dim)
        added = OutputSlice(1, 0, 0, 1, accumulate=True)
        bags[config.name] = (
            Bags(first.contiguous(), (whole_row,), weights, divisor),
            Bags(second.contiguous(), (added,), weights),
        )
        column += config.dim
    # Gradients as autograd returns them: columns of a wider tensor, and one row for all.
    wide = torch.randn(rows, width + 5, generator=generator)
    grads = [wide[:, 2 : 2 + width], torch.randn(1, 1, generator=generator).expand(rows, 1)]
    return Batch(ids, Pooling(((rows, width), (rows, 1)), bags), grads)


@fixed_examples(15, 100)
@given(st.lists(CONFIGS, min_size=1, max_size=4), st.sampled_from([0, 1, 7, 2500]), st.integers(0, 2**32))
def test_all_tables_together_equal_one_at_a_time(configs: list[TableConfig], rows: int, seed: int) -> None:
    configs = [replace(config, name=f"t{k}") for k, config in enumerate(configs)]
    single = {config.name: Table(config) for config in configs}
    batches = [make_batch(configs, rows, seed + k) for k in range(2)]
    expected = []
    threads = torch.get_num_threads()
    for step, batch in enumerate(batches):
        outputs = batch.pooling.new_outputs()
        for name, table in single.items():
            found = table.find(batch.ids[name])
            table.read(found, batch.ids[name], batch.pooling, out=outputs)
        expected.append(outputs)
        dense = [grad.clone() for grad in batch.grads]
        for name, table in single.items():
            table.update(None, batch.ids[name], dense, batch.pooling, step=step, time=step)

    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            shards = LocalShards(configs)
            for step, batch in enumerate(batches):
                lookup = shards.lookup(batch.ids)
                for actual, wanted in zip(lookup.pool(batch.pooling), expected[step], strict=True):
                    assert_same_bits(actual, wanted)
                shards.apply_gradients(lookup, batch.grads, pooling=batch.pooling, step=step, time=step)
            for name, table in single.items():
                assert_same_tables(whole(shards.local[name]), whole(table))
    finally:
        torch.set_num_threads(threads)


def test_an_error_names_its_table_and_writes_nothing() -> None:
    shards = sgd_shards()
    asked = {"a": ints(1, 2), "b": ints(3)}
    good = Bags(ints(0, 2), (OutputSlice(0, 0, 0, 2),))
    beyond = Bags(ints(0, 2), (OutputSlice(0, 2, 0, 2),))
    pooling = Pooling(((1, 4),), {"a": (good,), "b": (beyond,)})

    with pytest.raises(InputError, match="table 'b': offsets: beyond the number of ids"):
        shards.lookup(asked).pool(pooling)
    with pytest.raises(InputError, match="table 'b'"):
        shards.apply_gradients(shards.lookup(asked), [torch.ones(1, 4)], pooling=pooling, step=0)

    assert [len(table) for table in shards.local.values()] == [0, 0]


def test_rows_found_by_a_pool_serve_the_update_and_later_reads() -> None:
    shards = sgd_shards("a")
    shards.assign({"a": (ints(1, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))})
    lookup = shards.lookup({"a": ints(2, 1, 2)})
    pooling = Pooling.sum("a", ints(0, 3), 2)

    (out,) = lookup.pool(pooling)
    shards.remove({"a": ints(1)})  # the row numbers of the pool are of an older epoch now
    shards.apply_gradients(lookup, [torch.ones(1, 2)], pooling=pooling, step=0)

    assert out.tolist() == [[7.0, 10.0]]
    assert lookup.gather("a").tolist()[0] == [3.0 - 2.0, 4.0 - 2.0]
    assert 1 in shards.local["a"]


# ---- lookups and consumers of several tables


def sgd_shards(names: str = "ab") -> LocalShards:
    return LocalShards([TableConfig(name, dim=2, optimizer=SGD(1.0)) for name in names])


def test_a_lookup_notices_ids_changed_in_place() -> None:
    shards, ids = sgd_shards(), ints(1, 2)
    lookup = shards.lookup({"a": ids})
    ids.add_(10)
    with pytest.raises(UsageError, match="table 'a': its ids were changed"):
        shards.apply_gradients(lookup, {"a": torch.ones(2, 2)}, step=0)
    assert len(shards.local["a"]) == 0
    assert "a" in lookup.rows
    assert "b" not in lookup.rows


def test_a_failed_call_leaves_the_lookup_usable() -> None:
    shards = sgd_shards()
    lookup = shards.lookup({"a": ints(1)})
    for wrong in ({"scale": float("nan")}, {"time": -1.0}, {"step": -1}):
        with pytest.raises(InputError):
            shards.apply_gradients(lookup, {"a": torch.ones(1, 2)}, **{"step": 0, **wrong})  # type: ignore[arg-type]
    shards.apply_gradients(lookup, {"a": torch.ones(1, 2)}, step=0)
    assert len(shards.local["a"]) == 1


def test_one_table_without_the_consumer_drains_none() -> None:
    shards = sgd_shards()
    shards.local["a"].track("x")
    shards.assign({"a": (ints(1), torch.zeros(1, 2))})
    with pytest.raises(UnknownNameError, match="table 'b'"):
        shards.drain_touched("x")
    assert shards.local["a"].drain_touched("x")[0].tolist() == [1]
