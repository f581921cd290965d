"""Compression: the side of a peer. Chunked top-k, coded values, error feedback, publishing; and the way back.

An update is a pseudo-gradient: weights before local training minus weights after it. Of each chunk the `keep`
positions of largest magnitude are sent, coded in a few values that are computed
per parameter; what was not sent stays in the feedback and is sent later. Changed rows of embedding tables are
sent uncompressed.

Weights that are sharded over ranks are compressed by the ranks together, each its own chunks. Rows of tables
that are divided over ranks travel to the first one. The payload has the same bytes for any number of ranks.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megalith.distributed.dense_parameters import is_anchor
from megalith.distributed.elastic_ranks import ElasticRanks
from megalith.distributed.tensor_parts import Span, TensorPart, local_tensor, move_lines, part_of, shard_spans
from megalith.errors import InputError, StoreError, UsageError
from megalith.gather.payload import Header, Label, PackedRows, Payload, read_header, write_payload_file
from megalith.gather.payload_schema import ParameterSpec, PayloadSchema
from megalith.gather.plan import Fault, Status, payload_key
from megalith.gather.reduce import BLOCK_BYTES
from megalith.gather.table_rows import RowChanges
from megalith.ops import checks
from megalith.ops.matrix_chunks import (
    as_matrix,
    forward_dct,
    from_chunks,
    inverse_dct,
    largest_of_chunks,
    largest_of_rows,
    pack_codes,
    pack_indices,
    quantise,
    to_chunks,
    unpack_codes,
    unpack_indices,
)
from megalith.storage.bodies import ObjectBody, SpoolWriter, put_body
from megalith.storage.object_store import ObjectStore, StoreRequestError
from megalith.storage.retries import run_async
from megalith.storage.tensor_files import raw_bytes, tensor_of

_SLOWEST = 1 << 18  # bytes per second; a slower upload is given up and tried again
TableRows = Mapping[str, tuple[Tensor, Tensor]]
"""Rows of tables by name: ids int64 [n], rows float32 [n, dim]."""


@dataclass(frozen=True)
class Compressed:
    """A compressed update. With ranks, only the first one has it; it is empty on the others."""

    schema: PayloadSchema
    """The schema."""
    parameters: tuple[PackedRows, ...]
    """The parameters in schema order."""
    tables: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Rows of tables, sorted by id."""

    def write(self, file: BinaryIO, label: Label) -> Header:
        """Write the payload."""
        if not hasattr(file, "seek"):
            raise InputError(f"file must be a seekable file, got {checks.kind(file)}")
        if len(self.parameters) != len(self.schema.parameters):
            raise UsageError("only the first rank has the compressed update: publish it there")
        counts = {name: ids.numel() for name, (ids, _) in self.tables.items()}
        tables = (self.tables.get(table.name, ()) for table in self.schema.tables)
        pieces = chain.from_iterable((*self.parameters, *tables))
        return write_payload_file(file, self.schema, checks.instance(label, Label, "label"), pieces, counts)

    def to_bytes(self, label: Label) -> bytes:
        """Return the payload."""
        file = io.BytesIO()
        self.write(file, label)
        return file.getvalue()


