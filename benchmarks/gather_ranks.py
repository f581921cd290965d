"""Gather: time of downloads that ranks share, and CPU time of checks, step and compression.

    python benchmarks/gather_ranks.py [--quick] [--rounds N] [--output PATH]

Latency: a store answers after a fixed latency; each rank has a fixed number of downloads in flight, as with a
memory budget. Ranks are processes. A time is that of fetching and validation on the slowest rank, the minimum
over the rounds, because the latency is exact and everything else is noise.

CPU: 16.8 million parameters, 8 peers, one thread. `validate` and the outer step, and `compress`, against the
same arithmetic as Templar does it, written here in plain torch; CPU seconds, medians of paired ratios. Both
steps start from the bytes of the peers' objects, each side in its own format. Templar's step reads the torch
files, checks quantiser settings and index range, unpacks and dequantises, clips to the median norm, takes the
mean over contributors, checks that it is finite, and subtracts it. Ours also checks digests, repeated indices
and codes. A full run saves results/gather_ranks-DATE.json.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
from harness import (
    Bar,
    Timings,
    command_line,
    interleave,
    machine,
    print_bars,
    result_path,
    versions,
    write_result,
)
from torch import Tensor

from megalith.compat.templar import write_payload
from megalith.distributed.elastic_ranks import launch_ranks
from megalith.gather import GatherPlan, Label, OuterUpdate, PayloadSchema, Status, compress, merge
from megalith.gather.result import Record, make_partial
from megalith.gather.simulation import Simulation, write_job
from megalith.gather.validate import validate
from megalith.storage.bodies import Ledger, MemoryBody

SIZES = (1, 2, 4)
BARS = {2: 1.9, 4: 3.7}
PEERS = 8
KEEP = CHUNK = 64


def seconds(simulation: Simulation, ranks: int) -> tuple[float, str]:
    """Returns the time of a window's gather, and the hash of the resulting weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = write_job(folder, simulation)
        ended = launch_ranks(
            [sys.executable, "-m", "megalith.gather.simulation", str(job)], ranks, timeout=300.0
        )
        assert all(each.code == 0 for each in ended), ended
        counts = Counter()
        for path in folder.glob("downloads-*.json"):
            counts.update(json.loads(path.read_text()))
        assert set(counts.values()) == {1}, "an object was downloaded twice"
        window = json.loads((folder / "window-0.json").read_text())
        return window["metrics"]["gather/seconds"], (folder / "weights").read_text()


# ---- the arithmetic of the reference, in plain torch


def chunked(weight: Tensor) -> Tensor:
    down, across = weight.shape[0] // CHUNK, weight.shape[1] // CHUNK
    return weight.view(down, CHUNK, across, CHUNK).permute(0, 2, 1, 3).reshape(down * across, CHUNK * CHUNK)


