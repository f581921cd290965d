"""Writes the golden files: `python -m tests.golden.write` replaces tests/golden/files.

The files are what the first version with this test wrote. Later versions must load them, and write the same
bytes again; a change of a format needs a reason, a new version number of the format, and a reader of the old
files.

All numbers are multiples of 1/8 and the arithmetic on them is exact or one rounded operation, so that the
bytes are those of any CPU. Clocks, random ids and the version of Megalith are constants while a file is
written.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import megalith
from megalith import (
    FTRL,
    LAMB,
    SGD,
    TTL,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    AMSGrad,
    BatchSoftmax,
    Capacity,
    DelayCompensated,
    DynamicWdAdagrad,
    EmbeddingCollection,
    Feature,
    FirstN,
    FixedPoint,
    GroupAdagrad,
    GroupFTRL,
    Layout,
    Lion,
    LocalShards,
    MinCount,
    Momentum,
    MovingAverage,
    OneBit,
    Ragged,
    RMSProp,
    RMSPropV2,
    Router,
    RowWiseAdagrad,
    Segment,
    Slice,
    TableConfig,
    Zeros,
    checkpoint,
)
from megalith.checkpoint import Manifest
from megalith.distributed.dense_parameters import dense_parameters
from megalith.table import Chunk, Table

FILES = Path(__file__).parent / "files"
NOW = 1_800_000_000
"""Seconds since 1970 of every clock."""
SESSION = "0123456789abcdef0123456789abcdef"


# ---- constants instead of clocks and random ids


class FixedDatetime(datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Any:
        return datetime.fromtimestamp(NOW, tz)


@contextmanager
def constants(number: int = 1) -> Iterator[None]:
    """Every clock shows NOW, every random id is `number`, and Megalith is version 0.1.0."""
    with ExitStack() as patches:
        for module in list(sys.modules.values()):
            name = getattr(module, "__name__", "")
            if name.startswith("megalith.checkpoint") and vars(module).get("datetime") is datetime:
                patches.enter_context(mock.patch.object(module, "datetime", FixedDatetime))
        then = time.gmtime(NOW)
        for owner, attribute, value in (
            (uuid, "uuid4", lambda: uuid.UUID(int=number << 80 | number)),
            (time, "time", lambda: float(NOW)),
            (time, "time_ns", lambda: NOW * 10**9),
            (time, "gmtime", lambda *_: then),
        ):
            patches.enter_context(mock.patch.object(owner, attribute, value))
        patches.enter_context(mock.patch.object(megalith, "__version__", "0.1.0"))
        yield


# ---- numbers


def eighths(shape: Sequence[int], first: int = 0) -> Tensor:
    """Multiples of 1/8 from -4 to below 4, which float16 and bfloat16 hold too."""
    count = int(torch.tensor(shape).prod())
    return ((torch.arange(count) * 5 + first) % 64 - 32).reshape(*shape).float() / 8


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def chunk(config: TableConfig, of: Tensor, first: int = 0) -> Chunk:
    """Complete rows with different numbers everywhere; states are 0 or more."""
    n = of.numel()
    counts = (torch.arange(n) + 1, torch.arange(n) * 2 + 7) if config.counted else (None, None)
    return Chunk(
        of,
        eighths((n, config.dim), first),
        {
            column.key: eighths((n, column.end - column.start), first + i).abs()
            for i, column in enumerate(config.state_columns)
        },
        torch.arange(n) + 1_700_000_000 + first,
        *counts,
    )


def collection(configs: Sequence[TableConfig]) -> EmbeddingCollection:
    return EmbeddingCollection(configs, [Feature(c.name, c.name) for c in configs], seed=7)


def save(number: int, write: Callable[..., Manifest], *args: Any, **options: Any) -> Manifest:
    """Saves with an id of its own."""
    with constants(number):
        return write(*args, **options)


# ---- checkpoints

IDS = ids(-(2**63), -5, 0, 1, 2**62 + 3, 2**63 - 1)
OPTIMIZERS = {
    "adadelta": Adadelta(),
    "adagrad": Adagrad(0.125),
    "adam": Adam(0.125),
    "adam_row": Adam(0.125, bias_correction="row"),
    "adamw": AdamW(0.125),
    "amsgrad": AMSGrad(0.125),
    "delay_compensated": DelayCompensated(Adagrad(0.125)),
    "dynamic_wd_adagrad": DynamicWdAdagrad(0.125),
    "ftrl": FTRL(0.5, l1=0.25, l2=0.125),
    "group_adagrad": GroupAdagrad(0.125),
    "group_ftrl": GroupFTRL(0.5),
    "lamb": LAMB(0.125),
    "lion": Lion(0.125),
    "momentum": Momentum(0.125, nesterov=True),
    "moving_average": MovingAverage(momentum=0.5),
    "rmsprop": RMSProp(0.125),
    "rmsprop_v2": RMSPropV2(0.125),
    "rowwise_adagrad": RowWiseAdagrad(0.125),
    "sgd": SGD(0.125),
}


def optimizer_tables() -> list[TableConfig]:
    """A table for each optimizer."""
    tables = [TableConfig(name, dim=2, optimizer=each) for name, each in OPTIMIZERS.items()]
    return [*tables, TableConfig("batch_softmax", dim=1, optimizer=BatchSoftmax(0.125))]


def write_optimizers(root: Path) -> None:
    """Rows and states of every optimizer."""
    tables = optimizer_tables()
    model = collection(tables)
    for number, config in enumerate(tables):
        model.shards.restore(config.name, chunk(config, IDS, number))
    save(1, checkpoint.save, model, root, deltas=False)


def segment_tables() -> list[TableConfig]:
    """Tables whose segments differ in precision, serving precision and optimizer."""
    mixed = [
        Segment(1, optimizer=FTRL(0.5), precision="float32", serving="float32"),
        Segment(3, optimizer=SGD(0.125), precision="float16", serving=FixedPoint(1.0)),
        Segment(
            2, optimizer=Adagrad(0.125), precision="bfloat16", rounding="stochastic", serving=OneBit(0.5)
        ),
    ]
    return [
        TableConfig("mixed", segments=mixed, missing="zeros"),
        TableConfig("half", dim=3, optimizer=SGD(0.125), precision="float16"),
        TableConfig("brain", dim=2, optimizer=Momentum(0.125), precision="bfloat16"),
        TableConfig("empty", dim=2, optimizer=SGD(0.125)),
    ]


def write_segments(root: Path) -> None:
    """Segments and precisions; the same rows in each precision of a save."""
    tables = segment_tables()
    model = collection(tables)
    for number, config in enumerate(tables[:-1]):
        model.shards.restore(config.name, chunk(config, IDS, number))
    for number, precision in enumerate(("float32", "float16", "bfloat16"), 1):
        save(number, checkpoint.save, model, root / precision, precision=precision, deltas=False)


def policy_tables() -> list[TableConfig]:
    return [
        TableConfig(
            "counted",
            dim=2,
            optimizer=SGD(0.125),
            initializer=Zeros(),
            admission=MinCount(3, max_ids=100),
            eviction=[TTL(3600.0, per_slot={1: 60.0}), Capacity(50, score="lfu")],
        ),
        TableConfig("plain", dim=2, optimizer=SGD(0.125), initializer=Zeros()),
    ]


class Trained(nn.Module):
    """Two tables, one of them with policies, and a dense layer with a buffer and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = collection(policy_tables())
        self.dense = nn.Linear(4, 2)
        self.tied = self.dense
        self.register_buffer("scale", torch.tensor([0.5, 2.0], dtype=torch.float64))
        with torch.no_grad():
            self.dense.weight.copy_(eighths((2, 4)))
            self.dense.bias.copy_(eighths((2,), 3))

    def forward(self, batch: dict[str, Ragged], time: int) -> Tensor:
        rows = self.embeddings(batch, time=time)
        out: Tensor = self.dense(torch.cat([rows["counted"], rows["plain"]], 1))
        return out

    def table(self, name: str) -> Table:
        return self.embeddings.shards.local[name]


