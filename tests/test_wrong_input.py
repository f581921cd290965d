"""Every public function and method, called with wrong input, raises a MegalithError or works.

A call is listed with valid arguments. Each argument in turn is replaced by each of `WRONG`. A raw TypeError,
AttributeError, RuntimeError or torch error is a bug: the caller cannot see what was wrong. A call that works
is fine here; other tests check results. `test_every_public_name_is_listed` compares the list with what the
packages export.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import megalith
from megalith import checkpoint, data, metrics, ops, table
from megalith.compat import monolith
from megalith.errors import MegalithError
from megalith.nn import MicroBatches
from megalith.shards import CommMetrics
from megalith.table.snapshot import Snapshot

Arguments = dict[str, Any]
Call = tuple[Callable[..., Any], Arguments]

PACKAGES = (
    "megalith",
    "megalith.table",
    "megalith.shards",
    "megalith.nn",
    "megalith.ops",
    "megalith.checkpoint",
    "megalith.data",
    "megalith.metrics",
    "megalith.compat.monolith",
)

# ---- wrong values


class Opaque:
    """An object that is nothing Megalith knows."""

    def __repr__(self) -> str:
        return "Opaque()"


WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "text": lambda: "x",
    "empty text": lambda: "",
    "bytes": lambda: b"x",
    "-1": lambda: -1,
    "3": lambda: 3,
    "1.5": lambda: 1.5,
    "nan": lambda: math.nan,
    "True": lambda: True,
    "complex": lambda: 1j,
    "empty list": lambda: [],
    "ints": lambda: [1, 2],
    "floats": lambda: [[1.5]],
    "texts": lambda: ["a", "b"],
    "nested Nones": lambda: [None, [None]],
    "list of tensors": lambda: [torch.ones(2), torch.ones(2, 2)],
    "empty tuple": lambda: (),
    "pair": lambda: (1, "x"),
    "empty dict": dict,
    "dict of ints": lambda: {"a": 1},
    "dict of tensors": lambda: {"a": torch.tensor([1, 2])},
    "dict of floats": lambda: {"a": torch.ones(2, 2)},
    "dict of pairs": lambda: {"a": (torch.tensor([1]), [1.0])},
    "dict by int": lambda: {1: torch.tensor([1])},
    "set": lambda: {1},
    "object": Opaque,
    "class": lambda: Opaque,
    "function": lambda: len,
    "0-d tensor": lambda: torch.tensor(1.5),
    "int tensor": lambda: torch.tensor([5, -7, 9]),
    "float tensor": lambda: torch.tensor([0.5, math.nan]),
    "3-d tensor": lambda: torch.ones(2, 3, 4),
    "empty tensor": lambda: torch.empty(0, 3),
    "bool tensor": lambda: torch.tensor([True, False]),
    "complex tensor": lambda: torch.ones(2, dtype=torch.complex64),
    "uint64 tensor": lambda: torch.ones(2, dtype=torch.uint64),
    "sparse tensor": lambda: torch.eye(2).to_sparse(),
    "meta ints": lambda: torch.ones(2, dtype=torch.int64, device="meta"),
    "meta floats": lambda: torch.ones(2, 2, device="meta"),
    "array": lambda: np.array([1.5, 2.5]),
    "Ragged of floats": lambda: megalith.Ragged(torch.ones(3), torch.tensor([0, 1, 3])),
    "Ragged on meta": lambda: megalith.Ragged(
        torch.ones(3, device="meta"), torch.zeros(2, dtype=torch.int64, device="meta")
    ),
}

# ---- valid calls


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values or (1, 2, 3), dtype=torch.int64)


def config(name: str = "a", dim: int = 2) -> megalith.TableConfig:
    return megalith.TableConfig(name, dim=dim, optimizer=megalith.SGD(0.1))


def column(weights: bool = False) -> megalith.Ragged:
    return megalith.Ragged.from_lists([[1, 2], [3]], weights=[[0.5, 1.0], [2.0]] if weights else None)


def some_table(engine: str = "cpu") -> megalith.Table:
    made = megalith.Table(config(), engine=engine)
    made.assign(ids(), torch.ones(3, 2))
    made.track("sync")
    return made


def local() -> megalith.LocalShards:
    made = megalith.LocalShards([config("a"), config("b", 3)])
    made.assign({"a": (ids(), torch.ones(3, 2))})
    made.track("sync")
    return made


def spread() -> megalith.SyncShards:
    made = megalith.SyncShards([config("a"), config("b", 3)])
    made.assign({"a": (ids(), torch.ones(3, 2))})
    made.track("sync")
    return made


def pooling() -> ops.Pooling:
    return ops.Pooling.sum("a", ids(0, 1, 3), 2)


def bags() -> tuple[ops.Bags, ...]:
    return pooling().bags["a"]


class Model(nn.Module):
    """A model with one collection and one dense layer."""

    def __init__(self, update: str = "backward") -> None:
        super().__init__()
        self.embeddings = collection(update)
        self.dense = nn.Linear(2, 1)


def collection(update: str = "backward") -> megalith.EmbeddingCollection:
    return megalith.EmbeddingCollection([config()], [megalith.Feature("f", "a")], update=update)


def table_methods(made: megalith.Table) -> dict[str, Arguments]:
    return {
        "apply_gradients": {"ids": ids(), "grads": torch.ones(3, 2), "step": 0, "time": 1.0},
        "assign": {"ids": ids(), "rows": torch.ones(3, 2), "time": 1.0},
        "assign_add": {"ids": ids(), "rows": torch.ones(3, 2), "time": 1.0},
        "clear": {},
        "consumer_number": {"consumer": "sync"},
        "drain_touched": {"consumer": "sync"},
        "evict": {"now": 1.0},
        "find": {"ids": ids()},
        "lookup": {"ids": ids()},
        "mark_touched": {"consumer": "sync", "ids": ids()},
        "memory": {},
        "new_chunk": {"n": 2},
        "read": {
            "rows": made.find(ids()),
            "ids": ids(),
            "pooling": pooling(),
            "epoch": made.epoch,
            "out": [torch.zeros(2, 2)],
        },
        "reinitialize": {"ids": ids(), "time": 1.0},
        "remove": {"ids": ids()},
        "reserve": {"n": 4},
        "restore": {"chunk": next(made.scan())},
        "scan": {"chunk_size": 2},
        "snapshot": {"consumer": "sync", "touched_only": True, "buffer_bytes": 1024},
        "stats": {},
        "track": {"consumer": "other"},
        "untrack": {"consumer": "sync"},
        "update": {
            "rows": made.find(ids()),
            "ids": ids(),
            "grads": [torch.ones(2, 2)],
            "pooling": pooling(),
            "step": 0,
            "time": 1.0,
            "scale": 1.0,
            "clip_norm": 1.0,
            "epoch": made.epoch,
        },
    }


def shards_methods(made: megalith.Shards) -> dict[str, Arguments]:
    (rows,) = made.scan("a")
    methods: dict[str, Arguments] = {
        "apply_gradients": {
            "lookup": {"a": ids()},
            "grads": [torch.ones(2, 2)],
            "step": 0,
            "time": 1.0,
            "scale": 1.0,
            "clip_norm": 1.0,
            "pooling": pooling(),
            "wait": True,
        },
        "assign": {"rows": {"a": (ids(), torch.ones(3, 2))}, "time": 1.0},
        "assign_add": {"rows": {"a": (ids(), torch.ones(3, 2))}, "time": 1.0},
        "check_name": {"table": "a"},
        "clear": {},
        "drain_touched": {"consumer": "sync"},
        "evict": {"now": 1.0},
        "flush": {},
        "known": {"names": ["a"], "missing_ok": False},
        "lookup": {"ids": {"a": ids()}, "missing_ok": False},
        "mark_touched": {"consumer": "sync", "ids": {"a": ids()}},
        "memory": {},
        "prepare": {"ids": {"a": ids()}, "missing_ok": False},
        "preparer": {"ids": {"a": ids()}, "missing_ok": False},
        "reinitialize": {"ids": {"a": ids()}, "time": 1.0, "missing_ok": False},
        "remove": {"ids": {"a": ids()}},
        "reserve": {"rows": {"a": 4}},
        "restore": {"table": "a", "chunk": rows},
        "router": {"table": "a"},
        "scan": {"table": "a", "chunk_size": 2},
        "stats": {},
        "track": {"consumer": "other"},
        "untrack": {"consumer": "sync"},
    }
    if isinstance(made, megalith.SyncShards):
        methods["lookup"]["out_of_data"] = False
    return methods


def lookup_methods() -> dict[str, Arguments]:
    return {
        "check_unchanged": {},
        "fetch": {},
        "gather": {"table": "a"},
        "pool": {"pooling": pooling()},
        "use": {},
        "wait": {},
        "wait_ids": {},
    }


def combiner_methods() -> dict[str, Arguments]:
    return {
        "combine": {"ragged": column(True), "rows": torch.ones(3, 2)},
        "cut": {"column": column()},
        "divisor": {"column": column(True), "dtype": torch.float32},
        "offsets": {"column": column()},
        "output_shape": {"dim": 2},
    }


def ragged_methods() -> dict[str, Arguments]:
    return {
        "from_lists": {"rows": [[1], [2, 3]], "dtype": torch.int64, "weights": [[1.0], [1.0, 2.0]]},
        "from_lengths": {"values": ids(), "lengths": ids(1, 2), "weights": torch.ones(3)},
        "from_padded": {"x": torch.ones(2, 2), "pad": 0, "weights": torch.ones(2, 2)},
        "from_nested": {"x": torch.nested.nested_tensor([ids(1), ids(2, 3)], layout=torch.jagged)},
        "from_keyed": {"keyed": Keyed()},
        "concat": {"parts": [column(), column()]},
        "lengths": {},
        "row_ids": {},
        "to": {"device": "cpu", "non_blocking": False},
        "to_lists": {},
        "to_padded": {"pad": 0, "length": 2},
    }


class Keyed:
    """What `Ragged.from_keyed` reads of a KeyedJaggedTensor."""

    def keys(self) -> list[str]:
        return ["f"]

    def values(self) -> torch.Tensor:
        return ids()

    def lengths(self) -> torch.Tensor:
        return ids(1, 2)


def bound(made: Any, methods: Mapping[str, Arguments]) -> Iterator[Call]:
    for name, arguments in methods.items():
        yield getattr(made, name), arguments


def table_calls() -> Iterator[Call]:
    for optimizer in (
        table.SGD,
        table.Adagrad,
        table.RowWiseAdagrad,
        table.FTRL,
        table.Adam,
        table.Momentum,
    ):
        yield optimizer, defaults(optimizer)
        yield optimizer().rate, {"step": 0}
    for initializer in (table.Uniform, table.Normal, table.TruncatedNormal, table.Zeros, table.Ones):
        yield initializer, defaults(initializer)
    yield table.Constant, {"value": 1.0}
    yield (
        table.PolynomialDecay,
        {"initial": 0.1, "decay_steps": 10, "end": 0.0, "power": 1.0, "cycle": False},
    )
    yield table.PolynomialDecay(0.1, 10), {"step": 3}
    yield table.Warmup, {"then": 0.1, "steps": 3, "start": 0.0}
    yield table.Warmup(0.1, 3), {"step": 3}
    yield table.Piecewise, {"boundaries": [1], "rates": [0.1, 0.2]}
    yield table.Piecewise((1,), (0.1, 0.2)), {"step": 3}
    yield (
        table.Segment,
        {
            "dim": 2,
            "optimizer": table.SGD(),
            "initializer": table.Zeros(),
            "precision": "float32",
        },
    )
    yield (
        table.TableConfig,
        {
            "name": "a",
            "dim": 2,
            "optimizer": table.SGD(),
            "initializer": table.Zeros(),
            "precision": "float32",
            "admission": None,
            "eviction": (),
            "missing": "initial",
            "dist_type": None,
            "trainable": True,
        },
    )
    yield table.TableConfig, {"name": "a", "segments": [table.Segment(2, optimizer=table.SGD())]}
    yield table.Table, {"config": config(), "engine": "cpu", "seed": 0}
    chunk = next(some_table().scan())
    yield from bound(chunk, {"part": {"start": 0, "end": 1}, "select": {"which": ids(0)}, "columns": {}})
    for engine in ("cpu", "reference"):
        yield from bound(some_table(engine), table_methods(some_table(engine)))


def shards_calls() -> Iterator[Call]:
    yield megalith.LocalShards, {"configs": [config()], "engine": "cpu", "seed": 0}
    yield from bound(local(), shards_methods(local()))
    yield from bound(local().lookup({"a": ids()}), lookup_methods() | {"check": {"pooling": pooling()}})
    yield (
        megalith.SyncShards,
        {
            "configs": [config()],
            "router": "roundrobin",
            "group": None,
            "engine": "cpu",
            "seed": 0,
            "wire": "float32",
            "timeout": 60.0,
            "transport": "auto",
            "push": False,
        },
    )
    shards = spread()
    yield from bound(shards, shards_methods(shards))
    pools = lookup_methods() | {"joint_pooling": {"pooling": pooling()}}
    yield from bound(shards.lookup({"a": ids()}), pools)
    yield CommMetrics, {"shards": spread(), "tables": ["a"], "callback": print}
    yield from bound(CommMetrics(spread()), {"collect": {"step": 0}, "close": {}})


def nn_calls() -> Iterator[Call]:
    for combiner in (megalith.Sum(), megalith.Mean(), megalith.Sqrtn(), megalith.FirstN(2)):
        yield from bound(combiner, combiner_methods())
    yield megalith.FirstN(2).combine, {"ragged": column(), "rows": torch.ones(3, 2)}
    yield megalith.FirstN, {"n": 2}
    yield (
        megalith.Feature,
        {
            "name": "f",
            "table": "a",
            "combiner": megalith.Sum(),
            "shared": False,
            "pad": -1,
        },
    )
    yield megalith.Slice, {"feature": "f", "start": 0, "end": 1}
    yield megalith.Layout, {"name": "l", "slices": [megalith.Slice("f", 0, 1)], "kind": "concat"}
    yield (
        megalith.EmbeddingCollection,
        {
            "tables": [config()],
            "features": [megalith.Feature("f", "a")],
            "layouts": [megalith.Layout("l", [megalith.Slice("f", 0, 2)])],
            "update": "step",
            "reduction": "sum",
            "clip_value": 1.0,
            "clip_norm": 1.0,
            "engine": "cpu",
            "seed": 0,
        },
    )
    yield from bound(
        collection(),
        {
            "forward": {"batch": {"f": column()}, "time": 1.0},
            "prepare": {"batch": {"f": column()}},
            "start": {"batch": {"f": column()}},
            "preparer": {},
        },
    )
    yield step_after_backward, {"scale": 1.0}
    yield from bound(collection("step"), {"zero_grad": {"set_to_none": True}, "grad_norm": {}})
    yield MicroBatches, {"model": Model("step"), "num": 2, "group": None, "timeout": 60.0}
    yield (
        megalith.Pipeline,
        {"model": Model(), "loader": [{"f": column()}], "mode": "ids", "push": False, "attach": None},
    )


def step_after_backward(scale: Any) -> None:
    """`EmbeddingCollection.step` after a backward."""
    made = collection("step")
    made({"f": column()})["f"].sum().backward()
    made.step(scale=scale)


def ops_calls() -> Iterator[Call]:
    rows = torch.ones(3, 2)
    yield megalith.Ragged, {"values": ids(), "row_splits": ids(0, 1, 3), "weights": torch.ones(3)}
    yield from bound(column(), ragged_methods())
    yield (
        megalith.Router,
        {
            "mode": "continuous",
            "num_shards": 2,
            "block_size": 10,
            "skip_first": False,
        },
    )
    yield megalith.Router("roundrobin", 2).owner, {"ids": ids()}
    yield ops.OutputSlice, {"output": 0, "column": 0, "start": 0, "end": 2, "inner": 1}
    yield ops.Pooling.sum, {"table": "a", "offsets": ids(0, 1, 3), "dim": 2}
    yield from bound(
        pooling(),
        {
            "check": {"table": "a", "num_occurrences": 3, "dim": 2},
            "check_ends": {"table": "a", "num_occurrences": 3, "dim": 2},
            "new_outputs": {"tables": ["a"]},
            "of": {"table": "a"},
        },
    )
    router = megalith.Router("roundrobin", 2)
    yield ops.bucketize, {"ragged": column(), "router": router, "weights": torch.ones(3)}
    yield (
        ops.dedup,
        {
            "ids": ids(),
            "splits": ids(0, 1, 3),
            "router": router,
            "num_shards": 2,
            "distinct": True,
            "widths": [1, 2],
            "name": "owners",
        },
    )
    yield ops.dedup, {"ids": ids(), "owners": ids(0, 1, 1), "num_shards": 2}
    yield ops.fid, {"slot": 1, "id": 2}
    yield ops.fid, {"slot": ids(), "id": ids()}
    yield ops.fid_v1_to_v2, {"fid": 2}
    yield ops.slot_of, {"fid": ids()}
    yield ops.gather, {"rows": rows, "index": ids(0, 1), "name": "index"}
    pieces = {"indices": [ids(0, 2)], "strides": [1], "name": "index"}
    yield ops.gather_pieces, {"source": torch.ones(6), "widths": [2], **pieces}
    yield ops.scatter_pieces, {"pieces": [torch.ones(2, 2)], "size": 6, **pieces}
    yield ops.scatter_sum, {"rows": rows, "index": ids(0, 1, 1), "num_rows": 2, "name": "index"}
    yield ops.hash_bytes, {"data": b"abcd", "offsets": ids(0, 1, 4), "seed": 0}
    yield ops.hash_strings, {"strings": ["a", "b"], "seed": 0}
    yield ops.match, {"keys": ids(), "queries": ids(2), "name": "queries", "missing_ok": True}
    yield (
        ops.move_runs,
        {
            "values": torch.ones(4),
            "source": ids(0, 2),
            "target": ids(2, 0),
            "widths": ids(2, 2),
            "size": 4,
            "name": "source",
        },
    )
    yield ops.pad_rows, {"values": rows, "row_splits": ids(0, 1, 3), "length": 2}
    yield ops.place_rows, {"rows": rows, "place": ids(2, 0, 1)}
    yield ops.pool, {"source": rows, "bags": bags(), "outputs": [torch.zeros(2, 2)]}
    yield ops.unpool, {"grads": [torch.ones(2, 2)], "bags": bags(), "num_occurrences": 3, "dim": 2}
    yield (
        ops.pool_rows,
        {
            "source": torch.ones(6),
            "index": ids(0, 2, 4),
            "bags": list(bags()),
            "outputs": [(2, 2)],
            "dim": 2,
            "name": "index",
        },
    )
    yield ops.segment_sum, {"values": rows, "row_splits": ids(0, 1, 3)}
    yield ops.split_rows, {"rows": rows, "indices": ids(0, 1, 1), "num_splits": 2, "name": "indices"}
    yield ops.take, {"ragged": column(True), "rows": ids(1, 0)}


def metrics_calls() -> Iterator[Call]:
    batch = {"scores": torch.rand(3), "labels": torch.tensor([0, 1, 1]), "weights": torch.ones(3)}
    logits = {"logits": torch.rand(3), "labels": torch.tensor([0, 1, 1]), "weights": torch.ones(3)}
    yield metrics.auc, batch
    yield metrics.log_loss, logits
    yield metrics.Calibration, {"num_bins": 4}
    for made, arguments in (
        (metrics.AUC(), batch),
        (metrics.BinnedAUC(), batch),
        (metrics.Calibration(), logits),
    ):
        yield from bound(made, {"update": arguments, "compute": {}, "reset": {}})


def layout_calls() -> Iterator[Call]:
    cut: Arguments = {"feature_name": "f", "start": 0, "end": 1}
    yield monolith.SliceConfig, defaults(monolith.SliceConfig) | cut
    feature: Arguments = {"table": "t", "slice_dims": (1, 2)}
    yield monolith.FeatureConfig, defaults(monolith.FeatureConfig) | feature
    out: Arguments = {"slice_configs": (monolith.SliceConfig(**cut),)}
    yield monolith.OutConfig, defaults(monolith.OutConfig) | out
    given: Arguments = {
        "feature_configs": {"f": monolith.FeatureConfig(**feature)},
        "out_configs": {"o": monolith.OutConfig(**out)},
    }
    yield monolith.FeatureConfigs, given
    configs = monolith.FeatureConfigs(**given)
    fids: Arguments = {"columns": {"f": column()}, "ps_num": 1, "feature_cfgs": configs}
    yield monolith.sharding_sparse_fids, defaults(monolith.sharding_sparse_fids) | fids
    found = monolith.sharding_sparse_fids(**fids)
    encoding: Arguments = {
        "fid_offset": found.fid_offset,
        "feature_offset": found.feature_offset,
        "nfl_offset": found.nfl_offset,
        "batch_size": found.batch_size,
        "embeddings_list": [torch.ones(each.numel(), 3) for each in found.fid_list],
        "fid_list_row_split": None,
        "variant_type": "example",
        "feature_cfgs": configs,
        "ps_num": 1,
    }
    layout, gradient = monolith.fused_embedding_to_layout, monolith.fused_embedding_to_layout_grad
    yield layout, defaults(layout) | encoding
    yield gradient, defaults(gradient) | encoding | {"layout_tensors_grad": layout(**encoding)}


def monolith_calls() -> Iterator[Call]:
    rows = torch.ones(3, 2)
    keys = monolith.unique_key_with_value_and_offset(column(), [1, 2])
    pos = megalith.Ragged.from_lists([[0, 0], [0]])
    yield monolith.SharedBuffer, {"size": 4}
    yield (
        monolith.unique_key_with_value_and_offset,
        {
            "key": column(),
            "dims": [1, 2],
            "generate_buffer": True,
        },
    )
    yield (
        monolith.fill_with_offset_map,
        {
            "pos": pos,
            "value": torch.ones(4),
            "value_offset_map": keys.value_offset,
            "value_buffer": monolith.SharedBuffer(4),
            "dims": [1, 2],
        },
    )
    yield (
        monolith.fill_with_offset_map_gradient,
        {
            "pos": pos,
            "grad": torch.ones(4),
            "value_offset_map": keys.value_offset,
            "dims": [1, 2],
        },
    )
    yield (
        monolith.finalize_shared_tensor,
        {
            "handles": [monolith.SharedBuffer(4)],
            "dtype": torch.float32,
            "shape": (-1,),
        },
    )
    yield monolith.normalize_merged_split, {"row_split": ids(0, 1, 0, 2), "row_split_size": ids(2, 2)}
    yield monolith.aligned_flat_concat, {"inputs": [rows, rows], "scale": 1.0, "alignment": 64}
    yield (
        monolith.aligned_flat_split,
        {
            "inputs": [rows],
            "flat": monolith.aligned_flat_concat([rows]),
            "alignment": 64,
        },
    )
    yield monolith.reorder_by_indices, {"input": ids(), "shard_ids": ids(0, 1, 1), "num_of_shards": 2}
    yield monolith.split_by_indices, {"indices": ids(0, 1, 1), "tensor": rows, "num_splits": 2}
    yield monolith.ragged_split_by_indices, {"indices": ids(0, 1, 1), "num": column(), "num_splits": 2}
    yield (
        monolith.fused_reorder_by_indices,
        {
            "inputs": [ids(), ids(4)],
            "num_of_shards": 2,
            "dim_sizes": [1, 2],
        },
    )
    gathered = {"fused_embedding_offsets": [ids(0, 2)], "embedding_dims": [2]}
    yield monolith.fused_gather_embeddings_by_input, {"fused_embeddings": torch.ones(4), **gathered}
    yield (
        monolith.fused_gather_embeddings_by_input_gradient,
        {
            "fused_size": 4,
            "grads": [torch.ones(2, 2)],
            "scale": 1.0,
            **gathered,
        },
    )
    yield (
        monolith.gather_embeddings_by_input,
        {
            "ids": ids(),
            "embeddings": rows,
            "input": ids(1, 3),
            "use_multi_threads": False,
        },
    )
    yield (
        monolith.gather_embeddings_by_ids_gradient_back_prop,
        {
            "ids": ids(),
            "grads": torch.ones(2, 2),
            "index_mapping": ids(0, 2),
        },
    )
    yield (
        monolith.map_id_to_embedding,
        {
            "ids": [ids()],
            "embeddings": [rows],
            "input": ids(1, 3),
            "use_multi_threads": True,
        },
    )
    yield (
        monolith.map_id_to_embedding_gradient_back_prop,
        {
            "ids": [ids()],
            "input": ids(1, 3),
            "grads": torch.ones(2, 2),
        },
    )
    reduced = {"id_indices": torch.tensor([[0], [0], [1]]), "id_values": rows, "id_length": 2}
    for reduce in (monolith.reduce_sum, monolith.reduce_mean, monolith.reduce_sqrtn):
        yield reduce, reduced
    yield monolith.fused_reduce_sum_and_split, {**reduced, "split_dims": [1, 1]}
    split = {"splits": [ids(0, 1, 3)], "embeddings": [rows], "slice_dims": [[1, 1]]}
    yield monolith.fused_reduce_and_split, split
    yield monolith.fused_reduce_and_split_gpu, split
    yield (
        monolith.fused_sorted_segment_sum,
        {
            "indices": [ids(0, 0, 1)],
            "values": [rows],
            "shapes": [[2, 2]],
        },
    )
    shards = local()
    looked_up: Arguments = {"ids": ids(), "fused_slot_size": ids(2, 1), "num_of_shards": 1}
    found = monolith.fused_lookup(shards, **looked_up)
    yield monolith.fused_lookup, {"shards": shards, **looked_up, "req_time": 1.0}
    yield (
        monolith.fused_apply_gradients,
        {
            "shards": shards,
            **looked_up,
            "indices": found.indices,
            "id_grads": torch.ones(found.embeddings.numel()),
            "id_offsets": found.id_offsets,
            "grad_offsets": found.emb_offsets,
            "global_step": 0,
            "req_time": 1.0,
        },
    )


def checkpoint_calls() -> Iterator[Call]:
    model, path = Model(), Path("saved")
    optimizer = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    checkpoint.save(model, path, optimizer=optimizer)
    saved = {"model": model, "optimizer": optimizer, "progress": {"epoch": 1}, "on_rows": count}
    options = {"precision": "float32", "timeout": 60.0}
    yield checkpoint.save, {**saved, **options, "path": Path("other"), "deltas": False}
    yield checkpoint.save_delta, {**saved, **options, "path": path}
    yield (
        checkpoint.load,
        {
            "model": model,
            "path": path,
            "optimizer": optimizer,
            "reroute": False,
            "rename": {},
            "drop_optimizer_state": False,
            "allow_missing": False,
            "deltas": True,
            "on_rows": count,
        },
    )
    yield checkpoint.diff, {"before": path, "after": path, "on_rows": count}
    yield checkpoint.find_checkpoints, {"path": path}
    yield checkpoint.read_manifest, {"path": path}
    yield checkpoint.compact, {"path": path, "on_rows": count}
    yield (
        checkpoint.reshard,
        {
            "path": path,
            "to": Path("resharded"),
            "num_shards": 2,
            "dist_type": "roundrobin",
            "block_size": None,
            "on_rows": count,
        },
    )
    yield checkpoint.verify, {"path": path, "on_bytes": count}
    yield checkpoint.set_rng_state, {"state": checkpoint.rng_state()}
    yield checkpoint.Rotation, {"path": Path("many"), "keep_last": 2, "keep_every": 10}
    rotation = checkpoint.Rotation(Path("many"))
    yield from bound(rotation, {"path": {"step": 1}, "save": {"model": model, "step": 1}})


def count(rows: int) -> None:
    """What long calls report their progress to."""


def data_calls() -> Iterator[Call]:
    samples = data.Samples({"f": column()}, torch.tensor([0.0, 1.0]))
    yield (
        data.Samples,
        {
            "features": {"f": column()},
            "labels": torch.tensor([0.0, 1.0]),
            "dense": torch.ones(2, 3),
            "weights": torch.ones(2),
            "times": ids(1, 2),
        },
    )
    yield data.MemoryReader, {"samples": samples, "batch_size": 2, "shuffle": 1, "drop_last": False}
    reader = data.MemoryReader(samples, batch_size=1)
    yield from bound(reader, {"shard": {"rank": 0, "world_size": 2}, "seek": {"position": reader.position}})
    yield data.DenseColumn, {"column": "d", "normalise": "standard", "mean": 0.0, "std": 1.0}
    yield data.FeatureColumn, {"column": "f", "slot": 1, "hash": True, "separator": ","}
    schema = data.Schema(features={"user": "user"}, label="label")
    yield data.Schema, defaults(data.Schema) | {"features": {"user": "user"}, "label": "label"}
    yield data.Schema.from_dict, {"data": schema.to_dict()}
    yield data.SyntheticFeature, defaults(data.SyntheticFeature) | {"name": "a"}
    yield data.SyntheticReader, defaults(data.SyntheticReader) | {"batch_size": 2}
    Path("x.csv").write_text("user,label\n1,0\n3,1\n")
    files = {"paths": "x.csv", "batch_size": 2}
    yield data.CsvReader, defaults(data.CsvReader) | files | {"schema": schema}
    yield data.CriteoReader, defaults(data.CriteoReader) | files
    pyarrow.parquet.write_table(pyarrow.table({"user": [1, 2], "label": [0.0, 1.0]}), "x.parquet")
    yield (
        data.ParquetReader,
        {**defaults(data.ParquetReader), **files, "paths": "x.parquet", "schema": schema},
    )
    Path("x.records").write_bytes(b"")
    records = {"paths": "x.records", "kind": "example", "features": ["f"], "batch_size": 2}
    yield monolith.MonolithReader, defaults(monolith.MonolithReader) | records


def defaults(call: Callable[..., Any]) -> Arguments:
    """Returns all arguments at their defaults."""
    return {name: parameter.default for name, parameter in inspect.signature(call).parameters.items()}


GROUPS = {
    "table": table_calls,
    "shards": shards_calls,
    "nn": nn_calls,
    "ops": ops_calls,
    "metrics": metrics_calls,
    "monolith": monolith_calls,
    "layouts": layout_calls,
    "checkpoint": checkpoint_calls,
    "data": data_calls,
}

# ---- tests


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """A process group of one rank, for SyncShards."""
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that write to a wrong path write here."""
    monkeypatch.chdir(tmp_path)


