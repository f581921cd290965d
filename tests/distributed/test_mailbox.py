"""Exchanges through shared memory: real processes on one host, hard time limits, ranks that die or lie."""

from __future__ import annotations

import os
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith.errors import InputError, UsageError

if sys.platform != "linux":
    pytest.skip("mailboxes need Linux", allow_module_level=True)

from megalith._native import Mailbox
from tests.distributed.ranks import run_ranks

LONG = 100.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """In shared memory where there is some, as in use."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as name:
        yield Path(name)
        assert not list(Path(name).iterdir()), "a mailbox was left behind"


def run(folder: Path, size: int, work: Callable[..., Any], *args: Any, killed: Sequence[int] = ()) -> None:
    """Runs `work(box, rank, size, *args)` in each of `size` processes."""
    run_ranks(with_box, folder, work, args, world_size=size, lost=killed)


def with_box(folder: Path, work: Callable[..., Any], args: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    box = Mailbox(str(folder / str(rank)), rank, size)
    dist.barrier()
    box.connect([str(folder / str(r)) for r in range(size)])
    dist.barrier()
    box.unlink()
    work(box, rank, size, *args)
    box.close()


def part(exchange: int, sender: int, receiver: int, largest: int) -> Tensor:
    """What `sender` sends to `receiver`: any rank can work it out."""
    generator = torch.Generator().manual_seed(exchange * 10_000 + sender * 100 + receiver)
    bound = [1, 100, largest][int(torch.randint(3, (), generator=generator))]
    size = int(torch.randint(bound, (), generator=generator))
    return torch.randint(256, (size,), generator=generator, dtype=torch.uint8)


def nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def exchange_parts(box: Mailbox, rank: int, size: int, exchanges: int, largest: int) -> None:
    for k in range(exchanges):
        out = [part(k, rank, r, largest) for r in range(size)]
        expected = [part(k, r, rank, largest) for r in range(size)]
        recv = torch.empty(sum(map(len, expected)), dtype=torch.uint8)
        missing = box.exchange(torch.cat(out), [*map(len, out)], recv, [*map(len, expected)], LONG)
        assert missing == []
        assert torch.equal(recv, torch.cat(expected))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_part_arrives_where_it_belongs(folder: Path, size: int) -> None:
    run(folder, size, exchange_parts, 150, 5_000)


def test_parts_of_any_size_arrive_through_files_that_do_not_grow(folder: Path) -> None:
    run(folder, 3, exchange_parts, 4, 9_000_000)


def leave_first(box: Mailbox, rank: int, size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert box.exchange(nothing(), [0, 0], nothing(), [0, 0], 0.2) == [1]
    with pytest.raises(UsageError, match="make new mailboxes on all ranks"):
        box.exchange(nothing(), [0, 0], nothing(), [0, 0], 0.2)


def test_a_rank_that_died_is_named_and_the_box_is_broken(folder: Path) -> None:
    run(folder, 2, leave_first, killed=[1])


def expect_too_much(box: Mailbox, rank: int, size: int) -> None:
    send, recv = torch.zeros(7, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)
    if rank == 0:
        assert box.exchange(send, [0, 7], nothing(), [0, 0], LONG) == []
        return
    with pytest.raises(InputError, match="rank 0 sent 7 bytes to rank 1, which expected 9"):
        box.exchange(nothing(), [0, 0], recv, [9, 0], LONG)
    with pytest.raises(UsageError):
        box.exchange(nothing(), [0, 0], recv, [9, 0], LONG)


def test_a_size_other_than_announced_names_the_rank_and_both_sizes(folder: Path) -> None:
    run(folder, 2, expect_too_much)


class Signalled(Exception):
    pass


def be_interrupted(box: Mailbox, rank: int, size: int) -> None:
    if rank == 1:
        return

    def handler(*_: object) -> None:
        raise Signalled

    signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))

    def wait() -> None:
        timer.start()  # runs while the exchange waits, which therefore does not hold the GIL
        box.exchange(nothing(), [0, 0], nothing(), [0, 0], LONG)

    with pytest.raises(Signalled):
        wait()


def test_a_signal_ends_a_long_wait(folder: Path) -> None:
    run(folder, 2, be_interrupted)


def send_over_4_gib(box: Mailbox, rank: int, size: int) -> None:
    n = 4 * 2**30 + 12_345
    none: list[int] = [0, 0]
    if rank == 0:
        send = torch.zeros(n, dtype=torch.uint8)  # takes no memory until it is written
        send[[0, 2**32 - 1, 2**32, n - 1]] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
        assert box.exchange(send, [0, n], nothing(), none, LONG) == []
        return
    recv = torch.empty(n, dtype=torch.uint8)
    assert box.exchange(nothing(), none, recv, [n, 0], LONG) == []
    assert recv[[0, 2**32 - 1, 2**32, n - 1]].tolist() == [1, 2, 3, 4]
    assert int(recv.count_nonzero()) == 4


@pytest.mark.soak
def test_a_part_over_4_gib_arrives(folder: Path) -> None:
    run(folder, 2, send_over_4_gib)


# ---- one process


def pair(folder: Path) -> tuple[Mailbox, Mailbox, list[str]]:
    paths = [str(folder / "a"), str(folder / "b")]
    return Mailbox(paths[0], 0, 2), Mailbox(paths[1], 1, 2), paths


def test_a_file_is_exclusive_private_and_gone_with_its_box(folder: Path) -> None:
    path = folder / "a"
    box = Mailbox(str(path), 0, 1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError, match=str(path)):
        Mailbox(str(path), 0, 1)
    box.connect([str(path)])
    box.unlink()
    assert not path.exists()
    kept = Mailbox(str(path), 0, 1)
    box.close()
    assert path.exists()
    del kept
    assert not path.exists()


def test_wrong_ranks_and_paths_are_named(folder: Path) -> None:
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(InputError, match=f"rank {rank} of {size}"):
            Mailbox(str(folder / "a"), rank, size)
    with pytest.raises(FileNotFoundError, match="nowhere/a"):
        Mailbox(str(folder / "nowhere" / "a"), 0, 1)
    box, other, paths = pair(folder)
    other.close()
    with pytest.raises(FileNotFoundError, match=paths[1]):
        box.connect(paths)
    with pytest.raises(InputError, match="paths: expected one per rank, 2, got 1"):
        box.connect(paths[:1])
    box.close()


def test_bad_arguments_are_told_and_change_nothing(folder: Path) -> None:
    box = Mailbox(str(folder / "a"), 0, 1)
    send, recv = torch.arange(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(UsageError, match=r"call connect\(\) first"):
        box.exchange(send, [4], recv, [4], 1)
    box.connect([str(folder / "a")])
    strided = torch.zeros(8, dtype=torch.uint8)[::2]
    for kind, text, arguments in (
        (TypeError, "send: expected a contiguous uint8 tensor on the CPU", (send.int(), [4], recv, [4], 1)),
        (TypeError, "recv: expected a contiguous uint8 tensor on the CPU", (send, [4], strided, [4], 1)),
        (InputError, "send_sizes: .* add up to the 4 bytes of send", (send, [3], recv, [4], 1)),
        (InputError, "recv_sizes: .* add up to the 4 bytes of recv", (send, [4], recv, [2**62], 1)),
        (InputError, "recv_sizes: expected one per rank, 1, got 2", (send, [4], recv, [4, 0], 1)),
        (InputError, "recv: shares memory with send", (send, [4], send, [4], 1)),
        (InputError, "timeout", (send, [4], recv, [4], -1)),
    ):
        with pytest.raises(kind, match=text):
            box.exchange(*arguments)
    assert recv.tolist() == [0, 0, 0, 0]
    assert box.exchange(send, [4], recv, [4], 1) == []
    assert recv.tolist() == [0, 1, 2, 3]  # the one rank gets its own part
    box.close()
    with pytest.raises(UsageError, match="closed"):
        box.exchange(send, [4], recv, [4], 1)


@pytest.mark.parametrize("damage", ["empty", "text", "longer", "swapped", "folder", "more ranks"])
def test_a_path_that_is_not_the_ranks_mailbox_is_named(folder: Path, damage: str) -> None:
    box, other, paths = pair(folder)
    own, good = (Path(path).read_bytes() for path in paths)
    wrong = folder / "wrong"
    if damage == "folder":
        wrong.mkdir()
    elif damage == "more ranks":
        third = Mailbox(str(wrong), 1, 3)
    else:
        contents = {"empty": b"", "text": b"x" * len(good), "longer": good + b"x", "swapped": own}
        wrong.write_bytes(contents[damage])
    with pytest.raises(InputError, match=f"{wrong} of rank 1"):
        box.connect([paths[0], str(wrong)])
    if damage == "folder":
        wrong.rmdir()
    elif damage == "more ranks":
        third.close()
    else:
        wrong.unlink()
    box.connect(paths)  # nothing was changed by the attempt
    other.close()
    box.close()


def test_a_forked_child_is_refused_and_leaves_the_file_alone(folder: Path) -> None:
    box = Mailbox(str(folder / "a"), 0, 1)
    box.connect([str(folder / "a")])
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        try:
            box.exchange(nothing(), [0], nothing(), [0], 0)
        except UsageError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (folder / "a").exists()
    assert box.exchange(nothing(), [0], nothing(), [0], 0) == []
    box.close()
