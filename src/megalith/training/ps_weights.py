"""What a run keeps on parameter servers: the tables, and the dense weights as rows of a table.

`DenseWeights` concatenates the dense weights and cuts them into rows of WIDTH numbers. So what holds for
tables holds for them: workers read and push them like embeddings, servers apply pushes in the mode of the
run, and a server that ends gets them back from its checkpoint and its log, each update once. Their optimizer
is torch's own Adam.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from megalith import checkpoint
from megalith.checkpoint.model_state import dense_state
from megalith.distributed.dense_parameters import dense_parameters
from megalith.errors import UsageError
from megalith.nn import EmbeddingCollection, Feature
from megalith.ps import Servers, ServerShards
from megalith.table import Chunk, Optimizer, State, TableConfig, Zeros
from megalith.training.config import RunConfig
from megalith.training.model import engine_of, router_of

DENSE_TABLE = "dense"
WIDTH = 1024
"""Numbers of a row."""


@dataclass(frozen=True)
class DenseAdam(Optimizer):
    """torch.optim.Adam with its defaults, as an optimizer of rows; t is the global step + 1."""

    name: ClassVar[str] = "dense_adam"

    def states(self, dim: int) -> tuple[State, ...]:
        # Both moments.
        return State("exp_avg", dim), State("exp_avg_sq", dim)

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        # The same operations as torch's optimizer, so the same bits.
        adam(
            [rows],
            [grads],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [torch.tensor(float(step), device="cpu")],
            foreach=False,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=lr,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )


class DenseWeights:
    """See the module. An optimizer for `Steps`, whose `step` pushes the gradients."""

    def __init__(
        self, model: nn.Module, lr: float, place: Callable[[list[TableConfig]], ServerShards]
    ) -> None:
        self._parameters = [p for _, p in dense_parameters(model) if p.requires_grad]
        buffers = dense_state(model).keys() - dict(dense_parameters(model)).keys()
        if buffers:
            raise UsageError(
                f"the model has buffers ({', '.join(sorted(buffers))}), which parameter servers do not "
                "average: train it in one process, or replace layers such as batch norm"
            )
        self._sizes = [p.numel() for p in self._parameters]
        self._rows = -(-sum(self._sizes) // WIDTH)
        self._ids = torch.arange(self._rows, device="cpu")
        self._empty = torch.zeros(self._rows * WIDTH - sum(self._sizes), device="cpu")
        self.shards = place(
            [TableConfig(DENSE_TABLE, dim=WIDTH, optimizer=DenseAdam(lr), initializer=Zeros())]
        )
        self.at = 0

    # ---- a worker

    def request(self) -> Callable[[], None]:
        lookup = self.shards.lookup({DENSE_TABLE: self._ids})
        lookup.fetch()
        return lambda: self._write(lookup.rows[DENSE_TABLE])

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def step(self) -> None:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        self.shards.apply_gradients(
            {DENSE_TABLE: self._ids}, {DENSE_TABLE: self._as_rows(grads)}, step=self.at
        )

    # ---- all weights with the state of their optimizer

    def load(self, optimizer: torch.optim.Optimizer) -> None:
        state = {}
        for name in ("exp_avg", "exp_avg_sq"):
            own = [optimizer.state[p].get(name) for p in self._parameters]
            values = zip(own, self._parameters, strict=True)
            state[name] = self._as_rows([torch.zeros_like(p) if x is None else x for x, p in values])
        rows = self._as_rows(self._parameters)
        columns = {c.key: state[c.name] for c in self.shards.configs[DENSE_TABLE].state_columns}
        time = torch.zeros(self._rows, dtype=torch.int64, device="cpu")
        self.shards.restore(DENSE_TABLE, Chunk(self._ids, rows=rows, state=columns, time=time))
        self.shards.flush()

    def fetch(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        chunks = list(self.shards.scan(DENSE_TABLE))
        order = torch.cat([chunk.ids for chunk in chunks]).argsort()
        self._write(torch.cat([chunk.rows for chunk in chunks])[order])
        if not step:
            return
        state = {}
        for column in self.shards.configs[DENSE_TABLE].state_columns:
            found = torch.cat([chunk.state[column.key] for chunk in chunks])[order]
            state[column.name] = self._as_weights(found)
        for number, parameter in enumerate(self._parameters):
            own = {name: values[number].clone() for name, values in state.items()}
            optimizer.state[parameter] = {"step": torch.tensor(float(step), device="cpu"), **own}

    def save(self, path: Path) -> None:
        """Write a checkpoint that servers start again from; their logs then begin there."""
        checkpoint.save(EmbeddingCollection(self.shards, [Feature(DENSE_TABLE, DENSE_TABLE)]), path)

    # ---- rows

    def _as_rows(self, weights: Sequence[Tensor]) -> Tensor:
        flat = [each.detach().reshape(-1) for each in weights]
        return torch.cat([*flat, self._empty]).view(self._rows, WIDTH)

    def _as_weights(self, rows: Tensor) -> list[Tensor]:
        pieces = rows.reshape(-1)[: sum(self._sizes)].split(self._sizes)
        return [piece.view_as(p) for piece, p in zip(pieces, self._parameters, strict=True)]

    @torch.no_grad()
    def _write(self, rows: Tensor) -> None:
        for parameter, values in zip(self._parameters, self._as_weights(rows), strict=True):
            parameter.copy_(values)


TABLES, DENSE = "tables", "dense"
"""The names of the tables and of the dense weights on the servers."""


def server_shards(
    config: RunConfig,
    servers: Servers,
    log: str,
    name: str,
    tables: Sequence[TableConfig],
    *,
    worker: int,
    observer: bool = False,
    written: list[int] | None = None,
) -> ServerShards:
    train = config.train
    return ServerShards(
        tables,
        servers=servers,
        name=name,
        worker=worker,
        num_workers=train.workers,  # those that the first step waits for
        mode=train.server_mode,
        staleness=train.staleness,
        router=router_of(train, len(servers)) if name == TABLES else "roundrobin",
        engine=engine_of(train),
        seed=train.seed,
        wire=config.wire if name == TABLES else "float32",
        timeout=train.timeout,
        recovery=checkpoint.recovery(Path(log), log=train.server_log),
        observer=observer,
        written=written,
    )
