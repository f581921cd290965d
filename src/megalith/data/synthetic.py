"""SyntheticReader: an endless stream of synthetic clicks with known click probabilities.

Ids follow Zipf's law, new ids appear over time, and the true weights may drift. A batch is a pure function of
(seed, batch index) and the weights of an id are a pure function of (seed, feature, id). No table is stored,
any batch can be generated directly, and each rank reads its own batches of one stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from megalith.bits import shift_right, signed
from megalith.data.batch import Batch, Position
from megalith.data.files import position_integer
from megalith.data.reader import Reader
from megalith.errors import InputError
from megalith.library import native_module
from megalith.ops import checks
from megalith.ragged import Ragged
from megalith.routing import mix
from megalith.table.config import TableConfig
from megalith.table.initializers import Normal, table_key
from megalith.table.optimizers import SGD
from megalith.table.table import Table

VECTOR_DIM = 4
_KEY = "teacher"
"""Part of the key of every random draw. A different value would change all generated data."""


def _check_number(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"synthetic data: {name} must be a finite number, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class SyntheticFeature:
    """A feature with generated ids.

    Raises:
        InputError: A field is out of range.
    """

    name: str
    """Name of the feature in the batches."""
    num_ids: int = 2_000
    """Number of ids in the first batch."""
    exponent: float = 1.1
    """Exponent of Zipf's law: the frequency of the id of rank k is proportional to 1 / k^exponent."""
    max_length: int = 1
    """Maximum number of ids per row: 1 gives exactly one id, a larger value gives 0 to max_length ids."""
    new_per_batch: float = 0.0
    """Number of new ids that appear with each batch."""
    fresh: float = 0.0
    """Fraction of the values that are recent ids. The newest id is the most frequent; old ones disappear."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"synthetic data: a feature needs a name, got {self.name!r}")
        for name in ("num_ids", "max_length"):
            checks.integer(getattr(self, name), f"synthetic data: feature {self.name!r}: {name}")
        for name in ("exponent", "new_per_batch", "fresh"):
            _check_number(getattr(self, name), f"feature {self.name!r}: {name}")
        counts_fit = self.num_ids >= 1 and self.max_length >= 1 and self.exponent >= 0
        if not counts_fit or not 0 <= self.fresh <= 1 or not self.new_per_batch >= 0:
            raise InputError(f"synthetic data: feature {self.name!r} has a value out of range: {self}")


@dataclass(frozen=True, eq=False)
class SyntheticBatch(Batch):
    """A batch with the true click probability of each row.

    Attributes:
        true_probability: The probability that each label was drawn with, float32 [B].
    """

    true_probability: Tensor = field(kw_only=True)


DEFAULT_FEATURES = (
    SyntheticFeature(name="user", num_ids=5_000, exponent=1.05),
    SyntheticFeature(name="item", num_ids=2_000, exponent=1.1, new_per_batch=0.5, fresh=0.1),
    SyntheticFeature(name="tags", num_ids=200, max_length=4),
    SyntheticFeature(name="context", num_ids=50),
)


class SyntheticReader(Reader):
    """Reads batches of synthetic clicks.

    The logit of a click is `bias + scale * s`, where s has a variance of about 1. A fraction `interaction` of
    the variance comes from products of the vectors of two features' ids. The rest comes from a weight per id
    and a weight per dense value.

    Args:
        features: The features to generate.
        batch_size: Rows per batch.
        seed: Seed of ids, weights and labels.
        num_batches: Number of batches of all ranks together. None: the stream never ends.
        num_dense: Number of normally distributed dense values per row.
        bias: Mean of the logits.
        scale: Standard deviation of the logits.
        interaction: Fraction of the variance that comes from pairs of ids, 0 to 1.
        drift_period: Number of batches after which the drifting weights repeat. None: the weights are fixed.
        start_time: Time of batch 0 in seconds.
        seconds_per_batch: Seconds between two batches.

    Raises:
        InputError: A number is out of range or two features have the same name.
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
        if not isinstance(features, list | tuple) or not all(
            isinstance(each, SyntheticFeature) for each in features
        ):
            raise InputError(f"synthetic data: features must be a list of SyntheticFeature, got {features!r}")
        names = [feature.name for feature in features]
        if not names or len(set(names)) != len(names):
            raise InputError(f"synthetic data: features must have distinct names, got {names}")
        for name, value in (("bias", bias), ("scale", scale), ("interaction", interaction)):
            _check_number(value, name)
        if drift_period is not None:
            _check_number(drift_period, "drift_period")
        for name, count in (
            ("seed", seed),
            ("start_time", start_time),
            ("seconds_per_batch", seconds_per_batch),
        ):
            if isinstance(count, bool) or not isinstance(count, int):
                raise InputError(f"synthetic data: {name} must be an integer, got {count!r}")
        if not 0 <= interaction <= 1:
            raise InputError(f"synthetic data: interaction must be between 0 and 1, got {interaction}")
        if drift_period is not None and not drift_period > 0:
            raise InputError(f"synthetic data: drift_period must be above 0, got {drift_period}")
        checks.integer(num_dense, "synthetic data: num_dense", least=0)
        if num_batches is not None:
            checks.integer(num_batches, "synthetic data: num_batches", least=0)
        self.features = tuple(features)
        self.seed = seed
        self.num_batches = num_batches
        self._num_dense = num_dense
        self._mixed = torch.empty(0, dtype=torch.int64, device="cpu")
        self.bias, self.scale = bias, scale
        self.interaction = interaction if len(features) > 1 else 0.0
        self.drift_period = drift_period
        self.start_time, self.seconds_per_batch = start_time, seconds_per_batch

    # ---- the stream

    @property
    def num_rows(self) -> int | None:
        """Number of rows of this shard. None if the stream is endless."""
        if self.num_batches is None:
            return None
        return len(range(self.rank, self.num_batches, self.world_size)) * self.batch_size

    @property
    def feature_names(self) -> list[str]:
        return [feature.name for feature in self.features]

    @property
    def num_dense(self) -> int:
        return self._num_dense

    def _start(self) -> Position:
        return {"batch": 0}

    def _check(self, position: Position) -> None:
        position_integer(position, "batch")

    def _read(self) -> Iterator[SyntheticBatch]:
        while True:
            done = self.position["batch"]
            index = done * self.world_size + self.rank
            if self.num_batches is not None and index >= self.num_batches:
                self._at = None
                return
            self._at = self._with_shard({"batch": done + 1})
            yield self.batch(index)

    def batch(self, index: int) -> SyntheticBatch:
        """Generate one batch.

        Args:
            index: Index of the batch in the stream of all ranks.

        Returns:
            The batch; its position is that of this shard after it.

        Raises:
            InputError: The index is not an integer of 0 or more.
        """
        checks.integer(index, "synthetic data: index", least=0)
        columns = {feature.name: self._ids(feature, index) for feature in self.features}
        dense = None
        if self.num_dense:
            uniform = self._uniform("dense", index, self.batch_size * self.num_dense)
            dense = torch.special.ndtri(uniform).float().view(self.batch_size, self.num_dense)
        chance = torch.sigmoid(self._logits(columns, dense, index)).float()
        labels = (self._uniform("label", index, self.batch_size) < chance).float()
        after = self._with_shard({"batch": index // self.world_size + 1})
        time = self.start_time + index * self.seconds_per_batch
        return SyntheticBatch(columns, labels, dense, None, time, after, true_probability=chance)

    # ---- the content of a batch

    def _ids(self, feature: SyntheticFeature, index: int) -> Ragged:
        lengths = torch.ones(self.batch_size, dtype=torch.int64, device="cpu")
        if feature.max_length > 1:
            uniform = self._uniform(f"{feature.name}/length", index, self.batch_size)
            lengths = (uniform * (feature.max_length + 1)).long()
        n = int(lengths.sum())
        number = _zipf(self._uniform(f"{feature.name}/rank", index, n), feature.num_ids, feature.exponent)
        if feature.fresh:
            born = feature.num_ids + int(index * feature.new_per_batch)
            is_fresh = self._uniform(f"{feature.name}/fresh", index, n) < feature.fresh
            number = torch.where(is_fresh, born - 1 - number, number)
        ids = mix(number ^ signed(table_key(self.seed, f"{_KEY}/ids/{feature.name}")))
        return Ragged.from_lengths(ids, lengths)

    def _logits(self, columns: dict[str, Ragged], dense: Tensor | None, index: int) -> Tensor:
        angle = 0.0 if self.drift_period is None else 2 * math.pi * index / self.drift_period
        linear = torch.zeros(self.batch_size, dtype=torch.float64, device="cpu")
        total = torch.zeros(self.batch_size, VECTOR_DIM, dtype=torch.float64, device="cpu")
        squares = torch.zeros_like(total)
        for name, column in columns.items():
            rows = self._pooled(f"{_KEY}/{name}", column)
            linear += rows[:, 0] * math.cos(angle) + rows[:, 1] * math.sin(angle)
            total += rows[:, 2:]
            squares += rows[:, 2:] ** 2
        if dense is not None:
            weights = _normal(self.seed, f"{_KEY}/dense", torch.arange(self.num_dense, device="cpu"), 1)
            linear += dense.double() @ weights[:, 0]
        count = len(columns)
        pairs = ((total**2 - squares) / 2).sum(1) / math.sqrt(VECTOR_DIM * max(count * (count - 1) / 2, 1))
        linear /= math.sqrt(count + self.num_dense)
        mixed = math.sqrt(1 - self.interaction) * linear + math.sqrt(self.interaction) * pairs
        return self.bias + self.scale * mixed

    def _pooled(self, name: str, column: Ragged) -> Tensor:
        """The mean of the ids' true rows (weight, weight a quarter period later, vector); zeros if empty."""
        rows = _normal(self.seed, name, column.values, 2 + VECTOR_DIM)
        sums = torch.zeros(len(column), rows.shape[1], dtype=torch.float64, device="cpu")
        sums.index_add_(0, column.row_ids(), rows)
        return sums / column.lengths().clamp(min=1)[:, None]

    def _uniform(self, use: str, index: int, n: int) -> Tensor:
        """n uniform numbers between 0 and 1, float64, drawn from (seed, use, index)."""
        key = signed(table_key(self.seed, f"{_KEY}/draw/{use}/{index}"))
        if self._mixed.numel() < n:  # the same numbers for every draw
            self._mixed = mix(torch.arange(n, device="cpu"))
        bits = mix(self._mixed[:n] ^ key)
        return (shift_right(bits, 12).double() + 0.5) * 2.0**-52


def _zipf(uniform: Tensor, num_ids: int, exponent: float) -> Tensor:
    """Map uniform numbers to ranks 0 .. num_ids - 1 by the inverse of the continuous form of Zipf's law."""
    if abs(exponent - 1) < 1e-6:
        rank = (num_ids + 1) ** uniform
    else:
        power = 1 - exponent
        rank = (uniform * ((num_ids + 1) ** power - 1) + 1) ** (1 / power)
    return (rank.long() - 1).clamp(0, num_ids - 1)


def _normal(seed: int, name: str, ids: Tensor, dim: int) -> Tensor:
    return _empty_table(seed, name, dim).lookup(ids).double()


@lru_cache(maxsize=256)
def _empty_table(seed: int, name: str, dim: int) -> Table:
    """A table without rows: every id reads as its initial row."""
    config = TableConfig(name, dim=dim, optimizer=SGD(), initializer=Normal(0.0, 1.0))
    return Table(config, engine="reference" if native_module() is None else "cpu", seed=seed)
