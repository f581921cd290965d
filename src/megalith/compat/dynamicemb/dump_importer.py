"""import_dynamicemb: fill tables from a dump of DynamicEmb (NVIDIA recsys-examples).

The dump of a table has one file per kind and rank, `NAME_emb_KIND.rank_R.world_size_W`: keys and scores are
raw little-endian int64, values and opt_values are float32. `NAME_opt_args.json` names the optimizer, the
routing (`dist_type`; absent means roundrobin) and the eviction strategy, which defines the scores. Keys are
global ids; with `continuous` routing they are indices within the block of a rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.checkpoint.importers import (
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
from megalith.ops import checks
from megalith.routing import MODES, Router
from megalith.storage.json_codec import parse_json_object
from megalith.storage.store import LocalStore
from megalith.table import Adam, TableConfig

_FILE = re.compile(r"(.+)_emb_(keys|values|scores|opt_values)\.rank_(\d{1,9})\.world_size_(\d{1,9})")
_COUNTER = re.compile(r"(.+)_counter_(keys|frequencies)\.rank_\d{1,9}\.world_size_\d{1,9}")
_MAX_JSON = 1 << 20
NANOSECONDS = 1_000_000_000
_OPTIMIZERS = {
    "sgd": "sgd",
    "exact_sgd": "sgd",
    "adam": "adam",
    "exact_adagrad": "adagrad",
    "exact_row_wise_adagrad": "rowwise_adagrad",
}
"""DynamicEmb's names of the optimizers that both systems have, and our names."""


@dataclass(frozen=True)
class _Dump:
    """The dump of one table: its files by kind and rank, its number of ranks, and its JSON."""

    name: str
    folder: Path
    world_size: int
    files: dict[str, list[Path]]
    meta_path: Path
    meta: dict[str, Any]


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
    """Fill tables from the files that DynamicEmbDump wrote with any number of ranks.

    The state of Adam and of both Adagrads is imported. Adam's single step counter becomes the count of every
    row with bias_correction="row"; otherwise the report names it, to be set as the collection's global_step.
    LRU scores are ages: they become last-update times, subtracted from `time`.

    Args:
        collection: The collection; the tables to fill must be empty.
        directory: The directory of the dump, or of one of its collections.
        tables: For each table, its name in the dump; None fills all tables under their own names.
        num_embeddings: For each table, its num_embeddings in DynamicEmb; only needed for dist_type
            "continuous".
        drop_optimizer_state: Let the optimizer state start fresh.
        check_owners: Require each key to be in the file of the rank that dist_type assigns it to; False
            accepts all keys.
        time: The time of the dump in seconds; None is now.
        on_error: "raise" rejects rows with NaN or Inf; "skip" leaves them out and counts them.

    Returns:
        The report.

    Raises:
        CheckpointError: Files are missing, have the wrong size or do not match the table, or the optimizers
            differ. The message names the file. Nothing was written.
        InputError: An argument is not valid.
    """
    into = RowImport(collection, tables, time=time, on_error=on_error)
    names = {name: name for name in into.configs} if tables is None else dict(tables)
    root = checks.path(directory, "import_dynamicemb: directory")
    checks.flag(drop_optimizer_state, "import_dynamicemb: drop_optimizer_state")
    checks.flag(check_owners, "import_dynamicemb: check_owners")
    if num_embeddings is not None:
        checks.mapping(num_embeddings, "import_dynamicemb: num_embeddings", '{"user": 1000}')
    dumps = _find(root, set(names.values()), into.left_out)
    sources = {}
    for ours, theirs in names.items():
        size = (num_embeddings or {}).get(ours)
        source = _DumpedTable(into.configs[ours], dumps[theirs], size, check_owners)
        source.check_state(drop_optimizer_state, into.left_out)
        source.check_scores(into.left_out)
        sources[ours] = source

    def read_rows() -> Iterator[ImportedRows]:
        for source in sources.values():
            yield from source.read_rows(into.time)

    return into.run(read_rows)