def named(call: Callable[..., Any]) -> str:
    owner = getattr(call, "__self__", None)
    if owner is not None and not inspect.isclass(owner) and not inspect.ismodule(owner):
        return f"{type(owner).__name__}.{call.__name__}"
    return str(getattr(call, "__qualname__", type(call).__name__))


def attempt(call: Callable[..., Any], arguments: Arguments) -> Exception | None:
    """Returns the error of a call, or of the use of its result, unless it is a MegalithError."""
    try:
        result = call(**arguments)
        if isinstance(result, Iterator):
            next(result, None)
        if isinstance(result, CommMetrics | Snapshot):
            result.close()
    except MegalithError:
        return None
    except Exception as error:
        return error
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", GROUPS)
def test_a_wrong_argument_raises_a_megalith_error_or_works(group: str) -> None:
    raw = []
    for call, arguments in GROUPS[group]():
        for argument, valid in arguments.items():
            for kind, wrong in WRONG.items():
                value = wrong()
                if callable(valid) and callable(value):
                    continue  # what a user's function raises is the user's
                error = attempt(call, arguments | {argument: value})
                if error is not None:
                    raw.append(f"{named(call)}({argument}={kind}): {type(error).__name__}: {error}")
    assert not raw, f"{len(raw)} raw errors:\n" + "\n".join(line[:200] for line in raw)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", GROUPS)
