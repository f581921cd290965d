"""A model as a checkpoint sees it: its collections by module path, its dense weights, and its last save.

Each collection remembers the save that its rows come from (`CheckpointState.last_save`). A delta holds the
rows changed since that save, so it can only be added to that checkpoint, and only if that save is still the
last one there, the tip of the chain. It also remembers the routing that its tables were saved with.

A checkpoint holds every dense weight whole, so it does not depend on the number of ranks. Sharded weights
(DTensors, as FSDP2 and tensor parallelism make them) are gathered to save: all ranks gather one tensor at a
time and rank 0 keeps a copy. To load, every rank reads the file and keeps its own part, without any exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megalith.checkpoint.manifest import Manifest, Routing
from megalith.distributed.dense_parameters import fsdp1_module
from megalith.distributed.ranks import Ranks, current_rank, world_size
from megalith.errors import CheckpointError, InputError, UsageError
from megalith.nn import EmbeddingCollection
from megalith.shards import Shards
from megalith.storage.store import Store


def collections_of(model: nn.Module) -> dict[str, EmbeddingCollection]:
    """Find the collections of a model."""
    if not isinstance(model, nn.Module):
        raise InputError(f"a checkpoint is of an nn.Module, got {type(model).__name__}")
    return {name: m for name, m in model.named_modules() if isinstance(m, EmbeddingCollection)}


def tables_of(collections: Mapping[str, EmbeddingCollection]) -> list[tuple[str, str, Shards]]:
    """List the tables of a model."""
    found: list[tuple[str, str, Shards]] = []
    seen: set[int] = set()
    for path, collection in collections.items():
        if id(collection.shards) not in seen:
            seen.add(id(collection.shards))
            found += [(path, name, collection.shards) for name in collection.shards.configs]
    return found


def dense_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the dense weights of a model: what its checkpoint holds besides the rows of its collections."""
    flattened = fsdp1_module(model)
    if flattened is not None:
        raise UsageError(
            f"module {flattened!r} is a FullyShardedDataParallel (FSDP1), whose weights a checkpoint cannot "
            "hold: shard it with torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )
    reshard_fsdp(model)
    state: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingCollection):
            continue
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise UsageError(
                f"module {path!r} has extra state, which a checkpoint cannot hold: use progress="
            )
        own: dict[str, Any] = dict(module._parameters)
        transient = module._non_persistent_buffers_set
        own |= {name: b for name, b in module._buffers.items() if name not in transient}
        state |= {f"{path}.{name}".lstrip("."): t for name, t in own.items() if t is not None}
    return state


@dataclass(frozen=True)
class DenseMatch:
    """Saved dense weights matched with those of a model."""

    pairs: list[tuple[Tensor, Tensor]]  # Pairs of a tensor of the model and the saved tensor for it
    missing: list[str]  # Weights of the model that were not saved, or were saved with another shape
    extra: list[str]  # Saved weights that the model does not have

    @torch.no_grad()
    def copy(self) -> None:
        """Copy the saved tensors into the model; into a sharded weight, the part of this rank."""
        for here, there in self.pairs:
            if is_sharded(here):
                _local(here).copy_(_local(distribute_like(there, here)))
            else:
                here.data.copy_(there)


def match_dense(model: nn.Module, saved: Mapping[str, Tensor], allow_missing: bool = False) -> DenseMatch:
    """Match saved dense weights with those of a model, by name, without copying them."""
    state = dense_state(model)
    missing, extra = sorted(set(state) - set(saved)), sorted(set(saved) - set(state))
    if (missing or extra) and not allow_missing:
        raise CheckpointError(
            f"the dense weights do not match this model: the checkpoint lacks {missing}, the model lacks "
            f"{extra}"
        )
    pairs = []
    for name in sorted(set(state) & set(saved)):
        there, here = saved[name].shape, state[name].shape
        if there == here:
            pairs.append((state[name], saved[name]))
        elif allow_missing:
            missing.append(name)
        else:
            raise CheckpointError(
                f"dense weight {name!r} was saved with shape {list(there)}, the model's is {list(here)}"
            )
    return DenseMatch(pairs, missing, extra)


CONSUMER = "checkpoint"
"""The name under which tables track the rows changed since the last save."""


def check_idle(collections: Mapping[str, EmbeddingCollection]) -> None:
    """Raise if a save of one of the collections is in progress."""
    for path, collection in collections.items():
        if collection.checkpoint_state.save_in_progress is not None:
            raise UsageError(f"a save of collection {path!r} is in progress: call wait() on its handle first")


def set_last_save(collections: Iterable[EmbeddingCollection], save: tuple[str, str] | None) -> None:
    """Record the save, by address and id, that the rows of these collections are now equal to."""
    for collection in collections:
        collection.checkpoint_state.last_save = save


