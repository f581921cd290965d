"""Export: writes a model as a directory that a server maps into memory.

    OUT/{version}/                                   one process holds everything
    OUT/entry/{version}/  OUT/ps_0/{version}/  ...   the entry has the model, the ps parts have the rows

Shards without a model are exported as rows only: the same directories without a program and without an entry.
docs/formats/export.md specifies the format.

A version appears complete, or not at all. Its parts are written to staging directories, whose names begin
with `.draft-`, and renamed when all are complete. A staging directory is locked while its process lives;
those of killed processes are removed by the next export to the same place.

Tables over ranks are exported by all ranks together: rank 0 writes, and the other ranks send it their rows
(`RankRows`). All ranks make the same rounds, and rank 0 decides what each round is:

    message    from -> to      content
    command    rank 0 -> all   a table to scan from its beginning; to continue with it; or the end, with
                               the error of rank 0
    sizes      all -> all      the number of rows of each rank's next chunk, or the error of its scan
    chunks     all -> rank 0   ids int64 [k], then rows float32 [k, dim]

A round without rows ends the scan of a table. A round runs in the thread of the exchange as one task, so an
interrupted rank 0 still completes it before it sends the end. The number of rows in a round is limited for
all ranks together, so rank 0 never holds a whole table.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megalith.checkpoint.manifest import Routing, megalith_version
from megalith.checkpoint.model_state import is_sharded, reshard_fsdp, routing_of
from megalith.distributed.dense_parameters import fsdp1_module
from megalith.distributed.exchange import Exchange
from megalith.distributed.ranks import Ranks
from megalith.errors import ExportError, InputError, MegalithError, UsageError
from megalith.ops import checks
from megalith.ragged import Ragged
from megalith.serving.export.frozen_rows import FrozenWriter
from megalith.serving.export.program_export import (
    ACTIVATIONS,
    Exportable,
    ModelParts,
    ServingModule,
    WrittenProgram,
    export_program,
)
from megalith.serving.export.row_format import dtype_of, steps_for
from megalith.serving.export.signature import (
    DENSE,
    ENTRY,
    ID_KINDS,
    NAME,
    STANDALONE,
    Example,
    ExportedTable,
    FeatureSpec,
    LayoutSpec,
    Signature,
    check_name,
    write_examples,
)
from megalith.shards import Shards
from megalith.storage.local_files import sync_path, take_lock
from megalith.table import Chunk, ServingPrecision, TableConfig

# Table -> chunks of distinct ids int64 [k] and rows float32 [k, dim]. Called twice for each table.
RowSource = Callable[[str], Iterator[tuple[Tensor, Tensor]]]
_STAGING_PREFIX = ".draft-"
_LOCK_SECONDS = 60.0  # Seconds that another export to the same place may take to make its directory


class StagingDirectories:
    """The directories in which the parts of a version are written, next to their final places.

    As a context manager it creates them, and removes those that were not published.
    """

    def __init__(self, out: Path, version: int, parts: Sequence[str]) -> None:
        self._out, self._version = out, version
        self.parts = list(parts)
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 2**63:
            raise InputError(f"export: version must be an integer from 0 to 2^63 - 1, got {version!r}")
        self._name = f"{_STAGING_PREFIX}{version}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._locks = ExitStack()

    def _base(self, part: str) -> Path:
        return self._out if part == STANDALONE else self._out / part

    def path(self, part: str) -> Path:
        """Return the staging directory of a part."""
        return self._base(part) / self._name

    def __enter__(self) -> StagingDirectories:
        for part in self.parts:
            if (self._base(part) / str(self._version)).exists():
                raise ExportError(
                    f"{self._base(part) / str(self._version)} exists: choose another version "
                    "(--version, in Python version=...), or another directory"
                )
        try:
            for part in self.parts:
                self._make(part)
        except (OSError, ExportError):
            self.__exit__()
            raise
        return self

    def _make(self, part: str) -> None:
        """Create a staging directory, locked while this process lives, and remove abandoned ones."""
        base = self._base(part)
        base.mkdir(parents=True, exist_ok=True)
        with ExitStack() as exclusive:
            with suppress(OSError):  # without locks, no staging directory is removed
                # Otherwise another process could see a directory before it is locked.
                exclusive.enter_context(_locked(base, _LOCK_SECONDS))
            for abandoned in base.glob(f"{_STAGING_PREFIX}*"):
                with suppress(OSError, ExportError), _locked(abandoned):
                    shutil.rmtree(abandoned, ignore_errors=True)
            self.path(part).mkdir()
            with suppress(OSError):
                self._locks.enter_context(_locked(self.path(part), _LOCK_SECONDS))

    def __exit__(self, *_: object) -> None:
        for part in self.parts:
            shutil.rmtree(self.path(part), ignore_errors=True)
        self._locks.close()

    def write(self, part: str, signature: Signature) -> None:
        """Write the signature of a part, the last of its files, and flush all files to disk."""
        path = self.path(part)
        text = signature.to_json()
        # A signature that servers cannot read must not be published.
        Signature.from_dict(json.loads(text), f"export: {NAME}")
        (path / NAME).write_text(text)
        for each in path.iterdir():
            sync_path(each)
        sync_path(path)

    def publish(self) -> None:
        """Rename all parts to their final names, in their order; if one fails, rename the others back."""
        done: list[str] = []
        try:
            for part in self.parts:
                os.rename(self.path(part), self._base(part) / str(self._version))
                done.append(part)
                sync_path(self._base(part))
        except OSError:
            for part in done:
                os.rename(self._base(part) / str(self._version), self.path(part))
            raise


@contextmanager
def _locked(directory: Path, seconds: float = 0.0) -> Iterator[None]:
    """Hold a lock that the system releases when the process ends, even if it is killed."""
    handle = os.open(directory, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        if not take_lock(handle, seconds):
            raise ExportError(
                f"{directory}: another process has held the lock of this directory for {seconds:g} s: end it "
                "if it hangs (`fuser` of the directory names it), or choose another directory"
            )
        yield
    finally:
        os.close(handle)


_EXAMPLE_SIZES = (1, 8)
_MAX_FILE_NAME = 100


@dataclass(frozen=True)
class Provenance:
    """The checkpoint that an export is made of."""

    base: str
    """Id of the checkpoint's latest save."""
    step: int
    """Global step of that save."""


