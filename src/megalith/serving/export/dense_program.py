"""Dense program: a model's dense part, traced by torch.export, with weights that can be replaced.

There are two copies. Requests run the front copy. New weights are written to the back copy, which then
becomes the front copy, so no request sees a mixture. A copy that is in use keeps its weights.
"""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from megalith.errors import ExportError, InputError, RemoteError
from megalith.serving.export.program_safety import check_archive, load_archive

PREFIX = "model."  # Prefix that torch.export adds to the names of the model's weights
IDLE_SECONDS = (
    60.0  # How long new weights wait for requests that compute with the weights before the last ones
)


class DenseProgram:
    """Computes outputs [B, ...] from rows by name and dense values. Thread-safe."""

    def __init__(self, path: Path) -> None:
        try:
            data = path.read_bytes()
            check_archive(data, str(path))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # Loaded twice: two modules of one program would share weights.
                programs = [load_archive(data) for _ in range(2)]
                self._copies = [ProgramCopy(program) for program in programs]
        except ExportError:
            raise
        except Exception as error:  # torch raises many types for a damaged archive
            raise ExportError(f"{path} is not a program of torch.export: {error}") from None
        self._front = 0
        self._writing = threading.Lock()
        self._same = self._copies[0].same
        self._exported = {name: weight.detach().clone() for name, weight in self._copies[0].weights.items()}
        self._now = dict(self._exported)
        self.names = {name: tuple(weight.shape) for name, weight in self._exported.items()}
        """Name -> shape of each weight; a weight with several names has its first."""
        self._compiled: Runner | None = None

    @property
    def front(self) -> ProgramCopy:
        """The copy with the newest weights."""
        return self._copies[self._front]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights in use; do not write to them."""
        return dict(self._now)

    def __call__(self, rows: dict[str, Any], dense: Tensor | None) -> Sequence[Tensor]:
        """Return the outputs, in the order of the signature."""
        while True:
            copy = self.front
            copy.hold()
            try:
                if copy is self.front:  # otherwise it was replaced and may change
                    return copy(rows, dense)
            finally:
                copy.release()

    def use_compiled(self, compiled: Runner) -> None:
        """Compute with a compiled program while the exported weights are in use."""
        with self._writing:
            self._compiled = compiled
            for copy in self._copies:
                copy.compiled = compiled if copy.is_exported else None

    def check(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            if not isinstance(weight, Tensor) or not weight.is_cpu:
                raise InputError(f"dense weight {str(name)[:100]!r} must be a tensor on the CPU")
            if name not in self._same:
                raise InputError(f"dense weight {name!r} is unknown (known: {', '.join(self._exported)})")
            known = self._exported[self._same[name]]
            if weight.dtype != known.dtype or weight.shape != known.shape:
                raise InputError(
                    f"dense weight {name!r} is {weight.dtype} {list(weight.shape)}, "
                    f"not {known.dtype} {list(known.shape)}"
                )
            if weight.is_floating_point() and not bool(torch.isfinite(weight).all()):
                raise InputError(f"dense weight {name!r} holds NaN or Inf")

    def set(self, weights: Mapping[str, Tensor]) -> ProgramCopy:
        """Replace weights, which passed `check`, in one step."""
        # The previous front copy keeps its weights until the next call.
        with self._writing:
            self._now.update({self._same[name]: weight.detach().clone() for name, weight in weights.items()})
            back = self._copies[1 - self._front]
            back.wait_idle()
            # A compiled program may hold small weights in its code.
            back.is_exported = weights is self._exported
            back.compiled = self._compiled if back.is_exported else None
            with torch.no_grad():
                for name, weight in back.weights.items():
                    weight.copy_(self._now[name])
            self._front = 1 - self._front
            return back

    def reset(self) -> ProgramCopy:
        """Restore the exported weights; see `set`."""
        return self.set(self._exported)


class ProgramCopy:
    """One copy of the program. Its weights do not change between `hold` and `release`."""

    def __init__(self, program: ExportedProgram) -> None:
        # Guards would be source code from the archive; the batches of a Servable have one size.
        self.module = program.module(check_guards=False)
        constant = set(program.graph_signature.non_persistent_buffers)
        self.weights: dict[str, Tensor] = {}
        self.same: dict[str, str] = {}
        first: dict[tuple[int, tuple[int, ...]], str] = {}
        for full, weight in (*self.module.named_parameters(), *self.module.named_buffers()):
            if full in constant:
                continue
            name = full.removeprefix(PREFIX)
            # A shared weight shares its memory; an empty weight has none.
            place = (weight.data_ptr(), tuple(weight.shape))
            self.same[name] = first.setdefault(place, name) if weight.numel() else name
            if self.same[name] == name:
                self.weights[name] = weight
        self._run = _function_of(self.module)
        self._names = program.call_spec.in_spec.child(0).child(0).context
        """The names of rows, in the order of the function's arguments."""
        self._has_dense = len(program.call_spec.in_spec.child(0).children()) > 1
        self._is_old = program.call_spec.out_spec.is_leaf()
        self.is_exported = True
        self.compiled: Runner | None = None
        self._running = self._waiting = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def __call__(self, rows: dict[str, Any], dense: Tensor | None) -> Sequence[Tensor]:
        """Return the outputs, in the order of the signature."""
        if self.compiled is not None:
            return self.compiled(flatten(rows, dense))
        flat = flatten({name: rows[name] for name in self._names}, dense)
        outputs = self._run(*flat) if dense is not None or not self._has_dense else self._run(*flat, None)
        if self._is_old:  # an export of format version 1
            logits = outputs[0].float()
            return logits, torch.sigmoid(logits)
        return outputs

    def hold(self) -> None:
        with self._lock:
            self._running += 1

    def release(self) -> None:
        with self._lock:
            self._running -= 1
            if self._waiting and not self._running:
                self._changed.notify_all()

    def wait_idle(self) -> None:
        """Wait until no request uses the copy."""
        with self._changed:
            self._waiting += 1
            idle = self._changed.wait_for(lambda: not self._running, IDLE_SECONDS)
            self._waiting -= 1
        if not idle:
            raise RemoteError(
                f"dense weights: a request has computed with earlier weights for {IDLE_SECONDS:g} s, so they "
                "cannot be replaced",
                code="DEADLINE_EXCEEDED",
            )


