"""Tables: configuration, optimizers, initializers, `Table` and its engines."""

from megalith.table.initializers import (
    Constant,
    Initializer,
    Normal,
    Ones,
    TruncatedNormal,
    Uniform,
    Zeros,
)
from megalith.table.optimizers import (
    FTRL,
    LAMB,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    AMSGrad,
    DelayCompensated,
    Lion,
    Momentum,
    Optimizer,
    RMSProp,
    RMSPropV2,
    RowWiseAdagrad,
    State,
)
from megalith.table.schedules import Piecewise, PolynomialDecay, Warmup
from megalith.table.table import Table
from megalith.table.table_config import Segment, TableConfig
from megalith.table.table_data import Chunk, MemoryUse, TableStats

__all__ = [
    "FTRL",
    "LAMB",
    "SGD",
    "AMSGrad",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Chunk",
    "Constant",
    "DelayCompensated",
    "Initializer",
    "Lion",
    "MemoryUse",
    "Momentum",
    "Normal",
    "Ones",
    "Optimizer",
    "Piecewise",
    "PolynomialDecay",
    "RMSProp",
    "RMSPropV2",
    "RowWiseAdagrad",
    "Segment",
    "State",
    "Table",
    "TableConfig",
    "TableStats",
    "TruncatedNormal",
    "Uniform",
    "Warmup",
    "Zeros",
]
