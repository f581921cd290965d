"""Where a run computes: on the CPU, or with tables and dense weights on a GPU."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn

from megalith.data import Batch
from megalith.distributed.dense_parameters import dense_parameters
from megalith.distributed.launcher_environment import read_launch
from megalith.distributed.ranks import world_size
from megalith.errors import UsageError
from megalith.models import forward_batch
from megalith.training.run_sections import TrainConfig


def has_gpu() -> bool:
    """Return whether the cuda engine can run: torch finds a GPU, and triton is installed."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def device_of(train: TrainConfig) -> torch.device:
    """Return where a model of a config computes."""
    gpu = train.device in ("cuda", "auto") and has_gpu()
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


def engine_of(train: TrainConfig) -> str:
    """Return the engine of the tables."""
    on_gpu = train.engine == "cpu" and device_of(train).type == "cuda"
    return "cuda" if on_gpu else train.engine


def transport_of(train: TrainConfig) -> str:
    """Return how the ranks of a run exchange rows; see `Exchange`."""
    if device_of(train).type != "cuda":
        return "auto"
    launch = read_launch()
    return "nccl" if launch.size > 1 and launch.local_size <= torch.cuda.device_count() else "auto"


def use_device(train: TrainConfig) -> None:
    """Checks that a run can start on its device; ranks of one machine share its GPUs evenly."""
    if train.servers and world_size() > 1:
        raise UsageError(
            f"--servers is for one process, which starts servers and workers itself, but a launcher has "
            f"started {world_size()} ranks: start it without torchrun and use --workers {world_size()}"
        )
    if train.device == "cuda" and not has_gpu():
        raise UsageError(
            "--device cuda needs an NVIDIA GPU, a torch build with CUDA and triton: use --device auto to "
            "train on the CPU where there is none"
        )
    if train.servers and device_of(train).type == "cuda":
        raise UsageError("workers of parameter servers train on the CPU: use --device cpu")
    if world_size() > 1 and device_of(train).type == "cuda":
        torch.cuda.set_device(read_launch().local_rank % torch.cuda.device_count())


def score(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits of a batch."""
    # returns: float32 [rows], on the CPU.
    return forward_batch(model, moved(model, batch)).cpu()


def moved(model: nn.Module, batch: Batch) -> Batch:
    """Return a batch on the device of a model."""
    first = next((parameter for _, parameter in dense_parameters(model)), None)
    if first is None or first.device == batch.labels.device:
        return batch
    return batch.to(first.device, non_blocking=True)
