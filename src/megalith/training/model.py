"""The model of a run: built from its config or loaded from a checkpoint, and the device and threads it uses.

Tables and dense weights are on the CPU or on a GPU; the ranks of one machine share its GPUs evenly.

The number of threads depends on the amount of work of a step. Threads that wait for each other gain little in
small steps, and on a busy machine a step waits for whichever thread has no core. Measured on 2 cores with
DeepFM, dim 16: one-thread time divided by two-thread time, the minimum of 15 to 18 steps. CPU time is that of
the main thread with passive waiting, an estimate of an idle machine; no idle machine was measured. Wall time
is from another run while other processes used both cores (load 5), and is noisy.

    ids per step (rows x features)      CPU time    wall time, busy machine
      4,096  (1,024 rows x 4)              1.04         0.98
     16,384  (4,096 rows x 4)              1.34         1.12
     26,624  (1,024 rows x 26)             1.10         0.65
     65,536  (16,384 rows x 4)             1.72         0.90
    106,496  (4,096 rows x 26)             1.33         0.30
    262,144  (65,536 rows x 4)             1.74         0.37
    425,984  (16,384 rows x 26)            1.89         1.08

The limit gives up some speed between 16,384 and 65,536 ids on an idle machine. Above it, several threads can
still be slower than one on a busy machine: set train.threads = 1 there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megalith import checkpoint
from megalith.checkpoint.model_state import match_dense
from megalith.checkpoint.saved_rows import read_tensors
from megalith.data import Batch
from megalith.distributed.dense_parameters import dense_parameters
from megalith.distributed.launcher_environment import read_launch
from megalith.distributed.ranks import world_size
from megalith.errors import CheckpointError, InputError, UsageError
from megalith.models import MODELS, EmbeddingConfig, Model, build_model, forward_batch
from megalith.ops import checks
from megalith.routing import Router
from megalith.shards import Shards, SyncShards
from megalith.storage.store import open_store
from megalith.table import TableConfig
from megalith.training.config import RunConfig, TrainConfig, check_options
from megalith.training.data_source import id_sources
from megalith.training.directory import find_checkpoint
from megalith.training.table_settings import parse_serving


def has_gpu() -> bool:
    """Return whether the cuda engine can run: torch finds a GPU, and triton is installed."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def device_of(train: TrainConfig) -> torch.device:
    gpu = train.device in ("cuda", "auto") and has_gpu()
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


def engine_of(train: TrainConfig) -> str:
    on_gpu = train.engine == "cpu" and device_of(train).type == "cuda"
    return "cuda" if on_gpu else train.engine


def transport_of(train: TrainConfig) -> str:
    """Return how the ranks of a run exchange rows; see `Exchange`."""
    if device_of(train).type != "cuda":
        return "auto"
    launch = read_launch()
    return "nccl" if launch.size > 1 and launch.local_size <= torch.cuda.device_count() else "auto"


def use_device(train: TrainConfig) -> None:
    """Check that a run can start on its device; ranks of one machine share its GPUs evenly."""
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
    # returns: float32 [rows], on the CPU.
    return forward_batch(model, moved(model, batch)).cpu()


def dense_device(model: nn.Module) -> torch.device:
    """Return the device of the dense weights; the CPU if there are none."""
    first = next((parameter for _, parameter in dense_parameters(model)), None)
    return torch.device("cpu") if first is None else first.device


def moved(model: nn.Module, batch: Batch) -> Batch:
    device = dense_device(model)
    return batch if device == batch.labels.device else batch.to(device, non_blocking=True)


IDS_PER_THREAD = 32_768
"""A step of fewer than two times this number of ids uses one thread."""


