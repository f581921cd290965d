"""Calls of tables, shards, nn, ops and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from functools import partial
from inspect import Parameter, Signature, isclass
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import torch
from torch import nn

import megalith
from megalith import metrics, ops, table
from megalith.compat import torchrec
from megalith.integrations.dcp import TablesLoadPlanner
from megalith.nn import MicroBatches
from megalith.shards import CommMetrics
from tests.ps.support import where
from tests.valid_calls.sweep import Arguments, Call, Given, calls, complete, config, ids, methods

ROWS = torch.ones(3, 2)
CONFIGS = [config("a"), config("b", 3)]


def column(weights: bool = False) -> megalith.Ragged:
    return megalith.Ragged.from_lists([[1, 2], [3]], weights=[[0.5, 1.0], [2.0]] if weights else None)


def pooling() -> ops.Pooling:
    return ops.Pooling.sum("a", ids(0, 1, 3), 2)


# ---- tables


def some_table(engine: str = "cpu") -> megalith.Table:
    made = megalith.Table(config(), engine=engine)
    made.assign(ids(), ROWS)
    made.track("sync")
    return made


def table_methods(made: megalith.Table) -> Given:
    found = {"rows": made.find(ids()), "pooling": pooling(), "epoch": made.epoch}
    return {
        "*": {"ids": ids(), "grads": ROWS, "rows": ROWS, "time": 1.0, "now": 1.0, "chunk_size": 2},
        "check_fits": {"rows": 2},
        "evict_part": {"rows": 2, "start": 0.5},
        "filter": {"predicate": lambda chunk: chunk.ids > 0},
        "merge": {"other": megalith.Table(made.config), "on_conflict": "ours"},
        "new_chunk": {"n": 2},
        "read": found | {"out": [torch.zeros(2, 2)]},
        "reseed": {"seed": 3},
        "reserve": {"n": 4},
        "restore": {"chunk": next(made.scan())},
        "restore_pending": {"counts": ids()},
        "snapshot": {"consumer": "sync", "touched_only": True, "buffer_bytes": 1024},
        "track": {"consumer": "other"},
        "update": found | {"grads": [torch.ones(2, 2)], "scale": 1.0, "clip_norm": 1.0},
    }


def table_calls() -> Iterator[Call]:
    for name in table.__all__:
        optimizer = getattr(table, name)
        if isclass(optimizer) and issubclass(optimizer, table.Optimizer) and optimizer is not table.Optimizer:
            arguments = complete(optimizer, {})
            yield optimizer, arguments
            yield from methods(partial(optimizer, **arguments))
    yield from calls(table.Uniform, table.Normal, table.TruncatedNormal, table.Zeros, table.Ones)
    yield table.Constant, {"value": 1.0}
    policies: list[Call] = [
        (table.MinCount, {"n": 2}),
        (table.Probability, {"p": 0.5}),
        (table.TTL, {"seconds": 60.0}),
        (table.MinNorm, {"norm": 0.1}),
        (table.Capacity, {"rows": 10}),
    ]
    for policy, arguments in policies:
        yield policy, arguments
        yield from methods(partial(policy, **arguments))
    yield from calls(table.PolynomialDecay, initial=0.1, decay_steps=10, end=0.0)
    yield table.TableLR, {"lr": 0.1}
    rate = table.TableLR(0.1)
    yield rate.follow, {"optimizer": torch.optim.SGD([rate.parameter], lr=0.1)}
    yield from calls(table.Warmup, then=0.1, steps=3, start=0.0)
    yield from calls(table.Piecewise, boundaries=[1], rates=[0.1, 0.2])
    schedules = table.PolynomialDecay(0.1, 10), table.Warmup(0.1, 3), table.Piecewise((1,), (0.1, 0.2))
    yield from calls(*schedules, step=3)
    yield table.FixedPoint, {"range": 1.0}
    yield from calls(table.OneBit, amplitude=0.1, init_scale=1.0, max_scale=10.0, step_size=5)
    row = {"dim": 2, "optimizer": table.SGD(), "initializer": table.Zeros(), "precision": "float16"}
    yield from calls(table.Segment, **row, rounding="nearest", serving=table.FixedPoint())
    row |= {"device_bytes": 1 << 20, "rounding": "nearest", "serving": table.OneBit()}
    yield from calls(table.TableConfig, name="a", **row)
    yield from calls(table.TableConfig, name="a", segments=[table.Segment(2, optimizer=table.SGD())])
    yield table.Table, {"config": config()}
    chunk = {"part": {"start": 0, "end": 1}, "select": {"which": ids(0)}}
    yield from methods(lambda: next(some_table().scan()), chunk)
    for engine in ("cpu", "reference"):
        yield from methods(partial(some_table, engine), table_methods)


# ---- shards


def with_rows(made: Any) -> Any:
    made.assign({"a": (ids(), ROWS)})
    made.track("sync")
    return made


def local() -> megalith.LocalShards:
    return with_rows(megalith.LocalShards(CONFIGS))


def spread() -> megalith.SyncShards:
    return with_rows(megalith.SyncShards(CONFIGS))


class SilentRecorder:
    """A recorder of exchanges that drops everything."""

    def _ignore(self, *_: object) -> None:
        pass

    requested = sent = waited = read = created = _ignore


def shards_methods(made: megalith.Shards) -> Given:
    by_table = {"a": ids()}
    update = {"grads": [torch.ones(2, 2)], "scale": 1.0, "clip_norm": 1.0, "wait": True}
    given: Given = {
        "*": {"ids": by_table, "rows": {"a": (ids(), ROWS)}, "time": 1.0, "now": 1.0, "missing_ok": False},
        "apply_gradients": update | {"lookup": by_table, "pooling": pooling()},
        "each_part": {"function": where},
        "known": {"names": ["a"]},
        "remove_recorder": {"recorder": SilentRecorder()},
        "report_failure": {"error": ValueError("x")},
        "reserve": {"rows": {"a": 4}},
        "restore": {"chunk": next(iter(made.scan("a")))},
        "scan": {"chunk_size": 2},
        "track": {"consumer": "other"},
    }
    if isinstance(made, megalith.SyncShards):
        given = {**given, "lookup": {"out_of_data": False}, "add_recorder": {"recorder": SilentRecorder()}}
    return given


def lookup_calls(made: Any) -> Iterator[Call]:
    """Calls of a lookup in the shards that a function returns."""
    yield from methods(lambda: made().lookup({"a": ids()}), {"*": {"pooling": pooling()}})


def shards_calls() -> Iterator[Call]:
    yield from calls(megalith.LocalShards, megalith.SyncShards, configs=[config()], timeout=60.0)
    yield from methods(local, shards_methods)
    yield from lookup_calls(local)
    yield from methods(spread, shards_methods)
    yield from lookup_calls(spread)
    yield CommMetrics, {"shards": spread(), "tables": ["a"]}
    yield from methods(lambda: CommMetrics(spread()))
    yield from methods(lambda: CommMetrics(spread()).collect(0))


def server_calls(servers: megalith.Servers) -> Iterator[Call]:
    """Calls of tables on running servers."""

    def made() -> megalith.ServerShards:
        return with_rows(megalith.ServerShards(CONFIGS, servers=servers, timeout=5.0))

    given: Arguments = {"configs": [config()], "num_servers": 2, "name": "other", "worker": 1}
    given |= {"num_workers": 2, "mode": "async", "staleness": 1, "window": 1, "router": "roundrobin"}
    given |= {"engine": "cpu", "seed": 0, "wire": "float32", "timeout": 5.0, "recovery": None}

    def construct(**options: Any) -> megalith.ServerShards:
        return megalith.ServerShards(servers=servers, **options)

    construct.__signature__ = Signature(  # type: ignore[attr-defined]
        [Parameter(name, Parameter.KEYWORD_ONLY) for name in given]
    )
    yield construct, given

    def given_methods(shards: megalith.ServerShards) -> Given:
        elsewhere = {"servers": servers, "router": None}  # refused: the tables are there
        return {**shards_methods(shards), "reconnect": elsewhere, "close": {"drop": False}}

    yield from methods(made, given_methods)
    yield from lookup_calls(made)


# ---- nn


class Model(nn.Module):
    """A model with one collection and one dense layer."""

    def __init__(self, update: str = "backward") -> None:
        super().__init__()
        self.embeddings = collection(update)
        self.dense = nn.Linear(2, 1)


def collection(update: str = "backward") -> megalith.EmbeddingCollection:
    return megalith.EmbeddingCollection([config()], [megalith.Feature("f", "a")], update=update)


def after_backward() -> megalith.EmbeddingCollection:
    made = collection("step")
    made({"f": column()})["f"].sum().backward()
    return made


def following(made: megalith.EmbeddingCollection) -> Given:
    return {"follow": {"optimizer": torch.optim.SGD(made.parameters())}}


def nn_calls() -> Iterator[Call]:
    combiner_methods: Given = {
        "*": {"column": column(), "dim": 2},
        "combine": {"ragged": column(True), "rows": ROWS},
        "divisor": {"column": column(True), "dtype": torch.float32},
    }
    for combiner in (megalith.Sum(), megalith.Mean(), megalith.Sqrtn(), megalith.FirstN(2)):
        yield from methods(partial(copy, combiner), combiner_methods)
    yield megalith.FirstN(2).combine, {"ragged": column(), "rows": ROWS}
    yield from calls(megalith.FirstN, megalith.Sum, megalith.Mean, megalith.Sqrtn, n=2)
    feature = {"name": "f", "table": "a", "combiner": megalith.Sum(), "pad": -1}
    yield megalith.Feature, feature
    yield from calls(megalith.Slice, feature="f", start=0, end=1)
    yield from calls(megalith.Layout, name="l", slices=[megalith.Slice("f", 0, 1)])
    parts = {"tables": [config()], "features": [megalith.Feature("f", "a")]}
    parts |= {"layouts": [megalith.Layout("l", [megalith.Slice("f", 0, 2)])]}
    clipped = {"update": "step", "reduction": "sum", "clip_value": 1.0, "clip_norm": 1.0}
    yield megalith.EmbeddingCollection, parts | clipped | {"engine": "cpu", "seed": 0}
    given: Given = {"*": {"batch": {"f": column()}, "scale": 1.0}, "forward": {"time": 1.0}}
    yield from methods(partial(collection, "step"), lambda made: given | following(made))
    yield from methods(after_backward, lambda made: given | following(made))
    yield TablesLoadPlanner, {}
    yield MicroBatches, {"model": Model("step"), "num": 2, "timeout": 60.0}
    model = Model("step")
    losses = [lambda: model.dense(model.embeddings({"f": column()})["f"]).sum()]
    yield from methods(lambda: MicroBatches(model, 1), {"step": {"losses": losses}})
    loaded = {"model": Model(), "loader": [{"f": column()}], "attach": lambda batch, start: start(batch)}
    yield megalith.Pipeline, loaded | {"mode": "ids", "depth": 1}


# ---- ops


class Keyed:
    """What `Ragged.from_keyed` reads of a KeyedJaggedTensor."""

    def keys(self) -> list[str]:
        return ["f"]

    def values(self) -> torch.Tensor:
        return ids()

    def lengths(self) -> torch.Tensor:
        return ids(1, 2)


def ragged_methods() -> Given:
    return {
        "from_lists": {"rows": [[1], [2, 3]], "dtype": torch.int64, "weights": [[1.0], [1.0, 2.0]]},
        "from_lengths": {"values": ids(), "lengths": ids(1, 2), "weights": torch.ones(3)},
        "from_padded": {"x": torch.ones(2, 2), "pad": 0, "weights": torch.ones(2, 2)},
        "from_nested": {"x": torch.nested.nested_tensor([ids(1), ids(2, 3)], layout=torch.jagged)},
        "from_keyed": {"keyed": Keyed()},
        "concat": {"parts": [column(), column()]},
        "from_arrow": {
            "column": pa.array([[1, 2], [3]]),
            "separator": "|",
            "weights": pa.array([[1.0, 2], [3]]),
        },
        "from_numpy": {"array": np.array([1, 2])},
        "from_pandas": {"series": pd.Series(["a", "b"])},
        "from_polars": {"series": pl.Series(["a", "b"])},
        "to_padded": {"pad": 0, "length": 2},
    }


def ops_calls() -> Iterator[Call]:
    splits, owners = ids(0, 1, 3), ids(0, 1, 1)
    yield from calls(megalith.Ragged, values=ids(), row_splits=splits, weights=torch.ones(3))
    yield from methods(column, ragged_methods())
    router = megalith.Router("continuous", 2, block_size=10)
    yield from calls(megalith.Router, mode="continuous", num_shards=2, block_size=10)
    yield from methods(lambda: router, {"from_rule": {"rule": router.rule}})
    yield from calls(ops.OutputSlice, output=0, column=0, start=0, end=2, inner=1)
    cpu = torch.device("cpu")
    shape = {"table": "a", "num_occurrences": 3, "dim": 2, "tables": ["a"], "offsets": splits, "device": cpu}
    yield from methods(pooling, {"*": shape})
    router = megalith.Router("roundrobin", 2)
    yield from calls(ops.bucketize, ragged=column(), router=router, weights=torch.ones(3))
    sharded: Arguments = {"ids": ids(), "num_shards": 2}
    yield from calls(ops.dedup, **sharded, splits=splits, router=router, widths=[1, 2], name="owners")
    yield from calls(ops.dedup, **sharded, owners=owners)
    yield from calls(ops.fid, ops.fid_v1_to_v2, slot=1, id=2, fid=2)
    yield from calls(ops.fid, ops.slot_of, slot=ids(), id=ids(), fid=ids())
    yield from calls(ops.gather, rows=ROWS, index=ids(0, 1))
    pieces: Arguments = {"indices": [ids(0, 2)], "strides": [1]}
    yield from calls(ops.gather_pieces, source=torch.ones(6), widths=[2], **pieces)
    yield from calls(ops.scatter_pieces, pieces=[torch.ones(2, 2)], size=6, **pieces)
    yield from calls(ops.scatter_sum, rows=ROWS, index=owners, num_rows=2)
    yield from calls(ops.hash_bytes, data=b"abcd", offsets=ids(0, 1, 4))
    yield from calls(ops.hash_strings, strings=["a", "b"])
    yield from calls(ops.match, keys=ids(), queries=ids(2), missing_ok=True)
    moved: Arguments = {"source": ids(0, 2), "target": ids(2, 0), "widths": ids(2, 2)}
    yield from calls(ops.move_runs, values=torch.ones(4), **moved, size=4)
    yield from calls(ops.pad_rows, ops.segment_sum, values=ROWS, row_splits=splits, length=2)
    yield from calls(ops.place_rows, rows=ROWS, place=ids(2, 0, 1))
    bags = pooling().bags["a"]
    yield from calls(ops.pool, source=ROWS, bags=bags, outputs=[torch.zeros(2, 2)])
    yield from calls(ops.unpool, grads=[torch.ones(2, 2)], bags=bags, num_occurrences=3, dim=2)
    outputs: Arguments = {"bags": list(bags), "outputs": [(2, 2)], "dim": 2}
    yield from calls(ops.pool_rows, source=torch.ones(6), index=ids(0, 2, 4), **outputs)
    yield from calls(ops.split_rows, rows=ROWS, indices=owners, num_splits=2)
    yield from calls(ops.take, ragged=column(True), rows=ids(1, 0))


def metrics_calls() -> Iterator[Call]:
    scores = torch.rand(3)
    batch = {"scores": scores, "logits": scores, "labels": torch.tensor([0, 1, 1]), "weights": torch.ones(3)}
    yield from calls(metrics.auc, metrics.log_loss, **batch)
    for kind in (metrics.AUC, metrics.BinnedAUC, metrics.Calibration):
        yield kind, {}
        yield from methods(kind, {"*": batch})


# ---- TorchRec's names


def keyed() -> torchrec.KeyedJaggedTensor:
    return torchrec.KeyedJaggedTensor(["f"], ids(), torch.ones(3), torch.tensor([2, 1]))


def torchrec_calls() -> Iterator[Call]:
    fields = {"name": "t", "embedding_dim": 2, "num_embeddings": 10, "feature_names": ["f"]}
    pooled, unpooled = torchrec.EmbeddingBagConfig(**fields), torchrec.EmbeddingConfig(**fields)
    yield from calls(torchrec.EmbeddingBagConfig, torchrec.EmbeddingConfig, **fields)
    given: Arguments = {"optimizer": table.SGD(0.1), "table_options": {"t": {"initializer": table.Zeros()}}}
    batch: Given = {"*": {"features": keyed(), "batch": keyed()}, "step": {}}
    for kind, tables in ((torchrec.EmbeddingBagCollection, pooled), (torchrec.EmbeddingCollection, unpooled)):
        yield kind, {"tables": [tables], **given}
        made = partial(kind, [tables], update="step", **given)
        yield from methods(made, lambda collection: batch | following(collection))
    jagged: Arguments = {"values": ids(), "weights": ROWS[:, 0], "lengths": torch.tensor([2, 1])}
    yield torchrec.JaggedTensor, jagged
    yield from methods(partial(torchrec.JaggedTensor, **jagged))
    yield torchrec.KeyedJaggedTensor, {"keys": ["f"], **jagged}
    offsets = {"values": ids(), "lengths": torch.tensor([2, 1]), "offsets": torch.tensor([0, 2, 3])}
    yield from methods(keyed, {"*": {"keys": ["f"], **offsets}})
    values: Arguments = {"keys": ["f"], "length_per_key": [2], "values": ROWS}
    yield torchrec.KeyedTensor, values
    yield from methods(partial(torchrec.KeyedTensor, **values))
