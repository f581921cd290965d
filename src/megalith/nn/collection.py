"""EmbeddingCollection: the module a user holds. Features in, tensors out, sparse updates on the way back.

It compiles its features once (`FeaturePlan`), looks ids up through a `Shards`, and turns output gradients
into one optimizer step per distinct id. Rows live in the shards' tables; there is no nn.Parameter here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from megalith.distributed.ranks import world_size
from megalith.errors import InputError, RankFailedError, UsageError
from megalith.nn.batch_forms import BatchPreparer, ReadyBatch, Started, StartedBatch
from megalith.nn.feature_plan import CompiledBatch, FeaturePlan
from megalith.nn.features import Feature, Layout
from megalith.nn.table_state import packed, rows_of, set_rows, unpacked
from megalith.ops.pooling import Pooling
from megalith.shards import LocalShards, Lookup, Shards, SyncShards
from megalith.shards.contract import version
from megalith.shards.gradient_sums import GradientSum, total
from megalith.shards.joint_pooling import sum_gradients
from megalith.table import TableConfig

UPDATES = ("backward", "step")
REDUCTIONS = ("mean", "sum")


class Pending:
    """One forward on its way to an update."""

    def __init__(self, lookup: Lookup, batch: CompiledBatch, step: int, time: float | None) -> None:
        self.lookup = lookup
        self.batch = batch
        self.step = step
        self.time = time
        self.grads: list[Tensor] | None = None
        self._versions = {name: version(c.row_splits) for name, c in batch.columns.items()}

    def check_unchanged(self) -> None:
        """Raises UsageError if ids or row_splits were written to since forward."""
        self.lookup.check_unchanged()
        for name, column in self.batch.columns.items():
            if column.row_splits.is_cpu and version(column.row_splits) != self._versions[name]:
                raise UsageError(
                    f"feature {name!r}: its row_splits were changed in place after forward; keep them until "
                    "the update"
                )


class EmbeddingCollection(nn.Module):
    """Embeddings of many features, in tables that grow with the data.

    tables: a list of TableConfig, or a Shards (which brings its engine and seed). features: a list of
    Feature. layouts: a list of Layout; then the result holds the layouts instead of the features. update:
    "backward" applies each forward's gradients in its backward; "step" keeps them until `step()` applies all
    as one step per id (gradient accumulation, GradScaler, joint clipping). reduction: over ranks.
    clip_value: bounds output gradients; clip_norm: bounds each distinct row's summed gradient. engine,
    seed: as for `Table`.

    In eval mode, and without gradients, nothing is ever written.
    """

    # `_forward` where torch.compile leaves it alone. Made with the first collection and not at import, as it
    # takes torch's compiler, which takes seconds to import.
    _eagerly: ClassVar[Any] = None

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
        engine: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if EmbeddingCollection._eagerly is None:
            EmbeddingCollection._eagerly = staticmethod(torch.compiler.disable(EmbeddingCollection._forward))
        for name, value, known in (("update", update, UPDATES), ("reduction", reduction, REDUCTIONS)):
            if value not in known:
                raise InputError(f"EmbeddingCollection: {name} must be one of {known}, got {value!r}")
        for name, bound in (("clip_value", clip_value), ("clip_norm", clip_norm)):
            if bound is not None and not (isinstance(bound, int | float) and 0 < bound < float("inf")):
                raise InputError(f"EmbeddingCollection: {name} must be positive and finite, got {bound!r}")
        if isinstance(tables, Shards):
            if engine is not None or seed is not None:
                raise InputError(
                    "EmbeddingCollection: shards bring their engine and seed; do not give them too"
                )
            self.shards = tables
        else:
            self.shards = _shards(tables, "cpu" if engine is None else engine, seed or 0)
        self.update = update
        self.reduction = reduction
        self.clip_value = clip_value
        self.clip_norm = clip_norm
        self.global_step = 0
        self.plan = FeaturePlan(features, layouts, self.shards.configs)
        self._pending: list[Pending] = []
        # What connects outputs to the graph; it never has a gradient of its own.
        self._anchor = torch.zeros((), device="cpu", requires_grad=True)

    @property
    def features(self) -> list[Feature]:
        """The features in declared order."""
        return list(self.plan.features.values())

    # ---- forward

    def forward(self, batch: Any, *, time: float | None = None) -> dict[str, Any]:
        """Embeddings by feature (or layout) name, float32 on the device of the ids.

        batch: a mapping of feature names to Ragged columns, or to tensors ([batch]: an id each;
        [batch, length]: padded with the feature's `pad`), or anything shaped like a KeyedJaggedTensor. Other
        keys are left alone. What `prepare` and `start` give is taken as well. time: seconds, becomes the
        last-update time of the rows this forward trains (None: the clock).
        """
        outputs: dict[str, Any] = self._eagerly(self, batch, time)
        return outputs

    def _forward(self, batch: Any, time: float | None) -> dict[str, Any]:
        started = batch.take(self) if isinstance(batch, StartedBatch) else None
        ready, lookup = started or self._started(batch)
        compiled = ready.batch
        if self.training and torch.is_grad_enabled():
            pending = Pending(lookup, compiled, self.global_step, time)
            outputs = _Pool.apply(self._anchor, self, pending)
        else:
            outputs = lookup.pool(compiled.pooling)
        if compiled.device.type != "cpu":
            outputs = [o.to(compiled.device) for o in outputs]
        return self.plan.assemble(compiled, outputs)

    def start(self, batch: Any) -> StartedBatch:
        """Sends a batch's ids off ahead of its forward, which takes the result instead of the batch.

        Rows are read by the forward, as they are then. Over ranks it is a collective call, like forward.
        """
        return StartedBatch(batch, {self: self._started(batch)})

    def _started(self, batch: Any) -> Started:
        try:
            ready = self.prepare(batch)
        except Exception as error:
            self.shards.abort(error)  # or the other ranks would wait for this one
            raise
        return Started(ready, self.shards.lookup(ready.ids))

    def prepare(self, batch: Any) -> ReadyBatch:
        """The part of forward that needs no table; forward takes its result, with the same bits.

        For data workers: in a forked process call this, to another kind of process send `preparer()`.
        """
        if isinstance(batch, StartedBatch):
            batch = batch.columns
        return batch if isinstance(batch, ReadyBatch) else self.preparer()(batch)

    def preparer(self) -> BatchPreparer:
        """`prepare` as an object that can be pickled."""
        return BatchPreparer(self.plan, self.shards.preparer, self.shards.world_size > 1)

    # ---- updates

    def _collect(self, pending: Pending, grads: Sequence[Tensor]) -> None:
        """Takes a forward's output gradients; applies them in mode "backward"."""
        if pending.grads is not None:
            raise UsageError(
                "this forward has been through backward before; run forward again for another update"
            )
        # What waits for step() is copied: its memory may belong to some parameter's .grad as well.
        waits = self.update == "step"
        pending.grads = [g.to("cpu", torch.float32, copy=waits) for g in grads]
        if waits:
            self._pending.append(pending)
        else:
            self._update_rows([pending], 1.0)

    def step(self, *, scale: float = 1.0) -> None:
        """Applies all gradients collected since the last step as one optimizer step per distinct id.

        scale: multiplies the gradients before they are clipped, for instance 1 / GradScaler.get_scale(). Only
        for update="step"; without a backward before it, it does nothing. Where it raises InputError,
        UsageError or RankFailedError nothing was written, and the gradients stay until `zero_grad`.
        """
        if self.update != "step":
            raise UsageError('step() is for EmbeddingCollection(update="step"); this one updates in backward')
        if not (isinstance(scale, int | float) and math.isfinite(scale)):
            raise InputError(f"EmbeddingCollection: scale must be finite, got {scale!r}")
        pending, self._pending = self._pending, []
        if not pending:
            return
        try:
            self._update_rows(pending, scale)
        except (InputError, UsageError, RankFailedError):
            self._pending = pending
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients that `step` would apply."""
        super().zero_grad(set_to_none)
        self._pending.clear()

    def grads_finite(self) -> bool:
        """Whether all collected gradients are finite; if not, call zero_grad() and not step()."""
        return _finite([g for p in self._pending for g in p.grads or ()])

    def grad_norm(self) -> Tensor:
        """The L2 norm of all collected output gradients, to clip dense and sparse gradients jointly."""
        squares = [g.square().sum() for p in self._pending for g in p.grads or ()]
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())

    def give_up(self, lookup: Lookup, error: Exception) -> None:
        """Tells other ranks, which may wait for the update of a forward, that it will not come here.

        Says nothing in eval mode, and where several forwards wait for one `step()`.
        """
        if self.training and all(each.lookup is lookup for each in self._pending):
            lookup.give_up(error)

    def _update_rows(self, pending: Sequence[Pending], scale: float) -> None:
        first = pending[0]
        if self.reduction == "mean":
            scale = scale / self.shards.world_size  # before clipping, which then is the same on any number
        lookup: Any = first.lookup
        pooling: Pooling | None = self._trained(first.batch.pooling)
        try:
            for each in pending:
                each.check_unchanged()
            gradients: Any = self._clipped([g for p in pending for g in p.grads or ()], scale)
            if len(pending) > 1:
                sums = self._tree(pending, gradients)
                lookup = {table: part.ids for table, part in sums.items()}
                gradients = {table: part.grads for table, part in sums.items()}
                pooling = None
        except Exception as error:  # the other ranks wait for this one: where, depends on what was pending
            if len(pending) > 1:
                self.shards.abort(error, "apply_gradients")
            else:
                first.lookup.give_up(error)
            raise
        times = [p.time for p in pending if p.time is not None]
        self.shards.apply_gradients(
            lookup,
            gradients,
            # One forward brings its step; several take the step of the update.
            step=first.step if len(pending) == 1 else self.global_step,
            time=max(times) if times else None,
            scale=scale,
            clip_norm=self.clip_norm,
            pooling=pooling,
        )
        self.global_step += 1

    def _tree(self, pending: Sequence[Pending], grads: Sequence[Tensor]) -> dict[str, GradientSum]:
        """Gradients of several forwards summed per distinct id; forwards by a binary tree in their order."""
        if not _finite(grads):
            raise InputError("EmbeddingCollection: output gradients hold NaN or Inf")
        sums, at = [], 0
        for each in pending:
            pooling = self._trained(each.batch.pooling)
            own = grads[at : at + len(pooling.outputs)]
            at += len(own)
            sums.append(sum_gradients(self.shards.configs, each.lookup.ids, pooling, own))
        return {table: total([each[table] for each in sums]) for table in sums[0]}

    def _clipped(self, grads: list[Tensor], scale: float) -> list[Tensor]:
        """Output gradients that, multiplied by scale, keep within clip_value."""
        if self.clip_value is None or scale == 0:
            return grads
        if not _finite(grads):
            raise InputError("EmbeddingCollection: output gradients hold NaN or Inf")
        bound = self.clip_value / abs(scale)
        return [g.clamp(-bound, bound) for g in grads]

    def _trained(self, pooling: Pooling) -> Pooling:
        """The part of a pooling that updates reach: tables that are trainable."""
        if all(config.trainable for config in self.shards.configs.values()):
            return pooling
        configs = self.shards.configs
        return Pooling(pooling.outputs, {t: b for t, b in pooling.bags.items() if configs[t].trainable})

    # ---- state

    def get_extra_state(self) -> dict[str, Any]:
        """This rank's rows, for `state_dict`."""
        self.shards.flush()
        return packed(
            {
                "global_step": self.global_step,
                "world_size": self.shards.world_size,
                "rank": self.shards.rank,
                "tables": {name: rows_of(table) for name, table in self.shards.local.items()},
            }
        )

    def set_extra_state(self, state: Any) -> None:
        """Takes what `get_extra_state` gave, at the same world size and rank."""
        state = unpacked(state)
        here, there = (self.shards.world_size, self.shards.rank), (state["world_size"], state["rank"])
        if here != there:
            raise UsageError(
                f"this state_dict holds the rows of rank {there[1]} of {there[0]}, this is rank {here[1]} of "
                f"{here[0]}: use checkpoint.save and checkpoint.load, which move rows to their owners"
            )
        set_rows(self.shards, state["tables"])
        self.global_step = int(state["global_step"])

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise UsageError(
            "an EmbeddingCollection cannot be copied: use checkpoint.save and checkpoint.load, or state_dict"
        )

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "an EmbeddingCollection cannot be pickled: use checkpoint.save and checkpoint.load, or state_dict"
        )

    def extra_repr(self) -> str:
        """Features and tables."""
        tables = ", ".join(f"{name} ({config.dim})" for name, config in self.shards.configs.items())
        return f"features={list(self.plan.features)}, tables={tables}, update={self.update!r}"


class _Pool(torch.autograd.Function):
    """Reads outputs; hands their gradients to the collection."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, collection: EmbeddingCollection, pending: Pending) -> Any:
        ctx.collection, ctx.pending = collection, pending
        return tuple(pending.lookup.pool(pending.batch.pooling))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.collection._collect(ctx.pending, grads)
        return None, None, None


def _shards(tables: Any, engine: str, seed: int) -> Shards:
    if not isinstance(tables, list | tuple):
        raise InputError(f"tables must be a list of TableConfig, or Shards, got {tables!r}")
    if world_size() > 1:
        return SyncShards(tables, engine=engine, seed=seed)
    return LocalShards(tables, engine=engine, seed=seed)


def _finite(grads: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(g).all()) for g in grads)
