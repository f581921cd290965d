"""Monolith's layout ops: rows of all features assembled into layouts, and the gradient.

The input is the encoding of `sharding_sparse_fids` (see fid_sharding). Native code reads it directly; the
torch twin compiles it to a Pooling and runs `pool_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalith.compat.monolith.feature_configs import FeatureConfigs
from megalith.compat.monolith.fid_sharding import SHARED
from megalith.compat.monolith.layout_plan import LayoutPlan, layout_plan, num_columns
from megalith.errors import InputError
from megalith.library import copy_repeated, define_op, native_module, new_tensor
from megalith.ops import checks
from megalith.ops.move_runs import locate
from megalith.ops.pool_rows import _pool, _unpool, arguments
from megalith.ops.pooling import Bags
from megalith.routing import Router

_INPUTS = ("example", "example_batch", "examplebatch", "instance")


def fused_embedding_to_layout(
    embeddings_list: Sequence[Tensor],
    fid_list_row_split: Sequence[Tensor] | None,
    fid_offset: Tensor,
    feature_offset: Tensor,
    nfl_offset: Tensor,
    batch_size: int | Tensor,
    variant_type: str,
    feature_cfgs: FeatureConfigs,
    ps_num: int | Router,
    *,
    parallel_flag: int = 0,
    version: int = 5,
) -> list[Tensor]:
    """Assembles rows into layouts. Differentiable in the embeddings.

    Args:
        embeddings_list: the rows of each list of `sharding_sparse_fids`, flat or [k, dim], of one float type.
        fid_list_row_split: ignored.
        fid_offset: from `sharding_sparse_fids`.
        feature_offset: from `sharding_sparse_fids`.
        nfl_offset: from `sharding_sparse_fids`.
        batch_size: from `sharding_sparse_fids`.
        variant_type: "example", "example_batch" or "instance"; checked, otherwise ignored.
        feature_cfgs: the config that `sharding_sparse_fids` got.
        ps_num: the number of servers, or the Router that `sharding_sparse_fids` got.
        parallel_flag: ignored.
        version: 3 or 5, which have the same encoding.

    Returns:
        A tensor for each shape of each layout, layouts sorted by name.

    Raises:
        InputError: an offset is outside its list, or the encoding does not match the config.
    """
    lists, encoding = _layout_arguments(
        embeddings_list, fid_offset, feature_offset, nfl_offset, batch_size, feature_cfgs, ps_num
    )
    _check_variant(variant_type, version)
    if torch.is_grad_enabled() and any(rows.requires_grad for rows in lists):
        outputs = list(_ToLayout.apply(*encoding, *copy_repeated(lists)))
    else:
        outputs = _layout(lists, *encoding)
    return [o.to(embeddings_list[0].dtype) for o in outputs]


def fused_embedding_to_layout_grad(
    nfl_offset: Tensor,
    feature_offset: Tensor,
    fid_offset: Tensor,
    batch_size: int | Tensor,
    embeddings_list: Sequence[Tensor],
    fid_list_row_split: Sequence[Tensor] | None,
    layout_tensors_grad: Sequence[Tensor],
    variant_type: str,
    feature_cfgs: FeatureConfigs,
    ps_num: int | Router,
    *,
    layout_tensors_grad_scale: float | Tensor | None = None,
    parallel_flag: int = 0,
    version: int = 5,
) -> list[Tensor]:
    """Computes the gradient of `fused_embedding_to_layout`, for callers without autograd.

    Args:
        nfl_offset: as in the forward op, like the other arguments not listed here.
        feature_offset: as in the forward op.
        fid_offset: as in the forward op.
        batch_size: as in the forward op.
        embeddings_list: as in the forward op; only shapes and dtype are used.
        fid_list_row_split: ignored.
        layout_tensors_grad: the gradient of each output.
        variant_type: as in the forward op.
        feature_cfgs: as in the forward op.
        ps_num: as in the forward op.
        layout_tensors_grad_scale: a factor for `layout_tensors_grad`.
        parallel_flag: ignored.
        version: as in the forward op.

    Returns:
        The gradient of each of the embeddings, in their shapes.
    """
    with torch.no_grad():
        lists, encoding = _layout_arguments(
            embeddings_list, fid_offset, feature_offset, nfl_offset, batch_size, feature_cfgs, ps_num
        )
    _check_variant(variant_type, version)
    grads = checks.as_list(layout_tensors_grad, "layout_tensors_grad")
    dtype = lists[0].dtype
    wide = [checks.floats(g, f"layout_tensors_grad[{i}]", None).to(dtype) for i, g in enumerate(grads)]
    if layout_tensors_grad_scale is not None:
        scale = layout_tensors_grad_scale
        if isinstance(scale, Tensor) and scale.numel() == 1:
            scale = scale.reshape(())
        checks.with_data(torch.as_tensor(checks.number(scale, "layout_tensors_grad_scale")), "the scale")
        wide = [g * scale for g in wide]
    flat = _layout_grad(wide, [rows.shape[0] for rows in lists], *encoding)
    pieces = flat.split([e.numel() for e in embeddings_list])
    return [p.view(e.shape).to(e.dtype) for p, e in zip(pieces, embeddings_list, strict=True)]


# ---- arguments


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
        """Returns where each feature's rows begin in feature_offset (and their end), and which are shared."""
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
        """Returns the features in the native module's form."""
        plan = self.plan
        starts, shared = self.feature_rows()
        rows = [1 if s else self.batch for s in shared]
        fields = (starts[:-1], rows[:-1], plan.dims, plan.firsts, plan.means, shared[:-1], plan.native_parts)
        return list(zip(*fields, strict=True))

    def pooling(self, sizes: list[int], dtype: torch.dtype) -> tuple[Any, ...]:
        """Returns arguments for the ops `pool` and `unpool`, for lists of these sizes."""
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
        return joined, 1, max(plan.dims), *arguments(bags, dtype)


