"""Tables of the cuda engine with more rows than their budget of GPU memory: rows in host memory."""

from __future__ import annotations

import pytest
import torch

from megalith import SGD, TTL, Adagrad, Capacity, EmbeddingCollection, Feature, Table, TableConfig, Zeros
from megalith.errors import InputError
from megalith.table.engines import score_search
from megalith.table.engines.cuda.engine import CudaEngine
from tests.table.engines.cuda_configs import CONFIGS
from tests.table.engines.programs import Program, everything

ON_GPU = torch.cuda.is_available()
SIZES = {"distinct": 5000, "batch": 3000} if ON_GPU else {"distinct": 60, "batch": 24}

WITHOUT_CAPACITY = [name for name, config in CONFIGS.items() if config.capacity is None]


def budget(rows: int, config: TableConfig) -> int:
    """Bytes of so many rows."""
    return rows * CudaEngine(config).layout.stride


def limited(config: TableConfig, rows: int) -> TableConfig:
    return TableConfig(
        config.name,
        segments=config.segments,
        admission=config.admission,
        eviction=config.eviction,
        missing=config.missing,
        device_bytes=budget(rows, config),
    )


@pytest.mark.parametrize("seed", range(4 if ON_GPU else 1))
def test_programs_of_calls_beyond_the_budget(seed: int) -> None:
    config = limited(TableConfig("t", dim=3, optimizer=Adagrad(0.1), eviction=TTL(50)), 16)
    program = Program(config, 7 + seed, **SIZES)
    program.run(40 if ON_GPU else 8)
    use = program.tables[0].stats().host_tier
    assert use is not None
    assert use.host_rows > 0


@pytest.mark.parametrize("name", WITHOUT_CAPACITY if ON_GPU else ["float16", "min_count"])
def test_programs_of_calls_beyond_the_budget_with_segments_and_policies(name: str) -> None:
    program = Program(limited(CONFIGS[name], 16), 210, **SIZES)
    program.run(40 if ON_GPU else 6)
    program.tables[0].engine_impl.return_memory(1 << 30)
    program.compare()


def test_rows_in_use_move_to_the_gpu_and_the_hit_rate_shows_it() -> None:
    config = limited(TableConfig("t", dim=2, optimizer=SGD(1.0), initializer=Zeros()), 16)
    table = Table(config, engine="cuda")
    table.assign(torch.arange(100), torch.zeros(100, 2))
    before = table.stats().host_tier
    assert before is not None
    assert (before.device_rows, before.host_rows, before.hit_rate) == (16, 84, 1.0)

    hot = torch.arange(50, 58)  # in host memory
    for step in range(4):
        table.apply_gradients(hot, torch.ones(8, 2), step=step)

    use = table.stats().host_tier
    assert use is not None
    # The first two updates find the rows in host memory; the second moves them.
    assert (use.hits, use.misses, use.moved) == (2 * 8, 2 * 8, 8)
    assert use.hit_rate == 0.5
    assert bool((table.find(hot) < 16).all())
    assert torch.equal(table.lookup(torch.arange(100))[50:58].cpu(), torch.full((8, 2), -4.0))
    assert table.lookup(torch.arange(100)).cpu().abs().sum() == 8 * 2 * 4
    assert table.find(torch.arange(100)).unique().numel() == 100


def test_rows_in_use_move_to_the_gpu_after_rows_there_were_removed() -> None:
    table = Table(
        limited(TableConfig("t", dim=2, optimizer=SGD(1.0), initializer=Zeros()), 16), engine="cuda"
    )
    table.assign(torch.arange(60), torch.zeros(60, 2))
    table.remove(torch.arange(9))
    hot = torch.arange(50, 57)
    for step in range(3):
        table.apply_gradients(hot, torch.ones(7, 2), step=step)
    assert bool((table.find(hot) < 16).all())
    assert bool((table.find(hot) >= 9).all())
    rest = torch.arange(9, 60)
    assert table.find(rest).unique().numel() == len(table) == 51
    assert table.lookup(rest).cpu()[:, 0].tolist() == [-3.0 if 50 <= id < 57 else 0.0 for id in rest]