def new_training() -> tuple[Trained, torch.optim.Optimizer]:
    model = Trained()
    return model, torch.optim.SGD([weight for _, weight in dense_parameters(model)], lr=0.125, momentum=0.5)


def train(model: Trained, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A step whose gradients are exact: the loss is linear, and each row of the batch has one or two ids."""
    column = Ragged.from_lists([[1, 2], [2, 3 + step], [2**62]])
    optimizer.zero_grad()
    model({"counted": column, "plain": column}, 1_700_000_000 + step).sum().backward()
    optimizer.step()


PROGRESS = {"step": 3, "position": {"file": "part-0", "row": 7}, "names": ["ä", None, True, 0.5]}


def write_training(root: Path) -> None:
    """A trained model as a base and a chain of two deltas, and the same after `compact`."""
    model, optimizer = new_training()
    train(model, optimizer, 1)
    save(1, checkpoint.save, model, root / "base", optimizer=optimizer, progress={})
    train(model, optimizer, 2)
    root_deltas = root / "deltas"
    save(2, checkpoint.save, model, root_deltas, optimizer=optimizer, progress={"step": 2})
    train(model, optimizer, 3)
    model.embeddings.shards.remove({"plain": ids(1)})
    save(3, checkpoint.save_delta, model, root_deltas, optimizer=optimizer, progress=PROGRESS)
    train(model, optimizer, 4)
    save(4, checkpoint.save_delta, model, root_deltas, optimizer=optimizer, progress=PROGRESS)
    shutil.copytree(root_deltas, root / "compacted")
    save(5, checkpoint.compact, root / "compacted")


def trained(steps: int) -> tuple[Trained, torch.optim.Optimizer]:
    """The model after some steps, with the removal that comes after the third."""
    model, optimizer = new_training()
    for step in range(1, steps + 1):
        train(model, optimizer, step)
        if step == 3:
            model.embeddings.shards.remove({"plain": ids(1)})
    return model, optimizer


RANK_IDS = torch.cat([IDS, torch.arange(10, 20)])
ROUTERS = {
    "roundrobin": Router("roundrobin", 2),
    "hash_roundrobin": Router("hash_roundrobin", 2),
    "continuous": Router("continuous", 2, block_size=4, skip_first=True),
}


def write_ranks(root: Path) -> None:
    """A table over two ranks in every routing mode, and one of the checkpoints resharded to three."""
    from tests.checkpoint.logical_ranks import RankModel, new_models, on_all

    for number, (name, router) in enumerate(ROUTERS.items(), 1):
        models = new_models(router)

        def work(model: RankModel, number: int = number, name: str = name) -> None:
            model.table.restore(chunk(model.table.config, model.own(RANK_IDS), number))

        on_all(models, work)
        with constants(number):
            on_all(models, lambda model, name=name: checkpoint.save(model, root / name))  # type: ignore[misc]
    save(9, checkpoint.reshard, root / "roundrobin", root / "resharded", num_shards=3)


# ---- exports


def scored_model() -> nn.Module:
    """A model whose scores are exact: pooled rows, a linear layer."""

    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = EmbeddingCollection(
                [
                    TableConfig("user", dim=2, optimizer=SGD(0.125), initializer=Zeros(), missing="zeros"),
                    TableConfig("item", segments=segment_tables()[0].segments, missing="zeros"),
                ],
                [
                    Feature("user", "user"),
                    Feature("item", "item"),
                    Feature("recent", "user", FirstN(2)),
                ],
                layouts=[
                    Layout("all", [Slice("user", 0, 2), Slice("item", 0, 6)], kind="concat"),
                    Layout("list", [Slice("recent", 0, 2)], kind="none"),
                ],
            )
            self.dense = nn.Linear(8, 1)

        def forward(self, features: dict[str, Ragged]) -> Tensor:
            rows = self.embeddings(features)
            out: Tensor = self.dense(rows["all"])
            total: Tensor = out.squeeze(1) + rows["list"][0].sum((1, 2))
            return total

    model = Scored()
    with torch.no_grad():
        model.dense.weight.copy_(eighths((1, 8)))
        model.dense.bias.fill_(0.125)
    for number, name in enumerate(("user", "item")):
        config = model.embeddings.shards.configs[name]
        model.embeddings.shards.restore(name, chunk(config, EXPORT_IDS, number))
    return model.eval()


EXPORT_IDS = torch.cat([ids(-(2**63), -5, 2**63 - 1), torch.arange(20)])
SAVE = "golden-save"


def write_exports(root: Path) -> None:
    """A model alone and in parts, and rows without a model in each precision."""
    from megalith.serving import export_model
    from megalith.serving.export.exporter import Provenance

    model, source = scored_model(), Provenance(SAVE, 5)
    options: dict[str, Any] = {"name": "golden", "source": source, "joint_rows": False}
    with constants():
        export_model(model, root / "model", outputs=["score"], **options)
        export_model(model, root / "parts", outputs=["score"], num_shards=2, **options)
        for precision in ("float32", "float16", "int8"):
            shards = LocalShards(
                [TableConfig("plain", dim=3, optimizer=SGD(0.125), dist_type="hash_roundrobin")]
            )
            shards.restore("plain", chunk(shards.configs["plain"], EXPORT_IDS))
            export_model(
                shards,
                root / precision,
                name="golden",
                precision=precision,
                num_shards=2,
                version=1,
                source=source,
            )


# ---- online sync


def wire_model() -> tuple[nn.Module, EmbeddingCollection]:
    model = scored_model().train()
    embeddings = model.get_submodule("embeddings")
    assert isinstance(embeddings, EmbeddingCollection)
    return model, embeddings


def change(model: nn.Module, embeddings: EmbeddingCollection) -> None:
    """What is published: new, changed and removed rows, and a dense weight."""
    embeddings.shards.assign(
        {"user": (ids(1, 100), eighths((2, 2), 9)), "item": (ids(2), eighths((1, 6), 11))}
    )
    embeddings.shards.remove({"user": ids(3)})
    with torch.no_grad():
        model.get_parameter("dense.bias").fill_(0.5)


@contextmanager
def recording_server(subscriber: Any) -> Iterator[tuple[str, list[tuple[str, bytes, dict[str, str]]]]]:
    """A server that hands messages to a subscriber; yields its address and what it received."""
    import grpc

    from megalith.serving.proto.message_types import PredictRequest, PredictResponse
    from megalith.serving.proto.tf_tensors import from_tensor_protos, strings_to_tensor_proto, to_tensor_proto

    received: list[tuple[str, bytes, dict[str, str]]] = []

    def predict(data: bytes, context: Any) -> bytes:
        headers = {
            key: str(value) for key, value in context.invocation_metadata() if key.startswith("megalith-")
        }
        request = PredictRequest.FromString(data)
        name = request.model_spec.signature_name
        received.append((name, data, headers))
        response = PredictResponse()
        for key, value in subscriber.handle(name, from_tensor_protos(request.inputs), headers).items():
            proto = to_tensor_proto(value) if isinstance(value, Tensor) else strings_to_tensor_proto(value)
            response.outputs[key].CopyFrom(proto)
        answer: bytes = response.SerializeToString()
        return answer

    with ThreadPoolExecutor(1) as threads:  # one message at a time, so that their order is fixed
        server = grpc.server(threads)
        methods = {"Predict": grpc.unary_unary_rpc_method_handler(predict)}
        service = grpc.method_handlers_generic_handler("tensorflow.serving.PredictionService", methods)
        server.add_generic_rpc_handlers((service,))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield address, received
        finally:
            server.stop(None).wait()


def write_messages(root: Path) -> None:
    """What a publisher sends to a server, message by message, with both signatures."""
    from megalith.serving import Publisher, Servable, Subscriber
    from megalith.serving.discovery import StaticDiscovery

    with tempfile.TemporaryDirectory() as folder:
        write_exports(Path(folder))
        for signature in ("hashtable_assign", "raw_assign"):
            servable = Servable(Path(folder) / "model" / "5")
            model, embeddings = wire_model()
            with recording_server(Subscriber(servable)) as (address, received):
                publisher = Publisher(
                    model,
                    StaticDiscovery([address]),
                    model_name="golden",
                    interval=3600.0,
                    base=SAVE,
                    signature=signature,
                    session=SESSION,
                    session_number=77,
                )
                with publisher:
                    assert publisher.flush(30.0), publisher.report()
                    change(model, embeddings)
                    assert publisher.flush(30.0), publisher.report()
            (root / signature).mkdir(parents=True)
            position = Subscriber(servable).handle("sync_position", {}, {})
            (root / signature / "layout.json").write_bytes(bytes(position["layout"].item()))  # type: ignore[arg-type]
            servable.close()
            for number, (name, data, _) in enumerate(received):
                (root / signature / f"{number}-{name}.bin").write_bytes(data)
            headers = [headers for _, _, headers in received]
            for each in headers:
                if "megalith-complete" in each:  # a clock, which grpc needs too
                    each["megalith-complete"] = repr(float(NOW))
            write_json(root / signature / "headers.json", headers)


def write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")


# ---- gather

RUN = "golden"


def bins_schema(bins: int, *, dct: bool = False) -> Any:
    from megalith.gather import PayloadSchema

    return PayloadSchema.of(bins_update(), chunk=8, keep=8, bins=bins, dct=dct)


def bins_update() -> dict[str, Tensor]:
    """Few values in each chunk, two of them different."""
    update = torch.zeros(16, 16)
    update[::4, ::4] = torch.tensor([1.0, -2.0, 1.0, -2.0])
    return {"w": update}


def opened(data: bytes) -> Any:
    """A payload in memory."""
    from megalith.gather.payload import Payload
    from megalith.storage.bodies import MemoryBody

    return Payload.open(MemoryBody(data))


def write_payloads(root: Path) -> None:
    """Payloads with codes of 4 and 8 bits; those of `write_gather` have 2."""
    from megalith.gather import Label, compress, open_object_store, publish

    store = open_object_store(root)
    for bins in (16, 256):
        publish(store, compress(bins_update(), bins_schema(bins)), Label("bins", bins, 1))
    publish(store, compress(bins_update(), bins_schema(4, dct=True)), Label(DCT, 1, 1))


DCT = "dct"
"""The run whose payload has bytes that depend on the CPU: a cosine transform has many roundings."""


def gather_weights() -> dict[str, Tensor]:
    """Weights of several shapes; one has a prime number of lines, whose chunks are padded."""
    return {
        "layer.weight": eighths((8, 12)),
        "layer.bias": eighths((8,)),
        "odd": eighths((7, 4), 1),
        "scalar": torch.tensor(0.5),
    }


def gather_schema(*, templar: bool = False, **tables: int) -> Any:
    """The schema of the weights; Templar has no scalars and no padding."""
    from megalith.gather import PayloadSchema

    weights = gather_weights()
    if templar:
        weights = {name: weights[name] for name in ("layer.weight", "layer.bias")}
    return PayloadSchema.of(weights, chunk=4, keep=4, bins=4, tables=tables)


def peer_update(uid: int) -> dict[str, Tensor]:
    """An update with one or two large values in each chunk, so that few distinct values are sent."""
    update = {name: torch.zeros_like(weight) for name, weight in gather_weights().items()}
    update["layer.weight"][uid % 4 :: 4, uid % 3 :: 4] = 1.0
    update["layer.weight"][(uid + 1) % 4 :: 4, 1::4] = -0.5
    update["layer.bias"][uid % 4 :: 4] = 0.25
    update["odd"][uid % 3 :: 4, uid % 4] = 0.5
    update["scalar"] += 1.0
    return update


def peer_rows(uid: int) -> tuple[Tensor, Tensor]:
    return ids(-7, uid, 40 + uid), eighths((3, 3), uid)


def compressed(uid: int, schema: Any) -> Any:
    from megalith.gather import compress

    tables = {table.name: peer_rows(uid) for table in schema.tables}
    update = peer_update(uid)
    return compress({spec.name: update[spec.name] for spec in schema.parameters}, schema, tables=tables)


UIDS = (1, 2, 3)


def write_gather(root: Path) -> None:
    """Payloads of three peers, and the artifacts of a window, of one without an update, and of a third."""
    from megalith.gather import (
        GatherConfig,
        GatherPlan,
        Label,
        OuterUpdate,
        UpdateConfig,
        open_object_store,
        publish,
        run_window,
    )

    peers, artifacts = open_object_store(root), open_object_store(root)
    schema = gather_schema(users=3)
    weights, update = gather_weights(), OuterUpdate(schema)
    with constants():
        for window, uids, least in ((1, UIDS, 1), (2, UIDS[:1], 2), (3, UIDS[1:], 1)):
            for uid in uids:
                label = Label(
                    RUN,
                    window,
                    uid,
                    global_step=100 + uid,
                    metadata={"host": "a", "rows": uid},
                    weights=schema.fingerprint(weights).hash,
                )
                publish(peers, compressed(uid, schema), label)
            plan = GatherPlan(
                run=RUN,
                window=window,
                schema=schema,
                primary=uids,
                gather=GatherConfig(min_peers=least, deadline=30.0),
                update=UpdateConfig(optimizer="nesterov", lr=0.5, momentum=0.5, clip="none"),
            )
            stores = {"default": peers}
            run_window(plan, weights, update, stores, artifacts=artifacts, tables=lambda *_: None)


def write_templar(root: Path) -> None:
    """A gradient object and an aggregator object for Templar's nodes."""
    from megalith.compat.templar import write_aggregator, write_payload
    from megalith.gather import GatherPlan, Label, gather, open_object_store, publish

    schema = gather_schema(templar=True)
    root.mkdir(parents=True)
    (root / "gradient.pt").write_bytes(write_payload(compressed(1, schema), Label(RUN, 1, 1, global_step=9)))
    store = open_object_store("memory://")
    for uid in UIDS:
        publish(store, compressed(uid, schema), Label(RUN, 1, uid))
    plan = GatherPlan(run=RUN, window=1, schema=schema, primary=UIDS)
    result = gather(plan, schema, {"default": store})
    (root / "aggregator.pt").write_bytes(write_aggregator(result))
    result.close()


# ---- parameter servers

LOGGED = TableConfig("t", dim=2, optimizer=SGD(0.125), initializer=Zeros())


def log_writes() -> list[Any]:
    """Two pushes of three rows."""
    from megalith.ps.messages import ServerWrite

    grads = eighths((6,), 4).numpy().view("uint8")
    header = {"counts": [3], "step": 1, "time": 5, "scale": 0.5, "clip_norm": 0.0, "rates": {"t": [0.125]}}
    return [
        ServerWrite("push", header, {"ids": ids(1, 2, 2**62).numpy(), "grads": grads.view("uint8")}),
        ServerWrite(
            "push", {**header, "step": 2}, {"ids": ids(2, 3, 4).numpy(), "grads": grads.view("uint8")}
        ),
    ]


def log_space(folder: Path, restore: Callable[..., Any] = lambda *_, **__: None) -> Any:
    """A server that has read its log."""
    from megalith.ps.messages import SpaceSpec
    from megalith.ps.recovery import Recovery
    from megalith.ps.table_space import TableSpace

    recovery = Recovery(str(folder), "sync", restore)
    wires = ("float32", "float32")
    space = TableSpace(SpaceSpec([LOGGED], "cpu", 0, wires, False, None, 1, 5.0, "", recovery), 0, 1)
    space.recover(folder / "tables" / "server-0-of-1")
    space.join(0, "s")
    return space


def write_log(root: Path) -> None:
    """The log of a server: two segments with a record each, and the point of a save between them."""
    from megalith.ps.recovery import write_layout

    with constants():
        space = log_space(root)
        first, second = log_writes()
        asyncio.run(space.write(0, "s", 1, first))
        space.part.recovery.frozen("save-1", {"path": "here"})
        asyncio.run(space.write(0, "s", 2, second))
        write_layout(root / "tables" / "server-0-of-1", 1)


# ---- other files


def write_records(root: Path) -> None:
    """Files of length-prefixed messages."""
    from megalith.data.record_files import HEADERS, write_records

    root.mkdir(parents=True)
    for framing in ("length", "tfrecord"):
        with open(root / f"{framing}.records", "wb") as file:
            write_records(file, RECORDS, framing)
    with open(root / "headers.records", "wb") as file:
        write_records(file, RECORDS, "length", header=list(HEADERS))


RECORDS = [b"", b"one", bytes(range(256)) * 5]


def write_run(root: Path) -> None:
    """Files of a run and of a model server."""
    from megalith.data import Batch
    from megalith.serving import write_labels
    from megalith.serving.discovery import FileDiscovery, Replica
    from megalith.serving.discovery.zookeeper import ContainerServiceInfo
    from megalith.training import RunConfig
    from megalith.training.id_frequencies import IdFrequencies

    root.mkdir(parents=True)
    frequencies = IdFrequencies()
    column = Ragged.from_lists([[1, 1], [2**63 - 1, -5], []])
    frequencies.update(Batch({"user": column}, labels=torch.tensor([0.0, 1.0, 0.0])))
    frequencies.save(root / "frequencies", 3)
    frequencies.write(root / "frequencies.json", 5)
    write_labels(root, LABELS)
    discovery = FileDiscovery(root / "servers.json")
    for service, replica in SERVERS.items():
        discovery.register(service, Replica(**replica))
    for lock in root.glob(".*lock"):
        lock.unlink()
    (root / "container.json").write_bytes(ContainerServiceInfo(**CONTAINER).to_json())
    write_json(root / "config.json", RunConfig.from_dict(RUN_CONFIG).to_dict())


LABELS = {"stable": 3, "canary": 4}
SERVERS: dict[str, dict[str, Any]] = {
    "movies:entry": {"address": "127.0.0.1:8500"},
    "movies:ps_0": {"address": "127.0.0.1:8501", "replica_id": 2, "idc": "a", "cluster": "b"},
}
CONTAINER = {"grpc": "127.0.0.1:8500", "http": "127.0.0.1:8501", "idc": "a"}
RUN_CONFIG = {"data": {"kind": "synthetic"}, "train": {"lr": 0.125, "max_steps": 8}}


WRITERS: dict[str, Callable[[Path], None]] = {
    "optimizers": write_optimizers,
    "segments": write_segments,
    "training": write_training,
    "ranks": write_ranks,
    "exports": write_exports,
    "messages": write_messages,
    "gather": write_gather,
    "payloads": write_payloads,
    "templar": write_templar,
    "log": write_log,
    "records": write_records,
    "run": write_run,
}
"""What writes each folder of the golden files."""
OF_TORCH = {"exports", "training", "templar"}
"""Folders with bytes that torch writes: archives, settings of its optimizers. FILES/torch is its version."""


def main() -> None:
    torch.set_num_threads(1)
    FILES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or WRITERS:
        shutil.rmtree(FILES / name, ignore_errors=True)
        WRITERS[name](FILES / name)
        sizes = [path.stat().st_size for path in (FILES / name).rglob("*") if path.is_file()]
        print(f"{name}: {len(sizes)} files, {sum(sizes)} bytes")
    (FILES / "torch").write_text(torch.__version__.partition("+")[0] + "\n")


if __name__ == "__main__":
    main()
