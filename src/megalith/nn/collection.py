"""EmbeddingCollection: the module that a user holds. Features in, tensors out, sparse updates in backward.

It compiles its features once (`FeaturePlan`), looks up ids in a `Shards`, and turns output gradients into one
optimizer step per distinct id. The rows are in the tables of the shards; the only nn.Parameter here is an
anchor, through which `requires_grad_` of a model reaches the collection.

A list of tables becomes `SyncShards` over the default process group if it has more than one rank, and
`LocalShards` otherwise. Frameworks build a model before they create the process group, so the choice waits:

    state          a process group exists             no process group
    undecided      chosen at construction             waits; the first use chooses LocalShards, or raises
                                                      UsageError if a launcher started several processes
    LocalShards    of several ranks: UsageError       unchanged
    SyncShards     unchanged                          unchanged

Shards that the user passes are never questioned.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import get_worker_info

from megalith.distributed.dense_parameters import ANCHOR
from megalith.distributed.ranks import has_process_group, world_size
from megalith.errors import InputError, RankFailedError, UsageError
from megalith.library import span
from megalith.nn.collection_state import (
    CheckpointState,
    StatePath,
    check_trainer,
    collect_state,
    is_state_key,
    is_state_path,
    restore_state,
    state_key,
)
from megalith.nn.compiled_batch import CompiledBatch, FeaturePlan
from megalith.nn.device_copies import to_device, to_host
from megalith.nn.features import Feature, Layout
from megalith.nn.micro_steps import MicroStepGuard
from megalith.ops.checks import as_number, flag, integer
from megalith.ops.pooling import Pooling
from megalith.ragged import Ragged
from megalith.shards import LocalShards, Lookup, Shards, SyncShards
from megalith.shards.contract import check_configs
from megalith.shards.gradients import Gradients, no_gradients, total
from megalith.shards.routed_lookup import sum_gradients
from megalith.table import Table, TableConfig
from megalith.table.engines import engine_class
from megalith.table.schedules import FLOAT32_MAX
from megalith.table.table_data import Update
from megalith.table.validation import check_time, contiguous_rows

logger = logging.getLogger(__name__)

OUTPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UPDATES = ("backward", "step")
REDUCTIONS = ("mean", "sum")
WARN_PENDING = 64
"""Number of pending backwards at which a forgotten `step()` is likely."""
_KEEP_LOCAL = "pass LocalShards(tables) instead of a list if each process should train its own tables"


class EmbeddingCollection(nn.Module):
    """Embeddings of many features, in tables that grow with the data.

    In eval mode, and without gradients, nothing is ever written. `requires_grad_(False)`, of the collection
    or of a model that contains it, freezes all tables until `requires_grad_(True)`; over ranks, call it on
    all of them. For this the collection has a parameter of one element, which stays 0. A table is written
    only for features whose outputs receive a gradient.

    Shapes: F is the number of features, B the batch size, L the number of ids of an example (it may differ
    between examples), D the dim of a table.

        input     F columns: Ragged [B, (L)], or int64 tensors [B] or [B, L]
        output    per feature, float32: Sum, Mean, Sqrtn [B, D]; FirstN(n) [B, n, D]; None Ragged [B, (L), D]
        output    per layout: "concat" [B, sum of D], "stack" [B, F, D], "add" [B, D], "none" a list

    Example:
        >>> import torch
        >>> from megalith import SGD, Constant, EmbeddingCollection, Feature, Ragged, TableConfig
        >>> item = TableConfig("item", dim=2, optimizer=SGD(0.1), initializer=Constant(0.5))
        >>> collection = EmbeddingCollection([item], [Feature("clicks", "item")])
        >>> clicks = Ragged.from_lists([[7, 9], [], [7]])  # B = 3
        >>> out = collection({"clicks": clicks})
        >>> out["clicks"].detach()
        tensor([[1.0000, 1.0000],
                [0.0000, 0.0000],
                [0.5000, 0.5000]])
        >>> out["clicks"].sum().backward()  # one SGD step; id 7 occurs twice
        >>> collection.tables["item"].lookup(torch.tensor([7, 9]))
        tensor([[0.3000, 0.3000],
                [0.4000, 0.4000]])

    Args:
        tables: A list of TableConfig, or a Shards (with its own engine and seed). A list becomes SyncShards
            over the default process group if it has more than one rank, LocalShards otherwise; without a
            process group, at the first use that needs rows.
        features: A list of Feature.
        layouts: A list of Layout; the result then holds the layouts instead of the features.
        update: "backward" applies the gradients of each forward in its backward; "step" keeps them until
            `step()` applies all of them as one step per id (gradient accumulation, GradScaler, joint
            clipping).
        reduction: How gradients are combined over ranks or synchronous workers, "mean" or "sum".
        clip_value: Limits each element of the output gradients.
        clip_norm: Limits the norm of each distinct row's summed gradient.
        evict_every: Apply the eviction policies of the tables during training: one pass in this number of
            steps (at least 40), a small part after each step. None: only `shards.evict()` does.
        max_pending: With update="step", how many backwards may wait for `step()`; one more raises.
        allow_micro_steps: With update="backward", do not raise if the dense part accumulates gradients over
            several backwards or uses a GradScaler.
        output_dtype: The dtype of the outputs and so of their gradients: float32, bfloat16 or float16, for a
            dense part under autocast. Rows are pooled, and gradients summed, in float32.
        engine: As for `Table`.
        seed: As for `Table`.

    Attributes:
        configs: The configuration of each table, by name. Reading it does not choose the shards.
        global_step: The number of applied steps.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig] | Shards,
        features: Sequence[Feature],
        *,
        layouts: Sequence[Layout] | None = None,
        update: str = "backward",
        reduction: str = "mean",
        clip_value: float | None = None,
        clip_norm: float | None = None,
        evict_every: int | None = None,
        max_pending: int = 256,
        allow_micro_steps: bool = False,
        output_dtype: torch.dtype = torch.float32,
        engine: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        for name, value, known in (("update", update, UPDATES), ("reduction", reduction, REDUCTIONS)):
            if not isinstance(value, str) or value not in known:
                raise InputError(f"EmbeddingCollection: {name} must be one of {known}, got {value!r}")
        self._shards: Shards | None = None
        self._given = isinstance(tables, Shards)
        self._choosing = threading.Lock()
        self.configs: Mapping[str, TableConfig]
        if isinstance(tables, Shards):
            if engine is not None or seed is not None:
                raise InputError(
                    "EmbeddingCollection: engine and seed cannot be combined with Shards: they have their own"
                )
            self._shards, self.configs = tables, tables.configs
        else:
            if not isinstance(tables, list | tuple):
                raise InputError(f"tables must be a list of TableConfig, or Shards, got {tables!r}")
            self.configs = MappingProxyType(check_configs(tables))
            self._engine = "cpu" if engine is None else engine
            self._seed = 0 if seed is None else seed
            engine_class(self._engine)
            if isinstance(self._seed, bool) or not isinstance(self._seed, int):
                raise InputError(f"EmbeddingCollection: seed must be an integer, got {seed!r}")
        self.update = update
        self.reduction = reduction
        if output_dtype not in OUTPUT_DTYPES:
            raise InputError(
                f"EmbeddingCollection: output_dtype must be one of {OUTPUT_DTYPES}, got {output_dtype!r}"
            )
        self.output_dtype = output_dtype
        self.clip_value = _bound("clip_value", clip_value)
        self._clip_norm = _bound("clip_norm", clip_norm)
        self._eviction = None if evict_every is None else EvictionSchedule(evict_every)
        self.global_step = 0
        self.checkpoint_state = CheckpointState()
        self.plan = FeaturePlan(features, layouts, self.configs)
        if self._shards is None and has_process_group():
            self._shards = self._choose_shards()
        self._pending: list[Lookup] = []
        self._follows = False
        self.max_pending = integer(max_pending, "EmbeddingCollection: max_pending")
        self._warned = False
        allowed = flag(allow_micro_steps, "EmbeddingCollection: allow_micro_steps")
        watched = update == "backward" and not allowed
        self._guard = MicroStepGuard() if watched else None
        # It connects outputs to the graph, and a model's requires_grad_ reaches it. It has an element and a
        # gradient of 0 because FSDP2, some optimizers and the checkpoints of optimizers fail without.
        self.register_parameter(ANCHOR, nn.Parameter(torch.zeros(1, device=torch.get_default_device())))

    @property
    def clip_norm(self) -> float | None:
        """The limit of the norm of each distinct row's summed gradient; it may be set."""
        return self._clip_norm

    @clip_norm.setter
    def clip_norm(self, value: float | None) -> None:
        self._clip_norm = _bound("clip_norm", value)

    @property
    def features(self) -> list[Feature]:
        """The features in declared order."""
        return list(self.plan.features.values())

    @property
    def shards(self) -> Shards:
        """The tables, wherever they are stored. Over ranks, the first use is a collective call.

        Raises:
            UsageError: If the tables would be separate ones on each of several ranks.
        """
        shards = self._shards
        if shards is None:
            with self._choosing:  # the first forwards of several threads must use the same tables
                if self._shards is None:
                    self._shards = self._choose_shards()
            return self._shards
        if not self._given and type(shards) is LocalShards and has_process_group() and world_size() > 1:
            raise UsageError(
                f"EmbeddingCollection: tables {', '.join(map(repr, self.configs))} were used before the "
                f"process group of {world_size()} ranks existed, so they are tables of this process alone: "
                "call torch.distributed.init_process_group before the first use of the collection (a "
                f"forward, .shards, .tables, a load), or {_KEEP_LOCAL}"
            )
        return shards

    def _choose_shards(self) -> Shards:
        configs = list(self.configs.values())
        if world_size() > 1:
            if get_worker_info() is not None:
                raise UsageError(
                    "EmbeddingCollection: a data worker cannot be the first to use the collection: read "
                    "collection.shards on all ranks before the DataLoader starts its workers"
                )
            check_trainer(world_size())
            logger.info("tables %s are distributed over %d ranks", ", ".join(self.configs), world_size())
            return SyncShards(configs, engine=self._engine, seed=self._seed)
        if not has_process_group():
            _check_launcher()
        return LocalShards(configs, engine=self._engine, seed=self._seed)

    @property
    def tables(self) -> Mapping[str, Table]:
        """The tables of this process by name; over ranks with the rows of this rank, none on servers."""
        return self.shards.local

    # ---- forward

    def forward(self, batch: Any, *, time: float | None = None) -> dict[str, Any]:
        """Look up the embeddings of a batch.

        Args:
            batch: A mapping of feature names to Ragged columns, or to tensors ([B]: one id each; [B, L]:
                padded with the feature's `pad`); an object like a KeyedJaggedTensor; or the result of
                `prepare` or `start`. Other keys are ignored.
            time: Seconds; the last-update time of the rows that this forward trains. None: the clock.

        Returns:
            The embeddings by feature (or layout) name, `output_dtype` on the device of the ids; see the class
            for their shapes.

        Raises:
            InputError: For a batch or column of a wrong type, shape, dtype or device.
            UnknownNameError: For a feature that is not in the batch.
        """
        if torch.compiler.is_exporting():
            raise UsageError(
                "EmbeddingCollection: torch.export cannot export tables that grow: use "
                "megalith.serving.export_model, which writes the rows and exports the dense part"
            )
        if torch.compiler.is_compiling():  # not before: the import of torch's compiler takes a second
            uncompiled = torch.compiler.disable(EmbeddingCollection._forward)
            outputs: dict[str, Any] = uncompiled(self, batch, time)
            return outputs
        return self._forward(batch, time)

    def _forward(self, batch: Any, time: float | None) -> dict[str, Any]:
        lookup = batch.take(self) if isinstance(batch, StartedBatch) else None
        if lookup is None:
            lookup = self._start(batch)
        elif lookup.moved:
            moved = lookup
            lookup = self.shards.lookup(moved.batch.prepared)
            lookup._attach(moved.batch, moved.batch.row_splits, moved.push)
        compiled, trains = lookup.batch, self.trains
        lookup.step = self.global_step if trains else None
        if trains or self._in_graph():
            lookup.time = time
            outputs = _Pool.apply(self._anchor, self, lookup, trains)
        else:
            outputs = self._pool(lookup)
        if lookup.shards.device != compiled.device:
            outputs = to_device(outputs, compiled.device)
        return self.plan.assemble(compiled, outputs)

    def _pool(self, lookup: Lookup) -> list[Tensor]:
        outputs = lookup.pool(lookup.batch.pooling)
        if self.output_dtype is torch.float32:
            return outputs
        return [output.to(self.output_dtype) for output in outputs]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        dtype = fn(self._anchor.detach()).dtype
        if dtype in (torch.float16, torch.bfloat16) and dtype != self.output_dtype:
            raise UsageError(
                f"EmbeddingCollection: half(), bfloat16() and to({dtype}) do not convert tables: set "
                "TableConfig(precision=...) for the rows and EmbeddingCollection(output_dtype=...) for the "
                "outputs, or use torch.autocast"
            )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    @property
    def trains(self) -> bool:
        """Whether a forward made now leads to an update: in training, with gradients, not frozen."""
        return self.training and torch.is_grad_enabled() and self._anchor.requires_grad

    @property
    def lookup_step(self) -> int | None:
        """The step of a lookup made now (`Lookup.step`): None if no update follows."""
        return self.global_step if self.trains else None

    def _in_graph(self) -> bool:
        """Return whether a forward in eval mode gives the anchor a gradient, which DDP would wait for."""
        return torch.is_grad_enabled() and self._anchor.requires_grad and has_process_group()

    @property
    def _anchor(self) -> Tensor:
        anchor = self._parameters.get(ANCHOR)  # `getattr` takes longer, but FSDP1 puts a view there
        return getattr(self, ANCHOR) if anchor is None else anchor

    def start(self, batch: Any) -> StartedBatch:
        """Send the ids of a batch ahead of its forward, which takes the result instead of the batch.

        The forward reads the rows as they are then. Over ranks it is a collective call, like forward.

        Args:
            batch: As for `forward`.

        Returns:
            The columns of the batch with the lookup in progress.
        """
        return StartedBatch(batch, {self: self._start(batch)})

    def _start(self, batch: Any) -> Lookup:
        shards = self.shards
        if isinstance(batch, StartedBatch):
            batch = batch.columns
        if isinstance(batch, CompiledBatch):  # another process may have made it
            lookup, compiled = shards.lookup(batch.prepared), batch
        else:
            try:
                compiled = self._compile(batch, shards)
            except Exception as error:
                shards.fail(error)  # otherwise the other ranks would wait for this one
            lookup = shards._lookup(compiled.prepared)
        lookup._attach(compiled, compiled.row_splits)
        return lookup

    def _compile(self, batch: Any, shards: Shards) -> CompiledBatch:
        if isinstance(batch, StartedBatch):
            batch = batch.columns
        if isinstance(batch, CompiledBatch):
            return batch
        with span("megalith.ids"):
            return self.plan.read(batch, shards.preparer, shards.world_size > 1)

    def prepare(self, batch: Any) -> CompiledBatch:
        """Do the part of forward that needs no table; forward takes the result and returns the same bits.

        For data workers: call this in a forked process; send `preparer()` to a spawned process.

        Args:
            batch: As for `forward`.

        Returns:
            The ids of each table and how their rows become outputs. It can be pickled.

        Raises:
            InputError, UnknownNameError: As `forward`.
        """
        return self._compile(batch, self.shards)

    def preparer(self) -> Callable[[Any], CompiledBatch]:
        """Return `prepare` as an object that can be pickled."""
        shards = self.shards
        return partial(self.plan.read, prepare_ids=shards.preparer, absent_ok=shards.world_size > 1)

    # ---- updates

    def _collect(self, lookup: Lookup, grads: Sequence[Tensor | None]) -> None:
        """Take the gradients of outputs (None: not used); apply them with update="backward"."""
        if lookup.grads is not None:
            raise UsageError(
                "backward has already run through this forward; run forward again for another update"
            )
        # Gradients kept for step() are copied: their memory may be shared with a parameter's .grad.
        keep = self.update == "step"
        if keep:
            self._count_backward()
        lookup.backward = torch._C._current_graph_task_id()
        given = self._select_trained(lookup, grads)
        device = lookup.shards.device
        if device.type == "cpu" and given and given[0].is_cuda:
            given = to_host(given)
        lookup.grads = [g.to(device, torch.float32, copy=keep) for g in given]
        if keep:
            self._pending.append(lookup)
            return
        if self._guard is not None:
            try:
                self._guard.updating()
            except UsageError as error:
                lookup.fail(error)  # the other ranks wait for the gradients
        self._update_rows([lookup], 1.0)

    def _select_trained(self, lookup: Lookup, grads: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Set which outputs are trained; return a gradient for each, zeros for one that was not used."""
        # Only features of trainable tables are updated, and only those whose outputs have a gradient: rows
        # must not be created because another output of the same forward was used.
        pooling: Pooling = lookup.batch.pooling
        lookup.trained = pooling
        present = [grad for grad in grads if grad is not None]
        if len(present) == len(grads) and self.plan.trainable:
            return present
        bags = {
            table: tuple(b for b in own if any(grads[part.output] is not None for part in b.parts))
            for table, own in pooling.bags.items()
            if self.configs[table].trainable
        }
        lookup.trained = Pooling(pooling.outputs, {table: own for table, own in bags.items() if own})
        device = present[0].device if present else torch.device("cpu")
        return [
            torch.zeros(shape, dtype=torch.float32, device=device) if grad is None else grad
            for grad, shape in zip(grads, pooling.outputs, strict=True)
        ]

    def _count_backward(self) -> None:
        """Count the backwards that wait for `step()`; a loop that never calls it would train nothing."""
        backwards = {each.backward for each in self._pending}
        pending = len(backwards)
        if pending < min(WARN_PENDING, self.max_pending) or torch._C._current_graph_task_id() in backwards:
            return
        forgotten = (
            f'EmbeddingCollection(update="step"): the gradients of {pending} backwards wait for step(), so '
            "no row is trained. Call collection.step() after each step of the dense optimizer, or "
            "zero_grad() to drop the gradients"
        )
        if pending >= self.max_pending:
            raise UsageError(f"{forgotten}; to accumulate more, pass max_pending")
        if pending == WARN_PENDING and not self._warned:
            self._warned = True
            warnings.warn(f"{forgotten}; above max_pending={self.max_pending} it raises", stacklevel=2)

    def step(self, *, scale: float = 1.0) -> None:
        """Apply all gradients collected since the last step as one optimizer step per distinct id.

        It does nothing if there was no backward.

        Args:
            scale: Multiplies the gradients before they are clipped, e.g. 1 / GradScaler.get_scale(). A number
                or a 0-d tensor.

        Raises:
            UsageError: With update="backward".
            InputError, UsageError, RankFailedError: For wrong input on this or another rank; nothing was
                written, and the gradients stay until `zero_grad`.
        """
        if self.update != "step":
            raise UsageError('step() is for EmbeddingCollection(update="step"); this one updates in backward')
        factor = as_number(scale)
        if factor is None or not abs(factor) <= FLOAT32_MAX:
            raise InputError(f"EmbeddingCollection: scale must be a finite number, got {scale!r}")
        pending, self._pending = self._pending, []
        if not pending:
            return
        try:
            self._update_rows(pending, factor)
        except (InputError, UsageError, RankFailedError):
            self._pending = pending
            raise

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the steps of the rows with those of an optimizer of dense weights. For update="step".

        After each `optimizer.step()` the rows make a step too, and `optimizer.zero_grad()` also drops their
        gradients. A GradScaler sees an overflow of the rows' gradients and then skips both steps. Its scale,
        and the factor of `clip_grad_norm_(model.parameters(), ...)`, apply to the rows as well.

        Args:
            optimizer: An optimizer that has `rows_anchor` of this collection among its parameters, e.g. of
                `model.parameters()`.

        Raises:
            UsageError: With update="backward", an optimizer with maximize=True, or a model converted to
                float16.
            InputError: The optimizer does not have the parameter.
        """
        if self.update != "step":
            raise UsageError(
                'follow() is for EmbeddingCollection(update="step"); this one updates in backward'
            )
        while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            optimizer = optimizer.optimizer  # type: ignore[attr-defined]  # of accelerate or Lightning
        groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
        own = [group for group in groups if any(parameter is self._anchor for parameter in group["params"])]
        if not own:
            raise InputError(
                "EmbeddingCollection: follow takes an optimizer with the parameter of the collection, as "
                "torch.optim.Adam(model.parameters()), made after the model was sharded or moved"
            )
        if self._anchor.dtype == torch.float16:
            raise UsageError("follow() cannot scale rows in a model of float16: use autocast or bfloat16")
        if own[0].get("maximize"):
            raise UsageError("follow() takes no optimizer with maximize=True: rows minimize; negate the loss")
        drop = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            drop(set_to_none)
            self._pending.clear()

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        optimizer.register_step_post_hook(self._after_step)
        self._follows = True

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Make the step of the rows.

        The first backward since zero_grad gives the anchor the gradient `UNIT`, an overflow an infinite one.
        What scales the gradients of all parameters scales it too, so its quotient by `UNIT` is the factor.
        """
        if not self._pending:
            return
        grad: Any = self._anchor.grad
        if hasattr(grad, "full_tensor"):  # sharded by FSDP2
            grad = grad.full_tensor()
        factor = 0.0 if grad is None else float(grad) / UNIT
        self.reset_parameters()  # the optimizer has just moved the anchor
        if float(getattr(optimizer, "found_inf", 0.0) or 0.0):
            return  # a fused optimizer has skipped the step itself
        if not 0 < factor < math.inf:
            error = InputError(
                f"EmbeddingCollection: after a step of the optimizer, the rows would be scaled by {factor}: "
                "a gradient is NaN or Inf, or the gradients were set to zero other than by "
                "optimizer.zero_grad()"
            )
            self.fail(self._pending[0], error)
        self._anchor.grad = None  # the next step begins with `UNIT`, also if only dense gradients are dropped
        self.step(scale=factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that `step` would apply.

        Args:
            set_to_none: As for `torch.nn.Module.zero_grad`.
        """
        super().zero_grad(set_to_none)
        self._pending.clear()

    def grads_finite(self) -> bool:
        """Return whether all collected gradients are finite; if not, call zero_grad() instead of step()."""
        return _finite([g for p in self._pending for g in p.grads or ()])

    def grad_norm(self) -> Tensor:
        """Return the L2 norm of the collected output gradients, to clip dense and sparse ones jointly."""
        squares = [g.square().sum() for p in self._pending for g in p.grads or ()]
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), device="cpu")

    def fail(self, lookup: Lookup, error: Exception, *, leave: bool = False) -> NoReturn:
        """Fail the update of a forward that this rank will not make; see `Lookup.fail`.

        In eval mode, if the tables are frozen, or if several forwards wait for one `step()`, no rank waits
        for that update and nothing is sent.

        Args:
            lookup: The lookup of the forward.
            error: The reason.
            leave: Whether this rank leaves the series of the lookup; see `Lookup.fail`.

        Raises:
            Exception: Always; it is `error`, unless the exchange with the other ranks fails.
        """
        trains = self.training and self._anchor.requires_grad
        if trains and all(each is lookup for each in self._pending):
            lookup.fail(error, leave=leave)
        raise error

    def _update_rows(self, pending: Sequence[Lookup], scale: float) -> None:
        first = pending[0]
        shards = first.shards
        if self.reduction == "mean":
            scale = scale / shards.sources  # before clipping, so that it does not depend on the size
        times = [lookup.time for lookup in pending if lookup.time is not None]
        time = max(times) if times else None
        # Of several forwards, or after the tables have moved, ids with their sums are sent.
        if len(pending) > 1 or first.moved:
            self._update_sums(pending, scale, time)
        else:
            try:
                first.check_unchanged()
                grads = list(first.grads or ())
                if self.clip_value is not None:
                    grads = self._clipped(grads, scale)
                tables = first.trained.tables
                seconds = None if time is None else check_time(time, "EmbeddingCollection")
                if tables:
                    checks = shards.checks[tables[0]]
                    for grad in grads:
                        checks.storage("grads", grad)
                    grads = [contiguous_rows(grad) for grad in grads]
                    checks.finite(grads, True)
            except Exception as error:  # the other ranks wait for the gradients
                first.fail(error)
            update = Update(first.step or 0, seconds, scale, self._clip_norm or 0.0)
            shards._update(first, dict.fromkeys(tables, grads), first.trained, update, not first.push)
        self.global_step += 1
        if self._eviction is not None:
            self._eviction.after_step(self.shards, time, self.global_step - 1)

    def _update_sums(self, pending: Sequence[Lookup], scale: float, time: float | None) -> None:
        shards = self.shards
        try:
            for lookup in pending:
                lookup.check_unchanged()
            grads = self._clipped([g for lookup in pending for g in lookup.grads or ()], scale)
            with span("megalith.gradients"):
                sums = self._tree(pending, grads)
        except Exception as error:  # the other ranks wait for the ids
            shards.fail(error, "apply_gradients")
        shards.apply_gradients(
            {table: part.ids for table, part in sums.items()},
            {table: part.values for table, part in sums.items()},
            # One forward has its own step; several use the step of the update.
            step=self.global_step if len(pending) > 1 else pending[0].step or 0,
            time=time,
            scale=scale,
            clip_norm=self.clip_norm,
            occurrences={table: part.counts for table, part in sums.items() if part.counts is not None},
            wait=not any(lookup.push for lookup in pending),
        )

    def _tree(self, pending: Sequence[Lookup], grads: Sequence[Tensor]) -> dict[str, Gradients]:
        """Sum the gradients of several forwards per distinct id, by a binary tree in their order."""
        if not _finite(grads):
            raise InputError("EmbeddingCollection: output gradients contain NaN or Inf")
        sums, at = [], 0
        for each in pending:
            own = grads[at : at + len(each.trained.outputs)]
            at += len(own)
            sums.append(sum_gradients(self.configs, each.ids, each.trained, own))
        device = self.shards.device
        tables = [table for table in self.configs if any(table in each for each in sums)]
        # A micro-batch without gradients for a table keeps its position in the tree of sums.
        return {
            table: total([each.get(table) or no_gradients(self.configs[table], device) for each in sums])
            for table in tables
        }

    def _clipped(self, grads: list[Tensor], scale: float) -> list[Tensor]:
        """Clamp output gradients so that, multiplied by scale, they are within clip_value."""
        if self.clip_value is None or scale == 0:
            return grads
        if not _finite(grads):
            raise InputError("EmbeddingCollection: output gradients contain NaN or Inf")
        bound = self.clip_value / abs(scale)
        return [g.clamp(-bound, bound) for g in grads]

    # ---- state

    def reset_parameters(self) -> None:
        """Set the parameter of the collection to 0 after `to_empty`, as modules of torch do; rows stay."""
        with torch.no_grad():
            self._anchor.zero_()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Add the rows of this rank, for `state_dict`. It does not choose the shards."""
        state: dict[str, Tensor] = {}
        if not self.checkpoint_state.rows_apart:
            state = collect_state(self._shards, self.configs, self.global_step)
        # torch.distributed.checkpoint misses a parameter that has no key.
        state[ANCHOR] = self._anchor if keep_vars else self._anchor.detach()
        destination.update({prefix + key: tensor for key, tensor in state.items()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Restore the rows of this rank, for `load_state_dict`; see `restore_state`."""
        own = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        saved = {key: value for key, value in own.items() if is_state_key(key)}
        unexpected_keys += [prefix + key for key in own if key not in saved and key != ANCHOR]
        if ANCHOR in own and local_metadata.get("assign_to_params_buffers"):
            self.register_parameter(ANCHOR, nn.Parameter(own[ANCHOR], self._anchor.requires_grad))
        self.reset_parameters()
        if saved:
            self.global_step = restore_state(self.shards, saved)
        elif not self.checkpoint_state.rows_apart:
            missing_keys.append(prefix + state_key())

    def __getattr__(self, name: str) -> Any:
        return StatePath() if is_state_path(name) else super().__getattr__(name)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise UsageError(
            "an EmbeddingCollection cannot be copied: use checkpoint.save and checkpoint.load, or state_dict."
            """
To share the tables with the copy, as for an average of the dense weights (pass layouts too if it has some):
    shared = EmbeddingCollection(model.embeddings.shards, model.embeddings.features)
    averaged = copy.deepcopy(model, {id(model.embeddings): shared})
To return to the best rows and weights later:
    best = model.state_dict()  # holds a copy of all rows
    model.load_state_dict(best)"""
        )

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "an EmbeddingCollection cannot be pickled: use checkpoint.save and checkpoint.load, or state_dict"
        )

    def extra_repr(self) -> str:
        """Return features and tables, for `repr`."""
        tables = ", ".join(f"{name} ({config.dim})" for name, config in self.configs.items())
        return f"features={list(self.plan.features)}, tables={tables}, update={self.update!r}"


