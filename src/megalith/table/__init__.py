"""Tables: id -> row. Configuration, the contract, and one file per engine."""

from megalith.table.config import Segment, TableConfig
from megalith.table.contract import Table
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
    SGD,
    Adagrad,
    Adam,
    Momentum,
    Optimizer,
    RowWiseAdagrad,
)
from megalith.table.records import Chunk, MemoryUse, TableStats
from megalith.table.schedules import Piecewise, PolynomialDecay, Warmup

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "Chunk",
    "Constant",
    "Initializer",
    "MemoryUse",
    "Momentum",
    "Normal",
    "Ones",
    "Optimizer",
    "Piecewise",
    "PolynomialDecay",
    "RowWiseAdagrad",
    "Segment",
    "Table",
    "TableConfig",
    "TableStats",
    "TruncatedNormal",
    "Uniform",
    "Warmup",
    "Zeros",
]
