"""Training runs: config, data, training loop, checkpoints and evaluation."""

from megalith.training.data_source import DataSource, open_reader, open_source
from megalith.training.evaluation import Evaluation, evaluate
from megalith.training.run import Run, Watcher
from megalith.training.run_config import DataConfig, ModelConfig, RunConfig, TrainConfig
from megalith.training.run_model import load_trained

__all__ = [
    "DataConfig",
    "DataSource",
    "Evaluation",
    "ModelConfig",
    "Run",
    "RunConfig",
    "TrainConfig",
    "Watcher",
    "evaluate",
    "load_trained",
    "open_reader",
    "open_source",
]
