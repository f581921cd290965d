"""The dense part of a model: which parameters belong to it, and its broadcast at the start.

The dense parameters are all but the anchors of embedding collections. `broadcast_dense` gives all ranks the
weights and optimizer state of rank 0. Tables need no broadcast: an initial row is a function of seed, table
and id.

    step                 content
    descriptions         all ranks: whether parameters and optimizer have the same form, and can be broadcast
    weights              rank 0 -> others: parameters and buffers
    optimizer, form      rank 0 -> others: its options and state, without the content of tensors
    optimizer, content   rank 0 -> others: the tensors of options and state

Ranks may have different optimizer state, or none: they replace their own. Nothing is written unless the
descriptions match.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from megalith.distributed.ranks import has_process_group
from megalith.errors import InputError

ANCHOR = "rows_anchor"
"""The parameter of a collection through which `requires_grad_` of a model reaches it; it stays 0."""


def is_anchor(name: str) -> bool:
    """Return whether a parameter of this name, in any module, is the anchor of a collection."""
    return name.rpartition(".")[2] == ANCHOR


def dense_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over `named_parameters` of a model, without the anchors of its collections."""
    return ((name, parameter) for name, parameter in model.named_parameters() if not is_anchor(name))


BUCKET_BYTES = 25 << 20  # Tensors are sent together up to this size; larger ones separately


def broadcast_dense(
    model: nn.Module, group: dist.ProcessGroup | None = None, *, optimizer: Optimizer | None = None
) -> None:
    """Copy the dense weights and optimizer state of rank 0 of a group to all its ranks. A collective call."""
    # Weights are parameters and buffers. Gradients and tables stay unchanged.
    if not has_process_group():
        raise InputError("broadcast_dense needs a process group: call init_process_group first")
    wire = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    named: list[tuple[str, Tensor]] = []
    packed = _PackedState(b"", [])
    problem = _type_problem(model, optimizer)
    if problem is None:
        named = list(chain(model.named_parameters(), model.named_buffers()))
        problem = _sharded_problem(model, named, optimizer)
    if problem is None and optimizer is not None and dist.get_rank(group) == 0:
        try:
            packed = _pack(optimizer)
        except Exception as error:
            problem = f"the optimizer of rank 0 cannot be sent ({type(error).__name__}: {error})"
    _check_equal(named, optimizer, problem, group, wire)
    with torch.no_grad():
        _broadcast([tensor for _, tensor in named], group, wire)
        if optimizer is not None:
            _broadcast_optimizer(optimizer, packed, group, wire)


def fsdp1_module(model: nn.Module) -> str | None:
    """Find a module that is sharded by FSDP1."""
    # It holds a part of one flat tensor, in plain tensors that cannot be told from whole ones.
    fsdp1 = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")  # the import takes a second
    kind = getattr(fsdp1, "FullyShardedDataParallel", ())
    return next((path for path, module in model.named_modules() if isinstance(module, kind)), None)


def _type_problem(model: Any, optimizer: Any) -> str | None:
    if not isinstance(model, nn.Module):
        return f"model must be an nn.Module, got {type(model).__name__}"
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        return f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
    return None


def _sharded_problem(
    model: nn.Module, named: list[tuple[str, Tensor]], optimizer: Optimizer | None
) -> str | None:
    flattened = fsdp1_module(model)
    if flattened is not None:
        return (
            f"module {flattened!r} is a FullyShardedDataParallel (FSDP1), and each rank has its own part: "
            "broadcast before the model is sharded"
        )
    parameters = [] if optimizer is None else [("of the optimizer", p) for p in _parameters(optimizer)]
    for name, tensor in (*named, *parameters):
        if hasattr(tensor, "device_mesh"):  # a DTensor
            return (
                f"parameter {name!r} is sharded over ranks: broadcast before the model is sharded, or load a "
                "checkpoint instead"
            )
    return None


def _check_equal(
    named: list[tuple[str, Tensor]],
    optimizer: Optimizer | None,
    problem: str | None,
    group: dist.ProcessGroup | None,
    wire: torch.device,
) -> None:
    """Raise InputError on every rank if one cannot take part or its tensors differ from those of rank 0."""
    lazy = [name for name, tensor in named if nn.parameter.is_lazy(tensor)]
    described = "" if lazy or problem else repr(_description(named, optimizer))
    digest = int.from_bytes(hashlib.sha256(described.encode()).digest()[:8], "big", signed=True)
    own = torch.tensor([digest, len(lazy), int(problem is not None)], device=wire)
    all_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_ranks, own, group=group)
    descriptions = torch.stack(all_ranks).tolist()
    if problem is not None:
        raise InputError(f"broadcast_dense: {problem}")
    if failed := [rank for rank, (_, _, bad) in enumerate(descriptions) if bad]:
        raise InputError(f"broadcast_dense: ranks {failed} cannot take part; their errors give the reason")
    if unready := [rank for rank, (_, count, _) in enumerate(descriptions) if count]:
        here = f" (here: {', '.join(lazy)})" if lazy else ""
        raise InputError(
            f"broadcast_dense: lazy parameters have no shape yet on ranks {unready}{here}; run a batch "
            "through the model first"
        )
    if other := [rank for rank, (theirs, *_) in enumerate(descriptions) if theirs != descriptions[0][0]]:
        raise InputError(
            "broadcast_dense: names, shapes or dtypes of parameters or buffers, or the optimizers of ranks "
            f"{other} differ from those of rank 0; build the same model and optimizer on every rank"
        )


