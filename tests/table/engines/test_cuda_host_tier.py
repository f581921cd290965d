"""Tables of the cuda engine with more rows than their budget of GPU memory: rows in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalith import (
    SGD,
    TTL,
    Adagrad,
    Capacity,
    EmbeddingCollection,
    Feature,
    LocalShards,
    Table,
    TableConfig,
    Zeros,
)
from megalith.errors import InputError
from megalith.table import eviction_pass
from megalith.table.engines import reference_policies, shard_capacity
from megalith.table.engines.cuda import host_tier
from megalith.table.engines.cuda.engine import CudaEngine
from megalith.table.table_data import HostTierUse
from tests.table.engines.cuda_configs import CONFIGS, ON_GPU, Halving, cases, gpu_or_soak
from tests.table.engines.programs import Program, everything

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


def filled(rows: int, on_gpu: int) -> Table:
    """A table with the ids 0 to rows - 1 in the places of the same number."""
    config = TableConfig("t", dim=2, optimizer=SGD(1.0), initializer=Zeros())
    table = Table(limited(config, on_gpu), engine="cuda")
    table.assign(torch.arange(rows), torch.zeros(rows, 2))
    return table


def places(table: Table, ids: torch.Tensor) -> torch.Tensor:
    """Where rows are; unlike `Table.find` it does not move them."""
    engine = table.engine_impl
    assert isinstance(engine, CudaEngine)
    return engine.group.find(ids.to(engine.device), [ids.numel()]).rows.cpu()


def usage(table: Table) -> HostTierUse:
    use = table.stats().host_tier
    assert use is not None
    return use


def numbers(table: Table) -> tuple[int, int, int]:
    """Hits, misses and moved rows."""
    use = usage(table)
    return use.hits, use.misses, use.moved


@pytest.mark.parametrize("name", cases(WITHOUT_CAPACITY, "min_count"))
def test_programs_of_calls_beyond_the_budget_with_segments_and_policies(name: str) -> None:
    program = Program(limited(CONFIGS[name], 16), 210, **SIZES)
    program.run(40 if ON_GPU else 6)
    program.tables[0].engine_impl.return_memory(1 << 30)
    program.compare()


@gpu_or_soak
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

    use = usage(table)
    # The first update finds the rows in host memory and moves them.
    assert (use.hits, use.misses, use.moved) == (3 * 8, 8, 8)
    assert use.hit_rate == 0.75
    assert bool((table.find(hot) < 16).all())
    assert torch.equal(table.lookup(torch.arange(100))[50:58].cpu(), torch.full((8, 2), -4.0))
    assert table.lookup(torch.arange(100)).cpu().abs().sum() == 8 * 2 * 4
    assert table.find(torch.arange(100)).unique().numel() == 100


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
    monkeypatch.setattr(shard_capacity, "MIN_PART", 4)
    capacity = Capacity(rows=64, score=lambda chunk: (chunk.ids * 7919 % 101).double())
    table = Table(limited(TableConfig("t", dim=2, optimizer=SGD(0.1), eviction=capacity), 32), engine="cuda")
    table.assign(torch.arange(64), torch.zeros(64, 2), time=0)
    for step in range(5):
        ids = next(iter(table.scan(100))).ids
        on_host = ids[places(table, ids) >= 32]
        some = on_host[torch.randperm(on_host.numel(), generator=torch.Generator().manual_seed(step))[:12]]
        called = torch.cat([some, torch.arange(2) + 1000 + 2 * step])
        # It moves rows to the GPU, while the search is in the midst of a pass.
        table.apply_gradients(called, torch.ones(14, 2), step=step, time=step)
        assert table.find(called).unique().numel() == 14
    ids = everything(table).ids
    assert ids.unique().numel() == table.find(ids).unique().numel() == len(table) == 64
    use = usage(table)
    assert use.moved > 20


def test_no_row_moves_during_a_scan() -> None:
    table = Table(limited(TableConfig("t", dim=2, optimizer=SGD(1.0)), 16), engine="cuda")
    table.assign(torch.arange(40), torch.zeros(40, 2))
    seen = []
    epoch = table.epoch
    for step, chunk in enumerate(table.scan(20)):
        seen += chunk.ids.tolist()
        table.lookup(torch.tensor([30, 30, 2]))
        table.apply_gradients(torch.tensor([30]), torch.ones(1, 2), step=step)
    assert sorted(seen) == list(range(40))
    assert table.epoch == epoch
    assert numbers(table) == (2, 4, 0)


@gpu_or_soak
def test_a_lookup_moves_rows_and_lookups_in_progress_are_updated_rightly() -> None:
    table = filled(40, 16)
    first, second = torch.arange(16, 32), torch.arange(24, 40)
    rows, epoch = table.find(first), table.epoch
    assert rows.sort().values.tolist() == list(range(16))
    others, later = table.find(second), table.epoch  # takes the places of the first ones
    assert others.sort().values.tolist() == list(range(16))
    assert numbers(table) == (8, 24, 24)

    assert torch.equal(table.read(rows, first, epoch=epoch).cpu(), torch.zeros(16, 2))
    table.update(rows, first, torch.ones(16, 2), step=0, epoch=epoch)
    table.update(others, second, torch.ones(16, 2), step=1, epoch=later)
    expected = [-float(16 <= id < 32) - float(24 <= id < 40) for id in range(40)]
    assert table.lookup(torch.arange(40)).cpu()[:, 0].tolist() == expected
    assert table.find(torch.arange(40)).unique().numel() == 40


@gpu_or_soak
def test_a_row_that_a_lookup_found_is_not_counted_again_by_its_update() -> None:
    table = filled(40, 16)
    ids, others = torch.arange(20, 28), torch.arange(30, 34)
    rows, epoch = table.find(ids), table.epoch
    table.read(rows, ids, epoch=epoch)
    table.update(rows, ids, torch.ones(8, 2), step=0, epoch=epoch)
    assert numbers(table) == (0, 8, 8)

    rows, epoch = table.find(ids), table.epoch
    table.lookup(others)  # the rows must be found again
    table.update(rows, ids, torch.ones(8, 2), step=1, epoch=epoch)
    assert numbers(table) == (8, 12, 12)
    assert 20 in table
    assert numbers(table) == (8, 12, 12)
    table.apply_gradients(ids, torch.ones(8, 2), step=2)
    assert numbers(table) == (16, 12, 12)


@gpu_or_soak
def test_a_batch_with_more_rows_than_the_gpu_has_places() -> None:
    table = filled(100, 16)
    every, most = torch.arange(100), torch.arange(16, 100)
    assert torch.equal(table.lookup(torch.cat([every, every])).cpu(), torch.zeros(200, 2))
    assert numbers(table) == (16, 84, 0)  # no other row is on the GPU

    table.apply_gradients(torch.cat([most, most]), torch.ones(168, 2), step=0)
    assert numbers(table) == (16, 168, 16)
    assert (places(table, most) < 16).nonzero()[:, 0].tolist() == list(range(16))
    assert table.lookup(every).cpu()[:, 0].tolist() == [-2.0 * (id >= 16) for id in range(100)]


@gpu_or_soak
def test_a_free_place_is_not_exchanged() -> None:
    table = filled(60, 16)
    table.remove(torch.arange(12))
    hot = torch.arange(50, 57)
    table.lookup(hot)
    assert numbers(table) == (0, 7, 4)
    assert sorted(places(table, hot).tolist()) == [12, 13, 14, 15, 54, 55, 56]
    table.assign(torch.arange(100, 112), torch.ones(12, 2))
    assert sorted(places(table, torch.arange(100, 112)).tolist()) == list(range(12))
    ids = torch.cat([torch.arange(12, 60), torch.arange(100, 112)])
    assert places(table, ids).unique().numel() == 60
    assert table.lookup(ids).cpu()[:, 0].tolist() == [float(id >= 100) for id in ids]


@gpu_or_soak
def test_a_row_of_the_batch_does_not_leave_for_another_one_of_it() -> None:
    table = filled(60, 16)
    for step in range(5):  # all the others are used more
        table.apply_gradients(torch.arange(10, 16), torch.zeros(6, 2), step=step)
    table.lookup(torch.cat([torch.arange(10), torch.arange(40, 50), torch.arange(10)]))
    assert places(table, torch.arange(10)).tolist() == list(range(10))
    assert sorted(places(table, torch.arange(40, 50)).tolist()) == [*range(10, 16), 46, 47, 48, 49]
    assert numbers(table) == (5 * 6 + 10, 10, 6)


@gpu_or_soak
@pytest.mark.parametrize("last_tick", [host_tier.LAST_TICK, 5])
def test_rows_in_frequent_use_stay_on_the_gpu_while_others_are_used_once(
    last_tick: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_tier, "LAST_TICK", last_tick)
    table = filled(200, 32)
    hot = torch.arange(190, 200)
    for step in range(20):
        once = 9 * step + torch.arange(9)
        ids = torch.cat([hot, once]) if step % 2 == 0 else once  # they are not in every batch
        table.lookup(ids)
        assert bool((places(table, ids) < 32).all())
        assert bool((places(table, hot) < 32).all())
    use = usage(table)
    # The ids 0 to 8 were on the GPU when they were used; others that were there had left before.
    assert (use.hits, use.misses) == (9 * 10 + 9, 10 + 180 - 9)


@gpu_or_soak
def test_rows_are_in_the_same_places_in_each_run() -> None:
    found = []
    for _ in range(2):
        table = filled(80, 16)
        generator = torch.Generator().manual_seed(0)
        for step in range(4):
            ids = torch.randint(0, 90, (30,), generator=generator)
            table.apply_gradients(ids, torch.ones(30, 2), step=step)
        found.append(places(table, torch.arange(90)))
    assert torch.equal(*found)


def test_nothing_moves_while_all_rows_fit_in_gpu_memory() -> None:
    table = filled(4, 128)
    for step in range(2):
        table.lookup(torch.arange(12))
        table.apply_gradients(torch.arange(4), torch.ones(4, 2), step=step)
    assert table.epoch == 0
    assert numbers(table) == (0, 0, 0)
    assert isinstance(table.engine_impl, CudaEngine)
    assert not table.engine_impl.fetches


def test_a_table_that_was_cleared_or_compacted_fetches_rows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_policies, "MIN_COMPACT", 32)
    table = filled(80, 16)
    table.apply_gradients(torch.arange(40, 80), torch.ones(40, 2), step=0)
    table.remove(torch.arange(60))
    table.engine_impl.return_memory(1 << 30)
    assert sorted(places(table, torch.arange(60, 80)).tolist()) == list(range(20))
    assert torch.equal(table.lookup(torch.arange(60, 80)).cpu(), -torch.ones(20, 2))
    table.clear()
    table.assign(torch.arange(30), torch.zeros(30, 2))
    table.apply_gradients(torch.arange(16, 30), torch.ones(14, 2), step=1)
    assert bool((places(table, torch.arange(16, 30)) < 16).all())
    assert table.lookup(torch.arange(30)).cpu()[:, 0].tolist() == [-float(id >= 16) for id in range(30)]


@gpu_or_soak
def test_collections_beyond_their_budget_train_as_those_without() -> None:
    bases = [TableConfig(name, dim=4, optimizer=Adagrad(0.1)) for name in "tu"]
    results, read = [], []
    for configs in ([limited(base, 16) for base in bases], bases):
        collection = EmbeddingCollection(configs, [Feature("x", "t"), Feature("y", "u")], engine="cuda")
        generator = torch.Generator().manual_seed(0)
        outs = []
        for _ in range(3):
            ids = (torch.rand(3, 24, generator=generator) ** 2 * 40).long()
            now = [collection({"x": own, "y": own + 5}) for own in ids]  # in progress at the same time
            for out in now:  # integers, whose sums are exact in any order
                (out["x"] + 2 * out["y"]).sum().backward()
            outs += [torch.cat([out["x"], out["y"]]).detach() for out in now]
        read.append(torch.stack(outs))
        results.append([everything(collection.tables[name]) for name in "tu"])
    assert torch.equal(*read)
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got.ids, expected.ids)
        assert torch.equal(got.rows, expected.rows)
    assert not torch.equal(read[0][0], read[0][-1])


def test_a_budget_must_be_a_number_of_bytes() -> None:
    with pytest.raises(InputError, match="device_bytes must be an integer >= 1, got 0"):
        TableConfig("t", dim=2, optimizer=SGD(1.0), device_bytes=0)
    assert "device_bytes=4096" in repr(TableConfig("t", dim=2, optimizer=SGD(1.0), device_bytes=4096))
    table = Table(TableConfig("t", dim=2, optimizer=SGD(1.0), device_bytes=64), engine="reference")
    assert table.stats().host_tier is None


def tiered(rows: int, **options: Any) -> Table:
    """A table of 64 rows, 16 of them on the GPU."""
    config = TableConfig("t", dim=2, optimizer=SGD(1.0), initializer=Zeros(), **options)
    table = Table(limited(config, 16), engine="cuda")
    table.assign(torch.arange(rows), torch.zeros(rows, 2), time=0)
    return table


@gpu_or_soak
def test_a_pass_of_evict_finds_rows_that_a_lookup_wants_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    table = tiered(64, eviction=TTL(5))
    monkeypatch.setattr(eviction_pass, "MIN_EVICT_ROWS", 20)
    engine = table.engine_impl
    plain, lookups = engine.scan_on_device, 0

    def scan_on_device(*arguments: Any, **options: Any) -> Any:
        nonlocal lookups
        found = plain(*arguments, **options)
        table.lookup(torch.arange(40, 48))  # as another thread would
        lookups += 1
        return found

    monkeypatch.setattr(engine, "scan_on_device", scan_on_device)
    assert sorted(table.evict(100).tolist()) == list(range(64))
    assert lookups > 2


@gpu_or_soak
def test_a_scan_in_separate_calls_keeps_rows_in_their_places_until_it_ends() -> None:
    table = tiered(64)
    engine = table.engine_impl
    seen, at = [], 0
    while at >= 0:
        engine.keep_places(7, 60.0)
        chunk, at = engine.scan_part(at, 20)
        seen += chunk.ids.tolist()
        table.lookup(torch.arange(40, 48))
    assert sorted(seen) == list(range(64))
    use = usage(table)
    assert use.moved == 0

    engine.keep_places(8, -1.0)  # a lease that has ended
    engine.keep_places(7, 0.0)
    table.lookup(torch.arange(40, 48))
    use = usage(table)
    assert use.moved == 8


@gpu_or_soak
def test_rows_of_a_lookup_move_once_for_its_update() -> None:
    """`lookup.rows` finds the rows of one table, an update those of all tables."""
    plain = TableConfig("t", dim=2, optimizer=SGD(1.0), initializer=Zeros())
    configs = [
        TableConfig(name, dim=dim, optimizer=SGD(1.0), device_bytes=budget(16, plain))
        for name, dim in (("a", 2), ("b", 2), ("c", 5))
    ]
    shards = LocalShards(configs, engine="cuda")
    ids = {config.name: torch.arange(8) + 40 for config in configs}
    shards.assign({config.name: (torch.arange(64), torch.zeros(64, config.dim)) for config in configs})
    before = {name: shards.local[name].epoch for name in ids}
    lookup = shards.lookup(ids)
    grads = {name: torch.ones_like(lookup.rows[name]) for name in ids}
    shards.apply_gradients(lookup, grads, step=0)
    for name in ids:
        assert shards.local[name].epoch == before[name] + 1  # one call moved rows
        use = usage(shards.local[name])
        assert (use.hits, use.misses, use.moved) == (0, 8, 8)
        assert bool((shards.local[name].lookup(ids[name]) == -1.0).all())


def test_an_optimizer_in_torch_counts_a_use_once() -> None:
    plain = TableConfig("t", dim=2, optimizer=Halving(0.1), initializer=Zeros())
    config = TableConfig("t", dim=2, optimizer=Halving(0.1), device_bytes=budget(16, plain))
    shards = LocalShards([config], engine="cuda")
    shards.assign({"t": (torch.arange(64), torch.zeros(64, 2))})
    shards.apply_gradients({"t": torch.arange(40, 48)}, {"t": torch.ones(8, 2)}, step=0)
    use = usage(shards.local["t"])
    assert (use.hits, use.misses, use.moved) == (0, 8, 8)