def export_model(
    model: Exportable | ServingModule | nn.Module | Shards,
    out: str | Path,
    *,
    name: str,
    precision: str = "float32",
    num_shards: int = 0,
    version: int | None = None,
    block_size: int | None = None,
    rows: RowSource | None = None,
    source: Provenance | None = None,
    id_kinds: Mapping[str, str] | None = None,
    single_ids: Sequence[str] = (),
    outputs: Sequence[str] | None = None,
    activations: Mapping[str, str] | None = None,
    joint_rows: bool | None = None,
    compile: bool = False,
    on_rows: Callable[[int], object] | None = None,
) -> Path:
    """Write a version of a model below `out`. A call that fails leaves no files.

    If the tables are spread over ranks, it is a collective call without `rows`: rank 0 writes the files,
    with the rows of all ranks and its own dense weights. If it fails on one rank, it raises on all.

    Args:
        model: A model with `score`, which is traced in eval mode, or any other `nn.Module` that contains
            EmbeddingCollections; a ServingModule says how to call one that takes dense values. Shards are
            exported as rows without a model: servers answer lookups of them, but no requests for scores.
        out: Directory of the versions.
        name: Name of the model in requests.
        precision: Precision of the rows: "float32", "float16" or "int8". A segment with its own
            `Segment.serving` is stored as that says.
        num_shards: Number of ps parts, over which rows are distributed by each table's routing mode: that of
            its config, its shards or the checkpoint that was loaded; 0 writes a standalone model.
        version: A number below 2^63 (None: the step, which is 0 for Shards).
        block_size: Number of consecutive ids per part, for tables of dist_type "continuous".
        rows: Source of the rows (None: the model's tables).
        source: The checkpoint of the rows.
        id_kinds: Feature -> what its ids were in training: "integer", "xxhash64" (hashes of text) or "fid".
            Servers refuse requests with others: strings for integers and fids, integers for text. A feature
            that is not listed is not checked.
        single_ids: Features whose rows have one id each; metadata then gives their shape as [B].
        outputs: Names of the tensors that the model returns as one tensor or as a tuple; a dict has names
            already. None: `output`, or `output_0`, `output_1` ...; and `logits` and `probabilities` (their
            sigmoid) if the model's `score` returns a tensor [B] or [B, 1].
        activations: Output -> "sigmoid", "softmax" (over the last dimension), "exp" or "tanh", which is
            applied before the output is returned. Other outputs are returned as the model computes them.
        joint_rows: Whether the outputs of a row depend on the other rows of its request, which is then
            computed alone and never split. None: found by computing random rows in batches of several
            sizes, which does not show a dependence that needs certain values.
        compile: Also write the dense part as a library for this CPU and this version of torch, which servers
            load if they are started with `compiled`. It needs a C++ compiler and takes about a minute.
        on_rows: Called with the number of rows of each chunk written; over ranks, on rank 0.

    Returns:
        `out`.

    Raises:
        ExportError: The version exists or cannot be written, or another rank failed.
        InputError: The model, or an argument, cannot be exported.
        UsageError: The dense weights are sharded over ranks.
        RankTimeoutError: A rank does not make this call.
    """
    if isinstance(model, Shards):
        parts, tables = None, dict.fromkeys(model.configs, model)
    else:
        parts = ModelParts(model)
        tables = parts.shards
    ranks = next(iter(tables.values())).ranks if rows is None else Ranks()

    def check() -> Signature:
        check_name(name)
        dtype_of(precision)
        checks.path(out, "export: out")
        checks.integer(num_shards, "export: num_shards", least=0)
        if block_size is not None:
            checks.integer(block_size, "export: block_size")
        if source is not None:
            checks.instance(source, Provenance, "export: source")
        checks.callback(rows, "export: rows")
        checks.callback(on_rows, "export: on_rows")
        _check_outputs(outputs, activations)
        if joint_rows is not None:
            checks.flag(joint_rows, "export: joint_rows")
        if checks.flag(compile, "export: compile") and parts is None:
            raise InputError("export: compile=True needs a model; Shards have rows only")
        if ranks.size > 1:
            if parts is not None:
                _check_whole(parts.module)
            for shards in set(tables.values()):
                shards.flush()
        origin = source or Provenance(f"live-{uuid.uuid4().hex}", 0 if parts is None else parts.step)
        signature = Signature(
            model=name,
            version=origin.step if version is None else version,
            part=STANDALONE,
            sub_graph_num=num_shards,
            base=origin.base,
            step=origin.step,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            megalith=megalith_version(),
            precision=precision,
            tables={},
        )
        return signature if parts is None else _describe(signature, parts, id_kinds, single_ids)

    signature = ranks.agree(check, error=ExportError)

    def write_program(path: Path) -> WrittenProgram:
        assert parts is not None
        return export_program(
            parts, path, names=outputs, activations=activations, joint_rows=joint_rows, compile=compile
        )

    def write(found: RowSource) -> None:
        writer = _VersionWriter(
            Path(out), signature, parts, tables, None if parts is None else write_program, block_size
        )
        writer.write(found, on_rows)

    if rows is not None:
        write(_checked_rows(rows))
    elif ranks.size == 1:
        write(_live_rows(tables))
    else:
        RankRows(tables).write(write)
    return Path(out)


