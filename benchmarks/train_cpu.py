"""A whole model in training against its peers: 26 features, dim 16, batch 4096, 13 dense, MLP 256-128-1.

    python benchmarks/train_cpu.py [--quick] [--threads 1,2] [--output PATH]

Every variant has the same dense part (Adam) and Adagrad on its embeddings; 200k ids per feature by Zipf's
law, one id per feature and example, no input pipeline. Peers get dense ids below 200k, ours gets raw 64-bit
ids. One process, variants take turns on rotated batches, wall time, medians of paired ratios. The losses of
the variants are compared first. A full run saves results/train_cpu-DATE.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import (
    Bar,
    command_line,
    interleave,
    machine,
    print_bars,
    print_table,
    progress,
    result_path,
    versions,
    write_result,
)
from torch import Tensor, nn

from megalith import Adagrad, EmbeddingCollection, Feature, Layout, Ragged, Slice, TableConfig, Uniform

PACKAGES = ("megalith", "torch", "fbgemm_gpu-cpu", "torchrec", "numpy")
FEATURES, DIM, BATCH, DENSE, ROWS = 26, 16, 4096, 13, 200_000
LR, EPS = 0.05, 1e-8
NAMES = [f"f{i}" for i in range(FEATURES)]
MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64


class Batch:
    """Dense ids [features, batch], the same ids as raw 64-bit numbers, dense values, labels."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        even = torch.rand(FEATURES, BATCH, generator=generator, dtype=torch.float64)
        # Zipf's law with exponent 1.05, by inverting its continuous form.
        top = 1 - ROWS**-0.05
        self.ids = ((1 - even * top) ** (-1 / 0.05)).long().clamp(1, ROWS) - 1
        self.offsets = torch.arange(BATCH + 1)
        self.ragged = {
            name: Ragged((self.ids[i] + 1) * MULTIPLIER, self.offsets) for i, name in enumerate(NAMES)
        }
        self.dense = torch.randn(BATCH, DENSE, generator=generator)
        self.labels = (torch.rand(BATCH, generator=generator) < 0.3).float()
        self.jagged: Any = None


class Model:
    """The dense part and its step; a subclass supplies embeddings [batch, features * dim]."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.mlp = nn.Sequential(
            nn.Linear(FEATURES * DIM + DENSE, 256),
            nn.ReLU(),
            nn.Linear(256, 128),
            nn.ReLU(),
            nn.Linear(128, 1),
        )
        self.adam = torch.optim.Adam(self.mlp.parameters(), 1e-3)

    def embed(self, batch: Batch) -> Tensor:
        raise NotImplementedError

    def update(self) -> None:
        """Updates the embeddings after backward, where needed."""

    def step(self, batch: Batch) -> float:
        logits = self.mlp(torch.cat([self.embed(batch), batch.dense], 1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        self.update()
        return float(loss.detach())


class Free(Model):
    """Embeddings without cost, but with a gradient: the upper bound."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.rows = torch.zeros(BATCH, FEATURES * DIM, requires_grad=True)

    def embed(self, batch: Batch) -> Tensor:
        return self.rows


class Ours(Model):
    def __init__(self, weights: Tensor, tables: int = FEATURES) -> None:
        super().__init__()
        configs = [
            TableConfig(f"t{i}", dim=DIM, optimizer=Adagrad(LR, eps=EPS), initializer=Uniform(-0.01, 0.01))
            for i in range(tables)
        ]
        features = [Feature(name, f"t{i % tables}") for i, name in enumerate(NAMES)]
        layout = Layout("all", [Slice(name, 0, DIM) for name in NAMES])
        self.collection = EmbeddingCollection(configs, features, layouts=[layout])
        raw = (torch.arange(ROWS) + 1) * MULTIPLIER
        for i in range(tables):
            self.collection.shards.assign({f"t{i}": (raw, weights[i])})

    def embed(self, batch: Batch) -> Tensor:
        out: Tensor = self.collection(batch.ragged)["all"]
        return out


class Bags(Model):
    """26 nn.EmbeddingBag, sparse gradients, torch's Adagrad."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.bags = [nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True) for _ in NAMES]
        for bag, rows in zip(self.bags, weights, strict=True):
            bag.weight.data.copy_(rows)
        self.adagrad = torch.optim.Adagrad([bag.weight for bag in self.bags], LR, eps=EPS)

    def embed(self, batch: Batch) -> Tensor:
        self.adagrad.zero_grad()
        pooled = [bag(ids, batch.offsets[:-1]) for bag, ids in zip(self.bags, batch.ids, strict=True)]
        return torch.cat(pooled, 1)

    def update(self) -> None:
        self.adagrad.step()


class Fused(Model):
    """torchrec's fused EmbeddingBagCollection over FBGEMM's TBE."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        self.tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)] * FEATURES,
            optimizer=EmbOptimType.EXACT_ADAGRAD,
            learning_rate=LR,
            eps=EPS,
            pooling_mode=PoolingMode.SUM,
        )
        for own, rows in zip(self.tbe.split_embedding_weights(), weights, strict=True):
            own.copy_(rows)
        self.offsets = torch.arange(FEATURES * BATCH + 1)

    def embed(self, batch: Batch) -> Tensor:
        out: Tensor = self.tbe(batch.ids.view(-1), self.offsets)
        return out


