"""export_dynamicemb: write tables in the format of DynamicEmb's dumps, which DynamicEmbLoad reads.

The files are those that `dump_importer.py` describes. Scores depend on the eviction strategy: the age of a
row in nanoseconds for LRU, its number of updates for LFU, the step of its last update for a step score.
"""

from __future__ import annotations

import json
import os
import time as clock
from collections.abc import Mapping
from contextlib import ExitStack
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.importers import optimizer_of
from megalith.compat.dynamicemb.dump_importer import NANOSECONDS
from megalith.errors import InputError, UsageError
from megalith.nn import EmbeddingCollection
from megalith.ops import checks
from megalith.routing import MODES, Router
from megalith.table import Chunk, TableConfig
from megalith.table.table_data import MAX_TIME

_STRATEGIES = {"lru": "EvictStrategy.KLru", "lfu": "EvictStrategy.KLfu", "step": "EvictStrategy.KCustomized"}
"""DynamicEmb's strategies by the names of our scores; its STEP score uses the customized strategy."""
_TYPES = {
    "sgd": "sgd",
    "adam": "adam",
    "adagrad": "exact_adagrad",
    "rowwise_adagrad": "exact_row_wise_adagrad",
}
_STATES = {"sgd": (), "adam": ("m", "v"), "adagrad": ("sum",), "rowwise_adagrad": ("sum",)}
_RESERVED = (-4, -1)
"""Keys that DynamicEmb uses for empty and deleted slots, from the first to the last."""


def export_dynamicemb(
    collection: EmbeddingCollection,
    directory: str | Path,
    *,
    tables: Mapping[str, str] | None = None,
    ranks: int | None = None,
    dist_type: str | None = None,
    num_embeddings: Mapping[str, int] | None = None,
    score: str | None = None,
    time: float | None = None,
    drop_optimizer_state: bool = False,
) -> dict[str, int]:
    """Write tables as DynamicEmbDump does: keys, values, scores, optimizer state and JSON.

    One process writes the files of any number of ranks. With several processes, each writes the file of its
    own rank, routed as its tables are; the dump is complete when all have returned.

    Args:
        collection: The collection.
        directory: The directory of the collection in the dump, such as "dump/model.embeddings". It is
            created; it must not hold a dump of these tables.
        tables: For each table, its name in the dump; None writes all tables under their own names.
        ranks: The number of ranks (GPUs) that load the dump; None: the number of processes.
        dist_type: The routing of the dump; None: that of the table, or "roundrobin".
        num_embeddings: For each table, its num_embeddings in DynamicEmb; only needed for dist_type
            "continuous".
        score: "lru" (also for the strategy TIMESTAMP), "lfu" or "step"; None: that of the table's Capacity,
            or "lru". The latter two need a policy that counts updates.
        time: The time from which ages are computed, in seconds; None is now.
        drop_optimizer_state: Write no optimizer state: DynamicEmb then starts it fresh.

    Returns:
        The number of rows that this process wrote, by table of the collection.

    Raises:
        InputError: An argument is not valid, or DynamicEmb has no counterpart of an optimizer or an id.
        UsageError: The routing differs from that of the processes, or the tables are on servers.
    """
    checks.instance(collection, EmbeddingCollection, "export_dynamicemb: collection")
    root = checks.path(directory, "export_dynamicemb: directory")
    if root.exists() and not root.is_dir():
        raise InputError(f"export_dynamicemb: {root} is a file; directory must be a directory")
    shards = collection.shards
    names = {name: name for name in shards.configs}
    if tables is not None:
        names = dict(checks.mapping(tables, "export_dynamicemb: tables", '{"user": "user_table"}'))
    checks.flag(drop_optimizer_state, "export_dynamicemb: drop_optimizer_state")
    given = clock.time() if time is None else checks.seconds(time, "export_dynamicemb: time", zero=True)
    now = int(min(given, MAX_TIME))  # not a float: torch would subtract in float32, in steps of 128 seconds
    sizes = checks.mapping(num_embeddings or {}, "export_dynamicemb: num_embeddings", '{"user": 1000}')
    if not shards.local:
        raise UsageError(
            "export_dynamicemb: the tables are on servers: load a checkpoint of them in one process"
        )
    dumps = []
    for ours, theirs in names.items():
        shards.check_name(ours)
        checks.text(theirs, f"export_dynamicemb: the name of {ours!r}", 200)
        config = shards.configs[ours]
        router = _router(shards.router(ours), config, ranks, dist_type, sizes.get(ours))
        chosen = _score(config, score)
        meta = {} if drop_optimizer_state else _optimizer(config, collection.global_step)
        meta |= {"evict_strategy": _STRATEGIES[chosen], "dist_type": router.mode}
        if chosen == "step":
            meta["step_score"] = collection.global_step + 1
        dumps.append((ours, theirs, router, chosen, meta))
        mine = "" if shards.world_size == 1 else f".rank_{shards.rank}."
        if found := sorted(file for file in root.glob(f"{escape(theirs)}_emb_*") if mine in file.name):
            raise InputError(f"export_dynamicemb: {found[0]} exists: choose another directory")
    root.mkdir(parents=True, exist_ok=True)
    own = range(dumps[0][2].num_shards) if dumps and shards.world_size == 1 else [shards.rank]
    written = {}
    with TemporaryDirectory(prefix=".dump-", dir=root) as folder:
        for ours, theirs, router, chosen, meta in dumps:
            with ExitStack() as stack:
                kinds = ("keys", "values", "scores", *(("opt_values",) if "opt_type" in meta else ()))
                files = {
                    (kind, rank): stack.enter_context(
                        open(f"{folder}/{theirs}_emb_{kind}.rank_{rank}.world_size_{router.num_shards}", "wb")
                    )
                    for kind in kinds
                    for rank in own
                }
                written[ours] = 0
                for chunk in shards.scan(ours):
                    written[ours] += chunk.ids.numel()
                    columns = _columns(shards.configs[ours], chunk, router, chosen, now)
                    owners = router.owner(chunk.ids)
                    for (kind, rank), file in files.items():
                        file.write(columns[kind][owners == rank].numpy().tobytes())
        for path in sorted(Path(folder).iterdir()):
            os.replace(path, root / path.name)
    if shards.rank == 0:
        for _, theirs, _, _, meta in dumps:
            (root / f"{theirs}_opt_args.json").write_text(json.dumps(meta, indent=4))
    return written