def check_last_save(collections: Iterable[EmbeddingCollection], store: Store, manifest: Manifest) -> None:
    """Raise unless a delta of these collections can be added to a checkpoint."""
    saves = {collection.checkpoint_state.last_save for collection in collections}
    save = saves.pop() if len(saves) == 1 else None
    if save is None or save[0] != store.address:
        last = "none" if save is None else save[0]
        raise UsageError(
            f"a delta can only be added to the checkpoint that this model last saved or loaded, which is "
            f"{last}, not {store.where}: save a full checkpoint there first"
        )
    if save[1] != manifest.tip:
        raise CheckpointError(
            f"{store.where} was changed since this model saved or loaded it: its last save is "
            f"{manifest.tip}, this model's rows come from {save[1]}; save a full checkpoint, or load it first"
        )


def track_changes(shards: Shards) -> None:
    """Track the rows that change from now on, and forget earlier changes."""
    shards.track(CONSUMER)
    shards.drain_touched(CONSUMER)


def ranks_of(model: nn.Module) -> Ranks:
    """Return the ranks that the tables of a model are spread over, or without tables its sharded weights."""
    collections = collections_of(model)
    groups = [c.shards.ranks for c in collections.values()]
    ranks = max(groups, key=lambda ranks: ranks.size, default=Ranks())
    if ranks.size > 1 or world_size() == 1:
        return ranks
    sharing = ranks_of_weights(dense_state(model))
    if collections and sharing.size > 1:
        raise UsageError(
            f"the dense weights are sharded over {sharing.size} ranks, but the tables are LocalShards, so "
            "each rank has its own: build the collection from TableConfigs, or from SyncShards"
        )
    return sharing


def check_equal_options(ranks: Ranks, call: str, options: Mapping[str, Any]) -> None:
    """Raise on every rank unless all ranks pass equal options. A collective call."""
    everywhere = ranks.gather(dict(options)) if ranks.size > 1 else []
    for rank, other in enumerate(everywhere):
        for name, value in everywhere[0].items():
            if other[name] != value:
                raise InputError(
                    f"{call}: rank 0 passes {name}={value!r}, but rank {rank} passes {other[name]!r}: pass "
                    "the same on every rank"
                )


def keep_routing(collection: EmbeddingCollection, table: str, routing: Routing) -> None:
    """Remember the routing that a table was saved with; with one shard nothing else records it."""
    collection.checkpoint_state.routing[table] = routing.dist_type, routing.block_size


def routing_of(shards: Shards, table: str, kept: Mapping[str, tuple[str, int | None]]) -> Routing:
    """Return the routing of a table, as a save or an export records it."""
    router = shards.router(table)
    if router is None:
        mode, block_size = kept.get(table, ("roundrobin", None))
        configured = shards.configs[table].dist_type or mode
        return Routing(configured, block_size=block_size if configured == mode else None)
    return Routing(router.mode, router.num_shards, router.block_size, router.skip_first)


_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def is_sharded(tensor: Any) -> bool:
    """Return whether a value is a DTensor, without importing DTensor for plain tensors."""
    if type(tensor) in _PLAIN or not isinstance(tensor, Tensor):
        return False  # without the import below, which takes a second
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def reshard_fsdp(model: nn.Module) -> None:
    """Make FSDP2 modules hold their sharded parameters again.

    After a forward without a backward, the root module holds gathered copies, which may be of a lower
    precision, and into which nothing must be loaded. The next forward or backward gathers them again.
    """
    if not any(hasattr(module, "set_reshard_after_forward") for module in model.modules()):
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def ranks_of_weights(weights: Mapping[str, Tensor]) -> Ranks:
    """Return the ranks over which the weights of a model without collections are sharded."""
    meshes: list[Any] = [weight.device_mesh for weight in weights.values() if is_sharded(weight)]  # type: ignore[attr-defined]
    mesh = max(meshes, key=lambda mesh: mesh.size(), default=None)
    if mesh is None or mesh.size() == 1:
        return Ranks()
    if mesh.size() == world_size():
        return Ranks(dist.group.WORLD)
    if mesh.ndim == 1:
        return Ranks(mesh.get_group())
    raise UsageError(
        f"the dense weights are sharded over {mesh}, which is only a part of the {world_size()} ranks: use a "
        "mesh of one dimension or one of all ranks"
    )


