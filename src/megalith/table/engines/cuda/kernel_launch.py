"""LaunchedKernel: a Triton kernel whose repeated launches skip most of Triton's work on the host.

Triton binds, specializes and hashes all arguments at each launch, which takes longer than many of the kernels
here run. A call whose constants and kinds of arguments were seen before goes to the compiled kernel directly.
A caller on the hot path binds the constants once (`bind`) and keeps the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megalith.table.engines.cuda.stream_order import hold
from megalith.table.engines.cuda.triton_runtime import INTERPRETED

Bound = Callable[..., None]
"""A kernel with its constants: call it with the grid and the other arguments."""


def launched(kernel: Any) -> LaunchedKernel:
    """Make a kernel that is launched from the host."""
    return LaunchedKernel(kernel)


class LaunchedKernel:
    """A kernel and its compiled variants."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._bound: dict[tuple[object, ...], Bound] = {}

    def bind(self, **constants: Any) -> Bound:
        """Fix the constants of a kernel."""
        return _interpreted(self._kernel, constants) if INTERPRETED else _BoundKernel(self._kernel, constants)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            key = tuple(constants.items())
            bound = self._bound.get(key)
            if bound is None:
                bound = self._bound[key] = self.bind(**constants)
            bound(grid, *arguments)

        return launch


def _interpreted(kernel: Any, constants: dict[str, Any]) -> Bound:
    def launch(grid: tuple[int, ...], *arguments: Any) -> None:
        kernel[grid](*arguments, **constants)

    return launch


class _BoundKernel:
    """The variants of a kernel with fixed constants.

    Triton compiles a kernel for the types of its arguments, for pointers that are aligned or not, and for
    integers that fit in 32 bits or not.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self._kernel = kernel
        self._constants = constants
        self._compiled: dict[tuple[object, ...], Any] = {}
        self._rest: tuple[object, ...] = ()

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        device = torch._C._cuda_getDevice()
        key: list[object] = [device]
        numbers: list[object] = []
        for argument in arguments:
            if isinstance(argument, Tensor):  # an address is passed on faster than a tensor
                address = argument.data_ptr()
                numbers.append(address)
                key += (argument.dtype, address & 15)
            else:
                numbers.append(argument)
                key.append(not isinstance(argument, int) or -(2**31) <= argument < 2**31)
        hold(argument for argument in arguments if isinstance(argument, Tensor))
        kinds = tuple(key)
        compiled = self._compiled.get(kinds)
        if compiled is None:
            self._rest = tuple(self._constants[name] for name in self._kernel.arg_names[len(arguments) :])
            self._compiled[kinds] = self._kernel[grid](*arguments, **self._constants)
            return
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
            *numbers,
            *self._rest,
        )
