"""Where the kernels run, and how they are launched.

The kernels run on a CUDA device, or on CPU tensors in Triton's interpreter: with TRITON_INTERPRET=1 in
the environment before the first import of triton, in Python. That is slow and meant for tests. This
module is the only one that decides between the two.

Triton binds, specializes and hashes all arguments at each launch, which takes longer than many of the
kernels here run. A call of a `LaunchedKernel` whose constants and kinds of arguments were seen before
goes to the compiled kernel directly. A caller on the hot path binds the constants once (`bind`) and keeps
the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megalith.errors import MissingDependencyError, UsageError
from megalith.table.engines.cuda.streams import hold

__all__ = ["INTERPRETED", "PLAIN_ARITHMETIC", "find_device", "padded", "tl", "triton"]


try:
    import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
    import triton.language as tl  # type: ignore[import-untyped,import-not-found,unused-ignore]
except ImportError as error:
    raise MissingDependencyError(
        "the cuda engine needs triton, which comes with torch on Linux: run `pip install triton`, "
        'or use engine="cpu"'
    ) from error

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether the kernels run in the interpreter, on CPU tensors."""

PLAIN_ARITHMETIC = {} if INTERPRETED else {"enable_fp_fusion": False}
"""Launch options of every kernel: a * b + c rounds twice, as in the other engines."""


def find_device() -> torch.device:
    if INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            'engine="cuda" needs an NVIDIA GPU and a torch build with CUDA, and torch finds none: '
            'use engine="cpu", and for tables on parameter servers Servers(..., gpus=1)'
        )
    return torch.device("cuda", torch.cuda.current_device())


def padded(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


Bound = Callable[..., None]  # A kernel with its constants: call it with the grid and the other arguments


def launched(kernel: Any) -> LaunchedKernel:
    return LaunchedKernel(kernel)


class LaunchedKernel:
    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._bound: dict[tuple[object, ...], Bound] = {}

    def bind(self, **constants: Any) -> Bound:
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
