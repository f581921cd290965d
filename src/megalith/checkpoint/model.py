"""A model as a checkpoint sees it: collections by module path, and everything dense."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megalith.errors import CheckpointError, UsageError
from megalith.nn import EmbeddingCollection


def collections_of(model: nn.Module) -> dict[str, EmbeddingCollection]:
    """The collections of a model by module path ("" if the model is one)."""
    return {name: m for name, m in model.named_modules() if isinstance(m, EmbeddingCollection)}


def dense_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, without the collections' rows."""
    state: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingCollection):
            continue
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise UsageError(
                f"module {path!r} has extra state, which a checkpoint cannot hold: use progress="
            )
        own: dict[str, Any] = dict(module._parameters)
        transient = module._non_persistent_buffers_set
        own |= {name: b for name, b in module._buffers.items() if name not in transient}
        state |= {f"{path}.{name}".lstrip("."): t for name, t in own.items() if t is not None}
    return state


def load_dense(
    model: nn.Module, saved: dict[str, Tensor], allow_missing: bool = False
) -> tuple[list[str], list[str]]:
    """Copies dense weights into the model. Raises CheckpointError naming what does not fit.

    With allow_missing, returns the names of the model's that were left alone and of those not used.
    """
    state = dense_state(model)
    missing, extra = sorted(set(state) - set(saved)), sorted(set(saved) - set(state))
    if (missing or extra) and not allow_missing:
        raise CheckpointError(
            f"dense weights do not fit this model: the checkpoint lacks {missing}, the model lacks {extra}"
        )
    unfit = []
    for name in sorted(set(state) & set(saved)):
        there, here = saved[name].shape, state[name].shape
        if there == here:
            continue
        if not allow_missing:
            raise CheckpointError(f"dense weight {name!r} is {list(there)} when saved, {list(here)} here")
        unfit.append(name)
    for name in set(state) & set(saved) - set(unfit):
        state[name].data.copy_(saved[name])
    return missing + unfit, extra
