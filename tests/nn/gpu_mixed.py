"""Tables on the CPU with a dense part on a GPU. `make test-gpu` runs it."""

from __future__ import annotations

import pytest
import torch

from megalith import Adagrad, EmbeddingCollection, Feature, Mean, Ragged, TableConfig
from megalith.nn.device_copies import to_device, to_host


def test_tables_on_the_cpu_train_with_columns_on_a_gpu() -> None:
    tables = [TableConfig("t", dim=8, optimizer=Adagrad(0.1))]
    features = [Feature("x", "t"), Feature("y", "t", combiner=Mean())]
    column = torch.arange(3000) % 700
    bags = Ragged(column, torch.arange(0, 3001, 3))
    results = []
    for device in ("cuda", "cpu"):
        collection = EmbeddingCollection(tables, features, engine="reference")
        weight = torch.ones(16, device=device, requires_grad=True)
        for _ in range(3):
            out = collection({"x": column[:1000].to(device), "y": bags.to(device)})
            assert out["x"].device.type == device
            (torch.cat([out["x"], out["y"]], 1) @ weight).square().sum().backward()
        results.append((collection.tables["t"].lookup(torch.arange(700)), weight.grad))
    # Sums of the GPU have another order.
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=2e-5)


def test_copies_to_the_gpu_come_from_pinned_memory_and_do_not_wait() -> None:
    values = [torch.randn(1 << 20), torch.randn(7, 3)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = to_device(values, torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    back = to_host(moved)
    assert all(copy.is_pinned() for copy in back)
    assert all(torch.equal(copy, value) for copy, value in zip(back, values, strict=True))


@pytest.mark.parametrize("engine", ["reference", "cuda"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_of_the_gpu_sees_an_overflow_of_the_rows(engine: str, fused: bool) -> None:
    torch.manual_seed(0)
    collection = EmbeddingCollection(
        [TableConfig("t", dim=8, optimizer=Adagrad(0.1))], [Feature("x", "t")], update="step", engine=engine
    )
    model = torch.nn.ModuleDict({"embeddings": collection, "head": torch.nn.Linear(8, 1)}).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
    collection.follow(optimizer)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    ids = torch.arange(100, device="cuda")
    steps, rows = [], []
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = collection({"x": ids})["x"]
            loss = model["head"](out).float().square().mean()
        if step == 2:
            loss = loss + (out.float() * 3e38).sum()  # finite until it is scaled
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        steps.append(collection.global_step)
        rows.append(collection.tables["t"].lookup(ids.cpu()).cpu())
    assert steps == [1, 2, 2, 3]
    assert scaler.get_scale() == 2.0**9
    assert torch.equal(rows[1], rows[2])
    assert not torch.equal(rows[2], rows[3])
    assert all(torch.isfinite(p).all() for p in model.parameters())