class StartedBatch(Mapping[str, Any]):
    """The columns of a batch, with lookups in progress; `EmbeddingCollection.start` and `Pipeline` return it.

    It reads like the columns that it was made from. The first forward of a collection takes the lookup of
    that collection; another forward of the same batch looks up again.
    """

    def __init__(self, columns: Any, lookups: Mapping[Any, Lookup]) -> None:
        self.columns = columns
        self._lookups: dict[Any, Lookup] = dict(lookups)

    def add(self, collection: object, lookup: Lookup) -> None:
        self._lookups[collection] = lookup

    def take(self, collection: object) -> Lookup | None:
        """Remove and return the lookup of a collection."""
        return self._lookups.pop(collection, None)

    @cached_property
    def _named(self) -> Mapping[str, Any]:
        if isinstance(self.columns, CompiledBatch):
            return self.columns.columns
        return self.columns if isinstance(self.columns, Mapping) else Ragged.from_keyed(self.columns)

    def __getitem__(self, name: str) -> Any:
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)


MIN_PARTS = 40
"""A pass is divided into at least this many parts, so that no step waits for more than 5 % of one."""


class EvictionSchedule:
    """Makes one pass over the tables in `every` steps, a small part after each step.

    All ranks use the same time, the latest one of all ranks when the pass began. The position in the table is
    not saved: a resumed run continues at the part that belongs to its step. So a row is visited within two
    passes, however often the run is interrupted.
    """

    def __init__(self, every: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InputError(f"EmbeddingCollection: evict_every must be a positive integer, got {every!r}")
        self.parts = max(every, MIN_PARTS)
        self._done: int | None = None  # parts of this pass; None: this process has not begun
        self._now = 0

    def after_step(self, shards: Shards, time: float | None, step: int) -> None:
        """Evict a part of the rows. A collective call over ranks."""
        start = None
        if self._done is None:
            self._done = step % self.parts
            start = self._done / self.parts
        if self._done == 0 or start is not None:
            self._now = shards.latest_time(time)
        shards.evict_part(self._now, parts=self.parts, start=start)
        self._done = (self._done + 1) % self.parts


class _Pool(torch.autograd.Function):
    """Reads outputs; passes their gradients to the collection."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, collection: EmbeddingCollection, lookup: Lookup, trains: bool
    ) -> Any:
        ctx.collection, ctx.lookup, ctx.anchor, ctx.trains = collection, lookup, anchor, trains
        ctx.set_materialize_grads(False)
        return tuple(collection._pool(lookup))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        grad = torch.zeros_like(ctx.anchor)
        if ctx.trains:
            collection, first = ctx.collection, not ctx.collection._pending
            collection._collect(ctx.lookup, grads)
            if collection._follows:
                grad += _anchor_gradient(ctx.lookup.grads, first).to(grad)
        return grad, None, None, None


UNIT = 2.0**-40
"""The gradient of the anchor of a collection that follows an optimizer: too small for any norm."""


def _anchor_gradient(grads: Sequence[Tensor], first: bool) -> Tensor:
    """Return what a backward adds to the gradient of the anchor; see `EmbeddingCollection.follow`."""
    finite = torch.tensor(True, device="cpu")
    if grads:
        finite = torch.stack([torch.isfinite(grad).all() for grad in grads]).all()
    return torch.where(finite, UNIT if first else 0.0, math.inf)


def _check_launcher() -> None:
    """Raise UsageError if a launcher started several processes; there is no process group."""
    for rank, size in (
        ("RANK", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        # Of a step: the variables of a job are set in its scripts and shells, which are single processes.
        ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
    ):
        if rank in os.environ and os.environ.get(size, "").isdecimal() and int(os.environ[size]) > 1:
            raise UsageError(
                f"EmbeddingCollection: {size} is {os.environ[size]}, but there is no process group, so every "
                "process would train its own tables: call torch.distributed.init_process_group before the "
                f"first use of the collection (a forward, .shards, .tables, a load), or {_KEEP_LOCAL}"
            )


def _bound(name: str, value: Any) -> float | None:
    bound = None if value is None else as_number(value)
    if value is not None and (bound is None or not 0 < bound <= FLOAT32_MAX):
        raise InputError(f"EmbeddingCollection: {name} must be a positive, finite number, got {value!r}")
    return bound


def _finite(grads: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(g).all()) for g in grads)