def _check_outputs(outputs: Any, activations: Any) -> None:
    if outputs is not None:
        _names(outputs, "export: outputs")
    given = {} if activations is None else activations
    for name, each in checks.mapping(given, "export: activations", '{"ctr": "sigmoid"}').items():
        checks.text(name, "export: activations: an output")
        checks.one_of(each, list(ACTIVATIONS), f"export: activation of {name!r}")


def _names(given: Any, what: str) -> list[str]:
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        raise InputError(f"{what} must be a list of names, got {repr(given)[:100]}")
    return list(given)


def _check_whole(model: nn.Module) -> None:
    """Raise UsageError unless this rank has the whole dense part of a model."""
    reshard_fsdp(model)
    sharded = any(is_sharded(each) for each in (*model.parameters(), *model.buffers()))
    if sharded or fsdp1_module(model) is not None:
        raise UsageError(
            "export: the dense weights are sharded over ranks: save a checkpoint, load it into a model of "
            "one process, and export that"
        )


def _describe(signature: Signature, parts: ModelParts, id_kinds: Any, single_ids: Any) -> Signature:
    """Return a signature with the inputs of a model."""
    plan = parts.plan
    kinds = checks.mapping({} if id_kinds is None else id_kinds, "export: id_kinds", '{"user": "integer"}')
    for name, each in kinds.items():
        checks.one_of(name, list(plan.features), "export: id_kinds: a feature")
        checks.one_of(each, ID_KINDS, f"export: id_kinds of {name!r}")
    singles = _names(single_ids, "export: single_ids")
    for name in singles:
        checks.one_of(name, list(plan.features), "export: single_ids: a feature")
    dense_name = DENSE
    while dense_name in plan.features:
        dense_name += "_values"
    return replace(
        signature,
        features=tuple(
            FeatureSpec.of(each, kinds.get(name), single=name in singles)
            for name, each in plan.features.items()
        ),
        layouts=None if plan.layouts is None else tuple(map(LayoutSpec.of, plan.layouts)),
        masks=dict(parts.masks),
        num_dense=parts.num_dense,
        dense_name=dense_name,
    )


