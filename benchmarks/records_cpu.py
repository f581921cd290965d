"""Reading Monolith Examples into batches on one core, against protobuf in Python.

    python benchmarks/records_cpu.py [--examples N] [--rounds N] [--output PATH]

A file holds Examples with 30 features of 3 fids and a label. `MonolithReader` reads it into batches of 512
rows. The peer parses the same records with protobuf's message classes (upb, in C) and builds the same tensors
in Python. Both read the same file, interleaved round by round; the CPU time of the thread is measured. A full
run saves results/records_cpu-DATE.json.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

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

from megalith import Ragged
from megalith.compat.monolith import MonolithReader
from megalith.compat.monolith.feature_configs import message_type
from megalith.data.record_files import RecordFile, write_records

FEATURES, FIDS, BATCH = 30, 3, 512
NAMES = [f"feature_{number}" for number in range(FEATURES)]
FULL = 50_000
Columns = tuple[dict[str, Ragged], torch.Tensor]


def write_examples(path: Path, count: int) -> int:
    """Writes the file and returns its size in bytes."""
    draw = random.Random(1)
    example_type = message_type("monolith.io.proto.Example")
    messages = []
    for _ in range(count):
        example = example_type(label=[float(draw.random() < 0.3)])
        for slot, name in enumerate(NAMES):
            feature = example.named_feature.add(name=name).feature
            feature.fid_v2_list.value.extend(slot << 48 | draw.getrandbits(48) for _ in range(FIDS))
        messages.append(example.SerializeToString())
    with path.open("wb") as file:
        write_records(file, messages, "length")
    return path.stat().st_size


def read_ours(path: Path) -> Iterator[Columns]:
    for batch in MonolithReader(path, "example", features=NAMES, batch_size=BATCH):
        yield batch.features, batch.labels


def read_protobuf(path: Path) -> Iterator[Columns]:
    parse = message_type("monolith.io.proto.Example").FromString
    examples = []
    for record in RecordFile(path, "length").read():
        examples.append(parse(record.message))
        if len(examples) == BATCH:
            yield build(examples)
            examples = []
    if examples:
        yield build(examples)


def build(examples: list[object]) -> Columns:
    """The tensors of some Examples."""
    values: dict[str, list[int]] = {name: [] for name in NAMES}
    lengths: dict[str, list[int]] = {name: [0] * len(examples) for name in NAMES}
    labels = []
    for row, example in enumerate(examples):
        labels.append(example.label[0])
        for named in example.named_feature:
            fids = named.feature.fid_v2_list.value
            values[named.name].extend(fids)
            lengths[named.name][row] = len(fids)
    features = {
        name: Ragged.from_lengths(torch.tensor(values[name], dtype=torch.int64), torch.tensor(lengths[name]))
        for name in NAMES
    }
    return features, torch.tensor(labels, dtype=torch.float32)


def consume(read: Callable[[Path], Iterator[Columns]]) -> Callable[[Path], int]:
    return lambda path: sum(len(labels) for _, labels in read(path))


def check_equal(path: Path) -> None:
    for (ours, labels), (theirs, their_labels) in zip(read_ours(path), read_protobuf(path), strict=True):
        assert torch.equal(labels, their_labels)
        for name in NAMES:
            assert torch.equal(ours[name].values, theirs[name].values)
            assert torch.equal(ours[name].row_splits, theirs[name].row_splits)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=FULL)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "examples.pb"
        progress(f"writing {options.examples:,} Examples")
        size = write_examples(path, options.examples)
        check_equal(path)
        progress("both readers give equal tensors; timing")
        variants = {"megalith": consume(read_ours), "protobuf": consume(read_protobuf)}
        timings = interleave(variants, [path], options.rounds)
    rates = {name: options.examples / timings.median(name) for name in variants}
    ratio = timings.ratio("protobuf", "megalith")
    megabytes = size / options.examples / 1e6
    rows = [(name, f"{rate:,.0f}", f"{rate * megabytes:.0f}") for name, rate in rates.items()]
    print_table(f"{FEATURES} features of {FIDS} fids", ("reader", "Examples/s", "MB/s"), rows)
    bars = [
        Bar("Examples/s of one core", rates["megalith"], 50_000),
        Bar("protobuf in Python / megalith", ratio.median, note=str(ratio)),
    ]
    print_bars(bars)
    content = {
        "benchmark": "records_cpu",
        "command": command_line(arguments),
        "machine": machine(),
        "versions": versions(("megalith", "torch", "numpy", "protobuf")),
        "examples": options.examples,
        "bytes": size,
        "features": FEATURES,
        "fids_per_feature": FIDS,
        "seconds": timings.seconds,
        "examples_per_second": rates,
        "ratio": ratio,
        "bars": bars,
    }
    if options.output or options.examples >= FULL:
        write_result(options.output or result_path("records_cpu"), content)


if __name__ == "__main__":
    main(sys.argv[1:])