class ErrorFeedback:
    """What was not sent yet, per parameter: decay * (what was left) + update - what is sent.

    Args:
        decay: The factor of what was left, from 0 to 1.

    Attributes:
        left: What is left of each parameter: float32, a DTensor if the parameter is sharded.
    """

    def __init__(self, decay: float = 0.95) -> None:
        value = checks.as_number(decay)
        if value is None or not 0.0 <= value <= 1.0:
            raise InputError(f"decay must be from 0 to 1, got {decay!r}")
        self.decay = value
        self.left: dict[str, Tensor] = {}

    def give_back(self, compressed: Compressed, *, ranks: ElasticRanks | None = None) -> None:
        """Take back an update that was compressed but never reached the store. A collective call with ranks.

        Args:
            compressed: What `compress` returned.
            ranks: The ranks over which parameters are sharded.

        Raises:
            InputError: It is of another model; nothing has changed.
        """
        together = ElasticRanks.or_alone(ranks)
        specs = checks.instance(compressed, Compressed, "compressed").schema.parameters

        def parts() -> list[TensorPart]:
            for spec in specs:
                if spec.name not in self.left or tuple(self.left[spec.name].shape) != spec.shape:
                    raise InputError(f"the feedback has no parameter {spec.name!r} of shape {spec.shape}")
            return [part_of(spec.name, self.left[spec.name], together) for spec in specs]

        for number, (spec, part) in enumerate(zip(specs, together.agree(parts, "feedback"), strict=True)):
            # Only the first rank has it; packed, it is small.
            given = compressed.parameters[number] if together.leads else ()
            sent = [
                together.exchange("packed", b"".join(map(raw_bytes, given[n : n + 1])))[0] for n in range(3)
            ]
            packed = PackedRows(
                tensor_of(bytearray(sent[0]), torch.uint8).view(spec.rows, spec.index_bytes),
                tensor_of(bytearray(sent[1]), torch.float32),
                tensor_of(bytearray(sent[2]), torch.uint8).view(spec.rows, spec.code_bytes),
            )
            part.tensor.add_(_unpack_lines(packed, spec, part.span).to(part.tensor.device))

    def state_dict(self) -> dict[str, Tensor]:
        """Return what is left, by parameter."""
        return dict(self.left)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set what is left.

        Args:
            state: What `state_dict` returned.
        """
        given = checks.mapping(state, "feedback state", "{'weight': tensor}")
        for name, tensor in given.items():
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                raise InputError(
                    f"feedback state: {name!r} must be a float tensor, got {checks.kind(tensor)}"
                )
        self.left = {name: tensor.detach().to(torch.float32).clone() for name, tensor in given.items()}

    def _add(self, name: str, part: TensorPart) -> Tensor:
        """Add an update to what is left; return what there is to send, the feedback's own memory."""
        if name not in self.left:
            self.left[name] = part.like(torch.zeros_like(part.tensor, dtype=torch.float32))
        return local_tensor(self.left[name]).mul_(self.decay).add_(part.tensor.to(torch.float32))


def compress(
    update: Mapping[str, Tensor],
    schema: PayloadSchema,
    *,
    tables: TableRows | None = None,
    feedback: ErrorFeedback | None = None,
    ranks: ElasticRanks | None = None,
) -> Compressed:
    """Compress a pseudo-gradient. A collective call with ranks.

    Args:
        update: A floating point tensor for each parameter of the schema, whole or sharded over the ranks.
        schema: The schema.
        tables: Changed rows, with distinct ids; other tables are sent empty. With ranks, each passes its own,
            and those of all are sent. An id that several ranks pass is sent once, with rows that are equal.
        feedback: Keeps what is not sent; it changes here.
        ranks: The ranks over which parameters are sharded or tables are divided. The first one has the rows
            of all in memory; the others have their own and one block.

    Returns:
        The compressed update, on the first rank.

    Raises:
        InputError: Names, shapes or values do not match; the feedback has not changed.
        RankFailedError: Another rank raised an error; the feedback has not changed.
    """
    together = ElasticRanks.or_alone(ranks)

    def check() -> tuple[dict[str, TensorPart], dict[str, tuple[Tensor, Tensor]]]:
        checks.instance(schema, PayloadSchema, "schema")
        if feedback is not None:
            checks.instance(feedback, ErrorFeedback, "feedback")
        given = checks.mapping({} if tables is None else tables, "tables", '{"users": (ids, rows)}')
        parts = _check_update(update, schema, together)
        for name, left in feedback.left.items() if feedback is not None else ():
            if name in parts and local_tensor(left).shape != parts[name].tensor.shape:
                raise InputError(f"the feedback of {name!r} and its update are sharded differently")
        if isinstance(tables, RowChanges) and tables.num_ranks not in (1, together.size):
            raise InputError(
                f"tables are the rows of one of {tables.num_ranks} ranks, but {together.size} "
                "ranks compress: call it on all of them, with ranks=ElasticRanks.of_group()"
            )
        return parts, {name: _sorted_rows(schema, name, rows) for name, rows in given.items()}

    parts, sorted_tables = together.agree(check, "update")
    if together.size > 1 and schema.tables:
        sorted_tables = _rows_of_all(schema, sorted_tables, together)
    packed = []
    for spec in schema.parameters:
        part = parts[spec.name]
        pending = part.tensor if feedback is None else feedback._add(spec.name, part)
        over = None if part.span is None else together
        packed.append(_pack(pending, spec, over, subtract=feedback is not None))
    return Compressed(schema, tuple(packed) if together.leads else (), sorted_tables)


