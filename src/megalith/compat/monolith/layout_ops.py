"""Monolith's layout ops: rows of all features assembled into layouts, and the gradient.

Native code reads the encoding of `sharding_sparse_fids` directly; the torch reference compiles it to a
Pooling and runs `pool_rows`. All encodings become a flat list of rows per table and server:

    version   embeddings_list                            further arguments
    3         one tensor per table and server            none
    4         one tensor, by server, then table          fid_list_emb_row_lenth: the elements of each list
    5         one tensor per table and server; the       batch_size, nfl_size, feature_size, fid_size [R] and
              rows of R requests are concatenated        emb_size [R * lists]: the sizes of each request

Requests of version 5 are encoded one by one (`sharding_sparse_fids`) and every tensor is concatenated; a
shared feature has one row per request. The outputs of the requests follow one another in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalith.compat.monolith.feature_configs import (
    FeatureConfigs,
    LayoutPlan,
    as_feature_configs,
    layout_plan,
    num_columns,
)
from megalith.compat.monolith.parsers import INPUT_TYPES, SHARED, check_version
from megalith.errors import InputError
from megalith.library import copy_repeated, define_op, native_module, new_tensor
from megalith.ops import checks
from megalith.ops.move_runs import locate
from megalith.ops.pooling import Bags, _pool, _unpool, op_arguments
from megalith.routing import Router

# ---- requests


class _Encoding(NamedTuple):
    """The arguments of both ops that define which rows go where."""

    fid_offset: Tensor
    feature_offset: Tensor
    nfl_offset: Tensor
    batch: int
    encoded: str

    @property
    def plan(self) -> LayoutPlan:
        """What all batches of the config share."""
        return layout_plan(self.encoded)

    def feature_rows(self) -> tuple[list[int], list[bool]]:
        """Return where each feature's rows begin in feature_offset (and their end), and which are shared."""
        plan, batch = self.plan, self.batch
        for shape in plan.shapes:
            if shape[0] not in (-1, batch):
                raise InputError(f"batch_size is {batch}, but a layout declares the shape {list(shape)}")
        numbers = self.nfl_offset.tolist()
        starts = [n & (SHARED - 1) for n in numbers]
        shared = [bool(n & SHARED) for n in numbers]
        starts[-1] -= 1
        total = self.feature_offset.shape[0] - 1
        if starts[0] != 0 or starts[-1] != total:
            raise InputError(f"nfl_offset must go from 0 to the {total + 1} entries of feature_offset")
        for f in range(len(plan.dims)):
            rows, found = 1 if shared[f] else batch, starts[f + 1] - starts[f]
            if found != rows:
                raise InputError(f"nfl_offset gives feature number {f} {found} rows, expected {rows}")
        return starts, shared

    def native_features(self) -> list[Any]:
        """Return the features in the native module's form."""
        plan = self.plan
        starts, shared = self.feature_rows()
        rows = [1 if s else self.batch for s in shared]
        fields = (starts[:-1], rows[:-1], plan.dims, plan.firsts, plan.means, shared[:-1], plan.native_parts)
        return list(zip(*fields, strict=True))

    def pooling(self, sizes: list[int], dtype: torch.dtype) -> tuple[Any, ...]:
        """Return arguments for the ops `pool` and `unpool`, for lists of these sizes."""
        plan, feature_offset = self.plan, self.feature_offset
        starts, shared = self.feature_rows()
        device, n = self.fid_offset.device, self.fid_offset.shape[0]
        steps = torch.diff(feature_offset)
        if int(feature_offset[0]) != 0 or int(feature_offset[-1]) != n or bool((steps < 0).any()):
            raise InputError(f"feature_offset must ascend from 0 to {n}, the length of fid_offset")
        bases = torch.tensor([0, *sizes], device=device).cumsum(0)
        dims = torch.tensor(plan.dims, device=device)
        index = locate(self.fid_offset, bases, feature_offset[starts[1:]], dims, "fid_offset")
        divisor = steps.clamp(min=1).to(dtype)
        blocks, bags = [index], []
        end = n
        for f in plan.order:
            offsets = feature_offset[starts[f] : starts[f + 1] + 1]
            if plan.firsts[f]:
                kept = _first_rows(index, offsets, plan.firsts[f])
                blocks.append(kept)
                offsets = torch.arange(end, end + kept.shape[0] + 1, device=device)
                end += kept.shape[0]
            mean = divisor[starts[f] : starts[f + 1]] if plan.means[f] else None
            if plan.parts[f]:
                bags.append(Bags(offsets, plan.parts[f], divisor=mean, shared=shared[f]))
        joined = torch.cat(blocks) if len(blocks) > 1 else index
        return joined, 1, max(plan.dims), *op_arguments(bags, dtype)


