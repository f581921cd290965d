"""The publisher: faults of servers and messages, other saves and versions."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from megalith import checkpoint
from megalith.errors import UsageError
from tests.serving.sync_support import HOUR, LIMIT, Online, assert_equal, export_version

# ---- faults


def test_a_target_that_was_down_catches_up(online: Online) -> None:
    replica = online.replica()
    replica.server.stop()
    publisher = online.publisher([replica])
    online.trainer.step(2)
    assert not publisher.flush(0.2)
    assert [report.address for report in publisher.lagging()] == [replica.address]

    replica.restart()

    online.assert_arrives(publisher, replica)


def test_a_target_that_hangs_delays_no_other(online: Online) -> None:
    replicas = [online.replica(), online.replica()]
    gate = online.hold(replicas[0])
    publisher = online.publisher(replicas, timeout=0.5)
    assert gate.reached.wait(LIMIT)

    for _ in range(3):
        online.trainer.step()
        number = publisher.publish()
    with publisher.lock:
        done = publisher.lock.wait_for(lambda: len(publisher._lagging(number)) == 1, LIMIT)
    assert done
    assert_equal(replicas[1].servable, online.model)

    gate.open.set()
    assert publisher.flush(LIMIT), publisher.report()
    assert_equal(replicas[0].servable, online.model)


def test_closing_does_not_wait_for_a_target_that_hangs(online: Online) -> None:
    replica = online.replica()
    gate = online.hold(replica)
    publisher = online.publisher([replica], timeout=HOUR)
    assert gate.reached.wait(LIMIT)

    publisher.close()

    assert not [thread for thread in threading.enumerate() if thread.name.startswith("megalith push")]
    publisher.close()
    with pytest.raises(UsageError, match="closed"):
        publisher.publish()


def test_a_backlog_that_overflows_starts_over(online: Online) -> None:
    replica = online.replica()
    publisher = online.publisher([replica], max_backlog=50, timeout=0.5)
    assert publisher.flush(LIMIT)
    gate = online.hold(replica)
    online.trainer.step()
    publisher.publish()
    assert gate.reached.wait(LIMIT)
    for _ in range(5):
        online.trainer.step(3)
        publisher.publish()
    assert all(report.backlog <= 50 for report in publisher.report())

    gate.open.set()

    online.assert_arrives(publisher, replica)
    assert replica.subscriber.counters.begun > 1


def test_a_server_of_an_unknown_base_is_replaced(online: Online) -> None:
    replica = online.replica()
    publisher = online.publisher([replica], base="of another run")
    assert publisher.flush(LIMIT)
    assert replica.subscriber.counters.replacements == 1
    online.trainer.step(3)

    online.assert_arrives(publisher, replica)


def test_a_save_that_the_journal_has_dropped_needs_all_rows(online: Online) -> None:
    replica = online.replica()
    publisher = online.publisher([replica], max_journal=10)
    online.trainer.step(3)
    publisher.publish()
    replica.restart()

    online.assert_arrives(publisher, replica)
    assert replica.subscriber.counters.replacements == 1


def test_a_server_reloads_the_checkpoint_where_the_journal_starts_there(
    online: Online, tmp_path: Path
) -> None:
    online.trainer.step(3)
    save = checkpoint.save(online.model, tmp_path)
    replica = online.replica(checkpoint=tmp_path)
    publisher = online.publisher([replica], base=save.tip)
    online.trainer.step(1)

    online.assert_arrives(publisher, replica)
    assert (replica.subscriber.counters.reloads, replica.subscriber.counters.replacements) == (1, 0)
    assert replica.subscriber.counters.rows <= 64


def test_a_new_version_in_the_middle(online: Online, tmp_path: Path) -> None:
    replica = online.replica()
    publisher = online.publisher([replica])
    online.trainer.step(2)
    assert publisher.flush(LIMIT)
    save = checkpoint.save(online.model, tmp_path / "checkpoint")
    publisher.checkpoint_taken(save.tip)
    online.trainer.step(2)
    (newer,) = export_version(online.model, tmp_path / "export", base=save.tip, version=2)

    replica.subscriber.move_to(newer)
    online.trainer.step(1)

    online.assert_arrives(publisher, newer)
    assert replica.subscriber.counters.begun == 1
