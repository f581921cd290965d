"""routed_gradients: what a process sends to the owners of rows: one summed gradient per distinct id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.ops import scatter_pieces
from megalith.ops.pooling import Pooling
from megalith.shards.contract import Shards
from megalith.shards.joint_pooling import used_mask, used_occurrences
from megalith.shards.preparer import RoutedIds
from megalith.shards.routed_lookup import RoutedLookup
from megalith.table import TableConfig
from megalith.table.table_data import Step
from megalith.table.validation import InputChecks, check_pooling


@dataclass(frozen=True)
class RoutedGradients:
    """Validated gradients, summed in the order of occurrences.

    Attributes:
        names: The tables with gradients.
        flat: float32 [size], the summed gradients of all distinct ids, in their order; zeros for ids without
            a gradient.
        used: The ranges of occurrences that have a gradient.
    """

    names: list[str]
    flat: Tensor
    used: list[tuple[int, int]]

    def mask(self, routed: RoutedIds) -> Tensor | None:
        """Return which distinct ids have a gradient.

        Args:
            routed: The ids that were looked up.

        Returns:
            bool [u]; None: all.
        """
        return used_mask(routed, self.used)

    def seen(
        self,
        configs: Mapping[str, TableConfig],
        routed: RoutedIds,
        occurrences: Mapping[str, Tensor],
    ) -> Tensor | None:
        """Count how often each distinct id occurs, if an admission policy needs it.

        Args:
            configs: All tables.
            routed: The ids that were looked up.
            occurrences: How many occurrences each id stands for, int64 [n] per table; one each for a table
                without an entry.

        Returns:
            int64 [u]; None if no table has an admission policy.
        """
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
    """Check everything that `Shards.apply_gradients` takes, and sum the gradients per distinct id.

    Args:
        shards: The tables.
        lookup: The lookup.
        grads: See `Shards.apply_gradients`.
        pooling: See `Shards.apply_gradients`.
        occurrences: See `Shards.apply_gradients`.
        step: See `Shards.apply_gradients`.
        time: See `Shards.apply_gradients`.
        scale: See `Shards.apply_gradients`.
        clip_norm: See `Shards.apply_gradients`.

    Returns:
        The sums; the numbers without rates, None if there is no table that could have gradients; the
        occurrences of `RoutedGradients.seen`.
    """
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
    """Check the gradients of a lookup and sum them per distinct id.

    Args:
        checks: The checks of each table.
        lookup: The lookup.
        grads: float32 [n, dim] per table or, with `pooling`, one gradient per output.
        pooling: The pooling that made the outputs.

    Returns:
        The sums.

    Raises:
        InputError: The gradients do not fit the lookup, or are not finite.
    """
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
    """Check the numbers of an update.

    Args:
        configs: All tables.
        checks: The checks of each table.
        names: The tables with gradients. Without one, the numbers are checked by a table that could have
            gradients.
        step: See `Shards.apply_gradients`.
        time: See `Shards.apply_gradients`.
        scale: See `Shards.apply_gradients`.
        clip_norm: See `Shards.apply_gradients`.

    Returns:
        The numbers, without rates; None if no table is trainable and none has gradients.
    """
    trainable = [name for name, config in configs.items() if config.trainable]
    numbers = None
    for name in names or trainable[:1]:
        numbers = checks[name].step_numbers(step, time, scale, clip_norm)
    return numbers
