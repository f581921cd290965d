"""Files of an earlier version are loaded with the content they were written with, and written alike.

`write.py` makes them and says what is in them. If a test fails after a change, the change breaks files that
users have; see there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import EmbeddingCollection, Ragged, checkpoint
from megalith.table import Chunk, Table
from tests.golden import write
from tests.golden.write import FILES, ids

pytest.importorskip("grpc")
pytest.importorskip("obstore")


# ---- the same bytes


def contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("name", list(write.WRITERS))
def test_the_same_content_is_written_with_the_same_bytes(name: str, tmp_path: Path) -> None:
    if (
        name in write.OF_TORCH
        and torch.__version__.partition("+")[0] != (FILES / "torch").read_text().strip()
    ):
        pytest.skip("another version of torch writes these bytes")

    write.WRITERS[name](tmp_path / name)

    written, golden = contents(tmp_path / name), contents(FILES / name)
    if name == "run":  # a config has new keys whenever a run has new options
        given, before = (json.loads(each.pop("config.json")) for each in (written, golden))
        assert all(given[section].items() >= before[section].items() for section in before)
    if name == "payloads":
        same_update(*(each.pop(f"payloads/{write.DCT}/1/1.gather") for each in (written, golden)))
    assert written.keys() == golden.keys()
    assert [each for each in golden if written[each] != golden[each]] == []


def same_update(written: bytes, golden: bytes) -> None:
    from megalith.gather import decompress

    ours, theirs = (decompress(write.opened(data))["w"] for data in (written, golden))
    torch.testing.assert_close(ours, theirs)


# ---- checkpoints


def rows_of(chunks: Iterable[Chunk]) -> dict[int, list[Any]]:
    """Everything of each row, by id."""
    found: dict[int, list[Any]] = {}
    for each in chunks:
        counts = [x for x in (each.count, each.step) if x is not None]
        columns = [each.rows, *(each.state[key] for key in sorted(each.state)), each.time, *counts]
        for n, id in enumerate(each.ids.tolist()):
            assert id not in found
            found[id] = [column[n].tolist() for column in columns]
    return found


def whole(table: Table) -> dict[int, list[Any]]:
    return rows_of(table.scan())


def table_of(model: EmbeddingCollection, name: str) -> Table:
    return model.shards.local[name]


def test_rows_and_states_of_every_optimizer_are_loaded() -> None:
    tables = write.optimizer_tables()
    model = write.collection(tables)

    report = checkpoint.load(model, FILES / "optimizers")

    assert report.tables.keys() == {config.name for config in tables}
    for number, config in enumerate(tables):
        assert whole(table_of(model, config.name)) == rows_of([write.chunk(config, write.IDS, number)])
    assert checkpoint.verify(FILES / "optimizers").problems == []


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_segments_of_every_precision_are_loaded(precision: str) -> None:
    tables = write.segment_tables()
    model = write.collection(tables)

    checkpoint.load(model, FILES / "segments" / precision)

    for number, config in enumerate(tables[:-1]):
        assert whole(table_of(model, config.name)) == rows_of([write.chunk(config, write.IDS, number)])
    assert len(table_of(model, "empty")) == 0


@pytest.mark.parametrize(("name", "steps"), [("base", 1), ("deltas", 4), ("compacted", 4)])
def test_a_training_is_continued_where_it_was_saved(name: str, steps: int) -> None:
    model, optimizer = write.new_training()

    report = checkpoint.load(model, FILES / "training" / name, optimizer=optimizer)

    expected, expected_optimizer = write.trained(steps)
    for _ in range(2):  # as loaded, and after one more step
        for table in ("counted", "plain"):
            assert whole(model.table(table)) == whole(expected.table(table))
            pending, counts = model.table(table).pending()
            there, there_counts = expected.table(table).pending()
            assert dict(zip(pending.tolist(), counts.tolist(), strict=True)) == dict(
                zip(there.tolist(), there_counts.tolist(), strict=True)
            )
        assert model.embeddings.global_step == expected.embeddings.global_step
        for key, value in expected.state_dict().items():
            if key.startswith(("dense.", "tied.", "scale")):
                assert torch.equal(model.state_dict()[key], value), key
        write.train(model, optimizer, 9)
        write.train(expected, expected_optimizer, 9)
    assert report.progress == (write.PROGRESS if steps == 4 else {})
    assert checkpoint.verify(FILES / "training" / name).problems == []


def test_what_the_training_has_saved() -> None:
    """Numbers written out, independent of the model that is trained again."""
    model, optimizer = write.new_training()
    checkpoint.load(model, FILES / "training" / "deltas", optimizer=optimizer)

    assert set(whole(model.table("plain"))) == {1, 2, 4, 5, 6, 7, 2**62}
    assert set(whole(model.table("counted"))) == {1, 2, 2**62}
    unadmitted, counts = model.table("counted").pending()
    assert dict(zip(unadmitted.tolist(), counts.tolist(), strict=True)) == {4: 1, 5: 1, 6: 1, 7: 1}


@pytest.mark.parametrize("name", [*write.ROUTERS, "resharded"])
def test_rows_of_ranks_are_loaded(name: str) -> None:
    from megalith.routing import Router
    from tests.checkpoint.logical_ranks import new_models, on_all

    router = write.ROUTERS.get(name, Router("roundrobin", 3))
    saved = write.ROUTERS.get(name, write.ROUTERS["roundrobin"])
    number = list(write.ROUTERS).index(name) + 1 if name in write.ROUTERS else 1
    models = new_models(router)

    on_all(models, lambda model: checkpoint.load(model, FILES / "ranks" / name))

    config = models[0].table.config
    parts = [write.RANK_IDS[saved.owner(write.RANK_IDS) == rank] for rank in range(saved.num_shards)]
    expected = rows_of(write.chunk(config, part, number) for part in parts)
    for rank, model in enumerate(models):
        own = {id for id in expected if int(router.owner(ids(id))) == rank}
        assert whole(model.table) == {id: expected[id] for id in own}
    assert checkpoint.verify(FILES / "ranks" / name).problems == []


# ---- exports and online sync


def served_rows(servable: Any, table: str, of: Tensor) -> list[list[float]]:
    found: list[list[float]] = servable.lookup(table, of).tolist()
    return found


def test_an_exported_model_computes_the_same_scores() -> None:
    from megalith.serving import Servable

    servable = Servable(FILES / "exports" / "model" / "5")
    config = write.wire_model()[1].shards.configs
    rows = write.chunk(config["user"], write.EXPORT_IDS).rows
    assert servable.lookup("user", write.EXPORT_IDS).tolist() == rows.tolist()
    assert servable.lookup("user", ids(999)).tolist() == [[0.0, 0.0]]

    # One segment each of float32, fixed point with steps of 1/128, and one bit of amplitude 1/2.
    trained = write.chunk(config["item"], write.EXPORT_IDS, 1).rows
    items = servable.lookup("item", write.EXPORT_IDS)
    assert items[:, 0].tolist() == trained[:, 0].tolist()
    assert items[:, 1:4].tolist() == trained[:, 1:4].clamp(-1.0, 127 / 128).tolist()
    assert items[:, 4:].abs().unique().numel() == 1
    assert (items[:, 4:] * trained[:, 4:] >= 0).all()

    features = {
        "user": Ragged.from_lists([[1], [2, 3], []]),
        "item": Ragged.from_lists([[-5], [7], [999]]),
        "recent": Ragged.from_lists([[], [4], [5, 6, 7]]),  # the third of them is cut off
    }
    pooled = torch.stack(
        [
            torch.cat([rows[4], items[1]]),
            torch.cat([rows[5] + rows[6], items[10]]),
            torch.zeros(8),
        ]
    )
    lists = torch.stack([torch.zeros(()), rows[7].sum(), rows[8:10].sum()])
    scores = pooled @ write.eighths((8,)) + 0.125 + lists
    torch.testing.assert_close(servable.predict(features)["score"], scores)
    servable.close()


def test_an_exported_model_in_parts_computes_the_same_scores() -> None:
    from megalith.serving import Servable

    root = FILES / "exports" / "parts"
    parts = [Servable(root / f"ps_{number}" / "5") for number in range(2)]

    def fetch(wanted: Any) -> dict[str, Tensor]:
        found = {}
        for name, each in wanted.items():
            rows: dict[int, Tensor] = {}
            for number, part in enumerate(parts):
                own = each[part.signature.tables[name].router().owner(each) == number]
                rows |= dict(zip(own.tolist(), part.lookup(name, own), strict=True))
            found[name] = torch.stack([rows[id] for id in each.tolist()])
        return found

    entry, whole_model = (
        Servable(root / "entry" / "5", fetch=fetch),
        Servable(FILES / "exports" / "model" / "5"),
    )
    features = {"user": write.EXPORT_IDS, "item": write.EXPORT_IDS.flip(0), "recent": write.EXPORT_IDS}
    assert torch.equal(entry.predict(features)["score"], whole_model.predict(features)["score"])
    for servable in (entry, whole_model, *parts):
        servable.close()


@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
def test_exported_parts_are_served(precision: str) -> None:
    from megalith import SGD, TableConfig
    from megalith.serving import Servable

    rows = write.chunk(TableConfig("plain", dim=3, optimizer=SGD(0.125)), write.EXPORT_IDS).rows
    found = 0
    for part in range(2):
        servable = Servable(FILES / "exports" / precision / f"ps_{part}" / "1")
        owner = servable.signature.tables["plain"].router().owner(write.EXPORT_IDS)
        served = servable.lookup("plain", write.EXPORT_IDS[owner == part])
        tolerance = 4 / 127 / 2 if precision == "int8" else 0.0
        torch.testing.assert_close(served, rows[owner == part], rtol=0, atol=tolerance)
        found += served.shape[0]
        servable.close()
    assert found == write.EXPORT_IDS.numel()


@pytest.mark.parametrize("signature", ["hashtable_assign", "raw_assign"])
def test_messages_of_a_publisher_are_applied(signature: str) -> None:
    from megalith.serving import Servable, Subscriber
    from megalith.serving.proto.message_types import PredictRequest
    from megalith.serving.proto.tf_tensors import from_tensor_protos

    folder = FILES / "messages" / signature
    servable = Servable(FILES / "exports" / "model" / "5")
    subscriber = Subscriber(servable)
    headers = json.loads((folder / "headers.json").read_text())
    messages = sorted(folder.glob("*.bin"), key=lambda path: int(path.name.partition("-")[0]))

    for path, header in zip(messages, headers, strict=True):
        request = PredictRequest.FromString(path.read_bytes())
        assert request.model_spec.name == "golden"
        subscriber.handle(request.model_spec.signature_name, from_tensor_protos(request.inputs), header)

    assert served_rows(servable, "user", ids(1, 100)) == write.eighths((2, 2), 9).tolist()
    assert served_rows(servable, "user", ids(3)) == [[0.0, 0.0]]
    assert served_rows(servable, "item", ids(2))[0][0] == float(write.eighths((1, 6), 11)[0, 0])
    (bias,) = [weight for name, weight in servable.dense_weights.items() if name.endswith("bias")]
    assert bias.tolist() == [0.5]
    servable.close()


# ---- gather


@pytest.mark.parametrize(("folder", "states"), [("gather", True), ("earlier/gather", False)])
def test_payloads_and_artifacts_are_read(folder: str, states: bool) -> None:
    """Earlier: payloads of version 1, which do not state the weights, and manifests of version 2."""
    from megalith.gather import (
        GatherPlan,
        OuterUpdate,
        catch_up,
        decompress,
        gather,
        open_object_store,
        peek,
        read_artifact_manifest,
    )

    store, schema = open_object_store(FILES / folder), write.gather_schema(users=3)
    plan = GatherPlan(run=write.RUN, window=1, schema=schema, primary=write.UIDS)
    result = gather(plan, schema, {"default": store})
    assert result.uids == write.UIDS
    for uid, payload in result.payloads.items():
        header = peek(store, f"payloads/{write.RUN}/1/{uid}.gather")
        assert (header.label.uid, header.label.global_step) == (uid, 100 + uid)
        assert header.label.metadata == {"host": "a", "rows": uid}
        before = schema.fingerprint(write.gather_weights()).hash
        assert header.label.weights == (before if states else None)
        for name, update in decompress(payload).items():
            assert torch.equal(update, write.peer_update(uid)[name]), name
        sent, rows = write.peer_rows(uid)
        assert payload.ids(0, 0, 3).tolist() == sent.tolist()
        assert payload.rows(0, 0, 3).tolist() == rows.tolist()
    result.close()

    weights = write.gather_weights()
    done = catch_up(
        store,
        weights,
        OuterUpdate(schema),
        run=write.RUN,
        tables=lambda *_: None,
    )
    assert done == (1, 3)  # it compares the weights with the hashes of the files
    manifest = read_artifact_manifest(store, write.RUN, 3)
    assert manifest is not None
    assert manifest.uids == write.UIDS[1:]


@pytest.mark.parametrize("bins", [16, 256])
def test_payloads_with_codes_of_every_width_are_read(bins: int) -> None:
    from megalith.gather import decompress, open_object_store, peek

    store = open_object_store(FILES / "payloads")
    header = peek(store, f"payloads/bins/{bins}/1.gather")
    assert header.schema == write.bins_schema(bins)
    data = (FILES / "payloads" / "payloads" / "bins" / str(bins) / "1.gather").read_bytes()
    assert decompress(write.opened(data))["w"].tolist() == write.bins_update()["w"].tolist()


def test_objects_for_templar_are_read() -> None:
    from megalith.compat.templar import read_aggregator, read_payload
    from megalith.gather import decompress

    schema = write.gather_schema(templar=True)
    data = (FILES / "templar" / "gradient.pt").read_bytes()
    payloads: Any = {1: read_payload(data, schema, run=write.RUN, window=1, uid=1)}
    results = [payloads]
    for folder in ("templar", "earlier/templar"):  # the first version lacked the nesting of Templar
        data = (FILES / folder / "aggregator.pt").read_bytes()
        results.append(read_aggregator(data, schema, run=write.RUN, window=1).payloads)
        assert tuple(results[-1]) == write.UIDS
    for uid, payload in (pair for each in results for pair in each.items()):
        for name, update in decompress(payload).items():
            assert torch.equal(update, write.peer_update(uid)[name]), name


# ---- parameter servers


def logged_rows(space: Any) -> dict[int, list[float]]:
    chunks = space.part.shards.scan("t")
    return {id: row for each in chunks for id, row in zip(each.ids.tolist(), each.rows.tolist(), strict=True)}


def test_a_server_reads_its_log(tmp_path: Path) -> None:
    g = write.eighths((3, 2), 4) * 0.5 * 0.125  # scale and learning rate
    pushed = {1: -g[0], 2: -g[1] - g[0], 2**62: -g[2], 3: -g[1], 4: -g[2]}
    shutil.copytree(FILES / "log", tmp_path / "log")

    space = write.log_space(tmp_path / "log")

    found = logged_rows(space)
    assert found == {id: row.tolist() for id, row in pushed.items()}


def test_a_server_reads_its_log_from_a_save_on(tmp_path: Path) -> None:
    g = write.eighths((3, 2), 4) * 0.5 * 0.125
    shutil.copytree(FILES / "log", tmp_path / "log")
    asked = []

    def restore(part: Any, place: Any, *, only: str) -> str:
        asked.append(place)
        return only

    space = write.log_space(tmp_path / "log", restore)

    found = logged_rows(space)
    assert found == {id: (-g[n]).tolist() for n, id in enumerate((2, 3, 4))}
    assert asked == [{"path": "here"}]


# ---- other files


@pytest.mark.parametrize("name", ["length", "tfrecord", "headers"])
def test_records_are_read(name: str) -> None:
    from megalith.data.record_files import HEADERS, RecordFile

    framing: Any = "tfrecord" if name == "tfrecord" else "length"
    header = list(HEADERS) if name == "headers" else []
    records = RecordFile(FILES / "records" / f"{name}.records", framing, header=header).read()
    assert [record.message for record in records] == write.RECORDS


def test_files_of_runs_and_servers_are_read(tmp_path: Path) -> None:
    from megalith.serving import read_labels
    from megalith.serving.discovery import FileDiscovery, Replica
    from megalith.serving.discovery.zookeeper import ContainerServiceInfo
    from megalith.training import RunConfig
    from megalith.training.id_frequencies import IdFrequencies

    root = FILES / "run"
    loaded = IdFrequencies.load(root / "frequencies", 3)
    assert loaded.summary(5) == json.loads((root / "frequencies.json").read_text())
    for folder in (root, FILES / "labels"):  # the second has the file before labels.json
        assert read_labels(folder) == write.LABELS
    for service, replica in write.SERVERS.items():
        assert FileDiscovery(root / "servers.json").replicas(service) == (Replica(**replica),)
    container = ContainerServiceInfo.from_json((root / "container.json").read_bytes())
    assert container == ContainerServiceInfo(**write.CONTAINER)
    config = RunConfig.from_dict(json.loads((root / "config.json").read_text()))
    assert config == RunConfig.from_dict(write.RUN_CONFIG)
