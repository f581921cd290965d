"""What workers and servers send each other: plain numbers and NumPy arrays.

Pushes travel over a socket (`channel_messages.py`), everything else through Ray. `tensor_of` makes tensors of
received arrays without a copy. A `ServerWrite` is everything that changes tables:

    kind               header                                               arrays
    push               counts, step, time, scale, clip_norm, rates          ids, grads (bytes), seen
    assign, assign_add counts, time                                         ids, rows
    reinitialize       counts, time                                         ids
    remove             counts                                               ids
    evict              time                                                 -
    evict_part         time, parts, start                                   -
    restore            table                                                columns of a chunk
    restore_pending    table                                                ids, counts
    clear              tables                                               -
    track, untrack     consumer                                             -
    mark               consumer, counts                                     ids
    adopt              pushes by worker, step, complete                     -
    fail               error                                                -

`counts` is the number of ids of each table, in the order of the configs; ids and rows are concatenated in
that order. The header holds JSON data only, so a write can be stored in a file without pickle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megalith.routing import Router
from megalith.table import Chunk, TableConfig

if TYPE_CHECKING:
    from megalith.ps.recovery import Recovery

Array = np.ndarray[Any, Any]
READER = -1  # The number of a process that only reads, in place of the number of a worker


@dataclass(frozen=True)
class ServerWrite:
    kind: str  # See the module
    header: dict[str, Any]  # JSON data
    arrays: dict[str, Array] = field(default_factory=dict)  # Arrays by name


@dataclass(frozen=True)
class SpaceSpec:
    """The tables of one `ServerShards`, as its servers create them."""

    configs: Sequence[TableConfig]  # All tables
    engine: str  # As for `Table`
    seed: int  # As for `Table`
    wire: tuple[str, str]  # The precision of rows and of gradients
    sync: bool  # Whether a step waits for the gradients of all workers
    staleness: int | None  # How many steps a worker may be ahead of the slowest; None: any number
    num_workers: int  # Number of workers that the first step waits for, with `sync`
    timeout: float  # Seconds that a wait for other workers may take
    described: str  # Text by which two specs are compared
    recovery: Recovery | None = None  # How a server gets its rows back; None: it does not
    # The router of each table, for processes that only read
    routers: Mapping[str, Router] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """The error of a call, as a server returns it."""

    error: Exception


@dataclass(frozen=True)
class Joined:
    """What a server knows of a worker that joins."""

    accepted: int  # The number of the last write of this worker that the server has; 0: none
    step: int  # The highest step of all pushes; -1: none
    incarnation: str  # Identifies the start of the server


class _Memory:
    """Memory of an array that NumPy marks read-only, for `tensor_of`; keeps the array alive."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.__array_interface__ = dict(
            array.__array_interface__, data=(array.__array_interface__["data"][0], False)
        )


def tensor_of(array: Array) -> Tensor:
    """Return the memory of an array as a tensor, without a copy. It must not be written to."""
    if not array.size:  # NumPy's strides of an empty array may be 0
        return torch.empty(array.shape, dtype=torch.from_numpy(np.empty(1, array.dtype)).dtype, device="cpu")
    if array.__array_interface__["data"][0] % 8:
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Memory(array)))


def array_of(tensor: Tensor) -> Array:
    """Return a tensor as an array: of the same memory if it is contiguous on the CPU, otherwise of a copy."""
    found: Array = tensor.detach().cpu().contiguous().numpy()
    return found


def chunk_arrays(chunk: Chunk) -> dict[str, Array]:
    columns = {"ids": chunk.ids, "rows": chunk.rows, "time": chunk.time}
    columns |= {f"state/{key}": values for key, values in chunk.state.items()}
    columns |= {
        name: values for name, values in (("count", chunk.count), ("step", chunk.step)) if values is not None
    }
    return {name: array_of(values) for name, values in columns.items()}


def chunk_of(arrays: Mapping[str, Array]) -> Chunk:
    columns = {name: tensor_of(values) for name, values in arrays.items()}
    state = {name[6:]: values for name, values in columns.items() if name.startswith("state/")}
    return Chunk(
        columns["ids"],
        rows=columns["rows"],
        state=state,
        time=columns["time"],
        count=columns.get("count"),
        step=columns.get("step"),
    )
