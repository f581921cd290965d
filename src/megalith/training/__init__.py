"""Training runs: config, data, training loop, checkpoints and evaluation."""

from megalith.training.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from megalith.training.data_source import DataSource, open_reader, open_source
from megalith.training.evaluation import Evaluation, evaluate
from megalith.training.log import Watcher
from megalith.training.model import load_trained
from megalith.training.run import Run
from megalith.training.trackers import Tracker

__all__ = [
    "DataConfig",
    "DataSource",
    "Evaluation",
    "ModelConfig",
    "Run",
    "RunConfig",
    "Tracker",
    "TrainConfig",
    "Watcher",
    "evaluate",
    "load_trained",
    "open_reader",
    "open_source",
]