def _columns(config: TableConfig, chunk: Chunk, router: Router, score: str, now: int) -> dict[str, Tensor]:
    """Return the rows of a chunk as they are in the files, [n, width] each."""
    keys = chunk.ids if router.block_size is None else router.local_index(chunk.ids)
    reserved = (keys >= _RESERVED[0]) & (keys <= _RESERVED[1])
    if bool(reserved.any()):
        raise InputError(
            f"export_dynamicemb: table {config.name!r}: id {int(chunk.ids[reserved][0])} is a key that "
            "DynamicEmb reserves: remove it first"
        )
    ages = (now - chunk.time).clamp(min=0) * NANOSECONDS
    scores = {"lru": ages, "lfu": chunk.count, "step": chunk.step}[score]
    assert scores is not None, "check: the table counts updates"
    return {"keys": keys, "values": chunk.rows, "scores": scores, "opt_values": _state(config, chunk)}


def _state(config: TableConfig, chunk: Chunk) -> Tensor:
    """Return the optimizer state by name, each name over all segments: float32 [n, width]."""
    names = _STATES.get(optimizer_of(config), ())
    parts = [chunk.state[f"{i}/{name}"] for name in names for i in range(len(config.segments))]
    return torch.cat(parts, 1) if parts else chunk.rows[:, :0]


def _optimizer(config: TableConfig, step: int) -> dict[str, Any]:
    """Return DynamicEmb's arguments of the optimizer of a table."""
    name, first = optimizer_of(config), config.segments[0].optimizer
    same = all(segment.optimizer == first for segment in config.segments)
    by_row = getattr(first, "counts_rows", False) or (name == "rowwise_adagrad" and len(config.segments) > 1)
    if name not in _TYPES or not same or by_row or getattr(first, "weight_decay", 0.0):
        raise InputError(
            f"export_dynamicemb: table {config.name!r}: DynamicEmb cannot continue with {first}; with "
            "drop_optimizer_state=True it starts fresh"
        )
    meta: dict[str, Any] = {"opt_type": _TYPES[name], "lr": first.rate(step)}
    if name == "adam":
        beta1, beta2 = first.betas  # type: ignore[attr-defined]
        meta |= {"iters": step, "beta1": beta1, "beta2": beta2, "eps": first.eps, "weight_decay": 0.0}  # type: ignore[attr-defined]
    elif name != "sgd":
        meta |= {"eps": first.eps, "initial_accumulator_value": first.initial_accumulator_value}  # type: ignore[attr-defined]
    return meta


def _score(config: TableConfig, score: str | None) -> str:
    own = getattr(config.capacity, "score", None)
    if score is None:
        return own if own in _STRATEGIES else "lru"
    checks.one_of(score, tuple(_STRATEGIES), "export_dynamicemb: score")
    if score != "lru" and not config.counted:
        raise InputError(
            f"export_dynamicemb: table {config.name!r} does not count updates, which score={score!r} needs: "
            "a table with MinCount or Capacity(score=...) does"
        )
    return score


def _router(
    own: Router | None, config: TableConfig, ranks: int | None, dist_type: str | None, rows: int | None
) -> Router:
    mode = dist_type or (own.mode if own is not None else config.dist_type) or "roundrobin"
    checks.one_of(mode, MODES, "export_dynamicemb: dist_type")
    count = own.num_shards if own is not None else 1
    count = count if ranks is None else checks.integer(ranks, "export_dynamicemb: ranks", 1, 1 << 20)
    block = None
    if mode == "continuous":
        block = -(-checks.integer(rows, f"export_dynamicemb: num_embeddings of {config.name!r}") // count)
    router = Router(mode, count, block_size=block)
    if own is not None and own.num_shards > 1 and own != router:
        raise UsageError(
            f"export_dynamicemb: table {config.name!r} is routed by {own}, the dump by {router}: load a "
            "checkpoint in one process, which writes the files of any number of ranks"
        )
    return router
