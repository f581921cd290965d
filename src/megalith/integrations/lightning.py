"""Lightning's DDP with checkpoints that hold the tables of all ranks.

Lightning saves the state_dict of rank 0. With this strategy a checkpoint is a directory:

    NAME.ckpt/checkpoint.ckpt    what Lightning saves; its state_dict has the dense weights alone
    NAME.ckpt/megalith/          a checkpoint of the whole model, readable at any number of ranks
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from megalith import checkpoint as checkpoints
from megalith.errors import CheckpointError
from megalith.nn.collection_state import rows_apart

__all__ = ["TablesStrategy"]

SAVED = "megalith"
FILE = "checkpoint.ckpt"


class TablesStrategy(DDPStrategy):  # type: ignore[misc]
    """DDP for models with tables: checkpoints include them, and load at any number of ranks.

    It serves `ModelCheckpoint`, `trainer.save_checkpoint` and `ckpt_path`. `checkpoint.load(model,
    "best.ckpt/megalith")` loads such a checkpoint without Lightning. Arguments as for `DDPStrategy`.

    Example:
        >>> trainer = Trainer(strategy=TablesStrategy(), devices=2)  # doctest: +SKIP
    """

    _loading: Path | None = None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the dense weights."""
        with rows_apart(self.lightning_module):
            state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | PathLike[str], storage_options: Any = None
    ) -> None:
        """Write the directory. A collective call.

        Args:
            checkpoint: What Lightning saves.
            filepath: The directory.
            storage_options: As in Lightning.

        Raises:
            CheckpointError: It is a URL.
        """
        path = Path(self.broadcast(fspath(filepath)))
        if "://" in fspath(filepath):
            raise CheckpointError(f"TablesStrategy saves to directories, not to {filepath}")
        manifest = checkpoints.save(self.lightning_module, path / SAVED, deltas=False)
        # Both parts are replaced one after the other, so the file names the save that it belongs to.
        super().save_checkpoint(checkpoint | {SAVED: manifest.tip}, path / FILE, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | PathLike[str], *args: Any, **options: Any
    ) -> dict[str, Any]:
        """Read what Lightning saved; `load_model_state_dict` loads the tables.

        Args:
            checkpoint_path: The directory.
            args: As in Lightning.
            options: As in Lightning.

        Returns:
            What Lightning saved.

        Raises:
            CheckpointError: It is not a checkpoint of this strategy, or was interrupted.
        """
        path = Path(checkpoint_path)
        if not (path / FILE).exists():
            raise CheckpointError(f"{path} is not a checkpoint that TablesStrategy has saved")
        found: dict[str, Any] = super().load_checkpoint(path / FILE, *args, **options)
        self._loading = path / SAVED
        if checkpoints.read_manifest(self._loading).tip != found.get(SAVED):
            raise CheckpointError(
                f"{path}: a save was interrupted, so {FILE} and {SAVED}/ are of different steps"
            )
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load dense weights and tables. A collective call.

        Args:
            checkpoint: What `load_checkpoint` returned.
            strict: As in torch, for the dense weights.
        """
        with rows_apart(self.lightning_module):
            super().load_model_state_dict(checkpoint, strict=strict)
        if self._loading is not None:
            checkpoints.load(self.lightning_module, self._loading)
