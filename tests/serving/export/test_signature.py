"""signature.json: what is written is read, and any other content raises ExportError with a reason."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.checkpoint.manifest import Routing
from megalith.errors import ExportError, InputError
from megalith.nn import Feature, FirstN, Layout, Mean, Slice, Sqrtn, Sum
from megalith.serving.export.signature import ExportedTable, FeatureSpec, LayoutSpec, Signature, check_name
from megalith.storage.store import StoredFile
from tests.checkpoint.test_schema import problems

FILE = StoredFile("user.safetensors", 100, "crc32:00000000")


def example(**changes: Any) -> Signature:
    """A model of two features, one of them a history with a mask."""
    fields: dict[str, Any] = {
        "model": "movies",
        "version": 7,
        "part": "standalone",
        "sub_graph_num": 0,
        "base": "b",
        "step": 3,
        "created": "2025-01-01T00:00:00Z",
        "megalith": "0.1.0",
        "precision": "int8",
        "tables": {"user": ExportedTable((2, 3), (0.5, 0.25), Routing("roundrobin", 1), 4, FILE)},
        "features": (
            FeatureSpec("u", "user", "mean"),
            FeatureSpec("past", "user", "first_n", max_length=3, pad=-9, ids="xxhash64"),
        ),
        "layouts": (LayoutSpec("x", "concat", (("u", 0, 2),)), LayoutSpec("h", "stack", (("past", 0, 5),))),
        "masks": {"mask": "past"},
        "num_dense": 2,
        "program": FILE,
        "examples": None,
    }
    return Signature(**fields | changes)


def parts() -> list[Signature]:
    kinds = ("fixed_point", "one_bit")
    spread = ExportedTable((2, 3), (0.5, 0.25), Routing("continuous", 2, 10), 4, FILE, kinds)
    entry = example(
        part="entry", sub_graph_num=2, tables={"user": ExportedTable((2, 3), (1.0, 1.0), spread.routing)}
    )
    ps = [
        example(
            part=f"ps_{number}", sub_graph_num=2, tables={"user": spread}, program=None, features=(), masks={}
        )
        for number in range(2)
    ]
    return [example(), entry, *ps]


def test_what_is_written_is_read() -> None:
    for signature in parts():
        assert Signature.from_dict(json.loads(signature.to_json()), "x") == signature


def test_names_parts_and_tables() -> None:
    alone, entry, _, second = parts()
    assert [each.name for each in (alone, entry, second)] == ["movies", "movies:entry", "movies:ps_1"]
    assert [each.shard for each in (alone, entry, second)] == [None, None, 1]
    assert [each.predicts for each in (alone, entry, second)] == [True, True, False]
    assert alone.dims == {"user": 5}
    assert alone.tables["user"].format("int8").column_steps.tolist() == [0.5, 0.5, 0.25, 0.25, 0.25]
    assert second.tables["user"].router().block_size == 10
    assert alone.tables["user"].router().num_shards == 1


def test_a_shared_feature_makes_it_unbatchable() -> None:
    assert example().batchable
    assert not example(features=(FeatureSpec("u", "user", "sum", shared=True),), masks={}).batchable


@pytest.mark.parametrize("combiner", [Sum(), Mean(), Sqrtn(), FirstN(4)])
def test_features_and_layouts_come_back(combiner: Any) -> None:
    feature = Feature("u", "user", combiner, pad=5)
    assert FeatureSpec.of(feature).feature() == feature
    layout = Layout("x", [Slice("u", 1, 3)], "none")
    again = LayoutSpec.of(layout).layout()
    assert (again.name, again.kind, list(again.slices)) == ("x", "none", list(layout.slices))


def test_a_feature_without_a_combiner_has_no_place() -> None:
    with pytest.raises(InputError, match=r"'u'.*give it a combiner"):
        FeatureSpec.of(Feature("u", "user", None))


@pytest.mark.parametrize("name", ["", "a/b", "a:ps_0", "a\nb", "x" * 5000, 3])
def test_invalid_model_names(name: Any) -> None:
    with pytest.raises(InputError):
        check_name(name)


DELETED = object()
HUGE = 10**400
WRONG: list[tuple[tuple[Any, ...], Any]] = [
    (("format_version",), 3),
    (("format_version",), 1),
    (("part",), "ps_0"),
    (("part",), "ps_01"),
    (("part",), "ps_" + "9" * 4000),
    (("part",), "ps_\u0663"),
    (("part",), "entry"),
    (("sub_graph_num",), 1),
    (("dense_name",), "u"),
    (("outputs",), []),
    (("outputs", 0, "name"), "probabilities"),
    (("outputs", 0, "dtype"), "float16"),
    (("outputs", 0, "shape"), [2**20, 2**20]),
    (("outputs", 0, "shape"), [1] * 8),
    (("program",), None),
    (("tables",), {}),
    (("tables", "user", "segments"), [2**40, 1]),
    (("tables", "user", "steps"), [0.5]),
    (("tables", "user", "steps"), [0.5, 0]),
    (("tables", "user", "steps"), [0.5, -1]),
    (("tables", "user", "steps"), [0.5, "0.5"]),
    (("tables", "user", "steps"), [0.5, True]),
    (("tables", "user", "file"), None),
    (("tables", "user", "file", "path"), "a\x00b"),
    (("tables", "user", "routing", "num_shards"), 2),
    (("features",), []),
    (("features", 0, "table"), "nobody"),
    (("features", 0, "pad"), 2**63),
    (("features", 0, "name"), "past"),
    (("features", 0, "other"), 1),
    (("features", 1, "max_length"), None),
    (("features", 1, "max_length"), 2**40),
    (("layouts", 0, "name"), "h"),
    (("layouts", 0, "slices"), [["u", 0, 6]]),
    (("layouts", 0, "slices"), [["nobody", 0, 2]]),
    (("masks",), {"mask": "u"}),
    (("masks",), {"mask": "nobody"}),
]


@pytest.mark.parametrize(("path", "value"), WRONG, ids=lambda v: repr(v)[:40])
def test_a_wrong_field_is_refused(path: tuple[Any, ...], value: Any) -> None:
    with pytest.raises(ExportError):
        Signature.from_dict(changed(path, value), "x")


def test_an_export_without_the_kind_of_ids_is_read() -> None:
    data = json.loads(example().to_json())
    for feature in data["features"]:
        del feature["ids"]
    assert [feature.ids for feature in Signature.from_dict(data, "x").features] == [None, None]


@pytest.mark.parametrize("field", list(example().to_dict()))
def test_a_missing_field_is_named(field: str) -> None:
    data = json.loads(example().to_json())
    del data[field]
    with pytest.raises(ExportError, match="not the signature" if field == "format" else f"version|{field}"):
        Signature.from_dict(data, "x")


def paths(data: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every value of some JSON stands."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [at, *(path for key, each in items for path in paths(each, (*at, key)))]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KINDS = ExportedTable((2, 3), (0.5, 0.25), Routing("roundrobin", 1), 4, FILE, ("fixed_point", "one_bit"))
PLAIN = json.loads(example(tables={"user": KINDS}).to_json())


def changed(path: tuple[Any, ...], value: Any) -> Any:
    """The example with another value at a path, or without one."""
    data = copy.deepcopy(PLAIN)
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    if value is DELETED:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return data


@settings(max_examples=300)
@given(st.sampled_from(paths(PLAIN)[1:]), JSON | st.just(DELETED))
def test_any_other_json_is_read_or_refused(path: tuple[Any, ...], value: Any) -> None:
    data = changed(path, value)
    try:
        signature = Signature.from_dict(data, "x")
    except ExportError:
        return
    for feature in data["features"]:
        feature.setdefault("ids", None)  # earlier exports do not have it
        feature.setdefault("single", False)
    for table in data["tables"].values():
        table.setdefault("kinds", None)
    assert json.loads(signature.to_json()) == data


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a": 1, "a": 2}', b"[" * 100_000, b'{"a": NaN}']
)
def test_what_is_no_json_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "signature.json").write_bytes(text)
    with pytest.raises(ExportError, match=r"signature\.json"):
        Signature.read(tmp_path)


def test_no_directory_a_pipe_a_directory_and_many_bytes(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"it has no signature\.json"):
        Signature.read(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "signature.json")
    with pytest.raises(ExportError, match="not a regular file"):
        Signature.read(tmp_path)
    (tmp_path / "d" / "signature.json").mkdir(parents=True)
    with pytest.raises(ExportError, match="cannot be read"):
        Signature.read(tmp_path / "d")
    (tmp_path / "long").mkdir()
    with open(tmp_path / "long" / "signature.json", "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ExportError, match="more than"):
        Signature.read(tmp_path / "long")


# ---- docs/formats/export.schema.json


def inlined(schema: Any, defs: dict[str, Any]) -> Any:
    """The schema with every reference replaced by what it refers to."""
    if isinstance(schema, list):
        return [inlined(each, defs) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return inlined(defs[schema["$ref"].removeprefix("#/$defs/")], defs)
    return {key: inlined(value, defs) for key, value in schema.items() if key != "$defs"}


WRITTEN = json.loads((Path(__file__).parents[3] / "docs/formats/export.schema.json").read_text())
SCHEMA = inlined(WRITTEN, WRITTEN["$defs"])


def test_signatures_fit_the_schema() -> None:
    for signature in parts():
        assert list(problems(json.loads(signature.to_json()), SCHEMA)) == []


def test_the_schema_knows_every_field_that_is_written() -> None:
    data, defs = json.loads(example().to_json()), WRITTEN["$defs"]
    table = data["tables"]["user"]
    for written, known in (
        (data, WRITTEN),
        (table, defs["table"]),
        (table["file"], defs["file"]),
        (table["routing"], defs["routing"]),
        (data["features"][0], defs["feature"]),
        (data["outputs"][0], defs["output"]),
        (data["layouts"][0], defs["layout"]),
    ):
        # Earlier exports do not have these.
        optional = {"ids", "single", "kinds"} & written.keys()
        assert written.keys() == known["properties"].keys() == {*known["required"], *optional}


@pytest.mark.parametrize(
    "value",
    [DELETED, HUGE, None, True, -1, 0, 1.5, "", "x", "a/b", "..", "a\\b", [], [None], ["x"], {}, {"x": None}],
    ids=lambda v: repr(v)[:20],
)
def test_what_the_schema_refuses_the_reader_refuses_at_every_place(value: Any) -> None:
    for path in paths(PLAIN)[1:]:
        data = changed(path, value)
        if value is HUGE or list(problems(data, SCHEMA)):
            with pytest.raises(ExportError):
                Signature.from_dict(data, "x")
