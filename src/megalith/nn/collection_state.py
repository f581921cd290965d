"""The state of a collection: its rows in a state_dict, and what it remembers about its checkpoints.

A state_dict holds tensors only, under keys with their rank:

    key (after the collection's prefix)          tensor
    rank R of W (at another world size: ...)     int64 [3]: global step, number of shards, this shard
    rank R of W/TABLE/ids                        int64 [n]
    rank R of W/TABLE/rows                       float32 [n, dim]
    rank R of W/TABLE/state/SEGMENT/NAME         float32 [n, size], one per optimizer state
    rank R of W/TABLE/time                       int64 [n], seconds
    rank R of W/TABLE/count, step                int64 [n] each, if a policy counts updates
    rank R of W/TABLE/pending_ids, _counts       int64 [k] each, if `MinCount` counts ids without a row

torch.distributed.checkpoint (DCP) writes each key once for all ranks, hence the rank in the keys. It prints
the first key that is missing, which is the one with the remedy. R and W are those of the default process
group; those of the shards are in the first tensor.

DCP loads a tensor into the one that the state_dict of the model holds, and only if both have the same size.
Tables grow, and a model that is about to load usually has no rows. A `StateTensor` has any number of rows:
it is a plain tensor for everything except DCP, which it answers through DCP's own protocol for tensor
subclasses:

    DCP, on save        __create_write_items__    the items of a plain tensor
                        __get_tensor_shard__      the plain tensor
    DCP, on load        size()                    equal to a size with any number of rows
                        __create_chunk_list__     all rows that there are; this tensor is empty from now on
                        __get_tensor_shard__      a target that takes the number of rows that are read

The number of columns must be the same. A table without rows has nothing to read, so its tensors stay empty.
At another world size the planner of `megalith.integrations.dcp` reads the tensors of all ranks, and each rank
takes its rows.

Tools that save the state_dict of one rank alone would lose the rows of other ranks, so they raise. Such a
tool is recognised by its functions on the call stack:

    function              called when                          looks for
    check_state_caller    state_dict() is called               a function of `_SAVERS`, or a full_state_dict
    check_trainer         tables are spread over the ranks,    Lightning's ModelCheckpoint and its strategies
                          usually at the first batch           that fork, which would raise after training
"""

from __future__ import annotations

import math
import mmap
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from megalith.distributed.ranks import current_rank, world_size
from megalith.errors import InputError, UsageError
from megalith.shards import LocalShards, Shards
from megalith.table import Chunk, MinCount, Table, TableConfig
from megalith.table.table_data import MAX_TIME


@dataclass
class CheckpointState:
    """Where the rows of a collection come from, and whether a save of them is in progress.

    A copy of a collection starts without saves: those of the original are not its own.
    """

    # The address of the checkpoint and the id of the save that the rows were saved to or loaded from; None if
    # there is none. A delta can only be added there.
    last_save: tuple[str, str] | None = None
    save_in_progress: object | None = None
    # Whether an integration saves and loads the rows itself, so that a state_dict has none.
    rows_apart: bool = False
    # The routing mode and block size that each table was saved with, as the last load found them. With one
    # shard nothing else records them; the next save carries them over.
    routing: dict[str, tuple[str, int | None]] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy without saves."""
        return CheckpointState, (None, None, False, dict(self.routing))


@contextmanager
def rows_apart(model: nn.Module) -> Iterator[None]:
    """Leave the rows of all collections of a model out of its state_dict and of load_state_dict."""
    found: list[Any] = [
        m for m in model.modules() if isinstance(getattr(m, "checkpoint_state", None), CheckpointState)
    ]
    if world_size() > 1 and any(isinstance(collection._shards, LocalShards) for collection in found):
        raise UsageError(
            "each rank has tables of its own (LocalShards), but one checkpoint is saved for all ranks: build "
            "the collection from a list of TableConfig, which spreads the tables over the ranks"
        )
    for collection in found:
        collection.checkpoint_state.rows_apart = True
    try:
        yield
    finally:
        for collection in found:
            collection.checkpoint_state.rows_apart = False


LONGEST = 1 << 62
"""More rows than any tensor has."""

_DCP = "torch.distributed.checkpoint."


class AnyLength(int):
    """A number of rows that equals every other number, and otherwise is an int."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int)

    def __ne__(self, other: object) -> bool:
        return not isinstance(other, int)

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