class RequestSizes(NamedTuple):
    """How the tensors of a call are divided; None where the version has none."""

    fid_list_emb_row_lenth: Tensor | None = None
    nfl_size: Tensor | None = None
    feature_size: Tensor | None = None
    fid_size: Tensor | None = None
    emb_size: Tensor | None = None


class LayoutRequests(NamedTuple):
    """The batches of a call, and how the gradients of their lists become those of the arguments."""

    requests: list[tuple[list[Tensor], _Encoding]]
    """Of each batch, in the encoding of version 3, the rows of each list, flat, and where they go."""
    shapes: list[torch.Size]
    """The shape of each tensor of `embeddings_list`."""
    server_major: list[int] | None
    """Version 4: the numbers of the lists in the order in which the one tensor holds them."""

    def join(self, gradients: list[list[Tensor]]) -> list[Tensor]:
        """Combine the gradients of the lists, float [elements], of all requests."""
        flat = [each[0] if len(each) == 1 else torch.cat(each) for each in zip(*gradients, strict=True)]
        if self.server_major is not None:
            flat = [torch.cat([flat[number] for number in self.server_major])]
        return [each.view(shape) for each, shape in zip(flat, self.shapes, strict=True)]


def layout_requests(
    embeddings_list: Sequence[Tensor],
    offsets: Sequence[Any],
    variant_type: str,
    feature_cfgs: FeatureConfigs,
    ps_num: int | Router,
    sizes: RequestSizes,
    version: int,
) -> LayoutRequests:
    """Check the arguments of a layout op and divide them into requests.

    offsets: fid_offset, feature_offset, nfl_offset and batch_size.
    """
    checks.one_of(variant_type, INPUT_TYPES, "variant_type")
    check_version(version)
    configs = as_feature_configs(feature_cfgs)
    servers = ps_num.num_shards if isinstance(ps_num, Router) else checks.integer(ps_num, "ps_num", least=0)
    tables, servers = len(configs.table_names), max(1, servers)
    if not tables:
        raise InputError("feature_cfgs has no features")
    given = checks.as_list(embeddings_list, "embeddings_list")
    shapes = [each.shape if isinstance(each, Tensor) else torch.Size() for each in given]
    _check_sizes(sizes, version)
    server_major = None
    if version == 4:
        server_major = [table * servers + server for server in range(servers) for table in range(tables)]
        lists = _from_one_tensor(given, sizes.fid_list_emb_row_lenth, server_major)
    else:
        if len(given) != tables * servers:
            wanted = f"expected {tables * servers}: tables times servers"
            raise InputError(f"embeddings_list has {len(given)} tensors, {wanted}")
        lists = _flat(given)
    # The rows may be on a GPU while the batch was read on the CPU. The host reads nfl_offset.
    fid_offset = _moved(_unsigned(offsets[0], "fid_offset"), lists[0].device)
    feature_offset = _moved(checks.int64(offsets[1], "feature_offset"), lists[0].device)
    nfl_offset = _moved(_unsigned(offsets[2], "nfl_offset"), torch.device("cpu"))
    if sizes.nfl_size is None:
        checks.int64(nfl_offset, "nfl_offset", (len(configs.feature_names) + 1,))
        batch = checks.scalar(offsets[3], "batch_size")
        requests = [(lists, _Encoding(fid_offset, feature_offset, nfl_offset, batch, configs.encoded))]
    else:
        whole = (fid_offset, feature_offset, nfl_offset, offsets[3])
        requests = _divided(lists, whole, sizes, configs)
    return LayoutRequests(requests, shapes, server_major)


