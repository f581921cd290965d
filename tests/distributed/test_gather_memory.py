"""Memory of whole windows as the operating system counts it, at 1, 2 and 4 ranks: within the budget."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import pytest
import torch

from megalith.gather import (
    FetchOptions,
    GatherPlan,
    Label,
    OuterUpdate,
    PayloadSchema,
    Ranks,
    compress,
    open_object_store,
    payload_key,
    run_window,
)
from tests.distributed.ranks import run_ranks

RUN = "memory"
OVERHEAD = 4 << 20  # the interpreter's own objects, and what the allocator rounds up
WINDOWS = (1, 2, 3)  # the first one loads code, and makes threads and buffers of the client
_M_ARENA_MAX = -8


def bytes_of(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(field)


def settle() -> int:
    """Returns free memory to the system and forgets the peak so far; returns what is in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return bytes_of("VmRSS")


def write(folder: Path, side: int, windows: tuple[int, ...], peers: int) -> None:
    schema = PayloadSchema.of({"w": torch.zeros(side, side)})
    made = compress({"w": torch.randn(side, side, generator=torch.Generator().manual_seed(0))}, schema)
    for window in windows:
        for uid in range(peers):
            path = folder / payload_key(RUN, window, uid)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(made.to_bytes(Label(RUN, window, uid)))


def grown(folder: str, size: int, peers: int, budget: int) -> tuple[list[int], int]:
    """By window: how far the high-water mark exceeded what was in use before; the ledger's peak."""
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    ranks = Ranks.of_group(timeout=60.0)
    stores = {"default": open_object_store(folder)}
    options = FetchOptions(spool_from=1 << 16)
    found, peak = [], 0
    weights = {"w": torch.zeros(size, size).add_(0.0)}  # every page of it is there before measuring
    schema = PayloadSchema.of(weights)
    update = OuterUpdate(schema)
    for window in WINDOWS:
        plan = GatherPlan(
            run=RUN,
            window=window,
            schema=schema.digest,
            primary=tuple(range(peers)),
            memory_budget=budget,
            deadline=120.0,
        )
        before = settle()
        report = run_window(
            plan if ranks.leads else None, weights, update, stores, ranks=ranks, options=options
        )
        found.append(bytes_of("VmHWM") - before)
        assert report.update is not None, report.decision
        assert len(report.update.uids) == peers
        peak = max(peak, report.update.peak_bytes)
    return found[1:], peak


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's clear_refs")
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("side", "peers", "budget"),
    [(2048, 8, 16 << 20), pytest.param(4096, 8, 64 << 20, marks=pytest.mark.soak)],
    ids=["16 MiB", "64 MiB"],
)
def test_a_window_stays_within_its_budget(
    tmp_path: Path, side: int, peers: int, budget: int, ranks: int
) -> None:
    write(tmp_path, side, WINDOWS, peers)
    for windows, ledger in run_ranks(grown, str(tmp_path), side, peers, budget, world_size=ranks):
        assert ledger <= budget
        assert max(windows) <= budget + OVERHEAD, windows
        assert windows[-1] - windows[0] <= OVERHEAD, windows  # nothing accumulates over windows
