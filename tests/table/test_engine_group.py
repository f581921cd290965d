"""CpuEngineGroup: one call over all tables has the bits of one call per table, for tables of every kind."""

from __future__ import annotations

import pytest
import torch
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
    TableConfig,
)
from megalith.errors import InputError, TableFullError, UnknownNameError, UsageError
from megalith.ops import Bags, OutputSlice, Pooling
from megalith.table.engines.cpu import CpuEngineGroup
from megalith.table.engines.group import EngineGroup
from tests.ops.support import with_threads
from tests.table.support import (
    TorchSGD,
    assert_same_bits,
    assert_same_tables,
    found_blocks,
    ints,
    unchanged,
    whole,
)


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
    for step, size in enumerate((7, 1, 2500, 0, 9)):
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
    ids, found, one_by_one = found_blocks(shards, counts)
    group, ours = shards.engines, torch.empty_like(one_by_one)

    assert isinstance(group, CpuEngineGroup)
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
            group.read_blocks(ids, found, counts, torch.empty(ours.numel() + 1))


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
