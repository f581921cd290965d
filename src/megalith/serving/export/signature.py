"""Signature of an exported model: its inputs, its outputs, and the files of its rows and weights.

The signature is a JSON file, which is written last. The warm-up requests that a server computes before a
version answers are a second JSON file. docs/formats/export.md describes both. Reading validates every field.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.manifest import Routing
from megalith.errors import ExportError, InputError
from megalith.nn import Combiner, Feature, FirstN, Layout, Mean, Slice, Sqrtn, Sum
from megalith.nn.feature_plan import FeaturePlan
from megalith.ragged import Ragged
from megalith.routing import MODES, Router
from megalith.serving.export.row_format import PRECISIONS, Formats, RowFormat, RowPart
from megalith.storage.json_codec import parse_json
from megalith.storage.store import LocalStore, StoredFile, checksum
from megalith.table import SGD, Segment, TableConfig

LOGITS, PROBABILITIES = "logits", "probabilities"
"""Outputs of a model whose `score` returns one logit for each row."""
OUTPUT_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
MAX_OUTPUTS, MAX_RANK, MAX_VALUES = 256, 8, 1 << 24
"""Limits of a model: outputs, dimensions of one, and values for each row."""


@dataclass(frozen=True)
class OutputSpec:
    """An output: a tensor [B, *shape]."""

    name: str
    dtype: str = "float32"
    """One of OUTPUT_DTYPES."""
    shape: tuple[int, ...] = ()
    """The sizes after the batch dimension."""


LOGIT_OUTPUTS = (OutputSpec(LOGITS), OutputSpec(PROBABILITIES))
"""The outputs of exports of format version 1."""


def read_output(data: Mapping[str, Any]) -> OutputSpec:
    """Validate the description of an output."""
    name, dtype, shape = data["name"], data["dtype"], data["shape"]
    if not isinstance(name, str) or not 1 <= len(name) <= 1000:
        raise ValueError(f"the name of an output must be a string, got {repr(name)[:100]}")
    if not isinstance(dtype, str) or dtype not in OUTPUT_DTYPES:
        raise ValueError(f"output {name!r} has dtype {repr(dtype)[:100]}")
    if not isinstance(shape, list) or len(shape) >= MAX_RANK:
        raise ValueError(f"output {name!r} has shape {repr(shape)[:100]}")
    values = 1
    for size in shape:
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= MAX_VALUES:
            raise ValueError(f"output {name!r} has shape {repr(shape)[:100]}")
        values *= max(1, size)
    if values > MAX_VALUES:
        raise ValueError(f"output {name!r} has {values} values for each row, more than {MAX_VALUES}")
    return OutputSpec(name, dtype, tuple(shape))


FORMAT = "megalith-export"
VERSION = 2
NAME = "signature.json"
MAX_BYTES = 1 << 24
STANDALONE, ENTRY = "standalone", "entry"
DENSE = "dense"
"""The name of the input that holds dense values."""
ID_KINDS = ("integer", "xxhash64", "fid")
"""What the ids of a feature are: integers as they are, hashes of text, or results of `megalith.fid`."""
_MAX_TEXT = 4096
_COMBINERS: dict[str, type[Combiner]] = {"sum": Sum, "mean": Mean, "sqrtn": Sqrtn}
_POOLING_METHODS = ("cut", "offsets", "divisor", "output_shape")
"""What a collection calls to pool the rows of a feature."""


@dataclass(frozen=True)
class FeatureSpec:
    """A feature of the model."""

    name: str
    table: str
    combiner: str
    shared: bool = False
    pad: int = -1
    max_length: int | None = None  # Number of ids that a FirstN feature uses
    # One of ID_KINDS: what the ids were in training. Requests must send the same; None: unknown.
    ids: str | None = None
    single: bool = False  # Whether rows have one id each, so that its shape in metadata is [B]

    def feature(self) -> Feature:
        """Return the feature of the collection."""
        if self.combiner == "first_n":
            combiner: Combiner = FirstN(self.max_length or 0)
        elif self.combiner in _COMBINERS:
            combiner = _COMBINERS[self.combiner]()
        else:
            raise InputError(f"feature {self.name!r}: unknown combiner {self.combiner!r}")
        return Feature(self.name, self.table, combiner, self.shared, pad=self.pad)

    @classmethod
    def of(cls, feature: Feature, ids: str | None = None, *, single: bool = False) -> FeatureSpec:
        """Describe a feature."""
        combiner = feature.combiner
        if isinstance(combiner, FirstN):
            name, length = "first_n", combiner.n
            return cls(feature.name, feature.table, name, feature.shared, feature.pad, length, ids, single)
        for name, known in _COMBINERS.items():
            # A subclass under another name is the same combiner; one that pools in another way is not.
            if isinstance(combiner, known) and all(
                getattr(type(combiner), method) is getattr(known, method) for method in _POOLING_METHODS
            ):
                return cls(feature.name, feature.table, name, feature.shared, feature.pad, None, ids, single)
        raise InputError(f"feature {feature.name!r}: {combiner!r} cannot be exported; give it a combiner")


@dataclass(frozen=True)
class LayoutSpec:
    """An input of the dense program, assembled from slices [feature, start, end]."""

    name: str
    kind: str
    slices: tuple[tuple[str, int, int], ...]

    def layout(self) -> Layout:
        """Return the layout of the collection."""
        return Layout(self.name, [Slice(*each) for each in self.slices], self.kind)

    @classmethod
    def of(cls, layout: Layout) -> LayoutSpec:
        """Describe a layout."""
        cuts = tuple((cut.feature, cut.start, cut.end) for cut in layout.slices)
        return cls(layout.name, layout.kind, cuts)


@dataclass(frozen=True)
class ExportedTable:
    """A table of an export."""

    segments: tuple[int, ...]
    """Width of each segment."""
    steps: tuple[float, ...]
    """The step of each segment; see row_format.py."""
    routing: Routing
    """Which ps part has an id."""
    rows: int = 0
    """Number of rows in this part."""
    file: StoredFile | None = None
    kinds: tuple[str, ...] | None = None
    """How each segment is stored (`row_format.KINDS`); None: all in the precision of the export."""

    @property
    def dim(self) -> int:
        """Width of a row."""
        return sum(self.segments)

    def format(self, precision: str) -> RowFormat:
        """Return how rows are stored."""
        kinds = self.kinds or (precision,) * len(self.segments)
        return RowFormat(tuple(map(RowPart, kinds, self.segments, self.steps)))

    def router(self) -> Router:
        """Return the router of ids to ps parts; in a standalone model all ids belong to ps_0."""
        return self.routing.router() or Router("roundrobin", 1)


@dataclass(frozen=True, kw_only=True)
class Signature:
    """An exported model, or one part of it."""

    model: str
    version: int
    part: str  # "standalone", "entry", "ps_0", "ps_1" and so on
    sub_graph_num: int  # Number of ps parts; 0 for a standalone model
    base: str  # Id of the save that was exported
    step: int  # Global step of that save
    created: str
    megalith: str
    precision: str
    tables: dict[str, ExportedTable]
    features: tuple[FeatureSpec, ...] = ()
    layouts: tuple[LayoutSpec, ...] | None = None
    # Name -> FirstN feature; the mask marks the positions that hold ids
    masks: dict[str, str] = field(default_factory=dict)
    num_dense: int = 0
    dense_name: str = DENSE
    outputs: tuple[OutputSpec, ...] = LOGIT_OUTPUTS  # What the program returns, in its order
    joint_rows: bool = False  # Whether the outputs of a row depend on the other rows of its batch
    program: StoredFile | None = None
    examples: StoredFile | None = None

    @property
    def name(self) -> str:
        """The name in requests: the model, followed by a colon and the part unless it is standalone."""
        return self.model if self.part == STANDALONE else f"{self.model}:{self.part}"

    @property
    def shard(self) -> int | None:
        """The number of a ps part; None for other parts."""
        return int(self.part.removeprefix("ps_")) if self.part.startswith("ps_") else None

    @property
    def predicts(self) -> bool:
        """Whether it computes scores; a ps part, and an export of Shards, only returns rows."""
        return self.program is not None

    @property
    def batchable(self) -> bool:
        """Whether requests may be computed together: no row depends on others, and no feature is shared."""
        return not self.joint_rows and not any(feature.shared for feature in self.features)

    @property
    def dims(self) -> dict[str, int]:
        """Table -> width of its rows."""
        return {name: table.dim for name, table in self.tables.items()}

    @cached_property
    def codes(self) -> Formats:
        """The formats in which tables with codes are sent and kept in memory; other tables are float32."""
        found = {name: table.format(self.precision).codes for name, table in self.tables.items()}
        return {name: codes for name, codes in found.items() if codes is not None}

    def plan(self) -> FeaturePlan:
        """Return the plan that compiles requests; raise InputError or UnknownNameError for bad names."""
        configs = {
            name: TableConfig(name, segments=[Segment(dim, optimizer=SGD(0.0)) for dim in table.segments])
            for name, table in self.tables.items()
        }
        layouts = None if self.layouts is None else [each.layout() for each in self.layouts]
        return FeaturePlan([each.feature() for each in self.features], layouts, configs)

    def to_dict(self) -> dict[str, Any]:
        """Return the signature as plain data for JSON."""
        return {"format": FORMAT, "format_version": VERSION, **asdict(self)}

    def to_json(self) -> str:
        """Return the text of the file."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    @classmethod
    def read(cls, directory: Path) -> Signature:
        """Read the signature of an exported version."""
        path = directory / NAME
        try:
            text = LocalStore(directory).read_whole(NAME, MAX_BYTES)
        except FileNotFoundError:
            raise ExportError(f"{directory} holds no exported model: it has no {NAME}") from None
        except OSError as error:
            raise ExportError(f"{path} cannot be read: {error.strerror or error}") from None
        return cls.from_dict(parse_json(text, lambda problem: ExportError(f"{path} {problem}")), str(path))

    @classmethod
    def from_dict(cls, data: Any, where: str) -> Signature:
        """Validate plain data."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ExportError(f"{where} is not the signature of an exported model")
        version = data.get("format_version")
        if type(version) is not int or not 1 <= version <= VERSION:
            raise ExportError(f"{where} has format version {version!r}; this Megalith reads 1 to {VERSION}")
        try:
            signature = _signature(data if version == VERSION else _upgraded(data))
            _check(signature)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            named = f"it lacks {error}" if type(error) is KeyError else str(error)
            raise ExportError(f"{where}: {named}") from None
        return signature


def _upgraded(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a signature of format version 1, whose program returns logits [B] alone, as version 2."""
    if data["outputs"] != [each.name for each in LOGIT_OUTPUTS]:
        raise ValueError("outputs are not logits and probabilities")
    outputs = [{**asdict(each), "shape": list(each.shape)} for each in LOGIT_OUTPUTS]
    return {**data, "outputs": outputs, "joint_rows": False}