class TorchRec(Model):
    """torchrec's EmbeddingBagCollection, fused (its wrapper of the same TBE), from a KeyedJaggedTensor."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

        configs = [
            EmbeddingBagConfig(name=f"t{i}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name])
            for i, name in enumerate(NAMES)
        ]
        self.ebc = FusedEmbeddingBagCollection(
            configs, torch.optim.Adagrad, {"lr": LR, "eps": EPS}, device=torch.device("cpu")
        )
        for key, value in self.ebc.state_dict().items():  # embedding_bags.t7.weight
            value.copy_(weights[int(key.split(".")[1].removeprefix("t"))])

    def embed(self, batch: Batch) -> Tensor:
        from torchrec import KeyedJaggedTensor

        if batch.jagged is None:
            lengths = torch.ones(FEATURES * BATCH, dtype=torch.int32)
            batch.jagged = KeyedJaggedTensor(NAMES, batch.ids.view(-1), lengths=lengths)
        out: Tensor = self.ebc(batch.jagged).values()
        return out


# Targets by number of threads: the peer, the target, the goal.
WANTED: dict[int, tuple[tuple[str, float, float], ...]] = {
    2: (("torchrec fused EBC", 1.4, 1.6), ("26 EmbeddingBags", 1.9, 2.3)),
    1: (("torchrec fused EBC", 1.3, 1.6),),
}

VARIANTS: dict[str, Callable[[Tensor], Model]] = {
    "megalith": Ours,
    "torchrec fused EBC": TorchRec,
    "FBGEMM TBE": Fused,
    "26 EmbeddingBags": Bags,
    "MLP only": Free,
}


def build(weights: Tensor) -> dict[str, Model]:
    models = {}
    for name, make in VARIANTS.items():
        try:
            models[name] = make(weights)
        except ImportError as error:
            progress(f"{name}: skipped, {error}")
    return models


def verify(models: dict[str, Model], batches: Sequence[Batch]) -> None:
    """Checks that all variants have equal losses over some steps."""
    losses = {name: [m.step(b) for b in batches] for name, m in models.items() if name != "MLP only"}
    for name, own in losses.items():
        for ours, theirs in zip(losses["megalith"], own, strict=True):
            if abs(ours - theirs) > 2e-3:
                raise SystemExit(f"{name} learns otherwise: {own} against {losses['megalith']}")


def embedding_part(model: Ours, batches: Sequence[Batch], rounds: int) -> dict[str, Any]:
    """Measures lookup and update without the MLP: wall time with one thread / wall time with two."""
    grads = [torch.randn(BATCH, FEATURES * DIM + DENSE)[:, : FEATURES * DIM] * 1e-3 for _ in batches]

    def step(number: int) -> None:
        model.embed(batches[number]).backward(grads[number])

    calls: dict[str, Callable[[int], None]] = {}
    for threads in (1, 2):

        def call(number: int, threads: int = threads) -> None:
            torch.set_num_threads(threads)
            step(number)

        calls[f"{threads} thread(s)"] = call
    times = interleave(calls, range(len(batches)), rounds, clock=time.perf_counter)
    milliseconds = {name: times.median(name) * 1e3 for name in calls}
    progress("  embedding part: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in milliseconds.items()))
    return {"milliseconds": milliseconds, "one / two threads": times.ratio("1 thread(s)", "2 thread(s)")}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few rounds; nothing is saved")
    parser.add_argument("--threads", default="2,1", help="numbers of threads, default 2,1")
    parser.add_argument("--output", type=Path, help="where to save the result")
    options = parser.parse_args(arguments)
    rounds = 5 if options.quick else 41
    weights = torch.empty(FEATURES, ROWS, DIM).uniform_(
        -0.01, 0.01, generator=torch.Generator().manual_seed(3)
    )
    batches = [Batch(seed) for seed in range(11)]
    progress("building the variants")
    models = build(weights)
    verify(models, batches[:5])
    bars: list[Bar] = []
    sections: dict[str, Any] = {}
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        progress(f"{threads} thread(s), {rounds} rounds")
        steps = {name: model.step for name, model in models.items()}
        times = interleave(steps, batches, rounds, clock=time.perf_counter)
        rows = []
        for name in models:
            seconds = times.median(name)
            ratio = times.ratio(name, "megalith")
            rows.append((name, f"{seconds * 1e3:.1f}", f"{BATCH / seconds:,.0f}", str(ratio)))
            sections.setdefault(f"{threads} threads", {})[name] = {
                "milliseconds": seconds * 1e3,
                "ratio": ratio,
                "samples_per_second": BATCH / seconds,
            }
        print_table(f"A step, {threads} thread(s)", ("variant", "ms", "samples/s", "time / ours"), rows)
        for name, required, goal in WANTED.get(threads, ()):
            if name in models:
                ratio = times.ratio(name, "megalith").median
                bars.append(Bar(f"step vs {name}, {threads} thread(s)", ratio, required, goal))
    ours = models["megalith"]
    assert isinstance(ours, Ours)
    sections["embedding part"] = part = embedding_part(ours, batches, rounds)
    bars.append(Bar("embedding part, one / two threads", part["one / two threads"].median, 1.7))
    print_bars(bars)
    content = {
        "benchmark": "train_cpu",
        "command": command_line(arguments),
        "machine": machine(),
        "versions": versions(PACKAGES),
        "sections": sections,
        "bars": bars,
    }
    if options.output or not options.quick:
        write_result(options.output or result_path("train_cpu"), content)


if __name__ == "__main__":
    main(sys.argv[1:])
