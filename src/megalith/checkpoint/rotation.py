"""Rotation: a series of checkpoints in one place, of which old ones are deleted.

A folder `step-000000012000` holds each. A checkpoint loses its manifest first when it is deleted, so that
nobody takes what is left for one.
"""

from __future__ import annotations

import re
from os import PathLike
from typing import Any

from torch import nn

from megalith.checkpoint.chain import ranks_of
from megalith.checkpoint.dense_state import collections_of
from megalith.checkpoint.manifest import NAME, Manifest
from megalith.checkpoint.saving import SaveHandle, async_save, save
from megalith.errors import InputError
from megalith.storage.store import Store, open_store

_FOLDER = re.compile(r"step-(\d{12})")


class Rotation:
    """Checkpoints of a run by step.

    path: a directory or address. keep_last: how many of the newest stay. keep_every: those of steps that this
    divides stay too. Both are applied after each save.
    """

    def __init__(
        self, path: str | PathLike[str] | Store, *, keep_last: int = 3, keep_every: int | None = None
    ) -> None:
        if keep_last < 1 or (keep_every is not None and keep_every < 1):
            raise InputError(f"keep_last and keep_every must be positive, got {keep_last} and {keep_every}")
        self.store: Store = open_store(path)
        self.keep_last = keep_last
        self.keep_every = keep_every

    def path(self, step: int) -> str:
        """Where the checkpoint of a step lies."""
        return self._place(step).where

    def _place(self, step: int) -> Store:
        if not 0 <= step < 10**12:
            raise InputError(f"step must be between 0 and 10^12, got {step}")
        return self.store.inside(_folder(step))

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, ascending."""
        return [step for step in self._all_steps() if self._is_complete(step)]

    def latest(self) -> str | None:
        """Where the newest complete checkpoint lies, if there is one."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def save(self, model: nn.Module, step: int, **options: Any) -> Manifest:
        """`checkpoint.save` under this step, then deletes what the rules do not keep."""
        manifest = save(model, self._place(step), **options)
        if ranks_of(collections_of(model)).rank == 0:
            self.clean()
        return manifest

    def async_save(self, model: nn.Module, step: int, **options: Any) -> SaveHandle:
        """`checkpoint.async_save` under this step; then deletes what the rules do not keep."""
        first = ranks_of(collections_of(model)).rank == 0
        return async_save(model, self._place(step), then=self.clean if first else None, **options)

    def clean(self) -> list[int]:
        """Deletes what the rules do not keep, and what saves that died left; the steps that are gone."""
        steps = self.steps()
        gone = [
            step
            for step in steps[: -self.keep_last]
            if self.keep_every is None or step % self.keep_every != 0
        ]
        # A save under way is newer than all complete ones.
        newest = steps[-1] if steps else 0
        dead = [step for step in self._all_steps() if step not in steps and step < newest]
        for step in gone:
            self.store.remove(f"{_folder(step)}/{NAME}")
        for step in gone + dead:
            self.store.remove(_folder(step))
        return gone

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
