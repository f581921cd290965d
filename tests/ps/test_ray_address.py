"""Wrong addresses of Ray clusters: they raise at once, and Ray is not started."""

from __future__ import annotations

import socket

import pytest

from megalith import Servers
from megalith.errors import InputError, UsageError
from megalith.ps.launch import connect_ray, loopback_ray


@pytest.mark.parametrize(
    "address", ["nonsense", "nonsense:", ":6379", "nonsense:port", "127.0.0.1:99999", "ray://x"]
)
def test_text_that_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InputError, match="HOST:PORT"):
        Servers(1, address=address)


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "[127.0.0.1]:{}", "x" * 70 + ":{}"])
def test_an_address_at_which_nothing_listens_is_refused_with_the_remedy(form: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # it does not listen
        address = form.format(taken.getsockname()[1])
        with pytest.raises(
            UsageError, match=r"no Ray runs at .*: give the address that `ray start` has printed"
        ):
            Servers(1, address=address)
        with pytest.raises(UsageError, match="no Ray runs at"):
            connect_ray(address)
    assert not loopback_ray().is_initialized()
