"""The ops against plain torch and FBGEMM on the CPU.

    python benchmarks/ops_cpu.py [--quick] [--only NAME,...] [--threads 1,2] [--profile DIR] [--output PATH]

The workloads are those of Monolith's own benchmarks (a million ids in ten shards; 1e5 features; 30 slots
and 256 shards), routing by modulo and by hash, a layout of 200 features for a batch of 4096, and the
jagged ops that FBGEMM also has.
Outputs are compared with the peers first. One process, variants take turns, CPU time of the thread (wall
time with two threads), medians of paired ratios. "torch" is the fastest of several plain expressions. A
full run saves results/ops_cpu-DATE.json; --profile writes a torch.profiler trace per workload.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
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
from torch import Tensor

from megalith import Ragged, Router, ops
from megalith.compat import monolith
from megalith.compat.monolith import (
    FeatureConfig,
    FeatureConfigs,
    OutConfig,
    OutType,
    PoolingType,
    SliceConfig,
)

PACKAGES = ("megalith", "torch", "fbgemm_gpu-cpu", "numpy")
Call = Callable[[], Any]


@dataclass
class Workload:
    """Our call and its peers. `same` compares results; `bars` maps a peer to the required ratio."""

    name: str
    ours: Call
    peers: dict[str, Call]
    bars: dict[str, float] = field(default_factory=dict)
    same: Callable[[Any, Any], bool] | None = None


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def any_ids(n: int, source: torch.Generator) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (n,), generator=source)


def fbgemm() -> Any:
    """Returns FBGEMM's ops, or None if it is not installed."""
    try:
        import fbgemm_gpu  # noqa: F401
    except ImportError:
        return None
    return torch.ops.fbgemm


def close(a: Any, b: Any) -> bool:
    """Returns whether tensors, or lists of them, are equal up to rounding."""
    if isinstance(a, Tensor):
        return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5)
    return len(a) == len(b) and all(close(x, y) for x, y in zip(a, b, strict=True))


# ---- Monolith's workloads


def map_ids(scale: int) -> list[Workload]:
    """1e6 ids, dim 16, 10 shards."""
    source = generator()
    n = 1_000_000 // scale
    ids = torch.randperm(n, generator=source)
    parts = [ids[ids % 10 == s] for s in range(10)]
    rows = [p[:, None].float() + torch.arange(16) for p in parts]
    wanted = torch.randperm(n, generator=source)

    def plain() -> Tensor:
        keys, values = torch.cat(parts), torch.cat(rows)
        ordered, order = torch.sort(keys)
        return values.index_select(0, order[torch.searchsorted(ordered, wanted)])

    return [
        Workload(
            "map_id_to_embedding", lambda: monolith.map_id_to_embedding(parts, rows, wanted), {"torch": plain}
        )
    ]


def gather_ids(scale: int) -> list[Workload]:
    """1e5 features: dim 32 with 4 ids per row, dim 256 with 2."""
    made = []
    for dim, per_row in ((32, 4), (256, 2)):
        m = 100_000 // scale
        ids = torch.randperm(m, generator=generator())
        rows = torch.randn(m, dim, generator=generator())
        asked = (torch.arange(m)[:, None] + torch.arange(per_row)) % m

        def plain(ids: Tensor = ids, rows: Tensor = rows, asked: Tensor = asked) -> Tensor:
            ordered, order = torch.sort(ids)
            index = order[torch.searchsorted(ordered, asked.flatten())]
            return rows.index_select(0, index).view(*asked.shape, -1)

        def ours(ids: Tensor = ids, rows: Tensor = rows, asked: Tensor = asked) -> Tensor:
            return monolith.gather_embeddings_by_input(ids, rows, asked)[0]

        made.append(Workload(f"gather_embeddings_by_input, dim {dim}", ours, {"torch": plain}))
    return made


