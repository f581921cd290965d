"""Export: runs, and tables without a model."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

from megalith import SGD, EmbeddingCollection, Feature, LocalShards, TableConfig, checkpoint
from megalith.errors import CheckpointError, InputError, MegalithError, UsageError
from megalith.serving.export.exporter import export_model
from megalith.serving.export.servable import Servable
from megalith.serving.export.signature import Signature
from megalith.serving.server.inputs import inputs_of
from megalith.training import Run, RunConfig
from megalith.training.export import _block_size, export_run
from tests.serving.export.export_support import files, run_config
from tests.serving.export.test_dense_program import Wide
from tests.serving.exported import rows_of


@pytest.fixture
def run(tmp_path: Path, restore_threads: None) -> Run:
    run = Run(run_config(), tmp_path / "run")
    run.train()
    return run


def test_a_run_is_exported_from_its_checkpoint(run: Run, tmp_path: Path) -> None:
    written: list[int] = []
    export_run(run.directory, tmp_path / "out", on_rows=written.append)
    manifest = checkpoint.read_manifest(run.directory / "checkpoint")
    servable = Servable(tmp_path / "out" / str(run.step))
    assert (servable.signature.model, servable.signature.base) == ("deepfm", manifest.tip)
    assert sum(written) == sum(len(table) for table in run.model.embeddings.shards.local.values())
    for table in run.model.embeddings.shards.configs:
        rows = rows_of(run.model, table)
        ids = torch.tensor(list(rows))
        assert torch.equal(servable.lookup(table, ids), torch.stack(list(rows.values())))


def test_an_export_records_whether_ids_are_integers_or_text(tmp_path: Path, restore_threads: None) -> None:
    columns = {"y": [0, 1], "user": ["7", "8"], "item": [7, 8], "tag": ["a", "b"]}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    features = {"user": "user", "item": "item", "tag": {"column": "tag", "slot": 3}}
    data = {
        "kind": "parquet",
        "path": str(tmp_path / "a.parquet"),
        "schema": {"label": "y", "features": features},
    }
    run = Run(RunConfig.from_dict({**run_config().to_dict(), "data": data}), tmp_path / "run")
    run.train()
    export_run(run.directory, tmp_path / "out")
    signature = Signature.read(tmp_path / "out" / str(run.step))
    kinds = {feature.name: feature.ids for feature in signature.features}
    assert kinds == {"user": "xxhash64", "item": "integer", "tag": "fid"}
    types = {name: dtype for name, dtype, _ in inputs_of(signature)}
    assert types == {"user": None, "item": torch.int64, "tag": torch.int64}


def test_deltas_are_exported_with_their_base(run: Run, tmp_path: Path) -> None:
    """Rows changed, made and removed since the base are in the export as the tip has them."""
    root = run.directory / "checkpoint"
    progress = checkpoint.read_manifest(root).progress
    shards = run.model.embeddings.shards
    checkpoint.save(run.model, root, progress=progress)
    ids = torch.tensor(sorted(rows_of(run.model, "user"))[:4])
    dim = shards.configs["user"].dim
    shards.assign({"user": (torch.cat([ids[:2], torch.tensor([10**9])]), torch.full((3, dim), 3.0))})
    shards.remove({"user": ids[2:3]})
    checkpoint.save_delta(run.model, root, progress=progress)
    shards.assign({"user": (ids[:1], torch.full((1, dim), 4.0))})
    manifest = checkpoint.save_delta(run.model, root, progress=progress)

    export_run(run.directory, tmp_path / "out", version=1)
    servable = Servable(tmp_path / "out" / "1")
    assert servable.signature.base == manifest.tip
    asked = torch.cat([ids, torch.tensor([10**9])])
    last = rows_of(run.model, "user")[int(ids[3])]
    wanted = torch.stack([torch.full((dim,), 4.0), torch.full((dim,), 3.0), torch.zeros(dim), last])
    assert torch.equal(servable.lookup("user", asked), torch.cat([wanted, torch.full((1, dim), 3.0)]))
    assert servable.signature.tables["user"].rows == len(shards.local["user"])


def test_a_checkpoint_that_is_replaced_meanwhile_is_read_again(run: Run, tmp_path: Path) -> None:
    root = run.directory / "checkpoint"
    old = checkpoint.read_manifest(root)
    replaced: list[str] = []

    def replace(_: int) -> None:
        if not replaced:
            replaced.append(checkpoint.save(run.model, root, progress=old.progress).tip)

    export_run(run.directory, tmp_path / "out", version=1, on_rows=replace)
    assert Servable(tmp_path / "out" / "1").signature.base == replaced[0] != old.tip
    assert not list((tmp_path / "out").glob(".draft*"))


def test_a_damaged_checkpoint_is_not_exported(run: Run, tmp_path: Path) -> None:
    root = run.directory / "checkpoint"
    (piece,) = [root / file.path for file in checkpoint.read_manifest(root).all_files()][:1]
    piece.write_bytes(piece.read_bytes()[:-1])
    with pytest.raises(CheckpointError):
        export_run(run.directory, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(MegalithError, match="no complete checkpoint"):
        export_run(tmp_path, tmp_path / "out")
    checkpoint.save(Wide(), tmp_path / "c")
    with pytest.raises(CheckpointError, match="was not saved by `megalith train`"):
        export_run(tmp_path / "c", tmp_path / "out")


def test_blocks_are_as_large_as_in_training(run: Run, tmp_path: Path) -> None:
    """A checkpoint spread in two blocks of 1000 ids goes to four parts of 500."""
    spread = tmp_path / "spread"
    checkpoint.reshard(
        run.directory / "checkpoint", spread, num_shards=2, dist_type="continuous", block_size=1000
    )
    manifest = checkpoint.read_manifest(spread)
    assert _block_size(manifest, 4) == 500
    assert _block_size(manifest, 0) is None
    assert _block_size(checkpoint.read_manifest(run.directory / "checkpoint"), 4) is None


# ---- shards without a model


def bare() -> LocalShards:
    """Two tables of ten rows of ones, without a collection."""
    shards = LocalShards([TableConfig(name, dim=dim, optimizer=SGD()) for name, dim in (("a", 2), ("b", 3))])
    shards.assign({name: (torch.arange(10), torch.ones(10, dim)) for name, dim in (("a", 2), ("b", 3))})
    return shards


def test_shards_are_exported_as_rows(tmp_path: Path) -> None:
    assert export_model(bare(), tmp_path, name="rows", precision="int8") == tmp_path
    assert files(tmp_path) == {"0/signature.json", "0/a.safetensors", "0/b.safetensors"}
    with closing(Servable(tmp_path / "0")) as servable:
        signature = servable.signature
        assert (signature.name, signature.part, signature.step) == ("rows", "standalone", 0)
        assert (signature.predicts, signature.features, servable.dense_names) == (False, (), {})
        assert servable.lookup("b", torch.tensor([3, 10])).tolist() == [[1.0] * 3, [0.0] * 3]
        servable.warm_up()
        servable.apply({"a": (torch.tensor([10]), torch.full((1, 2), 4.0))})
        assert servable.lookup("a", torch.tensor([10])).tolist() == [[4.0, 4.0]]
        with pytest.raises(UsageError, match="rows holds rows without a model"):
            servable.predict({"a": torch.tensor([1])})


def test_shards_are_exported_in_parts_without_an_entry(tmp_path: Path) -> None:
    export_model(bare(), tmp_path, name="rows", version=2, num_shards=3)
    parts = [f"ps_{number}/2" for number in range(3)]
    assert files(tmp_path) == {
        f"{part}/{file}" for part in parts for file in ("signature.json", "a.safetensors", "b.safetensors")
    }
    assert [Signature.read(tmp_path / part).tables["a"].rows for part in parts] == [4, 3, 3]


def test_a_collection_is_not_a_model(tmp_path: Path) -> None:
    collection = EmbeddingCollection([TableConfig("t", dim=2, optimizer=SGD())], [Feature("f", "t")])
    with pytest.raises(InputError, match="to export its rows alone, pass its `shards`"):
        export_model(collection, tmp_path, name="m")  # type: ignore[arg-type]
