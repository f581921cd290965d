"""Clients and our own server: one process, replicas that die, and a model in parts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import Ragged, Sum
from megalith.errors import RemoteError
from megalith.models import DeepFM, EmbeddingConfig
from megalith.serving.client.predict_client import PredictClient
from megalith.serving.client.row_fetcher import RowFetcher
from megalith.serving.discovery import StaticDiscovery
from megalith.serving.export.exporter import export_model
from megalith.serving.export.signature import Signature
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.server_config import ServerConfig
from tests.serving.server_process import server_processes

LONG = 60
MODES = ["roundrobin", "hash_roundrobin", "continuous"]
USERS = torch.tensor([1, 7, -5, 123456789012345, 99])
MOVIES = Ragged.from_lists([[1, 2, 3], [], [40, 41], [7], [2**62, 1]])


def trained(dist_type: str | None = None, *, odd: bool = True) -> DeepFM:
    """A model with rows for the ids above but user 99's; odd=False: rows of odd ids are zeros."""
    torch.manual_seed(3)
    config = EmbeddingConfig({"user": Sum(), "movies": Sum()}, dim=4, dist_type=dist_type, seed=5)
    model = DeepFM(config, num_dense=2, hidden=(8,))
    for table, ids in {"user": USERS[:4], "movies": MOVIES.values.unique()}.items():
        rows = torch.randn(ids.numel(), 5)
        rows = rows if odd else rows * (ids % 2 == 0)[:, None]
        model.embeddings.shards.assign({table: (ids, rows)})
    if not odd:
        model.embeddings.shards.assign({"user": (USERS[4:], torch.zeros(1, 5))})
    return model.eval()


