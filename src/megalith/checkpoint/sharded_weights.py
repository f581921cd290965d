"""Sharded dense weights (DTensors, as FSDP2 and tensor parallelism make them): gathered to save, cut to load.

A checkpoint holds every dense weight whole, so it does not depend on the number of ranks. To save, all ranks
gather one tensor at a time and rank 0 keeps a copy. To load, every rank reads the file and keeps its own
part, without any exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megalith.distributed.ranks import Ranks, current_rank, world_size
from megalith.errors import CheckpointError, UsageError

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class _ProcessGroupRanks(Ranks):
    """The ranks of a process group: those that share a model without collections."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = current_rank(group), world_size(group)

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


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

    Args:
        model: The model. Other modules in it are not changed.
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
        return _ProcessGroupRanks(None)
    if mesh.ndim == 1:
        return _ProcessGroupRanks(mesh.get_group())
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


def copy_into(tensor: Tensor, whole: Tensor) -> None:
    """Copy a whole saved tensor into a tensor of the model; into a DTensor, the part of this rank."""
    with torch.no_grad():
        if is_sharded(tensor):
            _local(tensor).copy_(_local(distribute_like(whole, tensor)))
        else:
            tensor.data.copy_(whole)


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