class _DumpedTable:
    """The rows of one dumped table, converted for our table."""

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
                raise CheckpointError(f"{keys}: {keys.stat().st_size} bytes are not a multiple of 8")
            _check_size(
                values, rows, 4 * config.dim, f"{config.dim} floats per row, the dim of table {config.name!r}"
            )

    # ---- checks before the first row is read

    def check_state(self, drop: bool, left_out: dict[str, str]) -> None:
        """Decide whether to import state. Raises CheckpointError if that is not possible."""
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
                f"({here}) needs; with drop_optimizer_state=True it starts fresh"
            )
        whole_rows = here != "rowwise_adagrad" or len(config.segments) == 1
        if _OPTIMIZERS.get(there) != here or not whole_rows:
            raise CheckpointError(
                f"{dump.meta_path}: the dump was trained with {there!r}, table {name!r} "
                f"uses {here}: its state cannot be imported; with drop_optimizer_state=True it starts fresh"
            )
        width = {"sgd": 0, "adam": 2 * config.dim, "adagrad": config.dim, "rowwise_adagrad": 1}[here]
        for keys, path in zip(dump.files["keys"], files, strict=True):
            rows = keys.stat().st_size // 8
            _check_size(path, rows, 4 * width, f"{width} floats per row, the state of {here}")
        if here == "adam":
            steps = self._iterations()
            if not all(isinstance(s.optimizer, Adam) and s.optimizer.counts_rows for s in config.segments):
                left_out[f"{name}: iters"] = (
                    f"Adam's bias correction continues from the global step: set global_step to {steps}"
                )
        self._state = here

    def check_scores(self, left_out: dict[str, str]) -> None:
        """Decide whether scores are ages. Raises CheckpointError if their files have the wrong size."""
        files = self.dump.files.get("scores", [])
        strategy = str(self.dump.meta.get("evict_strategy", "unknown"))
        double = 0
        for keys, path in zip(self.dump.files["keys"], files, strict=False):
            rows, size = keys.stat().st_size // 8, path.stat().st_size
            double += size == 16 * rows and rows > 0
            if size != 16 * rows:
                _check_size(path, rows, 8, "8 bytes per score")
        self._ages = bool(files) and not double and strategy.lower().endswith("klru")
        if files and not self._ages:
            left_out[f"{self.config.name}: scores"] = f"those of {strategy} are not times"

    # ---- rows

    def read_rows(self, time: int) -> Iterator[ImportedRows]:
        """Yield all rows, rank by rank."""
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
        """Return the global ids of the keys of a rank, int64 [n]."""
        router, ids = self._router, keys
        if router.block_size is not None:
            inside = (keys >= 0) & (keys < router.block_size)
            ids = torch.where(inside, rank * router.block_size + keys, keys * router.num_shards + rank)
            misplaced = (router.owner(ids) != rank) | (router.local_index(ids) != keys)
        else:
            misplaced = router.owner(ids) != rank
        if bool(misplaced.any()) and (self._check_owners or router.block_size is not None):
            raise CheckpointError(
                f"{path}: key {int(keys[misplaced][0])} does not belong to rank {rank} of "
                f"{router.num_shards} under dist_type {router.mode!r}: the dump has another dist_type, or "
                "num_embeddings is wrong; check_owners=False accepts all global ids"
            )
        return ids

    def _state_of(self, rank: int, part: slice) -> dict[str, Tensor]:
        if self._state is None:
            return {}
        dim, path = self.config.dim, self.dump.files["opt_values"][rank]
        if self._state == "adam":
            both = _tensor(_mapped(path, "<f4", 2 * dim)[part])
            count = torch.full((both.shape[0], 1), float(self._iterations()), device="cpu")
            return spread_state(self.config, {"m": both[:, :dim], "v": both[:, dim:], "count": count})
        width = 1 if self._state == "rowwise_adagrad" else dim
        return spread_state(self.config, {"sum": _tensor(_mapped(path, "<f4", width)[part])})

    def _times(self, rank: int, part: slice, time: int) -> Tensor:
        if not self._ages:
            return torch.full((part.stop - part.start,), time, device="cpu")
        ages = _tensor(_mapped(self.dump.files["scores"][rank], "<i8", 1)[part, 0])
        return time - (ages // NANOSECONDS).clamp(0, time)

    def _iterations(self) -> int:
        value = self.dump.meta.get("iters")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
            raise CheckpointError(
                f"{self.dump.meta_path}: iters must be Adam's number of steps, got {value!r}"
            )
        return value


# ---- finding files


def _find(root: Path, names: set[str], left_out: dict[str, str]) -> dict[str, _Dump]:
    """Find the tables of a dump. Raises CheckpointError if one is missing, ambiguous or incomplete."""
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
        left_out[f"table {name!r} of the dump"] = "not requested"
    dumps = {}
    for name in sorted(names):
        folders = [folder for known, folder in found if known == name]
        if len(folders) != 1:
            known = ", ".join(sorted({repr(name) for name, _ in found})) or "none"
            several = f"in {', '.join(map(str, folders))}: pass one of them as directory" if folders else ""
            raise CheckpointError(
                f"{root}: table {name!r} is " + (several or f"not in the dump (it has {known})")
            )
        dumps[name] = _dump(name, folders[0], found[name, folders[0]])
    return dumps


def _dump(name: str, folder: Path, kinds: Mapping[str, Mapping[tuple[int, int], Path]]) -> _Dump:
    worlds = sorted({world_size for files in kinds.values() for _, world_size in files})
    if len(worlds) != 1:
        raise CheckpointError(
            f"{folder}: table {name!r} has files of dumps with {worlds} ranks; keep the files of one dump"
        )
    (world_size,) = worlds
    for kind in ("keys", "values", *kinds):
        ranks = {rank for rank, _ in kinds.get(kind, {})}
        lacks = next((rank for rank in range(world_size) if rank not in ranks), None)
        if lacks is not None or len(ranks) != world_size:
            wrong = f"also has rank {max(ranks, default=0)}" if lacks is None else f"lacks rank {lacks}"
            raise CheckpointError(f"{folder}: {name}_emb_{kind} with {world_size} ranks {wrong}")
    files = {kind: [files[rank, world_size] for rank in range(world_size)] for kind, files in kinds.items()}
    meta_path = folder / f"{name}_opt_args.json"
    return _Dump(name, folder, world_size, files, meta_path, _read_json(meta_path))


def _read_json(path: Path) -> dict[str, Any]:
    def error(problem: str) -> CheckpointError:
        return CheckpointError(f"{path} {problem}")

    try:
        text = LocalStore(path.parent).read_whole(path.name, _MAX_JSON)
    except OSError as problem:
        raise error(f"cannot be read, but it defines how rows were routed: {problem}") from None
    return parse_json_object(text, error).data


def _router(dump: _Dump, table: str, num_embeddings: int | None) -> Router:
    where, mode = dump.meta_path, str(dump.meta.get("dist_type", "roundrobin"))
    if mode not in MODES:
        raise CheckpointError(f"{where}: unknown dist_type {mode!r}; known: {', '.join(MODES)}")
    if mode != "continuous":
        return Router(mode, dump.world_size)
    if isinstance(num_embeddings, bool) or not isinstance(num_embeddings, int) or num_embeddings < 1:
        raise InputError(
            f"table {table!r}: its dump ({where}) has dist_type 'continuous', whose keys are indices within "
            f"a rank's block: pass the original num_embeddings={{{table!r}: ...}}, got {num_embeddings!r}"
        )
    return Router(mode, dump.world_size, block_size=-(-num_embeddings // dump.world_size))


def _check_size(path: Path, rows: int, row_bytes: int, what: str) -> None:
    size = path.stat().st_size
    if size != rows * row_bytes:
        raise CheckpointError(f"{path}: {size} bytes, but {rows} keys need {rows * row_bytes} ({what})")


def _mapped(path: Path, dtype: str, width: int) -> NDArray[Any]:
    """Map a raw file into memory as [rows, width]."""
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty((0, width), dtype)
    return np.memmap(path, dtype, "r").reshape(-1, width)


def _tensor(values: NDArray[Any]) -> Tensor:
    """Copy to a tensor, because mapped memory is read-only."""
    return torch.from_numpy(values.astype(values.dtype.newbyteorder("="), copy=True))
