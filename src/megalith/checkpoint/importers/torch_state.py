"""import_torch: fill tables from the weights of nn.Embedding and nn.EmbeddingBag; a row's id is its index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
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
from megalith.errors import InputError
from megalith.nn import EmbeddingCollection
from megalith.ops import checks
from megalith.table import TableConfig

_STATE: dict[str, dict[str, str]] = {
    "sgd": {},
    "adagrad": {"sum": "sum"},
    "adam": {"m": "exp_avg", "v": "exp_avg_sq", "count": "step"},
}
"""The state names of our optimizers, and torch.optim's names for them."""


def import_torch(
    collection: EmbeddingCollection,
    state_dict: Mapping[str, Any],
    tables: Mapping[str, str],
    *,
    optimizer_state: Mapping[str, Mapping[str, Any]] | None = None,
    time: float | None = None,
    on_error: OnError = "raise",
) -> ImportReport:
    """Fill tables with the rows of embedding weights; row i becomes the row of id i.

    Args:
        collection: The collection; the tables to fill must be empty.
        state_dict: The state_dict of a model, from `torch.load(path, weights_only=True, mmap=True)`.
        tables: For each table, the key of its weight: [rows, dim] of any float dtype.
        optimizer_state: For each table, the state that torch.optim.Adagrad, Adam or SparseAdam has for the
            weight, `optimizer.state[weight]`. Without it the state starts fresh.
        time: The last-update time of the rows in seconds; None is now.
        on_error: "raise" rejects rows with NaN or Inf; "skip" leaves them out and counts them.

    Returns:
        The report.

    Raises:
        InputError: A key is missing, or a weight or its state does not match the table. Nothing was written.
    """
    into = RowImport(collection, {} if tables is None else tables, time=time, on_error=on_error)
    if not isinstance(state_dict, Mapping):
        raise InputError(
            f"import_torch: state_dict must map names to tensors, got {type(state_dict).__name__}"
        )
    given = {} if optimizer_state is None else optimizer_state
    checks.mapping(given, "import_torch: optimizer_state", '{"user": optimizer.state[weight]}')
    if extra := sorted(set(given) - set(tables)):
        raise InputError(f"import_torch: optimizer_state is given for {extra}, which are not in tables")
    weights, states = {}, {}
    for name, key in tables.items():
        config = into.configs[name]
        weights[name] = _weight(config, state_dict, key)
        if name in given:
            states[name] = _state(config, weights[name].shape[0], given[name])
            if "m" in states[name] and "count" not in states[name]:
                into.left_out[f"{name}: step"] = (
                    "Adam's bias correction continues from the global step: set global_step to "
                    f"{given[name].get('step')}"
                )
        elif config.state_columns:
            into.left_out[f"{name}: optimizer state"] = "optimizer_state was not given, so it starts fresh"

    def read_rows() -> Iterator[ImportedRows]:
        for name, weight in weights.items():
            config = into.configs[name]
            for part in pieces_of(weight.shape[0], config.row_floats):
                n = part.stop - part.start
                yield ImportedRows(
                    name,
                    f"state_dict[{tables[name]!r}]",
                    torch.arange(part.start, part.stop, device="cpu"),
                    _plain(weight[part]),
                    spread_state(config, _part(states[name], part, n)) if name in states else {},
                    torch.full((n,), into.time, device="cpu"),
                )

    return into.run(read_rows)


def _weight(config: TableConfig, state_dict: Mapping[str, Any], key: str) -> Tensor:
    if key not in state_dict:
        known = ", ".join(repr(k) for k, v in state_dict.items() if isinstance(v, Tensor) and v.dim() == 2)
        raise InputError(
            f"table {config.name!r}: the state_dict has no key {key!r} (its matrices: {known or 'none'})"
        )
    weight = state_dict[key]
    where = f"table {config.name!r}: state_dict[{key!r}]"
    if not isinstance(weight, Tensor) or type(weight) not in (Tensor, torch.nn.Parameter):
        raise InputError(
            f"{where} is a {type(weight).__name__}, not a plain tensor (use full_tensor() of a DTensor)"
        )
    if weight.layout != torch.strided or weight.is_meta or not weight.is_floating_point():
        raise InputError(
            f"{where} must hold dense floats, got {weight.dtype}, {weight.layout}, on {weight.device}"
        )
    if weight.dim() != 2 or weight.shape[1] != config.dim:
        raise InputError(f"{where} is {list(weight.shape)}, the table needs [rows, {config.dim}]")
    return weight


def _state(config: TableConfig, rows: int, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the state by our names: float [rows, dim], or [] for one number for all rows."""
    where = f"table {config.name!r}: optimizer_state"
    checks.mapping(given, where, '{"sum": ...}')
    wanted: dict[str, str] = {}
    for segment in config.segments:
        if segment.optimizer.name not in _STATE:
            raise InputError(
                f"{where}: torch.optim has no state that {optimizer_of(config)} could continue with"
            )
        kept = {state.name for state in segment.optimizer.states(segment.dim)}
        wanted |= {ours: theirs for ours, theirs in _STATE[segment.optimizer.name].items() if ours in kept}
    if missing := sorted(set(wanted.values()) - set(given)):
        raise InputError(
            f"{where} has {sorted(given)} but lacks {missing}, which {optimizer_of(config)} needs: is it the "
            "same optimizer?"
        )
    extra = sorted(k for k in set(given) - {"step", *wanted.values()} if given[k] is not None)
    if extra:
        raise InputError(f"{where} has {extra}, which {optimizer_of(config)} does not use")
    state = {}
    for ours, theirs in wanted.items():
        value = given[theirs]
        value = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
        shape = () if theirs == "step" else (rows, config.dim)
        if value.shape != shape or value.layout != torch.strided or value.is_meta:
            raise InputError(f"{where}: {theirs!r} is {list(value.shape)}, expected {list(shape)}")
        state[ours] = value
    return state


def _part(state: Mapping[str, Tensor], part: slice, n: int) -> dict[str, Tensor]:
    return {
        name: _plain(value[part]) if value.dim() else torch.full((n, 1), float(value), device="cpu")
        for name, value in state.items()
    }


def _plain(values: Tensor) -> Tensor:
    return values.detach().to("cpu", torch.float32).contiguous()
