"""The workloads of the table benchmarks, and an adapter for each variant that runs them.

K rows are present; a batch is N ids in bags of 8, drawn uniformly or from Zipf(1.05), summed. Peers get
dense ids 0..K-1, so remapping costs them nothing; our table gets a random 64-bit key for each id. Rows have
the same random order in all variants, so popular rows are not adjacent. All memory is written before
anything is timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megalith.ops.pooling import Pooling
from megalith.shards import LocalShards
from megalith.table import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad, TableConfig

BAG = 8
BATCHES = 6
ZIPF = 1.05
LEARNING_RATE = 0.01
EPS = 1e-10
FILL_CHUNK = 1 << 18


def short(n: int) -> str:
    """Formats 10000000 as 1e7."""
    return f"{n:.0e}".replace("+0", "")


@dataclass(frozen=True)
class Workload:
    """K rows of `dim` weights, `ids` ids per batch, distribution "uniform" or "zipf"."""

    rows: int
    dim: int
    ids: int
    spread: str

    def __str__(self) -> str:
        ids = "1M" if self.ids == 10**6 else f"{self.ids // 1000}k"
        return f"K={short(self.rows)} d{self.dim} {ids} {self.spread}"


@dataclass(frozen=True)
class Batch:
    """dense: int64 [n] below K, for peers. keys: int64 [n], the same rows' keys, for us."""

    dense: Tensor
    keys: Tensor
    offsets: Tensor
    grad: Tensor

    @property
    def num_bags(self) -> int:
        return self.offsets.numel() - 1


def random_keys(n: int, seed: int = 1) -> Tensor:
    """Draws random 64-bit keys; among 1e7 keys, two are equal with a probability of 1 in 400,000."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(torch.int64)
    return torch.randint(info.min, info.max, (n,), generator=generator)


def new_weights(rows: int, dim: int) -> Tensor:
    return torch.empty(rows, dim).uniform_(-0.01, 0.01)


class Batches:
    """Draws batches over one set of keys, and keeps them for the next optimizer."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys
        self._generator = torch.Generator().manual_seed(2)
        self._place = torch.randperm(keys.numel(), generator=self._generator)
        self._cumulative: Tensor | None = None
        self._made: dict[tuple[int, str], list[Tensor]] = {}

    def __call__(self, workload: Workload) -> list[Batch]:
        known = (workload.ids, workload.spread)
        if known not in self._made:
            self._made[known] = [self._place[self._ranks(*known)] for _ in range(BATCHES)]
        offsets = torch.arange(0, workload.ids + 1, BAG)
        # A separate gradient for every batch; otherwise a later variant finds it in the cache.
        shape = (offsets.numel() - 1, workload.dim)
        return [
            Batch(d, self.keys[d], offsets, torch.randn(shape, generator=self._generator))
            for d in self._made[known]
        ]

    def _ranks(self, n: int, spread: str) -> Tensor:
        if spread == "uniform":
            return torch.randint(0, self.keys.numel(), (n,), generator=self._generator)
        if self._cumulative is None:
            ranks = torch.arange(1, self.keys.numel() + 1, dtype=torch.float64)
            self._cumulative = ranks.pow(-ZIPF).cumsum(0)
        draws = torch.rand(n, generator=self._generator, dtype=torch.float64)
        return torch.searchsorted(self._cumulative, draws * self._cumulative[-1])


class Variant(Protocol):
    """A variant to time."""

    def step(self, batch: Batch) -> object:
        """Forward, pool, backward, update."""

    def lookup(self, batch: Batch) -> object:
        """Forward without gradient: one pooled row per bag."""


OPTIMIZERS: dict[str, Optimizer] = {
    "adagrad": Adagrad(lr=LEARNING_RATE, eps=EPS),
    "sgd": SGD(lr=LEARNING_RATE),
    "rowwise_adagrad": RowWiseAdagrad(lr=LEARNING_RATE, eps=EPS),
    "adam": Adam(lr=LEARNING_RATE, eps=EPS),
}


# ---- ours


