"""The native module (native/bind.cpp). Private: use `megalith.Table`."""

from collections.abc import Sequence

from torch import Tensor

MAX_CONSUMERS: int
MAX_ROWS: int
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
def prefer_huge_pages(tensor: Tensor, /) -> None: ...
def hash_strings(data: bytes, offsets: Tensor, seed: int, out: Tensor, threads: int, /) -> None: ...
def all_finite(tensor: Tensor, threads: int) -> bool: ...

class Table:
    def __init__(
        self,
        name: str,
        segments: Sequence[tuple[int, str, list[float], int, float, float]],
        *,
        key: int,
        missing_zeros: bool,
        max_rows: int = ...,
        kernels: str = "",
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def kernels(self) -> str: ...
    @property
    def row_floats(self) -> int: ...
    def find(self, ids: Tensor, rows: Tensor, threads: int, /) -> int: ...
    def read(self, rows: Tensor | None, epoch: int, ids: Tensor, out: Tensor, threads: int) -> None: ...
    def pool(
        self,
        rows: Tensor | None,
        epoch: int,
        ids: Tensor,
        bags: Sequence[tuple[object, ...]],
        outputs: Sequence[Tensor],
        threads: int,
    ) -> None: ...
    def update(
        self,
        rows: Tensor | None,
        epoch: int,
        ids: Tensor,
        gradients: Tensor | Sequence[Tensor],
        bags: Sequence[tuple[object, ...]] | None,
        learning_rates: Sequence[float],
        time: int,
        scale: float,
        clip_norm: float,
        threads: int,
    ) -> None: ...
    def assign(self, ids: Tensor, values: Tensor, add: bool, time: int, threads: int, /) -> None: ...
    def reinitialize(self, ids: Tensor, time: int, status: Tensor, threads: int, /) -> None: ...
    def remove(self, ids: Tensor, /) -> int: ...
    def restore(self, ids: Tensor, raw: Tensor, times: Tensor, threads: int, /) -> None: ...
    def scan(self, start: int, ids: Tensor, raw: Tensor, times: Tensor, /) -> tuple[int, int]: ...
    def clear(self) -> None: ...
    def reserve(self, n: int, /) -> None: ...
    def track(self, consumer: int, /) -> None: ...
    def untrack(self, consumer: int, /) -> None: ...
    def drain(self, consumer: int, /) -> tuple[bytes, bytes]: ...
    def mark(self, consumer: int, ids: Tensor, /) -> None: ...
    def memory(self) -> tuple[int, int, int]: ...
    def shape(self) -> tuple[int, int, int, bool]: ...