def inputs() -> dict[str, Any]:
    dense = torch.arange(10.0).reshape(5, 2) / 10
    return {"user": USERS, "movies": MOVIES, "dense": dense}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that stands alone."""
    return export_model(trained(), tmp_path_factory.mktemp("standalone") / "movies", name="movies", version=1)


@pytest.fixture(scope="module")
def expected(exported: Path) -> dict[str, Tensor]:
    """What a server of the whole model answers."""
    with ModelServer(exported) as server, client(server.address, "standalone") as c:
        return c.predict(inputs())


def client(address: str, task: str = "entry", **settings: Any) -> PredictClient:
    return PredictClient(StaticDiscovery([address]), "movies", task, timeout=LONG, **settings)


def test_a_standalone_model_answers_like_the_module(exported: Path, expected: dict[str, Tensor]) -> None:
    assert sorted(expected) == ["logits", "probabilities"]
    model = trained()
    given = inputs()
    with torch.no_grad():
        known = {"user": USERS[:4], "movies": Ragged(MOVIES.values[:6], MOVIES.row_splits[:5])}
        logits = model(known, given["dense"][:4])
    torch.testing.assert_close(expected["logits"][:4], logits)
    torch.testing.assert_close(expected["probabilities"], expected["logits"].sigmoid())


def test_a_version_and_a_model_that_are_not_there(exported: Path) -> None:
    with ModelServer(exported) as server:
        with client(server.address, model_version=1) as c:
            assert c.predict(inputs())
        with client(server.address, model_version=2) as c, pytest.raises(RemoteError) as raised:
            c.predict(inputs())
        assert raised.value.code == "NOT_FOUND"
        discovery = StaticDiscovery([server.address])
        with PredictClient(discovery, "films", old_model_name="movies", timeout=LONG) as c:
            assert c.predict(inputs())


def test_one_of_two_replicas_is_killed_in_the_middle(exported: Path, expected: dict[str, Tensor]) -> None:
    with server_processes(exported, exported) as servers:
        found = StaticDiscovery([server.wait() for server in servers])
        with PredictClient(found, "movies", timeout=LONG) as c:
            for k in range(60):
                if k == 20:
                    servers[0].kill()
                assert torch.equal(c.predict(inputs())["logits"], expected["logits"])


# ---- a model in parts


@contextmanager
def in_parts(out: Path, dist_type: str, **settings: Any) -> Iterator[StaticDiscovery]:
    """Two ps parts and an entry, each with its own server."""
    export_model(trained(dist_type), out, name="movies", version=1, num_shards=2, block_size=20)
    discovery = StaticDiscovery({})
    with ExitStack() as stack:
        for part in ("ps_0", "ps_1", "entry"):
            stack.enter_context(ModelServer(out / part, ServerConfig(**settings), discovery=discovery))
        yield discovery


@pytest.mark.parametrize("mode", MODES)
def test_an_entry_answers_like_the_whole_with_rows_of_its_parts(
    mode: str, tmp_path: Path, expected: dict[str, Tensor]
) -> None:
    with in_parts(tmp_path, mode, fetch_timeout=LONG) as discovery:
        with PredictClient(discovery, "movies", timeout=LONG) as c:
            answer = c.predict(inputs())
        entry = Signature.read(tmp_path / "entry" / "1")
        with RowFetcher(discovery, entry, timeout=LONG) as fetch:
            ids = torch.cat([MOVIES.values, MOVIES.values, torch.tensor([-77])])
            rows = fetch({"movies": ids, "user": USERS[:4]})
    for name in ("logits", "probabilities"):
        assert torch.equal(answer[name], expected[name])
    there = trained(mode).embeddings.shards.lookup({"movies": MOVIES.values, "user": USERS[:4]}).rows
    assert torch.equal(rows["movies"], torch.cat([there["movies"], there["movies"], torch.zeros(1, 5)]))
    assert torch.equal(rows["user"], there["user"])


def test_a_killed_part_fails_softly(tmp_path: Path, expected: dict[str, Tensor]) -> None:
    export_model(trained("roundrobin"), tmp_path / "out", name="movies", version=1, num_shards=2)
    ps = [tmp_path / "out" / f"ps_{k}" for k in range(2)]
    entry = tmp_path / "out" / "entry"
    with server_processes(*ps) as parts:
        found = StaticDiscovery({f"movies:ps_{k}": [part.wait()] for k, part in enumerate(parts)})
        settings: Any = {"fetch_timeout": LONG}
        with (
            ModelServer(entry, ServerConfig(fail_soft=True, **settings), discovery=found) as soft,
            ModelServer(entry, ServerConfig(**settings), discovery=found) as hard,
        ):
            with client(soft.address) as c:
                assert torch.equal(c.predict(inputs())["logits"], expected["logits"])
                parts[1].kill()
                after = c.predict(inputs())["logits"]
            with client(hard.address) as c, pytest.raises(RemoteError, match="movies:ps_1") as raised:
                c.predict(inputs())
            assert raised.value.code == "UNAVAILABLE"
    # ps_1 had the odd ids.
    with torch.no_grad():
        given = inputs()
        without = trained(odd=False)({"user": USERS, "movies": MOVIES}, given["dense"])
    torch.testing.assert_close(after, without)
    assert not torch.equal(after, expected["logits"])


# ---- another number of parts, while requests continue


def asked(found: StaticDiscovery) -> Tensor:
    with PredictClient(found, "movies", timeout=LONG) as c:
        return c.predict(inputs())["logits"]


def publish(new: Path, out: Path, part: str) -> None:
    """What an export does last for a part."""
    (out / part).mkdir(parents=True, exist_ok=True)
    shutil.copytree(new / part / "2", out / part / "2")


@pytest.mark.parametrize("fail_soft", [False, True])
def test_an_entry_gets_rows_of_its_own_version_while_parts_become_more(
    tmp_path: Path, expected: dict[str, Tensor], fail_soft: bool
) -> None:
    """Every answer is of the old version or of the new one; ids of other parts as zeros would be neither."""
    old, new, rows = tmp_path / "old", tmp_path / "new", tmp_path / "rows"
    export_model(trained("roundrobin"), old, name="movies", version=1, num_shards=2)
    torch.manual_seed(8)
    changed = trained("roundrobin")
    changed.embeddings.shards.assign({"user": (USERS[:4], torch.randn(4, 5))})
    export_model(changed, new, name="movies", version=2, num_shards=3)
    for part in ("ps_0", "ps_1"):
        shutil.copytree(old / part, rows / part)
    found = StaticDiscovery({})
    settings: Any = {"poll_seconds": 1000, "fetch_timeout": LONG}
    with (
        ModelServer(rows, ServerConfig(**settings), discovery=found) as parts,
        ModelServer(old / "entry", ServerConfig(fail_soft=fail_soft, **settings), discovery=found) as entry,
    ):
        for part in ("ps_0", "ps_1", "ps_2"):
            publish(new, rows, part)
            parts.refresh()
            assert torch.equal(asked(found), expected["logits"])
        publish(new, old, "entry")
        entry.refresh()
        after = asked(found)
        with ModelServer(export_model(changed, tmp_path / "whole", name="movies", version=2)) as whole:
            wanted = asked(StaticDiscovery([whole.address]))
        assert torch.equal(after, wanted)
        assert not torch.equal(after, expected["logits"])


def test_where_the_version_of_the_entry_is_gone_an_answer_is_right_or_an_error(
    tmp_path: Path, expected: dict[str, Tensor]
) -> None:
    """The same weights in two and in three parts, and parts that keep one version: users 1 to 99 move."""
    old, new, rows = tmp_path / "old", tmp_path / "new", tmp_path / "rows"
    for out, version in ((old, 1), (new, 2)):
        export_model(trained("roundrobin"), out, name="movies", version=version, num_shards=version + 1)
    for part in ("ps_0", "ps_1"):
        shutil.copytree(old / part, rows / part)
    found = StaticDiscovery({})
    settings: Any = {"poll_seconds": 1000, "fetch_timeout": LONG}
    with (
        ModelServer(rows, ServerConfig(keep_versions=1, **settings), discovery=found) as parts,
        ModelServer(old / "entry", ServerConfig(**settings), discovery=found) as entry,
    ):
        assert torch.equal(asked(found), expected["logits"])
        for part in ("ps_0", "ps_1", "ps_2"):
            publish(new, rows, part)
            parts.refresh()
            with pytest.raises(RemoteError, match=r"belongs to another part than ps_[01] of 3, version 2"):
                asked(found)
        publish(new, old, "entry")
        entry.refresh()
        assert torch.equal(asked(found), expected["logits"])