def _description(named: list[tuple[str, Tensor]], optimizer: Optimizer | None) -> Any:
    weights = [(name, tuple(x.shape), str(x.dtype)) for name, x in named]
    if optimizer is None:
        return weights, None
    names = {id(tensor): name for name, tensor in named}
    groups = [
        [(names.get(id(p)), tuple(p.shape), str(p.dtype)) for p in group["params"]]
        for group in optimizer.param_groups
    ]
    return weights, type(optimizer).__qualname__, groups


# ---- the optimizer


class _PackedState(NamedTuple):
    form: bytes  # Pickled data, with a _TensorForm in place of each tensor
    tensors: list[Tensor]  # The tensors, in the order in which the data contains them


class _TensorForm(NamedTuple):
    """A tensor without its content."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool  # Whether it is on the CPU; otherwise it is on the device of its parameter


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _pack(optimizer: Optimizer) -> _PackedState:
    tensors: list[Tensor] = []
    options = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    state = [optimizer.state.get(parameter) for parameter in _parameters(optimizer)]
    form = _replaced((options, state), Tensor, lambda x: _form(x, tensors))
    return _PackedState(pickle.dumps(form), tensors)


def _form(tensor: Tensor, tensors: list[Tensor]) -> _TensorForm:
    tensors.append(tensor)
    return _TensorForm(tuple(tensor.shape), tensor.dtype, tensor.is_cpu)


def _replaced(data: Any, kind: type, replace: Any) -> Any:
    """Return nested data in which values of a type are replaced, in a fixed order."""
    if isinstance(data, kind):
        return replace(data)
    if isinstance(data, dict):
        return {key: _replaced(value, kind, replace) for key, value in data.items()}
    if isinstance(data, list):
        return [_replaced(value, kind, replace) for value in data]
    if type(data) is tuple:
        return tuple(_replaced(value, kind, replace) for value in data)
    return data


def _broadcast_optimizer(
    optimizer: Optimizer, packed: _PackedState, group: dist.ProcessGroup | None, wire: torch.device
) -> None:
    sent: list[Any] = [packed.form]
    dist.broadcast_object_list(sent, group=group, group_src=0, device=wire)
    if dist.get_rank(group) == 0:
        _broadcast(packed.tensors, group, wire)
        return
    options, state = pickle.loads(sent[0])  # rank 0 of the same job wrote it
    received: list[Tensor] = []

    def new(form: _TensorForm, device: torch.device) -> Tensor:
        received.append(torch.empty(form.shape, dtype=form.dtype, device="cpu" if form.on_cpu else device))
        return received[-1]

    groups = optimizer.param_groups
    options = [
        _replaced(theirs, _TensorForm, lambda form, own=own: new(form, _device(own["params"])))
        for theirs, own in zip(options, groups, strict=True)
    ]
    parameters = _parameters(optimizer)
    state = [
        _replaced(theirs, _TensorForm, lambda form, own=own: new(form, _device([own])))
        for theirs, own in zip(state, parameters, strict=True)
    ]
    _broadcast(received, group, wire)
    for own, theirs in zip(groups, options, strict=True):
        kept = own["params"]
        own.clear()
        own.update({"params": kept, **theirs})
    for parameter, theirs in zip(parameters, state, strict=True):
        optimizer.state.pop(parameter, None)
        if theirs is not None:
            optimizer.state[parameter] = theirs


def _device(parameters: list[Tensor]) -> torch.device:
    return parameters[0].device if parameters else torch.device("cpu")


# ---- tensors


def _broadcast(tensors: list[Tensor], group: dist.ProcessGroup | None, wire: torch.device) -> None:
    """Copy the content of the tensors of rank 0 to those of the other ranks."""
    for bucket in _buckets(tensors):
        flat = torch.cat([_bytes(tensor).to(wire) for tensor in bucket])
        dist.broadcast(flat, group=group, group_src=0)
        if dist.get_rank(group) == 0:
            continue
        for tensor, piece in zip(bucket, flat.split([t.nbytes for t in bucket]), strict=True):
            # clone: a view as a wider dtype needs aligned memory
            tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in order, in groups of up to BUCKET_BYTES, without empty tensors."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