def _function_of(module: torch.fx.GraphModule) -> Callable[..., Sequence[Tensor]]:
    """Return a function that calls the ops of a program on its flat inputs."""
    # torch.fx's own function looks up each op and weight by its names in every call: 62 us instead of 41 for
    # a DeepFM and one row. The source holds numbers only, no text of the archive.
    nodes = list(module.graph.nodes)
    names = {node: f"v{number}" for number, node in enumerate(nodes)}
    last_use = {used: node for node in nodes for used in node.all_input_nodes}
    bound: dict[str, Any] = {}

    def source(value: Any) -> str:
        if isinstance(value, torch.fx.Node):
            return names[value]
        if isinstance(value, list | tuple):
            items = "".join(f"{source(each)}, " for each in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        name = f"c{len(bound)}"
        bound[name] = value
        return name

    lines = [f"def run({', '.join(names[node] for node in nodes if node.op == 'placeholder')}):"]
    for node in nodes:
        if node.op == "get_attr":
            bound[names[node]] = operator.attrgetter(node.target)(module)
        elif node.op == "call_function":
            arguments = [source(each) for each in node.args]
            arguments += [f"**{{{source(key)}: {source(each)}}}" for key, each in node.kwargs.items()]
            lines.append(f"{names[node]} = {source(getattr(node.target, '_op', node.target))}")
            lines[-1] += f"({', '.join(arguments)})"
            freed = [names[used] for used in node.all_input_nodes if last_use[used] is node]
            lines += [f"{name} = None" for name in freed if name not in bound]
        elif node.op == "output":
            lines.append(f"return {source(node.args[0])}")
    exec("\n ".join(lines), bound)
    run: Callable[..., Sequence[Tensor]] = bound["run"]
    return run


Runner = Callable[[list[Tensor]], Sequence[Tensor]]


def flatten(rows: dict[str, Any], dense: Tensor | None) -> list[Tensor]:
    """Return the inputs of a program in the order in which torch.export flattens them."""
    flat: list[Tensor] = []
    for each in rows.values():
        if isinstance(each, Tensor):
            flat.append(each)
        else:
            flat += each
    return flat if dense is None else [*flat, dense]
