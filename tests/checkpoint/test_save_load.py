"""save and load: what is restored, what a failed save leaves, and the errors for damaged files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    EmbeddingCollection,
    Feature,
    Ragged,
    Segment,
    TableConfig,
    checkpoint,
)
from megalith.checkpoint import saved_rows
from megalith.errors import CheckpointError, InputError, UsageError
from megalith.storage.store import LocalStore

IDS = [-(2**63), -1, 0, 7, 2**63 - 1]


class Model(nn.Module):
    def __init__(self, *, engine: str = "cpu", lr: float = 0.1, dim: int = 3, seed: int = 5) -> None:
        super().__init__()
        tables = [
            TableConfig("users/ä", dim=dim, optimizer=Adagrad(lr)),
            TableConfig("items", segments=[Segment(1, optimizer=FTRL(lr)), Segment(2, optimizer=Adam(lr))]),
        ]
        features = [Feature("user", "users/ä"), Feature("item", "items")]
        self.embeddings = EmbeddingCollection(tables, features, engine=engine, seed=seed)
        self.dense = nn.Linear(dim + 3, 1)
        self.tied = self.dense.weight
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def forward(self, batch: dict[str, Ragged]) -> Tensor:
        out = self.embeddings(batch, time=100)
        logits: Tensor = self.dense(torch.cat([out["user"], out["item"]], 1))
        return logits


def batch() -> dict[str, Ragged]:
    rows = [[i, random.choice(IDS)] for i in IDS]
    return {"user": Ragged.from_lists(rows), "item": Ragged.from_lists([r[:1] for r in rows])}


def train(model: Model, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        noise = torch.rand(())
        (model(batch()).square().sum() + noise * model.dense.bias.sum()).backward()
        optimizer.step()
        model.steps += 1


def everything(model: Model) -> dict[str, Any]:
    state: dict[str, Any] = {k: v.clone() for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    for name, table in model.embeddings.shards.local.items():
        for chunk in table.scan():
            order = torch.argsort(chunk.ids)
            state[f"{name}/ids"] = chunk.ids[order]
            state[f"{name}/rows"] = chunk.rows[order]
            state[f"{name}/time"] = chunk.time[order]
            state |= {f"{name}/{k}": v[order] for k, v in chunk.state.items()}
    state["global_step"] = torch.tensor(model.embeddings.global_step)
    return state


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key


@pytest.mark.parametrize("other", ["cpu", "reference"])
def test_a_loaded_model_equals_the_saved_one_and_trains_with_the_same_bits(
    tmp_path: Path, other: str
) -> None:
    torch.manual_seed(1)
    random.seed(1)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    train(model, optimizer, 3)
    checkpoint.save(
        model, tmp_path / "c", optimizer=optimizer, progress={"step": 3, "rng": checkpoint.rng_state()}
    )
    saved = everything(model)
    train(model, optimizer, 3)

    torch.manual_seed(9)
    loaded = Model(engine=other)
    again = torch.optim.Adam(loaded.parameters(), 0.5)
    train(loaded, again, 1)
    report = checkpoint.load(loaded, tmp_path / "c", optimizer=again)

    assert report.progress["step"] == 3
    assert report.rows == {"embeddings.users/ä": 5, "embeddings.items": 5}
    assert_same(everything(loaded), saved)
    if other == "cpu":
        checkpoint.set_rng_state(report.progress["rng"])
        train(loaded, again, 3)
        assert_same(everything(loaded), everything(model))


def test_tables_larger_than_a_piece_are_split_into_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_rows, "PIECE_BYTES", 100)
    collection = EmbeddingCollection([TableConfig("t", dim=2, optimizer=SGD(1.0))], [Feature("f", "t")])
    ids = torch.arange(50)
    collection.shards.assign({"t": (ids, torch.rand(50, 2))})
    seen: list[int] = []

    manifest = checkpoint.save(collection, tmp_path, on_rows=seen.append)

    pieces = manifest.collections[""].tables["t"].pieces
    assert len(pieces) > 10
    assert seen[-1] == sum(piece.rows for piece in pieces) == 50
    loaded = EmbeddingCollection([TableConfig("t", dim=2, optimizer=SGD(1.0))], [Feature("f", "t")], seed=3)
    checkpoint.load(loaded, tmp_path)
    assert torch.equal(loaded.shards.local["t"].lookup(ids), collection.shards.local["t"].lookup(ids))


@pytest.mark.parametrize("fails_at", range(4))
def test_a_failed_save_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    model = Model()
    train(model, torch.optim.SGD(model.parameters(), 0.1), 1)
    checkpoint.save(model, tmp_path)
    before = everything(model)
    train(model, torch.optim.SGD(model.parameters(), 0.1), 1)
    calls = iter(range(100))
    real = LocalStore.write

    def failing(self: LocalStore, name: str, parts: Any, *, flush: bool = True) -> Any:
        if next(calls) == fails_at:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / (name + ".tmp")).write_bytes(b"half")
            raise OSError("disk full")
        return real(self, name, parts, flush=flush)

    monkeypatch.setattr(LocalStore, "write", failing)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(model, tmp_path)

    loaded = Model()
    checkpoint.load(loaded, tmp_path)
    assert_same(everything(loaded), before)


def test_a_save_whose_files_were_deleted_before_they_were_flushed_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    train(model, torch.optim.SGD(model.parameters(), 0.1), 1)
    checkpoint.save(model, tmp_path)
    before = everything(model)
    real = LocalStore.flush

    def flush(self: LocalStore, names: Any) -> None:
        self.remove(names[0].partition("/")[0])  # as another save does at its end
        real(self, names)

    monkeypatch.setattr(LocalStore, "flush", flush)
    with pytest.raises(CheckpointError, match="another save ended in the meantime"):
        checkpoint.save(model, tmp_path)
    loaded = Model()
    checkpoint.load(loaded, tmp_path)
    assert_same(everything(loaded), before)


def test_a_new_save_deletes_the_files_of_the_old_one(tmp_path: Path) -> None:
    model = Model()
    checkpoint.save(model, tmp_path)
    checkpoint.save(model, tmp_path)
    assert len(list(tmp_path.glob("data-*"))) == 1


def damage(root: Path, what: str) -> None:
    manifest = json.loads((root / "manifest.json").read_text())
    piece = manifest["collections"]["embeddings"]["tables"]["items"]["pieces"][0]
    path = root / piece["file"]["path"]
    data = bytearray(path.read_bytes())
    if what == "no manifest":
        (root / "manifest.json").unlink()
    elif what == "no JSON":
        (root / "manifest.json").write_text("{")
    elif what == "truncated":
        path.write_bytes(data[:-1])
    elif what == "flipped":
        data[-1] ^= 1
        path.write_bytes(data)
    elif what == "missing file":
        path.unlink()
    else:
        changes: dict[str, Any] = {
            "other format": lambda: manifest.update(format="x"),
            "other version": lambda: manifest.update(version=99),
            "traversal": lambda: piece["file"].update(path="../../etc/passwd"),
            "absolute": lambda: piece["file"].update(path="/etc/passwd"),
            "wrong rows": lambda: piece.update(rows=3),
            "no rows": lambda: piece.pop("rows"),
            "bytes as text": lambda: piece["file"].update(bytes="12"),
            "no collections": lambda: manifest.pop("collections"),
            "negative step": lambda: manifest["collections"]["embeddings"].update(global_step=-1),
        }
        changes[what]()
        (root / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no manifest", "no complete checkpoint"),
        ("no JSON", "is not valid JSON"),
        ("truncated", "bytes"),
        ("flipped", "damaged"),
        ("missing file", "cannot be read"),
        ("other format", "is not the manifest"),
        ("other version", "version"),
        ("traversal", "leads out"),
        ("absolute", "leads out"),
        ("wrong rows", "ids"),
        ("no rows", "rows is missing"),
        ("bytes as text", "bytes must be an integer"),
        ("no collections", "collections is missing"),
        ("negative step", "global_step must be from 0 to"),
    ],
)
def test_the_error_names_the_damage(tmp_path: Path, what: str, words: str) -> None:
    model = Model()
    train(model, torch.optim.SGD(model.parameters(), 0.1), 1)
    checkpoint.save(model, tmp_path)
    damage(tmp_path, what)
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load(Model(), tmp_path)


def test_a_damaged_file_is_found_before_any_table_is_cleared(tmp_path: Path) -> None:
    model = Model()
    train(model, torch.optim.SGD(model.parameters(), 0.1), 1)
    checkpoint.save(model, tmp_path)
    damage(tmp_path, "flipped")
    before = everything(model)
    with pytest.raises(CheckpointError):
        checkpoint.load(model, tmp_path)
    assert_same(everything(model), before)


def collection(**options: Any) -> EmbeddingCollection:
    config = {"dim": 2, "optimizer": SGD(1.0)} | options
    return EmbeddingCollection([TableConfig("t", **config)], [Feature("f", "t")])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dim": 3}, CheckpointError, "dim 2, but the model's has dim 3"),
        ({"optimizer": Adagrad(1.0)}, CheckpointError, "sgd.*adagrad"),
        (
            {"dist_type": "hash_roundrobin"},
            InputError,
            "^Input dist_type mismatch.*roundrobin.*hash_roundrobin",
        ),
        (
            {"dim": None, "optimizer": None, "segments": [Segment(1, optimizer=SGD(1.0))] * 2},
            CheckpointError,
            "1 segments, but the model's has 2",
        ),
    ],
)
def test_another_model_raises(tmp_path: Path, options: dict[str, Any], error: Any, words: str) -> None:
    checkpoint.save(collection(), tmp_path)
    with pytest.raises(error, match=words):
        checkpoint.load(collection(**options), tmp_path)


def test_hyperparameters_may_change_and_the_routing_with_reroute(tmp_path: Path) -> None:
    saved = collection()
    saved.shards.assign({"t": (torch.tensor([1]), torch.ones(1, 2))})
    checkpoint.save(saved, tmp_path)
    other = collection(optimizer=SGD(0.5), dist_type="hash_roundrobin")
    checkpoint.load(other, tmp_path, reroute=True)
    assert other.shards.local["t"].lookup(torch.tensor([1])).tolist() == [[1.0, 1.0]]


def test_state_that_cannot_be_saved_raises(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def get_extra_state(self) -> Any:
            return 1

    with pytest.raises(UsageError, match="extra state"):
        checkpoint.save(nn.Sequential(collection(), Odd()), tmp_path)
    with pytest.raises(InputError, match="progress"):
        checkpoint.save(collection(), tmp_path, progress={"x": torch.ones(1)})
    with pytest.raises(InputError, match="progress"):
        checkpoint.save(collection(), tmp_path, progress={"x": float("nan")})
    assert not list(tmp_path.glob("data-*"))
    checkpoint.save(nn.Sequential(collection(), nn.Linear(1, 1)), tmp_path)
    with pytest.raises(CheckpointError, match="dense weights do not match"):
        checkpoint.load(nn.Sequential(collection(), nn.Linear(1, 1, bias=False)), tmp_path)
