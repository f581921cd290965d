"""import_dynamicemb: tables out of a dump of DynamicEmb (NVIDIA recsys-examples).

A table's dump is a file per kind and rank, `NAME_emb_KIND.rank_R.world_size_W`: keys and scores are raw
little-endian int64, values and opt_values float32; `NAME_opt_args.json` says the optimizer, the routing
(`dist_type`; absent means roundrobin) and what scores mean. Keys are global ids, except under
`continuous`, where they count within a rank's block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.checkpoint.importers.row_import import (
    ImportedRows,
    ImportReport,
    OnError,
    RowImport,
    optimizer_of,
    pieces_of,
    spread_state,
)
from megalith.errors import CheckpointError, InputError
from megalith.nn import EmbeddingCollection
from megalith.routing import MODES, Router
from megalith.table import TableConfig

_FILE = re.compile(r"(.+)_emb_(keys|values|scores|opt_values)\.rank_(\d{1,9})\.world_size_(\d{1,9})")
_COUNTER = re.compile(r"(.+)_counter_(keys|frequencies)\.rank_\d{1,9}\.world_size_\d{1,9}")
_MAX_JSON = 1 << 20
_NANOSECONDS = 1_000_000_000
_OPTIMIZERS = {
    "sgd": "sgd",
    "exact_sgd": "sgd",
    "adam": "adam",
    "exact_adagrad": "adagrad",
    "exact_row_wise_adagrad": "rowwise_adagrad",
}
"""DynamicEmb's names of the optimizers that both have, and ours."""


@dataclass(frozen=True)
class _Dump:
    """One table: its files by kind and rank, its number of ranks, and its JSON."""

    name: str
    folder: Path
    world_size: int
    files: dict[str, list[Path]]
    meta: dict[str, Any]

    @property
    def dist_type(self) -> str:
        """How keys were routed."""
        return str(self.meta.get("dist_type", "roundrobin"))


def import_dynamicemb(
    collection: EmbeddingCollection,
    directory: str | Path,
    *,
    tables: Mapping[str, str] | None = None,
    num_embeddings: Mapping[str, int] | None = None,
    drop_optimizer_state: bool = False,
    check_owners: bool = True,
    time: float | None = None,
    on_error: OnError = "raise",
) -> ImportReport:
    """Fills tables from the files that DynamicEmbDump wrote, at any number of ranks.

    directory: of the dump, or of one of its collections. tables: our table -> its name in the dump; by
    default all tables of the collection, under their own names. num_embeddings: our table -> the
    num_embeddings it had, needed for dist_type "continuous" alone. check_owners: every key must be in the
    file of the rank that its dist_type gives it to; False takes keys as they are. LRU scores are ages: they
    become last-update times, counted back from `time`. on_error: see `RowImport`. The state of Adam and both
    Adagrads is taken over; Adam's one step counter becomes every row's count.
    Raises CheckpointError, naming the file, before anything is written, if files are missing, of the wrong
    size or do not fit the table; if optimizers differ, unless drop_optimizer_state lets state start fresh.
    """
    into = RowImport(collection, tables, time=time, on_error=on_error)
    names = {name: name for name in into.configs} if tables is None else dict(tables)
    root = Path(directory)
    dumps = _find(root, set(names.values()), into.left_out)
    sources = {}
    for ours, theirs in names.items():
        source = _Source(into.configs[ours], dumps[theirs], (num_embeddings or {}).get(ours), check_owners)
        source.check_state(drop_optimizer_state, into.left_out)
        source.check_scores(into.left_out)
        sources[ours] = source

    def walk() -> Iterator[ImportedRows]:
        for source in sources.values():
            yield from source.walk(into.time)

    return into.run(walk)


