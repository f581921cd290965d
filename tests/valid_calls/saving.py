"""Calls of checkpoints, object stores and importers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count as count_up
from pathlib import Path

import torch

from megalith import TableConfig, checkpoint
from megalith.checkpoint.importers import import_torch
from megalith.compat.dynamicemb import export_dynamicemb, import_dynamicemb
from megalith.compat.monolith import import_monolith
from megalith.compat.torchrec import export_torchrec, import_torchrec
from megalith.table import SGD
from tests.compat.dynamicemb.test_dump_importer import dump
from tests.compat.importing import collection, entry, sgd, tfrecords, write
from tests.valid_calls.core import Model
from tests.valid_calls.sweep import Call, Fresh, Given, calls, count, methods


def checkpoint_calls() -> Iterator[Call]:
    model, path = Model(), Path("saved")
    optimizer = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    checkpoint.save(model, path, optimizer=optimizer)
    saved = {"model": model, "optimizer": optimizer, "progress": {"epoch": 1}}
    yield checkpoint.save, {**saved, "path": Path("other"), "deltas": False}
    yield checkpoint.save_delta, {**saved, "path": path}
    yield checkpoint.async_save, {**saved, "path": Path("another")}
    yield checkpoint.load, {"model": model, "path": path, "optimizer": optimizer, "rename": {}}
    yield checkpoint.diff, {"before": path, "after": path}
    yield checkpoint.export, {"path": path, "out": Path("rows"), "tables": ["a"]}
    yield checkpoint.recovery, {"directory": path, "log": "sync"}
    yield checkpoint.reshard, {"path": path, "to": Path("resharded"), "num_shards": 2}
    readers = checkpoint.find_checkpoints, checkpoint.read_manifest, checkpoint.verify, checkpoint.compact
    yield from calls(*readers, path=path)
    yield from calls(checkpoint.rng_state, checkpoint.set_rng_state, state=checkpoint.rng_state())
    yield checkpoint.Rotation, {"path": Path("many"), "keep_last": 2, "keep_every": 10}
    steps = {"path": {"step": 1}, "save": {"model": Model()}, "async_save": {"model": Model()}}
    yield from methods(lambda: checkpoint.Rotation(Path("many")), steps)
    text = {"text": checkpoint.read_manifest(path).to_json(), "where": "here"}
    yield from methods(lambda: checkpoint.read_manifest(path), {"from_json": text})
    handle = checkpoint.async_save(Model(), Path("one"))
    handle.wait()
    yield from methods(lambda: handle)


def store_calls() -> Iterator[Call]:
    Path("objects").mkdir(exist_ok=True)
    yield checkpoint.ObjectStore, {"url": "memory:///"}
    yield checkpoint.ObjectStore, {"url": Path("objects").absolute().as_uri()}
    data = b"abcd"
    Path("local").write_bytes(data)

    def made() -> checkpoint.ObjectStore:
        store = checkpoint.ObjectStore("memory:///")
        store.write("x", [data])
        return store

    given: Given = {
        "*": {"name": "x", "key": "x", "data": data, "parts": [data], "size": 4, "start": 0, "length": 4},
        "flush": {"names": ["x"]},
        "upload": {"file": Path("local")},
        "read_whole": {"limit": 100},
        "inside": {"folder": "f"},
        "get": {"sink": count},
        "list": {"prefix": ""},
    }
    yield from methods(made, given)


def importer_calls() -> Iterator[Call]:
    into = {"collection": Fresh(lambda: collection(TableConfig("t", dim=2, optimizer=SGD(0.1))))}
    weights = {"state_dict": {"w": torch.ones(3, 2)}, "tables": {"t": "w"}, "optimizer_state": {"t": {}}}
    yield import_torch, into | weights
    yield import_dynamicemb, into | {"directory": dump(Path("dump").absolute(), [[1, 2]])}
    numbers = count_up()
    exported = {
        "directory": Fresh(lambda: Path(f"exported-{next(numbers)}")),
        "ranks": 2,
        "dist_type": "roundrobin",
    }
    yield export_dynamicemb, into | exported | {"num_embeddings": {"t": 9}, "score": "lru"}
    torchrec = {"embeddings.t.weight": torch.ones(3, 2)}
    yield import_torchrec, into | {"state_dict": torchrec, "tables": {"t": "t"}, "optimizer_state": {"t": {}}}
    yield export_torchrec, into | {"state_dict": torchrec, "tables": {"t": "t"}}
    assets = Path("model.ckpt-7.assets")
    write(assets / "t-00000-of-00001", tfrecords(entry(1, (1, 2), sgd())))
    yield import_monolith, into | {"path": assets}
