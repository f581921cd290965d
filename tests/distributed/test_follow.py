"""`EmbeddingCollection.follow` over ranks: under DDP and FSDP2 rows and dense weights make the same steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megalith import SGD, EmbeddingCollection, Feature, TableConfig
from tests.distributed.ranks import run_ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        table = TableConfig("t", dim=4, optimizer=SGD(0.5))
        self.embeddings = EmbeddingCollection([table], [Feature("a", "t")], update="step")
        self.head = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.embeddings({"a": ids})["a"]
        return self.head(rows), rows


def fsdp2(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {"DDP": DistributedDataParallel, "FSDP2": fsdp2}


def train(wrap: Callable[[nn.Module], nn.Module], scaled: bool) -> dict[str, Any]:
    """Four steps of two micro-batches with clipping; with a scaler, rank 1's rows overflow in a fifth one."""
    made = Model()
    model = wrap(made)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made.embeddings.follow(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    steps = []
    for step in range(5):
        optimizer.zero_grad()
        overflows = scaled and step == 2
        for micro in range(2):
            scores, rows = model(torch.arange(6) + 3 * dist.get_rank() + micro)
            loss = scores.square().mean() / 2
            if overflows and dist.get_rank() == 1:
                loss = loss + (rows * 3e38).sum()  # finite until it is scaled; no dense gradient overflows
            scaler.scale(loss).backward()
        if not scaled and step == 2:
            continue
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.02)
        scaler.step(optimizer)
        scaler.update()
        steps.append(made.embeddings.global_step)
    weight: Any = made.head.weight
    rows = made.embeddings.shards.lookup({"t": torch.arange(10)}).rows["t"]
    return {
        "steps": steps,
        "scale": scaler.get_scale(),
        "rows": rows.tolist(),
        "weight": (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).tolist(),
    }


def on_a_rank() -> dict[str, Any]:
    return {name: [train(wrap, scaled) for scaled in (True, False)] for name, wrap in WRAPPERS.items()}


def test_scaled_accumulated_and_clipped_steps_equal_unscaled_ones() -> None:
    first, second = run_ranks(on_a_rank)
    assert first == second
    for scaled, plain in first.values():
        assert scaled["steps"] == [1, 2, 2, 3, 4]  # the overflow of one rank skips the step of both
        assert plain["steps"] == [1, 2, 3, 4]
        assert scaled["scale"] == 2.0**9
        assert scaled["rows"] == plain["rows"]
        assert scaled["weight"] == plain["weight"]
    torch.testing.assert_close(first["DDP"][0]["rows"], first["FSDP2"][0]["rows"], rtol=1e-5, atol=1e-7)
