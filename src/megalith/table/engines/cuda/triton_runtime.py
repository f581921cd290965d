"""Where the kernels run: on a CUDA device, or on CPU tensors in Triton's interpreter.

With TRITON_INTERPRET=1 in the environment before the first import of triton, the kernels run in Python on CPU
tensors. It is slow and meant for tests. This module is the only one that decides between the two.
"""

from __future__ import annotations

import torch

from megalith.errors import MissingDependencyError, UsageError

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
    """Return the device of new tables."""
    if INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            'engine="cuda" needs an NVIDIA GPU and a torch build with CUDA, and torch finds none: '
            'use engine="cpu", and for tables on parameter servers Servers(..., gpus=1)'
        )
    return torch.device("cuda", torch.cuda.current_device())


def padded(n: int) -> int:
    """Return the next power of two, at least 1."""
    return 1 << max(0, n - 1).bit_length()


__all__ = ["INTERPRETED", "PLAIN_ARITHMETIC", "find_device", "padded", "tl", "triton"]
