"""Sparse optimizers, one family per file. `optimizer` defines the contract and how to add another one."""

from megalith.table.optimizers.adagrad import Adagrad, DynamicWdAdagrad, GroupAdagrad, RowWiseAdagrad
from megalith.table.optimizers.adam import LAMB, Adam, AdamW, AMSGrad
from megalith.table.optimizers.averages import BatchSoftmax, MovingAverage
from megalith.table.optimizers.delay_compensated import DelayCompensated
from megalith.table.optimizers.ftrl import FTRL, GroupFTRL
from megalith.table.optimizers.optimizer import Optimizer, State
from megalith.table.optimizers.rmsprop import Adadelta, RMSProp, RMSPropV2
from megalith.table.optimizers.sgd import SGD, Lion, Momentum

OPTIMIZERS: dict[str, type[Optimizer]] = {
    cls.name: cls
    for cls in (
        SGD,
        Momentum,
        Adagrad,
        RowWiseAdagrad,
        Adam,
        FTRL,
        AdamW,
        AMSGrad,
        LAMB,
        Lion,
        Adadelta,
        RMSProp,
        RMSPropV2,
        DynamicWdAdagrad,
        GroupAdagrad,
        GroupFTRL,
        MovingAverage,
        BatchSoftmax,
        DelayCompensated,
    )
}


def native_rule(optimizer: Optimizer) -> tuple[str, str, tuple[float, ...]] | None:
    """Return how the native module knows an optimizer."""
    if OPTIMIZERS.get(optimizer.name) is not type(optimizer):
        return None
    if not isinstance(optimizer, DelayCompensated):
        return optimizer.name, "", optimizer.hyper
    base = native_rule(optimizer.base)
    return None if base is None else (optimizer.name, base[0], optimizer.hyper)


__all__ = [
    "FTRL",
    "LAMB",
    "OPTIMIZERS",
    "SGD",
    "AMSGrad",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "BatchSoftmax",
    "DelayCompensated",
    "DynamicWdAdagrad",
    "GroupAdagrad",
    "GroupFTRL",
    "Lion",
    "Momentum",
    "MovingAverage",
    "Optimizer",
    "RMSProp",
    "RMSPropV2",
    "RowWiseAdagrad",
    "State",
    "native_rule",
]
