"""import_torchrec and export_torchrec: the rows of tables from and to the state_dict of a TorchRec model.

Keys are found by their end, so the collection may be anywhere in the model:

    key                                                 content
    embedding_bags.T.weight, embeddings.T.weight        [rows, dim], the weights
    _managed_collision_modules.T.NAME                   which id has which row, if collisions are managed:
        _mch_sorted_raw_ids, _mch_remapped_ids_mapping  ZCH: ids in ascending order, then 2^63 - 1; their rows
        _hash_zch_identities                            MPZCH: the id of each row, -1 for none

Without managed collisions the id of a row is its index. The last row of a ZCH table belongs to all ids
without a row of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from megalith.checkpoint.importers import ImportReport, OnError, import_torch
from megalith.errors import InputError, UsageError
from megalith.nn import EmbeddingCollection
from megalith.ops import checks

_NO_ID = torch.iinfo(torch.int64).max
_FUSED = {
    "adagrad": {"momentum1": "sum"},
    "rowwise_adagrad": {"momentum1": "sum"},
    "adam": {"momentum1": "exp_avg", "momentum2": "exp_avg_sq"},
}
"""The names that TorchRec's fused optimizers give to states, and torch.optim's names."""


def import_torchrec(
    collection: EmbeddingCollection,
    state_dict: Mapping[str, Any],
    *,
    tables: Mapping[str, str] | None = None,
    optimizer_state: Mapping[str, Mapping[str, Any]] | None = None,
    time: float | None = None,
    on_error: OnError = "raise",
) -> ImportReport:
    """Fill tables with the weights of a TorchRec model, with or without managed collisions.

    Args:
        collection: Any collection of Megalith; the tables to fill must be empty.
        state_dict: The state_dict of the model, or of its collection, unsharded.
        tables: For each table, its name in TorchRec; None fills all tables under their own names.
        optimizer_state: For some tables, the state of their weight by name: that of an optimizer of torch
            (`sum`; `exp_avg`, `exp_avg_sq`, `step`), or of TorchRec's fused optimizer (`T.momentum1`, ...).
        time: The last-update time of the rows in seconds; None is now.
        on_error: "raise" rejects rows with NaN or Inf; "skip" leaves them out and counts them.

    Returns:
        The report.

    Raises:
        InputError: A key is missing, or a weight or state does not match its table. Nothing was written.
    """
    names, found = _find("import_torchrec", collection, state_dict, tables)
    given = checks.mapping(optimizer_state or {}, "import_torchrec: optimizer_state", '{"t1": {"sum": ...}}')
    weights: dict[str, Any] = {}
    ids: dict[str, Tensor] = {}
    states: dict[str, Mapping[str, Any]] = {}
    unseen: dict[str, str] = {}
    for ours, (key, managed) in found.items():
        weights[key] = state_dict[key]
        if ours in given:
            states[ours] = _torch_state(collection, ours, names[ours], given[ours])
        if not managed or not _is_plain(weights[key]):  # import_torch explains the latter
            continue
        ids[ours], rows = _slots(ours, state_dict, managed, weights[key].shape[0])
        weights[key] = weights[key].detach()[rows]
        if ours in states:
            states[ours] = {k: v[rows] if _is_plain(v) and v.dim() else v for k, v in states[ours].items()}
        unseen[f"{ours}: rows without an id"] = "the rows that unseen ids share: here each has its own"
    report = import_torch(
        collection,
        weights,
        {ours: key for ours, (key, _) in found.items()},
        ids=ids,
        optimizer_state=states | {name: given[name] for name in given if name not in names},
        time=time,
        on_error=on_error,
    )
    return ImportReport(report.rows, report.kept, report.left_out | unseen)


def export_torchrec(
    collection: EmbeddingCollection,
    state_dict: Mapping[str, Any],
    *,
    tables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return a state_dict of a TorchRec model with the rows of tables, for its `load_state_dict`.

    A weight receives the row of each of its indices, as a lookup returns it. With ZCH, the rows of the table
    are numbered by ascending id. With MPZCH, only ids that the state_dict already holds can be written.

    Args:
        collection: Any collection of Megalith, in one process.
        state_dict: The state_dict of the model, or of its collection, unsharded. It is not changed.
        tables: As for `import_torchrec`.

    Returns:
        A copy of `state_dict` with new weights and, with ZCH, new ids; other entries are the same objects.

    Raises:
        InputError: A key is missing, a weight does not match its table, or an id of the table has no place.
        UsageError: The tables are spread over several processes.
    """
    _, found = _find("export_torchrec", collection, state_dict, tables)
    shards = collection.shards
    if shards.world_size > 1 or not shards.local:
        raise UsageError(
            "export_torchrec: the tables are in several processes: load a checkpoint of them in one"
        )
    exported = dict(state_dict)
    for ours, (key, managed) in found.items():
        weight, config = state_dict[key], shards.configs[ours]
        where = f"table {ours!r}: state_dict[{key!r}]"
        if not _is_plain(weight) or weight.dim() != 2 or weight.shape[1] != config.dim:
            raise InputError(
                f"{where} must be a plain tensor [rows, {config.dim}], got {checks.kind(weight)}"
            )
        rows = weight.shape[0]
        ids = _all_ids(collection, ours)
        if not managed:
            if outside := ids[(ids < 0) | (ids >= rows)].tolist():
                raise InputError(
                    f"{where} has {rows} rows, too few for {len(outside)} ids such as {outside[0]}: raise "
                    "num_embeddings of the TorchRec model, or use one with managed collisions"
                )
            ids, places = torch.arange(rows, device="cpu"), torch.arange(rows, device="cpu")
        elif "_mch_sorted_raw_ids" in managed:
            places = _write_zch(where, exported, managed, ids, rows)
        else:
            known, slots = _slots(ours, state_dict, managed, rows)
            places = _positions(where, known, slots, ids)
        new = weight.detach().clone()
        new[places] = collection.shards.lookup({ours: ids}).rows[ours].to(new)
        exported[key] = new
    return exported


