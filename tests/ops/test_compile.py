"""Ops under torch.compile: one graph without breaks, the results and gradients of eager code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megalith import Ragged, Router, ops
from megalith.compat import monolith
from megalith.compat.monolith import (
    FeatureConfig,
    FeatureConfigs,
    OutConfig,
    OutType,
    PoolingType,
    SliceConfig,
)
from megalith.ops import Bags, OutputSlice
from megalith.ops.pooling import op_arguments

MONOLITH_OPS = ("distribution_ops", "layout_ops", "parsers")
IDS = torch.tensor([3, 1, 3, -5, 7])
TO = torch.tensor([0, 1, 1, 0, 2])
ROUTER = Router("hash_roundrobin", 3)
COLUMN = Ragged.from_lists([[3, 1], [], [3, -5, 7]])
KEY = Ragged.from_lists([[], [0, 1, 2, 1, 0], [0, 1, 0], []])
POS = Ragged.from_lists([[], [0, 1, 2], [3, 4], []])
DIMS = [1, 2, 3, 4]
BAGS = [
    Bags(
        torch.tensor([0, 2, 3]),
        (OutputSlice(0, 0, 0, 3),),
        torch.tensor([1.0, 2.0, 3.0, 4.0]),
        torch.tensor([2.0, 1.0]),
    ),
    Bags(
        torch.tensor([3, 4]), (OutputSlice(0, 0, 0, 3, accumulate=True), OutputSlice(1, 1, 1, 2)), shared=True
    ),
]
INDEX = torch.tensor([0, 1, -1, 4])
CFGS = FeatureConfigs(
    {
        "a": FeatureConfig("one", PoolingType.SUM, (1, 2)),
        "b": FeatureConfig("two", PoolingType.MEAN, (1, 2)),
        "c": FeatureConfig("two", PoolingType.FIRSTN, (2,), 2),
    },
    {
        "x": OutConfig((SliceConfig("a", 0, 1), SliceConfig("b", 0, 2))),
        "y": OutConfig((SliceConfig("c", 0, 2),), OutType.NONE),
    },
)
COLUMNS = {"a": COLUMN, "b": COLUMN, "c": COLUMN}
FOUND = monolith.sharding_sparse_fids(COLUMNS, 2, CFGS)
SIZES = FOUND.emb_size.tolist()
ENCODING = (None, FOUND.fid_offset, FOUND.feature_offset, FOUND.nfl_offset, 3)


def buffer(value: Tensor) -> Tensor:
    found = monolith.unique_key_with_value_and_offset(KEY, DIMS)
    assert found.value_buffer is not None
    handle = monolith.fill_with_offset_map(POS, value, found.value_offset, found.value_buffer, DIMS)
    return monolith.finalize_shared_tensor([handle])


def buffer_gradient(grad: Tensor) -> Tensor:
    where = monolith.unique_key_with_value_and_offset(KEY, DIMS, generate_buffer=False).value_offset
    return monolith.fill_with_offset_map_gradient(POS, grad, where, DIMS)


def lists(r: Tensor) -> list[Tensor]:
    return list((r.flatten().repeat(3)[: sum(SIZES)]).split(SIZES))


def layout_gradient(r: Tensor) -> Any:
    grads = [torch.ones(3, 3), torch.ones(3, 2, 2)]
    split, fids, features, nfl, batch = ENCODING
    with torch.no_grad():
        return monolith.fused_embedding_to_layout_grad(
            nfl, features, fids, batch, lists(r), split, grads, "example", CFGS, 2
        )


def parts(r: Tensor) -> Any:
    values, positions = monolith.ragged_split_by_indices(TO, COLUMN, 3)
    return [v.values for v in values], [p.row_splits for p in positions], r


def taken(r: Tensor) -> Any:
    found = ops.take(Ragged(r, COLUMN.row_splits), torch.tensor([2, 0]))
    return found.values, ops.take(COLUMN, torch.tensor([2, 0])).values


# What each public function computes from float rows [5, 3].
MODELS: dict[str, Callable[[Tensor], Any]] = {
    "aligned_flat_concat": lambda r: monolith.aligned_flat_concat([r, r[:2]], 2.0),
    "aligned_flat_split": lambda r: monolith.aligned_flat_split([r], r.flatten().repeat(2)[:16]),
    "bucketize": lambda r: ops.bucketize(COLUMN, ROUTER, r[:, 0]),
    "dedup": lambda r: (*ops.dedup(IDS, torch.tensor([0, 3, 5]), ROUTER, widths=[2, 3]), r),
    "fid": lambda r: (ops.fid(3, IDS), r),
    "fid_v1_to_v2": lambda r: (ops.fid_v1_to_v2(IDS), r),
    "fill_with_offset_map": lambda r: buffer(r.flatten()),
    "fill_with_offset_map_gradient": lambda r: buffer_gradient(r.flatten().repeat(2)[:19]),
    "fused_embedding_to_layout": lambda r: monolith.fused_embedding_to_layout(
        lists(r), *ENCODING, "example", CFGS, 2
    ),
    "fused_embedding_to_layout_grad": lambda r: (layout_gradient(r), r),
    "fused_gather_embeddings_by_input": lambda r: monolith.fused_gather_embeddings_by_input(
        r.flatten(), [TO, TO[:2]], [3, 2]
    ),
    "fused_gather_embeddings_by_input_gradient": lambda r: monolith.fused_gather_embeddings_by_input_gradient(
        20, [r, r[:, :2]], [TO, TO + 1], [3, 2], 2.0
    ),
    "fused_reduce_and_split": lambda r: monolith.fused_reduce_and_split([COLUMN.row_splits], [r], [[1, 2]]),
    "fused_reduce_sum_and_split": lambda r: monolith.fused_reduce_sum_and_split(TO, r, 4, [1, 2]),
    "fused_reorder_by_indices": lambda r: (
        monolith.fused_reorder_by_indices([IDS, IDS + 1], ROUTER, [2, 3]),
        r,
    ),
    "fused_sorted_segment_sum": lambda r: monolith.fused_sorted_segment_sum(
        [TO, TO], [r, r], [(3, 3), (4, 3)]
    ),
    "gather": lambda r: ops.gather(r, TO.view(1, 5)),
    "gather_embeddings_by_ids_gradient_back_prop": lambda r: (
        monolith.gather_embeddings_by_ids_gradient_back_prop(IDS, r, TO)
    ),
    "gather_embeddings_by_input": lambda r: monolith.gather_embeddings_by_input(IDS, r, IDS[1:]),
    "gather_pieces": lambda r: ops.gather_pieces(r, [TO, TO[:2]], [3, 2], strides=[1, 3]),
    "map_id_to_embedding": lambda r: monolith.map_id_to_embedding([IDS[:2], IDS[2:]], [r[:2], r[2:]], IDS),
    "map_id_to_embedding_gradient_back_prop": lambda r: monolith.map_id_to_embedding_gradient_back_prop(
        [IDS], IDS, r
    ),
    "match": lambda r: ops.gather(r, ops.match(IDS, IDS[3:])),
    "move_runs": lambda r: ops.move_runs(r.flatten(), TO, TO + 2, TO, 9),
    "normalize_merged_split": lambda r: (
        monolith.normalize_merged_split(torch.tensor([0, 2, 5, 0, 0, 3]), torch.tensor([3, 3])),
        r,
    ),
    "pad_rows": lambda r: ops.pad_rows(r, COLUMN.row_splits, 2),
    "place_rows": lambda r: ops.place_rows(r, torch.tensor([4, 0, 1, 2, 3])),
    "pool_rows": lambda r: ops.pool_rows(r, INDEX, BAGS, [(2, 3), (2, 3)]),
    "ragged_split_by_indices": parts,
    "reduce_mean": lambda r: monolith.reduce_mean(TO, r, 4),
    "reduce_sqrtn": lambda r: monolith.reduce_sqrtn(TO, r, 4),
    "reduce_sum": lambda r: monolith.reduce_sum(TO, r, 4),
    "reorder_by_indices": lambda r: (monolith.reorder_by_indices(IDS, TO, 3), r),
    "scatter_pieces": lambda r: ops.scatter_pieces([r, r[:, :2]], [TO, TO], 9),
    "scatter_sum": lambda r: ops.scatter_sum(r, TO, 4),
    "segment_sum": lambda r: ops.segment_sum(r, COLUMN.row_splits),
    "sharding_sparse_fids": lambda r: (monolith.sharding_sparse_fids(COLUMNS, ROUTER, CFGS), r),
    "slot_of": lambda r: (ops.slot_of(IDS), r),
    "split_by_indices": lambda r: monolith.split_by_indices(TO, r, 4),
    "split_rows": lambda r: ops.split_rows(r, TO, 3),
    "take": taken,
}
FOUR = monolith.sharding_sparse_fids(COLUMNS, 2, CFGS, version=4)
TWICE = {
    name: torch.cat([getattr(FOUND, name)] * 2)
    for name in FOUND._fields
    if name.endswith(("_offset", "_size")) and isinstance(getattr(FOUND, name), Tensor)
}
"""Two requests of version 5 in one call."""


def version_4(r: Tensor) -> Any:
    flat = r.flatten().repeat(3)[: sum(SIZES)]
    batch, lengths = FOUR.batch_size, FOUR.fid_list_emb_row_lenth
    outputs = monolith.fused_embedding_to_layout(
        [flat], *ENCODING[:4], batch, "example", CFGS, 2, lengths, version=4
    )
    grads = monolith.fused_embedding_to_layout_grad(
        *(FOUR.nfl_offset, FOUR.feature_offset, FOUR.fid_offset, batch, [flat], None),
        *([o.detach() for o in outputs], "example", CFGS, 2, lengths),
        version=4,
    )
    return outputs, grads


def version_5(r: Tensor) -> Any:
    rows = [torch.cat([each, each + 1]) for each in lists(r)]
    given: dict[str, Any] = {
        **TWICE,
        "variant_type": "example",
        "feature_cfgs": CFGS,
        "ps_num": 2,
        "version": 5,
    }
    outputs = monolith.fused_embedding_to_layout(rows, None, **given)
    grads = monolith.fused_embedding_to_layout_grad(
        embeddings_list=rows,
        fid_list_row_split=None,
        layout_tensors_grad=[o.detach() for o in outputs],
        **given,
    )
    return outputs, grads


def shape_as_tensor(r: Tensor) -> Any:
    return monolith.fused_sorted_segment_sum([TO, TO], [r, r[:, :2]], [torch.tensor([4, 3]), (3, 2)])


def sharded_inside(r: Tensor) -> Any:
    found = monolith.sharding_sparse_fids(COLUMNS, 2, CFGS, version=4)
    offsets = (found.fid_offset, found.feature_offset, found.nfl_offset, found.batch_size)
    flat = r.flatten().repeat(3)[: sum(SIZES)]
    lengths = found.fid_list_emb_row_lenth
    return monolith.fused_embedding_to_layout([flat], None, *offsets, "example", CFGS, 2, lengths, version=4)


SIZES_AS_TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "layout version 4": version_4,
    "layout version 5": version_5,
    "layout of ids sharded in the graph": sharded_inside,
    "reduce_mean to a size": lambda r: monolith.reduce_mean(TO, r, TO.max() + 2),
    "fused_sorted_segment_sum to shapes": shape_as_tensor,
}
INSIDE_OTHERS = {
    "finalize_shared_tensor",
    "fused_reduce_and_split_gpu",
    "monolith_aligned_flat_concat",
    "monolith_aligned_flat_split",
    "unique_key_with_value_and_offset",
}
# Strings and contexts are not tensors; `pool` and `unpool` are references of `pool_rows`, for tables.
NOT_COMPILED = {"get_default_parser_ctx", "hash_bytes", "hash_strings", "pool", "unpool"}
NOT_COMPILED |= {
    "sharding_sparse_fids_with_context"
}  # it reads a context variable, then shards as without one

SLOW = {
    *("aligned_flat_split", "fid_v1_to_v2", "fill_with_offset_map_gradient"),
    *("fused_embedding_to_layout_grad", "fused_gather_embeddings_by_input_gradient"),
    *("fused_reduce_and_split", "fused_reduce_sum_and_split", "fused_sorted_segment_sum"),
    *("gather_embeddings_by_ids_gradient_back_prop", "gather_embeddings_by_input"),
    *("layout of ids sharded in the graph", "layout version 4"),
    *("map_id_to_embedding_gradient_back_prop", "reduce_sqrtn", "reorder_by_indices", "slot_of"),
    *("split_by_indices"),
}
"""Models whose ops are in other models too: they are compiled by `make soak`."""


def named(models: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.soak] if name in SLOW else []) for name in models]


def outcome(model: Callable[[Tensor], Any]) -> tuple[list[Tensor], Tensor]:
    """All tensors a model gives, and the gradient of its floats' weighted sum."""
    rows = torch.linspace(-2, 2, 15).view(5, 3).requires_grad_()
    outputs = [t for t in pytree.tree_leaves(model(rows)) if isinstance(t, Tensor)]
    floats = [t for t in outputs if t.requires_grad]
    loss = sum((t * torch.arange(1, t.numel() + 1).view(t.shape)).sum() for t in floats)
    assert isinstance(loss, Tensor)
    (grad,) = torch.autograd.grad(loss, rows)
    return outputs, grad


