"""Snapshots: how a step that broke off is undone. none, a copy in host memory, or a copy on disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megalith.errors import InputError

Policy = Literal["none", "host", "disk"]


class Snapshot:
    """A copy of tensors as they were. restore puts them back; close gives the copy up."""

    def __init__(self, tensors: Mapping[str, Tensor], policy: Policy, directory: Path | None = None) -> None:
        if policy not in ("none", "host", "disk"):
            raise InputError(f"snapshot must be one of none, host, disk, got {policy!r}")
        self.policy = policy
        self._tensors = tensors
        self._copies: dict[str, Tensor] = {}
        self._path: Path | None = None
        if policy == "host":
            self._copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        elif policy == "disk":
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
            self._path = Path(mkdtemp(prefix="gather-snapshot-", dir=directory))
            for number, tensor in enumerate(tensors.values()):
                save_file({"t": tensor.detach().cpu().contiguous()}, self._path / f"{number}.safetensors")

    @property
    def can_restore(self) -> bool:
        """Whether there is anything to restore from."""
        return self.policy != "none"

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the tensors back as they were."""
        for number, (name, tensor) in enumerate(self._tensors.items()):
            if self._path is not None:
                with safe_open(self._path / f"{number}.safetensors", framework="pt") as file:
                    tensor.copy_(file.get_tensor("t"))
            elif name in self._copies:
                tensor.copy_(self._copies[name])

    def close(self) -> None:
        """Deletes the copy."""
        self._copies = {}
        if self._path is not None:
            for file in self._path.iterdir():
                file.unlink()
            self._path.rmdir()
            self._path = None