def _find(
    where: str, collection: EmbeddingCollection, state_dict: Any, tables: Mapping[str, str] | None
) -> tuple[dict[str, str], dict[str, tuple[str, dict[str, str]]]]:
    """Return the names in TorchRec, and the key of each weight with those of its managed collisions."""
    checks.instance(collection, EmbeddingCollection, f"{where}: collection")
    checks.mapping(state_dict, f"{where}: state_dict", "model.state_dict()")
    names = dict(checks.mapping(tables or {}, f"{where}: tables", '{"user": "t_user"}'))
    names = names or {name: name for name in collection.configs}
    found = {}
    for ours, theirs in names.items():
        collection.shards.check_name(ours)
        end = re.escape(checks.text(theirs, f"{where}: tables: the name of {ours!r}"))
        weight = re.compile(rf"(.*\.)?(embedding_bags|embeddings)\.{end}\.weight")
        keys = [key for key in state_dict if weight.fullmatch(key)]
        if len(keys) != 1:
            known = [key for key in state_dict if key.endswith(".weight") and "embedding" in key]
            raise InputError(
                f"{where}: table {ours!r}: the state_dict must have one key that ends in "
                f"embedding_bags.{theirs}.weight or embeddings.{theirs}.weight, got {keys or known}"
                + ("; pass the part of one collection" if keys else "")
            )
        managed = re.compile(rf"(?:.*\.)?_managed_collision_modules\.{end}\.(_\w+)")
        matches = ((key, managed.fullmatch(key)) for key in state_dict)
        found[ours] = keys[0], {match[1]: key for key, match in matches if match}
    return names, found


def _slots(
    table: str, state_dict: Mapping[str, Any], managed: Mapping[str, str], rows: int
) -> tuple[Tensor, Tensor]:
    """Return the ids that have a row of their own, and their rows, int64 [n] each."""
    if "_mch_sorted_raw_ids" in managed:
        ids, slots = (
            checks.int64(state_dict[managed[name]], f"table {table!r}: {name}").cpu()
            for name in ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping")
        )
        used = ids != _NO_ID
    elif "_hash_zch_identities" in managed:
        ids = checks.int64(
            state_dict[managed["_hash_zch_identities"]].reshape(rows, -1)[:, 0], "identities"
        ).cpu()
        slots, used = torch.arange(rows, device="cpu"), ids != -1
    else:
        raise InputError(f"table {table!r}: its managed collisions are not converted: {sorted(managed)}")
    ids, slots = ids[used], slots[used]
    if ids.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < rows:
        raise InputError(
            f"table {table!r}: a row {int(slots.max())} of {rows}: the state_dict must be unsharded"
        )
    return ids, slots


def _write_zch(
    where: str, exported: dict[str, Any], managed: Mapping[str, str], ids: Tensor, rows: int
) -> Tensor:
    """Write the ids of a table into the buffers of ZCH; return their rows, those of ascending ids."""
    n = ids.numel()
    if n >= rows or (n and int(ids.max()) == _NO_ID):
        raise InputError(
            f"{where} has {rows} rows, of which ZCH gives {rows - 1} to ids, but the table has {n} ids"
        )
    order = ids.argsort()
    places = order.argsort()
    new = {
        "_mch_sorted_raw_ids": torch.cat([ids[order], torch.full((rows - n,), _NO_ID, device="cpu")]),
        "_mch_remapped_ids_mapping": torch.arange(rows, device="cpu"),
    }
    for name in managed.keys() & {"_mch_counts", "_mch_last_access_iter"}:
        new[name] = (torch.arange(rows, device="cpu") < n).to(torch.int64)
    for name, values in new.items():
        exported[managed[name]] = values.to(exported[managed[name]].device)
    return places


def _positions(where: str, known: Tensor, slots: Tensor, ids: Tensor) -> Tensor:
    """Return the row of each id in an MPZCH table."""
    known, order = known.sort()
    at = torch.searchsorted(known, ids).clamp(max=max(known.numel() - 1, 0))
    missing = ids if not known.numel() else ids[known[at] != ids]
    if missing.numel():
        raise InputError(
            f"{where}: {missing.numel()} ids such as {int(missing[0])} have no row there: MPZCH chooses the "
            "row of an id while it trains; export into a model without it, or with ZCH"
        )
    return slots[order[at]]


def _all_ids(collection: EmbeddingCollection, table: str) -> Tensor:
    chunks = [chunk.ids for chunk in collection.shards.scan(table)]
    return torch.cat(chunks) if chunks else torch.empty(0, dtype=torch.int64, device="cpu")


def _torch_state(collection: EmbeddingCollection, ours: str, theirs: str, given: Any) -> dict[str, Any]:
    """Return the state of a weight by torch.optim's names."""
    checks.mapping(given, f"import_torchrec: optimizer_state of {ours!r}", '{"sum": ...}')
    fused = _FUSED.get(collection.configs[ours].segments[0].optimizer.name, {})
    plain = {name.removeprefix(f"{theirs}."): value for name, value in given.items()}
    named = {fused.get(name, name): value for name, value in plain.items()}
    sums = named.get("sum")
    return named | ({"sum": sums[:, None]} if _is_plain(sums) and sums.dim() == 1 else {})


def _is_plain(value: Any) -> TypeGuard[Tensor]:
    return type(value) in (Tensor, nn.Parameter)
