"""remote_predict: Monolith's call for predictions and lookups, with its argument names and its model names.

Monolith's call has no argument for where the servers are. Here a call gets a `ClientCache`, which has a
discovery, or uses the one cache of the process, whose discovery `set_default_discovery` sets. That cache
exists only for code that calls as Monolith's does; it is made by the first call and closed when the process
exits. New code uses `megalith.serving.PredictClient` or a `ClientCache` of its own.
"""

from __future__ import annotations

import atexit
import functools
import re
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.errors import DiscoveryError, InputError, RemoteError, UsageError
from megalith.ops import checks
from megalith.serving.client.channels import FINAL
from megalith.serving.client.credentials import Credentials
from megalith.serving.client.predict_client import ClientCache, Input, check_timeout
from megalith.serving.discovery.contract import Discovery
from megalith.serving.wire_names import PREDICT

DEADLINE_MILLIS = 30
_MIN_TIMEOUT = 1e-06


@functools.cache
def _process_clients() -> ClientCache:
    clients = ClientCache()
    atexit.register(clients.close)
    return clients


def set_default_discovery(discovery: Discovery | str | None) -> None:
    """Set the discovery of calls that pass none, and close what earlier such calls opened.

    Args:
        discovery: A started discovery, or a URL, which is opened at once; None removes the default.

    Raises:
        InputError: The URL is of an unknown kind.
        DiscoveryError: The discovery cannot be opened.
    """
    clients = _process_clients()
    clients.reset(discovery)
    if isinstance(discovery, str):
        try:
            clients.open(discovery)
        except BaseException:
            clients.reset()
            raise


def remote_predict(
    input_tensor_alias: Sequence[str],
    input_tensors: Sequence[Input],
    output_tensor_alias: Sequence[str],
    model_name: str | None,
    task: str | int,
    old_model_name: str | None = None,
    model_version: int = -1,
    fail_op_on_rpc_error: bool = True,
    max_rpc_deadline_millis: float = DEADLINE_MILLIS,
    output_types: Sequence[torch.dtype] | None = None,
    name: str | None = None,
    signature_name: str = PREDICT,
    *,
    discovery: Discovery | str | None = None,
    credentials: Credentials | None = None,
    clients: ClientCache | None = None,
) -> list[Tensor]:
    """Request predictions or rows from the servers of a model.

    Args:
        input_tensor_alias: Names of the inputs.
        input_tensors: Tensors, Ragged columns or strings, one for each name.
        output_tensor_alias: Names of the outputs.
        model_name: The model and its part, such as "movies:ps_0"; or the model alone, with the part in
            `task`.
        task: The number i of part "ps_i", or the name of a part, such as "entry". It must agree with the
            part of `model_name`.
        old_model_name: Requested if no server knows `model_name`; None: nothing. The part alone, such as
            "ps_0", is Monolith's old name of it on the same servers. If both fail, the error names both.
        model_version: -1 is the newest.
        fail_op_on_rpc_error: False returns empty outputs [0] if no server or discovery answers in time, no
            server has the model or version (one may still be loading it), or the response is malformed. A
            request that servers refuse as wrong raises all the same: an unknown input, output or signature,
            a wrong dtype or shape, a missing permission.
        max_rpc_deadline_millis: Deadline in milliseconds for opening the discovery and for all attempts.
        output_types: The dtype of each output; None: as the servers send them. Empty outputs have them too;
            without them they are float32.
        name: Name of the call in error messages.
        signature_name: The signature: "serving_default", "lookup", "raw_lookup" and so on.
        discovery: Used instead of that of `clients`; a URL is opened by the first call that names it, and
            kept.
        credentials: What the client presents to servers.
        clients: Holds connections and a discovery; None: those of the process.

    Returns:
        The outputs, in the order of `output_tensor_alias`.

    Raises:
        InputError: An argument is invalid, or an output has another dtype than `output_types` (a
            ValueError).
        UsageError: There is no discovery.
        RemoteError: No server answered in time, or the servers refuse the request.
        DiscoveryError: The discovery did not answer in time.
    """
    where = "remote_predict" if name is None else f"remote_predict {checks.text(name, 'name')!r}"
    inputs = _aliases(input_tensor_alias, "input_tensor_alias", where)
    outputs = _aliases(output_tensor_alias, "output_tensor_alias", where)
    if len(inputs) != len(checks.as_list(input_tensors, f"{where}: input_tensors")):
        raise InputError(f"{where}: {len(inputs)} input aliases for {len(input_tensors)} tensors")
    if not outputs:
        raise InputError(f"{where}: output_tensor_alias must name an output")
    dtypes = _dtypes(output_types, outputs, where)
    model, part = _model_and_part(model_name, task, where)
    old = _old_model(old_model_name, part, where)
    checks.flag(fail_op_on_rpc_error, f"{where}: fail_op_on_rpc_error")
    seconds = check_timeout(
        float(checks.number(max_rpc_deadline_millis, f"{where}: max_rpc_deadline_millis")) / 1000
    )
    end = time.monotonic() + seconds
    try:
        client = _clients(clients, discovery, where).client(
            model,
            part,
            discovery=discovery,
            credentials=credentials,
            timeout=seconds,
            old_model_name=old,
            model_version=model_version,
            signature_name=signature_name,
        )
        given = dict(zip(inputs, input_tensors, strict=True))
        left = max(end - time.monotonic(), _MIN_TIMEOUT)
        answer = client.predict(given, outputs=outputs, timeout=left)
    except (RemoteError, DiscoveryError) as error:
        wrong = isinstance(error, RemoteError) and error.code in FINAL
        if fail_op_on_rpc_error or wrong:
            raise
        return [torch.empty(0, dtype=dtype or torch.float32, device="cpu") for dtype in dtypes]
    for alias, dtype in zip(outputs, dtypes, strict=True):
        if dtype is not None and answer[alias].dtype != dtype:
            raise InputError(
                f"{where}: output {alias!r} is {answer[alias].dtype}, but output_types has {dtype}"
            )
    return [answer[alias] for alias in outputs]


