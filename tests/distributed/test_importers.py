"""Importers and exporters at two ranks: each rank keeps, or writes, the rows that it owns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megalith import SGD, EmbeddingCollection, Feature, Router, TableConfig
from megalith.checkpoint.importers import ImportReport, import_torch
from megalith.compat.dynamicemb import export_dynamicemb, import_dynamicemb
from megalith.compat.torchrec import export_torchrec
from megalith.errors import UsageError
from megalith.shards import SyncShards
from tests.distributed.ranks import run_ranks

ROWS = 101
Kept = tuple[ImportReport, list[int], list[list[float]]]


def collection(router: str) -> EmbeddingCollection:
    shards = SyncShards([TableConfig("t", dim=2, optimizer=SGD(0.5))], router=router)
    return EmbeddingCollection(shards, [Feature("a", "t")])


def kept(of: EmbeddingCollection, report: ImportReport) -> Kept:
    chunks = list(of.shards.scan("t"))
    ids = torch.cat([chunk.ids for chunk in chunks])
    return report, ids.tolist(), torch.cat([chunk.rows for chunk in chunks]).tolist()


def on_a_rank(dump: Path) -> tuple[Kept, Kept]:
    weight = torch.arange(2.0 * ROWS).view(ROWS, 2)
    first, second = collection("hash_roundrobin"), collection("roundrobin")
    report = import_torch(first, {"w": weight}, tables={"t": "w"})
    other = import_dynamicemb(second, dump, num_embeddings={"t": ROWS})
    written = export_dynamicemb(first, dump.with_name("exported"))
    with pytest.raises(
        UsageError, match=r"routed by Router\('hash_roundrobin', 2\), the dump by Router\('hash"
    ):
        export_dynamicemb(first, dump.with_name("other"), ranks=3)
    with pytest.raises(UsageError, match="the tables are in several processes"):
        export_torchrec(first, {"embeddings.t.weight": weight})
    dist.barrier()
    assert written == {"t": report.kept["t"]}
    return kept(first, report), kept(second, other)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Kept, Kept]]:
    """The dump was made by three ranks, in blocks of 34 ids."""
    path = tmp_path_factory.mktemp("dump")
    for rank in range(3):
        ids = np.arange(34 * rank, min(ROWS, 34 * (rank + 1)))
        (ids % 34).astype("<i8").tofile(path / f"t_emb_keys.rank_{rank}.world_size_3")
        np.stack([2 * ids, 2 * ids + 1], 1).astype("<f4").tofile(
            path / f"t_emb_values.rank_{rank}.world_size_3"
        )
    (path / "t_opt_args.json").write_text(json.dumps({"opt_type": "sgd", "dist_type": "continuous"}))
    found: list[tuple[Kept, Kept]] = run_ranks(on_a_rank, path)
    whole = EmbeddingCollection([TableConfig("t", dim=2, optimizer=SGD(0.5))], [Feature("a", "t")])
    assert import_dynamicemb(whole, path.with_name("exported")).rows == {"t": ROWS}  # it checks the owners
    assert torch.equal(whole.tables["t"].lookup(torch.arange(ROWS)), torch.arange(2.0 * ROWS).view(ROWS, 2))
    assert (
        json.loads((path.with_name("exported") / "t_opt_args.json").read_text())["dist_type"]
        == "hash_roundrobin"
    )
    return found


@pytest.mark.parametrize(("which", "router"), [(0, "hash_roundrobin"), (1, "roundrobin")])
def test_each_rank_keeps_what_it_owns(results: list[Any], which: int, router: str) -> None:
    owners = Router(router, 2).owner(torch.arange(ROWS))
    for rank, kinds in enumerate(results):
        report, ids, rows = kinds[which]
        own = (owners == rank).nonzero()[:, 0].tolist()
        assert sorted(ids) == own
        assert rows == [[2.0 * i, 2.0 * i + 1] for i in ids]
        assert report == ImportReport({"t": ROWS}, {"t": len(own)}, {})
