"""The signature of an exported model: what it takes, what it gives, and where its rows and weights lie.

A JSON file, written last; its fields are those of docs/formats/export.md. Reading checks every field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megalith.checkpoint.manifest import FileEntry, Routing
from megalith.errors import ExportError, InputError
from megalith.nn import Combiner, Feature, FirstN, Layout, Mean, Slice, Sqrtn, Sum
from megalith.nn.feature_plan import FeaturePlan
from megalith.routing import MODES, Router
from megalith.serving.export.precision import PRECISIONS
from megalith.storage.store import LocalStore
from megalith.storage.strict_json import parse_json
from megalith.table import SGD, Segment, TableConfig

FORMAT = "megalith-export"
VERSION = 1
NAME = "signature.json"
MAX_BYTES = 1 << 24
STANDALONE, ENTRY = "standalone", "entry"
DENSE = "dense"
"""The name of the input that holds dense values."""
OUTPUTS = ("logits", "probabilities")
_MAX_TEXT = 4096
_COMBINERS: dict[str, type[Combiner]] = {"sum": Sum, "mean": Mean, "sqrtn": Sqrtn}


@dataclass(frozen=True)
class FeatureSpec:
    """A column of ids that the model takes. max_length: of a FirstN feature; what is beyond is not used."""

    name: str
    table: str
    combiner: str
    shared: bool = False
    pad: int = -1
    max_length: int | None = None

    def feature(self) -> Feature:
        """As the collection had it."""
        if self.combiner == "first_n":
            combiner: Combiner = FirstN(self.max_length or 0)
        elif self.combiner in _COMBINERS:
            combiner = _COMBINERS[self.combiner]()
        else:
            raise InputError(f"feature {self.name!r}: unknown combiner {self.combiner!r}")
        return Feature(self.name, self.table, combiner, self.shared, pad=self.pad)

    @classmethod
    def of(cls, feature: Feature) -> FeatureSpec:
        """Raises InputError for a feature without a combiner, which has no place in an export."""
        combiner = feature.combiner
        if isinstance(combiner, FirstN):
            return cls(feature.name, feature.table, "first_n", feature.shared, feature.pad, combiner.n)
        for name, known in _COMBINERS.items():
            if type(combiner) is known:
                return cls(feature.name, feature.table, name, feature.shared, feature.pad)
        raise InputError(f"feature {feature.name!r}: {combiner!r} cannot be exported; give it a combiner")


@dataclass(frozen=True)
class LayoutSpec:
    """A tensor the dense program takes: slices [feature, start, end] put together."""

    name: str
    kind: str
    slices: tuple[tuple[str, int, int], ...]

    def layout(self) -> Layout:
        """As the collection had it."""
        return Layout(self.name, [Slice(*each) for each in self.slices], self.kind)

    @classmethod
    def of(cls, layout: Layout) -> LayoutSpec:
        """Of a collection's layout."""
        cuts = tuple((cut.feature, cut.start, cut.end) for cut in layout.slices)
        return cls(layout.name, layout.kind, cuts)


@dataclass(frozen=True)
class ExportedTable:
    """A table: widths of its segments, the steps of int8 rows for each, which shard has which id, its file.

    rows, file: of this part; a part without this table's rows has None.
    """

    segments: tuple[int, ...]
    steps: tuple[float, ...]
    routing: Routing
    rows: int = 0
    file: FileEntry | None = None

    @property
    def dim(self) -> int:
        """Weights of a row."""
        return sum(self.segments)

    @property
    def column_steps(self) -> list[float]:
        """The step of each column."""
        pairs = zip(self.steps, self.segments, strict=True)
        return [step for step, dim in pairs for _ in range(dim)]

    def router(self) -> Router:
        """Which part ps_i has an id; of a standalone model all are ps_0's."""
        return self.routing.router() or Router("roundrobin", 1)


