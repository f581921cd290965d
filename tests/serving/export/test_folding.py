"""Folding: pushed rows move to mapped files while requests and pushes continue, and keep their bits."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.serving.export import overlay as overlay_module
from megalith.serving.export.frozen_rows import FrozenRows
from megalith.serving.export.overlay import PRESENT, REMOVED, Compactor, Overlay
from megalith.serving.export.row_format import RowFormat, RowPart
from megalith.serving.export.servable import Servable
from tests.serving.export.test_frozen_rows import write
from tests.serving.exports import export_version, rows
from tests.table.support import assert_same_bits

CODES = RowFormat((RowPart("float32", 2), RowPart("fixed_point", 3, 1 / 64), RowPart("one_bit", 4, 0.5)))
IDS = torch.arange(-20, 120)


def some(ids: Tensor, seed: int, dim: int = 9) -> tuple[Tensor, Tensor]:
    values = torch.randint(-100, 100, (ids.numel(), dim), generator=torch.Generator().manual_seed(seed))
    return ids, values.float() / 64


def seen(overlay: Overlay, frozen: dict[str, FrozenRows] | None = None) -> list[Tensor]:
    """What a reader sees: rows and flags, every scanned row by id, and what the native reader returns."""
    read, flags = overlay.read("t", IDS)
    chunks = list(overlay.scan("t"))
    scanned = torch.cat([ids for ids, _, _ in chunks])
    order = scanned.argsort()
    kept = torch.cat([flag for _, _, flag in chunks])[order] == PRESENT
    stated = flags == PRESENT if overlay.hides_base else flags  # nothing is below: removed is not written
    found = [read, stated, scanned[order][kept], torch.cat([values for _, values, _ in chunks])[order][kept]]
    if frozen is not None:
        out = torch.full((IDS.numel(), 9), 7.0)
        missing = overlay.served(frozen).read(IDS, torch.tensor([IDS.numel()]), out)
        base = torch.zeros_like(read)
        if not overlay.hides_base:
            frozen["t"].read(IDS, base)
        has = (flags == PRESENT)[:, None]
        expected = torch.where(has, read, torch.where((flags == 0)[:, None], base, torch.zeros(1)))
        assert_same_bits(out, expected)
        unwritten = (flags == 0) & ((frozen["t"].find(IDS) < 0) | overlay.hides_base)
        assert missing == int((flags == REMOVED).sum() + unwritten.sum())
        found.append(out)
    return found


@pytest.mark.parametrize("coded", [False, True], ids=["floats", "codes"])
@pytest.mark.parametrize("hides_base", [False, True], ids=["over", "hides"])
def test_a_fold_changes_no_bit_whatever_is_written_meanwhile(
    tmp_path: Path, coded: bool, hides_base: bool
) -> None:
    codes = {"t": CODES} if coded else {}
    folded, plain = (Overlay({"t": 9}, hides_base=hides_base, codes=codes) for _ in range(2))
    frozen = {"t": write(tmp_path / "base", *some(torch.arange(50, 90), 9))}
    folder = Compactor(tmp_path, rows=1)

    def push(ids: Tensor, removed: Tensor, seed: int) -> None:
        for overlay in (folded, plain):
            overlay.apply({"t": some(ids, seed)}, {"t": removed})
        for before, after in zip(seen(plain, frozen), seen(folded, frozen), strict=True):
            assert torch.equal(before, after)

    push(torch.arange(0, 60), torch.tensor([3, 55, 95]), 0)
    sealed = folded.seal()
    push(torch.arange(20, 40), torch.tensor([20, 41, 56]), 1)  # while the fold runs
    folder._fold(folded, sealed)
    assert folder.folds == 1
    push(torch.arange(35, 45), torch.tensor([1, 35]), 2)
    folder.consider(folded)  # merges what was folded before
    folder.join()
    assert folder.folds == 2
    assert folded.unfolded_rows == 0
    push(torch.tensor([3, 41]), torch.tensor([0]), 3)
    assert list(tmp_path.iterdir()) == [tmp_path / "base"]  # no file has a name


def test_a_version_inherits_folded_rows(tmp_path: Path) -> None:
    export_version(tmp_path)
    folder = Compactor(tmp_path, rows=2)
    servable, other = Servable(tmp_path / "1", folder=folder), Servable(tmp_path / "1")
    table = next(iter(servable.signature.tables))
    ids, values = some(torch.arange(5), 4, servable.signature.dims[table])
    servable.apply({table: (ids, values)}, {table: torch.tensor([2])})
    folder.join()
    assert (servable.overlay.unfolded_rows, servable.overlay.folded_rows) == (0, 5)

    other.inherit(servable.overlay)

    assert_same_bits(other.lookup(table, ids), servable.lookup(table, ids))
    features, dense = rows(2)
    scores = [each.predict(features, dense) for each in (servable, other)]
    assert torch.equal(scores[0]["logits"], scores[1]["logits"])
    servable.reset()
    assert len(servable.overlay) == 0


def test_a_fold_waits_for_enough_rows_and_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overlay, folder = Overlay({"t": 9}), Compactor(rows=10)
    overlay.apply({"t": some(torch.arange(9), 0)})
    folder.consider(overlay)
    assert overlay.unfolded_rows == 9

    overlay, folder = Overlay({"t": 9}), Compactor(tmp_path, rows=1, seconds=3600)
    overlay.apply({"t": some(IDS, 0)})
    folder.consider(overlay)
    assert overlay.unfolded_rows == IDS.numel()

    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3600)
    folder.consider(overlay)
    folder.join()
    assert folder.folds == 1
    overlay.apply({"t": some(IDS, 1)})
    folder.consider(overlay)
    assert overlay.unfolded_rows == IDS.numel()  # the next hour began with the end of the fold


def test_folds_that_fail_leave_the_rows_in_one_more_layer_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    overlay, folder = Overlay({"t": 9}), Compactor(tmp_path / "absent", rows=1)
    for seed in range(5):
        overlay.apply({"t": some(IDS, seed)})  # the same ids: each layer would have a copy
        before = seen(overlay)
        folder.consider(overlay)
        folder.join()
        assert all(torch.equal(a, b) for a, b in zip(before, seen(overlay), strict=True))
    assert (folder.folds, len(overlay)) == (0, 2 * IDS.numel())
    assert caplog.text.count("pushed rows stay in memory") == 5

    monkeypatch.setattr(folder, "_directory", tmp_path)
    overlay.apply({"t": some(IDS, 5)})
    folder.consider(overlay)
    folder.join()
    assert (folder.folds, overlay.folded_rows) == (1, IDS.numel())
    assert torch.equal(overlay.read("t", IDS)[0], some(IDS, 5)[1])


def test_a_closed_servable_ends_its_fold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_version(tmp_path / "model")
    folds = tmp_path / "folds"
    folds.mkdir()
    folder = Compactor(folds, rows=1)
    servable = Servable(tmp_path / "model" / "1", folder=folder)
    table = next(iter(servable.signature.tables))
    writer = overlay_module.FrozenWriter
    files: list[int] = []

    def close_then_write(path: Path, *rest: Any) -> Any:
        made = writer(path, *rest)
        files.append(len(list(folds.iterdir())))
        servable.close()  # between the beginning of a file and its rows
        return made

    monkeypatch.setattr(overlay_module, "FrozenWriter", close_then_write)
    ids, values = some(torch.arange(5), 4, servable.signature.dims[table])
    overlay = servable.overlay
    servable.apply({table: (ids, values)})
    folder.join()

    assert files == [1]
    assert list(folds.iterdir()) == []
    assert folder.folds == 0
    assert torch.equal(overlay.read(table, ids)[0], values)
    folder.consider(overlay)
    assert overlay.unfolded_rows == 0  # nothing is sealed, and nothing is folded any more


def test_the_memory_of_folded_rows_is_freed_without_a_request(tmp_path: Path) -> None:
    overlay, folder = Overlay({"t": 9}), Compactor(tmp_path, rows=1)
    frozen = {"t": write(tmp_path / "base", *some(torch.arange(50, 90), 9))}
    overlay.apply({"t": some(IDS, 0)})
    out = torch.empty(IDS.numel(), 9)
    overlay.served(frozen).read(IDS, torch.tensor([IDS.numel()]), out)  # makes the native reader
    table = weakref.ref(overlay._layers["t"][0])

    folder.consider(overlay)
    folder.join()
    gc.collect()

    assert folder.folds == 1
    assert table() is None
