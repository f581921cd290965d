"""The variants of sync_cpu.py: one model trained on two ranks, with megalith and with its peers.

26 features of one id each, dim 16, Adagrad on the embeddings; 13 dense values and an MLP 256-128-1 with Adam,
averaged over ranks by DistributedDataParallel. Peers get dense ids, megalith raw 64-bit ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train_cpu import DENSE, DIM, EPS, FEATURES, LR, MULTIPLIER, NAMES, Model

from megalith import (
    Adagrad,
    EmbeddingCollection,
    Feature,
    Layout,
    LocalShards,
    Pipeline,
    Ragged,
    Slice,
    SyncShards,
    TableConfig,
)
from megalith.shards import Shards

Weights = list[Tensor]
TABLES = [f"t{i}" for i in range(FEATURES)]


@dataclass
class Batch:
    """The batch of one rank: ids [features, batch], the same as columns of raw ids, dense values, labels."""

    ids: Tensor
    features: Any
    offsets: Tensor
    dense: Tensor
    labels: Tensor
    jagged: Any = None


def make_batch(seed: int, size: int, rows: int) -> Batch:
    """Draws ids by Zipf's law with exponent 1.05; the frequent ones are spread over the table."""
    generator = torch.Generator().manual_seed(seed)
    even = torch.rand(FEATURES, size, generator=generator, dtype=torch.float64)
    frequent = ((1 - even * (1 - rows**-0.05)) ** (-1 / 0.05)).long().clamp(1, rows) - 1
    spread = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    dense = torch.randn(size, DENSE, generator=generator)
    labels = (torch.rand(size, generator=generator) < 0.3).float()
    return _batch(spread[frequent], dense, labels)


def concatenated(parts: Sequence[Batch]) -> Batch:
    """Concatenates the batches of all ranks."""
    dense, labels = torch.cat([p.dense for p in parts]), torch.cat([p.labels for p in parts])
    return _batch(torch.cat([p.ids for p in parts], 1), dense, labels)


def _batch(ids: Tensor, dense: Tensor, labels: Tensor) -> Batch:
    offsets = torch.arange(ids.shape[1] + 1)
    columns = {name: Ragged(raw(ids[i]), offsets) for i, name in enumerate(NAMES)}
    return Batch(ids, columns, offsets, dense, labels)


def raw(ids: Tensor) -> Tensor:
    return (ids + 1) * MULTIPLIER


def make_weights(rows: int) -> Weights:
    generator = torch.Generator().manual_seed(3)
    return [torch.empty(rows, DIM).uniform_(-0.01, 0.01, generator=generator) for _ in NAMES]


# ---- megalith


def make_tables() -> list[TableConfig]:
    return [TableConfig(name, dim=DIM, optimizer=Adagrad(LR, eps=EPS)) for name in TABLES]


class Ours(Model):
    """megalith, with any kind of shards."""

    def __init__(self, shards: Shards, weights: Weights) -> None:
        super().__init__()
        layout = Layout("all", [Slice(name, 0, DIM) for name in NAMES])
        features = [Feature(name, table) for name, table in zip(NAMES, TABLES, strict=True)]
        self.collection = EmbeddingCollection(shards, features, layouts=[layout])
        for name, rows in zip(TABLES, weights, strict=True):
            own = torch.arange(shards.rank, rows.shape[0], shards.world_size)
            shards.assign({name: (raw(own), rows[own])})
        if shards.world_size > 1:
            self.mlp = DistributedDataParallel(self.mlp)  # type: ignore[assignment]

    def embed(self, batch: Any) -> Tensor:
        out: Tensor = self.collection(batch.features)["all"]
        return out

    def pipeline_loop(self, **options: Any) -> Callable[[Iterable[Batch]], list[float]]:
        """Trains on batches through a Pipeline."""
        return lambda batches: [self.step(batch) for batch in Pipeline(self.collection, batches, **options)]


def two_ranks(weights: Weights, transport: str) -> Ours:
    return Ours(SyncShards(make_tables(), transport=transport), weights)


def one_process(weights: Weights) -> Ours:
    return Ours(LocalShards(make_tables()), weights)