@dataclass(frozen=True, kw_only=True)
class Signature:
    """An exported model, or one part of it: "standalone", "entry" or "ps_0", "ps_1" ...

    sub_graph_num: how many ps parts there are, 0 for a standalone model. base, step: the id of the save it
    was exported from, and its step.
    """

    model: str
    version: int
    part: str
    sub_graph_num: int
    base: str
    step: int
    created: str
    megalith: str
    precision: str
    tables: dict[str, ExportedTable]
    features: tuple[FeatureSpec, ...] = ()
    layouts: tuple[LayoutSpec, ...] | None = None
    masks: dict[str, str] = field(default_factory=dict)
    num_dense: int = 0
    dense_name: str = DENSE
    outputs: tuple[str, ...] = OUTPUTS
    program: FileEntry | None = None
    examples: FileEntry | None = None

    @property
    def name(self) -> str:
        """What requests call it: the model, and behind a colon its part unless it stands alone."""
        return self.model if self.part == STANDALONE else f"{self.model}:{self.part}"

    @property
    def shard(self) -> int | None:
        """The number of a ps part."""
        return int(self.part.removeprefix("ps_")) if self.part.startswith("ps_") else None

    @property
    def predicts(self) -> bool:
        """Whether it gives scores; a ps part only gives rows."""
        return self.program is not None

    @property
    def batchable(self) -> bool:
        """Whether requests may be computed together: no feature is shared by a whole batch."""
        return not any(feature.shared for feature in self.features)

    @property
    def dims(self) -> dict[str, int]:
        """The width of each table's rows."""
        return {name: table.dim for name, table in self.tables.items()}

    def plan(self) -> FeaturePlan:
        """What compiles requests. Raises InputError or UnknownNameError if the parts do not fit."""
        configs = {
            name: TableConfig(name, segments=[Segment(dim, optimizer=SGD(0.0)) for dim in table.segments])
            for name, table in self.tables.items()
        }
        layouts = None if self.layouts is None else [each.layout() for each in self.layouts]
        return FeaturePlan([each.feature() for each in self.features], layouts, configs)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"format": FORMAT, "format_version": VERSION, **asdict(self)}

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    @classmethod
    def read(cls, directory: Path) -> Signature:
        """The signature of an exported version. Raises ExportError if there is none or it is wrong."""
        path = directory / NAME
        try:
            data = parse_json(LocalStore(directory).read_whole(NAME, MAX_BYTES))
        except FileNotFoundError:
            raise ExportError(f"{directory} holds no exported model: it has no {NAME}") from None
        except OSError as error:
            raise ExportError(f"{path} cannot be read: {error.strerror or error}") from None
        except ValueError as error:
            raise ExportError(f"{path} is no JSON: {error}") from None
        return cls.from_dict(data, str(path))

    @classmethod
    def from_dict(cls, data: Any, where: str) -> Signature:
        """Reads plain data. Raises ExportError naming what is missing or wrong."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ExportError(f"{where} is no signature of an exported model")
        if data.get("format_version") != VERSION:
            raise ExportError(
                f"{where} has version {data.get('format_version')!r}; this Megalith reads {VERSION}"
            )
        try:
            signature = _signature(data)
            _check(signature)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            named = f"it lacks {error}" if type(error) is KeyError else str(error)
            raise ExportError(f"{where}: {named}") from None
        return signature


def _signature(data: Mapping[str, Any]) -> Signature:
    layouts = data["layouts"]
    texts: dict[str, Any] = {name: _text(data[name], name) for name in _TEXTS}
    numbers: dict[str, Any] = {name: _whole(data[name], name) for name in _NUMBERS}
    return Signature(
        **texts,
        **numbers,
        tables={_text(name, "table"): _table(each) for name, each in data["tables"].items()},
        features=tuple(_feature(each) for each in data["features"]),
        layouts=None if layouts is None else tuple(_layout(each) for each in layouts),
        masks={_text(k, "mask"): _text(v, "mask") for k, v in data["masks"].items()},
        outputs=tuple(_text(each, "outputs") for each in data["outputs"]),
        program=_file(data["program"]),
        examples=_file(data["examples"]),
    )


_TEXTS = ("model", "part", "base", "created", "megalith", "precision", "dense_name")
_NUMBERS = ("version", "sub_graph_num", "step", "num_dense")


def _feature(data: Mapping[str, Any]) -> FeatureSpec:
    length = data["max_length"]
    if length is not None and not 1 <= _whole(length, "max_length") <= 1 << 20:
        raise ValueError(f"max_length is {length}")
    pad = data["pad"]
    if isinstance(pad, bool) or not isinstance(pad, int) or not -(2**63) <= pad < 2**63:
        raise ValueError(f"pad is {pad!r}")
    texts = [_text(data[name], name) for name in ("name", "table", "combiner")]
    return FeatureSpec(texts[0], texts[1], texts[2], _flag(data["shared"], "shared"), pad, length)


def _layout(data: Mapping[str, Any]) -> LayoutSpec:
    slices = tuple(
        (_text(name, "slice"), _whole(start, "slice"), _whole(end, "slice"))
        for name, start, end in data["slices"]
    )
    return LayoutSpec(_text(data["name"], "name"), _text(data["kind"], "kind"), slices)


def _table(data: Mapping[str, Any]) -> ExportedTable:
    routing = data["routing"]
    block = routing["block_size"]
    table = ExportedTable(
        segments=tuple(_whole(each, "segments") for each in data["segments"]),
        steps=tuple(_number(each, "steps") for each in data["steps"]),
        routing=Routing(
            _text(routing["dist_type"], "dist_type"),
            _whole(routing["num_shards"], "num_shards"),
            None if block is None else _whole(block, "block_size"),
            _flag(routing["skip_first"], "skip_first"),
        ),
        rows=_whole(data["rows"], "rows"),
        file=_file(data["file"]),
    )
    if not 1 <= table.dim <= 1 << 20 or min(table.segments) < 1 or len(table.steps) != len(table.segments):
        raise ValueError("a table needs segments of 1 or more columns, and a step for each")
    if not all(0 < step < float("inf") for step in table.steps):
        raise ValueError("steps must be positive and finite")
    if table.routing.dist_type not in MODES:
        raise ValueError(f"dist_type {table.routing.dist_type!r} is none of {', '.join(MODES)}")
    table.router()
    return table


def _file(data: Any) -> FileEntry | None:
    if data is None:
        return None
    entry = FileEntry(
        _text(data["path"], "path"), _whole(data["bytes"], "bytes"), _text(data["checksum"], "checksum")
    )
    if any(char in "/\\" or not char.isprintable() for char in entry.path) or entry.path.startswith("."):
        raise ValueError(f"a file's path is a plain name, not {entry.path!r}")
    return entry


def check_name(model: str) -> None:
    """Raises InputError unless requests can call a model so."""
    if not isinstance(model, str) or not 1 <= len(model) <= _MAX_TEXT:
        raise InputError(f"a model's name is a text of 1 to {_MAX_TEXT} characters, not {repr(model)[:100]}")
    if any(char in "/:" or not char.isprintable() for char in model):
        raise InputError(f"model {model!r} must not hold '/', ':' or unprintable characters")


def _check(signature: Signature) -> None:
    check_name(signature.model)
    part = signature.part
    if part not in (STANDALONE, ENTRY) and not re.fullmatch(r"ps_(0|[1-9][0-9]{0,8})", part):
        raise ValueError(f"part {part!r} is none of standalone, entry, ps_0, ps_1 ...")
    if signature.precision not in PRECISIONS:
        raise ValueError(f"precision {signature.precision!r} is unknown")
    if (signature.sub_graph_num == 0) != (part == STANDALONE) or (signature.shard or 0) > max(
        0, signature.sub_graph_num - 1
    ):
        raise ValueError(f"part {part!r} of {signature.sub_graph_num} ps parts")
    for name, table in signature.tables.items():
        if (table.file is None) != (part == ENTRY):
            raise ValueError(f"table {name!r} has {'no' if table.file is None else 'a'} file in {part!r}")
        if table.routing.num_shards > max(1, signature.sub_graph_num):
            raise ValueError(f"table {name!r} is spread over {table.routing.num_shards} parts")
    if signature.predicts == (signature.shard is not None):
        raise ValueError(f"part {part!r} has {'a' if signature.predicts else 'no'} program")
    if not signature.predicts:
        return
    if signature.outputs != OUTPUTS:
        raise ValueError(f"outputs are {', '.join(signature.outputs)}, not {', '.join(OUTPUTS)}")
    if signature.num_dense and any(spec.name == signature.dense_name for spec in signature.features):
        raise ValueError(f"a feature is called {signature.dense_name!r}, as are the dense values")
    plan = signature.plan()
    for name, feature in signature.masks.items():
        if feature not in plan.features or not isinstance(plan.features[feature].combiner, FirstN):
            raise ValueError(f"mask {name!r} is of {feature!r}, which is no FirstN feature")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_TEXT:
        raise ValueError(f"{name} must be a string of 1 to {_MAX_TEXT} characters, got {repr(value)[:100]}")
    return value


def _whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{name} must be a whole number, got {repr(value)[:100]}")
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be numbers, got {repr(value)[:100]}")
    return float(value)


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {repr(value)[:100]}")
    return value
