"""OuterUpdate: a window's payloads to one step of the weights, block by block, within a memory budget.

Blocks shrink as peers grow in number, so the peak is set by the budget alone. Everything that can refuse
does so before the first weight changes. What a block comes to (`reduce_rows`) and what is done
with it (`step_tile`) are separate, so that one rank can compute what another applies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megalith.errors import InputError, UsageError
from megalith.gather.budget import check_update_budget, lookup_bytes, row_bytes, rows_per_block
from megalith.gather.chunks import Area, covered, lay_out, rectangles, within
from megalith.gather.fingerprint import Fingerprint, fingerprint
from megalith.gather.ledger import Ledger
from megalith.gather.merge import Gathered, GatherResult, as_result
from megalith.gather.payload import Payload
from megalith.gather.reduce import PeerRows, clip_factors, medians, reduce_rows
from megalith.gather.schema import Schema
from megalith.gather.settings import UpdateConfig
from megalith.gather.snapshot import Policy, Snapshot
from megalith.gather.tables import reduce_table

T = TypeVar("T")

ApplyRows = Callable[[str, Tensor, Tensor], None]
"""Takes a table's name, ids int64 [n] ascending and what to add to their rows, float32 [n, dim]."""


@dataclass(frozen=True)
class UpdateReport:
    """What a step did. medians, factors: by parameter and table, by peer; peak_bytes: by the ledger."""

    uids: tuple[int, ...]
    excluded: tuple[int, ...]
    medians: tuple[float, ...]
    factors: tuple[tuple[float, ...], ...]
    outer_step: int
    peak_bytes: int


