"""Tests of the cuda engine that need a GPU: load, streams, determinism. `make test-gpu` runs them."""

from __future__ import annotations

import torch

from megalith import SGD, Adam, Constant, Table, TableConfig, Zeros


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


def test_calls_on_several_streams_are_in_order() -> None:
    table = Table(TableConfig("t", dim=16, optimizer=SGD(1.0), initializer=Zeros()), engine="cuda")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    ids, ones = torch.arange(200_000, device="cuda"), torch.ones(200_000, 16, device="cuda")
    torch.cuda.synchronize()
    for step in range(20):
        with torch.cuda.stream(first):
            table.apply_gradients(ids, ones, step=step)
        with torch.cuda.stream(second):
            assert bool((table.lookup(ids) == -(step + 1)).all())


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
