"""LaunchedKernel: a Triton kernel whose repeated launches skip most of Triton's work on the host.

Triton binds, specializes and hashes all arguments at each launch, which takes longer than many of the kernels
here run. A call whose constants and kinds of arguments were seen before goes to the compiled kernel directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megalith.table.engines.cuda.triton_runtime import INTERPRETED


def launched(kernel: Any) -> Any:
    """Make a kernel that is launched from the host.

    Args:
        kernel: A function decorated with triton.jit; its constants come after its other parameters.

    Returns:
        An object that is launched in the same way; the kernel itself in the interpreter.
    """
    return kernel if INTERPRETED else LaunchedKernel(kernel)


class LaunchedKernel:
    """A kernel and its compiled variants.

    Args:
        kernel: A function decorated with triton.jit.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._names: list[str] = kernel.arg_names
        self._compiled: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            device = torch.cuda.current_device()
            key = (device, *map(_kind, arguments), *constants.items())
            known = self._compiled.get(key)
            if known is None:
                compiled = self._kernel[grid](*arguments, **constants)
                rest = tuple(constants[name] for name in self._names[len(arguments) :])
                self._compiled[key] = compiled, rest
                return
            compiled, rest = known
            compiled.run(
                grid[0],
                grid[1] if len(grid) > 1 else 1,
                1,
                torch._C._cuda_getCurrentRawStream(device),
                compiled.function,
                compiled.packed_metadata,
                None,  # no metadata and hooks: they are for Triton's profiler
                None,
                None,
                *arguments,
                *rest,
            )

        return launch


def _kind(argument: Any) -> object:
    """What Triton compiles a kernel for: the type of an argument, and whether a pointer is aligned."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return -(2**31) <= argument < 2**31
    return float
