"""Teacher: endless made-up clicks whose true probabilities are known.

Ids are popular by Zipf's law, new ones appear as time goes on, and the teacher changes its mind (drift). A
batch is a pure function of (seed, number of the batch), an id's weights of (seed, feature, id): there is no
table behind it, any batch can be made at once, and every rank sees its own batches of one stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalith.bits import shift_right, signed
from megalith.data.batch import Batch, Position
from megalith.data.reader import Reader, whole
from megalith.errors import InputError
from megalith.ragged import Ragged
from megalith.routing import mix
from megalith.table.initializers import Normal, initial_rows, table_key

VECTOR_DIM = 4


@dataclass(frozen=True, kw_only=True)
class SyntheticFeature:
    """A feature of made-up ids. Raises InputError if a field makes no sense."""

    name: str
    """The feature's name in the batches."""
    num_ids: int = 2_000
    """How many ids there are when time begins."""
    exponent: float = 1.1
    """Of Zipf's law: the id of rank k comes up in proportion to 1 / k^exponent."""
    max_length: int = 1
    """1 gives one id a row; more gives 0 to max_length of them."""
    new_per_batch: float = 0.0
    """How many new ids appear with each batch."""
    fresh: float = 0.0
    """Which share of the values are recent ids, the newest most popular; each is forgotten in time."""

    def __post_init__(self) -> None:
        counts_fit = self.num_ids >= 1 and self.max_length >= 1 and self.exponent >= 0
        if not counts_fit or not 0 <= self.fresh <= 1 or not self.new_per_batch >= 0:
            raise InputError(f"teacher: feature {self.name!r} has a size or a share out of range: {self}")


@dataclass(frozen=True, eq=False)
class SyntheticBatch(Batch):
    """A batch that knows the probability each label was drawn with, float32 [B]."""

    teacher_probability: Tensor = field(kw_only=True)


DEFAULT_FEATURES = (
    SyntheticFeature(name="user", num_ids=5_000, exponent=1.05),
    SyntheticFeature(name="item", num_ids=2_000, exponent=1.1, new_per_batch=0.5, fresh=0.1),
    SyntheticFeature(name="tags", num_ids=200, max_length=4),
    SyntheticFeature(name="context", num_ids=50),
)


