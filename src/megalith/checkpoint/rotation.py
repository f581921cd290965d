"""Rotation: a series of checkpoints under one path, of which old ones are deleted.

Each is in a folder such as `step-000000012000`. Deleting a checkpoint begins with its manifest, so that a
partly deleted folder is never taken for a checkpoint.
"""

from __future__ import annotations

import re
from os import PathLike
from typing import Any

from torch import nn

from megalith.checkpoint.manifest import NAME, Manifest
from megalith.checkpoint.model_state import check_equal_options, ranks_of
from megalith.checkpoint.saving import SaveHandle, async_save, save
from megalith.distributed.ranks import Ranks
from megalith.errors import CheckpointError, InputError
from megalith.storage.store import Store, open_store

_FOLDER = re.compile(r"step-(\d{12})")


class Rotation:
    """The checkpoints of a run by step. Old ones are deleted after each save.

    Args:
        path: A directory, a URL or a store.
        keep_last: How many of the newest checkpoints are kept.
        keep_every: Checkpoints whose step is a multiple of this are kept too.
    """

    def __init__(
        self, path: str | PathLike[str] | Store, *, keep_last: int = 3, keep_every: int | None = None
    ) -> None:
        for kept in (keep_last, 1 if keep_every is None else keep_every):
            if isinstance(kept, bool) or not isinstance(kept, int) or kept < 1:
                raise InputError(
                    f"keep_last and keep_every must be positive, got {keep_last!r} and {keep_every!r}"
                )
        self.store: Store = open_store(path)
        self.keep_last = keep_last
        self.keep_every = keep_every

    def path(self, step: int) -> str:
        """Return the path of a checkpoint.

        Args:
            step: Its step.

        Returns:
            The directory or URL, whether the checkpoint exists or not.

        Raises:
            InputError: The step is out of range.
        """
        return self._store_of(step).where

    def _store_of(self, step: int) -> Store:
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**12:
            raise InputError(f"step must be between 0 and 10^12, got {step!r}")
        return self.store.inside(_folder(step))

    def _agreed_store(self, step: int, ranks: Ranks) -> Store:
        """Return the store of a step; raise on every rank unless all ranks pass the same valid step."""
        store = ranks.agree(lambda: self._store_of(step), error=CheckpointError)
        check_equal_options(ranks, "Rotation", {"step": step})
        return store

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, ascending."""
        return [step for step in self._all_steps() if self._is_complete(step)]

    def latest(self) -> str | None:
        """Return the path of the newest complete checkpoint; None if there is none."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def save(self, model: nn.Module, step: int, **options: Any) -> Manifest:
        """Save a checkpoint of a step, then delete old ones.

        Args:
            model: The model.
            step: The step, which names the folder.
            **options: Those of `checkpoint.save`.

        Returns:
            The manifest of the checkpoint.
        """
        ranks = ranks_of(model)
        manifest = save(model, self._agreed_store(step, ranks), **options)
        if ranks.rank == 0:
            self.clean()
        return manifest

    def async_save(self, model: nn.Module, step: int, **options: Any) -> SaveHandle:
        """Save a checkpoint of a step while training continues, then delete old ones.

        Args:
            model: The model.
            step: The step, which names the folder.
            **options: Those of `checkpoint.async_save`.

        Returns:
            A handle to wait on.
        """
        ranks = ranks_of(model)
        store = self._agreed_store(step, ranks)
        return async_save(model, store, on_complete=self.clean if ranks.rank == 0 else None, **options)

    def clean(self) -> list[int]:
        """Delete the checkpoints that are not kept, and the remains of interrupted saves.

        Returns:
            The steps of the deleted checkpoints.
        """
        steps = self.steps()
        deleted = [
            step
            for step in steps[: -self.keep_last]
            if self.keep_every is None or step % self.keep_every != 0
        ]
        # A save in progress is newer than all complete ones.
        newest = steps[-1] if steps else 0
        interrupted = [step for step in self._all_steps() if step not in steps and step < newest]
        for step in deleted:
            self.store.remove(f"{_folder(step)}/{NAME}")
        for step in deleted + interrupted:
            self.store.remove(_folder(step))
        return deleted

    def _all_steps(self) -> list[int]:
        found = (_FOLDER.fullmatch(name) for name in self.store.folders())
        return sorted(int(match[1]) for match in found if match)

    def _is_complete(self, step: int) -> bool:
        try:
            return self.store.size(f"{_folder(step)}/{NAME}") > 0
        except FileNotFoundError:
            return False


def _folder(step: int) -> str:
    return f"step-{step:012}"
