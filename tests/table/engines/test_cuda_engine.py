"""The cuda engine against the reference engine: random programs of calls.

Without a GPU the kernels run in the interpreter of Triton at small sizes: a few cases in `make test`, the
others in `make soak`. `make test-gpu` runs all of them with larger sizes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalith import (
    SGD,
    Adagrad,
    Adam,
    Capacity,
    EmbeddingCollection,
    Feature,
    Layout,
    Mean,
    Ragged,
    Segment,
    Slice,
    Table,
    TableConfig,
    Uniform,
    Zeros,
    checkpoint,
)
from megalith.errors import InputError, UsageError
from megalith.library import native_module
from megalith.ops import Bags, OutputSlice, Pooling
from megalith.table import Chunk, Optimizer
from megalith.table.engines import shard_capacity
from megalith.table.engines.cuda import triton_runtime
from megalith.table.engines.cuda.engine_group import CudaEngineGroup
from megalith.table.engines.cuda.step_rules import find_rule
from megalith.table.optimizers import OPTIMIZERS as LIBRARY
from tests.table.engines.cuda_configs import CONFIGS, ON_GPU, OPTIMIZERS, Halving, cases, gpu_or_soak
from tests.table.engines.programs import Program, everything

SIZES = {"distinct": 3000, "batch": 5000} if ON_GPU else {"distinct": 12, "batch": 9}
CALLS = 60 if ON_GPU else 8


@pytest.mark.parametrize(
    "name", cases(OPTIMIZERS, "adam_row", "group_ftrl", "delay_compensated_rowwise", "in_torch")
)
def test_steps_of_each_optimizer(name: str) -> None:
    optimizer: Optimizer = OPTIMIZERS[name]
    dim = 1 if name == "batch_softmax" else 5
    config = TableConfig("t", dim=dim, optimizer=optimizer, initializer=Uniform())
    Program(config, 3, calls=("update", "lookup"), **SIZES).run(CALLS // 4)


def test_every_optimizer_of_the_library_has_a_kernel() -> None:
    without = {name for name, optimizer in OPTIMIZERS.items() if find_rule(optimizer) is None}
    assert without == {"in_torch"}
    assert {type(optimizer) for optimizer in OPTIMIZERS.values()} - {Halving} == set(LIBRARY.values())


@gpu_or_soak
def test_the_bias_correction_of_a_row_with_a_large_update_count() -> None:
    config = TableConfig("t", dim=2, optimizer=Adam(0.1, bias_correction="row"), initializer=Zeros())
    tables = [Table(config, engine=name) for name in ("cuda", "reference")]
    for table in tables:
        table.assign(torch.arange(4), torch.zeros(4, 2), time=0)
        chunk = everything(table)
        chunk.state["0/count"].copy_(torch.tensor([[0.0], [1000.0], [12345.0], [2.0**24]]))
        table.restore(chunk)
        table.apply_gradients(torch.arange(4), torch.ones(4, 2), step=0, time=0)
    got, expected = (table.lookup(torch.arange(4)) for table in tables)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-6, atol=0.0)


@gpu_or_soak
def test_a_search_for_low_scores_in_parts_removes_the_rows_of_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard_capacity, "MIN_PART", 4)
    Program(CONFIGS["function"], 5, distinct=20, batch=5, calls=("update", "assign")).run(CALLS)


def test_a_score_function_gets_tensors_on_the_device_of_the_table() -> None:
    devices = set()

    def score(chunk: Chunk) -> torch.Tensor:
        tensors = (chunk.ids, chunk.rows, chunk.time, chunk.count, chunk.step, *chunk.state.values())
        devices.update(x.device for x in tensors if x is not None)
        return chunk.rows[:, 0] + chunk.state["0/sum"][:, 0]

    config = TableConfig(
        "t", dim=1, optimizer=Adagrad(0.1), initializer=Zeros(), eviction=Capacity(rows=3, score=score)
    )
    table = Table(config, engine="cuda")
    table.assign(torch.arange(3), torch.tensor([[3.0], [1.0], [2.0]]))
    table.assign(torch.tensor([9]), torch.tensor([[0.5]]))
    assert sorted(everything(table).ids.tolist()) == [0, 2, 9]
    assert devices == {triton_runtime.find_device()}


@pytest.mark.parametrize("name", cases(CONFIGS, "segments", "lfu", "few_counted"))
def test_programs_of_calls(name: str) -> None:
    for seed in range(2 if ON_GPU else 1):
        sizes = dict(SIZES) if CONFIGS[name].capacity is None else {"distinct": 20, "batch": 9}
        Program(CONFIGS[name], 11 + seed, **sizes).run(CALLS)


@pytest.mark.parametrize("engine", ["reference", "cuda"])
def test_every_write_is_touched(engine: str) -> None:
    table = Table(TableConfig("t", dim=1, optimizer=SGD(1.0)), engine=engine)
    table.track("publisher")
    table.assign(torch.tensor([1]), torch.ones(1, 1))
    table.apply_gradients(torch.tensor([2, 3]), torch.ones(2, 1), step=0)
    table.remove(torch.tensor([3, 4]))
    updated, removed = table.drain_touched("publisher")
    assert (sorted(updated.tolist()), removed.tolist()) == ([1, 2], [3])


@pytest.mark.skipif(native_module() is None, reason="the native module is not built for this Python")
@pytest.mark.parametrize("name", cases(CONFIGS, "min_count"))
def test_programs_of_calls_against_the_cpu_engine(name: str) -> None:
    sizes = dict(SIZES) if CONFIGS[name].capacity is None else {"distinct": 20, "batch": 9}
    Program(CONFIGS[name], 21, engines=("cuda", "cpu"), **sizes).run(CALLS)


@gpu_or_soak
def test_repeated_steps_of_the_same_sizes_use_their_memory_again() -> None:
    configs = [
        TableConfig("a", dim=4, optimizer=Adagrad(0.1)),
        TableConfig("b", dim=4, optimizer=Adagrad(0.2), missing="initial"),
    ]
    features = [Feature("x", "a"), Feature("y", "b")]
    layouts = [Layout("both", [Slice("x", 0, 4), Slice("y", 0, 4)])]
    collections = [
        EmbeddingCollection(configs, features, layouts=layouts, engine=name) for name in ("cuda", "reference")
    ]
    outputs: list[list[torch.Tensor]] = [[], []]
    for collection, own in zip(collections, outputs, strict=True):
        for step in range(8 if ON_GPU else 5):  # from the third step on, memory and launches are used again
            columns = {
                "x": torch.tensor([1, 5, step], device=collection.shards.device),
                "y": torch.tensor([9, 9, 4 + step], device=collection.shards.device),
            }
            ahead = collection(columns)  # a lookup that is not followed by an update
            out = collection(columns)["both"]
            own.append(out.detach().cpu())
            (out * out).sum().backward()
            del ahead
    for got, expected in zip(*outputs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    group = collections[0].shards.engines
    assert isinstance(group, CudaEngineGroup)
    assert [len(slots) for slots in group._slots._slots.values()] == [2]


def test_a_row_with_a_sum_that_is_not_finite_is_skipped_and_reported() -> None:
    table = Table(TableConfig("t", dim=2, optimizer=SGD(1.0), initializer=Zeros()), engine="cuda")
    grads = torch.tensor([[3e38, 0.0], [3e38, 0.0], [1.0, 1.0]])
    table.apply_gradients(torch.tensor([1, 1, 2]), grads, step=0)
    assert table.lookup(torch.tensor([1, 2])).tolist() == [[0.0, 0.0], [-1.0, -1.0]]
    with pytest.raises(InputError, match="table 't': 1 rows got gradients with NaN or Inf"):
        table.stats()
    assert table.stats().rows == 2


def test_a_checkpoint_moves_between_engines_with_the_same_bits(tmp_path: Path) -> None:
    config = TableConfig("t", dim=4, optimizer=Adagrad(0.1))
    columns = {"x": torch.tensor([5, 9, 5])}
    models = [
        EmbeddingCollection([config], [Feature("x", "t")], engine=name) for name in ("cuda", "reference")
    ]
    models[0](columns)["x"].sum().backward()
    checkpoint.save(models[0], tmp_path / "one")
    checkpoint.load(models[1], tmp_path / "one")
    checkpoint.save(models[1], tmp_path / "two")
    models[0].shards.clear()
    checkpoint.load(models[0], tmp_path / "two")
    got, expected = (everything(model.tables["t"]) for model in models)
    assert torch.equal(got.rows, expected.rows)
    assert torch.equal(got.state["0/sum"], expected.state["0/sum"])


def test_without_a_gpu_the_engine_raises_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_runtime, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r'engine="cuda" needs an NVIDIA GPU .* use engine="cpu"'):
        Table(TableConfig("t", dim=1, optimizer=SGD(0.1)), engine="cuda")


@pytest.mark.parametrize("engine", ["cuda", "reference"])
def test_bags_of_one_occurrence_each_must_match_their_offsets(engine: str) -> None:
    table = Table(TableConfig("t", dim=2, optimizer=SGD(1.0)), engine=engine)
    ids, parts = torch.tensor([7, 8, 9]), (OutputSlice(0, 0, 0, 2),)
    beyond = Pooling(((2, 2),), {"t": (Bags(torch.tensor([1, 2, 3]), parts, first=2),)})
    with pytest.raises(InputError, match="first=2 says that 2 bags have one occurrence each"):
        table.read(table.find(ids), ids, beyond)
    single = Pooling(((2, 2),), {"t": (Bags(torch.tensor([1, 2, 3]), parts, first=1),)})
    (out,) = table.read(table.find(ids), ids, single)
    assert torch.equal(out.cpu(), table.lookup(ids[1:]).cpu())


# ---- updates with atomic additions equal those of the reference engine within rounding


ATOMIC = {
    "one": TableConfig("t", dim=5, optimizer=Adam(0.1), deterministic=False),
    "segments": TableConfig(
        "t",
        segments=[Segment(2, optimizer=SGD(0.5), precision="bfloat16"), Segment(3, optimizer=Adam(0.1))],
        deterministic=False,
    ),
}


@gpu_or_soak
@pytest.mark.parametrize("name", ATOMIC)
def test_programs_of_updates_with_atomic_additions(name: str) -> None:
    calls = ("update", "update", "update_pooled", "lookup")
    # The gradients are multiples of 1/64: their sums are exact in any order.
    Program(ATOMIC[name], 5, calls=calls, **SIZES).run(60 if ON_GPU else 5)


@gpu_or_soak
def test_tables_with_and_without_atomic_additions_train_alike() -> None:
    column = Ragged.from_lists([[1, 2, 1], [4], [3, 1]])
    results = []
    for deterministic in (True, False):
        configs = [
            TableConfig(name, dim=3, optimizer=Adam(0.1), deterministic=deterministic) for name in ("a", "b")
        ]
        collection = EmbeddingCollection(
            configs, [Feature("x", "a"), Feature("y", "b", combiner=Mean())], engine="cuda"
        )
        for _ in range(2):
            out = collection({"x": column, "y": column})
            (out["x"] * out["y"] + out["x"]).sum().backward()
        results.append([everything(collection.tables[name]).rows for name in ("a", "b")])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_atomic_additions_that_are_not_finite_are_skipped_and_the_next_call_is_clean() -> None:
    table = Table(TableConfig("t", dim=2, optimizer=SGD(1.0), deterministic=False), engine="cuda")
    ids = torch.tensor([1, 1, 2])
    table.assign(torch.tensor([1, 2]), torch.zeros(2, 2))
    table.apply_gradients(ids, torch.tensor([[3e38, 0.0], [3e38, 0.0], [1.0, 1.0]]), step=0)
    with pytest.raises(InputError, match="1 rows got gradients with NaN or Inf"):
        table.stats()
    table.apply_gradients(ids, torch.ones(3, 2), step=1)
    assert table.lookup(torch.tensor([1, 2])).tolist() == [[-2.0, -2.0], [-2.0, -2.0]]
