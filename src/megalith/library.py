"""The native module and the registration of ops under `torch.ops.megalith`, which torch.compile can trace.

An op has a native implementation for CPU tensors, a reference implementation in plain torch for all other
devices (and for the CPU if the native module is not built), and a fake that returns shapes. Callers define
gradients: an autograd.Function around an op costs a fraction of a registered formula.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.utils.dlpack import from_dlpack

from megalith.errors import MissingDependencyError

_LIBRARY = torch.library.Library("megalith", "DEF")

_LARGE = 8 << 20
"""Bytes above which the page faults of a new tensor cost more than the rest of most ops."""

_SMALL = 1 << 16
"""Bytes below which new memory costs little."""

_NO_SPAN: AbstractContextManager[Any] = nullcontext()


def span(name: str) -> AbstractContextManager[Any]:
    """Name a phase of a step in torch's profiler."""
    return torch.profiler.record_function(name) if profiler._is_profiler_enabled else _NO_SPAN


def native_module() -> ModuleType | None:
    """Return megalith's native module, or None if it is not built."""
    try:
        from megalith import _native
    except ImportError:
        return None
    return _native


def new_tensor(*shape: int, dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """Allocate a CPU tensor for a result of native code, on huge pages if it is large."""
    out = torch.empty(shape, dtype=dtype, device="cpu")
    native = native_module()
    if native is not None and out.nbytes >= _LARGE:
        native.prefer_huge_pages(out)
    return out.zero_() if zero else out


def keep_freed_memory(size: int) -> None:
    """Let the C library keep freed memory for the next large message, for the whole process (glibc only)."""
    # Otherwise it returns the memory of every message of some megabytes to the system, and the page faults of
    # the next one take as long as its transport. A setting in the environment (MALLOC_TRIM_THRESHOLD_ or
    # MALLOC_MMAP_THRESHOLD_) takes precedence.
    native: Any = native_module()
    if native is not None and not any(f"MALLOC_{kind}_THRESHOLD_" in os.environ for kind in ("TRIM", "MMAP")):
        native.keep_freed_memory(size)


def return_freed_memory(kept: int = 0) -> None:
    """Return the memory that the C library keeps for later to the operating system, if it is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(kept))


class MessageBuffers:
    """Memory for messages; it is used again when the last tensor that shares it is freed. Thread-safe.

    The first write of a page of new memory costs several times as much as to fill it.
    """

    def __init__(self, largest: int | None = None, *, huge_pages: bool = True) -> None:
        native: Any = native_module()
        self._native: Any = None if native is None else native.Buffers(huge_pages)
        self._largest = sys.maxsize if largest is None else largest

    def new(self, size: int) -> Tensor:
        """Return memory for a message."""
        # returns: uint8 [size], uninitialized.
        if self._native is None or not _SMALL <= size < self._largest:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        return from_dlpack(self._native.get(size))

    def floats(self, rows: int, columns: int) -> Tensor:
        """Return memory for rows of floats."""
        # returns: float32 [rows, columns], uninitialized.
        return self.new(4 * rows * columns).view(torch.float32).view(rows, columns)


def define_op(
    schema: str, *, native: Callable[..., Any], reference: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Register an op."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    if native_module() is not None:
        _LIBRARY.impl(name, native, "CPU")
    torch.library.register_fake(f"megalith::{name}", fake, lib=_LIBRARY)
    call: Callable[..., Any] = getattr(torch.ops.megalith, name).default
    return call


def copy_repeated(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy repeated arguments of an autograd.Function: torch.compile does not accept a tensor twice."""
    if not torch.compiler.is_compiling():
        return list(tensors)
    return [t.clone() if any(t is other for other in tensors[:k]) else t for k, t in enumerate(tensors)]


def new_size() -> Any:
    """Return, inside a fake, a size that depends on the data."""
    return torch.library.get_ctx().new_dynamic_size()


def import_extra(module: str, problem: str, extra: str) -> Any:
    """Import a module of an optional package; without it, raise the error that names its extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError.of_extra(problem, extra) from error
