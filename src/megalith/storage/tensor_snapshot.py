"""A copy of tensors, in memory or in a spool file, with which a failed change is undone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megalith.ops import checks
from megalith.storage.spool import FileBody, SpoolWriter
from megalith.storage.tensor_files import raw_bytes, tensor_of

SnapshotPolicy = Literal["none", "host", "disk"]


class TensorSnapshot:
    """A copy of tensors."""

    def __init__(
        self, tensors: Mapping[str, Tensor], policy: SnapshotPolicy, directory: Path | None = None
    ) -> None:
        checks.one_of(policy, ("none", "host", "disk"), "snapshot")
        self.policy = policy
        self._tensors = tensors
        self._copies: dict[str, Tensor] = {}
        self._file: FileBody | None = None
        if policy == "host":
            self._copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        elif policy == "disk":
            spool = SpoolWriter(directory)
            try:
                for tensor in tensors.values():
                    spool.write(raw_bytes(tensor))
                self._file = spool.finish()
            except BaseException:
                spool.discard()
                raise

    @property
    def can_restore(self) -> bool:
        """Whether there is a copy."""
        return self.policy != "none"

    @torch.no_grad()
    def restore(self) -> None:
        """Set the tensors to the copy."""
        at = 0
        for name, tensor in self._tensors.items():
            if name in self._copies:
                tensor.copy_(self._copies[name])
            elif self._file is not None and tensor.numel():
                data = self._file.read(at, tensor.numel() * tensor.element_size())
                tensor.copy_(tensor_of(data, tensor.dtype).view(tensor.shape))
                at += len(data)

    def close(self) -> None:
        """Delete the copy."""
        self._copies = {}
        if self._file is not None:
            self._file.close()
            self._file = None