@dataclass(frozen=True)
class _VersionWriter:
    """Writes all parts of a version."""

    out: Path
    signature: Signature
    model: ModelParts | None
    tables: Mapping[str, Shards]
    write_program: Callable[[Path], WrittenProgram] | None
    block_size: int | None

    def write(self, rows: RowSource, on_rows: Callable[[int], object] | None) -> None:
        num_shards = self.signature.sub_graph_num
        parts = [f"ps_{number}" for number in range(num_shards)] or [STANDALONE]
        if num_shards and self.model is not None:
            parts.append(ENTRY)  # the last to be published, because it needs the others
        try:
            with StagingDirectories(self.out, self.signature.version, parts) as staging:
                tables = {
                    table: _TableExporter(
                        staging,
                        shards.configs[table],
                        self._dist_type(table),
                        self.signature.precision,
                        num_shards,
                        self.block_size,
                    ).write(rows, on_rows)
                    for table, shards in self.tables.items()
                }
                self._write_parts(staging, tables)
                staging.publish()
        except OSError as error:
            if isinstance(error, MegalithError):
                raise
            raise ExportError(f"cannot write {self.out}: {error}") from error

    def _dist_type(self, table: str) -> str:
        kept = {} if self.model is None else self.model.routing(table)
        return routing_of(self.tables[table], table, kept).dist_type

    def _write_parts(self, staging: StagingDirectories, tables: Mapping[str, _WrittenTable]) -> None:
        for number, part in enumerate(staging.parts):
            own = replace(
                self.signature,
                part=part,
                tables={
                    table: replace(written.specs[0], rows=0, file=None)
                    if part == ENTRY
                    else written.specs[number]
                    for table, written in tables.items()
                },
            )
            if part not in (ENTRY, STANDALONE):
                own = replace(own, features=(), layouts=None, masks={}, num_dense=0)
            elif self.write_program is not None:
                path = staging.path(part)
                samples = {table: written.sample for table, written in tables.items()}
                program = self.write_program(path / "dense.pt2")
                examples = write_examples(path / "examples.json", _examples(self.signature, samples))
                own = replace(
                    own,
                    program=program.file,
                    outputs=program.outputs,
                    joint_rows=program.joint_rows,
                    examples=examples,
                )
            staging.write(part, own)


# ---- rows


@dataclass(frozen=True)
class _WrittenTable:
    """A table of the export: its spec in each ps part (or the one part), and some of its ids."""

    specs: list[ExportedTable]
    sample: list[int]


