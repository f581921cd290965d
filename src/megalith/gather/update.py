"""OuterUpdate: the payloads of a window to one step of the weights, block by block, within a memory budget.

Everything that can refuse does so before the first weight changes. `Columns` reduces blocks to tiles; here
they are applied to the part of each parameter that this process holds.

A `TensorSnapshot` is a copy of the weights, in memory or in a spool file, with which a failed step is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalith.distributed.elastic_ranks import ElasticRanks
from megalith.distributed.tensor_parts import Fingerprint, TensorPart, fingerprint, local_tensor, part_of
from megalith.errors import InputError, UsageError
from megalith.gather.columns import Columns
from megalith.gather.fetch import RankOptions, rank_options
from megalith.gather.payload_schema import PayloadSchema, Weights
from megalith.gather.plan import GatherPlan
from megalith.gather.reduce import clip_factors
from megalith.gather.result import Gathered, GatherResult, as_result
from megalith.gather.table_rows import ApplyRows, TableShards, row_taker
from megalith.ops import checks
from megalith.ops.matrix_chunks import as_matrix, step_chunks
from megalith.storage.bodies import FileBody, SpoolWriter
from megalith.storage.tensor_files import raw_bytes, tensor_of


class TensorSnapshot:
    """A copy of tensors."""

    def __init__(self, tensors: Mapping[str, Tensor], options: RankOptions) -> None:
        policy = options.snapshot
        self.can_restore = policy != "none"
        self._tensors = tensors
        self._copies: dict[str, Tensor] = {}
        self._file: FileBody | None = None
        if policy == "host":
            self._copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        elif policy == "disk":
            spool = SpoolWriter(options.spool_directory)
            try:
                for tensor in tensors.values():
                    spool.write(raw_bytes(tensor))
                self._file = spool.finish()
            except BaseException:
                spool.discard()
                raise

    @torch.no_grad()
    def restore(self) -> None:
        """Set the tensors to the copy."""
        at = 0
        for name, tensor in self._tensors.items():
            if name in self._copies:
                tensor.copy_(self._copies[name])
            elif self._file is not None and tensor.numel():
                data = self._file.read(at, tensor.numel() * tensor.element_size())
                tensor.copy_(tensor_of(data, tensor.dtype).view(tensor.shape))
                at += len(data)

    def close(self) -> None:
        """Delete the copy."""
        self._copies = {}
        if self._file is not None:
            self._file.close()
            self._file = None


TORN = (
    "the update failed half-way and weights may be inconsistent: reload a checkpoint and catch up (or use a "
    "snapshot): "
)


@dataclass(frozen=True)
class UpdateReport:
    """What a step did.

    Attributes:
        uids: The contributors, in canonical order.
        excluded: Accepted peers that were left out.
        medians: The median norm of each parameter and table.
        factors: For each contributor, the factor of each parameter and table.
        outer_step: The number of steps so far.
        peak_bytes: The most memory that the step held at once, by the ledger.
    """

    uids: tuple[int, ...]
    excluded: tuple[int, ...]
    medians: tuple[float, ...]
    factors: tuple[tuple[float, ...], ...]
    outer_step: int
    peak_bytes: int


class OuterUpdate:
    """The outer optimizer of a model. The plan of each window defines how it steps.

    Args:
        schema: The schema of the model.

    Attributes:
        outer_step: The number of steps so far.
        momentum: For nesterov, the momentum of each parameter: float32, a DTensor if the parameter is one.
        last_window: Run and window of the last decision that was followed; None before the first.
    """

    def __init__(self, schema: PayloadSchema) -> None:
        self.schema = checks.instance(schema, PayloadSchema, "schema")
        self.outer_step = 0
        self.momentum: dict[str, Tensor] = {}
        self.last_window: tuple[str, int] | None = None

    def apply(
        self,
        parameters: Weights,
        gathered: Gathered,
        *,
        ranks: ElasticRanks | None = None,
        exclude: Sequence[int] = (),
        tables: TableShards | ApplyRows | None = None,
        options: RankOptions | None = None,
    ) -> UpdateReport:
        """Make one step of all weights, in place. A collective call with ranks.

        Args:
            parameters: The model, or its parameters by name.
            gathered: The result; the payloads are in this process, or each on one of the ranks.
            ranks: The ranks that share the work; all have the same result.
            exclude: Accepted uids to leave out.
            tables: The tables to which changes of rows are added, or a function that takes these changes.
            options: How weights are restored if the step fails. Rows of tables are not restored.

        Returns:
            What the step did.

        Raises:
            InputError: Something does not match; nothing has changed.
            BudgetError: The budget is too small; nothing has changed.
            UsageError: The window was applied already (nothing has changed), or the step failed half-way and
                could not be undone.
        """
        result, together = as_result(gathered), ElasticRanks.or_alone(ranks)
        settings = rank_options(options)
        left_out = set(checks.sizes(exclude, "exclude", 0))
        uids = tuple(uid for uid in result.uids if uid not in left_out)

        def prepare() -> tuple[dict[str, TensorPart], ApplyRows | None, TensorSnapshot, Columns]:
            parts = self.parts(parameters, together)
            take = row_taker(self.schema, together, tables)
            self.prepare(result, uids, parts, take)
            columns = Columns(result, together, parts=parts)
            saved = TensorSnapshot(self.local_tensors(parts), settings)
            return parts, take, saved, columns

        parts, take, saved, columns = together.agree(prepare, "pre-update")
        try:
            return self.step(columns, uids, parts, take)
        except BaseException as error:
            saved.restore()
            if saved.can_restore or not isinstance(error, Exception):
                raise
            raise UsageError(f"{TORN}{type(error).__name__}: {error}") from error
        finally:
            saved.close()
            columns.close()

    def parts(self, parameters: Weights, ranks: ElasticRanks) -> dict[str, TensorPart]:
        """Return what this rank holds of each parameter.

        Args:
            parameters: The model, or its parameters by name.
            ranks: The ranks that share the work.

        Returns:
            The parts by name.

        Raises:
            InputError: A parameter does not match the schema, or is sharded over other ranks.
        """
        return {name: part_of(name, each, ranks) for name, each in self.schema.weights(parameters).items()}

    def check_window(self, plan: GatherPlan) -> None:
        """Check that a window follows the last one that was applied.

        Args:
            plan: The plan of the window.

        Raises:
            UsageError: It was applied already, or is older.
        """
        run, window = self.last_window or (None, 0)
        if run == checks.instance(plan, GatherPlan, "plan").run and plan.window <= window:
            raise UsageError(
                f"window {plan.window} of run {run!r} cannot be applied: window {window} was applied "
                "already, and applying a window twice would change the weights twice"
            )

    def prepare(
        self,
        result: GatherResult,
        uids: Sequence[int],
        parts: Mapping[str, TensorPart],
        take: ApplyRows | None,
    ) -> None:
        """Check that a result can be applied, and create the state of the optimizer where it is missing.

        Args:
            result: The result.
            uids: The contributors.
            parts: What this process holds of each parameter.
            take: What takes the changes of table rows.

        Raises:
            InputError: The result is of another schema, there is no contributor, nothing takes the rows of
                tables, or the momentum is sharded but the weights are not.
            UsageError: The window was applied already.
        """
        if result.schema != self.schema:
            raise InputError("the gathered payloads have another schema than this update")
        if not uids:
            raise InputError("there is no peer to update with: `decide` returns whether to skip")
        self.check_window(result.plan)
        for number, table in enumerate(self.schema.tables):
            if take is None and any(result.accepted[uid].table_rows[number] for uid in uids):
                raise InputError(f"peers sent rows of table {table.name!r}: pass tables=collection.shards")
        for name, part in parts.items() if result.plan.update.optimizer == "nesterov" else ():
            found = self.momentum.get(name)
            if found is None:
                self.momentum[name] = part.like(torch.zeros_like(part.tensor, dtype=torch.float32))
            elif type(found) is Tensor and part.whole is not part.tensor:
                lines = found if part.span is None else found[part.span[0] : part.span[1]]
                self.momentum[name] = part.like(lines.to(part.tensor.device).clone())
            elif type(found) is not Tensor and part.whole is part.tensor:
                raise InputError(
                    f"the momentum of {name!r} is sharded, but the parameter is not: "
                    "load a state_dict with whole tensors (DTensor.full_tensor())"
                )

    def local_tensors(self, parts: Mapping[str, TensorPart]) -> dict[str, Tensor]:
        """Return the tensors of this process that a step changes.

        Args:
            parts: What this process holds of each parameter.

        Returns:
            Weights and momentum by name.
        """
        found = self._with_momentum({name: part.tensor for name, part in parts.items()})
        return {name: local_tensor(tensor) for name, tensor in found.items()}

    @torch.no_grad()
    def step(
        self,
        columns: Columns,
        uids: Sequence[int],
        parts: Mapping[str, TensorPart],
        take: ApplyRows | None,
        on_change: Callable[[], None] = lambda: None,
    ) -> UpdateReport:
        """Make a step that was checked and prepared. A collective call over the ranks of `columns`.

        Args:
            columns: The payloads.
            uids: The contributors, in canonical order.
            parts: What this process holds of each parameter.
            take: Called with the changes of table rows; None if no peer sent rows.
            on_change: Called before each change of a weight.

        Returns:
            What the step did.
        """
        result, specs = columns.result, self.schema.parameters
        config = result.plan.update
        norms = result.norm_table(uids)
        factors = clip_factors(norms, config)
        momentum = {name: local_tensor(tensor) for name, tensor in self.momentum.items()}
        for number, start, tile in columns.tiles(uids, factors, lambda n: parts[specs[n].name].tensor.device):
            on_change()
            spec, part = specs[number], parts[specs[number].name]
            line = 0 if part.span is None else part.span[0]
            step_chunks(
                tile,
                as_matrix(part.tensor),
                as_matrix(momentum[spec.name]) if config.optimizer == "nesterov" else None,
                first=start,
                across=spec.bands[1],
                chunk=spec.chunk,
                corner=(0, line) if len(spec.shape) < 2 else (line, 0),
                rule=config.optimizer,
                lr=config.lr,
                beta=config.momentum,
            )
            del tile  # its memory is needed for the next one
        for number, table in enumerate(self.schema.tables):
            for ids, rows in columns.table_rows(number, uids, factors[:, len(specs) + number]):
                on_change()
                assert take is not None  # `prepare` has checked it
                # Only parameters have momentum.
                take(table.name, ids, (rows.sign() if config.optimizer == "sign" else rows) * -config.lr)
        self.outer_step += 1
        self.last_window = (result.plan.run, result.plan.window)
        return UpdateReport(
            uids=tuple(uids),
            excluded=tuple(uid for uid in result.uids if uid not in set(uids)),
            medians=tuple(norms.median(dim=0).values.tolist()),
            factors=tuple(map(tuple, factors.tolist())),
            outer_step=self.outer_step,
            peak_bytes=columns.ledger.peak,
        )

    def fingerprint(self, parameters: Weights, *, ranks: ElasticRanks | None = None) -> Fingerprint:
        """Compute the fingerprint of weights and momentum. A collective call if weights are sharded.

        Args:
            parameters: The model, or its parameters by name.
            ranks: The ranks over which weights are sharded.

        Returns:
            The fingerprint, equal for any number of ranks.
        """
        return fingerprint(self._with_momentum(self.schema.weights(parameters)), ranks=ranks)

    def state_dict(self) -> dict[str, Any]:
        """Return step counter, last window and momentum, as `load_state_dict` takes them.

        The momentum of a sharded parameter is a DTensor, which torch.distributed.checkpoint can save.
        """
        return {
            "outer_step": self.outer_step,
            "last_window": self.last_window,
            "momentum": dict(self.momentum),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set step counter, last window and momentum.

        Args:
            state: What `state_dict` returned. Momentum may be whole although weights are sharded.

        Raises:
            InputError: It is of another model.
        """
        if not isinstance(state, Mapping) or not {"outer_step", "momentum"} <= set(state):
            raise InputError("state must be what OuterUpdate.state_dict() returned")
        outer_step = checks.integer(state["outer_step"], "outer_step", 0)
        last = state.get("last_window", state.get("last_applied"))  # its name in earlier versions
        momentum, shapes = {}, {spec.name: spec.shape for spec in self.schema.parameters}
        for name, tensor in checks.mapping(state["momentum"], "momentum", "{'weight': tensor}").items():
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else checks.kind(tensor)
            if got != shapes.get(name):
                raise InputError(f"momentum of {name!r} has shape {got}, the schema {shapes.get(name)}")
            momentum[name] = tensor.detach().to(torch.float32).clone(memory_format=torch.contiguous_format)
        if last is not None and (not isinstance(last, list | tuple) or len(last) != 2):
            raise InputError(f"last_window must be a run and a window, got {last!r:.80}")
        self.outer_step, self.momentum = outer_step, momentum
        self.last_window = None if last is None else (str(last[0]), int(last[1]))

    def _with_momentum(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights and momentum, under the names that they have in fingerprints and snapshots."""
        return {**weights, **{f"momentum of {name}": tensor for name, tensor in self.momentum.items()}}
