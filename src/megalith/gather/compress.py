"""Compression: the side of a peer. Chunked top-k, coded values, error feedback, publishing; and the way back.

An update is a pseudo-gradient: weights before local training minus weights after it. Of each chunk the `keep`
positions of largest magnitude are sent, coded in a few values that are computed
per parameter; what was not sent stays in the feedback and is sent later. Changed rows of embedding tables are
sent uncompressed.

Weights that are sharded over ranks are compressed by the ranks together, each its own chunks. The payload has
the same bytes for any number of ranks.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megalith.distributed.surviving_ranks import Ranks
from megalith.errors import InputError, StoreError, UsageError
from megalith.gather.chunks import (
    forward_dct,
    from_chunks,
    inverse_dct,
    pack_codes,
    pack_indices,
    to_chunks,
    unpack_codes,
    unpack_indices,
)
from megalith.gather.payload import (
    PRELUDE_BYTES,
    Header,
    Label,
    Payload,
    PayloadWriter,
    header_span,
    parse_header,
)
from megalith.gather.payload_schema import ParameterSpec, PayloadSchema
from megalith.gather.plan import payload_key
from megalith.gather.status import Fault, Status
from megalith.gather.weight_parts import Part, Span, part_of, shard_spans
from megalith.ops import checks
from megalith.storage.object_store import ObjectStore, StoreRequestError
from megalith.storage.retries import persist, run_async

TableRows = Mapping[str, tuple[Tensor, Tensor]]
"""Rows of tables by name: ids int64 [n], rows float32 [n, dim]."""

_SIGMAS = 6  # the range of values that codes cover
_ROWS_AT_ONCE = 64  # rows of chunks whose largest values are selected together: they fit into a CPU cache
_SLOWEST = 1 << 18  # bytes per second; a slower upload is given up and tried again


class PackedParameter(NamedTuple):
    """One parameter as it is sent.

    Attributes:
        indices: uint8 [rows, index_bytes].
        lookup: float32 [bins].
        codes: uint8 [rows, code_bytes].
    """

    indices: Tensor
    lookup: Tensor
    codes: Tensor


@dataclass(frozen=True)
class Compressed:
    """A compressed update. With ranks, only the first one has it; `parameters` is empty on the others."""

    schema: PayloadSchema
    """The schema."""
    parameters: tuple[PackedParameter, ...]
    """The parameters in schema order."""
    tables: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Rows of tables, sorted by id."""

    def write(self, file: BinaryIO, label: Label) -> Header:
        """Write the payload.

        Args:
            file: A seekable file.
            label: Whose payload it is.

        Returns:
            Its header.

        Raises:
            UsageError: Another rank has the update.
        """
        if len(self.parameters) != len(self.schema.parameters):
            raise UsageError("only the first rank has the compressed update: publish it there")
        counts = {name: ids.numel() for name, (ids, _) in self.tables.items()}
        writer = PayloadWriter(file, self.schema, checks.instance(label, Label, "label"), counts)
        for packed in self.parameters:
            for part in packed:
                writer.write(part)
        for table in self.schema.tables:
            for part in self.tables.get(table.name, ()):
                writer.write(part)
        return writer.finish()

    def to_bytes(self, label: Label) -> bytes:
        """Return the payload.

        Args:
            label: Whose payload it is.

        Returns:
            Its bytes.
        """
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

    def give_back(self, compressed: Compressed) -> None:
        """Take back an update that was compressed but never reached the store.

        Args:
            compressed: The update, of weights that are not sharded.

        Raises:
            InputError: It is of another model.
        """
        for name, sent in decompress(compressed).items():
            if name not in self.left or type(self.left[name]) is not Tensor:
                raise InputError(f"the feedback has no whole parameter {name!r}: it cannot take it back")
            self.left[name] += sent.to(self.left[name].device)

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

    def add(self, name: str, part: Part) -> Tensor:
        """Add an update to what is left.

        Args:
            name: The parameter.
            part: What this process holds of the update.

        Returns:
            What there is to send: float32, the feedback's own memory.
        """
        if name not in self.left:
            self.left[name] = part.like(torch.zeros_like(part.tensor, dtype=torch.float32))
        left = self.left[name]
        own: Tensor = left.to_local() if hasattr(left, "to_local") else left
        if own.shape != part.tensor.shape:
            raise InputError(f"the feedback of {name!r} has shape {tuple(own.shape)}, its update is sharded")
        return own.mul_(self.decay).add_(part.tensor.to(torch.float32))


