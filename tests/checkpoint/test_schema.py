"""docs/formats/checkpoint.schema.json: it accepts real manifests and rejects what the reader rejects."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megalith import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    EmbeddingCollection,
    Feature,
    Momentum,
    RowWiseAdagrad,
    Segment,
    TableConfig,
    checkpoint,
)
from megalith.checkpoint import Manifest
from megalith.errors import CheckpointError

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/formats/checkpoint.schema.json").read_text())
TYPES: dict[str, Any] = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
TYPES["null"] = type(None)
NOTES = {"$schema", "$defs", "title", "description"}


def problems(data: Any, schema: dict[str, Any] = SCHEMA, at: str = "") -> Iterator[str]:
    """Yield the violations of the keywords our schema uses; any other keyword is a mistake in the schema."""
    fields = data if isinstance(data, dict) else {}
    items = data if isinstance(data, list) else []
    for keyword, value in schema.items():
        wrong = False
        match keyword:
            case "$ref":
                yield from problems(data, SCHEMA["$defs"][value.removeprefix("#/$defs/")], at)
            case "type":
                wrong = not any(_is(data, name) for name in ([value] if isinstance(value, str) else value))
            case "const" | "enum":
                wrong = data not in ([value] if keyword == "const" else value)
            case "oneOf":
                wrong = sum(not list(problems(data, option, at)) for option in value) != 1
            case "required":
                absent = [key for key in value if key not in fields] if isinstance(data, dict) else []
                yield from (f"{at}.{key}: required" for key in absent)
            case "properties":
                for key in value.keys() & fields.keys():
                    yield from problems(data[key], value[key], f"{at}.{key}")
            case "additionalProperties":
                for key in fields.keys() - schema.get("properties", {}).keys():
                    yield from problems(data[key], value, f"{at}.{key}")
            case "items":
                for number, each in enumerate(items):
                    yield from problems(each, value, f"{at}[{number}]")
            case "minItems":
                wrong = isinstance(data, list) and len(data) < value
            case "minLength":
                wrong = isinstance(data, str) and len(data) < value
            case "minimum":
                wrong = _is(data, "integer") and data < value
            case "pattern":
                wrong = isinstance(data, str) and not re.search(value, data)
            case _:
                assert keyword in NOTES, f"the schema has {keyword}, of which this test knows nothing"
        if wrong:
            yield f"{at}: {keyword}"


def _is(data: Any, name: str) -> bool:
    return isinstance(data, TYPES[name]) and not (name == "integer" and isinstance(data, bool))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        optimizers = [SGD(0.1), Adagrad(0.1), Adam(0.1), FTRL(0.1), Momentum(0.1), RowWiseAdagrad(0.1)]
        tables = [
            TableConfig("all", segments=[Segment(2, optimizer=optimizer) for optimizer in optimizers]),
            TableConfig("none/ä", dim=1, optimizer=SGD(0.1), dist_type="hash_roundrobin"),
        ]
        self.e = EmbeddingCollection(tables, [Feature("a", "all"), Feature("n", "none/ä")], seed=2**62)
        self.d = nn.Linear(2, 1)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A base and two deltas, with dense weights, optimizer and progress."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model.d(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model.e.shards.assign({"all": (torch.arange(10), torch.rand(10, 12))})
    progress = {"rng": checkpoint.rng_state(), "step": 3}
    checkpoint.save(model, tmp_path / "c", optimizer=optimizer, progress=progress)
    model.e.shards.assign({"all": (torch.tensor([3, -1]), torch.rand(2, 12))})
    checkpoint.save_delta(model, tmp_path / "c", optimizer=optimizer, precision="float16")
    model.e.shards.remove({"all": torch.tensor([4])})
    checkpoint.save_delta(model, tmp_path / "c")
    return tmp_path / "c"


def read(root: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((root / "manifest.json").read_text())
    return data


def test_manifests_are_valid(saved: Path, tmp_path: Path) -> None:
    data = read(saved)
    assert len(data["deltas"]) == 2
    assert data["deltas"][1]["collections"]["e"]["tables"]["all"]["removed"]
    assert list(problems(data)) == []
    for mode, size in (("roundrobin", None), ("hash_roundrobin", None), ("continuous", 3)):
        checkpoint.reshard(saved, tmp_path / mode, num_shards=3, dist_type=mode, block_size=size)
        assert list(problems(read(tmp_path / mode))) == []
    checkpoint.compact(saved)
    assert list(problems(read(saved))) == []


def test_the_schema_has_every_field_that_is_written(saved: Path) -> None:
    data = read(saved)
    table = data["collections"]["e"]["tables"]["all"]
    for written, known in (
        (data, SCHEMA),
        (data["deltas"][0], SCHEMA["$defs"]["delta"]),
        (data["collections"]["e"], SCHEMA["$defs"]["collection"]),
        (table, SCHEMA["$defs"]["table"]),
        (table["segments"][0], SCHEMA["$defs"]["segment"]),
        (table["routing"], SCHEMA["$defs"]["routing"]),
        (table["pieces"][0], SCHEMA["$defs"]["piece"]),
        (table["pieces"][0]["file"], SCHEMA["$defs"]["file"]),
    ):
        assert written.keys() == known["properties"].keys()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (("format",), "other"),
        (("version",), 2),
        (("deltas",), {}),
        (("deltas", 0, "previous"), None),
        (("deltas", 0, "dense"), []),
        (("collections", "e", "global_step"), -1),
        (("collections", "e", "tables", "all", "live"), -1),
        (("collections", "e", "tables", "all", "removed"), None),
        (("collections", "e", "tables", "all", "segments"), []),
        (("collections", "e", "tables", "all", "segments", 0, "dim"), 0),
        (("collections", "e", "tables", "all", "segments", 1, "state", 0, "size"), 0),
        (("collections", "e", "tables", "all", "routing", "dist_type"), "diagonal"),
        (("collections", "e", "tables", "all", "routing", "num_shards"), True),
        (("collections", "e", "tables", "all", "routing", "block_size"), 0),
        (("collections", "e", "tables", "all", "pieces", 0, "rows"), 1.5),
        (("collections", "e", "tables", "all", "pieces", 0, "file", "path"), ""),
        (("progress",), []),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_schema_and_reader_reject_the_same_manifests(saved: Path, field: tuple[Any, ...], value: Any) -> None:
    data = read(saved)
    inner: Any = data
    for key in field[:-1]:
        inner = inner[key]
    inner[field[-1]] = value

    assert list(problems(data)) != []
    with pytest.raises(CheckpointError):
        Manifest.from_json(json.dumps(data), "manifest.json")


def test_required_fields_cannot_be_absent_and_optional_ones_can_be_null(saved: Path) -> None:
    data = read(saved)
    for key in SCHEMA["required"]:
        without = {name: value for name, value in data.items() if name != key}
        assert list(problems(without)) == [f".{key}: required"]
        with pytest.raises(CheckpointError):
            Manifest.from_json(json.dumps(without), "manifest.json")
    for key in ("dense", "optimizer", "optimizer_tensors", "progress"):
        without = {name: value for name, value in data.items() if name != key}
        for valid in (without, {**data, key: None}):
            assert list(problems(valid)) == []
            Manifest.from_json(json.dumps(valid), "manifest.json")