def _signature(data: Mapping[str, Any]) -> Signature:
    layouts = data["layouts"]
    texts: dict[str, Any] = {name: _text(data[name], name) for name in _TEXTS}
    numbers: dict[str, Any] = {name: _integer(data[name], name) for name in _NUMBERS}
    return Signature(
        **texts,
        **numbers,
        tables={_text(name, "table"): _table(each) for name, each in data["tables"].items()},
        features=tuple(_feature(each) for each in data["features"]),
        layouts=None if layouts is None else tuple(_layout(each) for each in layouts),
        masks={_text(k, "mask"): _text(v, "mask") for k, v in data["masks"].items()},
        outputs=tuple(read_output(each) for each in data["outputs"]),
        joint_rows=_flag(data["joint_rows"], "joint_rows"),
        program=_file(data["program"]),
        examples=_file(data["examples"]),
    )


_TEXTS = ("model", "part", "base", "created", "megalith", "precision", "dense_name")
_NUMBERS = ("version", "sub_graph_num", "step", "num_dense")


def _feature(data: Mapping[str, Any]) -> FeatureSpec:
    length = data["max_length"]
    if length is not None and not 1 <= _integer(length, "max_length") <= 1 << 20:
        raise ValueError(f"max_length is {length}")
    pad = data["pad"]
    if isinstance(pad, bool) or not isinstance(pad, int) or not -(2**63) <= pad < 2**63:
        raise ValueError(f"pad is {pad!r}")
    ids = data.get("ids")
    if ids is not None and (not isinstance(ids, str) or ids not in ID_KINDS):
        raise ValueError(f"ids is {ids!r}, not one of {', '.join(ID_KINDS)}")
    texts = [_text(data[name], name) for name in ("name", "table", "combiner")]
    flags = [_flag(data["shared"], "shared"), _flag(data.get("single", False), "single")]
    return FeatureSpec(texts[0], texts[1], texts[2], flags[0], pad, length, ids, flags[1])


