"""Tables of different dims that share launches: the same bits as tables with launches of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalith import (
    SGD,
    Adagrad,
    Capacity,
    EmbeddingCollection,
    Feature,
    Layout,
    LocalShards,
    Mean,
    Normal,
    Ragged,
    Slice,
    TableConfig,
)
from megalith.ops import Bags, OutputSlice, Pooling
from megalith.table.engines.cuda import triton_runtime
from megalith.table.engines.cuda.engine_group import CudaEngineGroup
from megalith.table.engines.cuda.row_layout import shared_number
from megalith.table.engines.group import Found
from megalith.table.table_data import Update
from tests.table.engines.cuda_configs import GROUPS, ON_GPU, cases, gpu_or_soak
from tests.table.engines.programs import everything

IDS, MOST = (3000, 1000) if ON_GPU else (9, 7)


def kinds(shards: LocalShards) -> list[list[str]]:
    group = shards.engines
    assert isinstance(group, CudaEngineGroup)
    return [shared.names for shared in group._shared]


def random_ids(generator: torch.Generator) -> Tensor:
    count = int(torch.randint(1, IDS, (), generator=generator))
    return torch.randint(0, MOST, (count,), generator=generator)


@pytest.mark.parametrize("name", cases(GROUPS, "adagrad"))
def test_lookups_and_updates_have_the_bits_of_tables_alone(name: str) -> None:
    configs = GROUPS[name]
    together = LocalShards(configs, engine="cuda")
    alone = {config.name: LocalShards([config], engine="cuda") for config in configs}
    reference = LocalShards(configs, engine="reference")
    assert kinds(together) == [[config.name for config in configs]]
    generator = torch.Generator().manual_seed(0)
    exact = name not in ("atomic", "atomic_segments")  # sums by atomic additions have no fixed order
    for step in range(4 if ON_GPU else 3):
        ids = {config.name: random_ids(generator) for config in configs if step != 2 or config.dim % 2}
        grads = {
            n: torch.randn(own.numel(), together.local[n].dim, generator=generator) for n, own in ids.items()
        }
        lookup = together.lookup(ids)
        for table, own in ids.items():
            own_rows = alone[table].lookup({table: own}).rows[table]
            assert torch.equal(lookup.rows[table], own_rows) or (step > 0 and not exact)
        together.apply_gradients(lookup, grads, step=step, time=step, scale=0.5)
        reference.apply_gradients(ids, grads, step=step, time=step, scale=0.5)
        for table, own in ids.items():
            alone[table].apply_gradients({table: own}, {table: grads[table]}, step=step, time=step, scale=0.5)

    for config in configs:
        got, expected = (
            everything(together.local[config.name]),
            everything(alone[config.name].local[config.name]),
        )
        assert got.ids.tolist() == expected.ids.tolist()
        assert got.time.tolist() == expected.time.tolist()
        torch.testing.assert_close(
            got.rows, expected.rows, rtol=0 if exact else 1e-2, atol=0 if exact else 1e-2
        )
        for key, column in got.state.items():
            tolerance = 0.0 if exact else 1e-3  # atomic sums of hot rows, in any order
            torch.testing.assert_close(column, expected.state[key], rtol=tolerance, atol=tolerance)
        if config.counted:
            tables = together.local[config.name], alone[config.name].local[config.name]
            one, other = (next(iter(table.scan(MOST))) for table in tables)
            assert one.count is not None
            assert other.count is not None
            assert torch.equal(one.count, other.count)
            assert int(one.count.max()) > 1
        if all(segment.precision == "float32" for segment in config.segments):
            torch.testing.assert_close(
                got.rows,
                everything(reference.local[config.name]).rows,
                rtol=1e-6,
                atol=1e-6 if exact else 1e-5,
            )


@pytest.mark.parametrize(
    "name", cases(["adagrad", "segments", "precisions", "wide", "options"], "precisions")
)
def test_reads_of_the_blocks_of_peers(name: str) -> None:
    configs = GROUPS[name]
    shards = LocalShards(configs, engine="cuda")
    generator = torch.Generator().manual_seed(1)
    for config in configs:
        known = torch.arange(0, MOST, 2)
        shards.local[config.name].assign(known, torch.randn(known.numel(), config.dim, generator=generator))
    ids = {config.name: torch.randint(0, MOST, (5,), generator=generator) for config in configs}
    counts = torch.tensor([[2] * len(configs), [3] * len(configs)])
    out = torch.empty(sum(5 * config.dim for config in configs), device=shards.device)
    shards.engines.read_blocks(ids, shards.engines.find(ids), counts, out)
    expected = [
        shards.local[config.name].lookup(ids[config.name]).to(out)[start:end].flatten()
        for start, end in ((0, 2), (2, 5))
        for config in configs
    ]
    assert torch.equal(out, torch.cat(expected))


@gpu_or_soak
def test_a_collection_of_tables_of_different_dims_trains_as_on_the_reference_engine() -> None:
    configs = [
        TableConfig("a", dim=5, optimizer=Adagrad(0.1)),
        TableConfig("b", dim=8, optimizer=Adagrad(0.2), initializer=Normal(0.0, 0.1), missing="zeros"),
        TableConfig("c", dim=6, optimizer=Adagrad(0.1)),
        TableConfig("d", dim=4, optimizer=Adagrad(0.1)),
    ]
    features = [Feature("x", "a"), Feature("y", "b", combiner=Mean()), Feature("z", "c"), Feature("w", "d")]
    layouts = [
        Layout("all", [Slice("x", 0, 5), Slice("y", 1, 8), Slice("z", 0, 6), Slice("w", 0, 4)]),
        Layout("some", [Slice("y", 0, 1), Slice("z", 2, 5), Slice("x", 0, 3)]),
        Layout("sum", [Slice("x", 0, 4), Slice("y", 2, 6), Slice("z", 1, 5)], kind="add"),
    ]
    columns = {
        "x": Ragged.from_lists([[1, 2, 1], [], [3]]),
        "y": Ragged.from_lists([[2], [4, 4], [1, 5]]),
        "z": Ragged.from_lists([[7], [7], [9]]),
        "w": Ragged.from_lists([[1], [2], [3]]),
    }
    for used in (None, layouts):
        collections = [
            EmbeddingCollection(configs, features, layouts=used, engine=name)
            for name in ("cuda", "reference")
        ]
        for _ in range(5):
            results = [collection(columns) for collection in collections]
            for key, value in results[0].items():
                torch.testing.assert_close(value.cpu(), results[1][key], rtol=1e-6, atol=1e-7)
            for out in results:
                sum((value * value).sum() + value.sum() for value in out.values()).backward()
        assert isinstance(collections[0].shards, LocalShards)
        assert kinds(collections[0].shards) == [["a", "b", "c"], ["d"]]
        for config in configs:
            got, expected = (everything(collection.tables[config.name]) for collection in collections)
            assert got.ids.tolist() == expected.ids.tolist()
            torch.testing.assert_close(got.rows, expected.rows, rtol=1e-6, atol=1e-7)


def test_tables_of_different_dims_use_one_set_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pooling and updating several tables takes as many launches as for one of them."""
    launches: list[str] = []
    plain = triton_runtime.LaunchedKernel.bind

    def counting(kernel: triton_runtime.LaunchedKernel, **constants: object) -> triton_runtime.Bound:
        bound = plain(kernel, **constants)

        def launch(*arguments: object) -> None:
            launches.append(kernel._kernel.__name__)
            bound(*arguments)

        return launch

    monkeypatch.setattr(triton_runtime.LaunchedKernel, "bind", counting)
    found = []
    for configs in (GROUPS["adagrad"][:1], GROUPS["adagrad"]):
        shards = LocalShards(configs, engine="cuda")
        ids = {config.name: torch.arange(4, device=shards.device) for config in configs}
        parts = {c.name: (OutputSlice(k, 0, 0, c.dim),) for k, c in enumerate(configs)}
        offsets = torch.tensor([0, 1, 4], device=shards.device)
        pooling = Pooling(
            tuple((2, c.dim) for c in configs), {n: (Bags(offsets, own),) for n, own in parts.items()}
        )
        grads = [torch.ones(2, c.dim, device=shards.device) for c in configs]
        update = Update(0, 0, 1.0, 0.0, {key: [0.1] for key in ids})
        launches.clear()
        found_rows = Found()
        shards.engines.pool(ids, found_rows, pooling)
        shards.engines.update(ids, found_rows, dict.fromkeys(ids, grads), pooling, update)
        found.append(sorted(launches))
    assert found[0] == found[1]
    assert "walk_chunks" in found[0]