def test_the_listed_calls_are_valid(group: str) -> None:
    for number in range(sum(1 for _ in GROUPS[group]())):
        call, arguments = next(islice(GROUPS[group](), number, None))
        call(**arguments)


JUNK = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=3),
        st.sampled_from(sorted(WRONG)).map(lambda kind: WRONG[kind]()),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from(["a", "b", "f"]), inner, max_size=2),
    ),
    max_leaves=4,
)
PURE = {group: list(GROUPS[group]()) for group in ("ops", "metrics", "monolith")}
"""Calls without state and without a process group, so examples do not depend on each other."""


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_two_wrong_arguments_raise_a_megalith_error_or_work(data: st.DataObject) -> None:
    calls = PURE[data.draw(st.sampled_from(sorted(PURE)))]
    call, arguments = data.draw(st.sampled_from([each for each in calls if each[1]]))
    changed = data.draw(st.lists(st.sampled_from(sorted(arguments)), min_size=1, max_size=2))
    sizes = {"size", "num_rows", "length", "num_of_shards", "num_shards", "num_splits", "num_bins", "dim"}
    wrong = {name: data.draw(JUNK) for name in changed if name not in sizes}  # a huge size is not wrong

    error = attempt(call, arguments | wrong)

    assert error is None, f"{named(call)}({wrong}): {type(error).__name__}: {error}"


