"""A short program for compute-sanitizer: the kernels of the cuda engine on a few ids.

`make check-gpu-memory` runs it, once for each case.
"""

from __future__ import annotations

import sys

import torch

from megalith import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    Capacity,
    EmbeddingCollection,
    Feature,
    FirstN,
    Layout,
    LocalShards,
    Mean,
    MinCount,
    Ragged,
    Segment,
    Slice,
    Table,
    TableConfig,
)
from tests.table.engines.cuda_configs import GROUPS

SEGMENTS = [Segment(3, optimizer=FTRL(0.1), precision="float16"), Segment(4, optimizer=Adam(0.1))]
TABLES = {
    "plain": TableConfig("t", dim=5, optimizer=Adam(0.1)),
    "segments": TableConfig("t", segments=SEGMENTS),
    "zeros": TableConfig("t", dim=8, optimizer=SGD(0.1), missing="zeros"),
    "atomic": TableConfig("t", segments=SEGMENTS, deterministic=False),
    "policies": TableConfig(
        "t", dim=5, optimizer=SGD(0.1), admission=MinCount(2), eviction=Capacity(rows=700, score="lfu")
    ),
    "host_tier": TableConfig("t", dim=8, optimizer=SGD(0.1), device_bytes=4096),
}


def one_table(config: TableConfig) -> None:
    table = Table(config, engine="cuda")
    for step in range(3):
        ids = (torch.arange(700, device="cuda") % 301) * 7919 + step * 100
        table.lookup(ids)
        table.apply_gradients(ids, torch.ones(700, config.dim, device="cuda"), step=step)
        table.remove(ids[:50])
    ids = torch.unique(ids)
    table.assign(ids, torch.ones(ids.numel(), config.dim))
    table.assign_add(ids, torch.ones(ids.numel(), config.dim))
    table.reinitialize(ids[:10])
    rows = list(table.scan(100))
    table.engine_impl.compact(1 << 30)
    assert sum(chunk.ids.numel() for chunk in rows) == len(table)


def several_tables() -> None:
    tables = [
        TableConfig("a", dim=4, optimizer=Adagrad(0.1)),
        TableConfig("b", dim=4, optimizer=Adagrad(0.2)),
    ]
    features = [Feature("x", "a"), Feature("y", "a", combiner=Mean()), Feature("z", "b", combiner=FirstN(2))]
    collection = EmbeddingCollection(tables, [*features, Feature("w", "b")], engine="cuda")
    ragged = Ragged.from_lists([[1, 2, 1], [], [3]]).to("cuda")
    for _ in range(2):
        out = collection({"x": ragged, "y": ragged, "z": ragged, "w": torch.tensor([5, 6, 5], device="cuda")})
        torch.cat([value.flatten() for value in out.values()]).square().sum().backward()


def tables_of_different_dims() -> None:
    for name in ("rowwise_adagrad", "precisions", "atomic_segments"):
        configs = GROUPS[name]
        shards = LocalShards(configs, engine="cuda")
        for step in range(2):
            ids = {c.name: torch.arange(90, device="cuda") % 31 + 20 * step for c in configs}
            rows = shards.lookup(ids).rows
            grads = {c.name: torch.ones(90, c.dim, device="cuda") for c in configs}
            assert all(rows[c.name].shape == (90, c.dim) for c in configs)
            shards.apply_gradients(ids, grads, step=step)
    tables = [TableConfig(f"t{dim}", dim=dim, optimizer=Adagrad(0.1)) for dim in (5, 8, 6)]
    collection = EmbeddingCollection(
        tables,
        [Feature(t.name, t.name, combiner=Mean()) for t in tables],
        layouts=[Layout("x", [Slice(t.name, 1, t.dim) for t in tables])],
        engine="cuda",
    )
    ragged = Ragged.from_lists([[1, 2, 1], [], [3]]).to("cuda")
    for _ in range(2):
        collection({t.name: ragged for t in tables})["x"].square().sum().backward()


def main(case: str) -> None:
    if case == "collection":
        several_tables()
    elif case == "mixed_dims":
        tables_of_different_dims()
    else:
        one_table(TABLES[case])
    torch.cuda.synchronize()
    print(f"{case}: every kernel has run")


if __name__ == "__main__":
    main(sys.argv[1])