def test_a_shared_number_is_the_number_or_minus_a_common_divisor() -> None:
    assert shared_number([64, 64]) == 64
    assert shared_number([0, 0]) == 0
    assert shared_number([12, 8]) == -4
    assert shared_number([48, 16, 32]) == -16
    assert shared_number([128, 64]) == -16
    assert shared_number([5, 8]) == -1
    assert shared_number([0, 8]) == -8


def test_tables_of_other_optimizers_precisions_or_padded_dims_have_launches_of_their_own() -> None:
    configs = [
        TableConfig("a", dim=5, optimizer=SGD(0.1)),
        TableConfig("b", dim=8, optimizer=SGD(0.5)),
        TableConfig("c", dim=9, optimizer=SGD(0.1)),
        TableConfig("d", dim=8, optimizer=SGD(0.1), precision="float16"),
        TableConfig("e", dim=8, optimizer=Adagrad(0.1)),
        TableConfig("f", dim=7, optimizer=Adagrad(0.1, eps=1e-3)),
    ]
    assert kinds(LocalShards(configs, engine="cuda")) == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]


def test_a_table_without_gradients_keeps_its_step() -> None:
    configs = [
        TableConfig("a", dim=5, optimizer=SGD(0.1)),
        TableConfig("b", dim=8, optimizer=SGD(0.1), eviction=Capacity(rows=100, score="step")),
    ]
    steps = []
    for engine in ("cuda", "reference"):
        shards = LocalShards(configs, engine=engine)
        shards.apply_gradients({"b": torch.arange(3)}, {"b": torch.ones(3, 8)}, step=1)
        shards.apply_gradients({"a": torch.arange(3)}, {"a": torch.ones(3, 5)}, step=1000)
        shards.assign({"b": (torch.arange(5, 7), torch.zeros(2, 8))})
        chunk = next(iter(shards.local["b"].scan(10)))
        assert chunk.step is not None
        steps.append(dict(zip(chunk.ids.tolist(), chunk.step.tolist(), strict=True)))
    assert steps[0] == steps[1] == {0: 1, 1: 1, 2: 1, 5: 1, 6: 1}