def compress(
    update: Mapping[str, Tensor],
    schema: PayloadSchema,
    *,
    tables: TableRows | None = None,
    feedback: ErrorFeedback | None = None,
    ranks: Ranks | None = None,
) -> Compressed:
    """Compress a pseudo-gradient. A collective call with ranks.

    Args:
        update: A floating point tensor for each parameter of the schema, whole or sharded over the ranks.
        schema: The schema.
        tables: Changed rows, with distinct ids; other tables are sent empty. With ranks, those of the first.
        feedback: Keeps what is not sent; it changes here.
        ranks: The ranks over which parameters are sharded.

    Returns:
        The compressed update, on the first rank.

    Raises:
        InputError: Names, shapes or values do not match; the feedback has not changed.
    """
    checks.instance(schema, PayloadSchema, "schema")
    together = ranks or Ranks.alone()
    parts = _check_update(update, schema, together)
    given = checks.mapping(tables or {}, "tables", '{"users": (ids, rows)}')
    sorted_tables = {name: _sorted_rows(schema, name, rows) for name, rows in given.items()}
    packed = []
    for spec in schema.parameters:
        part = parts[spec.name]
        pending = part.tensor if feedback is None else feedback.add(spec.name, part)
        if part.span is None:
            packed.append(_pack(pending, spec, subtract=feedback is not None))
        else:
            packed.append(_pack_sharded(pending, spec, together, subtract=feedback is not None))
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
        packed = PackedParameter(
            source.indices(number, 0, spec.rows), source.lookup(number), source.codes(number, 0, spec.rows)
        )
        result[spec.name] = _unpack(packed, spec)
    return result


