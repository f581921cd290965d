"""What ranks with tables of the cuda engine do in tests: in Triton's interpreter, or on GPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalith import (
    SGD,
    Adagrad,
    EmbeddingCollection,
    Feature,
    LocalShards,
    Mean,
    MinCount,
    Ragged,
    SyncShards,
    TableConfig,
    Zeros,
)
from tests.table.engines.programs import everything

TABLES = [
    TableConfig("a", dim=4, optimizer=Adagrad(0.1)),
    TableConfig("b", dim=3, optimizer=SGD(0.5), initializer=Zeros(), admission=MinCount(2)),
]
FEATURES = [Feature("x", "a"), Feature("y", "a", combiner=Mean()), Feature("z", "b")]
SIZE = 4
"""Examples of all ranks together."""


def batch(size: int = SIZE) -> dict[str, Ragged]:
    """The whole batch."""
    generator = torch.Generator().manual_seed(size)

    def column(lengths: Tensor) -> Ragged:
        splits = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        return Ragged(torch.randint(0, 5 + size // 4, (int(splits[-1]),), generator=generator), splits)

    lengths = torch.randint(0, 4, (2, size), generator=generator)
    return {"x": column(lengths[0]), "y": column(lengths[1]), "z": column(torch.ones_like(lengths[0]))}


def part(columns: dict[str, Ragged], rank: int, ranks: int, device: torch.device) -> dict[str, Ragged]:
    """The examples of a rank."""
    size = len(columns["x"]) // ranks
    kept = {}
    for name, column in columns.items():
        splits = column.row_splits[rank * size : (rank + 1) * size + 1]
        values = column.values[int(splits[0]) : int(splits[-1])]
        kept[name] = Ragged(values, splits - splits[0]).to(device)
    return kept


def train(collection: EmbeddingCollection, columns: dict[str, Ragged], steps: int) -> list[Tensor]:
    """Outputs of some steps."""
    outputs = []
    for _ in range(steps):
        out = collection(columns)
        joined = torch.cat([out[name] for name in ("x", "y", "z")], 1)
        outputs.append(joined.detach().cpu())
        (joined * joined + joined).sum().backward()
    return outputs


def one_process(engine: str, size: int, steps: int) -> dict[str, Any]:
    """The same training without ranks."""
    collection = EmbeddingCollection(LocalShards(TABLES, engine=engine), FEATURES, reduction="sum")
    outputs = train(collection, batch(size), steps)
    return {"outputs": outputs, "rows": {name: everything(collection.tables[name]) for name in ("a", "b")}}


def all_ranks(size: int, steps: int, transport: str) -> dict[str, Any]:
    """Train on the rank's part of the batch; then calls about rows."""
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    shards = SyncShards(TABLES, engine="cuda", transport=transport)
    collection = EmbeddingCollection(shards, FEATURES, reduction="sum")
    found: dict[str, Any] = {"transport": shards.exchange.transport, "device": str(shards.device)}
    columns = part(batch(size), shards.rank, shards.world_size, shards.device)
    found["outputs"] = train(collection, columns, steps)
    found["device of outputs"] = str(collection(columns)["x"].device)
    found["rows"] = {name: everything(shards.local[name]) for name in ("a", "b")}

    rank, ranks = shards.rank, shards.world_size
    ids = torch.tensor([100, 101 + rank], device=shards.device)  # the highest rank assigns 100
    shards.assign({"a": (ids, torch.full((2, 4), float(rank), device=shards.device))}, time=7)
    found["assigned"] = shards.lookup({"a": ids}).rows["a"].cpu()
    found["status"] = shards.reinitialize({"a": torch.tensor([100, 1_000_500])})["a"].tolist()
    found["removed"] = shards.remove({"a": torch.tensor([100, 1_000_900 + ranks])})["a"]
    return found


def check(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Compare what all ranks returned with one process."""
    ranks = len(found)
    for step, output in enumerate(expected["outputs"]):
        together = torch.cat([own["outputs"][step] for own in found])
        torch.testing.assert_close(together, output, rtol=1e-6, atol=1e-6)
    for name, whole in expected["rows"].items():
        ids = torch.cat([own["rows"][name].ids for own in found])
        order = ids.argsort()
        assert ids[order].tolist() == whole.ids.tolist()
        rows = torch.cat([own["rows"][name].rows for own in found])[order]
        torch.testing.assert_close(rows, whole.rows, rtol=1e-6, atol=1e-6)
    for rank, own in enumerate(found):
        assert own["device of outputs"] == own["device"]
        assert own["assigned"].tolist() == [[ranks - 1.0] * 4, [float(rank)] * 4]
        assert own["status"] == [1, 0 if rank == 0 else 1]
        assert own["removed"] == 1
