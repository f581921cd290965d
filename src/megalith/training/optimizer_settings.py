"""The optimizer of the tables in the config of a run: its name, its learning rate and further settings.

    table_optimizer = "adam"
    table_lr = 0.01
    table_options = "eps=1e-6, bias_correction=row, betas=0.9:0.99"

Settings are the arguments of the optimizer's class. delay_compensated takes `base=NAME` and `strength`; the
other settings are those of the base.
"""

from __future__ import annotations

import inspect
from typing import Any

from megalith.errors import InputError, UnknownNameError
from megalith.table.optimizers import OPTIMIZERS, DelayCompensated, Optimizer

WHERE = "train.table_options"


def build_optimizer(name: str, lr: float, options: str | None) -> Optimizer:
    """Build the optimizer of the tables."""
    settings = _read(options or "")
    if OPTIMIZERS[name] is not DelayCompensated:
        return _build(name, lr, settings)
    base, strength = settings.pop("base", None), settings.pop("strength", None)
    bases = [each for each, kind in OPTIMIZERS.items() if kind is not DelayCompensated]
    if base not in bases:
        raise InputError(
            f"config: {WHERE} must have base=NAME for delay_compensated, one of {', '.join(bases)}; "
            f"got {base!r}"
        )
    inner = _build(base, lr, settings)
    try:
        return DelayCompensated(inner) if strength is None else DelayCompensated(inner, strength)
    except InputError as error:
        raise InputError(f"config: {WHERE}: {error}") from None


def _build(name: str, lr: float, settings: dict[str, Any]) -> Optimizer:
    kind: Any = OPTIMIZERS[name]
    known = list(inspect.signature(kind).parameters)
    if "lr" in settings:
        raise InputError(f"config: {WHERE} has lr; set train.table_lr (--table-lr) instead")
    for key in settings:
        if key not in known:
            others = [each for each in known if each != "lr"]
            raise UnknownNameError(
                f"config: {WHERE}: {name} has no setting {key!r} (known: {', '.join(others) or 'none'})"
            )
    try:
        made: Optimizer = kind(lr=lr, **settings)
    except InputError as error:
        raise InputError(f"config: {WHERE}: {error}") from None
    return made


def _read(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in text.split(",") if text.strip() else []:
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals or not key or not value:
            raise InputError(f"config: {WHERE} must be SETTING=VALUE,..., got {text!r}")
        if key in found:
            raise InputError(f"config: {WHERE} has {key} twice: {text!r}")
        found[key] = tuple(_value(each) for each in value.split(":")) if ":" in value else _value(value)
    return found


def _value(text: str) -> bool | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return float(text)
    except ValueError:
        return text