class StateTensor(Tensor):
    """A tensor of a state_dict, [rows] or [rows, columns]; copies in files are plain tensors."""

    # Results of operations are plain tensors, as for nn.Parameter.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    loading = False

    @staticmethod
    def of(tensor: Tensor) -> StateTensor:
        """Make a StateTensor of a tensor."""
        # tensor: [rows] or [rows, columns].
        return tensor.as_subclass(StateTensor)

    def plain(self) -> Tensor:
        """Return a plain tensor that shares the memory of this one."""
        return self.detach().as_subclass(Tensor)

    def size(self, dim: Any = None) -> Any:
        """Return the size, as `torch.Tensor.size`."""
        if dim is not None:
            return self.shape[dim]
        caller = sys._getframe().f_back
        if caller is None or not caller.f_globals.get("__name__", "").startswith(_DCP):
            return self.shape
        return torch.Size((AnyLength(self.shape[0]), *self.shape[1:]))

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.planner_helpers import _create_write_items  # imported by the caller

        return _create_write_items(fqn, self.plain())

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        self.loading = True
        self.resize_rows(0)
        offsets, sizes = [0] * self.dim(), (LONGEST, *self.shape[1:])
        return [ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        if not self.loading:
            return self.plain()
        target = self.plain().as_subclass(_LoadTarget)
        target.owner = self
        return target

    def resize_rows(self, rows: int) -> Tensor:
        """Replace the content by rows that are not initialised."""
        self.data = new_column(rows, self.plain())[0]
        return self.plain()

    def __deepcopy__(self, memo: dict[int, Any]) -> StateTensor:
        if id(self) not in memo:
            memo[id(self)] = StateTensor.of(self.plain().clone())
        copied: StateTensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)


class _LoadTarget(Tensor):
    """What DCP reads into: it narrows this tensor to the rows that it reads, which the owner then has."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    owner: StateTensor

    def size(self, dim: Any = None) -> Any:
        size = (LONGEST, *self.shape[1:])
        return torch.Size(size) if dim is None else size[dim]

    def narrow(self, dim: Any, start: Any, length: Any) -> Tensor:
        if dim != 0 or start != 0:
            raise NotImplementedError("a table's rows are saved in one piece")
        return self.owner.resize_rows(length)


_SAVE = "call megalith.checkpoint.save(model, path) on all ranks instead, and checkpoint.load to resume"
_LIGHTNING = "pass strategy=megalith.integrations.lightning.TablesStrategy() to the Trainer"
_ACCELERATE = "use megalith.integrations.accelerate.Accelerator"
_NO_FORK = (
    'use strategy="ddp": the strategies "ddp_fork", "ddp_spawn" and "ddp_notebook" return the state_dict of '
    "rank 0 to the first process and end the ranks, with their rows"
)
_STRATEGY = ("lightning.pytorch.strategies.strategy", "lightning_module_state_dict")
_LAUNCHER = "lightning.pytorch.strategies.launchers.multiprocessing"
_SAVERS = {
    _STRATEGY: ("Lightning", f"{_LIGHTNING}, or {_SAVE}"),
    (_LAUNCHER, "_collect_rank_zero_results"): ("Lightning", _NO_FORK),
    ("lightning.fabric.strategies.strategy", "get_module_state_dict"): ("Lightning Fabric", _SAVE),
    ("accelerate.accelerator", "get_state_dict"): ("accelerate", f"{_ACCELERATE}, or {_SAVE}"),
}
"""Functions that call state_dict() on all ranks and keep the result of rank 0 alone, with the remedy."""

_FULL = ("torch.distributed.checkpoint.state_dict", "_get_model_state_dict")
_OTHER_NAMES = (("pytorch_lightning.", "lightning.pytorch."), ("lightning_fabric.", "lightning.fabric."))


def check_state_caller(size: int) -> None:
    """Raise if the caller of state_dict() keeps the rows of one rank alone."""
    found: tuple[str, str] | None = None
    for where, frame in _callers():
        if where == _FULL and getattr(frame.f_locals.get("info"), "full_state_dict", False):
            found = "StateDictOptions(full_state_dict=True)", f"{_SAVE}; full_state_dict=False works too"
        found = _SAVERS.get(where, found)  # the outermost one has the best remedy
    if found is not None:
        tool, remedy = found
        raise UsageError(
            f"{tool} saves the state_dict of rank 0 alone, but the rows are spread over {size} ranks and "
            f"those of the other ranks would be lost: {remedy}"
        )


def check_trainer(size: int) -> None:
    """Raise if Lightning's Trainer is about to train what it cannot save."""
    for (module, function), frame in _callers():
        if (module, function) == (_LAUNCHER, "_wrapping_function"):
            raise UsageError(f"the tables are spread over {size} ranks of Lightning: {_NO_FORK}")
        trainer = frame.f_locals.get("self") if module == "lightning.pytorch.trainer.trainer" else None
        if trainer is not None and _saves_rank_0(trainer):
            raise UsageError(
                "Lightning's ModelCheckpoint saves the state_dict of rank 0 alone, but the rows are spread "
                f"over {size} ranks: {_LIGHTNING}, or enable_checkpointing=False"
            )