def test_a_row_that_a_search_visited_twice_is_removed_once() -> None:
    table = Table(TableConfig("t", dim=2, optimizer=SGD(1.0)), engine="cuda")
    table.assign(torch.arange(8), torch.zeros(8, 2))
    engine = table.engine_impl
    watch = engine.open_watch()
    engine.scan_part(0, 100, watch=watch)
    assert engine.evict(torch.tensor([5, 3, 5]), watch).tolist() == [5, 3]
    engine.close_watch(watch)
    table.assign(torch.arange(20, 23), torch.zeros(3, 2))
    assert table.find(torch.arange(20, 23)).unique().numel() == 3
    assert len(table) == everything(table).ids.unique().numel() == 9


@pytest.mark.soak
def test_no_id_shares_a_row_if_rows_move_while_a_search_for_low_scores_visits_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(score_search, "MIN_PART", 4)
    capacity = Capacity(rows=64, score=lambda chunk: (chunk.ids * 7919 % 101).double())
    table = Table(limited(TableConfig("t", dim=2, optimizer=SGD(0.1), eviction=capacity), 32), engine="cuda")
    table.assign(torch.arange(64), torch.zeros(64, 2), time=0)
    for step in range(5):
        ids = next(iter(table.scan(100))).ids
        on_host = ids[table.find(ids) >= 32]
        some = on_host[torch.randperm(on_host.numel(), generator=torch.Generator().manual_seed(step))[:12]]
        called = torch.cat([some, torch.arange(2) + 1000 + 2 * step])
        for _ in range(2):  # the second one moves rows to the GPU, while the search is in the midst of a pass
            table.apply_gradients(called, torch.ones(14, 2), step=step, time=step)
        assert table.find(called).unique().numel() == 14
    ids = everything(table).ids
    assert ids.unique().numel() == table.find(ids).unique().numel() == len(table) == 64
    use = table.stats().host_tier
    assert use is not None
    assert use.moved > 20


def test_no_row_moves_during_a_scan() -> None:
    table = Table(limited(TableConfig("t", dim=2, optimizer=SGD(1.0)), 16), engine="cuda")
    table.assign(torch.arange(40), torch.zeros(40, 2))
    seen = []
    for step, chunk in enumerate(table.scan(20)):
        seen += chunk.ids.tolist()
        for _ in range(2):
            table.apply_gradients(torch.tensor([30]), torch.ones(1, 2), step=step)
    assert sorted(seen) == list(range(40))
    use = table.stats().host_tier
    assert use is not None
    assert use.moved == 0


def test_a_collection_beyond_its_budget_trains_as_one_without() -> None:
    base = TableConfig("t", dim=4, optimizer=Adagrad(0.1))
    results = []
    for config in (limited(base, 16), base):
        collection = EmbeddingCollection([config], [Feature("x", "t")], engine="cuda")
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            ids = (torch.rand(24, generator=generator) ** 2 * 40).long()
            out = collection({"x": ids})["x"]
            (out * out + out).sum().backward()
        results.append(everything(collection.tables["t"]))
    assert torch.equal(results[0].ids, results[1].ids)
    assert torch.equal(results[0].rows, results[1].rows)


def test_a_budget_must_be_a_number_of_bytes() -> None:
    with pytest.raises(InputError, match="device_bytes must be an integer >= 1, got 0"):
        TableConfig("t", dim=2, optimizer=SGD(1.0), device_bytes=0)
    assert "device_bytes=4096" in repr(TableConfig("t", dim=2, optimizer=SGD(1.0), device_bytes=4096))
    table = Table(TableConfig("t", dim=2, optimizer=SGD(1.0), device_bytes=64), engine="reference")
    assert table.stats().host_tier is None
