"""Group ids and rows by shard.

`dedup` keeps each id once, as it is sent to other shards; `bucketize` keeps every occurrence. `match` finds
the positions of ids in a list of ids. `split_rows` and `place_rows` move rows. Results do not depend on the
number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.library import define_op, native_module, new_size
from megalith.ops import checks
from megalith.ops.gather_rows import _gather
from megalith.ragged import Ragged
from megalith.routing import Router

Rule = Sequence[int]  # Router.rule; empty if owners are given


class Deduped(NamedTuple):
    """Result of `dedup`: distinct ids, ordered by shard, then list, then first occurrence."""

    ids: Tensor
    """int64 [u]: the distinct ids."""
    first: Tensor
    """int64 [u]: the position of the first occurrence of each distinct id."""
    counts: Tensor
    """int64 [shards, lists]: the number of distinct ids of each shard and list."""
    inverse: Tensor
    """int64 [n]: the position of each occurrence's id in `ids`."""
    offsets: Tensor | None
    """int64 [n]: where the row of each occurrence begins in the concatenated rows; None without widths."""


class Bucketized(NamedTuple):
    """Result of `bucketize`: values ordered by shard, then row, then input order."""

    lengths: Tensor
    """int64 [shards * rows]: the number of values of each row in each shard, shard-major."""
    indices: Tensor
    """[n]: the values, in their input dtype."""
    weights: Tensor | None
    """[n]: the weights of the values, if any."""
    permute: Tensor
    """int64 [n]: the new position of each input value; `indices[permute]` is the input."""


def dedup(
    ids: Tensor,
    splits: Tensor | None = None,
    router: Router | None = None,
    *,
    owners: Tensor | None = None,
    num_shards: int | None = None,
    distinct: bool = True,
    widths: Sequence[int] | None = None,
    name: str = "owners",
) -> Deduped:
    """Find the distinct ids of each list and order them by the shard that owns them.

    Without `router` and `owners`, all ids go to shard 0.

    Args:
        ids: int64 or int32 [n].
        splits: int64 [lists + 1], which divide the ids into lists; default one list. Ids are compared within
            a list.
        router: Gives the owner of each id.
        owners: int32 [n], the owner of each occurrence, in 0:num_shards; the first occurrence of an id
            decides.
        num_shards: The number of shards, with `owners`.
        distinct: False keeps every occurrence as an id of its own.
        widths: The row size of each list; adds `Deduped.offsets`.
        name: The name of `owners` in error messages.

    Returns:
        The distinct ids, where they occur, and how many each shard owns.

    Raises:
        InputError: An owner is out of range, or splits or widths do not match the ids.
    """
    ids = checks.with_data(checks.int64(ids, "ids"), "ids")
    name, distinct = checks.text(name, "name"), checks.flag(distinct, "distinct")
    num_shards = None if num_shards is None else checks.integer(num_shards, "num_shards")
    lists = _one_list(ids) if splits is None else checks.int64(splits, "splits")
    rule, shards = _rule(router, num_shards)
    if owners is not None:
        if router is not None:
            raise InputError("pass a router or owners, not both")
        owners = checks.integers(owners, name, (ids.shape[0],))
        rule = []
    elif router is not None and num_shards not in (None, shards):
        raise InputError(f"num_shards is {num_shards}, the router has {shards}")
    checks.with_data(lists, "splits")
    if lists.shape[0] < 1:
        raise InputError("splits must have the shape [lists + 1], got [0]")
    sizes = [] if widths is None else checks.sizes(widths, "widths", 0)
    if widths is not None and len(sizes) != lists.shape[0] - 1:
        raise InputError(f"widths has {len(sizes)} sizes for {lists.shape[0] - 1} lists")
    found = find_distinct(ids, lists, owners, rule, shards, distinct, sizes, name)
    return found if widths is not None else found._replace(offsets=None)


def find_distinct(
    ids: Tensor,
    splits: Tensor,
    owners: Tensor | None,
    rule: Rule,
    shards: int,
    distinct: bool,
    widths: list[int],
    name: str = "owners",
) -> Deduped:
    """Do what `dedup` does with checked arguments; `rule` is that of a router."""
    unique, first, counts, index, offsets = _dedup(ids, splits, owners, rule, shards, distinct, widths, name)
    return Deduped(unique, first, counts.view(shards, splits.shape[0] - 1), index, offsets)