def _check_sizes(sizes: RequestSizes, version: int) -> None:
    if (sizes.fid_list_emb_row_lenth is not None) != (version == 4):
        raise InputError(
            f"fid_list_emb_row_lenth must be given for version 4 and no other, got version {version}"
        )
    given = [name for name in RequestSizes._fields[1:] if getattr(sizes, name) is not None]
    if given and version != 5:
        raise InputError(f"{given[0]} must not be given for version {version}; pass version=5")
    if given and len(given) < 4:
        missing = next(name for name in RequestSizes._fields[1:] if name not in given)
        raise InputError(f"{missing} is missing: pass all or none of {', '.join(RequestSizes._fields[1:])}")


def _from_one_tensor(given: list[Tensor], lengths: Tensor | None, server_major: list[int]) -> list[Tensor]:
    """Divide the one tensor of version 4; return the lists in the order table * servers + server."""
    if len(given) != 1:
        raise InputError(f"embeddings_list has {len(given)} tensors, expected 1 for version 4")
    (flat,) = _flat(given)
    parts = _lengths(
        lengths, "fid_list_emb_row_lenth", len(server_major), {"embeddings_list[0]": flat.shape[0]}
    )
    found = dict(zip(server_major, flat.split(parts), strict=True))
    return [found[number] for number in range(len(server_major))]


def _divided(
    lists: list[Tensor], offsets: Sequence[Any], sizes: RequestSizes, configs: FeatureConfigs
) -> list[tuple[list[Tensor], _Encoding]]:
    """Divide the concatenated requests of version 5."""
    *wholes, batch_size = offsets
    if (number := checks.as_integer(batch_size)) is not None:
        batch_size = torch.tensor([number], device="cpu")
    batches = _lengths(batch_size, "batch_size")
    count = len(batches)
    if not count:
        raise InputError("batch_size is empty; pass the batch size of at least one request")
    lengths = (
        ("fid", sizes.fid_size, None),
        ("feature", sizes.feature_size, None),
        ("nfl", sizes.nfl_size, len(configs.feature_names) + 1),
    )
    fids, features, nfls = (
        whole.split(_lengths(own, f"{what}_size", count, {f"{what}_offset": whole.shape[0]}, expected))
        for whole, (what, own, expected) in zip(wholes, lengths, strict=True)
    )
    totals = {f"embeddings_list[{number}]": flat.shape[0] for number, flat in enumerate(lists)}
    elements = _lengths(sizes.emb_size, "emb_size", count * len(lists), totals)  # request-major
    rows = [flat.split(elements[number :: len(lists)]) for number, flat in enumerate(lists)]
    return [
        ([each[r] for each in rows], _Encoding(fids[r], features[r], nfls[r], batches[r], configs.encoded))
        for r in range(count)
    ]


def _lengths(
    tensor: Tensor | None,
    name: str,
    count: int | None = None,
    totals: Mapping[str, int] | None = None,
    expected: int | None = None,
) -> list[int]:
    """Check a vector of sizes; return it as a list."""
    # Inside torch.compile the values are unknown, and the checks are parts of the graph.
    given = checks.with_data(checks.integers(tensor, name, (count,)), name)
    divided = {} if totals is None else totals
    if not torch.compiler.is_compiling():
        found: list[int] = given.tolist()
        if any(length < 0 for length in found):
            raise InputError(f"{name} must not be negative, got {found}")
        if expected is not None and any(length != expected for length in found):
            raise InputError(f"{name} must be {expected} for each request, got {found}")
        for k, (what, total) in enumerate(divided.items()):
            if (length := sum(found[k :: len(divided)])) != total:
                raise InputError(f"{name} adds up to {length} for {what}, which has {total} elements")
        return found
    checks.require(given >= 0, f"{name} must not be negative")
    if expected is not None:
        checks.require(given == expected, f"{name} must be {expected} for each request")
    for k, (what, total) in enumerate(divided.items()):
        checks.require(given[k :: len(divided)].sum() == total, f"{name} does not add up to {what}")
    found = given.tolist()
    for length in found:  # the same again, for the compiler
        torch._check(length >= 0)
    for k, total in enumerate(divided.values()):
        torch._check(sum(found[k :: len(divided)]) == total)
    return found


