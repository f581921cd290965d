"""Training runs: config, data, loop, evaluation. What the commands are made of."""

from megalith.training.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from megalith.training.evaluation import Evaluation, evaluate
from megalith.training.model import load_trained
from megalith.training.run import Run, Watcher
from megalith.training.source import Source, open_reader, open_source

__all__ = [
    "DataConfig",
    "Evaluation",
    "ModelConfig",
    "Run",
    "RunConfig",
    "Source",
    "TrainConfig",
    "Watcher",
    "evaluate",
    "load_trained",
    "open_reader",
    "open_source",
]
