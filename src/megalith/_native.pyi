"""The native module (native/bind*.cpp). Private: use `megalith.Table` and `megalith.ops`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int64]

MAX_CONSUMERS: int
MAX_ROWS: int
PRECISIONS: tuple[str, ...]
SCORES: tuple[str, ...]
UNKNOWN_EPOCH: int

def kernels() -> str: ...
def set_huge_pages(on: bool) -> None: ...
def set_exchange_api(on: bool) -> None: ...
def check_tensors(ids: Tensor, values: Tensor) -> None: ...
def route(ids: Tensor, rule: tuple[int, ...], owners: Tensor, threads: int) -> None: ...
def dedup(
    ids: Tensor,
    splits: Tensor,
    owners: Tensor | tuple[int, ...],
    shards: int,
    distinct: bool,
    index: Tensor,
    first: Tensor,
    unique: Tensor,
    counts: Tensor,
    widths: Tensor | None,
    offsets: Tensor | None,
    name: str,
    threads: int,
) -> int: ...
def match(keys: Tensor, queries: Tensor, out: Tensor, threads: int, /) -> None: ...
def bucketize(
    ids: Tensor | None,
    splits: Tensor,
    owners: Tensor | tuple[int, ...],
    shards: int,
    lengths: Tensor,
    place: Tensor,
    name: str,
    threads: int,
) -> None: ...
def gather(source: Tensor, index: Tensor, stride: int, out: Tensor, name: str, threads: int, /) -> None: ...
def place(rows: Tensor, place: Tensor, out: Tensor, threads: int, /) -> None: ...
def scatter(
    rows: list[Tensor], index: list[Tensor], strides: list[int], out: Tensor, name: str, threads: int, /
) -> None: ...
def view_rows(rows: Tensor, parts: Sequence[tuple[int, int, int, float, float]], threads: int, /) -> None: ...
def view_slopes(
    gradients: Tensor,
    rows: Tensor,
    parts: Sequence[tuple[int, int, int, float, float]],
    factors: Sequence[float],
    threads: int,
    /,
) -> None: ...
def take_splits(splits: Tensor, rows: Tensor, values: int, new_splits: Tensor, /) -> int: ...
def take_rows(
    values: Tensor, splits: Tensor, rows: Tensor, new_splits: Tensor, out: Tensor, threads: int, /
) -> None: ...
def pad_rows(rows: Tensor, splits: Tensor, out: Tensor, threads: int, /) -> None: ...
def unpad_rows(padded: Tensor, splits: Tensor, out: Tensor, threads: int, /) -> None: ...
def move_runs(
    source: Tensor, begin: Tensor, to: Tensor, widths: Tensor, out: Tensor, name: str, /
) -> None: ...
def locate(packed: Tensor, bases: Tensor, ends: Tensor, widths: Tensor, out: Tensor, /) -> int: ...
def pool(
    source: Tensor,
    index: Tensor | None,
    stride: int,
    dim: int,
    bags: Sequence[tuple[object, ...]],
    outputs: Sequence[Tensor],
    name: str,
    threads: int,
) -> None: ...
def unpool(
    out: Tensor,
    index: Tensor | None,
    stride: int,
    dim: int,
    bags: Sequence[tuple[object, ...]],
    gradients: Sequence[Tensor],
    name: str,
    threads: int,
) -> None: ...
def read_tables(reads: Sequence[tuple[Any, ...]], outputs: Sequence[Tensor], threads: int) -> list[int]: ...
def update_tables(updates: Sequence[tuple[Any, ...]], gradients: Sequence[Tensor], threads: int) -> None: ...
def layout(
    lists: list[Tensor],
    packed: Tensor,
    offsets: Tensor,
    features: Sequence[tuple[object, ...]],
    outputs: Sequence[Tensor],
    wide: bool,
    threads: int,
    /,
) -> None: ...
def layout_gradient(
    out: Tensor,
    bases: Tensor,
    packed: Tensor,
    offsets: Tensor,
    features: Sequence[tuple[object, ...]],
    gradients: Sequence[Tensor],
    threads: int,
    /,
) -> None: ...
def check_indices(packed: Tensor, keep: int, size: int, /) -> int: ...
def count_codes(packed: Tensor, keep: int, bits: int, counts: Tensor, /) -> bool: ...
def add_chunk_rows(
    indices: Tensor,
    codes: Tensor,
    keep: int,
    bits: int,
    values: Tensor,
    total: Tensor,
    count: Tensor | None,
    threads: int,
) -> None: ...
def divide_by_counts(total: Tensor, count: Tensor, threads: int, /) -> None: ...
def step_chunks(
    tile: Tensor,
    weights: Tensor,
    first: int,
    across: int,
    height: int,
    width: int,
    top: int,
    left: int,
    lr: float,
    threads: int,
    /,
) -> None: ...
def prefer_huge_pages(tensor: Tensor, /) -> None: ...
def ascends(splits: Tensor, end: int, /) -> bool: ...
def hash_strings(data: bytes, offsets: Tensor, seed: int, out: Tensor, threads: int, /) -> None: ...
def all_finite(tensor: Tensor, threads: int) -> bool: ...
def crc32(data: Any, value: int = 0) -> int: ...  # only if the CPU has a fast way
def start_writeback(file: int, /) -> None: ...  # Linux only
def crc32c(data: bytes, /) -> int: ...
def unsnap(data: bytes, max_bytes: int, /) -> bytes: ...
def entries(
    data: bytes,
    at: int,
    limit: int,
    max_bytes: int,
    layout: tuple[object, ...],
    ids: Tensor,
    rows: Tensor,
    times: Tensor,
    /,
) -> tuple[int, int]: ...
def skip_entries(data: bytes, at: int, limit: int, max_bytes: int, /) -> tuple[int, int]: ...
def decode_records(
    kind: int, messages: list[bytes], names: list[str], label_index: int, /
) -> tuple[Any, ...]: ...
def join_blocks(data: Tensor, begins: Sequence[int], counts: Tensor, widths: Tensor, out: Tensor) -> None: ...

class Buffers:
    def __init__(self) -> None: ...
    def get(self, bytes: int) -> Any: ...  # a DLPack capsule of uint8 [bytes]
    @property
    def num_free(self) -> int: ...

class Mailbox:  # Linux only
    def __init__(self, path: str, rank: int, size: int) -> None: ...
    def connect(self, paths: Sequence[str]) -> None: ...
    def exchange(
        self,
        send: Tensor,
        send_sizes: Sequence[int],
        recv: Tensor,
        recv_sizes: Sequence[int],
        timeout: float,
    ) -> list[int]: ...
    def unlink(self) -> None: ...
    def close(self) -> None: ...

class Table:
    def __init__(
        self,
        name: str,
        segments: Sequence[tuple[Any, ...]],
        *,
        key: int,
        missing_zeros: bool,
        max_rows: int = ...,
        kernels: str = "",
        counted: bool = False,
        min_count: int = 0,
        max_counted_ids: int = 0,
        admission_limit: int = 0,
        capacity: int = 0,
        score: int = ...,
        log_ids: int = ...,
        huge_pages: bool = True,
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def kernels(self) -> str: ...
    @property
    def row_floats(self) -> int: ...
    def set_key(self, key: int) -> None: ...
    def read(self, rows: Tensor | None, epoch: int, ids: Tensor, out: Tensor, threads: int) -> None: ...
    def assign(self, ids: Tensor, values: Tensor, add: bool, time: int, threads: int, /) -> None: ...
    def reinitialize(self, ids: Tensor, time: int, status: Tensor, threads: int, /) -> None: ...
    def remove(self, ids: Tensor, /) -> int: ...
    def restore(
        self,
        ids: Tensor,
        columns: Sequence[Tensor],
        times: Tensor,
        counts: Tensor | None,
        steps: Tensor | None,
        threads: int,
    ) -> None: ...
    def write_rows(
        self,
        ids: Tensor,
        occurrences: Tensor,
        reached: int,
        columns: Sequence[Tensor],
        rows_given: int,
        step: int,
        time: int,
        threads: int,
        /,
    ) -> None: ...
    def read_complete(self, ids: Tensor, columns: Sequence[Tensor], threads: int, /) -> None: ...
    def admits(self, ids: Tensor, occurrences: Tensor, step: int, out: Tensor, /) -> None: ...
    def scan(
        self,
        start: int,
        ids: Tensor,
        columns: Sequence[Tensor],
        times: Tensor,
        counts: Tensor | None,
        steps: Tensor | None,
        watch: int = -1,
        stop: int = ...,
    ) -> tuple[int, int]: ...
    def begin_snapshot(
        self, consumer: int, touched_only: bool, room: int, with_pending: bool, /
    ) -> tuple[int, int, Ids, Ids, Ids]: ...
    def read_snapshot(
        self,
        ids: Tensor,
        columns: Sequence[Tensor],
        times: Tensor,
        counts: Tensor | None,
        steps: Tensor | None,
    ) -> int: ...
    def snapshot_pressure(self) -> float: ...
    def end_snapshot(self, give_back: bool, /) -> float: ...
    def clear(self) -> None: ...
    def reserve(self, n: int, /) -> None: ...
    def track(self, consumer: int, /) -> None: ...
    def untrack(self, consumer: int, /) -> None: ...
    def drain(self, consumer: int, /) -> tuple[Ids, Ids]: ...
    def mark(self, consumer: int, ids: Tensor, /) -> None: ...
    def memory(self) -> tuple[int, int, int, int, int, int]: ...
    def open_watch(self) -> int: ...
    def close_watch(self, watch: int, /) -> None: ...
    def evict(self, ids: Tensor, watch: int, /) -> Ids: ...
    def compact(self, limit: int, /) -> bool: ...
    def drain_evicted(self) -> Ids: ...
    def drain_refused(self) -> Ids: ...
    def pending(self) -> tuple[Ids, Ids]: ...
    def restore_pending(self, ids: Tensor, counts: Tensor, /) -> None: ...
    def counters(self) -> tuple[int, int, int, int, int, int, int]: ...
    def shape(self) -> tuple[int, int, int, bool]: ...
