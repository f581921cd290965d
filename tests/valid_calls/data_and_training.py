"""Calls of readers, data sets, models and training runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch

from megalith import TTL, Layout, Mean, MinCount, Slice, data, models, training
from megalith.compat import monolith
from megalith.data.movielens import SUMS
from megalith.integrations import trackers
from tests.data.test_movielens import grouplens
from tests.valid_calls.core import column
from tests.valid_calls.sweep import Arguments, Call, Given, calls, ids, methods

# ---- data


def samples() -> data.Samples:
    return data.Samples({"f": column()}, torch.tensor([0.0, 1.0]), times=ids(1, 2))


def data_calls() -> Iterator[Call]:
    labels = torch.tensor([0.0, 1.0])
    extra = {"dense": torch.ones(2, 3), "weights": torch.ones(2), "times": ids(1, 2)}
    yield from calls(data.Samples, features={"f": column()}, labels=labels, **extra)
    parts: Given = {"*": {"rows": ids(0), "position": {}}, "concat": {"parts": [samples()] * 2}}
    yield from methods(samples, parts)
    yield from methods(lambda: samples().to_batch({}), {"part": {"start": 0, "end": 1}})
    yield data.MemoryReader, {"samples": samples(), "shuffle": 1}
    reader = data.MemoryReader(samples(), batch_size=1)
    state: Arguments = {"position": reader.position, "state": reader.state_dict()}
    yield from methods(lambda: reader.shard(0, 1), {"*": state})
    yield from calls(data.EqualBatchLoader, data.pad_to_equal_batches, loader=reader)
    yield from calls(data.DenseColumn, column="d", normalise="standard", mean=0.0, std=1.0)
    yield from calls(data.FeatureColumn, column="f", slot=1, hash=True, separator=",")
    schema = data.Schema(features={"user": "user"}, dense=["label"], label="label")
    yield from calls(data.Schema, features={"user": "user"}, label="label")
    given: Arguments = {"raw": torch.ones(2, 1).double().numpy(), "fitted": schema, "data": schema.to_dict()}
    yield from methods(lambda: schema, {"*": given | {"sources": {"user": "integer"}}})
    yield data.SyntheticFeature, {"name": "a"}
    yield data.SyntheticReader, {}
    position = data.SyntheticReader(batch_size=2).position
    made = partial(data.SyntheticReader, batch_size=2, num_batches=2)
    yield from methods(made, {"*": {"index": 0, "position": position, "state": made().state_dict()}})


def file_calls() -> Iterator[Call]:
    schema = data.Schema(features={"user": "user"}, dense=[data.DenseColumn("d", "standard")], label="label")
    Path("x.csv").write_text("user,d,label\n1,0.5,0\n3,1.5,1\n")
    pyarrow.parquet.write_table(
        pyarrow.table({"user": [1, 2], "d": [0.5, 1.5], "label": [0.0, 1.0]}), "x.parquet"
    )
    config: Arguments = {"schema": {"features": {"user": "user"}, "label": "label"}, "batch_size": 2}
    table: Arguments = {"user": ["a", "b"], "d": [0.5, 1.5], "label": [0.0, 1.0]}
    labelled = data.Schema(features={"user": "user"}, label="label")
    yield data.batch_from, {"table": table, "schema": labelled, "texts": {}}
    readers = {"x.csv": data.CsvReader, "x.parquet": data.ParquetReader, Path("x.parquet"): data.TableReader}
    for path, kind in readers.items():
        fitted = kind(path, schema, batch_size=2).fit()
        yield kind, {"paths": path, "schema": fitted}
        made = kind(path, fitted, batch_size=2)
        given = {"position": made.position, "schema": fitted, "state": made.state_dict(), "feature": "user"}
        made = partial(kind, path, fitted, batch_size=2)
        yield from methods(made, {"*": given, "from_config": config | {"path": path}})
    Path("criteo.tsv").write_text("\t".join(["1", *["2"] * 13, *["ab"] * 26]) + "\n")
    yield data.CriteoReader, {"paths": "criteo.tsv"}
    yield data.CriteoReader.from_config, {"path": "criteo.tsv", "schema": {}, "batch_size": 2}
    header = "id,click,hour," + ",".join(map(str, data.AvazuReader.ids))
    Path("avazu.csv").write_text(f"{header}\n1,0,14102700{',1' * 21}\n")
    yield data.AvazuReader, {"paths": "avazu.csv"}
    Path("raw_sample.csv").write_text("user,time_stamp,adgroup_id,pid,nonclk,clk\n1,2,3,4,0,1\n")
    yield data.TaobaoReader, {"paths": "raw_sample.csv"}
    Path("log_1.csv").write_text("user_id,video_id,tab,time_ms,is_click,duration_ms\n1,2,0,1000,0,7\n")
    yield data.KuaiRandReader, {"paths": "log_1.csv"}
    Path("x.records").write_bytes(b"")
    yield monolith.MonolithReader, {"paths": "x.records", "kind": "example", "features": ["f"]}


def movielens_calls() -> Iterator[Call]:
    directory = Path("cache/ml-1m")
    if not directory.exists():
        grouplens(directory)
        (directory / SUMS).write_text(json.dumps({"files": {}}))
    yield data.load_movielens, {"cache_dir": Path("cache"), "history": 2}
    yield data.read_movielens, {"directory": directory, "history": 2}
    yield from methods(lambda: data.read_movielens(directory), {"split": {"train": 0.5, "valid": 0.2}})


# ---- models


def embeddings() -> models.EmbeddingConfig:
    return models.EmbeddingConfig(["f", "g"], dim=2)


def batch(*names: str) -> data.Batch:
    return data.Batch({name: column() for name in names}, torch.tensor([0.0, 1.0]), torch.ones(2, 3))


def model_calls() -> Iterator[Call]:
    layout = Layout("rows", [Slice("f", 0, 2), Slice("g", 0, 2)])
    yield models.TableSettings, {"admission": MinCount(2), "eviction": [TTL(5)]}
    yield models.EmbeddingConfig, {"features": {"f": Mean(), "g": Mean()}, "tables": {"f": "g"}}
    yield from methods(embeddings, {"*": {"feature": "f", "layouts": [layout]}})
    yield models.build_model, {"name": "deepfm", "embeddings": embeddings()}
    config: Arguments = {"embeddings": embeddings(), "num_dense": 3}
    for kind, more in ((models.DeepFM, {}), (models.DLRM, {}), (models.DCNv2, {}), (models.DIN, _DIN)):
        yield kind, config | more
        yield from methods(partial(kind, **config, **more), partial(_model_methods, more.values()))
    yield models.forward_batch, {"model": models.DeepFM(**config), "batch": batch("f", "g")}


_DIN = {"target": "f", "history": "h"}


def _model_methods(names: Iterable[str], model: models.Model) -> Given:
    given = batch("f", "g", *names)
    values: Arguments = {"features": given.features, "dense": given.dense, "time": None}
    return {"*": values | {"rows": model.embed(given.features, None)}}


# ---- training


def run_config(**flags: Any) -> training.RunConfig:
    options = {"num_batches": 2}
    return training.RunConfig().changed(
        data_kind="synthetic", data_batch_size=4, data_options=options, model_dim=2, **flags
    )


def training_calls() -> Iterator[Call]:
    yield from calls(training.DataConfig, training.ModelConfig, training.TrainConfig)
    config = run_config()
    yield training.RunConfig, {}
    Path("run.toml").write_text("[train]\nepochs = 2\n")
    given: Arguments = {"data": config.to_dict(), "path": Path("run.toml"), "wanted": config}
    yield from methods(run_config, {"*": given, "resumed": {"changes": {"epochs": 2}}})
    yield training.open_source, {"config": config}
    Path("x.csv").write_text("user,label\n1,0\n3,1\n")
    schema = {"features": {"user": "user"}, "label": "label"}
    files = training.DataConfig(kind="csv", schema=schema, batch_size=2)
    yield training.open_reader, {"config": files, "path": Path("x.csv")}
    source = training.open_source(config)
    model = models.DeepFM(models.EmbeddingConfig(source.train.feature_names, dim=2))
    yield training.evaluate, {"model": model, "reader": source.train}
    yield training.Run, {"config": config, "directory": Path("run"), "start_over": True}
    training.Run(config, "trained", start_over=True).train()
    yield training.load_trained, {"path": Path("trained")}
    made = partial(training.Run, config, Path("run"), start_over=True)
    more = {"base": Path("trained"), "directory": Path("run"), "config": config, "start_over": True}
    yield from methods(made, {"resume": {"directory": Path("trained")}, "continue_from": more})
    yield from methods(training.Tracker, {"*": {"metrics": {"loss": 0.5}, "values": {"a": [1.0]}}})
    yield training.Tracker, {}
    yield trackers.PrometheusTracker, {"address": "127.0.0.1:0"}
    yield training.Watcher, {}
    given = {"samples": 1, "loss": 0.5, "record": {}, "best": True, "report": None, "rows": 1, "pushed": None}
    yield from methods(training.Watcher, {"*": given})
    yield from methods(lambda: training.evaluate(model, source.test))
