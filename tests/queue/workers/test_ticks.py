"""Ticks, the outbox and nudges, on a real Valkey that comes and goes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from longtake.queue.app import TICK
from longtake.queue.broker import EmbeddedBroker
from longtake.queue.records import WorkerRecord
from longtake.queue.ticks import NUDGES, Dispatcher, Nudges, Ticker, connect, send_outbox

if TYPE_CHECKING:
    from tests.queue.workers.conftest import Rig

WAIT_S = 30.0


@pytest.fixture
def ticker(rig: Rig) -> Iterator[Ticker]:
    ticker = Ticker(rig.settings.broker)
    yield ticker
    ticker.close()


def waiting(rig: Rig) -> int:
    """Ticks that wait on the broker."""
    with connect(rig.settings.broker, 5.0) as valkey:
        return int(valkey.llen("longtake:default"))


def test_a_tick_is_small_and_names_a_queue(
    rig: Rig, valkey: EmbeddedBroker, ticker: Ticker
) -> None:
    assert ticker.publish("default")
    with connect(rig.settings.broker, 5.0) as client:
        [message] = client.lrange("longtake:default", 0, -1)
    assert TICK.encode() in message
    assert len(message) < 2000


def test_without_a_broker_nothing_fails(rig: Rig, ticker: Ticker) -> None:
    assert not ticker.publish("default")
    assert not ticker.nudge("video_x")
    rig.submit()
    assert not send_outbox(rig.store, ticker)
    assert len(rig.store.outbox.pending()) == 1


def test_the_outbox_is_sent_when_the_broker_is_back(rig: Rig, ticker: Ticker) -> None:
    broker = EmbeddedBroker(rig.settings.data_dir, rig.settings.broker_socket)
    broker.start()
    assert ticker.publish("default")
    broker.stop()
    rig.submit()
    assert not send_outbox(rig.store, ticker)
    broker.start()
    assert send_outbox(rig.store, ticker)
    assert rig.store.outbox.pending() == []
    assert waiting(rig) == 2
    broker.stop()


def test_many_submissions_make_few_ticks(rig: Rig, valkey: EmbeddedBroker, ticker: Ticker) -> None:
    def sent() -> int:
        for _ in range(40):
            rig.submit()
        before = waiting(rig)
        assert send_outbox(rig.store, ticker)
        assert rig.store.outbox.pending() == []
        return waiting(rig) - before

    assert sent() == 1
    for name in "abc":
        rig.store.workers.beat(WorkerRecord(name, "here", 1, "1@0", "default", "busy"))
    rig.store.workers.beat(WorkerRecord("d", "here", 1, "1@0", "other", "idle"))
    assert sent() == 3


def test_the_dispatcher_sends_what_is_committed(
    rig: Rig, valkey: EmbeddedBroker, ticker: Ticker
) -> None:
    dispatcher = Dispatcher(rig.store, ticker)
    dispatcher.start()
    rig.submit()
    dispatcher.wake()
    rig.until(lambda: waiting(rig))
    rig.until(lambda: not rig.store.outbox.pending())
    dispatcher.stop()


def test_nudges_are_heard(rig: Rig, valkey: EmbeddedBroker, ticker: Ticker) -> None:
    heard: list[str] = []
    listening = threading.Event()

    def hear(job_id: str) -> None:
        heard.append(job_id)
        listening.set()

    nudges = Nudges(rig.settings.broker, hear)
    nudges.start()
    with connect(rig.settings.broker, 5.0) as client:
        rig.until(lambda: dict(client.pubsub_numsub(NUDGES)).get(NUDGES.encode()))
    assert ticker.nudge("video_1")
    assert listening.wait(WAIT_S)
    assert heard == ["video_1"]
    nudges.stop()


def test_nudges_outlive_the_broker(rig: Rig, ticker: Ticker) -> None:
    heard = threading.Event()
    nudges = Nudges(rig.settings.broker, lambda _: heard.set())
    nudges.start()
    broker = EmbeddedBroker(rig.settings.data_dir, rig.settings.broker_socket)
    for _ in range(2):
        broker.start()
        heard.clear()
        rig.until(lambda: ticker.nudge("video_1") and heard.wait(0.05))
        broker.stop()
    nudges.stop()
