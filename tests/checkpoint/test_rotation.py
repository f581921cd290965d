"""Rotation: which checkpoints of a run are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalith import checkpoint
from megalith.errors import InputError


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left"),
    [
        (1, None, [7]),
        (3, None, [5, 6, 7]),
        (2, 3, [0, 3, 6, 7]),
        (1, 1, [0, 1, 2, 3, 4, 5, 6, 7]),
        (9, None, list(range(8))),
    ],
)
def test_the_newest_and_the_multiples_are_kept(
    tmp_path: Path, keep_last: int, keep_every: int | None, left: list[int]
) -> None:
    rotation = checkpoint.Rotation(tmp_path / "new", keep_last=keep_last, keep_every=keep_every)
    assert (rotation.steps(), rotation.latest(), rotation.clean()) == ([], None, [])
    model = torch.nn.Linear(1, 1)
    for step in range(8):
        rotation.save(model, step)
    assert rotation.steps() == left
    assert rotation.latest() == rotation.path(7) == str(tmp_path / "new" / "step-000000000007")


def test_incomplete_checkpoints_are_not_listed_and_old_ones_are_deleted(tmp_path: Path) -> None:
    rotation = checkpoint.Rotation(tmp_path, keep_last=2)
    model = torch.nn.Linear(1, 1)
    rotation.save(model, 1)
    for step in (0, 2, 9):
        (tmp_path / f"step-{step:012}" / "data-x").mkdir(parents=True)
    (tmp_path / "step-7").mkdir()
    (tmp_path / "notes").mkdir()
    assert rotation.steps() == [1]
    assert rotation.latest() == rotation.path(1)

    rotation.save(model, 3)

    assert rotation.steps() == [1, 3]
    left = {path.name for path in tmp_path.iterdir()}
    # Step 9 may be a save in progress; other names are not checkpoints.
    assert left == {"notes", "step-7", *(f"step-{step:012}" for step in (1, 3, 9))}


def test_a_failed_save_deletes_nothing(tmp_path: Path) -> None:
    rotation = checkpoint.Rotation(tmp_path, keep_last=1)
    model = torch.nn.Linear(1, 1)
    rotation.save(model, 1)
    with pytest.raises(InputError):
        rotation.save(model, 2, precision="float8")
    assert rotation.steps() == [1]


def test_invalid_rules_and_steps_raise(tmp_path: Path) -> None:
    for keep in ({"keep_last": 0}, {"keep_every": 0}):
        with pytest.raises(InputError, match="must be positive"):
            checkpoint.Rotation(tmp_path, **keep)
    for step in (-1, 10**12):
        with pytest.raises(InputError, match="step must be between"):
            checkpoint.Rotation(tmp_path).path(step)