def test_every_public_function_is_here() -> None:
    public = {n: getattr(ops, n) for n in ops.__all__}
    for module in MONOLITH_OPS:
        own = import_module(f"megalith.compat.monolith.{module}")
        public |= {
            n: f for n, f in vars(own).items() if n in monolith.__all__ and f.__module__ == own.__name__
        }
    functions = {n for n, f in public.items() if isinstance(f, FunctionType) and not n.startswith("_")}
    assert functions - NOT_COMPILED - INSIDE_OTHERS == set(MODELS)


@pytest.mark.parametrize("name", named(MODELS | SIZES_AS_TENSORS))
def test_a_model_compiles_to_one_graph(name: str) -> None:
    torch._dynamo.reset()
    model = (MODELS | SIZES_AS_TENSORS)[name]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outcome(compiled), outcome(model), rtol=1e-6, atol=1e-6)


class Model(torch.nn.Module):
    """Ids to rows to a loss, by way of other shards."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.linspace(-1, 1, 80).view(20, 4))
        self.dense = torch.nn.Linear(8, 1)
        torch.nn.init.constant_(self.dense.weight, 0.1)

    def forward(self, ids: Tensor, splits: Tensor, weights: Tensor) -> Tensor:
        column = Ragged(ids, splits, weights)
        found = ops.dedup(column.values, None, ROUTER)
        rows = ops.gather(ops.gather(self.table, found.ids % 20), found.inverse) * column.weights[:, None]
        summed = ops.segment_sum(rows, column.row_splits)
        mean = monolith.reduce_mean(column.row_ids(), rows, splits.shape[0] - 1)
        return self.dense(torch.cat([summed, mean], 1)).sigmoid().mean()


def batch(seed: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (rows,), generator=generator)
    splits = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    n = int(splits[-1])
    return torch.randint(-50, 50, (n,), generator=generator), splits, torch.rand(n, generator=generator)


def test_a_dynamic_model_trains_as_in_eager() -> None:
    torch._dynamo.reset()
    eager, compiled = Model(), Model()
    compiled.load_state_dict(eager.state_dict())
    run = torch.compile(compiled, fullgraph=True, dynamic=True, backend="aot_eager")
    for seed, rows in ((0, 6), (1, 9), (2, 13)):
        expected, actual = eager(*batch(seed, rows)), run(*batch(seed, rows))
        expected.backward()
        actual.backward()
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(compiled.table.grad, eager.table.grad)


@pytest.mark.soak  # 20 seconds in the C++ compiler
def test_inductor_compiles_what_it_is_given() -> None:
    torch._dynamo.reset()
    table = torch.linspace(-1, 1, 80).view(20, 4).requires_grad_()

    def model(ids: Tensor, splits: Tensor) -> Tensor:
        return ops.segment_sum(ops.gather(table, ids % 20) * 2, splits).relu()

    compiled = torch.compile(model, fullgraph=True, dynamic=True, options={"compile_threads": 1})
    for seed, rows in ((0, 6), (1, 9)):
        ids, splits, _ = batch(seed, rows)
        expected, actual = model(ids, splits), compiled(ids, splits)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(
            torch.autograd.grad(actual.sum(), table), torch.autograd.grad(expected.sum(), table)
        )


def test_wrong_input_still_raises_when_compiled() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda r, i: ops.gather(r, i), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"index\[1\] = 5"):
        compiled(torch.ones(3, 2), torch.tensor([0, 5]))
    compiled = torch.compile(lambda r, s: ops.segment_sum(r, s), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="splits must ascend"):
        compiled(torch.ones(3, 2), torch.tensor([0, 2]))


def test_wrong_sizes_in_tensors_raise_when_compiled() -> None:
    torch._dynamo.reset()
    flat, lengths = torch.ones(sum(SIZES)), FOUR.fid_list_emb_row_lenth
    assert lengths is not None
    compiled = torch.compile(
        lambda n: monolith.fused_embedding_to_layout(
            [flat], *ENCODING, "example", CFGS, 2, fid_list_emb_row_lenth=n, version=4
        ),
        fullgraph=True,
        backend="aot_eager",
    )
    compiled(lengths)
    with pytest.raises(RuntimeError, match=r"lenth does not add up to embeddings_list\[0\]"):
        compiled(lengths + 1)
    with pytest.raises(RuntimeError, match="lenth must not be negative"):
        compiled(-lengths)
    compiled = torch.compile(
        lambda n: monolith.fused_sorted_segment_sum([TO], [torch.ones(5, 2)], [n]),
        fullgraph=True,
        backend="aot_eager",
    )
    with pytest.raises(RuntimeError, match=r"shapes\[0\] has another number of columns than values\[0\]"):
        compiled(torch.tensor([3, 1]))
    with pytest.raises(RuntimeError, match=r"shapes\[0\] must be an integer of at least 0"):
        compiled(torch.tensor([-1, 2]))
    with pytest.raises(ValueError, match=r"indices\[0\]\[4\] = 2 is out of range"):
        compiled(torch.tensor([2, 2]))


# ---- the ops as torch sees them

FLAT = torch.linspace(-1, 1, 15)
PLAN = (INDEX, 3, 3, *op_arguments(BAGS, torch.float32))
ONE = torch.tensor([0, 5])
RULE = list(ROUTER.rule)
OFFSETS = (FOUND.fid_offset, FOUND.feature_offset, FOUND.nfl_offset, 3, CFGS.encoded)
SAMPLES: dict[str, tuple[Any, ...]] = {
    "bucketize": (IDS, COLUMN.row_splits, None, RULE, 3, "owners"),
    "dedup": (IDS, torch.tensor([0, 3, 5]), None, RULE, 3, True, [2, 3], "owners"),
    "gather": (FLAT, [TO, TO[:2]], [3, 1], [3, 2], "index"),
    "layout": ([torch.ones(n) for n in SIZES], *OFFSETS),
    "layout_grad": ([torch.ones(3, 3), torch.ones(3, 2, 2)], SIZES, *OFFSETS),
    "locate": (TO, torch.tensor([0, 5]), torch.tensor([3, 5]), torch.tensor([1, 2]), "packed"),
    "match": (IDS, IDS[:2], "queries", False),
    "move": (FLAT, TO, TO + 2, TO, 9, "source"),
    "pad": (FLAT.view(5, 3), COLUMN.row_splits, 2),
    "place": (FLAT.view(5, 3), torch.tensor([4, 0, 1, 2, 3])),
    "pool": (FLAT, *PLAN, [2, 2], [3, 3], "index"),
    "route": (IDS, RULE),
    "scatter": ([FLAT.view(5, 3)], [TO], [3], 9, "index"),
    "shard_fids": ([IDS, IDS, IDS], [ONE, ONE, ONE], [0, 1, 0], RULE, 3, True, CFGS.encoded),
    "split": (FLAT.view(5, 3), torch.tensor([4, 0, 1, 2, 3]), torch.tensor([2, 0, 3])),
    "take": (IDS, COLUMN.row_splits, torch.tensor([2, 0])),
    "unpad": (torch.ones(3, 2, 3), COLUMN.row_splits, 5),
    "unpool": ([torch.ones(2, 3), torch.ones(2, 3)], *PLAN, 15, "index"),
    "visible_runs": (TO, TO, torch.full_like(TO, 2)),
}


def test_every_op_is_here() -> None:
    names = [n.removeprefix("megalith::") for n in torch._C._dispatch_get_all_op_names()]
    known = {n for n in names if hasattr(torch.ops.megalith, n)}
    assert {n for n in known if f"megalith::{n}" in torch._C._dispatch_get_all_op_names()} == set(SAMPLES)


@pytest.mark.parametrize("name", SAMPLES)
def test_an_op_keeps_its_promises_to_torch(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.megalith, name).default, SAMPLES[name])