class SlowWire:
    """Makes every exchange of some shards take as long as on a network, by sleeping."""

    def __init__(self, shards: SyncShards, latency: float, bandwidth: float) -> None:
        self._exchange: Any = shards.exchange
        self._call = self._exchange.all_to_all
        self._latency, self._bandwidth = latency, bandwidth

    def __enter__(self) -> None:
        self._exchange.all_to_all = self._slow

    def __exit__(self, *_: object) -> None:
        self._exchange.all_to_all = self._call

    def _slow(self, send: Tensor, out: Sequence[int], into: Sequence[int], what: str) -> Tensor:
        received: Tensor = self._call(send, out, into, what)
        rank = self._exchange.rank
        travelled = max(sum(sizes) - sizes[rank] for sizes in (out, into))
        time.sleep(self._latency + travelled / self._bandwidth)
        return received


class DenseOnly(Model):
    """Embeddings without cost, but with a gradient: what no variant can be faster than."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = DistributedDataParallel(self.mlp)  # type: ignore[assignment]

    def embed(self, batch: Any) -> Tensor:
        return torch.zeros(batch.dense.shape[0], FEATURES * DIM, requires_grad=True)


# ---- peers


class TorchRec(Model):
    """DistributedModelParallel with a row-wise EmbeddingCollection, FBGEMM's fused Adagrad under it.

    Its dedup of ids before the exchange (use_index_dedup) has no CPU kernel in 1.8.0.
    """

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec import EmbeddingCollection as TorchRecCollection
        from torchrec import EmbeddingConfig
        from torchrec.distributed import DistributedModelParallel
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
        from torchrec.distributed.types import ShardingEnv, ShardingPlan

        configs = [
            EmbeddingConfig(
                name=table, embedding_dim=DIM, num_embeddings=weights[0].shape[0], feature_names=[name]
            )
            for name, table in zip(NAMES, TABLES, strict=True)
        ]
        fused = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": LR, "eps": EPS}
        sharder = EmbeddingCollectionSharder(fused_params=fused)
        embeddings = nn.ModuleDict({"all": TorchRecCollection(configs, device=torch.device("meta"))})
        ranks = dist.get_world_size()
        plan = construct_module_sharding_plan(
            embeddings["all"],
            {table: row_wise(compute_kernel="fused") for table in TABLES},
            sharder=sharder,
            local_size=ranks,
            world_size=ranks,
            device_type="cpu",
        )
        self.parallel = DistributedModelParallel(
            embeddings,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=torch.device("cpu"),
            plan=ShardingPlan({"all": plan}),
            sharders=[sharder],
            init_data_parallel=False,
        )
        for name, tensor in self.parallel.state_dict().items():  # all.embeddings.t7.weight
            rows = weights[TABLES.index(name.split(".")[2])]
            for shard in tensor.local_shards():
                begin = shard.metadata.shard_offsets[0]
                shard.tensor.copy_(rows[begin : begin + shard.tensor.shape[0]])
        self.mlp = DistributedDataParallel(self.mlp)  # type: ignore[assignment]

    def embed(self, batch: Any) -> Tensor:
        from torchrec import KeyedJaggedTensor

        if batch.jagged is None:
            lengths = torch.ones(batch.ids.numel(), dtype=torch.int32)
            batch.jagged = KeyedJaggedTensor(NAMES, batch.ids.reshape(-1), lengths=lengths)
        found = self.parallel.module["all"](batch.jagged)
        return torch.cat([found[name].values() for name in NAMES], 1)


class SparseBags(Model):
    """26 nn.EmbeddingBag on every rank, sparse gradients averaged by DistributedDataParallel."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()

        class Whole(nn.Module):
            def __init__(self, mlp: nn.Module) -> None:
                super().__init__()
                self.mlp = mlp
                self.bags = nn.ModuleList(
                    nn.EmbeddingBag.from_pretrained(rows.clone(), freeze=False, mode="sum", sparse=True)
                    for rows in weights
                )

            def forward(self, batch: Batch) -> Tensor:
                starts = batch.offsets[:-1]
                pooled = [bag(ids, starts) for bag, ids in zip(self.bags, batch.ids, strict=True)]
                logits: Tensor = self.mlp(torch.cat([*pooled, batch.dense], 1))
                return logits

        self.whole = DistributedDataParallel(Whole(self.mlp))
        self.adagrad = torch.optim.Adagrad(self.whole.module.bags.parameters(), LR, eps=EPS)

    def step(self, batch: Any) -> float:
        loss = nn.functional.binary_cross_entropy_with_logits(self.whole(batch).squeeze(1), batch.labels)
        self.adam.zero_grad()
        self.adagrad.zero_grad()
        loss.backward()
        self.adam.step()
        self.adagrad.step()
        return float(loss.detach())
