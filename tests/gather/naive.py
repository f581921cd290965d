"""An independent reference: one process, plain loops, no code of `megalith.gather`.

It reads payloads from the page that specifies them and follows the formulas of the guide, as slowly as it
likes. Tests compare the real thing with it.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np


@dataclass
class NaiveParameter:
    name: str
    shape: tuple[int, ...]
    chunk: tuple[int, int]
    bins: int
    dct: bool
    indices: list[list[int]]
    codes: list[list[int]]
    lookup: np.ndarray

    @property
    def matrix(self) -> tuple[int, int]:
        if len(self.shape) < 2:
            return 1, math.prod(self.shape)
        return self.shape[0], math.prod(self.shape[1:])

    @property
    def size(self) -> int:
        return self.chunk[0] * self.chunk[1]


@dataclass
class NaivePayload:
    header: dict[str, Any]
    parameters: dict[str, NaiveParameter]
    tables: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


def read(data: bytes) -> NaivePayload:
    magic, version, header_bytes, size, zero = struct.unpack("<8sIIQQ", data[:32])
    assert (magic, version, size, zero) == (b"MEGAGATH", 1, len(data), 0)
    text = data[64 : 64 + header_bytes]
    assert hashlib.sha256(data[:32] + text).digest() == data[32:64]
    header = json.loads(text)
    payload = NaivePayload(header, {})
    end = 64 + header_bytes
    for entry in header["parameters"]:
        assert entry["offset"] == end
        at = entry["offset"]
        lines, columns = matrix(entry["shape"])
        height, width = entry["chunk"]
        rows = math.ceil(lines / height) * math.ceil(columns / width)
        bits = 2 if entry["bins"] <= 4 else 4 if entry["bins"] <= 16 else 8
        keep = entry["keep"]
        index_bytes, code_bytes = math.ceil(12 * keep / 8), math.ceil(bits * keep / 8)
        packed = data[at : at + rows * index_bytes]
        assert hashlib.sha256(packed).hexdigest() == entry["indices_sha256"]
        values = data[at + len(packed) : at + len(packed) + 4 * entry["bins"] + rows * code_bytes]
        assert hashlib.sha256(values).hexdigest() == entry["values_sha256"]
        codes = values[4 * entry["bins"] :]
        payload.parameters[entry["name"]] = NaiveParameter(
            entry["name"],
            tuple(entry["shape"]),
            (height, width),
            entry["bins"],
            entry["dct"],
            [numbers(packed[r * index_bytes : (r + 1) * index_bytes], 12, keep) for r in range(rows)],
            [numbers(codes[r * code_bytes : (r + 1) * code_bytes], bits, keep) for r in range(rows)],
            np.frombuffer(values[: 4 * entry["bins"]], "<f4"),
        )
        end = at + len(packed) + len(values)
    for entry in header["tables"]:
        count, dim = entry["num_rows"], entry["dim"]
        ids = data[end : end + 8 * count]
        rows_ = data[end + 8 * count : end + 8 * count + 4 * dim * count]
        assert hashlib.sha256(ids).hexdigest() == entry["ids_sha256"]
        assert hashlib.sha256(rows_).hexdigest() == entry["rows_sha256"]
        payload.tables[entry["name"]] = (
            np.frombuffer(ids, "<i8"),
            np.frombuffer(rows_, "<f4").reshape(count, dim),
        )
        end += len(ids) + len(rows_)
    assert end == size
    return payload


def matrix(shape: list[int]) -> tuple[int, int]:
    return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))


def numbers(data: bytes, bits: int, count: int) -> list[int]:
    """Numbers of `bits` bits each, the first in the lowest bits: one long little-endian integer."""
    whole = int.from_bytes(data, "little")
    assert whole >> (bits * count) == 0, "unused bits must be zero"
    return [(whole >> (bits * i)) & ((1 << bits) - 1) for i in range(count)]


def basis(side: int) -> np.ndarray:
    rows = np.arange(side)[:, None]
    columns = np.arange(side)[None, :]
    out = np.cos(np.pi * (2 * columns + 1) * rows / (2 * side)) * np.sqrt(2 / side)
    out[0] /= np.sqrt(2)
    return out


def place(chunks: np.ndarray, p: NaiveParameter) -> np.ndarray:
    """Chunks [rows, size] as the tensor."""
    (lines, columns), (height, width) = p.matrix, p.chunk
    across = math.ceil(columns / width)
    out = np.zeros(p.matrix, chunks.dtype)
    for number, chunk in enumerate(chunks):
        tile = chunk.reshape(height, width)
        if p.dct:
            tile = (basis(height).T @ tile.astype(np.float64) @ basis(width)).astype(np.float32)
        for i in range(height):
            for j in range(width):
                line, column = number // across * height + i, number % across * width + j
                if line < lines and column < columns:
                    out[line, column] = tile[i, j]
    return out.reshape(p.shape)


def norm(p: NaiveParameter) -> float:
    values = [float(p.lookup[c]) for row in p.codes for c in row]
    return math.sqrt(math.fsum(v * v for v in values))


def table_norm(rows: np.ndarray) -> float:
    return math.sqrt(math.fsum(float(v) ** 2 for v in rows.flatten()))


def lower_median(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def factors(norms: list[float]) -> list[np.float32]:
    middle = lower_median(norms)
    return [np.float32(min(1.0, middle / (each + 1e-8))) for each in norms]


def combine(values: list[np.float32], peers: int, rule: str, mean: str, trim: Fraction) -> np.float32:
    """One position: what its contributors sent, in canonical order, as one number."""
    if mean == "peers" and rule != "mean":
        values = values + [np.float32(0)] * (peers - len(values))
    if not values:
        return np.float32(0)
    if rule != "mean":
        values = sorted(values)
    if rule == "median":
        low, high = values[(len(values) - 1) // 2], values[len(values) // 2]
        return np.float32((low + high) * np.float32(0.5))
    if rule == "trimmed":
        cut = math.floor(trim * len(values))
        values = values[cut : len(values) - cut]
    total = np.float32(0)
    for each in values:
        total = np.float32(total + each)
    count = peers if mean == "peers" and rule == "mean" else len(values)
    return np.float32(total / np.float32(count))


def aggregate(
    payloads: list[NaivePayload],
    name: str,
    *,
    clip: bool = True,
    rule: str = "mean",
    mean: str = "contributors",
    trim: Fraction = Fraction(0),
) -> np.ndarray:
    """The aggregated pseudo-gradient of one parameter over peers in canonical order."""
    peers = [payload.parameters[name] for payload in payloads]
    scale = factors([norm(p) for p in peers]) if clip else [np.float32(1)] * len(peers)
    first = peers[0]
    sent: list[dict[int, list[np.float32]]] = [{} for _ in first.indices]
    for p, factor in zip(peers, scale, strict=True):
        for row, (indices, codes) in enumerate(zip(p.indices, p.codes, strict=True)):
            for index, code in zip(indices, codes, strict=True):
                sent[row].setdefault(index, []).append(np.float32(p.lookup[code] * factor))
    chunks = np.zeros((len(sent), first.size), np.float32)
    for row, positions in enumerate(sent):
        for index, values in positions.items():
            chunks[row, index] = combine(values, len(peers), rule, mean, trim)
    return place(chunks, first)


def aggregate_table(
    payloads: list[NaivePayload], name: str, *, mean: str = "contributors"
) -> dict[int, np.ndarray]:
    """The mean row of each id, clipped like a parameter."""
    scale = factors([table_norm(p.tables[name][1]) for p in payloads])
    sums: dict[int, np.ndarray] = {}
    counts: dict[int, int] = {}
    for payload, factor in zip(payloads, scale, strict=True):
        for key, row in zip(*payload.tables[name], strict=True):
            part = (row * factor).astype(np.float32)
            sums[int(key)] = part if int(key) not in sums else sums[int(key)] + part
            counts[int(key)] = counts.get(int(key), 0) + 1
    return {
        key: sums[key] / np.float32(len(payloads) if mean == "peers" else counts[key]) for key in sorted(sums)
    }


def shared_positions(a: NaivePayload, b: NaivePayload, *, skip_full: bool = True) -> int:
    total = 0
    for name, p in a.parameters.items():
        if skip_full and len(p.indices) and len(p.indices[0]) == p.size:
            continue
        for mine, theirs in zip(p.indices, b.parameters[name].indices, strict=True):
            total += len(set(mine) & set(theirs))
    return total


def baseline_overlap(a: NaivePayload, b: NaivePayload) -> float:
    """The value of a pair as the baseline computes it: chunk ratios, averaged, weighted by size."""
    weighted, sizes = 0.0, 0
    for name, p in a.parameters.items():
        keep = len(p.indices[0])
        ratios = [
            len(set(x) & set(y)) / keep for x, y in zip(p.indices, b.parameters[name].indices, strict=True)
        ]
        size = len(p.indices) * keep
        weighted += sum(ratios) / len(ratios) * size
        sizes += size
    return weighted / sizes