def decompress(source: Compressed | Payload) -> dict[str, Tensor]:
    """Return a dense update; zero where nothing was sent.

    Args:
        source: A compressed update or a payload.

    Returns:
        float32, by parameter.
    """
    if isinstance(source, Compressed):
        pairs = zip(source.schema.parameters, source.parameters, strict=True)
        return {spec.name: _unpack(packed, spec) for spec, packed in pairs}
    checks.instance(source, Payload, "source")
    result = {}
    for number, entry in enumerate(source.header.parameters):
        spec = entry.spec
        packed = PackedRows(
            source.indices(number, 0, spec.rows), source.lookup(number), source.codes(number, 0, spec.rows)
        )
        result[spec.name] = _unpack(packed, spec)
    return result


@dataclass(frozen=True)
class Published:
    """A payload in a store.

    Attributes:
        key: Its key.
        digest: Its digest.
        bytes: Its size.
        written: False if the same payload was there already.
    """

    key: str
    digest: str
    bytes: int
    written: bool


def publish(
    store: ObjectStore,
    compressed: Compressed,
    label: Label,
    *,
    key: str | None = None,
    overwrite: bool = False,
    deadline: float = 300.0,
    directory: Path | None = None,
) -> Published:
    """Write the payload of a peer to a store; tried again until it is there or the deadline passes.

    Args:
        store: The store.
        compressed: The update.
        label: Whose payload it is.
        key: Where it goes; None: the `payload_key` of the label.
        overwrite: Replace what is there. Otherwise a different payload raises, and the same one is accepted.
        deadline: Seconds.
        directory: Where the payload is made, in a file without a name: nothing remains of a killed process.

    Returns:
        Where it is.

    Raises:
        StoreError: The time is up, or another payload is there. `ErrorFeedback.give_back` then takes the
            update back.
    """
    checks.instance(store, ObjectStore, "store")
    checks.instance(compressed, Compressed, "compressed")
    checks.instance(label, Label, "label")
    place = payload_key(label.run, label.window, label.uid) if key is None else checks.text(key, "key")
    checks.seconds(deadline, "deadline")
    checks.flag(overwrite, "overwrite")
    spool = SpoolWriter(None if directory is None else checks.path(directory, "directory"))
    try:
        header = compressed.write(spool.file, label)
        work = put_body(
            store,
            place,
            spool.finish(),
            create=not overwrite,
            deadline=deadline,
            request_timeout=30.0 + header.size / _SLOWEST,
        )
        written = run_async(work, f"publishing {place!r}", deadline=deadline)
    except StoreRequestError as error:
        where = f"uid {label.uid}, window {label.window}"
        raise StoreError(f"{where}: not published: {error}") from None
    finally:
        spool.discard()
    if not written and peek(store, place, deadline=deadline).digest != header.digest:
        raise StoreError(
            f"{place!r} holds another payload: a peer sends one per window (or use overwrite=True)"
        )
    return Published(place, header.digest, header.size, written)


def peek(store: ObjectStore, key: str, *, deadline: float = 60.0) -> Header:
    """Read and verify the header of a payload in a store, by two ranged requests.

    Args:
        store: The store.
        key: The key of the payload.
        deadline: Seconds for each request.

    Returns:
        The header.

    Raises:
        Fault: It is missing, damaged or not a payload, or the store fails.
    """
    checks.instance(store, ObjectStore, "store")
    checks.seconds(deadline, "deadline")
    try:
        return read_header(ObjectBody(store, key, deadline=deadline))
    except StoreRequestError as error:
        raise Fault(Status(error.failure), str(error)) from None


# ---- parameters