def _flat(tensors: list[Tensor]) -> list[Tensor]:
    """Check float tensors of one dtype; return them flat, 16-bit floats as float32."""
    checks.same_floats(tensors, "embeddings_list")
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return [rows.reshape(-1).to(dtype) for rows in tensors]


def _moved(offsets: Tensor, device: torch.device) -> Tensor:
    return offsets if "meta" in (offsets.device.type, device.type) else offsets.to(device)


def _unsigned(tensor: Tensor, name: str) -> Tensor:
    """Convert an integer tensor, also of the unsigned dtypes that Monolith uses, to int64."""
    if isinstance(tensor, Tensor) and tensor.dtype in (torch.uint32, torch.uint64):
        tensor = tensor.to(torch.int64)
    return checks.int64(tensor, name)


# ---- the public ops


def fused_embedding_to_layout(
    embeddings_list: Sequence[Tensor],
    fid_list_row_split: object,
    fid_offset: Tensor,
    feature_offset: Tensor,
    nfl_offset: Tensor,
    batch_size: int | Tensor,
    variant_type: str,
    feature_cfgs: FeatureConfigs,
    ps_num: int | Router,
    fid_list_emb_row_lenth: Tensor | None = None,
    nfl_size: Tensor | None = None,
    feature_size: Tensor | None = None,
    fid_size: Tensor | None = None,
    emb_size: Tensor | None = None,
    parallel_flag: int = 0,
    version: int = 3,
) -> list[Tensor]:
    """Assemble rows into layouts. Differentiable in the embeddings.

    Args:
        embeddings_list: The rows of each list of `sharding_sparse_fids`, flat or [k, dim], of one float type;
            version 4: one tensor with the rows of all lists, in the order of `fid_list`.
        fid_offset: From `sharding_sparse_fids`; unsigned dtypes are accepted.
        feature_offset: From `sharding_sparse_fids`.
        nfl_offset: From `sharding_sparse_fids`; unsigned dtypes are accepted.
        batch_size: From `sharding_sparse_fids`, or an int; version 5: int [R] for R requests.
        variant_type: "example", "example_batch" or "instance"; checked, otherwise ignored.
        feature_cfgs: The config that `sharding_sparse_fids` got; also a protobuf message of Monolith's.
        ps_num: The number of servers, or the Router that `sharding_sparse_fids` got.
        fid_list_emb_row_lenth: Version 4: the number of elements of each list.
        nfl_size: Version 5: int [R], the length of nfl_offset in each request. Pass all four sizes, or none
            for one request.
        feature_size: Version 5: int [R], the length of feature_offset in each request.
        fid_size: Version 5: int [R], the length of fid_offset in each request.
        emb_size: Version 5: int [R * lists], the number of elements of each list, request by request.
        version: The encoding: 3, 4 or 5.

    Returns:
        A tensor for each shape of each layout, layouts sorted by name. The rows of several requests follow
        one another.

    Raises:
        InputError: An offset is outside its list, or the encoding does not match the config, the version or
            the sizes.
    """
    sizes = RequestSizes(fid_list_emb_row_lenth, nfl_size, feature_size, fid_size, emb_size)
    offsets = (fid_offset, feature_offset, nfl_offset, batch_size)
    found = layout_requests(embeddings_list, offsets, variant_type, feature_cfgs, ps_num, sizes, version)
    parts = []
    for lists, encoding in found.requests:
        if torch.is_grad_enabled() and any(rows.requires_grad for rows in lists):
            parts.append(list(_ToLayout.apply(*encoding, *copy_repeated(lists))))
        else:
            parts.append(_layout(lists, *encoding))
    outputs = parts[0] if len(parts) == 1 else [torch.cat(each) for each in zip(*parts, strict=True)]
    return [o.to(embeddings_list[0].dtype) for o in outputs]


