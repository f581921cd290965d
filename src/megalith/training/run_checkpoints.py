"""RunCheckpoints: keeps earlier checkpoints of a run in checkpoints/step-000000001200 and deletes old ones.

A kept checkpoint shares its files with the newest checkpoint of the run by hard links, so that keeping it
writes no data. The files are copied if the file system has no hard links. Files of a checkpoint are never
changed, only replaced, so the linked files stay valid.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megalith.checkpoint import Rotation, read_manifest
from megalith.checkpoint.save_job import commit
from megalith.storage.store import LocalStore
from megalith.training.run_sections import TrainConfig

FOLDER = "checkpoints"


class RunCheckpoints:
    """The kept checkpoints of a run."""

    def __init__(self, directory: Path, *, keep_last: int, keep_every: int | None) -> None:
        self._rotation = Rotation(directory, keep_last=keep_last, keep_every=keep_every)

    @classmethod
    def of(cls, config: TrainConfig, run: Path) -> RunCheckpoints | None:
        """Return the kept checkpoints of a config, or None if the config keeps none."""
        if config.keep_last is None and config.keep_every is None:
            return None
        return cls(run / FOLDER, keep_last=config.keep_last or 1, keep_every=config.keep_every)

    def add(self, checkpoint: Path, step: int) -> None:
        """Keeps a checkpoint, then deletes the checkpoints that the rules do not keep."""
        manifest = read_manifest(checkpoint)
        target = LocalStore(Path(self._rotation.path(step)))
        for file in manifest.all_files():
            _link(checkpoint / file.path, target.root / file.path)
        commit(target, manifest)
        self._rotation.clean()


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