def _callers() -> Iterator[tuple[tuple[str, str], FrameType]]:
    """Yield module and function name of each caller, from the inside out, and its frame."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        for other, name in _OTHER_NAMES:
            if module.startswith(other):
                module = name + module.removeprefix(other)
        yield (module, frame.f_code.co_name), frame
        frame = frame.f_back


def _saves_rank_0(trainer: Any) -> bool:
    """Return whether a Trainer that fits has Lightning's own ModelCheckpoint and saves the usual way."""
    method = getattr(getattr(trainer, "strategy", None), _STRATEGY[1], None)
    usual = getattr(method, "__module__", "").endswith(".strategies.strategy")  # not sharded, as by FSDP
    if not usual or getattr(getattr(trainer, "state", None), "fn", None) != "fit":
        return False
    return any(
        type(callback).__name__ == "ModelCheckpoint" and (callback.save_top_k != 0 or callback.save_last)
        for callback in getattr(trainer, "checkpoint_callbacks", ())
    )


_REMEDY = " (at another world size: checkpoint.save and checkpoint.load)"
_NAMES = r"ids|rows|time|count|step|pending_ids|pending_counts|state/[0-9]+/[^/]+"
_KEY = re.compile(rf"(rank [0-9]+ of [0-9]+)(?:/(.+)/({_NAMES})| \(.*\))", re.DOTALL)


def state_key() -> str:
    """Return the key of the first tensor of this process."""
    return _label() + _REMEDY


def is_state_path(name: str) -> bool:
    """Return whether a name is the beginning of a key."""
    return re.match(r"rank [0-9]+ of [0-9]+[ /]", name) is not None


class StatePath:
    """Stands for a key in torch's helpers, which split keys at dots and read the parts as attributes."""

    def __getattr__(self, name: str) -> StatePath:
        if name.startswith("_"):
            raise AttributeError(name)
        return self


def collect_state(
    shards: Shards | None, configs: Mapping[str, TableConfig], global_step: int
) -> dict[str, Tensor]:
    """Return the tensors of this process."""
    if shards is None:
        size, rank = world_size(), current_rank()
        tables = {name: _no_rows(config) for name, config in configs.items()}
    else:
        _check_here(shards)
        size, rank = shards.world_size, shards.rank
        if size > 1:
            check_state_caller(size)
        shards.flush()
        tables = {name: _rows_of(table) for name, table in shards.local.items()}
    found: dict[str, Tensor] = {state_key(): torch.tensor([global_step, size, rank], device="cpu")}
    for name, pieces in tables.items():
        found |= {f"{_label()}/{name}/{piece}": StateTensor.of(x) for piece, x in pieces.items()}
    return found


_Tables = Mapping[str, Mapping[str, Tensor]]


def restore_state(shards: Shards, saved: Mapping[str, Any]) -> int:
    """Replace all rows of the tables of this process."""
    _check_here(shards)
    labels = _select(shards, saved)
    states = [_state_of(label, saved) for label in labels]
    own = labels == [_label()]
    size, rank = shards.world_size, shards.rank
    for number, ((_, *found), _) in enumerate(states):
        if found != ([size, rank] if own else [len(labels), number]):
            raise UsageError(_another_rank(f"rank {found[1]} of {found[0]}", f"rank {rank} of {size}"))
    _set_rows(shards, [tables for _, tables in states], all_ranks=not own)
    return states[0][0][0]


