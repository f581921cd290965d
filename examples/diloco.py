"""Two remote peers train one model: each makes H local steps, then their updates are gathered, repeatedly.

The result is compared with one peer that takes the same number of steps, each with the data of both.
Run: python examples/diloco.py
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from megalith.gather import (
    ErrorFeedback,
    GatherPlan,
    Label,
    ObjectStore,
    OuterUpdate,
    PayloadSchema,
    UpdateConfig,
    compress,
    open_object_store,
    publish,
    run_window,
)

FEATURES, SAMPLES, BATCH = 16, 2048, 64
Data = tuple[Tensor, Tensor]


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))


def samples(seed: int, count: int = SAMPLES) -> Data:
    """Inputs and noisy targets computed from hidden weights."""
    make = torch.Generator().manual_seed(seed)
    weights = torch.randn(FEATURES, generator=torch.Generator().manual_seed(42))
    inputs = torch.randn(count, FEATURES, generator=make)
    return inputs, torch.tanh(inputs @ weights / 4) + 0.2 * torch.randn(count, generator=make)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Data, steps: range, batch: int = BATCH
) -> None:
    inputs, wanted = data
    for step in steps:
        rows = (torch.arange(batch) + step * batch) % len(inputs)
        loss = nn.functional.mse_loss(model(inputs[rows]).squeeze(1), wanted[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Peer:
    """Has its own data. It loads the shared weights, trains, and publishes its update."""

    def __init__(self, uid: int, schema: PayloadSchema, store: ObjectStore) -> None:
        self.uid, self.schema, self.store = uid, schema, store
        self.model = new_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.003)
        self.feedback = ErrorFeedback(decay=1.0)
        self.data = samples(uid)

    def work(self, shared: nn.Module, window: int, local_steps: int) -> None:
        self.model.load_state_dict(shared.state_dict())
        train(self.model, self.optimizer, self.data, range(window * local_steps, (window + 1) * local_steps))
        before, after = dict(shared.named_parameters()), dict(self.model.named_parameters())
        update = {name: (before[name] - after[name]).detach() for name in before}
        compressed = compress(update, self.schema, feedback=self.feedback)
        publish(self.store, compressed, Label("diloco", window, self.uid))


def held_out_loss(model: nn.Module) -> float:
    inputs, wanted = samples(99, 8192)
    with torch.no_grad():
        return nn.functional.mse_loss(model(inputs).squeeze(1), wanted).item()


def together(windows: int, local_steps: int) -> float:
    """The loss of two peers with gathers."""
    shared, store = new_model(), open_object_store("memory://")
    schema = PayloadSchema.of(shared, chunk=32, keep=256, bins=256)
    peers = [Peer(uid, schema, store) for uid in (1, 2)]
    update = OuterUpdate(schema)
    for window in range(windows):
        for peer in peers:
            peer.work(shared, window, local_steps)
        plan = GatherPlan(
            run="diloco",
            window=window,
            schema=schema,
            primary=(1, 2),
            update=UpdateConfig(optimizer="nesterov", lr=0.7, momentum=0.5, mean="peers"),
        )
        report = run_window(plan, shared, update, {"default": store})
        assert report.decision.go, report.decision.reason
    return held_out_loss(shared)


def alone(steps: int) -> float:
    """The loss of one peer with the data of both: each step has a batch of each."""
    model = new_model()
    data = tuple(torch.stack(both, 1).flatten(0, 1) for both in zip(samples(1), samples(2), strict=True))
    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    train(model, optimizer, (data[0], data[1]), range(steps), 2 * BATCH)
    return held_out_loss(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=30)
    parser.add_argument("--local-steps", type=int, default=32, help="H: steps between two gathers")
    given = parser.parse_args()
    torch.set_num_threads(1)
    gathered = together(given.windows, given.local_steps)
    single = alone(given.windows * given.local_steps)
    print(f"two peers, gathered every {given.local_steps} steps: loss {gathered:.5f}")
    print(f"one peer with the data of both, the same number of steps: loss {single:.5f}")
    print(f"ratio {gathered / single:.4f}")


if __name__ == "__main__":
    main()