def threads_for(rows: int, features: int, most: int) -> int:
    return max(1, min(most, rows * features // IDS_PER_THREAD))


def threads_of(config: RunConfig, features: Sequence[str], ranks: int = 1) -> int:
    given = config.train.threads
    if given is not None:
        return given
    rows = -(-config.data.batch_size // ranks)
    return threads_for(rows, len(config.model.features or features), most=torch.get_num_threads())


@contextmanager
def using_threads(number: int) -> Iterator[None]:
    """Set the number of threads of torch, and restore it at the end."""
    before = torch.get_num_threads()
    if number != before:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number != before:
            torch.set_num_threads(before)


PlaceTables = Callable[[list[TableConfig]], Shards]


def model_for(
    config: RunConfig, available: list[str], num_dense: int, *, place: PlaceTables | None = None
) -> Model:
    options = dict(config.model.options)
    names = config.model.features or available
    if config.model.name == "din":
        options = {"history": "history", **options}
        names = [name for name in names if name != options["history"]]
        if config.data.kind == "movielens":
            options = {"target": "movie", **options}
    for name in names:
        if name not in available:
            raise InputError(
                f"config: model.features: the data has no feature {name!r} (known: {', '.join(available)})"
            )
    shared = config.shared_settings
    embeddings = EmbeddingConfig(
        names,
        dim=config.model.dim,
        optimizer=config.table_optimizer,
        tables=config.model.tables,
        admission=shared.admission,
        eviction=shared.eviction,
        initializer=config.initializer,
        missing=config.train.missing,
        precision=config.train.precision,
        rounding=config.train.rounding,
        serving=parse_serving(config.train.serving, "train.serving"),
        settings=config.table_settings,
        huge_pages=config.train.huge_pages,
        device_bytes=config.train.device_bytes or None,
        deterministic=config.train.deterministic,
        evict_every=config.evict_every if place is None else None,  # the run evicts
        update="step" if updates_in_step(config, servers=place is not None) else "backward",
        dist_type=config.train.dist_type,
        id_sources=id_sources(config.data),
        **(_placement(config) if place is None else {"shards": place}),
    )
    if config.model.name in MODELS:
        check_options("model.options", options, MODELS[config.model.name], passed=("embeddings", "num_dense"))
    model = build_model(config.model.name, embeddings, num_dense=num_dense, **options)
    return model.to(device_of(config.train))


def updates_in_step(config: RunConfig, *, servers: bool = False) -> bool:
    """Return whether a batch is split into parts whose gradients are summed before rows are updated."""
    if servers:
        return config.train.server_mode == "sync"
    return world_size() > 1 or config.train.micro_batches is not None


def _placement(config: RunConfig) -> dict[str, Any]:
    """The placement of the tables: in this process, or distributed over the ranks."""
    train = config.train
    if world_size() == 1:
        return {"engine": engine_of(train), "seed": train.seed}

    def distribute(tables: list[TableConfig]) -> SyncShards:
        return SyncShards(
            tables,
            router=router_of(train, world_size()),
            engine=engine_of(train),
            seed=train.seed,
            wire=config.wire,
            timeout=train.timeout,
            transport=transport_of(train),
        )

    return {"shards": distribute}


def router_of(train: TrainConfig, count: int) -> str | Router:
    if train.block_size is None:
        return train.dist_type
    return Router(train.dist_type, count, block_size=train.block_size)


def config_of(manifest: checkpoint.Manifest, where: Path) -> RunConfig:
    """Return the config that a checkpoint was trained with."""
    if "config" not in manifest.progress:
        raise CheckpointError(f"{where} was not saved by `megalith train`: it has no config")
    return RunConfig.from_dict(manifest.progress["config"])


def load_dense(model: Model, root: Path, manifest: checkpoint.Manifest) -> None:
    """Load the dense weights of a checkpoint into a model. Its tables stay empty."""
    store, entry = open_store(root), manifest.latest.dense
    match_dense(model, {} if entry is None else read_tensors(store, entry)).copy()


def load_trained(path: str | Path) -> tuple[Model, RunConfig]:
    """Load a trained model in eval mode.

    Args:
        path: Directory of a run, or one of its checkpoints.

    Returns:
        The model and the config of the run.

    Raises:
        CheckpointError: There is no complete checkpoint, or it was not saved by a run.
    """
    root = find_checkpoint(checks.path(path, "load_trained: path"))
    manifest = checkpoint.read_manifest(root)
    config = config_of(manifest, root)
    model = model_for(config, manifest.progress["features"], manifest.progress["num_dense"])
    checkpoint.load(model, root)
    return model.eval(), config
