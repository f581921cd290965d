"""The three encodings of the layout ops, converted to one: a flat list of rows per table and server.

    version   embeddings_list                            further arguments
    3         one tensor per table and server            none
    4         one tensor, by server, then table          fid_list_emb_row_lenth: the elements of each list
    5         one tensor per table and server; the       batch_size, nfl_size, feature_size, fid_size [R] and
              rows of R requests are concatenated        emb_size [R * lists]: the sizes of each request

Requests of version 5 are encoded one by one (`sharding_sparse_fids`) and every tensor is concatenated; a
shared feature has one row per request. The outputs of the requests follow one another in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.compat.monolith.feature_configs import FeatureConfigs
from megalith.compat.monolith.fid_sharding import check_version
from megalith.errors import InputError
from megalith.ops import checks
from megalith.routing import Router


class RequestOffsets(NamedTuple):
    """The tensors of `sharding_sparse_fids`, those of all requests concatenated."""

    fid_offset: Tensor
    """int [n]."""
    feature_offset: Tensor
    """int [rows + 1 of each request]."""
    nfl_offset: Tensor
    """int [features + 1 of each request]."""
    batch_size: int | Tensor
    """The number of rows, or those of each request, int [R]."""


class RequestSizes(NamedTuple):
    """The arguments that describe how the tensors of a call are divided; None where the version has none."""

    fid_list_emb_row_lenth: Tensor | None = None
    nfl_size: Tensor | None = None
    feature_size: Tensor | None = None
    fid_size: Tensor | None = None
    emb_size: Tensor | None = None


class LayoutRequest(NamedTuple):
    """One batch in the encoding of version 3."""

    lists: list[Tensor]
    """float [elements] for each table and server: the rows, flat."""
    fid_offset: Tensor
    feature_offset: Tensor
    nfl_offset: Tensor
    batch: int


class LayoutRequests(NamedTuple):
    """The batches of a call, and how the gradients of their lists become those of the arguments."""

    requests: list[LayoutRequest]
    shapes: list[torch.Size]
    """The shape of each tensor of `embeddings_list`."""
    server_major: list[int] | None
    """Version 4: the numbers of the lists in the order in which the one tensor holds them."""

    def join(self, gradients: list[list[Tensor]]) -> list[Tensor]:
        """Combine the gradients of the lists of all requests."""
        # gradients: for each request, float [elements] for each list.
        flat = [each[0] if len(each) == 1 else torch.cat(each) for each in zip(*gradients, strict=True)]
        if self.server_major is not None:
            flat = [torch.cat([flat[number] for number in self.server_major])]
        return [each.view(shape) for each, shape in zip(flat, self.shapes, strict=True)]


def layout_requests(
    embeddings_list: Sequence[Tensor],
    offsets: RequestOffsets,
    configs: FeatureConfigs,
    ps_num: int | Router,
    sizes: RequestSizes,
    version: int,
) -> LayoutRequests:
    """Check the arguments of a layout op and divide them into requests."""
    check_version(version)
    servers = ps_num.num_shards if isinstance(ps_num, Router) else checks.integer(ps_num, "ps_num", least=0)
    tables, servers = len(configs.table_names), max(1, servers)
    if not tables:
        raise InputError("feature_cfgs has no features")
    given = checks.as_list(embeddings_list, "embeddings_list")
    shapes = [each.shape if isinstance(each, Tensor) else torch.Size() for each in given]
    fid_offset = _unsigned(offsets.fid_offset, "fid_offset")
    feature_offset = checks.int64(offsets.feature_offset, "feature_offset")
    nfl_offset = _unsigned(offsets.nfl_offset, "nfl_offset")
    _check_sizes(sizes, version)
    server_major = None
    if version == 4:
        server_major = [table * servers + server for server in range(servers) for table in range(tables)]
        lists = _from_one_tensor(given, sizes.fid_list_emb_row_lenth, server_major)
    else:
        if len(given) != tables * servers:
            wanted = f"expected {tables * servers}: tables times servers"
            raise InputError(f"embeddings_list has {len(given)} tensors, {wanted}")
        lists = _flat(given)
    # The rows may be on a GPU while the batch was read on the CPU. The host reads nfl_offset.
    fid_offset, feature_offset = (_moved(each, lists[0].device) for each in (fid_offset, feature_offset))
    nfl_offset = _moved(nfl_offset, torch.device("cpu"))
    features = len(configs.feature_names)
    if sizes.nfl_size is None:
        checks.int64(nfl_offset, "nfl_offset", (features + 1,))
        batch = checks.scalar(offsets.batch_size, "batch_size")
        requests = [LayoutRequest(lists, fid_offset, feature_offset, nfl_offset, batch)]
    else:
        whole = RequestOffsets(fid_offset, feature_offset, nfl_offset, offsets.batch_size)
        requests = _divided(lists, whole, sizes, features)
    return LayoutRequests(requests, shapes, server_major)


def _check_sizes(sizes: RequestSizes, version: int) -> None:
    if (sizes.fid_list_emb_row_lenth is not None) != (version == 4):
        raise InputError(
            f"fid_list_emb_row_lenth must be given for version 4 and no other, got version {version}"
        )
    given = [name for name in RequestSizes._fields[1:] if getattr(sizes, name) is not None]
    if given and version != 5:
        raise InputError(f"{given[0]} must not be given for version {version}; pass version=5")
    if given and len(given) < 4:
        missing = next(name for name in RequestSizes._fields[1:] if name not in given)
        raise InputError(f"{missing} is missing: pass all or none of {', '.join(RequestSizes._fields[1:])}")


def _from_one_tensor(given: list[Tensor], lengths: Tensor | None, server_major: list[int]) -> list[Tensor]:
    """Divide the one tensor of version 4; return the lists in the order table * servers + server."""
    if len(given) != 1:
        raise InputError(f"embeddings_list has {len(given)} tensors, expected 1 for version 4")
    (flat,) = _flat(given)
    parts = _lengths(
        lengths, "fid_list_emb_row_lenth", len(server_major), {"embeddings_list[0]": flat.shape[0]}
    )
    found = dict(zip(server_major, flat.split(parts), strict=True))
    return [found[number] for number in range(len(server_major))]


def _divided(
    lists: list[Tensor], offsets: RequestOffsets, sizes: RequestSizes, features: int
) -> list[LayoutRequest]:
    """Divide the concatenated requests of version 5."""
    batch_size = offsets.batch_size
    if isinstance(batch_size, int):
        batch_size = torch.tensor([batch_size], device="cpu")
    batches = _lengths(batch_size, "batch_size")
    count = len(batches)
    if not count:
        raise InputError("batch_size is empty; pass the batch size of at least one request")
    fids, rows_of_features, nfls = (
        whole.split(_lengths(lengths, f"{what}_size", count, {f"{what}_offset": whole.shape[0]}, expected))
        for what, whole, lengths, expected in (
            ("fid", offsets.fid_offset, sizes.fid_size, None),
            ("feature", offsets.feature_offset, sizes.feature_size, None),
            ("nfl", offsets.nfl_offset, sizes.nfl_size, features + 1),
        )
    )
    totals = {f"embeddings_list[{number}]": flat.shape[0] for number, flat in enumerate(lists)}
    elements = _lengths(sizes.emb_size, "emb_size", count * len(lists), totals)  # request-major
    rows = [flat.split(elements[number :: len(lists)]) for number, flat in enumerate(lists)]
    return [
        LayoutRequest([each[r] for each in rows], fids[r], rows_of_features[r], nfls[r], batches[r])
        for r in range(count)
    ]


def _lengths(
    tensor: Tensor | None,
    name: str,
    count: int | None = None,
    totals: Mapping[str, int] | None = None,
    expected: int | None = None,
) -> list[int]:
    """Check a vector of sizes; return it as a list."""
    # Inside torch.compile the values are unknown, and the checks are parts of the graph.
    given = checks.with_data(checks.integers(tensor, name, (count,)), name)
    divided = {} if totals is None else totals
    if not torch.compiler.is_compiling():
        found: list[int] = given.tolist()
        if any(length < 0 for length in found):
            raise InputError(f"{name} must not be negative, got {found}")
        if expected is not None and any(length != expected for length in found):
            raise InputError(f"{name} must be {expected} for each request, got {found}")
        for k, (what, total) in enumerate(divided.items()):
            if (length := sum(found[k :: len(divided)])) != total:
                raise InputError(f"{name} adds up to {length} for {what}, which has {total} elements")
        return found
    checks.require(given >= 0, f"{name} must not be negative")
    if expected is not None:
        checks.require(given == expected, f"{name} must be {expected} for each request")
    for k, (what, total) in enumerate(divided.items()):
        checks.require(given[k :: len(divided)].sum() == total, f"{name} does not add up to {what}")
    found = given.tolist()
    for length in found:  # the same again, for the compiler
        torch._check(length >= 0)
    for k, total in enumerate(divided.values()):
        torch._check(sum(found[k :: len(divided)]) == total)
    return found


def _flat(tensors: list[Tensor]) -> list[Tensor]:
    """Check float tensors of one dtype; return them flat, 16-bit floats as float32."""
    checks.same_floats(tensors, "embeddings_list")
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return [rows.reshape(-1).to(dtype) for rows in tensors]


def _moved(offsets: Tensor, device: torch.device) -> Tensor:
    return offsets if "meta" in (offsets.device.type, device.type) else offsets.to(device)


def _unsigned(tensor: Tensor, name: str) -> Tensor:
    """Convert an integer tensor, also of the unsigned dtypes that Monolith uses, to int64."""
    if isinstance(tensor, Tensor) and tensor.dtype in (torch.uint32, torch.uint64):
        tensor = tensor.to(torch.int64)
    return checks.int64(tensor, name)