def fused_embedding_to_layout_grad(
    nfl_offset: Tensor,
    feature_offset: Tensor,
    fid_offset: Tensor,
    batch_size: int | Tensor,
    embeddings_list: Sequence[Tensor],
    fid_list_row_split: object,
    layout_tensors_grad: Sequence[Tensor],
    variant_type: str,
    feature_cfgs: FeatureConfigs,
    ps_num: int | Router,
    fid_list_emb_row_lenth: Tensor | None = None,
    layout_tensors_grad_scale: float | Tensor | None = None,
    parallel_flag: int = 0,
    version: int = 3,
    *,
    nfl_size: Tensor | None = None,
    feature_size: Tensor | None = None,
    fid_size: Tensor | None = None,
    emb_size: Tensor | None = None,
) -> list[Tensor]:
    """Compute the gradient of `fused_embedding_to_layout`, for callers without autograd.

    Args:
        embeddings_list: As in the forward op; only shapes and dtype are used.
        layout_tensors_grad: The gradient of each output.
        layout_tensors_grad_scale: A factor for `layout_tensors_grad`.
        nfl_size: As in the forward op. Monolith has no gradient of several requests.

    Returns:
        The gradient of each of the embeddings, in their shapes.

    Raises:
        InputError: As in the forward op, or a gradient does not have the shape of its output.
    """
    sizes = RequestSizes(fid_list_emb_row_lenth, nfl_size, feature_size, fid_size, emb_size)
    offsets = (fid_offset, feature_offset, nfl_offset, batch_size)
    with torch.no_grad():
        found = layout_requests(embeddings_list, offsets, variant_type, feature_cfgs, ps_num, sizes, version)
    grads = checks.as_list(layout_tensors_grad, "layout_tensors_grad")
    dtype = found.requests[0][0][0].dtype
    wide = [checks.floats(g, f"layout_tensors_grad[{i}]", None).to(dtype) for i, g in enumerate(grads)]
    if layout_tensors_grad_scale is not None:
        scale = layout_tensors_grad_scale
        if isinstance(scale, Tensor) and scale.numel() == 1:
            scale = scale.reshape(())
        checks.with_data(
            torch.as_tensor(checks.number(scale, "layout_tensors_grad_scale"), device="cpu"), "the scale"
        )
        wide = [g * scale for g in wide]
    gradients = []
    for (lists, encoding), own in zip(found.requests, _by_request(wide, found), strict=True):
        lengths = [rows.shape[0] for rows in lists]
        flat = _layout_grad(own, lengths, *encoding)
        gradients.append(list(flat.split(lengths)))
    return [g.to(e.dtype) for g, e in zip(found.join(gradients), embeddings_list, strict=True)]


def _by_request(grads: list[Tensor], found: LayoutRequests) -> list[list[Tensor]]:
    """Divide the gradients of the outputs by the batches of the requests."""
    if len(found.requests) == 1:
        return [grads]
    batches = [encoding.batch for _, encoding in found.requests]
    for i, grad in enumerate(grads):
        if torch.compiler.is_compiling():  # the sizes are unknown: the check is a part of the graph
            torch._check(grad.shape[0] == sum(batches))
        elif grad.dim() < 1 or grad.shape[0] != sum(batches):
            raise InputError(
                f"layout_tensors_grad[{i}] must have {sum(batches)} rows, got the shape {list(grad.shape)}"
            )
    return [list(each) for each in zip(*(grad.split(batches) for grad in grads), strict=True)]


def _first_rows(index: Tensor, offsets: Tensor, first: int) -> Tensor:
    """Return the first occurrences of each row, -1 where it has fewer: int64 [rows * first]."""
    at = offsets[:-1, None] + torch.arange(first, device=index.device)
    missing = at >= offsets[1:, None]
    found = torch.nn.functional.pad(index, (0, 1), value=-1)[at.masked_fill(missing, -1)]
    return found.flatten()


# ---- the ops


def _layout_native(lists: list[Tensor], *arguments: Any) -> list[Tensor]:
    encoding = _Encoding(*arguments)
    plan, batch = encoding.plan, encoding.batch
    features = encoding.native_features()
    dtype = lists[0].dtype
    outputs = [
        new_tensor(batch, num_columns(shape), dtype=dtype, zero=not whole)
        for shape, whole in zip(plan.shapes, plan.covered, strict=True)
    ]
    native: Any = native_module()
    native.layout(
        [rows.contiguous() for rows in lists],
        encoding.fid_offset.contiguous(),
        encoding.feature_offset.contiguous(),
        features,
        outputs,
        dtype == torch.float64,
        torch.get_num_threads(),
    )
    return [o.view(batch, *shape[1:]) for o, shape in zip(outputs, plan.shapes, strict=True)]


