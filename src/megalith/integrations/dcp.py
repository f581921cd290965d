"""torch.distributed.checkpoint (DCP) at another number of ranks.

A state_dict holds the rows of its rank under keys such as `rank 0 of 2/TABLE/ids`. DCP saves those of all
ranks, and loads the keys that the model has: at another number of ranks they are not in the checkpoint. The
planner asks for the keys of all ranks that are there instead; load_state_dict then takes the rows that this
rank owns. Every rank reads all rows, so `megalith.checkpoint` is faster and needs less memory.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megalith.errors import UsageError
from megalith.nn.collection_state import StateTensor

__all__ = ["TablesLoadPlanner"]

_KEY = re.compile(r"(.*?)(rank [0-9]+ of [0-9]+)(/| \().*", re.DOTALL)


class TablesLoadPlanner(DefaultLoadPlanner):
    """Loads the tables of a DCP checkpoint that any number of ranks has saved. Arguments as in torch.

    Example:
        >>> dcp.save({"model": model}, checkpoint_id=path)  # doctest: +SKIP
        >>> dcp.load({"model": model}, checkpoint_id=path, planner=TablesLoadPlanner())  # doctest: +SKIP
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Replace the keys of this rank by those of all ranks in the checkpoint, if its ranks differ.

        Args:
            state_dict: What is loaded; the state of the model is under a key, as in `{"model": model}`.
            metadata: What the checkpoint holds.
            is_coordinator: Whether this rank coordinates the load.
        """
        if metadata is not None:
            _take_all_ranks(state_dict, metadata, "")
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _take_all_ranks(state: dict[str, Any], metadata: Metadata, path: str) -> None:
    for key, value in state.items():
        if isinstance(value, dict):
            _take_all_ranks(value, metadata, f"{path}{key}.")
    own = [(key, found) for key in state if isinstance(key, str) and (found := _KEY.fullmatch(key))]
    for prefix in {found[1] for _, found in own}:
        mine = {key: found[2] for key, found in own if found[1] == prefix}
        saved = [
            (found, tensor)
            for name, tensor in metadata.state_dict_metadata.items()
            if (found := _KEY.fullmatch(name)) is not None and found[1] == path + prefix
            if isinstance(tensor, TensorStorageMetadata)
        ]
        if not saved or set(mine.values()) <= {found[2] for found, _ in saved}:
            continue
        if not path:
            raise UsageError("at another number of ranks, load the state under a key: {'model': model}")
        for key in mine:
            del state[key]
        for found, tensor in saved:
            rows = found[3] == "/"
            size = (0, *tensor.size[1:]) if rows else tensor.size
            empty = torch.empty(size, dtype=tensor.properties.dtype, device="cpu")
            state[found[0].removeprefix(path)] = StateTensor.of(empty) if rows else empty
