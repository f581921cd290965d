"""Signature of an exported model: its inputs, its outputs, and the files of its rows and weights.

The signature is a JSON file, which is written last. The warm-up requests that a server computes before a
version answers are a second JSON file. docs/formats/export.md describes both. Reading validates every field.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from megalith.checkpoint.manifest import Routing
from megalith.errors import ExportError, InputError
from megalith.nn import Combiner, Feature, FirstN, Layout, Mean, Slice, Sqrtn, Sum
from megalith.nn.compiled_batch import FeaturePlan
from megalith.ragged import Ragged
from megalith.routing import MODES, Router
from megalith.serving.export.row_format import PRECISIONS, Formats, RowFormat, RowPart
from megalith.storage.json_codec import OPTIONAL, JsonFields, Limits, Natural, from_json, parse_json, to_json
from megalith.storage.store import LocalStore, StoredFile, checksum
from megalith.table import SGD, Segment, TableConfig

# Outputs of a model whose `score` returns one logit for each row
LOGITS, PROBABILITIES = "logits", "probabilities"
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
# Limits of a model: outputs, dimensions of one, and values for each row
MAX_OUTPUTS, MAX_RANK, MAX_VALUES = 256, 8, 1 << 24


Text = Annotated[str, Limits(1, 4096)]
_Width = Annotated[int, Limits(1, 1 << 20)]


@dataclass(frozen=True)
class OutputSpec:
    """An output: a tensor [B, *shape]."""

    name: Annotated[str, Limits(1, 1000)]
    dtype: str = "float32"  # One of OUTPUT_DTYPES
    # The sizes after the batch dimension
    shape: Annotated[tuple[Annotated[int, Limits(0, MAX_VALUES)], ...], Limits(0, MAX_RANK - 1)] = ()

    def __post_init__(self) -> None:
        if self.dtype not in OUTPUT_DTYPES:
            raise InputError(f"output {self.name!r} has dtype {self.dtype[:100]!r}")
        values = prod(max(1, size) for size in self.shape)
        if values > MAX_VALUES:
            raise InputError(f"output {self.name!r} has {values} values for each row, more than {MAX_VALUES}")


LOGIT_OUTPUTS = (OutputSpec(LOGITS), OutputSpec(PROBABILITIES))  # The outputs of exports of format version 1


FORMAT = "megalith-export"
VERSION = 2
NAME = "signature.json"
MAX_BYTES = 1 << 24
STANDALONE, ENTRY = "standalone", "entry"
DENSE = "dense"  # The name of the input that holds dense values
# What the ids of a feature are: integers as they are, hashes of text, or results of `megalith.fid`
ID_KINDS = ("integer", "xxhash64", "fid")
_COMBINERS: dict[str, type[Combiner]] = {"sum": Sum, "mean": Mean, "sqrtn": Sqrtn}
# What a collection calls to pool the rows of a feature
_POOLING_METHODS = ("cut", "offsets", "divisor", "output_shape")


@dataclass(frozen=True)
class FeatureSpec:
    """A feature of the model."""

    name: Text
    table: Text
    combiner: Text
    shared: bool = False
    pad: Annotated[int, Limits(-(2**63))] = -1
    max_length: _Width | None = None  # Number of ids that a FirstN feature uses
    # One of ID_KINDS: what the ids were in training. Requests must send the same; None: unknown.
    ids: str | None = field(default=None, metadata=OPTIONAL)
    # Whether rows have one id each, so that its shape in metadata is [B]
    single: bool = field(default=False, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        if self.ids not in (None, *ID_KINDS):
            raise InputError(f"ids is {self.ids!r}, not one of {', '.join(ID_KINDS)}")

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

    name: Text
    kind: Text
    slices: tuple[tuple[Text, Natural, Natural], ...]

    def layout(self) -> Layout:
        """Return the layout of the collection."""
        return Layout(self.name, [Slice(*each) for each in self.slices], self.kind)

    @classmethod
    def of(cls, layout: Layout) -> LayoutSpec:
        """Describe a layout."""
        cuts = tuple((cut.feature, cut.start, cut.end) for cut in layout.slices)
        return cls(layout.name, layout.kind, cuts)


def _check_plain(file: StoredFile) -> None:
    if any(char in "/\\" or not char.isprintable() for char in file.path) or not 0 < len(file.path) <= 4096:
        raise InputError(f"the path of a file must be a plain name, not {file.path[:100]!r}")
    if file.path.startswith(".") or file.bytes < 0 or not file.checksum:
        raise InputError(f"{file.path!r} must not be hidden, and needs its length and its checksum")


_File = Annotated[StoredFile, _check_plain]


@dataclass(frozen=True)
class ExportedTable:
    """A table of an export."""

    segments: tuple[_Width, ...]  # Width of each segment
    steps: tuple[float, ...]  # The step of each segment; see row_format.py
    routing: Routing  # Which ps part has an id
    rows: Natural = 0  # Number of rows in this part
    file: _File | None = None
    # How each segment is stored (`row_format.KINDS`); None: all in the precision of the export
    kinds: tuple[Text, ...] | None = field(default=None, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        if not 1 <= self.dim <= 1 << 20 or len(self.steps) != len(self.segments):
            raise InputError("a table needs segments of 1 or more columns, and a step for each")
        if self.kinds is not None and len(self.kinds) != len(self.segments):
            raise InputError("a table needs a kind for each segment")
        if not all(0 < step < float("inf") for step in self.steps):
            raise InputError("steps must be positive and finite")
        mode, block = self.routing.dist_type, self.routing.block_size
        if mode not in MODES or (block is not None and block < 1):
            raise InputError(f"dist_type {mode!r} is not one of {', '.join(MODES)}, or has blocks of {block}")
        self.router()  # raises if no ids can be routed

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

    model: Text
    version: Natural
    part: Text  # "standalone", "entry", "ps_0", "ps_1" and so on
    sub_graph_num: Natural  # Number of ps parts; 0 for a standalone model
    base: Text  # Id of the save that was exported
    step: Natural  # Global step of that save
    created: Text
    megalith: Text
    precision: Text
    tables: dict[Text, ExportedTable]
    features: tuple[FeatureSpec, ...] = ()
    layouts: tuple[LayoutSpec, ...] | None = None
    # Name -> FirstN feature; the mask marks the positions that hold ids
    masks: dict[Text, Text] = field(default_factory=dict)
    num_dense: Natural = 0
    dense_name: Text = DENSE
    outputs: tuple[OutputSpec, ...] = LOGIT_OUTPUTS  # What the program returns, in its order
    joint_rows: bool = False  # Whether the outputs of a row depend on the other rows of its batch
    program: _File | None = None
    examples: _File | None = None

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

    @cached_property
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
        named = {name: value for name, value in data.items() if name not in ("format", "format_version")}
        if version == 1:
            # Its program returns logits [B] alone.
            if named.get("outputs") != [each.name for each in LOGIT_OUTPUTS]:
                raise ExportError(f"{where}: outputs are not logits and probabilities")
            named |= {"outputs": to_json(LOGIT_OUTPUTS), "joint_rows": False}
        signature = from_json(cls, JsonFields(named, lambda problem: ExportError(f"{where}: {problem}")))
        try:
            _check(signature)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ExportError(f"{where}: {error}") from None
        return signature


def check_name(model: str) -> None:
    if not isinstance(model, str) or not 1 <= len(model) <= 4096:
        raise InputError(
            f"the name of a model must be a string of 1 to 4096 characters, not {repr(model)[:100]}"
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


Example = tuple[dict[str, Ragged], Tensor | None]  # Features by name, and dense values float32 [B, num_dense]


def read_examples(path: Path) -> list[Example]:
    """Read the warm-up requests of an export."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError("too long")
        examples = []
        for each in parse_json(path.read_text())["examples"]:
            features = {name: Ragged.from_lists(lists) for name, lists in each["features"].items()}
            dense = each["dense"]
            if dense is not None:
                dense = torch.tensor(dense, dtype=torch.float32, device="cpu")
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