def _layout_reference(lists: list[Tensor], *arguments: Any) -> list[Tensor]:
    encoding = _Encoding(*arguments)
    shapes, batch = encoding.plan.shapes, encoding.batch
    pooling = encoding.pooling([rows.shape[0] for rows in lists], lists[0].dtype)
    columns = [num_columns(shape) for shape in shapes]
    outputs = _pool(torch.cat(lists), *pooling, [batch] * len(columns), columns, "fid_offset")
    return [o.view(batch, *shape[1:]) for o, shape in zip(outputs, shapes, strict=True)]


def _layout_grad_native(grads: list[Tensor], sizes: list[int], *arguments: Any) -> Tensor:
    encoding = _Encoding(*arguments)
    flat = _flat_grads(grads, encoding)
    out = new_tensor(sum(sizes), dtype=grads[0].dtype if grads else torch.float32, zero=True)
    native: Any = native_module()
    native.layout_gradient(
        out,
        torch.tensor([0, *sizes], device="cpu").cumsum(0),
        encoding.fid_offset.contiguous(),
        encoding.feature_offset.contiguous(),
        encoding.native_features(),
        [g.contiguous() for g in flat],
        torch.get_num_threads(),
    )
    return out


def _layout_grad_reference(grads: list[Tensor], sizes: list[int], *arguments: Any) -> Tensor:
    encoding = _Encoding(*arguments)
    flat = _flat_grads(grads, encoding)
    if not grads:
        return torch.zeros(sum(sizes), device="cpu")
    pooling = encoding.pooling(sizes, grads[0].dtype)
    result: Tensor = _unpool(flat, *pooling, sum(sizes), "fid_offset")
    return result


def _flat_grads(grads: list[Tensor], encoding: _Encoding) -> list[Tensor]:
    """Check the gradients; return each as [batch, columns]."""
    shapes, batch = encoding.plan.shapes, encoding.batch
    if len(grads) != len(shapes):
        raise InputError(f"layout_tensors_grad has {len(grads)} tensors, the layouts have {len(shapes)}")
    for i, (grad, shape) in enumerate(zip(grads, shapes, strict=True)):
        checks.floats(grad, f"layout_tensors_grad[{i}]", (batch, *shape[1:]))
    return [g.reshape(batch, num_columns(g.shape)) for g in grads]


_ENCODING = "Tensor fid_offset, Tensor feature_offset, Tensor nfl_offset, SymInt batch, str encoded"
_layout = define_op(
    f"layout(Tensor[] lists, {_ENCODING}) -> Tensor[]",
    native=_layout_native,
    reference=_layout_reference,
    fake=lambda lists, *encoding: [
        lists[0].new_empty(encoding[3], *shape[1:]) for shape in layout_plan(encoding[4]).shapes
    ],
)
_layout_grad = define_op(
    f"layout_grad(Tensor[] grads, SymInt[] sizes, {_ENCODING}) -> Tensor",
    native=_layout_grad_native,
    reference=_layout_grad_reference,
    fake=lambda grads, sizes, *encoding: (
        grads[0].new_empty(sum(sizes)) if grads else torch.empty(sum(sizes), device="cpu")
    ),
)


class _ToLayout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fid_offset: Tensor,
        feature_offset: Tensor,
        nfl_offset: Tensor,
        batch: int,
        encoded: str,
        *lists: Tensor,
    ) -> Any:
        ctx.save_for_backward(fid_offset, feature_offset, nfl_offset)
        ctx.sizes, ctx.batch, ctx.encoded = [rows.shape[0] for rows in lists], batch, encoded
        return tuple(_layout(list(lists), fid_offset, feature_offset, nfl_offset, batch, encoded))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        flat = _layout_grad(list(grads), ctx.sizes, *ctx.saved_tensors, ctx.batch, ctx.encoded)
        return None, None, None, None, None, *flat.split(ctx.sizes)