class Ours:
    """Megalith's shards with one table on the cpu engine, trained through autograd like its peers."""

    def __init__(
        self,
        optimizer: str | Optimizer,
        keys: Tensor,
        dim: int,
        weights: Tensor | None = None,
        **policies: Any,
    ) -> None:
        chosen = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        config = TableConfig("t", dim=dim, optimizer=chosen, **policies)
        self.shards = LocalShards([config])
        self.table = self.shards.local["t"]
        self.time: float | None = None
        self.table.reserve(keys.numel())
        for start in range(0, keys.numel(), FILL_CHUNK):
            part = keys[start : start + FILL_CHUNK]
            given = None if weights is None else weights[start : start + FILL_CHUNK]
            new = new_weights(part.numel(), dim) if given is None else given
            self.table.assign(part, new, time=0 if policies else None)
        assert len(self.table) == keys.numel()
        self.steps = 0
        # Autograd calls backward only for an input that requires a gradient.
        self._anchor = torch.zeros((), requires_grad=True)

    def pooling(self, batch: Batch) -> Pooling:
        return Pooling.sum("t", batch.offsets, self.table.dim)

    def step(self, batch: Batch) -> None:
        out = _Step.apply(self._anchor, self, batch)
        out.backward(batch.grad)

    @torch.no_grad()
    def lookup(self, batch: Batch) -> Tensor:
        return self.shards.lookup({"t": batch.keys}).pool(self.pooling(batch))[0]

    def find(self, batch: Batch) -> Tensor:
        return self.table.find(batch.keys)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ours: Ours, batch: Batch) -> Tensor:
        lookup, pooling = ours.shards.lookup({"t": batch.keys}, step=ours.steps), ours.pooling(batch)
        ctx.call = (ours, lookup, pooling)
        return lookup.pool(pooling)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ours, lookup, pooling = ctx.call
        ours.shards.apply_gradients(lookup, list(grads), pooling=pooling, step=ours.steps, time=ours.time)
        ours.steps += 1
        return None, None, None


# ---- peers


class BagPeer:
    """nn.EmbeddingBag with sparse gradients and a torch optimizer."""

    def __init__(self, optimizer: str, weights: Tensor) -> None:
        self.bag = torch.nn.EmbeddingBag.from_pretrained(
            weights, freeze=False, mode="sum", sparse=True, include_last_offset=True
        )
        self.optimizer: torch.optim.Optimizer
        parameters = [self.bag.weight]
        if optimizer == "adagrad":
            self.optimizer = torch.optim.Adagrad(parameters, lr=LEARNING_RATE, eps=EPS)
        elif optimizer == "adam":
            self.optimizer = torch.optim.SparseAdam(parameters, lr=LEARNING_RATE, eps=EPS)
        elif optimizer == "sgd":
            self.optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
        else:
            raise ValueError(f"torch has no sparse {optimizer}")
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def step(self, batch: Batch) -> None:
        self.bag(batch.dense, batch.offsets).backward(batch.grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def lookup(self, batch: Batch) -> Tensor:
        return self.bag(batch.dense, batch.offsets)

    def weights(self) -> Tensor:
        return self.bag.weight.detach()


class TbePeer:
    """FBGEMM's table-batched embedding on the CPU, without index bounds checks (its fastest mode)."""

    def __init__(self, optimizer: str, weights: Tensor) -> None:
        from fbgemm_gpu import split_table_batched_embeddings_ops_common as common
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
        from fbgemm_gpu.split_embedding_configs import EmbOptimType

        kinds = {
            "adagrad": EmbOptimType.EXACT_ADAGRAD,
            "sgd": EmbOptimType.EXACT_SGD,
            "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        }
        place = (common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
        self.tbe = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(*weights.shape, *place)],
            optimizer=kinds[optimizer],
            learning_rate=LEARNING_RATE,
            eps=EPS,
            pooling_mode=common.PoolingMode.SUM,
            bounds_check_mode=common.BoundsCheckMode.NONE,
            device=torch.device("cpu"),
        )
        self.weights().copy_(weights)
        if optimizer != "sgd":
            self.tbe.momentum1_host.data.zero_()

    def step(self, batch: Batch) -> None:
        self.tbe(batch.dense, batch.offsets).backward(batch.grad)

    @torch.no_grad()
    def lookup(self, batch: Batch) -> Tensor:
        return self.tbe(batch.dense, batch.offsets)

    def weights(self) -> Tensor:
        return self.tbe.split_embedding_weights()[0]


class ManagedCollision:
    """torchrec's managed-collision remap in eval mode, with all keys known."""

    def __init__(self, keys: Tensor) -> None:
        from torchrec.modules.mc_modules import (
            DistanceLFU_EvictionPolicy,
            MCHManagedCollisionModule,
        )
        from torchrec.sparse.jagged_tensor import JaggedTensor

        self._jagged = JaggedTensor
        # The last slot stands for unknown ids.
        self.module = MCHManagedCollisionModule(
            zch_size=keys.numel() + 1,
            device=torch.device("cpu"),
            eviction_policy=DistanceLFU_EvictionPolicy(),
            eviction_interval=1_000_000,
        )
        ordered, place = keys.sort()
        self.module._mch_sorted_raw_ids[:-1] = ordered
        self.module._mch_remapped_ids_mapping[:-1] = place
        self.module.eval()

    @torch.no_grad()
    def remap(self, batch: Batch) -> Tensor:
        feature = self._jagged(values=batch.keys, offsets=batch.offsets)
        return self.module({"f": feature})["f"].values()


def installed(peer: str) -> bool:
    """Returns whether a peer can be imported."""
    try:
        if peer == "tbe":
            import fbgemm_gpu.split_table_batched_embeddings_ops_training  # noqa: F401
        elif peer == "managed collision":
            import torchrec.modules.mc_modules  # noqa: F401
    except Exception:
        return False
    return True
