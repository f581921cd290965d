"""The current device of calls of the cuda engine; tests with streams need a GPU: gpu_stress.py."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from megalith.table.engines.cuda import streams
from megalith.table.engines.cuda.streams import StreamOrder


class Devices:
    """The current device of a thread, where torch has no CUDA."""

    def __init__(self) -> None:
        self.current = 0

    def exchange(self, device: int) -> int:
        before, self.current = self.current, device
        return before


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    found = Devices()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: found.current, raising=False)
    monkeypatch.setattr(torch.cuda, "_exchange_device", found.exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", found.exchange)
    monkeypatch.setattr(streams, "current_handle", lambda device: -1)  # the stream of the last call
    return found


def test_a_call_of_a_table_on_another_gpu_makes_it_the_current_one(devices: Devices) -> None:
    order = StreamOrder(torch.device("cuda", 1))
    with order:
        assert devices.current == 1
        with order:  # calls contain others
            assert devices.current == 1
        assert devices.current == 1
    assert devices.current == 0


def test_an_error_of_a_call_returns_to_the_current_gpu(devices: Devices) -> None:
    order = StreamOrder(torch.device("cuda", 1))

    def failing() -> None:
        with order, order:
            assert devices.current == 1
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        failing()
    assert devices.current == 0


def test_nothing_changes_on_the_current_gpu_and_on_the_cpu(devices: Devices) -> None:
    devices.current = 1
    with StreamOrder(torch.device("cuda", 1)), StreamOrder(torch.device("cpu")):
        assert devices.current == 1
    assert devices.current == 1