def _layout(data: Mapping[str, Any]) -> LayoutSpec:
    slices = tuple(
        (_text(name, "slice"), _integer(start, "slice"), _integer(end, "slice"))
        for name, start, end in data["slices"]
    )
    return LayoutSpec(_text(data["name"], "name"), _text(data["kind"], "kind"), slices)


def _table(data: Mapping[str, Any]) -> ExportedTable:
    routing = data["routing"]
    block = routing["block_size"]
    table = ExportedTable(
        segments=tuple(_integer(each, "segments") for each in data["segments"]),
        steps=tuple(_number(each, "steps") for each in data["steps"]),
        routing=Routing(
            _text(routing["dist_type"], "dist_type"),
            _integer(routing["num_shards"], "num_shards"),
            None if block is None else _integer(block, "block_size"),
            _flag(routing["skip_first"], "skip_first"),
        ),
        rows=_integer(data["rows"], "rows"),
        file=_file(data["file"]),
        kinds=_kinds(data.get("kinds")),
    )
    if not 1 <= table.dim <= 1 << 20 or min(table.segments) < 1 or len(table.steps) != len(table.segments):
        raise ValueError("a table needs segments of 1 or more columns, and a step for each")
    if table.kinds is not None and len(table.kinds) != len(table.segments):
        raise ValueError("a table needs a kind for each segment")
    if not all(0 < step < float("inf") for step in table.steps):
        raise ValueError("steps must be positive and finite")
    if table.routing.dist_type not in MODES:
        raise ValueError(f"dist_type {table.routing.dist_type!r} is not one of {', '.join(MODES)}")
    table.router()
    return table


