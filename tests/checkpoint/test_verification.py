"""verify: no problem for a good checkpoint, every problem of a damaged one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

from megalith import checkpoint
from tests.checkpoint.malformed.checkpoints import Recipe, Spoiled, piece, rows, table
from tests.checkpoint.support import edit

Data = dict[str, Any]


@pytest.fixture
def spoiled(tmp_path: Path) -> Spoiled:
    return Spoiled(tmp_path / "c")


def test_a_good_checkpoint(spoiled: Spoiled) -> None:
    seen: list[int] = []
    result = checkpoint.verify(spoiled.root, on_bytes=seen.append)
    files = list(spoiled.root.rglob("*.safetensors"))
    stored = checkpoint.read_manifest(spoiled.root).tables().values()
    assert result.problems == []
    assert (result.files, result.rows) == (len(files), sum(entry.rows for save in stored for entry in save))
    assert result.bytes == seen[-1] == sum(path.stat().st_size for path in files)


@pytest.mark.parametrize("mode", ["roundrobin", "hash_roundrobin", "continuous"])
def test_several_shards_are_good_until_their_rows_are_exchanged(spoiled: Spoiled, mode: str) -> None:
    size, root = 5 if mode == "continuous" else None, spoiled.root.parent / "r"
    checkpoint.reshard(spoiled.root, root, num_shards=2, dist_type=mode, block_size=size)
    assert checkpoint.verify(root).problems == []

    exchanged: list[Data] = []

    def exchange(manifest: Data) -> None:
        exchanged.extend(manifest["collections"]["embeddings"]["tables"]["user"]["pieces"])
        for each in exchanged:
            each["shard"] = 1 - each["shard"]

    edit(root, exchange)
    problems = checkpoint.verify(root).problems
    assert len(problems) == len(exchanged) > 0
    assert all(f"against the routing Router('{mode}', 2" in problem for problem in problems)


def test_all_damage_is_listed_not_just_the_first(spoiled: Spoiled) -> None:
    files = [spoiled.root / file.path for file in checkpoint.read_manifest(spoiled.root).files()]
    missing, cut, changed, empty, *_ = files
    missing.unlink()
    cut.write_bytes(cut.read_bytes()[:-1])
    changed.write_bytes(changed.read_bytes()[:-1] + bytes([changed.read_bytes()[-1] ^ 1]))
    empty.write_bytes(b"")

    problems = checkpoint.verify(spoiled.root).problems

    words = ("cannot be read", "bytes, but its manifest states", "damaged", "0 bytes")
    assert len(problems) == 4
    for problem, path, said in zip(problems, files, words, strict=False):
        assert str(path) in problem
        assert said in problem


def saved_and_removed(s: Spoiled) -> None:
    saved = load((s.root / s.table(s.delta(0))["pieces"][0]["file"]["path"]).read_bytes())["ids"][0]
    s.tensors(lambda t: t["ids"].__setitem__(0, saved), s.removed["file"])


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (rows(lambda t: t["ids"].__setitem__(0, t["ids"][1])), "more than once"),
        (lambda s: s.tensors(lambda t: t["ids"].__setitem__(0, 12345), s.removed["file"]), "rows, but its"),
        (saved_and_removed, "both saved and removed"),
        (table(live=1), "rows, but its manifest states 1"),
        (piece(shard=1), "on shard 1, against the routing"),
        (lambda s: s.delta(0).update(previous="000000000000"), "gap in the chain"),
        (
            lambda s: s.top.update(optimizer={"dict": [["state", {"tensor": "nowhere"}]]}),
            "'nowhere' is missing",
        ),
    ],
    ids=["duplicate", "lost row", "saved and removed", "live", "shard", "gap", "lost tensor"],
)
def test_problems_that_checksums_do_not_show(spoiled: Spoiled, recipe: Recipe, words: str) -> None:
    recipe(spoiled)
    spoiled.finish()
    assert words in "\n".join(checkpoint.verify(spoiled.root).problems)
