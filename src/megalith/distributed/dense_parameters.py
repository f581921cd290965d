"""The dense parameters of a model: all but the anchors of its embedding collections."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

ANCHOR = "rows_anchor"
"""The parameter of a collection through which `requires_grad_` of a model reaches it; it stays 0."""


def dense_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over `named_parameters` of a model, without the anchors of its collections."""
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] != ANCHOR:
            yield name, parameter
