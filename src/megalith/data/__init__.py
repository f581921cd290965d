"""Readers: training data from files and from a made-up teacher, as batches of tensors.

Reading Parquet and CSV needs pyarrow: `pip install megalith[data]`.
"""

from megalith.data.batch import Batch, Position, Samples
from megalith.data.csv import CriteoReader, CsvReader
from megalith.data.even import EvenLoader, even
from megalith.data.fetch import DataUnavailableError
from megalith.data.monolith import MonolithReader
from megalith.data.movielens import MovieLens, load_movielens, read_movielens
from megalith.data.parquet import ParquetReader
from megalith.data.reader import MemoryReader, Reader
from megalith.data.schema import DenseColumn, FeatureColumn, Schema
from megalith.data.teacher import TeacherBatch, TeacherFeature, TeacherReader
from megalith.errors import MissingDependencyError

__all__ = [
    "Batch",
    "CriteoReader",
    "CsvReader",
    "DataUnavailableError",
    "DenseColumn",
    "EvenLoader",
    "FeatureColumn",
    "MemoryReader",
    "MissingDependencyError",
    "MonolithReader",
    "MovieLens",
    "ParquetReader",
    "Position",
    "Reader",
    "Samples",
    "Schema",
    "TeacherBatch",
    "TeacherFeature",
    "TeacherReader",
    "even",
    "load_movielens",
    "read_movielens",
]