PLAIN_DATA = {
    "Bags",
    "Batch",
    "Bucketized",
    "Chunk",
    "CommReport",
    "Deduped",
    "Difference",
    "FusedLookup",
    "FusedReorder",
    "ListedCheckpoint",
    "LoadReport",
    "Manifest",
    "MemoryUse",
    "MovieLens",
    "OffsetMap",
    "Pooling",
    "PreparedIds",
    "ShardedFids",
    "SyntheticBatch",
    "TableReport",
    "TableStats",
    "UniqueKeys",
    "Verification",
    "Position",
    "CalibrationBins",
    "OutType",
    "PoolingType",
}
"""Results, and data that the calls which take it validate."""
BASE_CLASSES = {
    "Combiner",
    "Initializer",
    "Lookup",
    "Optimizer",
    "Reader",
    "Shards",
    "LocalLookup",
    "SyncLookup",
}
ELSEWHERE = {
    "files and the network, tested in tests/data, tests/storage, tests/serving and tests/compat": {
        "load_movielens",
        "read_movielens",
        "ObjectStore",
        "export",
        "import_monolith",
        "DummySyncServer",
        "ParameterSyncClient",
        "ReplicaWatcher",
        "SyncBackend",
        "ZKBackend",
        "create_dummy_sync_client",
        "create_parameter_sync_clients",
        "parameter_sync_client_from_config",
        "refresh_sync_config",
        "remote_predict",
        "Container",
        "ContainerServiceInfo",
        "ReplicaMeta",
        "SavedModel",
        "SavedModelDeployConfig",
        "TargetExtraInfo",
    },
    "background work, tested in tests/checkpoint and tests/data": {
        "async_save",
        "SaveHandle",
        "EqualBatchLoader",
        "pad_to_equal_batches",
    },
    "combiners under Monolith's names, tested in tests/nn/test_combiners.py": {
        "ReduceMean",
        "ReduceSum",
    },
}


OTHERS = {"rng_state", "fused_reduce_and_split_gpu"}
"""A call without arguments, and a second name of a listed function."""


def test_every_public_name_is_listed() -> None:
    listed = {named(call).split(".")[0] for group in GROUPS.values() for call, _ in group()}
    known = listed.union(PLAIN_DATA, BASE_CLASSES, *ELSEWHERE.values(), OTHERS)
    missing = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        names = getattr(module, "__all__", None) or [
            name for name, x in vars(module).items() if getattr(x, "__module__", "") == package
        ]
        for name in names:
            found = getattr(module, name)
            error = inspect.isclass(found) and issubclass(found, Exception)
            if name.startswith("_") or error or not callable(found) or name in known:
                continue
            missing.append(f"{package}.{name}")
    assert not missing, f"list these with valid arguments, or say where they are tested: {missing}"
