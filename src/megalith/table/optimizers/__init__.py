"""Sparse optimizers, one per file. `optimizer` defines the contract and how to add another one."""

from megalith.table.optimizers.adagrad import Adagrad
from megalith.table.optimizers.adam import Adam
from megalith.table.optimizers.ftrl import FTRL
from megalith.table.optimizers.momentum import Momentum
from megalith.table.optimizers.optimizer import Optimizer, State
from megalith.table.optimizers.rowwise_adagrad import RowWiseAdagrad
from megalith.table.optimizers.sgd import SGD

OPTIMIZERS: dict[str, type[Optimizer]] = {
    cls.name: cls for cls in (SGD, Momentum, Adagrad, RowWiseAdagrad, Adam, FTRL)
}

__all__ = [
    "FTRL",
    "OPTIMIZERS",
    "SGD",
    "Adagrad",
    "Adam",
    "Momentum",
    "Optimizer",
    "RowWiseAdagrad",
    "State",
]
