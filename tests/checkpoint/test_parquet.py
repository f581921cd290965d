"""Tables as Parquet files: what pyarrow reads is what the table holds."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from megalith import Adagrad, Adam, EmbeddingCollection, Feature, Segment, TableConfig
from megalith.checkpoint import parquet_export as parquet
from megalith.checkpoint.parquet_export import export_parquet, write_parquet
from megalith.errors import MissingDependencyError, UnknownNameError
from megalith.table import Chunk

USER = TableConfig(
    "user",
    segments=[Segment(1, optimizer=Adam(0.1, bias_correction="row")), Segment(2, optimizer=Adagrad(0.1))],
)
ITEM = TableConfig("a/b: c", dim=1, optimizer=Adagrad(0.1))


def trained(engine: str = "cpu") -> EmbeddingCollection:
    made = EmbeddingCollection(
        [USER, ITEM], [Feature("user", "user"), Feature("item", "a/b: c")], engine=engine
    )
    out = made({"user": torch.tensor([5, -7, 2**62]), "item": torch.tensor([1, 1, 2])}, time=86_400)
    (out["user"].sum() + out["item"].sum()).backward()
    return made


def exported(path: Path) -> Path:
    export_parquet(trained(), path)
    return path


def by_id(table: pa.Table) -> dict[int, dict[str, object]]:
    return {row.pop("id"): row for row in table.to_pylist()}


def test_a_table_as_pyarrow_reads_it(tmp_path: Path, engine: str) -> None:
    made = trained(engine)
    assert export_parquet(made, tmp_path) == {"user": 3, "a/b: c": 2}
    table = pq.read_table(tmp_path / "user")
    assert table.schema.names == [
        "id",
        "weights",
        "state/0/m",
        "state/0/v",
        "state/0/count",
        "state/1/sum",
        "time",
    ]
    assert table.schema.field("id").type == pa.int64()
    assert table.schema.field("weights").type == pa.list_(pa.float32(), 3)
    assert table.schema.field("state/0/count").type == pa.list_(pa.float32(), 1)
    assert pa.types.is_timestamp(table.schema.field("time").type)

    found = by_id(table)
    for chunk in made.shards.scan("user"):
        for i, id in enumerate(chunk.ids.tolist()):
            row = found.pop(id)
            assert row["weights"] == chunk.rows[i].tolist()
            assert row["time"] == datetime.datetime(1970, 1, 2, tzinfo=datetime.UTC)
            for key, values in chunk.state.items():
                assert row[f"state/{key}"] == values[i].tolist()
    assert not found


def test_names_are_escaped_for_files(tmp_path: Path) -> None:
    export_parquet(trained(), tmp_path, tables=["a/b: c"])
    odd = EmbeddingCollection([TableConfig("..", dim=1, optimizer=Adagrad(0.1))], [Feature("a", "..")])
    export_parquet(odd, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["%2E.", "a%2Fb%3A%20c"]


def test_without_optimizer_state(tmp_path: Path) -> None:
    write_parquet(tmp_path / "t.parquet", trained().shards.scan("user"), state=False)
    assert pq.read_schema(tmp_path / "t.parquet").names == ["id", "weights", "time"]


def test_rows_are_written_chunk_by_chunk(tmp_path: Path) -> None:
    """A row group for each chunk, and only one chunk in memory."""
    alive = []

    def chunks() -> Iterator[Chunk]:
        for start in range(0, 50, 10):
            alive.append(start)
            ids = torch.arange(start, start + 10)
            yield Chunk(
                ids, ids[:, None].float(), {}, torch.full((10,), 7), torch.ones(10, dtype=torch.int64)
            )

    assert write_parquet(tmp_path / "t.parquet", chunks()) == 50
    file = pq.ParquetFile(tmp_path / "t.parquet")
    assert file.metadata.num_row_groups == len(alive) == 5
    table = file.read()
    assert table["id"].to_pylist() == list(range(50))
    assert table["weights"].to_pylist() == [[float(i)] for i in range(50)]
    assert table["count"].to_pylist() == [1] * 50


def test_large_chunks_become_several_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP", 4)
    ids = torch.arange(10)
    write_parquet(tmp_path / "t.parquet", [Chunk(ids, torch.zeros(10, 2), {}, ids)])
    assert pq.ParquetFile(tmp_path / "t.parquet").metadata.num_row_groups == 3


def test_a_table_without_rows(tmp_path: Path) -> None:
    made = EmbeddingCollection([USER], [Feature("user", "user")])
    assert export_parquet(made, tmp_path) == {"user": 0}
    table = pq.read_table(tmp_path / "user")
    assert table.num_rows == 0
    assert table.schema == pq.read_schema(next(exported(tmp_path / "full").glob("user/*")))
    assert write_parquet(tmp_path / "none.parquet", []) == 0
    assert pq.read_schema(tmp_path / "none.parquet").names == ["id", "time"]


def test_a_failed_write_leaves_the_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(b"before")

    def chunks() -> Iterator[Chunk]:
        yield from trained().shards.scan("user")
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        write_parquet(path, chunks())
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_an_unknown_table(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown table 'x'"):
        export_parquet(trained(), tmp_path, tables=["user", "x"])
    assert list(tmp_path.iterdir()) == []


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(parquet.importlib, "import_module", missing)
    with pytest.raises(MissingDependencyError, match=r"pyarrow is needed .*pip install '.\[data\]'"):
        write_parquet(tmp_path / "t.parquet", [])
