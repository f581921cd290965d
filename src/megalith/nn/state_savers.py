"""Tools that save the state_dict of one rank alone. Rows that other ranks own would be lost, so they raise.

Such a tool is recognised by its functions on the call stack:

    function              called when                          looks for
    check_state_caller    state_dict() is called               a function of `_SAVERS`, or a full_state_dict
    check_trainer         tables are spread over the ranks,    Lightning's ModelCheckpoint and its strategies
                          usually at the first batch           that fork, which would raise after training
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from megalith.errors import UsageError

_SAVE = "call megalith.checkpoint.save(model, path) on all ranks instead, and checkpoint.load to resume"
_NO_CALLBACK = (
    "pass enable_checkpointing=False to the Trainer, and call megalith.checkpoint.save(model, path) on all "
    "ranks instead, for example in on_train_epoch_end"
)
_NO_FORK = (
    'use strategy="ddp": the strategies "ddp_fork", "ddp_spawn" and "ddp_notebook" return the state_dict of '
    "rank 0 to the first process and end the ranks, with their rows"
)
_STRATEGY = ("lightning.pytorch.strategies.strategy", "lightning_module_state_dict")
_LAUNCHER = "lightning.pytorch.strategies.launchers.multiprocessing"
_SAVERS = {
    _STRATEGY: ("Lightning", _SAVE),
    ("lightning.pytorch.callbacks.model_checkpoint", "_save_checkpoint"): ("Lightning", _NO_CALLBACK),
    (_LAUNCHER, "_collect_rank_zero_results"): ("Lightning", _NO_FORK),
    ("lightning.fabric.strategies.strategy", "get_module_state_dict"): ("Lightning Fabric", _SAVE),
    ("accelerate.accelerator", "get_state_dict"): ("accelerate", _SAVE),
}
"""Functions that call state_dict() on all ranks and keep the result of rank 0 alone, with the remedy."""

_FULL = ("torch.distributed.checkpoint.state_dict", "_get_model_state_dict")
_OTHER_NAMES = (("pytorch_lightning.", "lightning.pytorch."), ("lightning_fabric.", "lightning.fabric."))


def check_state_caller(size: int) -> None:
    """Raise if the caller of state_dict() keeps the rows of one rank alone."""
    found: tuple[str, str] | None = None
    for where, frame in _callers():
        if where == _FULL and getattr(frame.f_locals.get("info"), "full_state_dict", False):
            found = "StateDictOptions(full_state_dict=True)", f"{_SAVE}; full_state_dict=False works too"
        found = _SAVERS.get(where, found)  # the outermost one has the best remedy
    if found is not None:
        tool, remedy = found
        raise UsageError(
            f"{tool} saves the state_dict of rank 0 alone, but the rows are spread over {size} ranks and "
            f"those of the other ranks would be lost: {remedy}"
        )


def check_trainer(size: int) -> None:
    """Raise if Lightning's Trainer is about to train what it cannot save."""
    for (module, function), frame in _callers():
        if (module, function) == (_LAUNCHER, "_wrapping_function"):
            raise UsageError(f"the tables are spread over {size} ranks of Lightning: {_NO_FORK}")
        trainer = frame.f_locals.get("self") if module == "lightning.pytorch.trainer.trainer" else None
        if trainer is not None and _saves_rank_0(trainer):
            raise UsageError(
                "Lightning's ModelCheckpoint saves the state_dict of rank 0 alone, but the rows are spread "
                f"over {size} ranks: {_NO_CALLBACK}"
            )


def _callers() -> Iterator[tuple[tuple[str, str], FrameType]]:
    """Yield module and function name of each caller, from the inside out, and its frame."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        for other, name in _OTHER_NAMES:
            if module.startswith(other):
                module = name + module.removeprefix(other)
        yield (module, frame.f_code.co_name), frame
        frame = frame.f_back


def _saves_rank_0(trainer: Any) -> bool:
    """Return whether a Trainer that fits has Lightning's own ModelCheckpoint and saves the usual way."""
    method = getattr(getattr(trainer, "strategy", None), _STRATEGY[1], None)
    usual = getattr(method, "__module__", "").endswith(".strategies.strategy")  # not sharded, as by FSDP
    if not usual or getattr(getattr(trainer, "state", None), "fn", None) != "fit":
        return False
    return any(
        type(callback).__name__ == "ModelCheckpoint" and (callback.save_top_k != 0 or callback.save_last)
        for callback in getattr(trainer, "checkpoint_callbacks", ())
    )
