"""Tests of the cuda engine that need a GPU: load, streams, determinism. `make test-gpu` runs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from megalith import SGD, Adam, Constant, EmbeddingCollection, Feature, Table, TableConfig, Zeros
from megalith.ops import Bags, OutputSlice, Pooling
from megalith.shards import LocalShards
from megalith.table import Chunk


def test_growth_and_removal_under_load_lose_no_row() -> None:
    table = Table(TableConfig("t", dim=4, optimizer=SGD(0.1), initializer=Constant(0.5)), engine="cuda")
    for step in range(30):
        ids = torch.randint(0, 3_000_000, (500_000,), device="cuda") * 7919
        table.apply_gradients(ids, torch.zeros(500_000, 4, device="cuda"), step=step)
        if step % 7 == 0:
            table.remove(ids[:1000])
    found = table.find(torch.arange(3_000_000, device="cuda") * 7919)
    rows = found[found >= 0]
    assert rows.numel() == rows.unique().numel() == len(table)
    ids = torch.cat([chunk.ids for chunk in table.scan(1 << 20)])
    assert ids.numel() == ids.unique().numel() == len(table)


def test_two_runs_give_the_same_bits() -> None:
    results = []
    for _ in range(2):
        table = Table(TableConfig("t", dim=16, optimizer=Adam(0.1)), engine="cuda")
        generator = torch.Generator(device="cuda").manual_seed(1)
        for step in range(5):
            ids = (torch.rand(300_000, device="cuda", generator=generator) ** 8 * 100_000).long()
            grads = torch.randn(300_000, 16, device="cuda", generator=generator)
            table.apply_gradients(ids, grads, step=step, time=1)
        chunk = next(iter(table.scan(1 << 20)))
        order = chunk.ids.argsort()
        results.append((chunk.rows[order], chunk.state["0/m"][order]))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_lookup_dense_part_and_update_on_different_streams() -> None:
    config = TableConfig("t", dim=32, optimizer=SGD(1.0), initializer=Zeros())
    tables = [Table(config, engine="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    generator = torch.Generator(device="cuda").manual_seed(2)
    batches = [torch.randint(0, 400_000, (100_000,), device="cuda", generator=generator) for _ in range(12)]
    torch.cuda.synchronize()
    for step, ids in enumerate(batches):  # memory is freed and allocated again all the time
        with torch.cuda.stream(streams[0]):
            rows = tables[0].lookup(ids)
        with torch.cuda.stream(streams[1]):
            streams[1].wait_stream(streams[0])
            grads = rows * 0.5 + 1.0
            rows.record_stream(streams[1])
        with torch.cuda.stream(streams[2]):
            streams[2].wait_stream(streams[1])
            tables[0].apply_gradients(ids, grads, step=step, time=1)
            grads.record_stream(streams[2])
        del rows, grads
    torch.cuda.synchronize()
    for step, ids in enumerate(batches):
        tables[1].apply_gradients(ids, tables[1].lookup(ids) * 0.5 + 1.0, step=step, time=1)
    every = torch.arange(400_000, device="cuda")
    assert torch.equal(tables[0].lookup(every), tables[1].lookup(every))


def train_shards(
    streams: Sequence[AbstractContextManager[object]], wait: Callable[[int], None]
) -> list[Tensor]:
    """Steps of equal shapes, which are recorded: lookup, dense part and update each in its own context."""
    n, dim = 4000, 16
    configs = [TableConfig(name, dim=dim, optimizer=SGD(1.0), initializer=Zeros()) for name in ("a", "b")]
    shards = LocalShards(configs, engine="cuda")
    device = shards.local["a"].engine_impl.device
    offsets = torch.arange(n + 1, device=device)
    bags = {c.name: (Bags(offsets, (OutputSlice(k, 0, 0, dim),), first=0),) for k, c in enumerate(configs)}
    pooling = Pooling(((n, dim),) * 2, bags)
    generator = torch.Generator(device=device).manual_seed(4)
    batches = [torch.randint(0, 9000, (n,), device=device, generator=generator) for _ in range(25)]
    wait(-1)
    kept = []
    for step, ids in enumerate(batches):
        with streams[0]:  # the table itself waits for the update before
            lookup = shards.lookup({"a": ids, "b": ids + 5})
            outputs = lookup.pool(pooling)
        with streams[1]:
            wait(1)
            grads = [out * 0.5 + 1.0 for out in outputs]
        with streams[2]:
            wait(2)
            shards.apply_gradients(lookup, grads, step=step, time=1, pooling=pooling)
        kept.append((outputs, grads))
    wait(-1)
    every = torch.arange(9005, device=device)
    return [shards.local[name].lookup(every) for name in ("a", "b")]


def test_recorded_steps_on_different_streams_train_as_on_one() -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]

    def wait(number: int) -> None:
        if number < 0:
            torch.cuda.synchronize()
        else:
            streams[number].wait_stream(streams[number - 1])

    several = train_shards([torch.cuda.stream(stream) for stream in streams], wait)
    one = train_shards([nullcontext()] * 3, lambda number: None)
    assert all(torch.equal(*pair) for pair in zip(several, one, strict=True))


def test_an_update_in_a_steady_state_does_not_wait_for_the_gpu() -> None:
    table = Table(TableConfig("t", dim=8, optimizer=Adam(0.1)), engine="cuda")
    ids, grads = torch.arange(50_000, device="cuda"), torch.ones(50_000, 8, device="cuda")
    for step in range(30):
        table.apply_gradients(ids, grads, step=step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        table.lookup(ids)
        table.apply_gradients(ids, grads, step=30)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_repeated_steps_of_growing_tables_lose_no_row() -> None:
    configs = [TableConfig(name, dim=8, optimizer=SGD(1.0), initializer=Zeros()) for name in ("a", "b")]
    features = [Feature(f"of_{c.name}", c.name) for c in configs]
    collection = EmbeddingCollection(configs, features, engine="cuda")
    new = 0
    for step in range(120):  # the launches are recorded, and recorded again when a table grows
        ids = torch.arange(new, new + 4000, device="cuda")
        new += 3000 if step % 10 == 0 else 0
        out = collection({"of_a": ids, "of_b": ids + 7})
        sum(value.sum() for value in out.values()).backward()
    counts = torch.zeros(new + 4000, device="cuda")
    at = 0
    for step in range(120):
        counts[at : at + 4000] += 1
        at += 3000 if step % 10 == 0 else 0
    ids = torch.arange(new + 4000, device="cuda")
    for name, shift in (("a", 0), ("b", 7)):
        assert torch.equal(collection.tables[name].lookup(ids + shift), -counts[:, None].expand(-1, 8))


def test_a_table_of_four_times_its_budget_trains_as_one_without() -> None:
    results = []
    for device_bytes in (4 << 20, None):
        config = TableConfig("t", dim=16, optimizer=Adam(0.1), device_bytes=device_bytes)
        table = Table(config, engine="cuda")
        generator = torch.Generator(device="cuda").manual_seed(3)
        for step in range(20):
            ids = (torch.rand(50_000, device="cuda", generator=generator) ** 4 * 100_000).long()
            rows = table.lookup(ids)
            grads = (rows * 64).round() / 64 + 1.0  # multiples of 1/64, whose sums are exact in any order
            table.apply_gradients(ids, grads, step=step, time=1)
        results.append(table.lookup(torch.arange(100_000, device="cuda")))
        use = table.stats().host_tier
        assert (use is None) == (device_bytes is None)
        if use is not None:
            assert use.host_rows > 2 * use.device_rows
            assert use.moved > 0
            # A batch has 26,000 distinct rows, the GPU 18,432 places; updates find what lookups moved.
            assert 0.5 < use.hit_rate < 0.65
    assert torch.equal(*results)


def test_snapshots_scans_and_removal_work_beyond_the_budget() -> None:
    table = Table(TableConfig("t", dim=4, optimizer=SGD(1.0), device_bytes=1 << 16), engine="cuda")
    ids = torch.arange(20_000, device="cuda") * 7919
    rows = torch.randn(20_000, 4, device="cuda")
    table.assign(ids, rows)
    table.remove(ids[:15_000])
    table.engine_impl.compact(1 << 30)
    assert torch.equal(table.lookup(ids[15_000:]), rows[15_000:])
    with table.snapshot() as snapshot:
        assert sum(chunk.ids.numel() for chunk in snapshot.chunks(1000)) == 5000
    table.clear()
    assert len(table) == 0


def test_a_snapshot_read_by_a_thread_holds_what_was_there_while_training_continues() -> None:
    table = Table(TableConfig("t", dim=16, optimizer=Adam(0.1)), engine="cuda")
    every = torch.arange(300_000, device="cuda")
    table.apply_gradients(every, torch.randn(300_000, 16, device="cuda"), step=0, time=1)
    before = {name: column.clone() for name, column in sorted_rows(list(table.scan(1 << 15))).items()}
    found: list[Chunk] = []
    with table.snapshot() as snapshot:
        reader = threading.Thread(target=lambda: found.extend(snapshot.chunks(50_000)))
        reader.start()
        for step in range(1, 30):
            with torch.cuda.stream(torch.cuda.Stream()):
                ids = torch.randint(0, 300_000, (20_000,), device="cuda")
                table.apply_gradients(ids, torch.ones(20_000, 16, device="cuda"), step=step, time=2)
                table.remove(ids[:50])
        reader.join(120)
        assert not reader.is_alive()
    after = sorted_rows(found)
    assert all(torch.equal(after[name], column) for name, column in before.items())


def test_rows_restored_without_waiting_are_those_that_were_scanned() -> None:
    config = TableConfig("t", dim=32, optimizer=Adam(0.1))
    table, other = Table(config, engine="cuda"), Table(config, engine="cuda")
    ids = torch.randperm(400_000, device="cuda")
    table.apply_gradients(ids, torch.randn(400_000, 32, device="cuda"), step=0, time=1)
    for chunk in table.scan(30_000):  # memory of a chunk is used again while its copy is on its way
        other.restore(chunk)
        del chunk
    one, two = (sorted_rows(list(each.scan(1 << 17))) for each in (table, other))
    assert all(torch.equal(two[name], column) for name, column in one.items())


def sorted_rows(chunks: list[Chunk]) -> dict[str, torch.Tensor]:
    ids = torch.cat([chunk.ids for chunk in chunks])
    order = ids.argsort()
    rows = {"ids": ids[order], "time": torch.cat([chunk.time for chunk in chunks])[order]}
    rows["rows"] = torch.cat([chunk.rows for chunk in chunks])[order]
    return rows | {key: torch.cat([chunk.state[key] for chunk in chunks])[order] for key in chunks[0].state}
