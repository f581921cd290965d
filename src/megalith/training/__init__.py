"""Training runs: config, data, training loop, checkpoints and evaluation."""

from megalith.training.data_source import DataSource, open_reader, open_source
from megalith.training.evaluation import Evaluation, evaluate
from megalith.training.run import Run
from megalith.training.run_config import RunConfig
from megalith.training.run_model import load_trained
from megalith.training.run_sections import DataConfig, ModelConfig, TrainConfig
from megalith.training.watcher import Watcher

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
