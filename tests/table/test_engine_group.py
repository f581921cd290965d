"""CpuEngineGroup: one call over all tables has the bits of one call per table, for tables of every kind."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalith import (
    SGD,
    Adagrad,
    Adam,
    Capacity,
    EmbeddingCollection,
    Feature,
    FirstN,
    FixedPoint,
    Layout,
    LocalShards,
    Mean,
    MinCount,
    Normal,
    OneBit,
    Ragged,
    Segment,
    Slice,
    Sqrtn,
    Table,
    TableConfig,
)
from megalith.errors import InputError, TableFullError, UnknownNameError, UsageError
from megalith.ops import Bags, OutputSlice, Pooling
from megalith.table import Optimizer
from megalith.table.engines.cpu import CpuEngineGroup
from megalith.table.engines.group import EngineGroup
from tests.fixed_examples import fixed_examples
from tests.ops.support import with_threads
from tests.table.support import TorchSGD, assert_same_bits, assert_same_tables, ints, unchanged, whole


def first_column(chunk: object) -> Tensor:
    """A score in torch."""
    rows: Tensor = chunk.rows  # type: ignore[attr-defined]
    return rows[:, 0]


CONFIGS = [
    TableConfig("wide", dim=16, optimizer=Adagrad(0.1), initializer=Normal()),
    TableConfig("rounded", dim=9, optimizer=SGD(0.1), serving=FixedPoint(1.0)),
    TableConfig("half", dim=20, optimizer=Adam(0.1), precision="float16", missing="zeros"),
    TableConfig("torch", dim=3, optimizer=TorchSGD(0.1)),
    TableConfig("signs", dim=8, optimizer=SGD(0.1), serving=OneBit()),
    TableConfig(
        "mixed",
        segments=[Segment(5, optimizer=SGD(0.1)), Segment(7, optimizer=Adagrad(0.1), precision="bfloat16")],
        admission=MinCount(2),
    ),
    TableConfig("scored", dim=70, optimizer=SGD(0.1), eviction=[Capacity(rows=30, score=first_column)]),
    TableConfig("frozen", dim=4, optimizer=SGD(0.1), trainable=False),
    TableConfig("bounded", dim=2, optimizer=SGD(0.1), eviction=[Capacity(rows=25, score="lru")]),
]
FEATURES = [
    *(Feature(f"{config.name} sum", config.name) for config in CONFIGS),
    Feature("wide mean", "wide", combiner=Mean()),
    Feature("mixed root", "mixed", combiner=Sqrtn()),
    Feature("half first", "half", combiner=FirstN(2)),
    Feature("bounded all", "bounded", shared=True),
]
LAYOUTS = [
    # Tables with and without a view are added to one output, in this order.
    Layout("added", [Slice(f"{config.name} sum", 0, 2) for config in CONFIGS], kind="add"),
    Layout("beside", [Slice(f.name, 0, 2) for f in FEATURES if f.name != "half first"], kind="concat"),
    Layout("first", [Slice("half first", 1, 20)], kind="none"),
    Layout("long", [Slice("scored sum", 0, 70), Slice("wide mean", 3, 16)], kind="concat"),
]


def batch(step: int, size: int) -> dict[str, Ragged]:
    random = torch.Generator().manual_seed(step)
    columns = {}
    for feature in FEATURES:
        lengths = torch.randint(0, 4, (1 if feature.shared else size,), generator=random)
        n = int(lengths.sum())
        weights = torch.rand(n, generator=random) if feature.name.startswith("w") else None
        columns[feature.name] = Ragged.from_lengths(
            torch.randint(0, 20, (n,), generator=random), lengths, weights
        )
    return columns


def gradients(outputs: list[Tensor], step: int) -> list[Tensor]:
    """Gradients whose rows are apart, equal, or not contiguous."""
    random = torch.Generator().manual_seed(step)
    found = []
    for number, output in enumerate(outputs):
        flat = torch.randn(output.shape[0], output[0:1].numel() if len(output) else 1, generator=random)
        wide = torch.full((flat.shape[0], flat.shape[1] + 3), torch.nan)  # what lies between rows is not read
        wide[:, 2:-1] = flat
        kinds = (wide[:, 2:-1], flat[:1].expand_as(flat), flat.T.contiguous().T, torch._neg_view(flat))
        found.append(kinds[(number + step) % 4].reshape(output.shape))
    return found


def train(group: type[EngineGroup], update: str) -> tuple[LocalShards, list[Tensor]]:
    shards = LocalShards(CONFIGS, seed=7)
    shards.engines = group({name: table.engine_impl for name, table in shards.local.items()})
    collection = EmbeddingCollection(
        shards, FEATURES, layouts=LAYOUTS, update=update, clip_norm=0.5, allow_micro_steps=True
    )
    seen: list[Tensor] = []
    for step, size in enumerate((7, 1, 12, 0, 9)):
        result = collection(batch(step, size), time=step)
        outputs = [result["added"], result["beside"], *result["first"], result["long"]]
        seen += [output.detach().clone() for output in outputs]
        if step == 2:  # between forward and backward: rows are found again
            shards.remove({name: torch.arange(5) for name in shards.configs})
        used = outputs[:-1] if step == 1 else outputs  # an output without a gradient
        torch.autograd.backward(used, gradients(used, step))
        if update == "step" and step % 2:
            collection.step()
    return shards, seen


@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_group_has_the_bits_of_its_tables(update: str, restore_threads: None) -> None:
    torch.set_num_threads(1)
    expected, outputs = train(EngineGroup, update)

    for _ in with_threads(1, 3):
        shards, seen = train(CpuEngineGroup, update)

        for actual, output in zip(seen, outputs, strict=True):
            assert_same_bits(actual, output)
        for name, table in shards.local.items():
            assert_same_tables(whole(table), whole(expected.local[name]))
            assert table.engine_impl.counters() == expected.local[name].engine_impl.counters()


def test_a_table_that_is_full_after_admission_leaves_all_tables_unchanged() -> None:
    admission, eviction = MinCount(2), [Capacity(rows=2)]
    full = TableConfig("full", dim=1, optimizer=SGD(1.0), admission=admission, eviction=eviction)
    counted = TableConfig("counted", dim=1, optimizer=SGD(1.0), admission=admission)
    bounded = TableConfig("bounded", dim=1, optimizer=SGD(1.0), eviction=[Capacity(rows=3, score="lru")])
    shards = LocalShards([counted, bounded, full])
    shards.apply_gradients({"bounded": ints(7, 8, 9)}, {"bounded": torch.ones(3, 1)}, step=0)
    ids = {"counted": ints(1, 2), "bounded": ints(1, 2), "full": ints(1, 1, 2, 2, 3, 3)}
    grads = {"counted": torch.ones(2, 1), "bounded": torch.ones(2, 1), "full": torch.ones(6, 1)}

    counted_table, bounded_table = shards.local["counted"], shards.local["bounded"]
    with unchanged(counted_table), unchanged(bounded_table), pytest.raises(TableFullError):
        shards.apply_gradients(ids, grads, step=1)

    assert counted_table.pending()[0].numel() == 0
    assert bounded_table.drain_evicted().numel() == 0
    assert len(shards.local["full"]) == 0
    ids["full"] = ints(1, 1, 2, 2, 3, 4)  # 3 and 4 are refused
    shards.apply_gradients(ids, grads, step=1)
    assert counted_table.pending()[0].tolist() == [1, 2]
    assert len(bounded_table) == 3
    assert len(shards.local["full"]) == 2


@pytest.mark.parametrize("views", [False, True])
def test_rows_of_several_peers_are_read_by_peer_then_table(views: bool, restore_threads: None) -> None:
    generator = torch.Generator().manual_seed(0)
    chosen = [config for config in CONFIGS if views or config.name not in ("rounded", "signs")]
    shards = LocalShards(chosen, seed=3)
    counts = torch.randint(0, 9, (3, len(shards.local)), generator=generator)
    counts[1] = 0
    ids = {
        name: torch.randint(0, 20, (int(n),), generator=generator)
        for name, n in zip(shards.local, counts.sum(0), strict=True)
    }
    shards.assign(
        {name: (own[:3], torch.randn(own[:3].numel(), shards.local[name].dim)) for name, own in ids.items()}
    )
    group = shards.engines
    found = group.find({name: own for name, own in ids.items() if own.numel()})
    size = sum(own.numel() * shards.local[name].dim for name, own in ids.items())
    ours, one_by_one = torch.empty(size), torch.empty(size)

    assert isinstance(group, CpuEngineGroup)
    EngineGroup.read_blocks(group, ids, found, counts, one_by_one, step=0)
    for _ in with_threads(1, 2):
        group.read_blocks(ids, found, counts, ours.fill_(torch.nan), step=0)
        assert_same_bits(ours, one_by_one)
    if not views:
        for wrong, message in ((counts + 1, "more than there are ids"), (counts[:1], "fewer than")):
            with pytest.raises(InputError, match=message):
                group.read_blocks(ids, found, wrong, ours)
        with pytest.raises(InputError, match="too small"):
            group.read_blocks(ids, found, counts, ours[1:].clone())
        with pytest.raises(InputError, match="too large"):
            group.read_blocks(ids, found, counts, torch.empty(size + 1))


# ---- any layout, precision and policy


class Halving(Optimizer):
    """A step written in torch."""

    def update(self, rows: Tensor, grads: Tensor, state: object, lr: float, step: int) -> None:
        rows -= lr * (grads + rows / 2)


ANY_CONFIG = st.builds(
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
@given(st.lists(ANY_CONFIG, min_size=1, max_size=4), st.sampled_from([0, 1, 7, 2500]), st.integers(0, 2**32))
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
