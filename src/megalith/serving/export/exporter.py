"""Export: a model becomes a directory that a server maps into memory and answers from.

    OUT/{version}/                         one process holds everything
    OUT/entry/{version}/  OUT/ps_0/{version}/  ...   an entry has the model, the ps parts the rows

A version is written under another name and renamed when it is complete; what a killed process left behind is
removed by the next one that writes there. docs/formats/export.md has the page.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megalith.checkpoint.manifest import FileEntry, Routing
from megalith.checkpoint.save_job import megalith_version
from megalith.errors import ExportError, InputError, MegalithError, UsageError
from megalith.nn import EmbeddingCollection
from megalith.nn.feature_plan import FeaturePlan
from megalith.ragged import Ragged
from megalith.serving.export import precision as precisions
from megalith.serving.export.archive import write_archive
from megalith.serving.export.frozen_rows import FrozenWriter
from megalith.serving.export.servable import Example, write_examples
from megalith.serving.export.signature import (
    DENSE,
    ENTRY,
    NAME,
    STANDALONE,
    ExportedTable,
    FeatureSpec,
    LayoutSpec,
    Signature,
    check_name,
)
from megalith.storage.store import checksum
from megalith.table import TableConfig

RowSource = Callable[[str], Iterator[tuple[Tensor, Tensor]]]
"""A table's rows in pieces: ids int64 [k], rows float32 [k, dim], an id once. It is called twice."""
_EXAMPLE_SIZES = (1, 8)
_MAX_FILE_NAME = 100
_DRAFT = ".draft-"


