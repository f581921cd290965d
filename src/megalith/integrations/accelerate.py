"""Hugging Face accelerate with checkpoints that hold the tables of all ranks.

accelerate saves the state_dict of rank 0. With this Accelerator the folder of a state, or of a model, has in
addition a checkpoint of each whole model, readable at any number of ranks: `megalith_0/`, `megalith_1/`, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

import accelerate
from torch import nn

from megalith import checkpoint
from megalith.nn.collection_state import rows_apart

__all__ = ["Accelerator"]


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """accelerate's Accelerator: `save_state`, `load_state` and `save_model` include the tables of all ranks.

    Arguments as for `accelerate.Accelerator`. `checkpoint.load(model, folder + "/megalith_0")` loads a saved
    model without accelerate.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # accelerate passes the folder of a state, which it may choose itself, to hooks alone.
        self.register_save_state_pre_hook(lambda models, _, folder: self._save(models, folder))
        self.register_load_state_pre_hook(self._load)

    def save_state(self, *args: Any, **options: Any) -> Any:
        """Save models, optimizers and so on. A collective call.

        Args:
            args: As in accelerate.
            options: As in accelerate.

        Returns:
            As in accelerate.
        """
        with self._rows_apart(self._models):
            return super().save_state(*args, **options)

    def load_state(self, *args: Any, **options: Any) -> None:
        """Load what `save_state` saved, at any number of ranks. A collective call.

        Args:
            args: As in accelerate.
            options: As in accelerate.
        """
        with self._rows_apart(self._models):
            super().load_state(*args, **options)

    def save_model(
        self, model: nn.Module, save_directory: str | PathLike[str], *args: Any, **options: Any
    ) -> None:
        """Save a model. A collective call.

        Args:
            model: The model.
            save_directory: Where to.
            args: As in accelerate.
            options: As in accelerate.
        """
        with self._rows_apart([model]):
            super().save_model(model, save_directory, *args, **options)
        self._save([model], save_directory)

    def _rows_apart(self, models: Sequence[nn.Module]) -> ExitStack:
        stack = ExitStack()
        for model in models:
            stack.enter_context(rows_apart(model))
        return stack

    def _save(self, models: Sequence[nn.Module], folder: str | PathLike[str]) -> None:
        for number, model in enumerate(models):
            checkpoint.save(self.unwrap_model(model), Path(folder) / f"megalith_{number}", deltas=False)

    def _load(self, models: Sequence[nn.Module], folder: str | PathLike[str]) -> None:
        for number, model in enumerate(models):
            checkpoint.load(self.unwrap_model(model), Path(folder) / f"megalith_{number}")