def _kinds(data: Any) -> tuple[str, ...] | None:
    if data is None:
        return None
    if not isinstance(data, list) or not data:
        raise ValueError("kinds must be a list with one text for each segment")
    return tuple(_text(each, "kinds") for each in data)


def _file(data: Any) -> StoredFile | None:
    if data is None:
        return None
    entry = StoredFile(
        _text(data["path"], "path"), _integer(data["bytes"], "bytes"), _text(data["checksum"], "checksum")
    )
    if any(char in "/\\" or not char.isprintable() for char in entry.path) or entry.path.startswith("."):
        raise ValueError(f"the path of a file must be a plain name, not {entry.path!r}")
    return entry


def check_name(model: str) -> None:
    if not isinstance(model, str) or not 1 <= len(model) <= _MAX_TEXT:
        raise InputError(
            f"the name of a model must be a string of 1 to {_MAX_TEXT} characters, not {repr(model)[:100]}"
        )
    if any(char in "/:" or not char.isprintable() for char in model):
        raise InputError(f"model {model!r} must not contain '/', ':' or unprintable characters")


def _check(signature: Signature) -> None:
    check_name(signature.model)
    part = signature.part
    if part not in (STANDALONE, ENTRY) and not re.fullmatch(r"ps_(0|[1-9][0-9]{0,8})", part):
        raise ValueError(f"part must be standalone, entry, ps_0, ps_1 ..., not {part!r}")
    if signature.precision not in PRECISIONS:
        raise ValueError(f"precision {signature.precision!r} is unknown")
    for table in signature.tables.values():
        table.format(signature.precision)
    if (signature.sub_graph_num == 0) != (part == STANDALONE) or (signature.shard or 0) > max(
        0, signature.sub_graph_num - 1
    ):
        raise ValueError(f"part {part!r} is out of range: there are {signature.sub_graph_num} ps parts")
    for name, table in signature.tables.items():
        if (table.file is None) != (part == ENTRY):
            raise ValueError(f"table {name!r} has {'no' if table.file is None else 'a'} file in {part!r}")
        if table.routing.num_shards > max(1, signature.sub_graph_num):
            raise ValueError(f"table {name!r} is distributed over {table.routing.num_shards} parts")
    if signature.predicts and signature.shard is not None:
        raise ValueError(f"part {part!r} has a program")
    if not signature.predicts:
        if part == ENTRY or signature.features:
            raise ValueError(f"part {part!r} has no program")
        return
    names = {each.name for each in signature.outputs}
    if not 1 <= len(signature.outputs) <= MAX_OUTPUTS or len(names) != len(signature.outputs):
        raise ValueError(f"outputs must be 1 to {MAX_OUTPUTS} with different names")
    if signature.num_dense and any(spec.name == signature.dense_name for spec in signature.features):
        raise ValueError(f"a feature and the dense values have the same name {signature.dense_name!r}")
    plan = signature.plan()
    for name, feature in signature.masks.items():
        if feature not in plan.features or not isinstance(plan.features[feature].combiner, FirstN):
            raise ValueError(f"mask {name!r} refers to {feature!r}, which is not a FirstN feature")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_TEXT:
        raise ValueError(f"{name} must be a string of 1 to {_MAX_TEXT} characters, got {repr(value)[:100]}")
    return value


