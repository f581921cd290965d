"""Malformed checkpoints raise before anything of the model is changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megalith import checkpoint
from megalith.errors import CheckpointError
from tests.checkpoint.malformed.checkpoints import (
    CHAINS,
    DENSE,
    FILES,
    MANIFESTS,
    Recipe,
    Spoiled,
    new_optimizer,
)
from tests.checkpoint.support import Model, assert_same, rewrite, state_of, train
from tests.storage.malformed_headers import HEADERS

ALL = {
    f"{group}: {name}": recipe
    for group, recipes in (("manifest", MANIFESTS), ("file", FILES), ("chain", CHAINS), ("dense", DENSE))
    for name, recipe in recipes.items()
}
# Problems that only a model can reveal, and rows that a rewrite moves to their shard's file anyway.
NEEDS_MODEL = (
    "dense: ",
    "manifest: dim of another model",
    "manifest: another optimizer",
    "manifest: rows of other shards",
)


def spoil(root: Path, recipe: Recipe) -> None:
    spoiled = Spoiled(root)
    recipe(spoiled)
    spoiled.finish()


def refused(root: Path) -> str:
    """Return the error of `load`; the model must be unchanged."""
    model = Model(seed=8)
    train(model, 2)
    optimizer = new_optimizer(model)
    before = state_of(model)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(model, root, optimizer=optimizer)
    assert_same(state_of(model), before)
    assert optimizer.state_dict()["state"] == {}
    message = str(caught.value)
    assert message.encode()  # it can be printed
    return message


@pytest.mark.parametrize("name", ALL)
def test_a_malformed_checkpoint_raises_before_anything_is_written(tmp_path: Path, name: str) -> None:
    recipe, words = ALL[name]
    spoil(tmp_path, recipe)
    message = refused(tmp_path)
    assert re.search(words, message), message
    assert name.startswith("dense: ") or str(tmp_path) in message


@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith(NEEDS_MODEL)])
def test_a_malformed_checkpoint_is_detected_and_not_rewritten(tmp_path: Path, name: str) -> None:
    spoil(tmp_path / "from", ALL[name][0])
    before = sorted((tmp_path / "from").rglob("*"))
    assert checkpoint.verify(tmp_path / "from").problems
    with pytest.raises(CheckpointError):
        checkpoint.compact(tmp_path / "from")
    with pytest.raises(CheckpointError):
        checkpoint.reshard(tmp_path / "from", tmp_path / "to", num_shards=2)
    assert sorted((tmp_path / "from").rglob("*")) == before
    assert not (tmp_path / "to" / "manifest.json").exists()


def spoil_file(root: Path, kind: str, content: bytes) -> None:
    def recipe(spoiled: Spoiled) -> None:
        delta = spoiled.delta(1)
        entry = {
            "rows": spoiled.file,
            "rows of a delta": spoiled.table(delta)["pieces"][0]["file"],
            "removed ids": spoiled.table(spoiled.delta(0))["removed"][0]["file"],
            "dense": delta["dense"],
            "optimizer": delta["optimizer_tensors"],
        }[kind]
        rewrite(root, entry, content)

    spoil(root, recipe)


@pytest.mark.parametrize("name", HEADERS)
def test_malformed_files_of_rows_raise(tmp_path: Path, name: str) -> None:
    content, words = HEADERS[name]
    spoil_file(tmp_path, "rows", content)
    assert re.search(words, refused(tmp_path))


@pytest.mark.parametrize("kind", ["rows of a delta", "removed ids", "dense", "optimizer"])
@pytest.mark.parametrize("name", ["seven bytes", "length of 2^63", "overlap", "no rows of endless length"])
def test_malformed_files_of_all_kinds_raise(tmp_path: Path, kind: str, name: str) -> None:
    content, words = HEADERS[name]
    spoil_file(tmp_path, kind, content)
    assert re.search(words, refused(tmp_path))


def test_the_good_checkpoint_is_good(tmp_path: Path) -> None:
    spoil(tmp_path, lambda spoiled: None)
    model = Model(seed=8)
    report = checkpoint.load(model, tmp_path, optimizer=new_optimizer(model))
    assert report.tables["embeddings.user"].refused == 0
    checkpoint.compact(tmp_path)
    again = Model(seed=9)
    checkpoint.load(again, tmp_path)
    assert_same(state_of(again), state_of(model))


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    """A save replaces a link; it never writes to the link's target."""
    outside = tmp_path / "outside"
    outside.write_text("mine")
    root = tmp_path / "root"
    root.mkdir()
    for name in ("manifest.json", "manifest.json.tmp"):
        (root / name).symlink_to(outside)
    checkpoint.save(Model(), root)
    assert outside.read_text() == "mine"
    checkpoint.load(Model(), root)


def test_a_link_to_a_checkpoint_is_a_checkpoint(tmp_path: Path) -> None:
    spoil(tmp_path / "real", lambda spoiled: None)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert checkpoint.load(Model(), tmp_path / "link").rows["embeddings.user"] > 0