class Exportable(Protocol):
    """What `export_model` needs of a model; `megalith.models.Model` has it."""

    embeddings: EmbeddingCollection
    masks: Mapping[str, str]
    num_dense: int

    def score(self, rows: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        """The dense part: embeddings and masks by name, dense values -> logits [B]."""


@dataclass(frozen=True)
class Provenance:
    """Where an export comes from. base: the id of a checkpoint's latest save."""

    base: str
    step: int


def export_model(
    model: Exportable,
    out: str | Path,
    *,
    name: str,
    precision: str = "float32",
    num_shards: int = 0,
    version: int | None = None,
    block_size: int | None = None,
    rows: RowSource | None = None,
    source: Provenance | None = None,
    on_rows: Callable[[int], object] | None = None,
) -> Path:
    """Writes a version of a model below `out` and returns `out`.

    name: what requests call it. precision: of the rows, "float32", "float16" or "int8". num_shards: 0 for a
    model that stands alone, or the number of ps parts its rows are spread over by each table's dist_type.
    version: a whole number (None: the step). block_size: for tables of dist_type "continuous". rows: where
    rows come from (None: the model's tables). source: the checkpoint those are of. on_rows: told how many
    rows were written, piece by piece.
    Raises ExportError if the version is there already or cannot be written, InputError for what cannot be
    exported. A call that fails leaves nothing behind.
    """
    collection = _collection(model)
    check_name(name)
    precisions.dtype_of(precision)
    if num_shards < 0:
        raise InputError(f"export: num_shards must be 0 or above, got {num_shards}")
    if rows is None:
        rows = _live_rows(collection)
    source = source or Provenance(f"live-{uuid.uuid4().hex}", collection.global_step)
    signature = Signature(
        model=name,
        version=source.step if version is None else version,
        part=STANDALONE,
        sub_graph_num=num_shards,
        base=source.base,
        step=source.step,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        megalith=megalith_version(),
        precision=precision,
        tables={},
        features=tuple(FeatureSpec.of(feature) for feature in collection.features),
        layouts=_layouts(collection.plan),
        masks=dict(model.masks),
        num_dense=model.num_dense,
        dense_name=_dense_name(collection),
    )
    try:
        with _Drafts(Path(out), signature.version, num_shards) as drafts:
            tables = {
                table: _Tables(drafts, table, config, precision, num_shards, block_size).write(rows, on_rows)
                for table, config in collection.shards.configs.items()
            }
            _write_parts(model, drafts, signature, tables)
            drafts.publish()
    except OSError as error:
        if isinstance(error, MegalithError):
            raise
        raise ExportError(f"{out} cannot be written: {error}") from error
    return Path(out)


def _collection(model: Any) -> EmbeddingCollection:
    """The model's tables, if it is a model that `score` covers."""
    lacking = [name for name in ("embeddings", "masks", "num_dense", "score") if not hasattr(model, name)]
    if not isinstance(model, nn.Module) or lacking:
        raise InputError(
            f"export: expected a model, got {type(model).__name__}"
            + (f" without {', '.join(lacking)}" if lacking else "")
        )
    collections = [each for each in model.modules() if isinstance(each, EmbeddingCollection)]
    if len(collections) != 1 or collections[0] is not model.embeddings:
        raise InputError(
            f"export: {type(model).__name__} has {len(collections)} EmbeddingCollections; a model has one, "
            "`embeddings`, and `score` reads no other"
        )
    return collections[0]


def _dense_name(collection: EmbeddingCollection) -> str:
    """What requests call the dense values: a name that no feature has."""
    name = DENSE
    while any(feature.name == name for feature in collection.features):
        name += "_values"
    return name


def _write_parts(
    model: Exportable, drafts: _Drafts, signature: Signature, tables: Mapping[str, _Written]
) -> None:
    front = drafts.parts[-1]
    program = export_program(model, drafts.path(front) / "dense.pt2")
    samples = {table: written.sample for table, written in tables.items()}
    examples = write_examples(drafts.path(front) / "examples.json", _examples(signature, samples))
    for number, part in enumerate(drafts.parts):
        own = replace(
            signature,
            part=part,
            tables={
                table: written.without_rows if part == ENTRY else written.specs[number]
                for table, written in tables.items()
            },
        )
        if part == front:
            own = replace(own, program=program, examples=examples)
        else:
            own = replace(own, features=(), layouts=None, masks={}, num_dense=0)
        drafts.write(part, own)


# ---- rows


@dataclass(frozen=True)
class _Written:
    """A table of the export: its spec in each ps part (or the one part), and some of its ids."""

    specs: list[ExportedTable]
    sample: list[int]

    @property
    def without_rows(self) -> ExportedTable:
        return replace(self.specs[0], rows=0, file=None)


class _Tables:
    """Writes one table's rows, each to the part that has it."""

    def __init__(
        self,
        drafts: _Drafts,
        table: str,
        config: TableConfig,
        precision: str,
        num_shards: int,
        block_size: int | None,
    ) -> None:
        self._drafts, self._table, self._config, self._precision = drafts, table, config, precision
        self._parts = [part for part in drafts.parts if part != ENTRY]
        mode = config.dist_type or "roundrobin"
        block = block_size if mode == "continuous" and num_shards > 1 else None
        if mode == "continuous" and num_shards > 1 and block is None:
            raise InputError(
                f"table {table!r} is spread in blocks (dist_type 'continuous'): give block_size, "
                "the number of ids of a part"
            )
        self._routing = Routing(mode, max(1, num_shards), block)
        self._router = self._routing.router()

    def write(self, rows: RowSource, on_rows: Callable[[int], object] | None) -> _Written:
        segments = [segment.dim for segment in self._config.segments]
        ids, largest = self._first_pass(rows, segments)
        steps = precisions.steps_for(largest, self._precision)
        spec = ExportedTable(tuple(segments), tuple(steps), self._routing)
        owners = None if self._router is None else self._router.owner(ids)
        file = f"{_plain(self._table)}.safetensors"
        writers = [
            FrozenWriter(
                self._drafts.path(part) / file,
                ids if owners is None else ids[owners == number],
                dim=self._config.dim,
                precision=self._precision,
                steps=torch.tensor(spec.column_steps),
            )
            for number, part in enumerate(self._parts)
        ]
        for piece, values in rows(self._table):
            owner = None if self._router is None else self._router.owner(piece)
            for number, writer in enumerate(writers):
                own = slice(None) if owner is None else owner == number
                self._add(writer, piece[own], values[own])
            if on_rows is not None:
                on_rows(piece.numel())
        specs = [replace(spec, rows=writer.rows, file=writer.close()) for writer in writers]
        return _Written(specs, ids[: max(_EXAMPLE_SIZES)].tolist())

    def _add(self, writer: FrozenWriter, ids: Tensor, rows: Tensor) -> None:
        try:
            writer.add(ids, rows)
        except InputError as error:
            raise InputError(f"table {self._table!r}: {error}") from None

    def _first_pass(self, rows: RowSource, segments: list[int]) -> tuple[Tensor, list[float]]:
        """All ids, and the largest magnitude of each segment where the precision needs it."""
        found = [torch.empty(0, dtype=torch.int64)]
        largest = [0.0] * len(segments)
        for ids, values in rows(self._table):
            found.append(ids)
            if self._precision == "int8" and ids.numel():
                parts = values.split(segments, 1)
                finite = (part.abs().nan_to_num(0.0, 0.0, 0.0).max() for part in parts)
                largest = [max(a, float(b)) for a, b in zip(largest, finite, strict=True)]
        return torch.cat(found), largest


def _live_rows(collection: EmbeddingCollection) -> RowSource:
    if collection.shards.world_size > 1:
        raise UsageError("export: this process has only its rank's rows: save a checkpoint and export that")

    def rows(table: str) -> Iterator[tuple[Tensor, Tensor]]:
        for chunk in collection.shards.scan(table):
            yield chunk.ids, chunk.rows

    return rows


# ---- the dense part


class _Score(nn.Module):
    """The dense part as a module."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: dict[str, Any], dense: Tensor | None) -> Tensor:
        logits: Tensor = self.model.score(rows, dense)
        return logits


def export_program(model: Exportable, path: Path) -> FileEntry:
    """Writes `score` through torch.export, for any batch size. Raises InputError if it cannot be traced."""
    assert isinstance(model, nn.Module)
    plan = model.embeddings.plan
    size = 3
    rows: dict[str, Any] = {}
    for output in plan.outputs:
        rows.setdefault(output.name, []).append(torch.zeros(size, *output.shape))
    lists = {layout.name for layout in plan.layouts or () if layout.kind == "none"}
    rows = {name: each if name in lists else each[0] for name, each in rows.items()}
    for name, feature in model.masks.items():
        rows[name] = torch.ones(size, plan.features[feature].combiner.inner, dtype=torch.bool)  # type: ignore[union-attr]
    dense = torch.zeros(size, model.num_dense) if model.num_dense else None
    batch = torch.export.Dim("batch", min=0)
    any_size = {0: batch}
    sizes = {
        name: [any_size] * len(each) if isinstance(each, list) else any_size for name, each in rows.items()
    }
    dynamic = (sizes, None if dense is None else any_size)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.export.export(_Score(model), (rows, dense), dynamic_shapes=dynamic)
            data = write_archive(program)
    except Exception as error:  # whatever torch raises for what it cannot trace
        raise InputError(
            f"{type(model).__name__}.score cannot be exported: it must be tensors in, tensors out, without "
            f"branches on values ({error})"
        ) from error
    finally:
        for module in training:
            module.training = True
    path.write_bytes(data)
    return FileEntry(path.name, len(data), checksum(zlib.crc32(data)))


def _layouts(plan: FeaturePlan) -> tuple[LayoutSpec, ...] | None:
    return None if plan.layouts is None else tuple(LayoutSpec.of(layout) for layout in plan.layouts)


def _examples(signature: Signature, samples: Mapping[str, list[int]]) -> list[Example]:
    examples: list[Example] = []
    for size in _EXAMPLE_SIZES:
        features = {}
        for spec in signature.features:
            known = samples[spec.table] or [0]
            count = 1 if spec.shared else size
            features[spec.name] = Ragged.from_lists([[known[k % len(known)]] for k in range(count)])
        dense = torch.zeros(size, signature.num_dense) if signature.num_dense else None
        examples.append((features, dense))
    return examples


# ---- directories


class _Drafts:
    """The directories of the parts while they are written, side by side with where they go."""

    def __init__(self, out: Path, version: int, num_shards: int) -> None:
        self._out, self._version = out, version
        self.parts = (
            [*(f"ps_{number}" for number in range(num_shards)), ENTRY] if num_shards else [STANDALONE]
        )
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 2**63:
            raise InputError(f"export: version must be a whole number below 2^63, got {version!r}")
        self._mark = f"{_DRAFT}{version}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._held = ExitStack()

    def _base(self, part: str) -> Path:
        return self._out if part == STANDALONE else self._out / part

    def path(self, part: str) -> Path:
        """Where a part is being written."""
        return self._base(part) / self._mark

    def __enter__(self) -> _Drafts:
        for part in self.parts:
            if (self._base(part) / str(self._version)).exists():
                raise ExportError(
                    f"{self._base(part) / str(self._version)} is there already: choose another version "
                    "(--version), or another directory"
                )
        try:
            for part in self.parts:
                self._make(part)
        except OSError:
            self.__exit__()
            raise
        return self

    def _make(self, part: str) -> None:
        """A draft that is locked while this process lives, in the place of those whose processes do not."""
        base = self._base(part)
        base.mkdir(parents=True, exist_ok=True)
        with ExitStack() as alone:
            with suppress(OSError):  # where nothing can be locked, nobody removes a draft
                alone.enter_context(_locked(base))  # or one could be seen that is made and not locked yet
            for draft in base.glob(f"{_DRAFT}*"):
                with suppress(OSError), _locked(draft, wait=False):
                    shutil.rmtree(draft, ignore_errors=True)
            self.path(part).mkdir()
            with suppress(OSError):
                self._held.enter_context(_locked(self.path(part)))

    def __exit__(self, *_: object) -> None:
        for part in self.parts:
            shutil.rmtree(self.path(part), ignore_errors=True)
        self._held.close()

    def write(self, part: str, signature: Signature) -> None:
        """Writes a part's signature, the last of its files, and makes them last."""
        path = self.path(part)
        text = signature.to_json()
        # What a server could not read must not be published.
        Signature.from_dict(json.loads(text), f"export: {NAME}")
        (path / NAME).write_text(text)
        for each in path.iterdir():
            _sync(each)
        _sync(path)

    def publish(self) -> None:
        """Gives all parts their names, or none; the entry, which asks the others, last."""
        done: list[str] = []
        try:
            for part in self.parts:
                os.rename(self.path(part), self._base(part) / str(self._version))
                done.append(part)
                _sync(self._base(part))
        except OSError:
            for part in done:
                os.rename(self._base(part) / str(self._version), self.path(part))
            raise


@contextmanager
def _locked(directory: Path, *, wait: bool = True) -> Iterator[None]:
    """Holds a lock that the system takes back when the process ends, however it does. Raises OSError."""
    handle = os.open(directory, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _plain(table: str) -> str:
    """A file name for a table, whatever its name holds."""
    plain = "".join(char if char.isascii() and (char.isalnum() or char in "-_") else "_" for char in table)
    if plain == table and len(table) <= _MAX_FILE_NAME:
        return plain
    return f"{plain[:_MAX_FILE_NAME]}-{zlib.crc32(table.encode(errors='surrogatepass')):08x}"
