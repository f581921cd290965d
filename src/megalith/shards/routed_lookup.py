"""RoutedLookup: a lookup whose rows are elsewhere, and the gradients that its update sends to their owners.

Each distinct id travels once, and its row comes back. The rows of all tables arrive in one buffer, in the
order of the distinct ids; occurrences refer to it. On the way back, `checked_update` validates the
gradients and sums them to one gradient per distinct id. How ids, rows and gradients travel is not handled
here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.library import span
from megalith.ops import gather_pieces, scatter_pieces
from megalith.ops.pooling import Pooling
from megalith.shards.contract import Shards
from megalith.shards.joint_pooling import JointPooling, used_mask, used_occurrences
from megalith.shards.lookup import Lookup
from megalith.shards.preparer import RoutedIds
from megalith.table import TableConfig
from megalith.table.table_data import Step
from megalith.table.validation import InputChecks, check_pooling


class RoutedLookup(Lookup):
    """The part of such lookups that does not depend on how rows travel.

    Args:
        configs: All tables, in order.
        routed: See the attribute.
        step: See `Lookup`.

    Attributes:
        routed: The distinct ids, their owners, and the place of each occurrence.
    """

    def __init__(self, configs: Mapping[str, TableConfig], routed: RoutedIds, step: int | None) -> None:
        super().__init__(routed.ids, step)
        self.routed = routed
        self._dims = {name: config.dim for name, config in configs.items()}
        self._joint: tuple[Pooling, JointPooling] | None = None

    @property
    @abstractmethod
    def source(self) -> Tensor:
        """The received rows, float32 [size], in the order of the distinct ids."""

    @property
    def size(self) -> int:
        """The number of floats of the rows of all distinct ids."""
        counts = self.routed.deduped.counts.sum(0).tolist()
        return sum(n * dim for n, dim in zip(counts, self._dims.values(), strict=True))

    def wait(self) -> None:
        _ = self.source

    def gather(self, table: str) -> Tensor:
        self.check_table(table)
        return gather_pieces(self.source, [self.routed.offsets(table)], [self._dims[table]])[0]

    def pool(self, pooling: Pooling) -> list[Tensor]:
        check_pooling(pooling)
        source = self.source
        with span("megalith.pool"):
            return self.joint_pooling(pooling).pool(source)

    def joint_pooling(self, pooling: Pooling) -> JointPooling:
        """Return a pooling of several tables as one.

        Args:
            pooling: The pooling, per table.

        Returns:
            The pooling over the occurrences of all tables; the last one is kept.

        Raises:
            InputError: It is not a Pooling, or does not fit the ids of this lookup.
        """
        check_pooling(pooling)
        if self._joint is None or self._joint[0] is not pooling:
            self._joint = (pooling, JointPooling(pooling, self.routed, self._dims))
        return self._joint[1]


@dataclass(frozen=True)
class RoutedGradients:
    """Validated gradients, summed in the order of occurrences."""

    names: list[str]  # The tables with gradients
    # float32 [size], the summed gradients of all distinct ids, in their order; zeros for ids without a
    # gradient
    flat: Tensor
    used: list[tuple[int, int]]  # The ranges of occurrences that have a gradient

    def mask(self, routed: RoutedIds) -> Tensor | None:
        """Return which distinct ids have a gradient."""
        # returns: bool [u].
        return used_mask(routed, self.used)

    def seen(
        self,
        configs: Mapping[str, TableConfig],
        routed: RoutedIds,
        occurrences: Mapping[str, Tensor],
    ) -> Tensor | None:
        """Count how often each distinct id occurs, if an admission policy needs it."""
        # occurrences: how many occurrences each id stands for, int64 [n] per table; returns: int64 [u].
        if all(config.admission is None for config in configs.values()):
            return None
        each = None
        if occurrences:
            each = torch.ones(routed.total, dtype=torch.int64, device=routed.deduped.ids.device)
            for name, counts in occurrences.items():
                each[routed.occurrences(name)] = counts.to(each.device)
        return used_occurrences(routed, self.used, each)


def checked_update(
    shards: Shards,
    lookup: RoutedLookup,
    grads: Mapping[str, Tensor] | Sequence[Tensor],
    pooling: Pooling | None,
    occurrences: Mapping[str, Tensor] | None,
    step: int,
    time: float | None,
    scale: float,
    clip_norm: float | None,
) -> tuple[RoutedGradients, Step | None, Tensor | None]:
    """Check everything that `Shards.apply_gradients` takes, and sum the gradients per distinct id."""
    lookup.check_unchanged()
    if pooling is None and isinstance(grads, Mapping):
        shards.known(grads, missing_ok=False)
    summed = sum_routed(shards.checks, lookup, grads, pooling)
    numbers = step_numbers(shards.configs, shards.checks, summed.names, step, time, scale, clip_norm)
    counted = shards.check_occurrences(lookup.ids, occurrences, pooling)
    return summed, numbers, summed.seen(shards.configs, lookup.routed, counted)


def sum_routed(
    checks: Mapping[str, InputChecks],
    lookup: RoutedLookup,
    grads: Mapping[str, Tensor] | Sequence[Tensor],
    pooling: Pooling | None,
) -> RoutedGradients:
    """Check the gradients of a lookup and sum them per distinct id."""
    # grads: float32 [n, dim] per table or, with `pooling`, one gradient per output.
    routed = lookup.routed
    if pooling is None:
        if not isinstance(grads, Mapping):
            raise InputError("without pooling, grads must map tables to tensors")
        pieces: list[Tensor] = []
        for name, grad in grads.items():
            if name not in lookup.ids:
                raise InputError(f"table {name!r}: gradients for a table that was not looked up")
            pieces += checks[name].grads(lookup.ids[name], grad, None)
        names = list(grads)
        offsets = [routed.offsets(name) for name in names]
        flat = torch.zeros(lookup.size, dtype=torch.float32, device=routed.deduped.ids.device)
        if names:
            flat = scatter_pieces([p.contiguous() for p in pieces], offsets, lookup.size)
        used = [(routed.occurrences(name).start, routed.occurrences(name).stop) for name in names]
        return RoutedGradients(names, flat, used)
    check_pooling(pooling)
    if not isinstance(grads, list | tuple):
        raise InputError("with pooling, grads must be a list of one gradient per output")
    joint = lookup.joint_pooling(pooling)
    checked = list(grads)
    if joint.tables:
        first = joint.tables[0]
        checked = checks[first].grads(lookup.ids[first], checked, pooling)
    return RoutedGradients(joint.tables, joint.unpool(checked, lookup.size), joint.used)


def step_numbers(
    configs: Mapping[str, TableConfig],
    checks: Mapping[str, InputChecks],
    names: Sequence[str],
    step: int,
    time: float | None,
    scale: float,
    clip_norm: float | None,
) -> Step | None:
    """Check the numbers of an update."""
    trainable = [name for name, config in configs.items() if config.trainable]
    numbers = None
    for name in names or trainable[:1]:
        numbers = checks[name].step_numbers(step, time, scale, clip_norm)
    return numbers
