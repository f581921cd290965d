"""The model of a run: built from its config for its data and ranks, or loaded from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megalith import checkpoint
from megalith.checkpoint.dense_state import match_dense
from megalith.checkpoint.saved_rows import read_tensors
from megalith.distributed.ranks import world_size
from megalith.errors import CheckpointError, InputError
from megalith.models import MODELS, EmbeddingConfig, Model, build_model
from megalith.ops import checks
from megalith.routing import Router
from megalith.shards import Shards, SyncShards
from megalith.storage.store import open_store
from megalith.table import TableConfig
from megalith.training.data_source import id_sources
from megalith.training.options import check_options
from megalith.training.run_config import RunConfig
from megalith.training.run_device import device_of, engine_of, transport_of
from megalith.training.run_sections import TrainConfig
from megalith.training.table_settings import parse_serving

PlaceTables = Callable[[list[TableConfig]], Shards]
CHECKPOINT = "checkpoint"
"""The folder of a run with its newest checkpoint."""


def model_for(
    config: RunConfig, available: list[str], num_dense: int, *, place: PlaceTables | None = None
) -> Model:
    """Builds the model of a config."""
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
        precision=config.train.precision,
        rounding=config.train.rounding,
        serving=parse_serving(config.train.serving, "train.serving"),
        settings=config.table_settings,
        huge_pages=config.train.huge_pages,
        device_bytes=config.train.device_bytes or None,
        deterministic=config.train.deterministic,
        evict_every=config.evict_every if place is None else None,  # see `run_servers.py`
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
    """Return how rows are distributed."""
    if train.block_size is None:
        return train.dist_type
    return Router(train.dist_type, count, block_size=train.block_size)


def config_of(manifest: checkpoint.Manifest, where: Path) -> RunConfig:
    """Return the config that a checkpoint was trained with."""
    if "config" not in manifest.progress:
        raise CheckpointError(f"{where} was not saved by `megalith train`: it has no config")
    return RunConfig.from_dict(manifest.progress["config"])


def find_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint of a run's directory. Another path is returned unchanged."""
    root = Path(path)
    return root / CHECKPOINT if (root / CHECKPOINT / "manifest.json").exists() else root


def load_dense(model: Model, root: Path, manifest: checkpoint.Manifest) -> None:
    """Loads the dense weights of a checkpoint into a model. Its tables stay empty."""
    store, entry = open_store(root), manifest.latest.dense
    match_dense(model, {} if entry is None else read_tensors(store, entry)).copy()


def load_trained(path: str | Path) -> tuple[Model, RunConfig]:
    """Loads a trained model in eval mode.

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