def _clients(given: ClientCache | None, discovery: Discovery | str | None, where: str) -> ClientCache:
    if given is not None:
        if not isinstance(given, ClientCache):
            raise InputError(f"{where}: clients must be a ClientCache, got {checks.kind(given)}")
        return given
    clients = _process_clients()
    if discovery is None and clients.discovery is None:
        raise UsageError(
            f"{where}: no discovery: call set_default_discovery('static:host:port') first, or pass one"
        )
    return clients


def _aliases(given: Sequence[str], what: str, where: str) -> list[str]:
    if not isinstance(given, list | tuple) or not all(isinstance(alias, str) for alias in given):
        raise InputError(f"{where}: {what} must be a list of names, got {repr(given)[:100]}")
    if len(set(given)) != len(given):
        raise InputError(f"{where}: {what} contains a name twice")
    return list(given)


def _dtypes(
    given: Sequence[torch.dtype] | None, outputs: Sequence[str], where: str
) -> list[torch.dtype | None]:
    if given is None:
        return [None] * len(outputs)
    known = checks.as_list(given, f"{where}: output_types")
    if len(known) != len(outputs) or not all(isinstance(dtype, torch.dtype) for dtype in known):
        raise InputError(
            f"{where}: output_types must be {len(outputs)} torch dtypes, one for each output, "
            f"got {repr(given)[:100]}"
        )
    return known


def _model_and_part(model_name: str | None, task: str | int, where: str) -> tuple[str, str | int]:
    model, colon, part = model_name.rpartition(":") if isinstance(model_name, str) else ("", "", "")
    if not (model if colon else part):
        raise InputError(
            f"{where}: model_name must name a model, as in 'movies:ps_0' or 'movies', got {model_name!r}"
        )
    if not colon:
        return part, task
    number = re.search(r"_(\d+)$", part)
    is_number = isinstance(task, int) and not isinstance(task, bool)
    same_number = is_number and (number is None or int(number[1]) == task)
    if not (task == part if isinstance(task, str) else same_number):
        raise InputError(f"{where}: model_name {model_name!r} names another part than task {task!r}")
    return model, part


def _old_model(old_model_name: str | None, part: str | int, where: str) -> str | None:
    """Return an old name without its part; None if there is no old name."""
    if old_model_name is None or not checks.text(old_model_name, f"{where}: old_model_name"):
        return None
    model, colon, own = old_model_name.rpartition(":")
    expected = f"ps_{part}" if isinstance(part, int) else part
    if colon and own != expected:
        raise InputError(f"{where}: old_model_name {old_model_name!r} names another part than {expected!r}")
    return model if colon else own
