"""The dense parameters of a model: all but the anchors of its embedding collections."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

ANCHOR = "rows_anchor"
"""The parameter of a collection through which `requires_grad_` of a model reaches it; it stays 0."""


def is_anchor(name: str) -> bool:
    """Return whether a parameter of this name, in any module, is the anchor of a collection."""
    return name.rpartition(".")[2] == ANCHOR


def dense_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over `named_parameters` of a model, without the anchors of its collections."""
    return ((name, parameter) for name, parameter in model.named_parameters() if not is_anchor(name))
