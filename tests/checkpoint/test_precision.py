"""Checkpoints of narrow rows: stored in 16 bits, exact, and loadable into tables of another precision."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalith import (
    SGD,
    Adagrad,
    EmbeddingCollection,
    Feature,
    FixedPoint,
    OneBit,
    Segment,
    TableConfig,
    checkpoint,
)
from megalith.checkpoint.saved_rows import read_tensors
from megalith.errors import UsageError
from megalith.reporting.inspection import summarize
from megalith.storage.store import open_store
from megalith.table.rounding import DTYPES
from tests.table.support import assert_same_bits, assert_same_tables, dyadic, whole

IDS = torch.arange(50)


def make_model(precision: str, engine: str = "cpu") -> EmbeddingCollection:
    if precision == "mixed":
        segments = [Segment(3, optimizer=SGD(0.1), precision="float16"), Segment(4, optimizer=Adagrad(0.1))]
        config = TableConfig("t", segments=segments)
    else:
        config = TableConfig("t", dim=7, optimizer=Adagrad(0.1), precision=precision)
    return EmbeddingCollection([config], [Feature("t", "t")], engine=engine)


def trained(precision: str) -> EmbeddingCollection:
    model = make_model(precision)
    model.tables["t"].apply_gradients(IDS, dyadic(1, 50, 7), step=0, time=3)
    return model


def stored_dtypes(path: Path) -> set[torch.dtype]:
    manifest = checkpoint.read_manifest(path)
    store = open_store(path)
    entries = manifest.tables()["t"]
    return {read_tensors(store, piece.file)["rows"].dtype for entry in entries for piece in entry.pieces}


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16", "mixed"])
@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_rows_are_stored_in_their_precision_and_restored_exactly(
    tmp_path: Path, precision: str, engine: str
) -> None:
    model, loaded = trained(precision), make_model(precision, engine)
    wanted = torch.float32 if precision == "mixed" else DTYPES[precision]

    checkpoint.save(model, tmp_path)
    model.tables["t"].apply_gradients(IDS[:9], dyadic(2, 9, 7), step=1, time=4)
    checkpoint.save_delta(model, tmp_path)
    assert stored_dtypes(tmp_path) == {wanted}
    checkpoint.load(loaded, tmp_path)
    assert_same_tables(whole(loaded.tables["t"]), whole(model.tables["t"]))

    checkpoint.compact(tmp_path)
    assert stored_dtypes(tmp_path) == {wanted}
    again = make_model(precision, engine)
    checkpoint.load(again, tmp_path)
    assert_same_tables(whole(again.tables["t"]), whole(model.tables["t"]))
    assert not checkpoint.verify(tmp_path).problems


def test_a_checkpoint_loads_into_tables_of_another_precision(tmp_path: Path) -> None:
    wide, narrow = trained("float32"), trained("bfloat16")
    checkpoint.save(wide, tmp_path / "wide")
    checkpoint.save(narrow, tmp_path / "narrow")
    to_narrow, to_wide = make_model("bfloat16"), make_model("float32")

    checkpoint.load(to_narrow, tmp_path / "wide")
    checkpoint.load(to_wide, tmp_path / "narrow")

    rows = wide.tables["t"].lookup(IDS)
    assert_same_bits(to_narrow.tables["t"].lookup(IDS), rows.bfloat16().float())
    assert_same_bits(to_wide.tables["t"].lookup(IDS), narrow.tables["t"].lookup(IDS))


def test_a_delta_does_not_continue_a_checkpoint_whose_rows_were_rounded(tmp_path: Path) -> None:
    checkpoint.save(trained("float32"), tmp_path / "wide")
    checkpoint.save(trained("bfloat16"), tmp_path / "narrow")
    rounded, exact = make_model("bfloat16"), make_model("float32")
    checkpoint.load(rounded, tmp_path / "wide")
    checkpoint.load(exact, tmp_path / "narrow")

    with pytest.raises(UsageError, match="save"):
        checkpoint.save_delta(rounded, tmp_path / "wide")
    checkpoint.save_delta(exact, tmp_path / "narrow")


def test_rounding_is_recorded_and_a_manifest_without_it_loads(tmp_path: Path) -> None:
    config = TableConfig("t", dim=7, optimizer=Adagrad(0.1), precision="bfloat16", rounding="stochastic")
    model = EmbeddingCollection([config], [Feature("t", "t")])
    model.tables["t"].apply_gradients(IDS, dyadic(1, 50, 7), step=0, time=3)
    checkpoint.save(model, tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    segment = manifest["collections"][""]["tables"]["t"]["segments"][0]
    assert (segment["precision"], segment["rounding"]) == ("bfloat16", "stochastic")

    del segment["rounding"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    loaded = EmbeddingCollection([config], [Feature("t", "t")])
    checkpoint.load(loaded, tmp_path)

    assert_same_tables(whole(loaded.tables["t"]), whole(model.tables["t"]))
    assert summarize(checkpoint.read_manifest(tmp_path))[0].segments[0].rounding == "nearest"


SERVED = [
    Segment(3, optimizer=Adagrad(0.1), serving=FixedPoint(0.5)),
    Segment(4, optimizer=Adagrad(0.1), serving=OneBit(0.25, step_size=1)),
]


def test_serving_precisions_are_recorded_and_stored_rows_are_saved(tmp_path: Path) -> None:
    config = TableConfig("t", segments=SERVED)
    model, loaded, plain = (
        EmbeddingCollection([each], [Feature("t", "t")], engine=engine)
        for each, engine in (
            (config, "cpu"),
            (config, "reference"),
            (TableConfig("t", segments=[replace(s, serving=None) for s in SERVED]), "cpu"),
        )
    )
    model({"t": IDS})["t"].square().sum().backward()
    checkpoint.save(model, tmp_path)
    model({"t": IDS[:9]})["t"].square().sum().backward()
    checkpoint.save_delta(model, tmp_path)
    stored = whole(model.tables["t"]).rows
    manifest = checkpoint.read_manifest(tmp_path)
    described = [segment["serving"] for segment in manifest.tables()["t"][0].segments]
    assert described[0] == "FixedPoint(range=0.5)"
    assert described[1].startswith("OneBit(amplitude=0.25,")
    assert summarize(manifest)[0].segments[0].serving == described[0]

    checkpoint.load(loaded, tmp_path)
    checkpoint.load(plain, tmp_path)  # the view belongs to the config, as policies do

    assert_same_tables(whole(loaded.tables["t"]), whole(model.tables["t"]))
    assert_same_bits(plain.tables["t"].lookup(IDS), stored)
    assert_same_bits(loaded({"t": IDS})["t"].detach(), model({"t": IDS})["t"].detach())  # the scale of step 2
    assert_same_bits(loaded.eval()({"t": IDS})["t"], model.tables["t"].lookup(IDS))
    again = EmbeddingCollection([config], [Feature("t", "t")])
    again.load_state_dict(model.state_dict())
    assert_same_bits(whole(again.tables["t"]).rows, stored)


def test_a_requested_precision_wins_and_compaction_loses_nothing_more(tmp_path: Path) -> None:
    model, loaded = trained("bfloat16"), make_model("bfloat16")
    model.tables["t"].assign(IDS[:1], torch.full((1, 7), 1e-6))  # float16 stores it with fewer digits
    checkpoint.save(model, tmp_path, precision="float16")
    assert stored_dtypes(tmp_path) == {torch.float16}

    checkpoint.compact(tmp_path)
    checkpoint.load(loaded, tmp_path)

    expected = model.tables["t"].lookup(IDS).half().float().bfloat16().float()
    assert_same_bits(loaded.tables["t"].lookup(IDS), expected)


def test_a_state_dict_carries_narrow_rows_exactly() -> None:
    model, loaded = trained("bfloat16"), make_model("bfloat16", "reference")

    loaded.load_state_dict(model.state_dict())

    assert_same_tables(whole(loaded.tables["t"]), whole(model.tables["t"]))