def fused_reorder(scale: int) -> list[Workload]:
    """1e6 distinct full-range ids over 30 slots, doubled and shuffled, 256 shards."""
    source = generator()
    n, slots, shards, dim = 1_000_000 // scale, 30, 256, 16
    everything = any_ids(n, source)
    lists = []
    for piece in everything.chunk(slots):
        doubled = piece.repeat(2)
        lists.append(doubled[torch.randperm(doubled.numel(), generator=source)])

    def plain() -> tuple[Tensor, Tensor]:
        # A stable sort of each list finds first occurrences; one more sort orders them by bucket.
        values, positions, base = [], [], 0
        for ids in lists:
            v, o = torch.sort(ids, stable=True)
            values.append(v)
            positions.append(o + base)
            base += ids.numel()
        value, position = torch.cat(values), torch.cat(positions)
        sizes = torch.tensor([ids.numel() for ids in lists])
        head = torch.ones(base, dtype=torch.bool)
        torch.ne(value[1:], value[:-1], out=head[1:])
        head[torch.cumsum(sizes, 0)[:-1]] = True
        group = torch.cumsum(head, 0) - 1
        at = head.nonzero().squeeze(1)
        first, unique = position[at], value[at]
        list_of = torch.repeat_interleave(torch.arange(len(lists)), sizes, output_size=base)
        bucket = (unique & (shards - 1)) * len(lists) + list_of[first]  # 256 is a power of two
        order = torch.sort(bucket * (1 << 22) + first)[1]
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel())
        offset = torch.empty(base, dtype=torch.int64)
        offset[position] = (place * dim)[group]
        return unique[order], offset

    def ours() -> tuple[Tensor, Tensor]:
        result = monolith.fused_reorder_by_indices(lists, shards, [dim] * len(lists))
        return result.output, result.fused_emb_offset

    return [
        Workload(
            "fused_reorder_by_indices",
            ours,
            {"torch": plain},
            {"torch": 3.0},
            lambda a, b: all(map(torch.equal, a, b)),
        )
    ]


