"""Whether a payload may be used: digests, schema, indices, codes and values, checked block by block.

Everything a peer sends is hostile until it passes here. What a later step needs of each parameter is
computed on the way: norm, values of the codes, digest of the indices. Memory is a block, whatever the
payload's size.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from megalith.gather.body import Body
from megalith.gather.ledger import Ledger
from megalith.gather.packing import spare_code_bits, spare_index_bits, unpack_codes, unpack_indices
from megalith.gather.payload import Header, Payload, header_limit, read_header
from megalith.gather.schema import ParameterSpec, Schema, TableSpec
from megalith.gather.status import Fault, Status

Check = Callable[[Tensor], None]

_BYTES_PER_POSITION = 40  # packed, unpacked and compared, of one kept position
_BYTES_PER_HEADER_BYTE = 32  # what JSON may grow to when it is parsed
_TABLE_BLOCK = 1 << 16  # elements of table rows summed at once; fixed, as norms must not depend on budgets


@dataclass(frozen=True)
class Checked:
    """A payload that passed.

    norms: parameters, then tables. lookups: float32, values of the codes of all parameters one after
    another. index_digests: by parameter.
    """

    header: Header
    norms: tuple[float, ...]
    lookups: Tensor
    index_digests: tuple[str, ...]


def least_work_bytes(schema: Schema) -> int:
    """Bytes that checking a payload of this schema takes at least."""
    rows = [spec.keep * _BYTES_PER_POSITION for spec in schema.parameters]
    tables = [_table_bytes(table) for table in schema.tables]
    return max([_BYTES_PER_HEADER_BYTE * header_limit(schema), *rows, *tables])


def validate(
    body: Body,
    schema: Schema,
    *,
    run: str,
    window: int,
    uid: int,
    max_value: float,
    ledger: Ledger,
    work_bytes: int,
) -> Checked:
    """Checks a payload against the schema and what the plan expects of this peer.

    work_bytes: memory for blocks, at least `least_work_bytes`. Raises Fault with the status of the first
    thing that is wrong; a digest that does not fit goes before what the bytes say.
    """
    limit = header_limit(schema)
    with ledger.hold(_BYTES_PER_HEADER_BYTE * limit, "reading a header"):
        header = read_header(body, limit)
        _check_identity(header, schema, run, window, uid)
        header = _shared(header, schema)
    payload = Payload(header, body)
    norms, lookups = [], [torch.zeros(0)]
    for number in range(len(header.parameters)):
        norm, lookup = _check_parameter(payload, number, max_value, ledger, work_bytes)
        norms.append(norm)
        lookups.append(lookup)
    norms += [_check_table(payload, number, max_value, ledger) for number in range(len(header.tables))]
    digests = tuple(entry.indices_sha256 for entry in header.parameters)
    return Checked(header, tuple(norms), torch.cat(lookups), digests)


def _check_identity(header: Header, schema: Schema, run: str, window: int, uid: int) -> None:
    label = header.label
    for name, found, wanted in (
        ("run", label.run, run),
        ("window", label.window, window),
        ("uid", label.uid, uid),
    ):
        if found != wanted:
            raise Fault(Status.INVALID_SCHEMA, f"is of {name} {found!r:.140}, not {wanted!r:.140}")
    if header.schema == schema:
        return
    sent = {entry.spec.name: entry.spec for entry in header.parameters}
    wanted_specs = {spec.name: spec for spec in schema.parameters}
    missing, extra = sorted(wanted_specs.keys() - sent), sorted(sent.keys() - wanted_specs.keys())
    if missing or extra:
        problem = f"lacks {missing[0]!r:.80}" if missing else f"has {extra[0]!r:.80}, which the model lacks"
        raise Fault(Status.INVALID_SCHEMA, problem)
    for name, spec in wanted_specs.items():
        if sent[name] != spec:
            raise Fault(Status.INVALID_SCHEMA, f"has {name!r:.80} as {sent[name]}, the model as {spec}")
    raise Fault(Status.INVALID_SCHEMA, "has other tables than the model, or another order")


def _shared(header: Header, schema: Schema) -> Header:
    """The header with the schema's own specs: many peers' headers are kept, their specs are all the same."""
    pairs = zip(header.parameters, schema.parameters, strict=True)
    parameters = tuple(replace(entry, spec=spec) for entry, spec in pairs)
    tables = tuple(replace(e, spec=spec) for e, spec in zip(header.tables, schema.tables, strict=True))
    return replace(header, parameters=parameters, tables=tables)


def _blocks(count: int, each: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, each):
        yield start, min(start + each, count)


def _check_section(where: str, digest: str, blocks: Iterable[tuple[Tensor, Check]]) -> None:
    """Hashes a section and checks its blocks; a wrong digest goes before any other fault."""
    hashed = hashlib.sha256()
    fault: Fault | None = None
    for block, check in blocks:
        hashed.update(_raw(block))
        fault = fault or _fault_of(check, block)
    if hashed.hexdigest() != digest:
        raise Fault(Status.CORRUPT, f"{where}: the digest does not fit the bytes")
    if fault is not None:
        raise fault


def _fault_of(check: Callable[[Tensor], None], block: Tensor) -> Fault | None:
    try:
        check(block)
    except Fault as fault:
        return fault
    return None


def _check_parameter(
    payload: Payload, number: int, max_value: float, ledger: Ledger, work_bytes: int
) -> tuple[float, Tensor]:
    """The norm of a parameter and the values of its codes."""
    entry = payload.header.parameters[number]
    spec = entry.spec
    rows = max(1, min(spec.rows, work_bytes // (spec.keep * _BYTES_PER_POSITION)))
    lookup = payload.lookup(number)
    counts = torch.zeros(spec.bins, dtype=torch.int64)
    check_indices = partial(_check_indices, spec)
    count_codes = partial(_count_codes, spec, counts)
    check_values = partial(_check_values, f"{spec.name!r}", max_value)
    with ledger.hold(rows * spec.keep * _BYTES_PER_POSITION, "checking a block"):
        _check_section(
            f"{spec.name!r}, indices",
            entry.indices_sha256,
            ((payload.indices(number, *block), check_indices) for block in _blocks(spec.rows, rows)),
        )
        codes = ((payload.codes(number, *block), count_codes) for block in _blocks(spec.rows, rows))
        _check_section(f"{spec.name!r}, values", entry.values_sha256, chain([(lookup, check_values)], codes))
    return _norm(lookup, counts), lookup


def _check_indices(spec: ParameterSpec, packed: Tensor) -> None:
    if bool(spare_index_bits(packed, spec.keep).any()):
        raise Fault(Status.INVALID_INDEX, f"{spec.name!r}: bits behind the last index of a row are set")
    indices = unpack_indices(packed, spec.keep)
    if bool((indices[:, -1:] >= spec.size).any()):
        raise Fault(Status.INVALID_INDEX, f"{spec.name!r}: an index is not below {spec.size}")
    if bool((indices[:, 1:] <= indices[:, :-1]).any()):
        raise Fault(Status.INVALID_INDEX, f"{spec.name!r}: indices of a row repeat or do not ascend")


def _count_codes(spec: ParameterSpec, counts: Tensor, packed: Tensor) -> None:
    if bool(spare_code_bits(packed, spec.keep, spec.bits).any()):
        raise Fault(Status.INVALID_VALUE, f"{spec.name!r}: bits behind the last code of a row are set")
    found = torch.bincount(unpack_codes(packed, spec.keep, spec.bits).flatten(), minlength=spec.bins)
    if found.numel() > spec.bins:
        raise Fault(Status.INVALID_VALUE, f"{spec.name!r}: a code is not below {spec.bins}")
    counts += found


def _check_values(where: str, max_value: float, values: Tensor) -> None:
    if not bool(torch.isfinite(values).all()):
        raise Fault(Status.INVALID_VALUE, f"{where}: a value is not finite")
    if bool((values.abs() > max_value).any()):
        raise Fault(Status.INVALID_VALUE, f"{where}: a value is larger than {max_value:g}")


def _norm(lookup: Tensor, counts: Tensor) -> float:
    """The norm of the values sent: exact up to one rounding, in whatever blocks they were counted."""
    pairs = zip(lookup.tolist(), counts.tolist(), strict=True)
    return math.sqrt(sum((Fraction(value) ** 2 * count for value, count in pairs if count), Fraction(0)))


def _table_bytes(table: TableSpec) -> int:
    return max(1, _TABLE_BLOCK // table.dim) * (16 + 16 * table.dim)


def _check_table(payload: Payload, number: int, max_value: float, ledger: Ledger) -> float:
    """The norm of a table's rows."""
    entry = payload.header.tables[number]
    table = entry.spec
    where = f"table {table.name!r}"
    blocks = list(_blocks(entry.num_rows, max(1, _TABLE_BLOCK // table.dim)))
    last: list[int] = []
    sums: list[float] = []

    def check_ids(ids: Tensor) -> None:
        if bool((ids[1:] <= ids[:-1]).any()) or (last and int(ids[0]) <= last[0]):
            raise Fault(Status.INVALID_INDEX, f"{where}: ids repeat or do not ascend")
        last[:] = [int(ids[-1])]

    def add_rows(rows: Tensor) -> None:
        _check_values(where, max_value, rows)
        sums.append(float(np.add.reduce(np.square(rows.numpy().reshape(-1).astype(np.float64)))))

    with ledger.hold(_table_bytes(table), "checking a block"):
        _check_section(
            f"{where}, ids", entry.ids_sha256, ((payload.ids(number, *each), check_ids) for each in blocks)
        )
        _check_section(
            f"{where}, rows", entry.rows_sha256, ((payload.rows(number, *each), add_rows) for each in blocks)
        )
    return math.sqrt(math.fsum(sums))


def _raw(block: Tensor) -> memoryview:
    array = block.numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).reshape(-1).view(np.uint8).data
