"""Compiles the kernels of the cuda engine for a GPU that need not be there.

    python tests/table/engines/compile_kernels.py [OPTIMIZER ... | calls]      (default: all)

Triton's interpreter accepts code that its compiler rejects. Here the calls of an engine run on the CPU, and
each launch compiles its kernel, down to machine code, instead of running it. What the calls compute has no
meaning. Prints the number of kernels.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before the first import of triton

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megalith import SGD, Capacity, MinCount, TableConfig
from megalith.ops import Bags, OutputSlice, Pooling
from megalith.table.engines.cuda import engine as cuda_engine
from megalith.table.engines.cuda import launch_group, triton_runtime
from megalith.table.engines.cuda.engine import CudaEngine
from megalith.table.engines.cuda.engine_group import CudaEngineGroup
from megalith.table.engines.group import Found
from megalith.table.table_data import Step, Update
from tests.table.engines.cuda_configs import CONFIGS, GROUPS, OPTIMIZERS

WITH_KERNELS = [name for name in OPTIMIZERS if name != "in_torch"]
TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
}


class CompiledKernels:
    """What was compiled."""

    def __init__(self) -> None:
        self.known: set[tuple[Any, ...]] = set()

    def launch(self, bound: Any, grid: Any, *arguments: Any) -> None:
        """Compile the kernel of a launch."""
        kernel, constants = bound._kernel, bound._constants
        names = kernel.arg_names
        signature, constexprs = {}, {}
        for number, name in enumerate(names):
            if number < len(arguments):
                signature[name] = _kind(arguments[number])
            else:
                signature[name] = "constexpr"
                constexprs[(number,)] = constants[name]
        options = {key: value for key, value in constants.items() if key not in names}
        key = (kernel.__name__, *signature.values(), *constexprs.values(), *options.items())
        if key not in self.known:
            self.known.add(key)
            source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
            triton.compile(source, target=TARGET, options=options)


def _kind(argument: Any) -> str:
    if isinstance(argument, Tensor):
        return POINTERS[argument.dtype]
    if isinstance(argument, float):
        return "fp32"
    return "i32" if -(2**31) <= argument < 2**31 else "i64"


def call_everything(config: TableConfig, *, all_calls: bool) -> None:
    """The launches of a table."""
    engine = CudaEngine(config)
    ids = torch.arange(100)
    step = Step([0.1] * len(config.segments), 0, 1.0, 0.0, 0)
    offsets = torch.arange(0, 101, 4)
    parts = (OutputSlice(0, 0, 0, config.dim),)
    pooling = Pooling(((25, config.dim),), {"t": (Bags(offsets, parts, torch.ones(100)),)})
    engine.table.reserve(1000)
    engine.update(ids, None, [torch.ones(100, config.dim)], None, step)
    engine.update(ids, None, [torch.ones(25, config.dim)], pooling, step)
    if not all_calls:
        return
    engine.read(ids)
    with engine.scanning():
        engine.find(ids)
    engine.pool(ids, None, pooling, [torch.zeros(25, config.dim)])
    single = Pooling(((100, config.dim),), {"t": (Bags(torch.arange(101), parts, first=0),)})
    engine.pool(ids, None, single, [torch.zeros(100, config.dim)])
    rows = torch.arange(100, dtype=torch.int32)
    launch_group.assign_in_order(engine.group, rows, torch.ones(100, config.dim), add=True, time=0)
    engine.table.write_weights(rows, torch.ones(100, config.dim))
    engine.table.copy_states(rows, torch.ones(100, engine.layout.state_floats), write=True)
    engine.table.copy_states(rows, torch.ones(100, engine.layout.state_floats), write=False)
    engine.table.write_header(8, rows, torch.ones(100, dtype=torch.int64))
    engine.table.write_header(12, rows, rows, 1)
    engine.table.write_header(12, rows, rows, 2)
    engine.table.move(rows[:50], rows[50:])
    engine.table.remove(ids, rows)
    engine.table.rebuild_index(ids, rows)
    engine.table.reserve(100_000)


def call_group(configs: list[TableConfig]) -> None:
    """The launches of tables of different dims."""
    group = CudaEngineGroup({config.name: CudaEngine(config) for config in configs})
    ids = {config.name: torch.arange(100) for config in configs}
    offsets = torch.arange(0, 101, 4)
    shapes = tuple((25, config.dim) for config in configs)
    bags = {
        config.name: (Bags(offsets, (OutputSlice(k, 0, 0, config.dim),), torch.ones(100)),)
        for k, config in enumerate(configs)
    }
    sliced = {
        config.name: (Bags(offsets, (OutputSlice(k, 0, k, config.dim - 1),)),)
        for k, config in enumerate(configs)
    }
    single = {
        config.name: (Bags(torch.arange(101), (OutputSlice(k, 0, 0, config.dim),), first=0),)
        for k, config in enumerate(configs)
    }
    update = Update(0, 0, 1.0, 0.0, {c.name: [0.1] * len(c.segments) for c in configs})
    for engine in group._cuda:
        engine.table.reserve(1000)
        engine.tier = None  # its rows mean nothing here
    for rows, of_tables in ((25, bags), (25, sliced), (100, single)):
        pooling = Pooling(tuple((rows, columns) for _, columns in shapes), of_tables)
        found = Found()
        group.pool(ids, found, pooling)
        grads = [torch.ones(rows, columns) for _, columns in shapes]
        group.update(ids, found, dict.fromkeys(ids, grads), pooling, update)
    counts = torch.full((1, len(configs)), 100)
    group.read_blocks(ids, {}, counts, torch.empty(sum(100 * config.dim for config in configs)))


def main(names: list[str]) -> int:
    """Compile the kernels of optimizers, by name, or of all other calls: "calls"."""
    compiled = CompiledKernels()
    triton_runtime._BoundKernel.__call__ = lambda bound, *a: compiled.launch(bound, *a)  # type: ignore[method-assign,assign]
    cuda_engine.find_device = lambda: torch.device("cpu")
    for name in [name for name in names if name != "calls"]:
        dim = 1 if name == "batch_softmax" else 8
        call_everything(TableConfig("t", dim=dim, optimizer=OPTIMIZERS[name]), all_calls=False)
    if "calls" in names:
        for name in ("segments", "float16", "zeros"):
            call_everything(CONFIGS[name], all_calls=True)
        policies = {"admission": MinCount(2), "eviction": Capacity(rows=10**6, score="lfu")}
        counted = TableConfig("t", dim=8, optimizer=SGD(0.1), **policies)  # type: ignore[arg-type]
        call_everything(counted, all_calls=True)
        tiered = TableConfig("t", dim=64, optimizer=SGD(0.1), device_bytes=4096)
        call_everything(tiered, all_calls=True)
        for segments in (CONFIGS["segments"].segments, CONFIGS["float16"].segments):
            call_everything(TableConfig("t", segments=segments, deterministic=False), all_calls=False)
        for name in ("rowwise_adagrad", "amsgrad_row", "delay_compensated_adam", "options", "segments"):
            call_group(GROUPS[name])
        for name in ("precisions", "atomic", "atomic_segments", "wide"):
            call_group(GROUPS[name])
    print(f"{len(compiled.known)} kernels compiled for {TARGET.backend} {TARGET.arch}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [*WITH_KERNELS, "calls"]))