def _state_of(label: str, saved: Mapping[str, Any]) -> tuple[list[int], _Tables]:
    """Return what a state_dict holds of a rank: global step, number of shards, this shard; and its tables."""
    tables: dict[str, dict[str, Tensor]] = {}
    header: Tensor | None = None
    for key, value in saved.items():
        found = _KEY.fullmatch(key)
        if found is None or found[1] != label:
            continue
        if not isinstance(value, Tensor):
            raise InputError(f"this state_dict holds a {type(value).__name__} under {key!r}, not a tensor")
        plain = value.plain() if isinstance(value, StateTensor) else value
        if found[2] is None:
            header = plain
        else:
            tables.setdefault(found[2], {})[found[3]] = plain
    if header is None or header.dtype != torch.int64 or tuple(header.shape) != (3,):
        raise InputError(f"this state_dict holds no int64 [3] under {label + _REMEDY!r}")
    return header.tolist(), tables


def is_state_key(key: str) -> bool:
    """Return whether a key is one of `collect_state`."""
    return _KEY.fullmatch(key) is not None


def _check_here(shards: Shards) -> None:
    """Raise UsageError if the rows are in other processes."""
    if not shards.holds_rows:
        raise UsageError(
            "the rows are on parameter servers, and a state_dict holds those of this process: use "
            "checkpoint.save and checkpoint.load; for dense weights alone, the state_dict of their modules"
        )


def _label() -> str:
    return f"rank {current_rank()} of {world_size()}"


def _another_rank(there: str, here: str) -> str:
    return (
        f"this state_dict holds the rows of {there}, this is {here}: use checkpoint.save and "
        "checkpoint.load, which move rows to their owners"
    )


def _select(shards: Shards, saved: Mapping[str, Any]) -> list[str]:
    """Return the ranks whose rows this process takes: its own, or all ranks of another world size."""
    labels = {found[1] for found in map(_KEY.fullmatch, saved) if found is not None}
    if _label() in labels:
        return [_label()]
    every = [f"rank {rank} of {len(labels)}" for rank in range(len(labels))]
    if labels == set(every) and (len(every) == 1 or shards.world_size == world_size()):
        return every
    raise UsageError(_another_rank(", ".join(sorted(labels)), _label()))


# ---- rows


LARGE = 256 << 20
"""A column of at least this many bytes is in a file instead of memory."""