def reference_compress(update: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed indices, codes, shift and lookup, as Templar computes them."""
    chunks = chunked(update)
    indices = chunks.abs().topk(KEEP, dim=1, sorted=False).indices
    values = chunks.gather(1, indices)
    shift = values.mean()
    centred = values - shift
    scale = 6 * centred.norm() / (centred.numel() - 1) ** 0.5 / 4
    codes = (centred / scale + 2).round().clamp(0, 3).to(torch.uint8)
    places = codes.flatten().long()
    sums = torch.zeros(4).scatter_add_(0, places, centred.flatten())
    counts = torch.zeros(4).scatter_add_(0, places, torch.ones(places.numel()))
    flat = indices.flatten().to(torch.int32)
    first, second = flat[0::2], flat[1::2]
    packed = torch.stack([first & 255, (first >> 8) | ((second & 15) << 4), second >> 4], 1)
    return packed.to(torch.uint8).flatten(), codes, shift, sums / counts.clamp(min=1)


def unpacked(packed: Tensor) -> Tensor:
    triples = packed.view(-1, 3).to(torch.int64)
    first = triples[:, 0] | ((triples[:, 1] & 15) << 8)
    return torch.stack([first, (triples[:, 1] >> 4) | (triples[:, 2] << 4)], 1).view(-1, KEEP)


def reference_step(weight: Tensor, objects: list[bytes]) -> None:
    """Checks, clipping by the median norm, mean over contributors, and SGD, as Templar does them."""
    sent = []
    for data in objects:
        state = torch.load(io.BytesIO(data), weights_only=True)["state_dict"]
        packed, codes, (shift, scale, _, lookup, dtype) = (
            state[f"w{part}"] for part in ("idxs", "vals", "quant_params")
        )
        assert bool(torch.isfinite(shift).all())
        assert 1e-12 <= abs(scale) <= 1e4
        assert bool(torch.isfinite(lookup).all())
        assert packed.dtype == codes.dtype == torch.uint8
        indices = unpacked(packed)
        assert indices.shape[-1] == KEEP
        assert int(indices.min()) >= 0
        assert int(indices.max()) < CHUNK * CHUNK
        sent.append((packed, codes.reshape(-1, KEEP), shift, lookup, dtype))
    values = [(lookup[codes.long()] + shift).to(dtype) for _, codes, shift, lookup, dtype in sent]
    norms = torch.stack([each.norm() for each in values])
    factors = (norms.median() / (norms + 1e-8)).clamp(max=1)
    indices = torch.cat([unpacked(packed) for packed, *_ in sent], 1)
    clipped = torch.cat([each * factor for each, factor in zip(values, factors, strict=True)], 1)
    dense = torch.zeros(indices.shape[0], CHUNK * CHUNK)
    dense.scatter_reduce_(1, indices, clipped, "mean", include_self=False)
    down, across = weight.shape[0] // CHUNK, weight.shape[1] // CHUNK
    gradient = dense.view(down, across, CHUNK, CHUNK).permute(0, 2, 1, 3).reshape(weight.shape)
    assert bool(torch.isfinite(gradient).all())
    weight -= gradient


# ---- the same with Megalith


def megalith_step(weight: Tensor, schema: PayloadSchema, payloads: list[bytes]) -> None:
    plan = GatherPlan(run="bench", window=0, schema=schema, primary=tuple(range(len(payloads))))
    ledger, fetched = Ledger(1 << 30, "benchmark"), []
    for uid, data in enumerate(payloads):
        checked = validate(MemoryBody(data), schema, plan, uid, ledger=ledger, work_bytes=32 << 20)
        record = Record(uid, "primary", Status.OK, digest=checked.header.digest)
        fetched.append((record, checked))
    OuterUpdate(schema).apply({"w": weight}, merge([make_partial(plan, schema, plan.primary, fetched)]))


def cpu_times(side: int, rounds: int) -> tuple[Timings, Timings]:
    """Times of checks and step, and of compression."""
    torch.set_num_threads(1)
    updates = [torch.randn(side, side, generator=torch.Generator().manual_seed(n)) for n in range(PEERS)]
    schema = PayloadSchema.of({"w": updates[0]})
    made = [compress({"w": each}, schema) for each in updates]
    payloads = [each.to_bytes(Label("bench", 0, uid)) for uid, each in enumerate(made)]
    objects = [write_payload(each, Label("bench", 0, uid)) for uid, each in enumerate(made)]
    ours, theirs = torch.zeros(side, side), torch.zeros(side, side)
    megalith_step(ours, schema, payloads)
    reference_step(theirs, objects)
    assert torch.allclose(ours, theirs, atol=1e-3), "the steps differ"  # norms in float32 there
    steps = {
        "megalith": lambda weight: megalith_step(weight, schema, payloads),
        "reference": lambda weight: reference_step(weight, objects),
    }
    stepping = interleave(steps, [ours, theirs], rounds, time.process_time)
    compressing = interleave(
        {"megalith": lambda each: compress({"w": each}, schema), "reference": reference_compress},
        updates,
        rounds,
        time.process_time,
    )
    return stepping, compressing


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few peers, one round; nothing is saved")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="where to save the result")
    options = parser.parse_args(arguments)
    peers, rounds = (20, 1) if options.quick else (40, options.rounds)
    simulation = Simulation(peers=peers, latency=0.5, in_flight=2, faults={}, deadline=240.0)
    here = machine()
    found: dict[int, list[float]] = {size: [] for size in SIZES}
    hashes = set()
    for _ in range(rounds):
        for size in SIZES:
            took, weights = seconds(simulation, size)
            found[size].append(took)
            hashes.add(weights)
    assert len(hashes) == 1, "weights differ between numbers of ranks"
    best = {size: min(times) for size, times in found.items()}
    note = f"{peers} peers, {simulation.latency:g} s latency, {simulation.in_flight} in flight"
    bars = [
        Bar(f"time of one rank / of {size} ranks", best[1] / best[size], required=least, note=note)
        for size, least in BARS.items()
    ]
    side = 1024 if options.quick else 4096
    stepping, compressing = cpu_times(side, 2 if options.quick else 7)
    workload = f"{side} x {side} parameters, {PEERS} peers, CPU seconds of one thread"
    bars += [
        Bar(
            "checks and step: reference / ours",
            stepping.ratio("reference", "megalith").median,
            3.0,
            note=workload,
        ),
        Bar(
            "compress: reference / ours",
            compressing.ratio("reference", "megalith").median,
            1.0,
            note=workload,
        ),
    ]
    print_bars(bars)
    content = {
        "benchmark": "gather_ranks",
        "command": command_line(arguments),
        "machine": here,
        "versions": versions(["torch", "obstore", "megalith"]),
        "settings": asdict(simulation),
        "seconds": {str(size): times for size, times in found.items()},
        "cpu_seconds": {"step": stepping.seconds, "compress": compressing.seconds},
        "bars": bars,
    }
    if options.output or not options.quick:
        write_result(options.output or result_path("gather_ranks"), content)


if __name__ == "__main__":
    main(sys.argv[1:])