def check_weights(tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Raise unless a checkpoint can hold these tensors. A collective call; it raises on every rank."""
    members = ranks.gather(current_rank())
    problem = next(filter(None, (_problem(name, tensors[name], members) for name in tensors)), "")
    described = [
        (name, tuple(t.shape), str(t.dtype), str(t.placements))  # type: ignore[attr-defined]
        for name, t in tensors.items()
        if is_sharded(t)
    ]
    for rank, (theirs, other) in enumerate(ranks.gather((problem, described))):
        if theirs:
            raise UsageError(theirs) if problem else CheckpointError(f"rank {rank}: {theirs}")
        if other != described:
            name = (sorted(set(other) ^ set(described)) or described)[0][0]
            raise CheckpointError(
                f"rank {ranks.rank} and rank {rank} hold different sharded weights, for example {name!r}: "
                "build and shard the same model on every rank"
            )


def _problem(name: str, tensor: Tensor, members: list[int]) -> str:
    if tensor.device.type == "meta":
        return f"{name!r} is on the meta device and has no values: call model.to_empty(device=...) first"
    if not is_sharded(tensor):
        if is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided:
            kind = type(tensor).__name__ if is_traceable_wrapper_subclass(tensor) else tensor.layout
            return f"{name!r} is a {kind}, which a checkpoint cannot hold: convert it to a plain tensor"
        return ""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    dtensor: Any = tensor
    for placement in dtensor.placements:
        if not isinstance(placement, Replicate | Shard | _StridedShard):
            return (
                f"{name!r} has the placement {placement}, which a checkpoint cannot hold: redistribute() it "
                "to Shard or Replicate first"
            )
    if dtensor.device_mesh.get_coordinate() is None:
        return f"{name!r} is sharded over ranks that do not include this one: build it on a mesh of all ranks"
    absent = sorted(set(dtensor.device_mesh.mesh.flatten().tolist()) - set(members))
    if absent:
        return (
            f"{name!r} is sharded over ranks {absent} too, but the tables are on ranks {members} only: build "
            "the collection with SyncShards(..., group=...) over the ranks of the mesh"
        )
    return ""


def whole_copies(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Return whole copies of tensors on rank 0, and nothing on other ranks. A collective call."""
    # Sharded tensors are gathered one at a time; tied ones once. Gathered copies are in CPU memory.
    copies: dict[str, Tensor] = {}
    tied: dict[int, Tensor] = {}
    failure: Exception | None = None
    for name, tensor in tensors.items():
        if id(tensor) not in tied:
            whole = _gather(tensor)
            try:
                tied[id(tensor)] = _copy(whole, tensor) if ranks.rank == 0 else whole.new_empty(0)
            except Exception as error:  # the other ranks wait for this one in the next gather
                failure = failure or error
                continue
        if ranks.rank == 0:
            copies[name] = tied[id(tensor)]
    if failure is not None:
        raise failure
    return copies


def _gather(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return tensor
    dtensor: Any = tensor
    kind = dtensor.device_mesh.device_type
    if dtensor.to_local().device.type != kind:  # offloaded to the CPU, where its mesh cannot gather
        dtensor = dtensor.to(kind)
    whole: Tensor = dtensor.full_tensor()
    return whole


def _copy(whole: Tensor, tensor: Tensor) -> Tensor:
    return whole.to("cpu", copy=True) if is_sharded(tensor) else whole.clone()


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local()
    return local


def distribute_like(whole: Tensor, like: Any) -> Tensor:
    """Return a whole tensor as a DTensor with the placement of another one, without any exchange."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    made = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    local = made.to_local().to(like.to_local().device, copy=True)  # a view would keep the whole in memory
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=made.shape, stride=made.stride()
    )


def distribute_state(state: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Distribute whole optimizer state like the parameters that it belongs to."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(map(is_sharded, parameters)):
        return state
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    owners = dict(zip(numbers, parameters, strict=False))  # load_state_dict checks their number
    return {
        **state,
        "state": {
            number: {
                key: _distribute_value(value, key, owners[number], optimizer) for key, value in values.items()
            }
            if is_sharded(owners.get(number))
            else values
            for number, values in state["state"].items()
        },
    }


def _distribute_value(value: Any, key: str, parameter: Tensor, optimizer: torch.optim.Optimizer) -> Any:
    if not isinstance(value, Tensor):
        return value
    current = optimizer.state.get(parameter, {}).get(key)
    if is_sharded(current) and current.shape == value.shape:
        return distribute_like(value, current)
    if key == "step" or (value.dim() == 0 and parameter.dim() > 0):
        return value
    if value.shape == parameter.shape:
        return distribute_like(value, parameter)
    raise CheckpointError(
        f"optimizer state {key!r} has shape {list(value.shape)}, its sharded parameter "
        f"{list(parameter.shape)}: its placement is not known before the optimizer has state; call "
        "optimizer.step() once, then load"
    )