def reorder(scale: int) -> list[Workload]:
    """1e6 ids, half of them distinct, 256 shards."""
    source = generator()
    ids = any_ids(500_000 // scale, source).repeat(2)
    ids = ids[torch.randperm(ids.numel(), generator=source)]
    shards = (ids & 255).to(torch.int32)

    def plain() -> tuple[Tensor, Tensor]:
        unique, inverse = torch.unique(ids, return_inverse=True)
        owner = torch.empty(unique.numel(), dtype=torch.int32)
        owner[inverse] = shards
        return unique[torch.sort(owner)[1]], torch.bincount(owner, minlength=256)

    def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
        # torch's expression does not define the order inside a shard.
        owners = [torch.repeat_interleave(torch.arange(256), n.long()) for _, n in (a, b)]
        keys = [
            torch.sort(o.double() * 2.0**64 + u.double())[0] for (u, _), o in zip((a, b), owners, strict=True)
        ]
        return torch.equal(a[1].long(), b[1].long()) and torch.equal(keys[0], keys[1])

    def ours() -> tuple[Tensor, Tensor]:
        return monolith.reorder_by_indices(ids, shards, 256)

    return [Workload("reorder_by_indices", ours, {"torch": plain}, {"torch": 3.0}, same)]


# ---- routing


def route(scale: int) -> list[Workload]:
    """Owners of 1e6 ids of any 64 bits among 10 and 256 shards, by modulo and by hash."""
    ids = any_ids(1_000_000 // scale, generator())
    made = []
    for mode, kind in (("roundrobin", "modulo"), ("hash_roundrobin", "hash")):
        for shards in (10, 256):
            router = Router(mode, shards)
            made.append(
                Workload(
                    f"route by {kind}, {shards} shards",
                    lambda router=router: router.owner(ids),
                    {"torch": lambda router=router: router.owner_reference(ids)},
                    same=torch.equal,
                )
            )
    return made


# ---- layouts


def layout(scale: int) -> list[Workload]:
    """200 features, batch 4096, 3 tables on 4 servers; CONCAT, STACK of 20, ADDN of the first columns."""
    source = generator()
    batch, features, servers, dim = 4096 // scale, 200, 4, 16
    names = [f"f{i:03}" for i in range(features)]
    mean = torch.tensor([i % 4 == 3 for i in range(features)])
    configs = FeatureConfigs(
        {
            name: FeatureConfig(f"t{i % 3}", PoolingType.MEAN if mean[i] else PoolingType.SUM, (1, dim))
            for i, name in enumerate(names)
        },
        {
            "bias": OutConfig(tuple(SliceConfig(n, 0, 1) for n in names), OutType.ADDN),
            "deep": OutConfig(tuple(SliceConfig(n, 1, 1 + dim) for n in names), OutType.CONCAT),
            "ffm": OutConfig(tuple(SliceConfig(n, 1, 1 + dim) for n in names[:20]), OutType.STACK),
        },
    )
    columns = {}
    for i, name in enumerate(names):
        even = torch.ones(batch, dtype=torch.int64)
        lengths = even if i % 2 == 0 else torch.randint(0, 6, (batch,), generator=source)
        popular = torch.rand(int(lengths.sum()), generator=source, dtype=torch.float64)
        columns[name] = Ragged.from_lengths((10 ** (popular * 5)).long() * 7919 + i * 2**40, lengths)
    fids = monolith.sharding_sparse_fids(columns, servers, configs)
    rows = [torch.randn(ids.numel(), 1 + dim, generator=source) for ids in fids.lists]
    leaves = [r.clone().requires_grad_() for r in rows]
    offsets = fids.feature_offset
    ends = offsets[::batch].tolist()

    def ours(rows: list[Tensor] = rows) -> list[Tensor]:
        return monolith.fused_embedding_to_layout(
            rows, None, fids.fid_offset, offsets, fids.nfl_offset, batch, "example", configs, servers
        )

    def row_numbers(rows: list[Tensor]) -> Tensor:
        base = torch.tensor([0, *(r.shape[0] for r in rows)]).cumsum(0)
        return base[fids.fid_offset >> 32] + (fids.fid_offset & 0xFFFFFFFF) // (1 + dim)

    def bag_each(rows: list[Tensor] = rows) -> list[Tensor]:
        """An embedding_bag per feature, then cat and stack."""
        weight, index = torch.cat(rows), row_numbers(rows)
        pooled = [
            F.embedding_bag(
                index[ends[f] : ends[f + 1]],
                weight,
                offsets[f * batch : (f + 1) * batch + 1] - ends[f],
                mode="mean" if mean[f] else "sum",
                include_last_offset=True,
            )
            for f in range(features)
        ]
        deep = torch.cat([p[:, 1:] for p in pooled], 1)
        bias = torch.stack([p[:, :1] for p in pooled]).sum(0)
        return [bias, deep, deep[:, : 20 * dim].reshape(batch, 20, dim)]

    def one_bag(rows: list[Tensor] = rows) -> list[Tensor]:
        """One embedding_bag for all features, then means, transposes and copies."""
        pooled = F.embedding_bag(
            row_numbers(rows), torch.cat(rows), offsets, mode="sum", include_last_offset=True
        )
        pooled = pooled.view(features, batch, 1 + dim)
        counts = torch.diff(offsets).view(features, batch, 1).clamp(min=1)
        pooled = torch.where(mean[:, None, None], pooled / counts, pooled)
        deep = pooled[:, :, 1:].transpose(0, 1)
        return [pooled[:, :, :1].sum(0), deep.reshape(batch, -1), deep[:, :20].contiguous()]

    grads = [torch.randn(o.shape, generator=source) for o in ours()]

    def trained(forward: Callable[[list[Tensor]], list[Tensor]]) -> Call:
        def run() -> list[Tensor]:
            for leaf in leaves:
                leaf.grad = None
            torch.autograd.backward(forward(leaves), grads)
            return [leaf.grad for leaf in leaves if leaf.grad is not None]

        return run

    return [
        Workload(
            "layout, forward", ours, {"torch": bag_each, "torch, one bag": one_bag}, {"torch": 3.0}, close
        ),
        Workload(
            "layout, forward and backward",
            trained(ours),
            {"torch": trained(bag_each), "torch, one bag": trained(one_bag)},
            {"torch": 3.0},
            close,
        ),
    ]


# ---- ops that FBGEMM also has


def jagged(scale: int) -> list[Workload]:
    """1e5 rows of 0 to 8 values."""
    fb = fbgemm()
    source = generator()
    batch, dim, first, shards = 100_000 // scale, 16, 5, 8
    lengths = torch.randint(0, 9, (batch,), generator=source)
    splits = F.pad(torch.cumsum(lengths, 0), (1, 0))
    n = int(splits[-1])
    rows = torch.randn(n, dim, generator=source)
    ids = torch.randint(0, 2**40, (n,), generator=source)
    weights = torch.rand(n, generator=source)
    column = Ragged(ids, splits, weights)
    made: list[Workload] = []

    flat = rows.flatten()
    sums = {"torch": lambda: torch.segment_reduce(rows, "sum", lengths=lengths, axis=0)}
    if fb is not None:
        sums["FBGEMM"] = lambda: fb.segment_sum_csr(dim, splits, flat)

    def same_sum(a: Tensor, b: Tensor) -> bool:
        # segment_sum_csr sums the dim values of a row as well.
        return close(a, b) if b.dim() == 2 else close(a.sum(1), b)

    made.append(
        Workload(
            f"segment_sum, dim {dim}", lambda: ops.segment_sum(rows, splits), sums, {"FBGEMM": 1.0}, same_sum
        )
    )
    single = rows[:, 0].contiguous()
    if fb is not None:
        made.append(
            Workload(
                "segment_sum of numbers",
                lambda: ops.segment_sum(single[:, None], splits)[:, 0],
                {"FBGEMM": lambda: fb.segment_sum_csr(1, splits, single)},
                {"FBGEMM": 1.0},
                close,
            )
        )

    leaf = rows.clone().requires_grad_()
    back = torch.randn(batch, first, dim, generator=source)

    def ours_padded(rows: Tensor = rows) -> Tensor:
        return ops.pad_rows(rows, splits, first)

    def padded_step(forward: Callable[[Tensor], Tensor]) -> Call:
        def run() -> Tensor | None:
            leaf.grad = None
            forward(leaf).backward(back)
            return leaf.grad

        return run

    if fb is not None:

        def theirs(rows: Tensor = rows) -> Tensor:
            out: Tensor = fb.jagged_to_padded_dense(rows, [splits], [first], 0.0)
            return out

        bar = {"FBGEMM": 1.0}
        made += [
            Workload("first rows, padded", ours_padded, {"FBGEMM": theirs}, bar, close),
            Workload(
                "first rows, backward", padded_step(ours_padded), {"FBGEMM": padded_step(theirs)}, bar, close
            ),
        ]

        block = 2**40 // shards
        router = Router("continuous", shards, block_size=block)
        blocks = torch.tensor([block])

        def their_buckets() -> list[Tensor]:
            found = fb.block_bucketize_sparse_features(
                lengths, ids, False, True, blocks, shards, weights, keep_orig_idx=True
            )
            return [found[0], found[1], found[2], found[4].long()]

        made.append(
            Workload(
                "bucketize, weights and permutation",
                lambda: list(ops.bucketize(column, router)),
                {"FBGEMM": their_buckets},
                bar,
                close,
            )
        )

        order = torch.randperm(batch, generator=source)
        small = order.to(torch.int32)

        def ours_taken() -> list[Tensor]:
            taken = ops.take(column, order)
            assert taken.weights is not None
            return [taken.values, taken.weights]

        def their_taken() -> list[Tensor]:
            return list(fb.permute_1D_sparse_data(small, lengths, ids, weights, n)[1:])

        made.append(Workload("rows permuted", ours_taken, {"FBGEMM": their_taken}, bar, close))
    return made


SECTIONS: dict[str, Callable[[int], list[Workload]]] = {
    "map": map_ids,
    "gather": gather_ids,
    "fused_reorder": fused_reorder,
    "reorder": reorder,
    "route": route,
    "layout": layout,
    "jagged": jagged,
}


def verify(work: Workload) -> None:
    ours = work.ours()
    same = work.same or close
    for name, peer in work.peers.items():
        if not same(ours, peer()):
            raise SystemExit(f"{work.name}: another result than {name}'s")


def measure(work: Workload, threads: int, rounds: int, bars: list[Bar]) -> tuple[list[str], dict[str, Any]]:
    torch.set_num_threads(threads)
    calls = {"ours": work.ours, **work.peers}
    clock = time.thread_time if threads == 1 else time.perf_counter
    times = interleave({n: lambda _, c=c: c() for n, c in calls.items()}, [None], rounds, clock=clock)
    record: dict[str, Any] = {"ours_ms": times.median("ours") * 1e3}
    texts = []
    for name in work.peers:
        ratio = times.ratio(name, "ours")
        record[name] = {"milliseconds": times.median(name) * 1e3, "ratio": ratio}
        texts.append(f"{name} {ratio}")
    # Compare with the fastest plain expression.
    plain = [times.ratio(n, "ours").median for n in work.peers if n.startswith("torch")]
    if threads == 1:
        for peer, required in work.bars.items():
            if peer in work.peers:
                value = min(plain) if peer == "torch" else times.ratio(peer, "ours").median
                bars.append(Bar(f"{work.name} vs {peer}", value, required))
    return [work.name, str(threads), f"{record['ours_ms']:.2f}", "; ".join(texts)], record


def profile(works: Sequence[Workload], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for work in works:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
            work.ours()
        trace.export_chrome_trace(str(folder / f"{work.name.replace(' ', '_').replace(',', '')}.json"))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the sizes; nothing is saved")
    parser.add_argument("--only", help=f"some of {', '.join(SECTIONS)}")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, default 1,2")
    parser.add_argument("--profile", type=Path, help="write a trace per workload into this folder")
    parser.add_argument("--output", type=Path, help="where to save the result")
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else list(SECTIONS)
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"--only: unknown {', '.join(unknown)} (known: {', '.join(SECTIONS)})")
    if fbgemm() is None:
        progress("FBGEMM is not installed: its comparisons are skipped")
    scale, rounds = (10, 3) if options.quick else (1, 15)
    bars: list[Bar] = []
    rows: list[list[str]] = []
    sections: dict[str, Any] = {}
    for name in names:
        progress(name)
        torch.set_num_threads(1)
        works = SECTIONS[name](scale)
        for work in works:
            verify(work)
            for threads in map(int, options.threads.split(",")):
                row, record = measure(work, threads, rounds, bars)
                rows.append(row)
                sections.setdefault(work.name, {})[f"{threads} threads"] = record
        if options.profile:
            profile(works, options.profile)
    print_table("Ops", ("workload", "threads", "ours, ms", "peer time / ours"), rows)
    print_bars(bars)
    content = {
        "benchmark": "ops_cpu",
        "command": command_line(arguments),
        "machine": machine(),
        "versions": versions(PACKAGES),
        "sections": sections,
        "bars": bars,
    }
    if options.output or not (options.quick or options.only):
        write_result(options.output or result_path("ops_cpu"), content)


if __name__ == "__main__":
    main(sys.argv[1:])
