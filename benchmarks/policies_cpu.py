"""Tables with policies and other optimizers: what they cost, and every optimizer against torch.optim.

    python benchmarks/policies_cpu.py [--quick] [--only NAME,...] [--output PATH]

Method: as in table_cpu.py: one process, variants take turns on rotated batches, one-thread CPU time, medians
of paired ratios. A step is forward, pool, backward and update of 100,000 ids in bags of 8. torch.optim's SGD,
Adagrad and SparseAdam take sparse gradients; its other optimizers reject them, so their EmbeddingBag has
dense gradients. Optimizers that torch lacks are compared with our Adagrad. A full run saves
results/policies_cpu-DATE.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from harness import (
    Bar,
    command_line,
    interleave,
    machine,
    print_bars,
    print_table,
    progress,
    result_path,
    versions,
    write_result,
)
from torch import Tensor
from workloads import Batch, Batches, Ours, Workload, new_weights, random_keys

from megalith.table import (
    FTRL,
    LAMB,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    AMSGrad,
    DelayCompensated,
    DynamicWdAdagrad,
    GroupAdagrad,
    GroupFTRL,
    Lion,
    Momentum,
    MovingAverage,
    Optimizer,
    RMSProp,
    RMSPropV2,
    RowWiseAdagrad,
    State,
)

LR = 0.01
Maker = Callable[[list[Tensor]], torch.optim.Optimizer]


class AdagradInTorch(Optimizer):
    """Adagrad as a user would write it: what a step in torch costs."""

    name: ClassVar[str] = "adagrad in torch"

    def states(self, dim: int) -> tuple[State, ...]:
        return (State("sum", dim),)

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        state["sum"].addcmul_(grads, grads)
        rows.addcdiv_(grads, state["sum"].sqrt().add_(1e-10), value=-lr)


SPARSE: dict[str, tuple[Optimizer, Maker]] = {
    "SGD": (SGD(LR), lambda p: torch.optim.SGD(p, lr=LR)),
    "Adagrad": (Adagrad(LR), lambda p: torch.optim.Adagrad(p, lr=LR)),
    "Adam": (Adam(LR), lambda p: torch.optim.SparseAdam(p, lr=LR)),
}
"""torch's optimizer takes sparse gradients."""

DENSE: dict[str, tuple[Optimizer, Maker]] = {
    "Momentum": (Momentum(LR), lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9)),
    "AdamW": (AdamW(LR), lambda p: torch.optim.AdamW(p, lr=LR)),
    "AMSGrad": (AMSGrad(LR), lambda p: torch.optim.Adam(p, lr=LR, amsgrad=True)),
    "Adadelta": (Adadelta(LR), lambda p: torch.optim.Adadelta(p, lr=LR)),
    "RMSProp": (RMSProp(LR), lambda p: torch.optim.RMSprop(p, lr=LR)),
}
"""torch's optimizer rejects sparse gradients, or does not save work with them."""

OURS: dict[str, Optimizer] = {
    "Adam, by row": Adam(LR, bias_correction="row"),
    "Adam, nesterov": Adam(LR, nesterov=True),
    "RowWiseAdagrad": RowWiseAdagrad(LR),
    "DynamicWdAdagrad": DynamicWdAdagrad(LR, weight_decay=0.01),
    "GroupAdagrad": GroupAdagrad(LR),
    "FTRL": FTRL(LR),
    "GroupFTRL": GroupFTRL(LR),
    "RMSPropV2": RMSPropV2(LR),
    "Lion": Lion(LR),
    "LAMB": LAMB(LR),
    "MovingAverage": MovingAverage(),
    "DelayCompensated(Adagrad)": DelayCompensated(Adagrad(LR)),
    "an Adagrad written in torch": AdagradInTorch(LR),
}
"""torch.optim does not have it."""


class TorchBag:
    """nn.EmbeddingBag with an optimizer of torch."""

    def __init__(self, make: Maker, weights: Tensor, sparse: bool) -> None:
        self.bag = torch.nn.EmbeddingBag.from_pretrained(
            weights, freeze=False, mode="sum", sparse=sparse, include_last_offset=True
        )
        self.optimizer = make([self.bag.weight])

    def step(self, batch: Batch) -> None:
        self.bag(batch.dense, batch.offsets).backward(batch.grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Run:
    """Sizes of this run, and its results so far."""

    def __init__(self, quick: bool) -> None:
        self.rows, self.ids = (10**5, 20_000) if quick else (10**6, 100_000)
        self.rounds = 3 if quick else 11
        self.sections: dict[str, Any] = {}
        self.bars: list[Bar] = []


def optimizers(run: Run) -> None:
    """Compares every optimizer with torch.optim, or with our Adagrad where torch has none."""
    keys = random_keys(run.rows)
    workload = Workload(run.rows, 16, run.ids, "uniform")
    batches = Batches(keys)(workload)
    baseline = Ours(Adagrad(LR), keys, 16)
    records = []
    for name, ours, peer in _pairs(run.rows):
        variants = {"ours": Ours(ours, keys, 16), "adagrad": baseline}
        calls: dict[str, Callable[[Batch], object]] = {k: v.step for k, v in variants.items()}
        if peer is not None:
            calls["torch"] = peer.step
        times = interleave(calls, batches, run.rounds)
        record: dict[str, Any] = {
            "optimizer": name,
            "ns_per_id": times.median("ours") / run.ids * 1e9,
            "of_adagrad": times.ratio("ours", "adagrad"),
        }
        if peer is not None:
            record["torch_ns_per_id"] = times.median("torch") / run.ids * 1e9
            record["ratio"] = times.ratio("torch", "ours")
            gradients = "sparse" if name in SPARSE else "dense"
            run.bars.append(Bar(f"{name} vs torch.optim, {gradients} gradients", record["ratio"].median, 3.0))
        records.append(record)
        progress(f"  {name}: {record['ns_per_id']:.0f} ns per id, x{record.get('ratio', '-')} torch")
    run.sections["optimizers"] = {"workload": str(workload), "records": records}
    print_table(
        f"Optimizer step, {workload}, ns per id",
        ("optimizer", "ours", "our Adagrad = 1", "torch.optim", "torch / ours"),
        [
            (
                r["optimizer"],
                f"{r['ns_per_id']:.1f}",
                str(r["of_adagrad"]),
                f"{r['torch_ns_per_id']:.1f}" if "ratio" in r else "-",
                str(r.get("ratio", "-")),
            )
            for r in records
        ],
    )


def _pairs(rows: int) -> Any:
    for pairs, sparse in ((SPARSE, True), (DENSE, False)):
        for name, (ours, make) in pairs.items():
            yield name, ours, TorchBag(make, new_weights(rows, 16), sparse)
    for name, ours in OURS.items():
        yield name, ours, None


SECTIONS: dict[str, Callable[[Run], None]] = {"optimizers": optimizers}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join(SECTIONS)}")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    chosen = [name for name in options.only.split(",") if name] or list(SECTIONS)
    torch.set_num_threads(1)
    about = {"machine": machine(), "versions": versions(("megalith", "torch", "numpy"))}
    run = Run(options.quick)
    for name in chosen:
        progress(name)
        SECTIONS[name](run)
    print_bars(run.bars)
    whole = not options.quick and chosen == list(SECTIONS)
    path = options.output or (result_path("policies_cpu") if whole else None)
    if path is not None:
        content = {**about, "command": command_line(sys.argv[1:]), **run.sections, "bars": run.bars}
        write_result(path, content)


if __name__ == "__main__":
    main()