class _Source:
    """The rows of one dumped table, in the shape of ours."""

    def __init__(
        self, config: TableConfig, dump: _Dump, num_embeddings: int | None, check_owners: bool
    ) -> None:
        self.config, self.dump = config, dump
        self._router = _router(dump, config.name, num_embeddings)
        self._check_owners = check_owners
        self._state: str | None = None
        self._ages = False
        for keys, values in zip(dump.files["keys"], dump.files["values"], strict=True):
            rows, rest = divmod(keys.stat().st_size, 8)
            if rest:
                raise CheckpointError(f"{keys}: {keys.stat().st_size} bytes are no run of 8-byte keys")
            _check_size(
                values, rows, 4 * config.dim, f"{config.dim} floats a row, table {config.name!r}'s dim"
            )

    # ---- checks before the first row is read

    def check_state(self, drop: bool, left_out: dict[str, str]) -> None:
        """Whether state is taken over. Raises CheckpointError if it cannot be, unless it may be dropped."""
        name, dump, config = self.config.name, self.dump, self.config
        here, there = optimizer_of(config), str(dump.meta.get("opt_type"))
        files = dump.files.get("opt_values", [])
        has_state = any(path.stat().st_size for path in files)
        if drop:
            if has_state or config.state_columns:
                left_out[f"{name}: optimizer state"] = "drop_optimizer_state=True, so it starts fresh"
            return
        no_rows = not any(path.stat().st_size for path in dump.files["keys"])
        if not has_state and (no_rows or not config.state_columns):
            return
        if not has_state:
            raise CheckpointError(
                f"{dump.folder}: {dump.name!r} was dumped without optimizer state, which table {name!r} "
                f"({here}) needs; drop_optimizer_state=True lets it start fresh"
            )
        whole_rows = here != "rowwise_adagrad" or len(config.segments) == 1
        if _OPTIMIZERS.get(there) != here or not whole_rows:
            raise CheckpointError(
                f"{_json_path(dump.folder, dump.name)}: the dump was trained with {there!r}, table {name!r} "
                f"with {here}: state cannot be taken over; drop_optimizer_state=True lets it start fresh"
            )
        width = {"sgd": 0, "adam": 2 * config.dim, "adagrad": config.dim, "rowwise_adagrad": 1}[here]
        for keys, path in zip(dump.files["keys"], files, strict=True):
            _check_size(path, keys.stat().st_size // 8, 4 * width, f"{width} floats a row, {here}'s state")
        if here == "adam":
            self._iterations()
        self._state = here

    def check_scores(self, left_out: dict[str, str]) -> None:
        """Whether scores are ages. Raises CheckpointError if their files have the wrong size."""
        files = self.dump.files.get("scores", [])
        strategy = str(self.dump.meta.get("evict_strategy", "unknown"))
        double = 0
        for keys, path in zip(self.dump.files["keys"], files, strict=False):
            rows, size = keys.stat().st_size // 8, path.stat().st_size
            double += size == 16 * rows and rows > 0
            if size != 16 * rows:
                _check_size(path, rows, 8, "8 bytes a score")
        self._ages = bool(files) and not double and strategy.lower().endswith("klru")
        if files and not self._ages:
            left_out[f"{self.config.name}: scores"] = f"those of {strategy} are no times"

    # ---- rows

    def walk(self, time: int) -> Iterator[ImportedRows]:
        """All rows, rank by rank."""
        config, files = self.config, self.dump.files
        for rank, path in enumerate(files["keys"]):
            keys = _mapped(path, "<i8", 1)[:, 0]
            values = _mapped(files["values"][rank], "<f4", config.dim)
            for part in pieces_of(len(keys), config.row_floats):
                ids = self._ids(_tensor(keys[part]), rank, path)
                yield ImportedRows(
                    config.name,
                    str(path),
                    ids,
                    _tensor(values[part]),
                    self._state_of(rank, part),
                    self._times(rank, part, time),
                )

    def _ids(self, keys: Tensor, rank: int, path: Path) -> Tensor:
        """Global ids of a rank's keys."""
        router, ids = self._router, keys
        if router.block_size is not None:
            inside = (keys >= 0) & (keys < router.block_size)
            ids = torch.where(inside, rank * router.block_size + keys, keys * router.num_shards + rank)
            strange = (router.owner(ids) != rank) | (router.local_index(ids) != keys)
        else:
            strange = router.owner(ids) != rank
        if bool(strange.any()) and (self._check_owners or router.block_size is not None):
            raise CheckpointError(
                f"{path}: key {int(keys[strange][0])} does not belong to rank {rank} of {router.num_shards} "
                f"under dist_type {router.mode!r}: the dump was made with another one, or num_embeddings is "
                "wrong; check_owners=False takes global ids as they are"
            )
        return ids

    def _state_of(self, rank: int, part: slice) -> dict[str, Tensor]:
        if self._state is None:
            return {}
        dim, path = self.config.dim, self.dump.files["opt_values"][rank]
        if self._state == "adam":
            both = _tensor(_mapped(path, "<f4", 2 * dim)[part])
            count = torch.full((both.shape[0], 1), float(self._iterations()))
            return spread_state(self.config, {"m": both[:, :dim], "v": both[:, dim:], "count": count})
        width = 1 if self._state == "rowwise_adagrad" else dim
        return spread_state(self.config, {"sum": _tensor(_mapped(path, "<f4", width)[part])})

    def _times(self, rank: int, part: slice, time: int) -> Tensor:
        if not self._ages:
            return torch.full((part.stop - part.start,), time)
        ages = _tensor(_mapped(self.dump.files["scores"][rank], "<i8", 1)[part, 0])
        return time - (ages // _NANOSECONDS).clamp(0, time)

    def _iterations(self) -> int:
        value = self.dump.meta.get("iters")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
            where = _json_path(self.dump.folder, self.dump.name)
            raise CheckpointError(f"{where}: iters must be Adam's number of steps, got {value!r}")
        return value


# ---- finding files


def _find(root: Path, names: set[str], left_out: dict[str, str]) -> dict[str, _Dump]:
    """The wanted tables of a dump. Raises CheckpointError if one is missing, there twice, or incomplete."""
    if not root.is_dir():
        raise CheckpointError(f"{root}: no such directory")
    found: dict[tuple[str, Path], dict[str, dict[tuple[int, int], Path]]] = {}
    for path in sorted(root.rglob("*.rank_*.world_size_*")):
        if match := _FILE.fullmatch(path.name):
            name, kind, rank, world_size = match.groups()
            kinds = found.setdefault((name, path.parent), {})
            kinds.setdefault(kind, {})[int(rank), int(world_size)] = path
        elif (match := _COUNTER.fullmatch(path.name)) and match[1] in names:
            left_out[f"{match[1]}: admission counters"] = "they are not imported"
    for name in sorted({name for name, _ in found} - names):
        left_out[f"table {name!r} of the dump"] = "not asked for"
    dumps = {}
    for name in sorted(names):
        folders = [folder for known, folder in found if known == name]
        if len(folders) != 1:
            known = ", ".join(sorted({repr(name) for name, _ in found})) or "none"
            several = f"in {', '.join(map(str, folders))}: give one of them as directory" if folders else ""
            raise CheckpointError(
                f"{root}: table {name!r} is " + (several or f"not in the dump (it has {known})")
            )
        dumps[name] = _dump(name, folders[0], found[name, folders[0]])
    return dumps


def _dump(name: str, folder: Path, kinds: Mapping[str, Mapping[tuple[int, int], Path]]) -> _Dump:
    worlds = sorted({world_size for files in kinds.values() for _, world_size in files})
    if len(worlds) != 1:
        raise CheckpointError(
            f"{folder}: table {name!r} has files of dumps by {worlds} ranks; keep one dump's files"
        )
    (world_size,) = worlds
    for kind in ("keys", "values", *kinds):
        ranks = {rank for rank, _ in kinds.get(kind, {})}
        lacks = next((rank for rank in range(world_size) if rank not in ranks), None)
        if lacks is not None or len(ranks) != world_size:
            wrong = f"has rank {max(ranks, default=0)} too" if lacks is None else f"lacks rank {lacks}"
            raise CheckpointError(f"{folder}: {name}_emb_{kind} of {world_size} ranks {wrong}")
    files = {kind: [files[rank, world_size] for rank in range(world_size)] for kind, files in kinds.items()}
    return _Dump(name, folder, world_size, files, _read_json(_json_path(folder, name)))


def _json_path(folder: Path, name: str) -> Path:
    return folder / f"{name}_opt_args.json"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_JSON:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes are too many for it")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path}: cannot be read, and it says how the rows were routed: {error}"
        ) from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return data


def _router(dump: _Dump, table: str, num_embeddings: int | None) -> Router:
    where, mode = _json_path(dump.folder, dump.name), dump.dist_type
    if mode not in MODES:
        raise CheckpointError(f"{where}: unknown dist_type {mode!r}; known: {', '.join(MODES)}")
    if mode != "continuous":
        return Router(mode, dump.world_size)
    if isinstance(num_embeddings, bool) or not isinstance(num_embeddings, int) or num_embeddings < 1:
        raise InputError(
            f"table {table!r}: its dump ({where}) is routed by dist_type 'continuous', whose keys count "
            f"within a rank's block: give num_embeddings={{{table!r}: ...}} as it was, got {num_embeddings!r}"
        )
    return Router(mode, dump.world_size, block_size=-(-num_embeddings // dump.world_size))


def _check_size(path: Path, rows: int, row_bytes: int, what: str) -> None:
    size = path.stat().st_size
    if size != rows * row_bytes:
        raise CheckpointError(f"{path}: {size} bytes, but {rows} keys need {rows * row_bytes} ({what})")


def _mapped(path: Path, dtype: str, width: int) -> NDArray[Any]:
    """A raw file as [rows, width], mapped into memory."""
    if path.stat().st_size == 0:  # which cannot be mapped
        return np.empty((0, width), dtype)
    return np.memmap(path, dtype, "r").reshape(-1, width)


def _tensor(values: NDArray[Any]) -> Tensor:
    """A copy: what is mapped may not be written to."""
    return torch.from_numpy(values.astype(values.dtype.newbyteorder("="), copy=True))
