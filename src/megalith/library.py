"""Ops as torch knows them: names under `torch.ops.megalith` that torch.compile traces through.

An op has an implementation in native code for CPU tensors, a twin in plain torch for every other
device (and for the CPU where the native module is not built), and a fake that tells shapes. Gradients are
the callers' business: an autograd.Function around an op costs a tenth of a registered formula.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

_LIBRARY = torch.library.Library("megalith", "DEF")


def native_module() -> ModuleType | None:
    """megalith's native module, None where it is not built."""
    try:
        from megalith import _native
    except ImportError:
        return None
    return _native


def define(
    schema: str, *, native: Callable[..., Any], twin: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Adds the op and returns what calls it."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, twin, "CompositeExplicitAutograd")
    if native_module() is not None:
        _LIBRARY.impl(name, native, "CPU")
    torch.library.register_fake(f"megalith::{name}", fake, lib=_LIBRARY)
    call: Callable[..., Any] = getattr(torch.ops.megalith, name).default
    return call


def new_size() -> Any:
    """In a fake: a size that only the data knows."""
    return torch.library.get_ctx().new_dynamic_size()
