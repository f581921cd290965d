"""Calls of tables, shards, nn, ops and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from functools import partial
from inspect import Parameter, Signature, isclass
from typing import Any

import torch
from torch import nn

import megalith
from megalith import metrics, ops, table
from megalith.nn import MicroBatches
from megalith.shards import CommMetrics
from tests.ps.support import where
from tests.valid_calls.sweep import Arguments, Call, complete, config, ids, methods


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
        "evict": {"now": 1.0},
        "check_fits": {"rows": 2},
        "evict_part": {"now": 1.0, "rows": 2, "start": 0.5},
        "filter": {"predicate": lambda chunk: chunk.ids > 0, "chunk_size": 2},
        "merge": {"other": megalith.Table(made.config), "on_conflict": "ours"},
        "reseed": {"seed": 3},
        "restore_pending": {"ids": ids(), "counts": ids()},
        "mark_touched": {"consumer": "sync", "ids": ids()},
        "new_chunk": {"n": 2},
        "read": {
            "rows": made.find(ids()),
            "ids": ids(),
            "pooling": pooling(),
            "epoch": made.epoch,
            "out": [torch.zeros(2, 2)],
        },
        "reinitialize": {"ids": ids(), "time": 1.0},
        "reserve": {"n": 4},
        "restore": {"chunk": next(made.scan())},
        "scan": {"chunk_size": 2},
        "snapshot": {"consumer": "sync", "touched_only": True, "buffer_bytes": 1024},
        "track": {"consumer": "other"},
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


class SilentRecorder:
    """A recorder of exchanges that drops everything."""

    def _ignore(self, *_: object) -> None:
        pass

    requested = sent = waited = read = created = _ignore


def shards_methods(made: megalith.Shards) -> dict[str, Arguments]:
    rows = next(iter(made.scan("a")))
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
        "check_occurrences": {"ids": {"a": ids()}, "occurrences": {"a": ids()}, "pooling": None},
        "assign_add": {"rows": {"a": (ids(), torch.ones(3, 2))}, "time": 1.0},
        "evict": {"now": 1.0},
        "known": {"names": ["a"], "missing_ok": False},
        "lookup": {"ids": {"a": ids()}, "missing_ok": False},
        "mark_touched": {"ids": {"a": ids()}},
        "prepare": {"ids": {"a": ids()}, "missing_ok": False},
        "preparer": {"ids": {"a": ids()}, "missing_ok": False},
        "reinitialize": {"ids": {"a": ids()}, "time": 1.0, "missing_ok": False},
        "remove": {"ids": {"a": ids()}},
        "reserve": {"rows": {"a": 4}},
        "each_part": {"function": where},
        "report_failure": {"error": ValueError("x")},
        "restore": {"table": "a", "chunk": rows},
        "scan": {"table": "a", "chunk_size": 2},
        "track": {"consumer": "other"},
        "remove_recorder": {"recorder": SilentRecorder()},
    }
    if isinstance(made, megalith.SyncShards):
        methods["lookup"]["out_of_data"] = False
        methods["add_recorder"] = {"recorder": SilentRecorder()}
    return methods


def lookup_methods() -> dict[str, Arguments]:
    given = {"pooling": pooling()}
    return {"check": given, "joint_pooling": given, "pool": given}


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
        "to": {"device": "cpu", "non_blocking": False},
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


def table_calls() -> Iterator[Call]:
    for name in table.__all__:
        optimizer = getattr(table, name)
        if isclass(optimizer) and issubclass(optimizer, table.Optimizer) and optimizer is not table.Optimizer:
            arguments = complete(optimizer, {})
            yield optimizer, arguments
            yield from methods(partial(optimizer, **arguments))
    for initializer in (table.Uniform, table.Normal, table.TruncatedNormal, table.Zeros, table.Ones):
        yield initializer, {}
    yield table.Constant, {"value": 1.0}
    policies: list[tuple[Any, Arguments]] = [
        (table.MinCount, {"n": 2}),
        (table.Probability, {"p": 0.5}),
        (table.TTL, {"seconds": 60.0}),
        (table.MinNorm, {"norm": 0.1}),
        (table.Capacity, {"rows": 10}),
    ]
    for policy, arguments in policies:
        yield policy, arguments
        yield from methods(partial(policy, **arguments))
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
            "precision": "float16",
            "rounding": "nearest",
            "serving": table.FixedPoint(),
        },
    )
    yield table.FixedPoint, {"range": 1.0}
    yield table.OneBit, {"amplitude": 0.1, "init_scale": 1.0, "max_scale": 10.0, "step_size": 5}
    yield (
        table.TableConfig,
        {
            "name": "a",
            "dim": 2,
            "optimizer": table.SGD(),
            "initializer": table.Zeros(),
            "precision": "float16",
            "rounding": "nearest",
            "serving": table.OneBit(),
            "admission": None,
            "eviction": (),
            "missing": "initial",
            "dist_type": None,
            "trainable": True,
            "device_bytes": 1 << 20,
            "deterministic": False,
        },
    )
    yield table.TableConfig, {"name": "a", "segments": [table.Segment(2, optimizer=table.SGD())]}
    yield table.Table, {"config": config(), "engine": "cpu", "seed": 0}
    yield from methods(
        lambda: next(some_table().scan()), {"part": {"start": 0, "end": 1}, "select": {"which": ids(0)}}
    )
    for engine in ("cpu", "reference"):
        yield from methods(partial(some_table, engine), table_methods)


def shards_calls() -> Iterator[Call]:
    yield megalith.LocalShards, {"configs": [config()], "engine": "cpu", "seed": 0}
    yield from methods(local, shards_methods)
    yield from methods(lambda: local().lookup({"a": ids()}), lookup_methods())
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
    yield from methods(spread, shards_methods)
    yield from methods(lambda: spread().lookup({"a": ids()}), lookup_methods())
    yield CommMetrics, {"shards": spread(), "tables": ["a"]}
    yield from methods(lambda: CommMetrics(spread()))
    yield from methods(lambda: CommMetrics(spread()).collect(0))


def server_calls(servers: megalith.Servers) -> Iterator[Call]:
    """Calls of tables on running servers."""

    def made() -> megalith.ServerShards:
        shards = megalith.ServerShards([config("a"), config("b", 3)], servers=servers, timeout=5.0)
        shards.assign({"a": (ids(), torch.ones(3, 2))})
        shards.track("sync")
        return shards

    given: dict[str, Any] = {
        "configs": [config()],
        "num_servers": 2,
        "name": "other",
        "worker": 1,
        "num_workers": 2,
        "mode": "async",
        "staleness": 1,
        "window": 1,
        "router": "roundrobin",
        "engine": "cpu",
        "seed": 0,
        "wire": "float32",
        "timeout": 5.0,
        "recovery": None,
    }

    def construct(**options: Any) -> megalith.ServerShards:
        return megalith.ServerShards(servers=servers, **options)

    construct.__signature__ = Signature(  # type: ignore[attr-defined]
        [Parameter(name, Parameter.KEYWORD_ONLY) for name in given]
    )
    yield construct, given

    def given_methods(shards: megalith.ServerShards) -> dict[str, Arguments]:
        elsewhere = {"servers": servers, "router": None}  # refused: the tables are there
        return shards_methods(shards) | {"reconnect": elsewhere, "close": {"drop": False}}

    yield from methods(made, given_methods)
    yield from methods(lambda: made().lookup({"a": ids()}), lookup_methods())


def nn_calls() -> Iterator[Call]:
    for combiner in (megalith.Sum(), megalith.Mean(), megalith.Sqrtn(), megalith.FirstN(2)):
        yield from methods(partial(copy, combiner), combiner_methods())
    yield megalith.FirstN(2).combine, {"ragged": column(), "rows": torch.ones(3, 2)}
    yield megalith.FirstN, {"n": 2}
    for kind in (megalith.Sum, megalith.Mean, megalith.Sqrtn):
        yield kind, {}
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
    batch = {"batch": {"f": column()}}
    given = {"forward": batch | {"time": 1.0}, "prepare": batch, "start": batch}
    yield from methods(partial(collection, "step"), given)
    yield step_after_backward, {"scale": 1.0}
    yield MicroBatches, {"model": Model("step"), "num": 2, "group": None, "timeout": 60.0}
    model = Model("step")
    losses = [lambda: model.dense(model.embeddings({"f": column()})["f"]).sum()]
    yield from methods(lambda: MicroBatches(model, 1), {"step": {"losses": losses}})
    yield (
        megalith.Pipeline,
        {
            "model": Model(),
            "loader": [{"f": column()}],
            "mode": "ids",
            "depth": 1,
            "push": False,
            "attach": lambda batch, start: start(batch),
        },
    )


def step_after_backward(scale: Any) -> None:
    """`EmbeddingCollection.step` after a backward."""
    made = collection("step")
    made({"f": column()})["f"].sum().backward()
    made.step(scale=scale)


def ops_calls() -> Iterator[Call]:
    rows = torch.ones(3, 2)
    yield megalith.Ragged, {"values": ids(), "row_splits": ids(0, 1, 3), "weights": torch.ones(3)}
    yield from methods(column, ragged_methods())
    yield (
        megalith.Router,
        {
            "mode": "continuous",
            "num_shards": 2,
            "block_size": 10,
            "skip_first": False,
        },
    )
    router = megalith.Router("continuous", 2, block_size=10)
    yield from methods(lambda: router, {"from_rule": {"rule": router.rule}})
    yield ops.OutputSlice, {"output": 0, "column": 0, "start": 0, "end": 2, "inner": 1}
    yield from methods(
        pooling,
        {
            "check": {"table": "a", "num_occurrences": 3, "dim": 2},
            "check_ends": {"table": "a", "num_occurrences": 3, "dim": 2},
            "check_shapes": {"table": "a", "num_occurrences": 3, "dim": 2},
            "to": {"device": torch.device("cpu")},
            "new_outputs": {"tables": ["a"], "device": torch.device("cpu")},
            "sum": {"table": "a", "offsets": ids(0, 1, 3), "dim": 2},
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
    for kind, arguments in (
        (metrics.AUC, batch),
        (metrics.BinnedAUC, batch),
        (metrics.Calibration, logits),
    ):
        yield kind, {}
        yield from methods(kind, {"update": arguments})
