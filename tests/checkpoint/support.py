"""Shared by the checkpoint tests: a small model, and its whole state as one value."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megalith import FTRL, Adagrad, Adam, EmbeddingCollection, Feature, Ragged, Segment, TableConfig
from megalith.checkpoint.manifest import NAME
from megalith.table import Table
from tests.table.support import EXTREME_IDS, ints, whole

State = dict[str, Tensor]
IDS = ints(*EXTREME_IDS, *range(100, 130))


def tables() -> list[TableConfig]:
    """Two tables; one has two segments."""
    return [
        TableConfig("user", dim=3, optimizer=Adagrad(0.1)),
        TableConfig("item", segments=[Segment(1, optimizer=FTRL(0.1)), Segment(2, optimizer=Adam(0.1))]),
    ]


class Model(nn.Module):
    """A collection and a dense layer."""

    def __init__(self, *, engine: str = "cpu", seed: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embeddings = EmbeddingCollection(
            tables(), [Feature("user", "user"), Feature("item", "item")], engine=engine, seed=seed
        )
        self.dense = nn.Linear(6, 1)

    def forward(self, batch: Mapping[str, Ragged], time: int) -> Tensor:
        out = self.embeddings(batch, time=time)
        logits: Tensor = self.dense(torch.cat([out["user"], out["item"]], 1))
        return logits

    def table(self, name: str) -> Table:
        return self.embeddings.shards.local[name]


def train(model: Model, seed: int) -> None:
    """Run one step that changes some rows and the dense weights, and removes a few ids."""
    generator = torch.Generator().manual_seed(seed)
    ids = IDS[torch.randint(0, IDS.numel(), (2, 16), generator=generator)]
    column = Ragged(ids.flatten(), torch.arange(0, 33, 2))
    model({"user": column, "item": column}, time=1000 + seed).square().sum().backward()
    with torch.no_grad():
        for parameter in model.dense.parameters():
            assert parameter.grad is not None
            parameter -= 0.01 * parameter.grad
            parameter.grad = None
    if seed % 3 == 0:
        model.table("user").remove(ids[0, :3])


def state_of(model: Model) -> State:
    """Return everything a checkpoint stores, rows by ascending id and floats as their bits."""
    state: State = {name: t.detach().clone() for name, t in model.dense.named_parameters()}
    for name, table in model.embeddings.shards.local.items():
        rows = whole(table)
        columns = {"ids": rows.ids, "time": rows.time, "rows": rows.rows, **rows.state}
        state |= {f"{name}/{key}": column for key, column in columns.items()}
    state["step"] = torch.tensor(model.embeddings.global_step)
    return {key: t.view(torch.int32) if t.dtype == torch.float32 else t for key, t in state.items()}


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def assert_same(a: State, b: State) -> None:
    assert a.keys() == b.keys()
    different = [key for key in a if not torch.equal(a[key], b[key])]
    assert not different, f"{different} differ"


def edit(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the data of a manifest."""
    manifest = json.loads((root / NAME).read_text())
    change(manifest)
    (root / NAME).write_text(json.dumps(manifest))


def rewrite(root: Path, entry: dict[str, Any], data: bytes) -> None:
    """Replace a file and update its length and checksum in its entry, so that its content is validated."""
    (root / entry["path"]).write_bytes(data)
    entry["bytes"] = len(data)
    entry["checksum"] = f"crc32:{zlib.crc32(data):08x}"