class SyntheticReader(Reader):
    """Batches of made-up clicks; endless unless num_batches is given.

    The logit of a click is bias + scale * s, where s has a variance of about 1: a share `interaction` of it
    from products of vectors of two features' ids, the rest from a weight of each id (and of each of num_dense
    normal values). drift_period: after how many batches the weights are what they were; None keeps them.
    The time of batch i is start_time + i * seconds_per_batch. Raises InputError if a number makes no sense.
    """

    def __init__(
        self,
        features: Sequence[SyntheticFeature] = DEFAULT_FEATURES,
        *,
        batch_size: int,
        seed: int = 0,
        num_batches: int | None = None,
        num_dense: int = 0,
        bias: float = -1.0,
        scale: float = 2.0,
        interaction: float = 0.2,
        drift_period: float | None = None,
        start_time: int = 0,
        seconds_per_batch: int = 1,
    ) -> None:
        super().__init__(batch_size=batch_size)
        names = [feature.name for feature in features]
        if not names or len(set(names)) != len(names):
            raise InputError(f"teacher: features need names of their own, got {names}")
        if not 0 <= interaction <= 1:
            raise InputError(f"teacher: interaction must be within 0 .. 1, got {interaction}")
        if drift_period is not None and not drift_period > 0:
            raise InputError(f"teacher: drift_period must be above 0, got {drift_period}")
        if num_dense < 0 or (num_batches is not None and num_batches < 0):
            raise InputError("teacher: num_dense and num_batches must not be below 0")
        self.features = tuple(features)
        self.seed = seed
        self.num_batches = num_batches
        self.num_dense = num_dense
        self.bias, self.scale = bias, scale
        self.interaction = interaction if len(features) > 1 else 0.0
        self.drift_period = drift_period
        self.start_time, self.seconds_per_batch = start_time, seconds_per_batch

    # ---- the stream

    @property
    def num_rows(self) -> int | None:
        """How many rows this shard has; None if it is endless."""
        if self.num_batches is None:
            return None
        return len(range(self.rank, self.num_batches, self.world_size)) * self.batch_size

    def _start(self) -> Position:
        return {"batch": 0}

    def _check(self, position: Position) -> None:
        whole(position, "batch")

    def __iter__(self) -> Iterator[SyntheticBatch]:
        self._check_workers()
        while True:
            done = self.position["batch"]
            index = done * self.world_size + self.rank
            if self.num_batches is not None and index >= self.num_batches:
                self._at = None
                return
            self._at = self._stamped({"batch": done + 1})
            yield self.batch(index)

    def batch(self, index: int) -> SyntheticBatch:
        """Batch number `index` of the whole stream, whichever rank's it is."""
        columns = {feature.name: self._ids(feature, index) for feature in self.features}
        dense = None
        if self.num_dense:
            even = self._even("dense", index, self.batch_size * self.num_dense)
            dense = torch.special.ndtri(even).float().view(self.batch_size, self.num_dense)
        chance = torch.sigmoid(self._logits(columns, dense, index)).float()
        labels = (self._even("label", index, self.batch_size) < chance).float()
        after = self._stamped({"batch": index // self.world_size + 1})
        time = self.start_time + index * self.seconds_per_batch
        return SyntheticBatch(columns, labels, dense, None, time, after, teacher_probability=chance)

    # ---- what stands in it

    def _ids(self, feature: SyntheticFeature, index: int) -> Ragged:
        lengths = torch.ones(self.batch_size, dtype=torch.int64)
        if feature.max_length > 1:
            even = self._even(f"{feature.name}/length", index, self.batch_size)
            lengths = (even * (feature.max_length + 1)).long()
        n = int(lengths.sum())
        number = _zipf(self._even(f"{feature.name}/rank", index, n), feature.num_ids, feature.exponent)
        if feature.fresh:
            born = feature.num_ids + int(index * feature.new_per_batch)
            is_fresh = self._even(f"{feature.name}/fresh", index, n) < feature.fresh
            number = torch.where(is_fresh, born - 1 - number, number)
        ids = mix(number ^ signed(table_key(self.seed, f"teacher/ids/{feature.name}")))
        return Ragged.from_lengths(ids, lengths)

    def _logits(self, columns: dict[str, Ragged], dense: Tensor | None, index: int) -> Tensor:
        angle = 0.0 if self.drift_period is None else 2 * math.pi * index / self.drift_period
        linear = torch.zeros(self.batch_size, dtype=torch.float64)
        total = torch.zeros(self.batch_size, VECTOR_DIM, dtype=torch.float64)
        squares = torch.zeros_like(total)
        for name, column in columns.items():
            rows = self._pooled(f"teacher/{name}", column)
            linear += rows[:, 0] * math.cos(angle) + rows[:, 1] * math.sin(angle)
            total += rows[:, 2:]
            squares += rows[:, 2:] ** 2
        if dense is not None:
            key = table_key(self.seed, "teacher/dense")
            linear += dense.double() @ _normal(key, torch.arange(self.num_dense), 1)[:, 0]
        count = len(columns)
        pairs = ((total**2 - squares) / 2).sum(1) / math.sqrt(VECTOR_DIM * max(count * (count - 1) / 2, 1))
        linear /= math.sqrt(count + self.num_dense)
        mixed = math.sqrt(1 - self.interaction) * linear + math.sqrt(self.interaction) * pairs
        return self.bias + self.scale * mixed

    def _pooled(self, name: str, column: Ragged) -> Tensor:
        """The mean of the teacher's rows (weight, weight a quarter period later, vector), zeros if empty."""
        rows = _normal(table_key(self.seed, name), column.values, 2 + VECTOR_DIM)
        sums = torch.zeros(len(column), rows.shape[1], dtype=torch.float64)
        sums.index_add_(0, column.row_ids(), rows)
        return sums / column.lengths().clamp(min=1)[:, None]

    def _even(self, use: str, index: int, n: int) -> Tensor:
        """n numbers evenly between 0 and 1, float64, drawn from (seed, use, index)."""
        key = signed(table_key(self.seed, f"teacher/draw/{use}/{index}"))
        bits = mix(mix(torch.arange(n)) ^ key)
        return (shift_right(bits, 12).double() + 0.5) * 2.0**-52


def _zipf(even: Tensor, num_ids: int, exponent: float) -> Tensor:
    """Ranks 0 .. num_ids - 1 by the inverse of Zipf's law taken as continuous."""
    if abs(exponent - 1) < 1e-6:
        rank = (num_ids + 1) ** even
    else:
        power = 1 - exponent
        rank = (even * ((num_ids + 1) ** power - 1) + 1) ** (1 / power)
    return (rank.long() - 1).clamp(0, num_ids - 1)


def _normal(key: int, ids: Tensor, dim: int) -> Tensor:
    return initial_rows(key, ids, [(dim, Normal(0.0, 1.0))]).double()