class _TableExporter:
    """Writes the rows of one table, each to its part."""

    def __init__(
        self,
        staging: StagingDirectories,
        config: TableConfig,
        mode: str,
        precision: str,
        num_shards: int,
        block_size: int | None,
    ) -> None:
        self._staging, self._table, self._config, self._precision = staging, config.name, config, precision
        self._parts = [part for part in staging.parts if part != ENTRY]
        self._kinds = tuple(
            each.name if isinstance(each, ServingPrecision) else each or precision
            for each in (segment.serving for segment in config.segments)
        )
        block = block_size if mode == "continuous" and num_shards > 1 else None
        if mode == "continuous" and num_shards > 1 and block is None:
            raise InputError(
                f"table {self._table!r} has dist_type 'continuous': give block_size, the ids of a part"
            )
        self._routing = Routing(mode, max(1, num_shards), block)
        self._router = self._routing.router()

    def write(self, rows: RowSource, on_rows: Callable[[int], object] | None) -> _WrittenTable:
        segments = self._config.segments
        dims = [segment.dim for segment in segments]
        ids, largest = self._first_pass(rows, dims)
        steps = tuple(
            each.serving.unit if isinstance(each.serving, ServingPrecision) else steps_for([size], kind)[0]
            for each, size, kind in zip(segments, largest, self._kinds, strict=True)
        )
        is_plain = all(segment.serving is None for segment in segments)
        spec = ExportedTable(tuple(dims), steps, self._routing, kinds=None if is_plain else self._kinds)
        format = spec.format(self._precision)
        owners = None if self._router is None else self._router.owner(ids)
        file = f"{_file_name(self._table)}.safetensors"
        writers = [
            FrozenWriter(
                self._staging.path(part) / file, ids if owners is None else ids[owners == number], format
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
        return _WrittenTable(specs, ids[: max(_EXAMPLE_SIZES)].tolist())

    def _add(self, writer: FrozenWriter, ids: Tensor, rows: Tensor) -> None:
        try:
            writer.add(ids, rows)
        except InputError as error:
            raise InputError(f"table {self._table!r}: {error}") from None

    def _first_pass(self, rows: RowSource, segments: list[int]) -> tuple[Tensor, list[float]]:
        """Return all ids, and the largest magnitude of each segment if the precision needs it."""
        found = [torch.empty(0, dtype=torch.int64, device="cpu")]
        largest = [0.0] * len(segments)
        for ids, values in rows(self._table):
            found.append(ids)
            if "int8" in self._kinds and ids.numel():
                parts = values.split(segments, 1)
                finite = (part.abs().nan_to_num(0.0, 0.0, 0.0).max() for part in parts)
                largest = [max(a, float(b)) for a, b in zip(largest, finite, strict=True)]
        return torch.cat(found), largest


def _checked_rows(rows: RowSource) -> RowSource:
    """Return a source that checks the form of what a user's function returns; writers check ids and rows."""

    def checked(table: str) -> Iterator[tuple[Tensor, Tensor]]:
        chunks: Any = rows(table)
        if not isinstance(chunks, Iterable):
            raise InputError(
                f"export: rows({table!r}) must return chunks (ids, rows), got {type(chunks).__name__}"
            )
        for chunk in chunks:
            if not isinstance(chunk, tuple | list) or [isinstance(x, Tensor) for x in chunk] != [True, True]:
                raise InputError(
                    f"export: rows({table!r}) must return pairs of tensors, int64 [k] and float32 [k, dim], "
                    f"got {type(chunk).__name__}"
                )
            yield chunk[0], chunk[1]

    return checked


def _live_rows(tables: Mapping[str, Shards]) -> RowSource:
    def rows(table: str) -> Iterator[tuple[Tensor, Tensor]]:
        for chunk in tables[table].scan(table):
            yield chunk.ids, chunk.rows

    return rows


# ---- inputs


def _examples(signature: Signature, samples: Mapping[str, list[int]]) -> list[Example]:
    examples: list[Example] = []
    for size in _EXAMPLE_SIZES:
        features = {}
        for spec in signature.features:
            known = samples[spec.table] or [0]
            count = 1 if spec.shared else size
            features[spec.name] = Ragged.from_lists([[known[k % len(known)]] for k in range(count)])
        dense = torch.zeros(size, signature.num_dense, device="cpu") if signature.num_dense else None
        examples.append((features, dense))
    return examples


def _file_name(table: str) -> str:
    """Return a file name for a table of any name."""
    plain = "".join(char if char.isascii() and (char.isalnum() or char in "-_") else "_" for char in table)
    if plain == table and len(table) <= _MAX_FILE_NAME:
        return plain
    return f"{plain[:_MAX_FILE_NAME]}-{zlib.crc32(table.encode(errors='surrogatepass')):08x}"


# ---- rows of tables over ranks

# Number of rows of all ranks together that a round sends at most, but at least one row of each rank
ROWS_PER_ROUND = 65536


@dataclass(frozen=True)
class _Command:
    """What rank 0 wants: a table, to scan it from its beginning; None: the next chunks of that table."""

    table: str | None = None
    is_end: bool = False
    error: str | None = None  # With `is_end`: why rank 0 has failed; None: it has not


class RankRows:
    """The rows of all ranks, in an order that is the same as long as no table changes."""

    def __init__(self, tables: Mapping[str, Shards]) -> None:
        exchange = next(iter(tables.values())).ranks
        assert isinstance(exchange, Exchange)
        self._tables, self._exchange = tables, exchange
        self._chunk_size = max(1, ROWS_PER_ROUND // self._exchange.size)
        self._scan: Iterator[Chunk] = iter(())
        self._failure: Exception | None = None  # The error of this rank's scan

    def write(self, write: Callable[[RowSource], None]) -> None:
        """Call a function on rank 0 with the rows of all ranks; if it fails, raise on all. A collective
        call."""
        if self._exchange.rank:
            self._send_all()
            return
        try:
            write(self._rows)
        except BaseException as error:
            with suppress(MegalithError):  # the other ranks cannot be reached
                self._round(_Command(is_end=True, error=f"{type(error).__name__}: {error}"))
            raise
        self._round(_Command(is_end=True))

    def _rows(self, table: str) -> Iterator[tuple[Tensor, Tensor]]:
        command = _Command(table)
        while (chunks := self._round(command)[1]) is not None:
            yield from chunks
            command = _Command()

    def _send_all(self) -> None:
        """Send rows until rank 0 has written them, on the other ranks."""
        command = _Command()
        while not command.is_end:
            command, _ = self._round(None)
        if self._failure is not None:
            raise self._failure
        if command.error is not None:
            raise ExportError(f"rank 0: {command.error}")

    # ---- a round

    def _round(self, command: _Command | None) -> tuple[_Command, list[tuple[Tensor, Tensor]] | None]:
        """Make a round; return rank 0's command and, on rank 0, the chunks; None if no rank has any more."""
        return self._exchange.run(lambda: self._exchange_chunks(command))

    def _exchange_chunks(
        self, command: _Command | None
    ) -> tuple[_Command, list[tuple[Tensor, Tensor]] | None]:
        exchange = self._exchange
        own: _Command = exchange.broadcast(command)
        if own.is_end:
            return own, None
        chunk = self._next_chunk(own)
        size = None if chunk is None else chunk.ids.numel()
        sizes = exchange.gather(size if self._failure is None else f"{self._failure}")
        for rank, found in enumerate(sizes):
            if isinstance(found, str):
                if exchange.rank:
                    return own, None  # rank 0 sends the end
                raise self._failure or ExportError(f"rank {rank}: {found}")
        if all(found is None for found in sizes):
            return own, None
        bytes_of = [(found or 0) * (8 + 4 * self._dim) for found in sizes]
        none = [0] * (exchange.size - 1)
        received = exchange.all_to_all(
            torch.empty(0, dtype=torch.uint8, device="cpu") if chunk is None else _as_bytes(chunk),
            [bytes_of[exchange.rank], *none],
            [0, *none] if exchange.rank else bytes_of,
            "export: rows to rank 0",
        )
        if exchange.rank:
            return own, None
        return own, [self._chunk_of(part) for part in received.split(bytes_of) if part.numel()]

    def _next_chunk(self, command: _Command) -> Chunk | None:
        try:
            if command.table is not None:
                shards = self._tables[command.table]
                self._scan = shards.scan(command.table, self._chunk_size)
                self._dim = shards.configs[command.table].dim
            return next(self._scan, None)
        except Exception as error:
            self._failure = error
            return None

    def _chunk_of(self, part: Tensor) -> tuple[Tensor, Tensor]:
        count = part.numel() // (8 + 4 * self._dim)
        ids, rows = part.split([8 * count, 4 * self._dim * count])
        # A copy, because the address of the ids must be a multiple of 8.
        return ids.clone().view(torch.int64), rows.view(torch.float32).view(count, self._dim)


def _as_bytes(chunk: Chunk) -> Tensor:
    parts = (chunk.ids.contiguous(), chunk.rows.contiguous())
    return torch.cat([part.view(torch.uint8).flatten() for part in parts])