def bucketize(ragged: Ragged, router: Router, weights: Tensor | None = None) -> Bucketized:
    """Group the values of a column by the shard that owns each id.

    Args:
        ragged: The ids.
        router: Gives the owner of each id.
        weights: float [n]; default the column's own.

    Returns:
        The values ordered by shard, their number per shard and row, and the permutation.

    Raises:
        InputError: An argument has the wrong type, or weights do not match the values.
    """
    if not isinstance(ragged, Ragged):
        raise InputError(f"ragged must be a Ragged, got {checks.kind(ragged)}")
    values = ragged.values
    ids = checks.int64(values, "ragged.values")
    weights = ragged.weights if weights is None else weights
    if weights is not None:
        weights = checks.floats(weights, "weights", (ids.shape[0],))
    if not isinstance(router, Router):
        raise InputError(f"router must be a Router, got {checks.kind(router)}")
    rule, shards = list(router.rule), router.num_shards
    lengths, place = _bucketize(ids, ragged.row_splits, None, rule, shards, "owners")
    placed = None if weights is None else _placed(weights, place)
    return Bucketized(lengths, _placed(values, place), placed, place)


def match(keys: Tensor, queries: Tensor, *, name: str = "queries", missing_ok: bool = False) -> Tensor:
    """Find the position of the first key that equals each query.

    Args:
        keys: int [k].
        queries: int [...].
        name: The name of the queries in error messages.
        missing_ok: Gives -1 for a query without a key instead of raising.

    Returns:
        int64 in the shape of the queries.

    Raises:
        InputError: A query has no key.
    """
    name, missing_ok = checks.text(name, "name"), checks.flag(missing_ok, "missing_ok")
    keys = checks.int64(keys, "keys")
    flat = checks.int64(queries, name, None).reshape(-1)
    found: Tensor = _match(keys, flat, name, missing_ok)
    return found.view(queries.shape)


def split_rows(rows: Tensor, indices: Tensor, num_splits: int, *, name: str = "indices") -> list[Tensor]:
    """Split rows: row i goes to output `indices[i]`, in input order. Differentiable.

    Args:
        rows: [n, ...].
        indices: int [n], each in 0:num_splits.
        num_splits: The number of outputs.
        name: The name of the indices in error messages.

    Returns:
        `num_splits` tensors [k, ...].
    """
    rows = _rows(rows)
    num_splits = checks.integer(num_splits, "num_splits")
    owners = checks.integers(indices, checks.text(name, "name"), (rows.shape[0],))
    checks.with_data(owners, name)
    lengths, place = _bucketize(None, _one_list(rows), owners, [], num_splits, name)
    if torch.is_grad_enabled() and rows.requires_grad:
        return list(_Split.apply(rows, place, lengths))
    return list(_split(rows, place, lengths))


def place_rows(rows: Tensor, place: Tensor) -> Tensor:
    """Permute rows: row i becomes row `place[i]`. Differentiable.

    Args:
        rows: [n, ...].
        place: int64 [n], a permutation of 0:n.

    Returns:
        [n, ...].
    """
    rows = _rows(rows)
    n = rows.shape[0]
    place = checks.int64(place, "place", (n,))
    taken = torch.zeros_like(place, dtype=torch.bool).index_fill(0, place.clamp(0, max(n - 1, 0)), True)
    checks.require(taken & (place >= 0) & (place < n), "place must be a permutation of the row numbers")
    return _placed(rows, place)


def _rows(rows: Tensor) -> Tensor:
    if checks.tensor(rows, "rows", None).dim() < 1:
        raise InputError("rows must have at least one dimension")
    return rows


def _one_list(values: Tensor) -> Tensor:
    return torch.arange(2, device=values.device) * values.shape[0]


def _rule(router: Router | None, num_shards: int | None) -> tuple[list[int], int]:
    if router is None:
        shards = 1 if num_shards is None else checks.integer(num_shards, "num_shards")
        return list(Router("roundrobin", 1).rule), shards
    if not isinstance(router, Router):
        raise InputError(f"router must be a Router, got {checks.kind(router)}")
    return list(router.rule), router.num_shards


# ---- dedup


