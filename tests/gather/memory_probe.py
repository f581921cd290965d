"""Prints how much a phase adds to this process's memory at most: `memory_probe.py PHASE PEERS DIRECTORY`.

Run in a process of its own, so that nothing freed earlier is used again unseen. Phases: fetch, update, and
the same update with all peers at once, which is what the others must not be.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from megalith.gather.compress import compress
from megalith.gather.fetch import FetchOptions
from megalith.gather.gatherer import Gatherer
from megalith.gather.merge import GatherResult, merge
from megalith.gather.packing import unpack_codes, unpack_indices
from megalith.gather.payload import Label
from megalith.gather.plan import Plan, payload_key
from megalith.gather.reduce import clip_factors
from megalith.gather.schema import Schema
from megalith.gather.store import local_store
from megalith.gather.update import OuterUpdate

RUN, WINDOW, BUDGET = "run-m", 1, 6 << 20
SIDE = 2048


def rss(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(field)


def settle() -> int:
    """Gives free memory back to the system and forgets the peak so far; returns what is in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return rss("VmRSS")


def prepare(schema: Schema, peers: int, directory: Path) -> Plan:
    """Payloads of so many peers in a local store: the same values, each under its own label."""
    made = compress({"w": torch.randn(schema.parameters[0].shape)}, schema)
    for uid in range(peers):
        path = directory / "store" / payload_key(RUN, WINDOW, uid)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(made.to_bytes(Label(RUN, WINDOW, uid)))
    return Plan(
        run=RUN,
        window=WINDOW,
        schema=schema.digest,
        primary=tuple(range(peers)),
        memory_budget=BUDGET,
        deadline=120.0,
    )


def fetch(plan: Plan, schema: Schema, directory: Path) -> tuple[GatherResult, int]:
    store = local_store(directory / "store")
    rank = Gatherer(
        plan, schema, {"default": store}, options=FetchOptions(spool_directory=directory / "spool")
    )
    rank.fetch(plan.primary)
    return merge([rank.partial()]), rank.peak_bytes


def all_at_once(result: GatherResult, weight: torch.Tensor) -> None:
    """The same step with every peer's values side by side."""
    spec = result.schema.parameters[0]
    factors = clip_factors(result.norm_table(), result.plan.update)
    starts = torch.arange(spec.rows)[:, None] * spec.size
    places, values = [], []
    for number, uid in enumerate(result.uids):
        payload = result.payloads[uid]
        codes = unpack_codes(payload.codes(0, 0, spec.rows), spec.keep, spec.bits).long()
        places.append((unpack_indices(payload.indices(0, 0, spec.rows), spec.keep) + starts).flatten())
        values.append((payload.lookup(0) * factors[number, 0])[codes].flatten())
    total = torch.zeros(spec.rows * spec.size)
    total.scatter_reduce_(0, torch.cat(places), torch.cat(values), "mean", include_self=False)
    height, width = spec.chunk
    tiles = total.view(*spec.bands, height, width).permute(0, 2, 1, 3)
    weight -= tiles.reshape(weight.shape)


def main(phase: str, directory: Path, counts: list[int]) -> None:
    torch.set_num_threads(1)
    schema, tiny = (Schema.of({"w": torch.zeros(side, side)}) for side in (SIDE, 64))
    warm, _ = fetch(prepare(tiny, 1, directory / "warm"), tiny, directory / "warm")
    OuterUpdate(tiny).apply({"w": torch.zeros(64, 64)}, warm)
    plan = prepare(schema, max(counts), directory)
    weight = torch.zeros(SIDE, SIDE).add_(0.0)  # every page of it is there before measuring
    before, found = settle(), []
    for peers in counts:
        ledger = 0
        chosen = replace(plan, primary=tuple(range(peers)))
        settle()
        result, fetched = fetch(chosen, schema, directory)
        if phase == "fetch":
            ledger = fetched
        else:
            settle()
            if phase == "update":
                ledger = OuterUpdate(schema).apply({"w": weight}, result).peak_bytes
            else:
                all_at_once(result, weight)
        grown = rss("VmHWM") - before
        assert len(result.uids) == peers, result.skipped_uids
        total = sum(result.payloads[uid].header.size for uid in result.uids)
        result.close()
        found.append({"peers": peers, "grown": grown, "ledger": ledger, "payloads": total})
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [int(count) for count in sys.argv[3:]])