def _pack(pending: Tensor, spec: ParameterSpec, ranks: ElasticRanks | None, *, subtract: bool) -> PackedRows:
    """Pack a parameter; `subtract`: take what is sent from `pending`."""
    # With ranks, over which it is sharded, each rank works on the chunks that begin in its lines.
    block, own = pending, spec
    if ranks is not None:
        unit, lines = spec.band[0], spec.shape[0]
        have = shard_spans(lines, ranks.size)
        ends = [min(lines, -(-start // unit) * unit) for start, _ in have]
        need = list(zip(ends, [*ends[1:], lines], strict=True))
        block = move_lines(pending, have, need, ranks)
        own = replace(spec, shape=(block.shape[0], *spec.shape[1:]))
    indices, values = _select(block, own)
    first = 0
    if ranks is not None:
        sent = ranks.exchange("kept values", bytes(raw_bytes(values)))
        first = sum(len(each) for each in sent[: ranks.place]) // (4 * spec.keep)
        values = tensor_of(bytearray(b"".join(sent)), torch.float32).view(-1, spec.keep)
    codes, lookup = quantise(values, spec.bins)
    mine, packed = codes[first : first + own.rows], pack_indices(indices)
    if subtract:
        _subtract(block, own, indices, PackedRows(packed, lookup, mine))
    if ranks is not None:
        if subtract:
            pending.copy_(move_lines(block, need, have, ranks))
        everything = bytearray(b"".join(ranks.exchange("packed indices", bytes(raw_bytes(packed)))))
        packed = tensor_of(everything, torch.uint8).view(spec.rows, spec.index_bytes)
    return PackedRows(packed.cpu(), lookup.cpu(), pack_codes(codes, spec.bits).cpu())


def _select(pending: Tensor, spec: ParameterSpec) -> tuple[Tensor, Tensor]:
    """The positions of largest magnitude of each chunk, ascending, and their values: [rows, keep] each."""
    matrix = as_matrix(pending)
    if spec.full and not spec.dct:
        chunks = to_chunks(matrix, spec.chunk)
        return torch.arange(spec.size, device=chunks.device).expand(chunks.shape), chunks
    if not spec.dct:
        found = largest_of_chunks(matrix.to(torch.float32), spec.chunk, spec.keep)
        if found is not None:
            return found
    chunks = to_chunks(matrix, spec.chunk)
    return largest_of_rows(forward_dct(chunks, spec.chunk) if spec.dct else chunks, spec.keep)


def _subtract(pending: Tensor, spec: ParameterSpec, indices: Tensor, sent: PackedRows) -> None:
    """Subtract what is sent; its codes are not packed."""
    if spec.dct:
        packed = PackedRows(sent.indices.cpu(), sent.lookup.cpu(), pack_codes(sent.codes, spec.bits).cpu())
        pending -= _unpack(packed, spec).to(pending.device)
        return
    (_, across), (height, width), (lines, columns) = spec.bands, spec.chunk, spec.matrix
    rows = torch.arange(spec.rows, device=indices.device)[:, None]
    line = rows // across * height + indices // width
    column = rows % across * width + indices % width
    inside = (line < lines) & (column < columns)
    places, values = (line * columns + column)[inside], sent.lookup[sent.codes.to(torch.int64)][inside]
    flat = pending.view(-1)
    flat[places] -= values.to(flat.device)


def _unpack(packed: PackedRows, spec: ParameterSpec) -> Tensor:
    chunks = torch.zeros(spec.rows, spec.size, device="cpu")
    codes = unpack_codes(packed.codes, spec.keep, spec.bits).to(torch.int64)
    indices = unpack_indices(packed.indices, spec.keep).to(torch.int64)
    chunks.scatter_(1, indices, packed.lookup[codes])
    chunks = inverse_dct(chunks, spec.chunk) if spec.dct else chunks
    return from_chunks(chunks, spec.matrix, spec.chunk).reshape(spec.shape)


def _unpack_lines(packed: PackedRows, spec: ParameterSpec, span: Span | None) -> Tensor:
    """Some lines of the first dimension; None: all. Only the chunks that they touch are unpacked."""
    if span is None:
        return _unpack(packed, spec)
    unit, across = spec.band
    first, last = span[0] // unit, -(-span[1] // unit)
    lines = max(0, min(spec.shape[0], last * unit) - first * unit)
    rows = slice(first * across, last * across)
    some = packed._replace(indices=packed.indices[rows], codes=packed.codes[rows])
    dense = _unpack(some, replace(spec, shape=(lines, *spec.shape[1:])))
    return dense[span[0] - first * unit : span[1] - first * unit]


def _check_update(
    update: Mapping[str, Tensor], schema: PayloadSchema, ranks: ElasticRanks
) -> dict[str, TensorPart]:
    given = checks.mapping(update, "update", "{'weight': tensor}")
    # A dict of all parameters of a model has the anchors of its collections, which do not travel.
    given = {
        name: tensor for name, tensor in given.items() if not (isinstance(name, str) and is_anchor(name))
    }
    names = {spec.name for spec in schema.parameters}
    for name in sorted(names ^ set(given)):
        problem = "has no update" if name in names else "has an update but is not in the schema"
        raise InputError(f"parameter {name!r} {problem}")
    parts = {}
    for spec in schema.parameters:
        tensor = given[spec.name]
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else checks.kind(tensor)
        if shape != spec.shape or not tensor.is_floating_point() or tensor.is_meta:
            raise InputError(
                f"update of {spec.name!r} is {getattr(tensor, 'dtype', '')} {shape}, "
                f"its schema has floating point {spec.shape}"
            )
        parts[spec.name] = part_of(spec.name, tensor.detach(), ranks)
        if not checks.all_finite(parts[spec.name].tensor):
            raise InputError(f"update of {spec.name!r} has values that are not finite")
    return parts


# ---- rows of tables


def _sorted_rows(schema: PayloadSchema, name: str, rows: object) -> tuple[Tensor, Tensor]:
    dims = {table.name: table.dim for table in schema.tables}
    if name not in dims:
        raise InputError(f"rows of table {name!r}, which the schema does not have")
    if not isinstance(rows, tuple | list) or len(rows) != 2:
        raise InputError(f"table {name!r}: expected (ids, rows), got {checks.kind(rows)}")
    ids, values = checks.int64(rows[0], f"table {name!r}: ids"), rows[1]
    checks.floats(values, f"table {name!r}: rows", (ids.numel(), dims[name]))
    if values.is_meta or ids.is_meta or not checks.all_finite(values):
        raise InputError(f"table {name!r} has rows with values that are not finite")
    order = ids.argsort()
    found = ids[order].cpu()
    if bool((found[1:] == found[:-1]).any()):
        raise InputError(f"table {name!r}: an id appears twice; add its rows first")
    return found, values[order].to(torch.float32).cpu()


def _rows_of_all(
    schema: PayloadSchema, tables: Mapping[str, tuple[Tensor, Tensor]], ranks: ElasticRanks
) -> dict[str, tuple[Tensor, Tensor]]:
    """On the first rank, the rows of all ranks, sorted by id; nothing on the others. A collective call."""
    counts = ranks.gather({name: ids.numel() for name, (ids, _) in tables.items()}, "row counts")
    found, differences = {}, []
    for table in schema.tables:
        if not any(table.name in each for each in counts):
            continue
        sizes = [each.get(table.name, 0) for each in counts]
        empty = torch.empty(0, dtype=torch.int64, device="cpu"), torch.empty(0, table.dim, device="cpu")
        ids, rows = tables.get(table.name, empty)
        pieces: list[list[Tensor]] = [[] for _ in sizes]
        for place, block in _blocks_of_all("ids", ids[:, None], sizes, ranks):
            pieces[place].append(block[:, 0])
        sent = [torch.cat([empty[0], *blocks]) for blocks in pieces]
        merged = torch.cat(sent).unique()
        out = torch.empty(len(merged), table.dim, device="cpu")
        known = torch.zeros(len(merged), dtype=torch.bool, device="cpu")
        done = [0] * len(sizes)
        for place, block in _blocks_of_all("rows", rows, sizes, ranks):
            keys = sent[place][done[place] : done[place] + len(block)]
            done[place] += len(block)
            at = torch.searchsorted(merged, keys)
            again = known[at]
            if bool(again.any()):  # copies of tables; a router gives each id to one rank
                differs = (out[at[again]] != block[again]).any(1)
                for key in keys[again][differs][:1].tolist():
                    differences.append((table.name, ranks.members[place], key))
            out[at], known[at] = block, True
        if ranks.leads:
            found[table.name] = merged, out

    def check() -> None:
        for name, rank, key in differences[:1]:
            raise InputError(
                f"table {name!r}: rank {rank} and a rank before it have different changes of id {key}: train "
                "one SyncShards on all ranks, or make each rank a peer with a uid of its own"
            )

    ranks.agree(check, "rows")
    return found


def _blocks_of_all(
    what: str, data: Tensor, sizes: Sequence[int], ranks: ElasticRanks
) -> Iterator[tuple[int, Tensor]]:
    """On the first rank, lines of all ranks: place and block, rank by rank. A collective call."""
    width = data.shape[1]
    step = max(1, BLOCK_BYTES // (data.element_size() * width))
    for place, size in enumerate(sizes):
        for start in range(0, size, step):
            stop = min(start + step, size)
            if place == 0:  # the rows of the first rank need not travel
                if ranks.leads:
                    yield place, data[start:stop]
                continue
            mine = data[start:stop] if ranks.place == place else data[:0]
            send, receive = [0] * ranks.size, [0] * ranks.size
            send[0] = mine.numel()
            receive[place] = (stop - start) * width if ranks.leads else 0
            got = ranks.all_to_all(mine.reshape(-1), send, receive, what)
            if ranks.leads:
                yield place, got.view(-1, width)