def new_column(rows: int, like: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """Return a column that is not initialised, and a function that drops its pages from memory.

    A large one is a deleted temporary file, mapped into memory: the kernel writes its pages out when it needs
    the memory, so the state of a table does not need as much memory as the table.
    """
    shape = (rows, *like.shape[1:])
    size = math.prod(shape) * like.itemsize
    if size >= LARGE and hasattr(os, "posix_fallocate"):  # macOS has none
        with suppress(OSError), tempfile.TemporaryFile() as file:  # without space on the disk: in memory
            os.posix_fallocate(file.fileno(), 0, size)  # a disk that fills up later would end the process
            pages = mmap.mmap(file.fileno(), size)
            column = torch.frombuffer(pages, dtype=like.dtype).view(shape)
            return column, lambda: pages.madvise(mmap.MADV_DONTNEED)
    return torch.empty(shape, dtype=like.dtype, device="cpu"), lambda: None


def _rows_of(table: Table) -> dict[str, Tensor]:
    """Return all rows of a table: ids, weights, optimizer state, last-update times."""
    empty = {name: x for name, x in _no_rows(table.config).items() if not name.startswith("pending")}
    columns = {name: new_column(len(table), like) for name, like in empty.items()}
    end = 0
    for chunk in table.scan():
        pieces: dict[str, Any] = {"ids": chunk.ids, "rows": chunk.rows, "time": chunk.time}
        pieces |= {f"state/{key}": values for key, values in chunk.state.items()}
        pieces |= {"count": chunk.count, "step": chunk.step}
        start, end = end, end + chunk.ids.numel()
        for name, (column, drop) in columns.items():
            column[start:end] = pieces[name]
            drop()
    return {name: column[:end] for name, (column, _) in columns.items()} | _pending(table)


def _pending(table: Table) -> dict[str, Tensor]:
    """Return the ids that an admission policy counts, and their counts, if it does."""
    if "pending_ids" not in _extra_names(table.config):
        return {}
    ids, counts = table.pending()
    return {"pending_ids": ids, "pending_counts": counts}


def _no_rows(config: TableConfig) -> dict[str, Tensor]:
    """Return what `_rows_of` returns for a table without rows."""
    state = {
        f"state/{column.key}": torch.empty(0, column.end - column.start, dtype=torch.float32, device="cpu")
        for column in config.state_columns
    }
    return {
        "ids": torch.empty(0, dtype=torch.int64, device="cpu"),
        "rows": torch.empty(0, config.dim, dtype=torch.float32, device="cpu"),
        **state,
        "time": torch.empty(0, dtype=torch.int64, device="cpu"),
        **{name: torch.empty(0, dtype=torch.int64, device="cpu") for name in _extra_names(config)},
    }


def _extra_names(config: TableConfig) -> list[str]:
    """Return the names of the tensors that only policies need."""
    counted = ["count", "step"] if config.counted else []
    return counted + (["pending_ids", "pending_counts"] if isinstance(config.admission, MinCount) else [])


def _set_rows(shards: Shards, saved: Sequence[_Tables], *, all_ranks: bool) -> None:
    tables = shards.local
    for state in saved:
        if set(state) != set(tables):
            raise InputError(f"state_dict holds tables {sorted(state)}, this collection has {sorted(tables)}")
    chunks = {name: [_chunk(table, state[name]) for state in saved] for name, table in tables.items()}
    counts = {name: [_counted_ids(table, state[name]) for state in saved] for name, table in tables.items()}
    for name, parts in chunks.items():
        router = shards.router(name)
        if router is not None:
            mine = [router.owner(part.ids) == shards.rank for part in parts]
            if all_ranks:
                chunks[name] = parts = [part.select(own) for part, own in zip(parts, mine, strict=True)]
                owned = [router.owner(ids) == shards.rank for ids, _ in counts[name]]
                counts[name] = [(ids[o], n[o]) for (ids, n), o in zip(counts[name], owned, strict=True)]
            elif not all(bool(own.all()) for own in mine):
                raise UsageError(
                    f"table {name!r}: this state_dict holds rows that {router} assigns to other ranks than "
                    f"{shards.rank}: use checkpoint.save, and checkpoint.load with reroute=True"
                )
        tables[name].check_fits(sum(part.ids.numel() for part in parts))
    for name, table in tables.items():
        table.clear()
        for part, pending in zip(chunks[name], counts[name], strict=True):
            table.restore(part)
            table.restore_pending(*pending)


def _counted_ids(table: Table, saved: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the ids without a row and their counts on the CPU; raise InputError if they are wrong."""
    names = ("pending_ids", "pending_counts")
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    if ("pending_ids" in saved) != ("pending_counts" in saved):
        raise InputError(f"table {table.name!r}: state_dict holds only one of {' and '.join(names)}")
    ids, counts = (saved[name].cpu() if name in saved else none for name in names)
    return table.checks.ids(ids), table.checks.occurrences(ids, counts)


def _chunk(table: Table, saved: Mapping[str, Tensor]) -> Chunk:
    """Return the result of `_rows_of` as a chunk on the CPU; raise InputError if the table differs."""
    absent = sorted({"ids", "rows", "time"} - saved.keys())
    if absent:
        raise InputError(f"table {table.name!r}: state_dict lacks {', '.join(absent)}")
    shapes = {"rows": table.dim} | {f"state/{c.key}": c.end - c.start for c in table.config.state_columns}
    state = {key for key in saved if key.startswith("state/")}
    if state != shapes.keys() - {"rows"}:
        raise InputError(
            f"table {table.name!r}: state_dict holds optimizer state {sorted(state)}, this table keeps "
            f"{sorted(shapes.keys() - {'rows'})}: the optimizers differ"
        )
    ids, time = saved["ids"].cpu(), saved["time"].cpu()
    n = ids.numel()
    for name, columns in shapes.items():
        piece = saved[name]
        if tuple(piece.shape) != (n, columns) or piece.dtype != torch.float32:
            raise InputError(
                f"table {table.name!r}: state_dict holds {name} of {piece.dtype} {list(piece.shape)}, "
                f"this table has float32 [{n}, {columns}]"
            )
    good = time.dtype == torch.int64 and tuple(time.shape) == (n,)
    if not good or (n and not 0 <= int(time.min()) <= int(time.max()) <= MAX_TIME):
        raise InputError(
            f"table {table.name!r}: time in the state_dict must be int64 [{n}], seconds from 0 to {MAX_TIME}"
        )
    table.checks.ids(ids)
    columns_of = {key.removeprefix("state/"): saved[key].cpu() for key in state}
    extra = [saved[name].cpu() if name in saved else None for name in ("count", "step")]
    return table.checks.chunk(Chunk(ids, saved["rows"].cpu(), columns_of, time, *extra))
