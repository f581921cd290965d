"""Integer division: makes the quotients of a program's integers safe.

The CPU raises SIGFPE, which ends the process, where the smallest integer is divided by -1; torch does not
check for it in `div` with the rounding mode "trunc". The operands may come from a request or from weights
that training pushes, so a trial of the version cannot find it. The guarded forms return what the other modes
do: the smallest integer itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_DIVIDING = ("div", "divide", "floor_divide", "remainder", "fmod")


def divide(dividend: Tensor, divisor: Tensor | float, *, rounding_mode: str | None = None) -> Tensor:
    """Return the quotient, as `torch.div`; for the smallest integer and -1, the smallest integer."""
    kind = torch.result_type(dividend, divisor)
    if rounding_mode is None or kind not in _SIGNED:
        return torch.div(dividend, divisor, rounding_mode=rounding_mode)
    dividend = dividend.to(kind)
    divisor = (
        divisor.to(kind) if isinstance(divisor, Tensor) else torch.tensor(divisor, dtype=kind, device="cpu")
    )
    negates = divisor == -1
    quotient = torch.div(dividend, divisor.masked_fill(negates, 1), rounding_mode=rounding_mode)
    return torch.where(negates, -quotient, quotient)


def divide_in_place(dividend: Tensor, divisor: Tensor | float, *, rounding_mode: str | None = None) -> Tensor:
    """Replace a tensor by its quotient; see `divide`."""
    return dividend.copy_(divide(dividend, divisor, rounding_mode=rounding_mode))


def divide_into(
    dividend: Tensor, divisor: Tensor | float, *, rounding_mode: str | None = None, out: Tensor
) -> Tensor:
    """Write a quotient to a tensor of its shape; see `divide`."""
    return out.copy_(divide(dividend, divisor, rounding_mode=rounding_mode))


def _guarded() -> dict[Any, Callable[..., Tensor]]:
    forms: dict[Any, Callable[..., Tensor]] = {}
    for packet, guarded in (
        (aten.div, divide),
        (aten.divide, divide),
        (aten.div_, divide_in_place),
        (aten.divide_, divide_in_place),
    ):
        for name in packet.overloads():
            if "mode" in name:
                forms[getattr(packet, name)] = divide_into if "out" in name else guarded
    return forms


_GUARDED = _guarded()


def guard_divisions(module: torch.nn.Module) -> None:
    """Replace the divisions of a loaded program by guarded ones."""
    if not isinstance(module, torch.fx.GraphModule):
        return
    found = [node for node in module.graph.nodes if node.target in _GUARDED]
    for node in found:
        node.target = _GUARDED[node.target]
    if found:
        module.recompile()


def divides_integers(module: torch.nn.Module) -> bool:
    """Return whether a program divides integers; compilers do not guard all of these divisions."""
    if not isinstance(module, torch.fx.GraphModule):
        return False
    return any(_is_integer_division(node) for node in module.graph.nodes)


def _is_integer_division(node: torch.fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target not in _GUARDED.values():
        packet = getattr(node.target, "overloadpacket", None)
        if packet is None or packet.__name__.rstrip("_") not in _DIVIDING:
            return False
    traced = node.meta.get("val")
    return not isinstance(traced, Tensor) or not traced.is_floating_point()
