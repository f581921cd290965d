"""Exports of tables over real ranks: the same files as from one process, and errors that all ranks raise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megalith import (
    SGD,
    EmbeddingCollection,
    Feature,
    Layout,
    LocalShards,
    Slice,
    SyncShards,
    TableConfig,
)
from megalith.models import Model
from megalith.serving import Servable, export_model
from megalith.serving.export import exporter
from megalith.shards import Shards
from megalith.table import Chunk
from tests.distributed.ranks import error_of, run_ranks

DIMS = {"one": 1, "three": 3, "empty": 2}
TABLES = [TableConfig(name, dim=dim, optimizer=SGD(0.1)) for name, dim in DIMS.items()]
PARTS: list[dict[str, Any]] = [
    {"num_shards": 3},
    {"num_shards": 2, "precision": "int8"},
    {"num_shards": 0},
]
TIMEOUT = 30.0


def filled(shards: Shards) -> Shards:
    """Rows of 1 / (3 + id), which 16 bits cannot hold; roundrobin gives rank 0 more of them than rank 1."""
    ids = torch.cat([torch.arange(0, 60, 2), torch.arange(1, 30, 6), torch.tensor([-1, -(2**63)])])
    rows = 1 / (3 + ids.float())[:, None]
    shards.assign(
        {name: (ids, rows.repeat(1, dim) + torch.arange(dim)) for name, dim in DIMS.items() if dim != 2}
    )
    return shards


def contents(out: Path) -> dict[str, bytes]:
    """The rows' files; they do not depend on the order in which rows were written."""
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.safetensors")}


def spread(**options: Any) -> SyncShards:
    return SyncShards(TABLES, timeout=TIMEOUT, **options)


# ---- the files


def export_shards(folder: Path) -> list[int]:
    exporter.ROWS_PER_ROUND = 8  # several rounds, of which the last have no rows of rank 1
    shards = filled(spread(wire="float16", push=True))
    shards.apply_gradients({"three": torch.tensor([2])}, {"three": torch.ones(1, 3)}, step=0)
    written: list[int] = []
    for number, options in enumerate(PARTS):
        out = folder / str(number)
        assert export_model(shards, out, name="m", on_rows=written.append, **options) == out
    return written


def test_shards_over_ranks_are_written_as_those_of_one_process(tmp_path: Path) -> None:
    # Given tables over two ranks, with updates that are still being sent; float16 between ranks.
    written, nothing = run_ranks(export_shards, tmp_path / "ranks")

    # Then the parts are those of one process with the same rows, and rank 0 alone reports progress.
    alone = filled(LocalShards(TABLES))
    summed = {"three": torch.full((1, 3), 2.0)}  # of both ranks
    alone.apply_gradients({"three": torch.tensor([2])}, summed, step=0)
    for number, options in enumerate(PARTS):
        out = export_model(alone, tmp_path / "alone", name="m", version=number, **options)
        for part in range(options["num_shards"]) or [None]:
            name = "" if part is None else f"ps_{part}"
            found = contents(tmp_path / "ranks" / str(number) / name / "0")
            assert found == contents(out / name / str(number))
            assert set(found) == {f"{table}.safetensors" for table in DIMS}
    assert sum(written) == len(PARTS) * 2 * 37
    assert nothing == []


# ---- a model


class Scored(Model):
    def __init__(self, shards: Shards) -> None:
        super().__init__()
        torch.manual_seed(3)
        layouts = [Layout("rows", [Slice("f", 0, 3)])]
        self.embeddings = EmbeddingCollection(shards, [Feature("f", "three")], layouts=layouts)
        self.deep = nn.Linear(3, 1)

    def score(self, rows: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        return self.deep(rows["rows"]).squeeze(1)  # type: ignore[no-any-return]


def export_scored(folder: Path) -> str:
    model = Scored(filled(spread()))
    model.embeddings.global_step = 7
    export_model(model, folder, name="m")
    fully_shard(model.deep, mesh=init_device_mesh("cpu", (2,)))
    return error_of(export_model, model, folder, name="m", version=8)


def test_a_model_over_ranks_is_exported_with_the_rows_of_all(tmp_path: Path) -> None:
    refused = run_ranks(export_scored, tmp_path)
    features = {"f": torch.tensor([0, 1, 58])}
    with torch.no_grad():
        expected = Scored(filled(LocalShards(TABLES))).eval()(features)
    assert torch.allclose(Servable(tmp_path / "7").predict(features)["logits"], expected)
    for said in refused:
        assert said.startswith("UsageError: ")
        assert "save a checkpoint, load it into a model of one process" in said
    assert not (tmp_path / "8").exists()


# ---- errors


def broken_scan(table: str, chunk_size: int = 0) -> Iterator[Chunk]:
    raise RuntimeError("bad memory")


def fail_in_turn(folder: Path) -> dict[str, str]:
    shards, rank = filled(spread()), dist.get_rank()
    found = {}
    for name, options in {
        "first": {},
        "again": {},
        "argument": {"version": 1, "num_shards": -rank},
    }.items():
        found[name] = error_of(export_model, shards, folder, name="m", **options)
    if rank:
        shards.scan = broken_scan  # type: ignore[method-assign]
    found["scan"] = error_of(export_model, shards, folder, name="m", version=1)
    shards.__dict__.pop("scan", None)
    shards.assign({"one": (torch.tensor([1]), torch.full((1, 1), 1e6))})
    found["row"] = error_of(export_model, shards, folder, name="m", version=1, precision="float16")
    shards.assign({"one": (torch.tensor([1]), torch.ones(1, 1))})
    found["last"] = error_of(export_model, shards, folder, name="m", version=2)
    return found


def test_an_error_on_one_rank_raises_on_all_and_the_next_export_works(tmp_path: Path) -> None:
    first, second = run_ranks(fail_in_turn, tmp_path)
    assert first["first"] == second["first"] == first["last"] == second["last"] == ""
    expected = {
        "again": (("ExportError", "exists: choose another"), ("ExportError", "rank 0: ExportError: ")),
        "argument": (("ExportError", "rank 1: InputError: "), ("InputError", "num_shards must be")),
        "scan": (("ExportError", "rank 1: bad memory"), ("RuntimeError", "bad memory")),
        "row": (("InputError", "table 'one'"), ("ExportError", "rank 0: InputError: table 'one'")),
    }
    for name, (ours, theirs) in expected.items():
        for said, (kind, text) in ((first[name], ours), (second[name], theirs)):
            assert said.startswith(f"{kind}: "), name
            assert text in said, name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2"]