def _dedup_native(
    ids: Tensor,
    splits: Tensor,
    owners: Tensor | None,
    rule: Rule,
    shards: int,
    distinct: bool,
    widths: list[int],
    name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    native: Any = native_module()
    n = ids.shape[0]
    index, first, unique = (torch.empty(n, dtype=torch.int64, device="cpu") for _ in range(3))
    counts = torch.empty(shards * (splits.shape[0] - 1), dtype=torch.int64, device="cpu")
    by = tuple(rule) if owners is None else _narrow(owners, shards, name)
    ids, splits = ids.contiguous(), splits.contiguous()
    threads = torch.get_num_threads()
    offsets = torch.empty(n if widths else 0, dtype=torch.int64, device="cpu")
    sizes = (torch.tensor(widths, device="cpu"), offsets) if widths else (None, None)
    u = native.dedup(ids, splits, by, shards, distinct, index, first, unique, counts, *sizes, name, threads)
    return unique[:u], first[:u], counts, index, offsets


def _dedup_reference(
    ids: Tensor,
    splits: Tensor,
    owners: Tensor | None,
    rule: Rule,
    shards: int,
    distinct: bool,
    widths: list[int],
    name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    owners = _owners_reference(ids, owners, rule, shards, name)
    n, lists = ids.shape[0], splits.shape[0] - 1
    splits = checks.splits(splits, "splits", n)
    list_of = torch.repeat_interleave(torch.arange(lists, device=ids.device), torch.diff(splits))
    position = torch.arange(n, device=ids.device)
    first_of = position.clone()  # the first occurrence of the same id in the same list
    if distinct:
        for begin, end in zip(splits[:-1].tolist(), splits[1:].tolist(), strict=True):
            unique, inverse = torch.unique(ids[begin:end], return_inverse=True)
            first = torch.full_like(unique, n).scatter_reduce(0, inverse, position[begin:end], "amin")
            first_of[begin:end] = first[inverse]
    first = position[first_of == position]
    bucket = owners[first].to(torch.int64) * lists + list_of[first]
    order = torch.argsort(bucket, stable=True)
    first = first[order]
    number = torch.empty_like(position)
    number[first] = torch.arange(first.numel(), device=ids.device)
    counts = torch.bincount(bucket, minlength=shards * lists)
    index = number[first_of]
    if not widths:
        return ids[first], first, counts, index, index[:0].clone()
    sizes = torch.tensor(widths, device=ids.device)[list_of[first]]
    return ids[first], first, counts, index, (torch.cumsum(sizes, 0) - sizes)[index]


def _narrow(owners: Tensor, shards: int, name: str) -> Tensor:
    """Convert owners to the dtype that native code expects."""
    if owners.dtype == torch.int64:
        checks.index_range(owners, 0, shards, name)
    return owners.to(torch.int32).contiguous()


def _owners_reference(
    ids: Tensor | None, owners: Tensor | None, rule: Rule, shards: int, name: str
) -> Tensor:
    if owners is None:
        assert ids is not None
        return Router.from_rule(rule).owner_reference(ids)
    checks.index_range(owners, 0, shards, name)
    return owners


def _dedup_fake(
    ids: Tensor, splits: Tensor, owners: Any, rule: Any, shards: int, distinct: bool, widths: Any, name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    u, n = new_size(), ids.shape[0]
    counts = ids.new_empty(shards * (splits.shape[0] - 1))
    return ids.new_empty(u), ids.new_empty(u), counts, ids.new_empty(n), ids.new_empty(n if widths else 0)


_dedup = define_op(
    "dedup(Tensor ids, Tensor splits, Tensor? owners, int[] rule, int shards, bool distinct, int[] widths,"
    " str name) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    native=_dedup_native,
    reference=_dedup_reference,
    fake=_dedup_fake,
)

# ---- match


def _match_native(keys: Tensor, queries: Tensor, name: str, missing_ok: bool) -> Tensor:
    native: Any = native_module()
    found = torch.empty(queries.shape[0], dtype=torch.int64, device="cpu")
    native.match(keys.contiguous(), queries.contiguous(), found, torch.get_num_threads())
    return _all_found(found, queries, name, missing_ok)


def _match_reference(keys: Tensor, queries: Tensor, name: str, missing_ok: bool) -> Tensor:
    if keys.numel() == 0:
        return _all_found(torch.full_like(queries, -1), queries, name, missing_ok)
    ordered, order = torch.sort(keys, stable=True)  # equal keys stay in order
    at = torch.searchsorted(ordered, queries.contiguous()).clamp(max=keys.numel() - 1)
    found = torch.where(ordered[at] == queries, order[at], -1)
    return _all_found(found, queries, name, missing_ok)


def _all_found(found: Tensor, queries: Tensor, name: str, missing_ok: bool) -> Tensor:
    if not missing_ok and bool((found < 0).any()):
        at = int((found < 0).nonzero()[0])
        raise InputError(f"{name}: id {int(queries[at])} (position {at}) is not among the keys")
    return found


_match = define_op(
    "match(Tensor keys, Tensor queries, str name, bool missing_ok) -> Tensor",
    native=_match_native,
    reference=_match_reference,
    fake=lambda keys, queries, name, missing_ok: torch.empty_like(queries),
)

# ---- bucketize


def _bucketize_native(
    ids: Tensor | None, splits: Tensor, owners: Tensor | None, rule: Rule, shards: int, name: str
) -> tuple[Tensor, Tensor]:
    native: Any = native_module()
    values = ids if owners is None else owners
    assert values is not None
    lengths = torch.empty(shards * (splits.shape[0] - 1), dtype=torch.int64, device="cpu")
    place = torch.empty(values.shape[0], dtype=torch.int64, device="cpu")
    by = tuple(rule) if owners is None else _narrow(owners, shards, name)
    ids = None if ids is None else ids.contiguous()
    native.bucketize(ids, splits.contiguous(), by, shards, lengths, place, name, torch.get_num_threads())
    return lengths, place


def _bucketize_reference(
    ids: Tensor | None, splits: Tensor, owners: Tensor | None, rule: Rule, shards: int, name: str
) -> tuple[Tensor, Tensor]:
    owners = _owners_reference(ids, owners, rule, shards, name).to(torch.int64)
    rows = splits.shape[0] - 1
    splits = checks.splits(splits, "row_splits", owners.shape[0])
    row_of = torch.repeat_interleave(torch.arange(rows, device=owners.device), torch.diff(splits))
    lengths = torch.bincount(owners * rows + row_of, minlength=shards * rows)
    return lengths, _inverse(torch.argsort(owners, stable=True))


def _inverse(permutation: Tensor) -> Tensor:
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(permutation.numel(), device=permutation.device)
    return inverse


def _bucketize_fake(
    ids: Tensor | None, splits: Tensor, owners: Tensor | None, rule: Any, shards: int, name: str
) -> tuple[Tensor, Tensor]:
    values = ids if owners is None else owners
    assert values is not None
    return splits.new_empty(shards * (splits.shape[0] - 1)), splits.new_empty(values.shape[0])


_bucketize = define_op(
    "bucketize(Tensor? ids, Tensor splits, Tensor? owners, int[] rule, int shards, str name)"
    " -> (Tensor, Tensor)",
    native=_bucketize_native,
    reference=_bucketize_reference,
    fake=_bucketize_fake,
)

# ---- split and place rows


def _matrix(rows: Tensor) -> Tensor:
    """View [n, ...] as [n, width]."""
    return rows.reshape(rows.shape[0], -1) if rows.numel() else rows.new_empty(rows.shape[0], 0)


def _place_native(rows: Tensor, place: Tensor) -> Tensor:
    native: Any = native_module()
    source = _matrix(rows).contiguous()
    out = torch.empty_like(source)
    native.place(source, place.contiguous(), out, torch.get_num_threads())
    return out.view(rows.shape)


def _place_reference(rows: Tensor, place: Tensor) -> Tensor:
    out = torch.empty_like(rows)
    out[place] = rows
    return out


_place = define_op(
    "place(Tensor rows, Tensor place) -> Tensor",
    native=_place_native,
    reference=_place_reference,
    fake=lambda rows, place: torch.empty_like(rows, memory_format=torch.contiguous_format),
)


def _split_any(rows: Tensor, place: Tensor, lengths: Tensor) -> list[Tensor]:
    order = _place(torch.arange(rows.shape[0], device=rows.device), place)
    width = _matrix(rows).shape[1]
    pieces = order.split(lengths.tolist())
    if width == 0:
        return [rows.new_empty(p.shape[0], *rows.shape[1:]) for p in pieces]
    flat = rows.reshape(-1)
    copies = _gather(flat, list(pieces), [width] * len(pieces), [width] * len(pieces), "indices")
    return [c.view(c.shape[0], *rows.shape[1:]) for c in copies]


_split = define_op(
    "split(Tensor rows, Tensor place, Tensor lengths) -> Tensor[]",
    native=_split_any,
    reference=_split_any,
    fake=lambda rows, place, lengths: [
        rows.new_empty(new_size(), *rows.shape[1:]) for _ in range(lengths.shape[0])
    ],
)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: Tensor, lengths: Tensor) -> Any:
        ctx.save_for_backward(place)
        return tuple(_split(rows, place, lengths))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (place,) = ctx.saved_tensors
        return torch.cat(grads).index_select(0, place), None, None


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: Tensor) -> Any:
        ctx.save_for_backward(place)
        return _place(rows, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place), None


def _placed(rows: Tensor, place: Tensor) -> Tensor:
    if torch.is_grad_enabled() and rows.requires_grad:
        out: Tensor = _Placed.apply(rows, place)
        return out
    result: Tensor = _place(rows, place)
    return result