class OuterUpdate:
    """The outer optimizer of a model: its step counter and, for nesterov, a momentum per parameter.

    How it steps, and with how much memory, each window's plan says.
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.outer_step = 0
        self.momentum: dict[str, Tensor] = {}

    def apply(
        self,
        parameters: nn.Module | Mapping[str, Tensor],
        gathered: Gathered,
        *,
        exclude: Sequence[int] = (),
        apply_rows: ApplyRows | None = None,
        snapshot: Policy = "none",
        snapshot_directory: Path | None = None,
    ) -> UpdateReport:
        """One step of all weights, in place.

        exclude: accepted uids to leave out. apply_rows: called with changes of table rows, to be added
        (such as `table.assign_add`). snapshot: how weights are put back if the step breaks off; rows that
        `apply_rows` took are the caller's. Raises InputError or BudgetError before anything changes;
        UsageError after a step that broke off and could not be undone.
        """
        result = as_result(gathered)
        config = result.plan.update
        tensors = self.checked(parameters)
        uids = tuple(uid for uid in result.uids if uid not in set(exclude))
        payloads = self._payloads(result, uids, apply_rows)
        norms = result.norm_table(uids)
        factors = clip_factors(norms, config)
        ledger = Ledger(result.plan.memory_budget, "the update")
        check_update_budget(self.schema, config, len(uids), ledger.budget)
        self.prepare(tensors, config)
        saved = Snapshot({**tensors, **momentum_names(self.momentum)}, snapshot, snapshot_directory)
        try:
            with torch.no_grad():
                for number, spec in enumerate(self.schema.parameters):
                    self._update_parameter(tensors[spec.name], number, payloads, factors, config, ledger)
                for number, table in enumerate(self.schema.tables):
                    column = factors[:, len(self.schema.parameters) + number]
                    for ids, rows in reduce_table(payloads, number, column, config, ledger):
                        assert apply_rows is not None
                        apply_rows(table.name, ids, table_step(rows, config))
        except BaseException as error:
            saved.restore()
            if saved.can_restore or not isinstance(error, Exception):
                raise
            raise UsageError(
                "the update broke off and weights may be torn: reload a checkpoint and catch up "
                f"(or use a snapshot): {type(error).__name__}: {error}"
            ) from error
        finally:
            saved.close()
        self.outer_step += 1
        return UpdateReport(
            uids=uids,
            excluded=tuple(uid for uid in result.uids if uid in set(exclude)),
            medians=tuple(medians(norms).tolist()),
            factors=tuple(map(tuple, factors.tolist())),
            outer_step=self.outer_step,
            peak_bytes=ledger.peak,
        )

    def prepare(self, tensors: Mapping[str, Tensor], config: UpdateConfig) -> None:
        """Makes the optimizer's state where there is none yet."""
        if config.optimizer == "nesterov":
            for name, tensor in tensors.items():
                if name not in self.momentum:
                    self.momentum[name] = torch.zeros_like(tensor, dtype=torch.float32)

    @torch.no_grad()
    def step_tile(
        self,
        parameter: Tensor,
        number: int,
        start: int,
        tile: Tensor,
        config: UpdateConfig,
        held: Area | None = None,
    ) -> None:
        """Steps the weights that rows `start` and on of a parameter cover, with their tile [rows, size].

        held: what `parameter` is of the whole, if it is a part; weights outside of it are left to others.
        """
        spec = self.schema.parameters[number]
        area = Area(0, spec.matrix[0], 0, spec.matrix[1]) if held is None else held
        shape = area.bottom - area.top, area.right - area.left
        height, width = spec.chunk
        for place in rectangles(spec, start, start + tile.shape[0]):
            here = covered(spec, place, area)
            if here.top >= here.bottom or here.left >= here.right:
                continue
            weights = within(parameter.view(shape), here, area.top, area.left)
            gradient = lay_out(tile[place.start : place.stop], spec, place)
            gradient = within(gradient, here, place.top * height, place.left * width)
            if config.optimizer == "sign":
                gradient = gradient.sign()
            elif config.optimizer == "nesterov":
                momentum = within(self.momentum[spec.name].view(shape), here, area.top, area.left)
                momentum.mul_(config.momentum).add_(gradient)
                gradient = (momentum * config.momentum).add_(gradient)
            # Multiplied, then subtracted: fused, the two would round once here and twice there.
            weights.copy_(weights.to(torch.float32) - gradient * config.lr)

    def fingerprint(self, parameters: nn.Module | Mapping[str, Tensor]) -> Fingerprint:
        """Of the schema's weights and, where there is one, the momentum: what the next step starts from."""
        return fingerprint({**self.checked(parameters), **momentum_names(self.momentum)})

    def state_dict(self) -> dict[str, Any]:
        """Step counter and momentum."""
        return {"outer_step": self.outer_step, "momentum": dict(self.momentum)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave. Raises InputError if it is of another model."""
        momentum = {name: tensor.to(torch.float32).clone() for name, tensor in state["momentum"].items()}
        for name, tensor in momentum.items():
            if tuple(tensor.shape) != self.schema.parameter(name).shape:
                raise InputError(f"momentum of {name!r} has shape {tuple(tensor.shape)}")
        self.outer_step, self.momentum = int(state["outer_step"]), momentum

    def _update_parameter(
        self,
        parameter: Tensor,
        number: int,
        payloads: Sequence[Payload],
        factors: Tensor,
        config: UpdateConfig,
        ledger: Ledger,
    ) -> None:
        spec, count, device = self.schema.parameters[number], len(payloads), parameter.device
        with ledger.hold(lookup_bytes(self.schema, count), "values of codes"):
            lookups = [
                (payload.lookup(number) * factor).to(device)
                for payload, factor in zip(payloads, factors[:, number], strict=True)
            ]
            rows = rows_per_block(spec, config, count, ledger.budget - ledger.used)
            for start in range(0, spec.rows, rows):
                stop = min(start + rows, spec.rows)
                with ledger.hold((stop - start) * row_bytes(spec, config, count), "a block"):
                    peers = (
                        PeerRows(
                            payload.indices(number, start, stop).to(device),
                            payload.codes(number, start, stop).to(device),
                            lookup,
                        )
                        for payload, lookup in zip(payloads, lookups, strict=True)
                    )
                    tile = reduce_rows(spec, stop - start, peers, count, config)
                    self.step_tile(parameter, number, start, tile, config)

    def checked(self, parameters: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The schema's parameters by name, detached. Raises InputError if one is missing or misshapen."""
        given = dict(parameters.named_parameters() if isinstance(parameters, nn.Module) else parameters)
        for spec in self.schema.parameters:
            tensor = given.get(spec.name)
            if tensor is None:
                raise InputError(f"parameter {spec.name!r} of the schema was not given")
            if tuple(tensor.shape) != spec.shape or not tensor.is_floating_point():
                raise InputError(
                    f"parameter {spec.name!r} is {tensor.dtype} {tuple(tensor.shape)}, "
                    f"its schema says floating point {spec.shape}"
                )
            if not tensor.is_contiguous():
                raise InputError(f"parameter {spec.name!r} is not contiguous: use .contiguous()")
        return {spec.name: given[spec.name].detach() for spec in self.schema.parameters}

    def _payloads(
        self, result: GatherResult, uids: Sequence[int], apply_rows: ApplyRows | None
    ) -> list[Payload]:
        if result.schema != self.schema:
            raise InputError("the gathered payloads are of another schema than this update")
        if not uids:
            raise InputError("there is no peer to update with: `decide` says whether to skip")
        chosen = result.held(uids)
        for number, table in enumerate(self.schema.tables):
            if apply_rows is None and any(p.header.tables[number].num_rows for p in chosen):
                raise InputError(f"peers sent rows of table {table.name!r}: give apply_rows to take them")
        return chosen


def table_step(rows: Tensor, config: UpdateConfig) -> Tensor:
    """What is added to rows of a table. Momentum is for parameters only."""
    return (rows.sign() if config.optimizer == "sign" else rows) * -config.lr


def momentum_names(momentum: Mapping[str, T]) -> dict[str, T]:
    """Momentum by the names that fingerprints and snapshots have for it."""
    return {f"momentum of {name}": tensor for name, tensor in momentum.items()}