def quantise(values: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Code values. Bins are equally wide and cover six standard deviations around the mean.

    Args:
        values: float32.
        bins: The number of bins.

    Returns:
        Codes, uint8 of the shape of `values`, and the mean of the values in each bin, float32 [bins].
    """
    if values.numel() == 0:
        return torch.zeros_like(values, dtype=torch.uint8), values.new_zeros(bins)
    shift = values.mean()
    centred = values - shift
    spread = float(centred.norm()) / math.sqrt(max(values.numel() - 1, 1))
    scale = _SIGMAS * spread / bins
    if not math.isfinite(scale) or scale == 0.0:
        scale = 1.0
    codes = (centred / scale + bins / 2).round().clamp(0, bins - 1).to(torch.int64)
    sums = torch.zeros(bins, dtype=torch.float64, device=values.device)
    sums.scatter_add_(0, codes.flatten(), centred.flatten().to(torch.float64))
    counts = torch.bincount(codes.flatten(), minlength=bins)
    lookup = (sums / counts.clamp(min=1)).to(torch.float32) + shift
    return codes.to(torch.uint8), lookup


# ---- publishing


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
        directory: Where the file is made.

    Returns:
        Where it is.

    Raises:
        StoreError: The time is up, or another payload is there. `ErrorFeedback.give_back` then takes the
            update back.
    """
    checks.instance(store, ObjectStore, "store")
    checks.instance(compressed, Compressed, "compressed")
    place = key or payload_key(checks.instance(label, Label, "label").run, label.window, label.uid)
    checks.seconds(deadline, "deadline")
    with TemporaryDirectory(prefix="gather-", dir=directory) as folder:
        path = Path(folder) / "payload"
        with open(path, "w+b") as file:
            header = compressed.write(file, label)
        try:
            written = run_async(
                persist(
                    lambda limit: store.put(place, path, create=not overwrite, timeout=limit),
                    deadline=deadline,
                    request_timeout=30.0 + header.size / _SLOWEST,
                )
            )
        except StoreRequestError as error:
            where = f"uid {label.uid}, window {label.window}"
            raise StoreError(f"{where}: not published: {error}") from None
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
        deadline: Seconds.

    Returns:
        The header.

    Raises:
        Fault: It is missing, damaged or not a payload, or the store fails.
    """

    async def read() -> Header:
        info = await persist(lambda limit: store.head(key, timeout=limit), deadline=deadline)
        if info.size < PRELUDE_BYTES:
            raise Fault(Status.CORRUPT, f"{key!r} has {info.size} bytes, a payload at least {PRELUDE_BYTES}")

        async def first(length: int) -> bytes:
            return await persist(
                lambda limit: store.get_range(key, 0, length, etag=info.etag, timeout=limit),
                deadline=deadline,
            )

        header_bytes, size = header_span(await first(PRELUDE_BYTES))
        if size != info.size:
            raise Fault(Status.CORRUPT, f"{key!r} has {info.size} bytes, its prelude states {size}")
        return parse_header(await first(PRELUDE_BYTES + header_bytes))

    checks.instance(store, ObjectStore, "store")
    try:
        return run_async(read())
    except StoreRequestError as error:
        raise Fault(Status(error.failure), str(error)) from None


# ---- parameters


def _pack(pending: Tensor, spec: ParameterSpec, *, subtract: bool) -> PackedParameter:
    """Pack a whole parameter; `subtract`: take what is sent from `pending`."""
    indices, values = _select(pending, spec)
    codes, lookup = quantise(values, spec.bins)
    packed = PackedParameter(pack_indices(indices).cpu(), lookup.cpu(), pack_codes(codes, spec.bits).cpu())
    if subtract and spec.dct:
        pending -= _unpack(packed, spec).to(pending.device)
    elif subtract:
        _subtract(pending, spec, indices, lookup[codes.to(torch.int64)])
    return packed


def _select(pending: Tensor, spec: ParameterSpec) -> tuple[Tensor, Tensor]:
    """The positions of largest magnitude of each chunk, ascending, and their values: [rows, keep] each."""
    if spec.full or spec.dct:
        chunks = to_chunks(pending, spec)
        return _largest(forward_dct(chunks, spec) if spec.dct else chunks, spec)
    # A few bands of chunks at a time, which fit into a CPU cache.
    (down, across), height, (lines, columns) = spec.bands, spec.chunk[0], spec.matrix
    each = max(1, _ROWS_AT_ONCE // max(1, across)) if pending.is_cpu else max(1, down)
    matrix, found = pending.detach().reshape(lines, columns), []
    for band in range(0, down, each):
        part = matrix[band * height : (band + each) * height]
        found.append(_largest(to_chunks(part, replace(spec, shape=tuple(part.shape))), spec))
    if not found:
        return pending.new_zeros(0, spec.keep, dtype=torch.int64), pending.new_zeros(0, spec.keep)
    return torch.cat([indices for indices, _ in found]), torch.cat([values for _, values in found])


def _largest(chunks: Tensor, spec: ParameterSpec) -> tuple[Tensor, Tensor]:
    """The same for chunks [n, size]."""
    if spec.full:
        return torch.arange(spec.size, device=chunks.device).expand(chunks.shape), chunks
    indices = chunks.abs().topk(spec.keep, dim=1, sorted=False).indices.sort(dim=1).values
    return indices, chunks.gather(1, indices)


def _subtract(pending: Tensor, spec: ParameterSpec, indices: Tensor, values: Tensor) -> None:
    """Subtract values at positions of chunks from a tensor."""
    (_, across), (height, width), (lines, columns) = spec.bands, spec.chunk, spec.matrix
    rows = torch.arange(spec.rows, device=indices.device)[:, None]
    line = rows // across * height + indices // width
    column = rows % across * width + indices % width
    inside = (line < lines) & (column < columns)
    places = (line * columns + column)[inside]
    flat = pending.view(-1)
    flat[places] -= values[inside].to(flat.device)


def _pack_sharded(pending: Tensor, spec: ParameterSpec, ranks: Ranks, *, subtract: bool) -> PackedParameter:
    """Pack this rank's chunks of a sharded parameter: those that begin in its lines."""
    unit = spec.chunk[1] if len(spec.shape) < 2 else spec.chunk[0]
    lines = spec.shape[0]
    spans = shard_spans(lines, ranks.size)
    ends = [min(lines, -(-start // unit) * unit) for start, _ in spans]
    needed = list(zip(ends, [*ends[1:], lines], strict=True))
    block = _move_lines(pending, spans, needed, ranks)
    own = replace(spec, shape=(block.shape[0], *spec.shape[1:]))
    indices, values = _select(block, own)
    sent = ranks.exchange("kept values", values.contiguous().numpy().astype("<f4").tobytes())
    everything = torch.from_numpy(np.frombuffer(bytearray(b"".join(sent)), "<f4").astype(np.float32))
    codes, lookup = quantise(everything.view(-1, spec.keep), spec.bins)
    first = sum(len(each) for each in sent[: ranks.place]) // (4 * spec.keep)
    mine = codes[first : first + own.rows]
    if subtract:
        dense = _unpack(PackedParameter(pack_indices(indices), lookup, pack_codes(mine, spec.bits)), own)
        pending -= _move_lines(dense, needed, spans, ranks).to(pending.device)
    packed = b"".join(ranks.exchange("packed indices", pack_indices(indices).numpy().tobytes()))
    whole = torch.frombuffer(bytearray(packed), dtype=torch.uint8).view(spec.rows, spec.index_bytes)
    return PackedParameter(whole, lookup, pack_codes(codes, spec.bits))


def _move_lines(tensor: Tensor, have: list[Span], need: list[Span], ranks: Ranks) -> Tensor:
    """The lines that this rank needs, of a tensor whose lines each rank has."""
    (start, _), (first, last), place = have[ranks.place], need[ranks.place], ranks.place
    size = math.prod(tensor.shape[1:])

    def common(a: Span, b: Span) -> Span:
        return max(a[0], b[0]), max(max(a[0], b[0]), min(a[1], b[1]))

    out = [common(have[place], span) for span in need]
    into = [common(span, need[place]) for span in have]
    sent = torch.cat([tensor[a - start : b - start].cpu().to(torch.float32).reshape(-1) for a, b in out])
    got = ranks.all_to_all("lines", sent, [size * (b - a) for a, b in out], [size * (b - a) for a, b in into])
    return got.view(last - first, *tensor.shape[1:])


def _unpack(packed: PackedParameter, spec: ParameterSpec) -> Tensor:
    chunks = torch.zeros(spec.rows, spec.size)
    codes = unpack_codes(packed.codes, spec.keep, spec.bits).to(torch.int64)
    indices = unpack_indices(packed.indices, spec.keep).to(torch.int64)
    chunks.scatter_(1, indices, packed.lookup[codes])
    return from_chunks(inverse_dct(chunks, spec) if spec.dct else chunks, spec)


def _check_update(update: Mapping[str, Tensor], schema: PayloadSchema, ranks: Ranks) -> dict[str, Part]:
    given = checks.mapping(update, "update", "{'weight': tensor}")
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
        if not _all_finite(parts[spec.name].tensor):
            raise InputError(f"update of {spec.name!r} has values that are not finite")
    return parts


def _all_finite(tensor: Tensor) -> bool:
    """Whether all values are finite: a finite sum proves it, and takes a tenth of the time."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def _sorted_rows(schema: PayloadSchema, name: str, rows: object) -> tuple[Tensor, Tensor]:
    dims = {table.name: table.dim for table in schema.tables}
    if name not in dims:
        raise InputError(f"rows of table {name!r}, which the schema does not have")
    if not isinstance(rows, tuple | list) or len(rows) != 2:
        raise InputError(f"table {name!r}: expected (ids, rows), got {checks.kind(rows)}")
    ids, values = checks.int64(rows[0], f"table {name!r}: ids"), rows[1]
    checks.floats(values, f"table {name!r}: rows", (ids.numel(), dims[name]))
    if values.is_meta or ids.is_meta or not bool(torch.isfinite(values).all()):
        raise InputError(f"table {name!r} has rows with values that are not finite")
    order = ids.argsort()
    found = ids[order].cpu()
    if bool((found[1:] == found[:-1]).any()):
        raise InputError(f"table {name!r}: an id appears twice; add its rows first")
    return found, values[order].to(torch.float32).cpu()
