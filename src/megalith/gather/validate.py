"""Whether a payload may be used: digests, schema, indices, codes and values, checked block by block.

Everything that a peer sends is untrusted until it passes here. The norm of each parameter is computed at the
same time. The memory is that of a block, for any size of the payload.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from megalith.gather.payload import Header, Payload, header_limit, read_header
from megalith.gather.payload_schema import ParameterSpec, PayloadSchema, TableSpec
from megalith.gather.plan import Fault, GatherPlan, Status
from megalith.ops import matrix_chunks
from megalith.storage.bodies import Body, Ledger
from megalith.storage.tensor_files import raw_bytes

Check = Callable[[Tensor], None]

_BYTES_PER_POSITION = 40  # of one kept position: packed, unpacked and compared
_BYTES_PER_HEADER_BYTE = 32  # size of parsed JSON divided by its text
_TABLE_BLOCK = 1 << 16  # elements of table rows summed at once; fixed, as norms must not depend on budgets


def least_work_bytes(schema: PayloadSchema) -> int:
    """Return the number of bytes that checking a payload needs at least."""
    rows = [spec.keep * _BYTES_PER_POSITION for spec in schema.parameters]
    tables = [_table_bytes(table) for table in schema.tables]
    return max([_BYTES_PER_HEADER_BYTE * header_limit(schema), *rows, *tables])


def validate(
    body: Body, schema: PayloadSchema, plan: GatherPlan, uid: int, *, ledger: Ledger, work_bytes: int
) -> Payload:
    """Check a payload against the schema and what the plan expects of this peer."""
    limit = header_limit(schema)
    with ledger.hold(_BYTES_PER_HEADER_BYTE * limit, "reading a header"):
        header = read_header(body, limit)
        _check_identity(header, schema, plan, uid)
        header = _shared(header, schema)
    payload = Payload(header, body)
    norms = [
        _check_parameter(payload, number, plan.gather.max_value, ledger, work_bytes)
        for number in range(len(header.parameters))
    ]
    norms += [
        _check_table(payload, number, plan.gather.max_value, ledger) for number in range(len(header.tables))
    ]
    return Payload(header, body, tuple(norms))


def _check_identity(header: Header, schema: PayloadSchema, plan: GatherPlan, uid: int) -> None:
    label = header.label
    for name, found, wanted in (
        ("run", label.run, plan.run),
        ("window", label.window, plan.window),
        ("uid", label.uid, uid),
    ):
        if found != wanted:
            raise Fault(Status.INVALID_SCHEMA, f"is of {name} {found!r:.140}, not {wanted!r:.140}")
    if label.weights is None and plan.gather.require_weights:
        raise Fault(Status.OTHER_WEIGHTS, "does not state from which weights it was computed")
    if label.weights is not None and plan.weights not in (None, label.weights):
        stated, here = label.weights[:12], str(plan.weights)[:12]
        raise Fault(
            Status.OTHER_WEIGHTS, f"was computed from weights {stated}, those of the window are {here}"
        )
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


def _shared(header: Header, schema: PayloadSchema) -> Header:
    """The header with the schema's own specs: many headers are kept, and their specs are all equal."""
    pairs = zip(header.parameters, schema.parameters, strict=True)
    parameters = tuple(replace(entry, spec=spec) for entry, spec in pairs)
    tables = tuple(replace(e, spec=spec) for e, spec in zip(header.tables, schema.tables, strict=True))
    return replace(header, parameters=parameters, tables=tables)


def _blocks(count: int, each: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, each):
        yield start, min(start + each, count)


def _check_section(where: str, digest: str, blocks: Iterable[tuple[Tensor, Check]]) -> None:
    """Hash a section and check its blocks; a wrong digest takes precedence over other faults."""
    hashed = hashlib.sha256()
    fault: Fault | None = None
    for block, check in blocks:
        hashed.update(raw_bytes(block))
        try:
            if fault is None:
                check(block)
        except Fault as raised:
            fault = raised
    if hashed.hexdigest() != digest:
        raise Fault(Status.CORRUPT, f"{where}: the digest does not match the bytes")
    if fault is not None:
        raise fault


def _check_parameter(
    payload: Payload, number: int, max_value: float, ledger: Ledger, work_bytes: int
) -> float:
    """The norm of a parameter."""
    entry = payload.header.parameters[number]
    spec = entry.spec
    rows = max(1, min(spec.rows, work_bytes // (spec.keep * _BYTES_PER_POSITION)))
    lookup = payload.lookup(number)
    counts = torch.zeros(spec.bins, dtype=torch.int64, device="cpu")
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
    return _norm(lookup, counts)


def _check_indices(spec: ParameterSpec, packed: Tensor) -> None:
    found = matrix_chunks.index_problems(packed, spec.keep, spec.size)
    for problem, detail in (
        (matrix_chunks.SPARE_BITS, "bits after the last index of a row are set"),
        (matrix_chunks.TOO_HIGH, f"an index is not below {spec.size}"),
        (matrix_chunks.NOT_ASCENDING, "indices of a row repeat or do not ascend"),
    ):
        if found & problem:
            raise Fault(Status.INVALID_INDEX, f"{spec.name!r}: {detail}")


def _count_codes(spec: ParameterSpec, counts: Tensor, packed: Tensor) -> None:
    found, spare = matrix_chunks.count_codes(packed, spec.keep, spec.bits)
    if spare:
        raise Fault(Status.INVALID_VALUE, f"{spec.name!r}: bits after the last code of a row are set")
    if bool(found[spec.bins :].any()):
        raise Fault(Status.INVALID_VALUE, f"{spec.name!r}: a code is not below {spec.bins}")
    counts += found[: spec.bins]


def _check_values(where: str, max_value: float, values: Tensor) -> None:
    if not bool(torch.isfinite(values).all()):
        raise Fault(Status.INVALID_VALUE, f"{where}: a value is not finite")
    if bool((values.abs() > max_value).any()):
        raise Fault(Status.INVALID_VALUE, f"{where}: a value is larger than {max_value:g}")


def _norm(lookup: Tensor, counts: Tensor) -> float:
    """The norm of the values sent: exact up to one rounding, for any blocks in which they were counted."""
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
