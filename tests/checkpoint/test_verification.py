"""verify: no problem for a good checkpoint, every problem of a damaged one."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from megalith import SGD, Adagrad, EmbeddingCollection, Feature, TableConfig, checkpoint
from megalith.checkpoint import saved_rows


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            TableConfig("user", dim=2, optimizer=Adagrad(0.1)),
            TableConfig("item", dim=1, optimizer=SGD(0.1)),
        ]
        self.e = EmbeddingCollection(tables, [Feature("u", "user"), Feature("i", "item")])
        self.d = nn.Linear(2, 1)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base of 30 and 10 rows in several files, and a delta that changes 2 rows, adds 1 and removes 2."""
    monkeypatch.setattr(saved_rows, "PIECE_BYTES", 300)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    model.d(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    ids = torch.arange(30)
    model.e.shards.assign({"user": (ids, torch.rand(30, 2)), "item": (ids[:10], torch.rand(10, 1))})
    checkpoint.save(model, tmp_path / "c", optimizer=optimizer)
    model.e.shards.assign({"user": (torch.tensor([3, 4, 77]), torch.rand(3, 2))})
    model.e.shards.remove({"user": torch.tensor([8, 9])})
    checkpoint.save_delta(model, tmp_path / "c", optimizer=optimizer)
    return tmp_path / "c"


def manifest_of(root: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((root / "manifest.json").read_text())
    return data


def user(save: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = save["collections"]["e"]["tables"]["user"]
    return entry


def rewrite(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest, then correct lengths and checksums."""
    data = manifest_of(root)
    change(data)
    for save in (data, *data["deltas"]):
        for piece in (*user(save)["pieces"], *user(save)["removed"]):
            raw = (root / piece["file"]["path"]).read_bytes()
            piece["file"] |= {"bytes": len(raw), "checksum": f"crc32:{zlib.crc32(raw):08x}"}
    (root / "manifest.json").write_text(json.dumps(data))


def change_ids(root: Path, piece: dict[str, Any], at: int, id: int) -> None:
    path = root / piece["file"]["path"]
    tensors = load_file(path)
    tensors["ids"][at] = id
    save_file(tensors, path)


def test_a_good_checkpoint(saved: Path) -> None:
    seen: list[int] = []
    result = checkpoint.verify(saved, on_bytes=seen.append)
    files = list(saved.rglob("*.safetensors"))
    assert result.problems == []
    assert (result.files, result.rows) == (len(files), 30 + 10 + 3)
    assert result.bytes == seen[-1] == sum(path.stat().st_size for path in files)


@pytest.mark.parametrize("mode", ["roundrobin", "hash_roundrobin", "continuous"])
def test_a_good_checkpoint_of_several_shards(saved: Path, tmp_path: Path, mode: str) -> None:
    size = 5 if mode == "continuous" else None
    checkpoint.reshard(saved, tmp_path / "r", num_shards=4, dist_type=mode, block_size=size)
    assert checkpoint.verify(tmp_path / "r").problems == []


def test_all_damage_is_listed_not_just_the_first(saved: Path) -> None:
    data = manifest_of(saved)
    first, second, third = (saved / piece["file"]["path"] for piece in user(data)["pieces"][:3])
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    raw = bytearray(third.read_bytes())
    raw[-1] ^= 1
    third.write_bytes(raw)
    (saved / data["dense"]["path"]).write_bytes(b"")
    (saved / data["deltas"][0]["optimizer_tensors"]["path"]).unlink()

    problems = checkpoint.verify(saved).problems

    assert len(problems) == 5
    for problem, path, words in zip(
        problems,
        (first, second, third, saved / data["dense"]["path"], ""),
        ("cannot be read", "bytes, but its manifest states", "damaged", "0 bytes", "cannot be read"),
        strict=True,
    ):
        assert str(path) in problem
        assert words in problem


def duplicate(root: Path, data: dict[str, Any]) -> None:
    pieces = user(data)["pieces"]
    change_ids(root, pieces[0], 0, int(load_file(root / pieces[1]["file"]["path"])["ids"][0]))


def lost_delta_row(root: Path, data: dict[str, Any]) -> None:
    change_ids(root, user(data["deltas"][0])["removed"][0], 0, 12345)


def saved_and_removed(root: Path, data: dict[str, Any]) -> None:
    delta = user(data["deltas"][0])
    change_ids(
        root, delta["removed"][0], 0, int(load_file(root / delta["pieces"][0]["file"]["path"])["ids"][0])
    )


def wrong_live(root: Path, data: dict[str, Any]) -> None:
    user(data)["live"] = 29


def wrong_shard(root: Path, data: dict[str, Any]) -> None:
    user(data)["pieces"][0]["shard"] = 1


def gap(root: Path, data: dict[str, Any]) -> None:
    data["deltas"][0]["previous"] = "000000000000"


def lost_tensor(root: Path, data: dict[str, Any]) -> None:
    data["optimizer"] = {"dict": [["state", {"tensor": "nowhere"}]]}


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (duplicate, "more than once"),
        (lost_delta_row, "it has 30 rows, but its manifest states 29"),
        (saved_and_removed, "both saved and removed"),
        (wrong_live, "it has 30 rows, but its manifest states 29"),
        (wrong_shard, "on shard 1, against the routing"),
        (gap, "gap in the chain"),
        (lost_tensor, "'nowhere' is missing"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_problems_that_checksums_do_not_show(
    saved: Path, harm: Callable[[Path, dict[str, Any]], None], words: str
) -> None:
    rewrite(saved, lambda data: harm(saved, data))
    assert words in "\n".join(checkpoint.verify(saved).problems)


def test_rows_on_the_wrong_shard(saved: Path, tmp_path: Path) -> None:
    root = tmp_path / "r"
    checkpoint.reshard(saved, root, num_shards=2)

    def swap(data: dict[str, Any]) -> None:
        for piece in user(data)["pieces"]:
            piece["shard"] = 1 - piece["shard"]

    rewrite(root, swap)
    problems = checkpoint.verify(root).problems
    assert len(problems) == len(user(manifest_of(root))["pieces"])
    assert all("against the routing Router('roundrobin', 2)" in problem for problem in problems)


def test_a_missing_or_invalid_manifest_is_a_problem(tmp_path: Path) -> None:
    assert "no complete checkpoint" in checkpoint.verify(tmp_path).problems[0]
    (tmp_path / "manifest.json").write_text("{")
    assert "is not valid JSON" in checkpoint.verify(tmp_path).problems[0]