def _first_rows(index: Tensor, offsets: Tensor, first: int) -> Tensor:
    """Returns the first occurrences of each row, -1 where it has fewer: int64 [rows * first]."""
    at = offsets[:-1, None] + torch.arange(first, device=index.device)
    missing = at >= offsets[1:, None]
    found = torch.nn.functional.pad(index, (0, 1), value=-1)[at.masked_fill(missing, -1)]
    return found.flatten()


def _layout_arguments(
    embeddings_list: Sequence[Tensor],
    fid_offset: Tensor,
    feature_offset: Tensor,
    nfl_offset: Tensor,
    batch_size: int | Tensor,
    feature_cfgs: FeatureConfigs,
    ps_num: int | Router,
) -> tuple[list[Tensor], _Encoding]:
    """Checks the arguments of both ops; returns the rows of each list, flat, and the encoding."""
    if not isinstance(feature_cfgs, FeatureConfigs):
        raise InputError(f"feature_cfgs must be FeatureConfigs, got {checks.kind(feature_cfgs)}")
    lists = checks.as_list(embeddings_list, "embeddings_list")
    servers = ps_num.num_shards if isinstance(ps_num, Router) else checks.integer(ps_num, "ps_num", least=0)
    wanted = len(feature_cfgs.table_names) * max(1, servers)
    if len(lists) != wanted:
        raise InputError(f"embeddings_list has {len(lists)} tensors, expected {wanted}: tables times servers")
    if not lists:
        raise InputError("feature_cfgs has no features")
    checks.same_floats(lists, "embeddings_list")
    dtype = torch.promote_types(lists[0].dtype, torch.float32)
    return [rows.reshape(-1).to(dtype) for rows in lists], _Encoding(
        _unsigned(fid_offset, "fid_offset", (None,)),
        checks.int64(feature_offset, "feature_offset"),
        _unsigned(nfl_offset, "nfl_offset", (len(feature_cfgs.feature_names) + 1,)),
        checks.scalar(batch_size, "batch_size"),
        feature_cfgs.encoded,
    )


def _check_variant(variant_type: str, version: int) -> None:
    if not isinstance(variant_type, str) or variant_type not in _INPUTS:
        raise InputError(f"variant_type must be one of {', '.join(_INPUTS)}, got {variant_type!r}")
    if not isinstance(version, int) or version not in (3, 5):
        raise InputError(
            f"version {version} has another encoding; encode with sharding_sparse_fids and pass 5"
        )


def _unsigned(tensor: Tensor, name: str, shape: tuple[int | None, ...]) -> Tensor:
    """Converts an integer tensor, also of the unsigned dtypes that Monolith uses, to int64."""
    if isinstance(tensor, Tensor) and tensor.dtype in (torch.uint32, torch.uint64):
        tensor = tensor.to(torch.int64)
    return checks.int64(tensor, name, shape)


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


def _layout_twin(lists: list[Tensor], *arguments: Any) -> list[Tensor]:
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
        torch.tensor([0, *sizes]).cumsum(0),
        encoding.fid_offset.contiguous(),
        encoding.feature_offset.contiguous(),
        encoding.native_features(),
        [g.contiguous() for g in flat],
        torch.get_num_threads(),
    )
    return out


def _layout_grad_twin(grads: list[Tensor], sizes: list[int], *arguments: Any) -> Tensor:
    encoding = _Encoding(*arguments)
    flat = _flat_grads(grads, encoding)
    if not grads:
        return torch.zeros(sum(sizes))
    pooling = encoding.pooling(sizes, grads[0].dtype)
    result: Tensor = _unpool(flat, *pooling, sum(sizes), "fid_offset")
    return result


def _flat_grads(grads: list[Tensor], encoding: _Encoding) -> list[Tensor]:
    """Checks the gradients; returns each as [batch, columns]."""
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
    twin=_layout_twin,
    fake=lambda lists, *encoding: [
        lists[0].new_empty(encoding[3], *shape[1:]) for shape in layout_plan(encoding[4]).shapes
    ],
)
_layout_grad = define_op(
    f"layout_grad(Tensor[] grads, SymInt[] sizes, {_ENCODING}) -> Tensor",
    native=_layout_grad_native,
    twin=_layout_grad_twin,
    fake=lambda grads, sizes, *encoding: grads[0].new_empty(sum(sizes)) if grads else torch.empty(sum(sizes)),
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
