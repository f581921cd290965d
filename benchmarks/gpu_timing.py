"""Times and speeds on one GPU, for table_gpu.py.

Without a GPU everything runs on the CPU, so that a test can run the benchmark in Triton's interpreter; such
numbers mean nothing.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from triton.testing import do_bench

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
Call = Callable[[], object]


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def release_memory() -> None:
    """Returns the memory of what was deleted, pinned memory included."""
    gc.collect()
    if ON_GPU:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def median_ms(call: Call) -> float:
    """The median of single calls; the cache is emptied before each."""
    if ON_GPU:
        return float(do_bench(call, warmup=20, rep=80, return_mode="median"))
    return wall_ms(call, 1)


def wall_ms(step: Call, steps: int) -> float:
    """Milliseconds per step of many steps in a row."""
    synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return (time.perf_counter() - begin) / steps * 1e3


def row_of_calls_ms(calls: list[Call]) -> float:
    """Milliseconds on the GPU per call, which does not wait for the host: it has all launches in advance."""
    if not ON_GPU:
        return statistics.median(wall_ms(call, 1) for call in calls)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(10_000_000)
    begin.record()
    for call in calls:
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / len(calls)


def kernel_ms(step: Call, steps: int) -> dict[str, float]:
    """Milliseconds on the GPU per step, by kernel, the longest first."""
    step()
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            step()
        synchronize()
    times = {e.key[:60]: e.device_time_total / steps / 1e3 for e in found.key_averages()}
    return {name: ms for name, ms in sorted(times.items(), key=lambda pair: -pair[1]) if ms > 0}


def with_floors(
    kernels: Mapping[str, float], floors: Mapping[str, float], most: int = 20
) -> dict[str, object]:
    """The longest kernels, with the memory floor of those whose bytes are known."""
    return {
        name: {"ms": ms, "memory_floor_ms": floors[name], "times_floor": ms / floors[name]}
        if name in floors
        else {"ms": ms}
        for name, ms in list(kernels.items())[:most]
    }


def copy_speed(size: int) -> float:
    """Bytes read and written per second by a copy on the GPU, in TB/s."""
    source = torch.empty(size, dtype=torch.int8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * size / median_ms(lambda: target.copy_(source)) / 1e9


def bus_speed(size: int) -> dict[str, float]:
    """Bytes per second of copies between pinned host memory and the GPU, in GB/s."""
    host = torch.empty(size, dtype=torch.int8, pin_memory=ON_GPU)
    device = torch.empty_like(host, device=DEVICE)
    to_gpu = median_ms(lambda: device.copy_(host, non_blocking=True))
    to_host = median_ms(lambda: host.copy_(device, non_blocking=True))
    return {"to_gpu_gb_per_s": size / to_gpu / 1e6, "to_host_gb_per_s": size / to_host / 1e6}


def power_law(n: int, ids: int) -> Tensor:
    """Ids 1 to `ids` with probabilities falling as rank ** -1.05."""
    u = torch.rand(n, device=DEVICE, dtype=torch.float64)
    top = float(ids) ** -0.05
    return ((u * (top - 1) + 1) ** -20.0).long().clamp(1, ids)