def _integer(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{name} must be an integer from 0 to 2^63 - 1, got {repr(value)[:100]}")
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must hold numbers, got {repr(value)[:100]}")
    return float(value)


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {repr(value)[:100]}")
    return value


_MAX_BYTES = 1 << 24

Example = tuple[dict[str, Ragged], Tensor | None]
"""Features by name, and dense values float32 [B, num_dense]."""


def read_examples(path: Path) -> list[Example]:
    """Read the warm-up requests of an export."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError("too long")
        examples = []
        for each in parse_json(path.read_text())["examples"]:
            features = {name: Ragged.from_lists(lists) for name, lists in each["features"].items()}
            dense = (
                None
                if each["dense"] is None
                else torch.tensor(each["dense"], dtype=torch.float32, device="cpu")
            )
            examples.append((features, dense))
        return examples
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ExportError(f"{path} holds no valid examples: {error}") from None


def write_examples(path: Path, examples: list[Example]) -> StoredFile:
    """Write the warm-up requests of an export."""
    data = {
        "examples": [
            {
                "features": {name: column.to_lists() for name, column in features.items()},
                "dense": None if dense is None else dense.tolist(),
            }
            for features, dense in examples
        ]
    }
    text = json.dumps(data, allow_nan=False).encode()
    path.write_bytes(text)
    return StoredFile(path.name, len(text), checksum(zlib.crc32(text)))
