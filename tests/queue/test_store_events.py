"""The log, the outbox, webhooks, workers and keys."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import select, update

from longtake.errors import NotFoundError
from longtake.queue.database import open_database
from longtake.queue.events import NewEvent
from longtake.queue.records import WorkerRecord
from longtake.queue.store import Store
from longtake.queue.tables import api_keys, deliveries, events, workers

if TYPE_CHECKING:
    from tests.queue.conftest import Desk


def test_events_are_read_by_job_by_owner_and_from_a_place(desk: Desk) -> None:
    first, other = desk.submit(), desk.submit(owner="other")
    desk.store.submissions.cancel(first.id, "local")
    log = desk.store.events
    everything = log.read(0)
    assert [event.seq for event in everything] == sorted(event.seq for event in everything)
    assert [event.type for event in log.read(0, owner="other")] == ["video.queued"]
    assert [event.job_id for event in log.read(0, job_id=first.id)] == [first.id] * 2
    assert log.read(everything[1].seq) == everything[2:]
    assert log.read(0, limit=1) == everything[:1]
    assert log.latest() == everything[-1].seq == log.latest(owner="local")
    assert log.latest(job_id=other.id) == everything[1].seq
    assert log.latest(owner="nobody") == 0


def test_a_reader_never_misses_a_smaller_number(desk: Desk, database_url: str) -> None:
    writers, rounds = 4, 25
    stores = [Store(open_database(database_url)) for _ in range(2)]
    done = threading.Event()
    seen: list[int] = []

    def write(number: int) -> None:
        store = stores[number % 2]
        for index in range(rounds):
            with store.db.write() as conn:
                entries = [NewEvent(f"job-{number}", "local", f"{index}-{part}") for part in (0, 1)]
                store.events.extend(conn, entries)

    def read() -> None:
        while True:
            last = done.is_set()
            found = desk.store.events.read(seen[-1] if seen else 0)
            seen.extend(event.seq for event in found)
            if last and not found:
                return

    reader = threading.Thread(target=read)
    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    for thread in [reader, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    reader.join()
    for store in stores:
        store.close()
    everything = [event.seq for event in desk.store.events.read(0, limit=1000)]
    assert len(everything) == 2 * writers * rounds
    assert seen == everything


def test_progress_goes_with_the_job_that_finishes(desk: Desk) -> None:
    desk.submit()
    job = desk.claim()
    for step in range(3):
        desk.store.held.renew(job.id, job.fence, 60, {"step": step})
    assert desk.told(job).count("progress") == 3
    desk.store_chunk(job, 0)
    desk.complete(job)
    assert desk.told(job) == ["queued", "started", "chunk", "completed"]


def test_old_events_are_pruned_and_numbers_never_return(desk: Desk) -> None:
    for _ in range(3):
        desk.submit()
    last = desk.store.events.latest()
    with desk.store.db.write() as conn:
        conn.execute(
            update(events).where(events.c.seq <= last - 1).values(created_at=time.time() - 100)
        )
    assert desk.store.events.prune(50, limit=1) == 1
    assert desk.store.events.prune(50) == 1
    assert [event.seq for event in desk.store.events.read(0)] == [last]
    assert desk.store.events.prune(-10) == 1
    desk.submit()
    assert desk.store.events.latest() > last


def test_ticks_wait_until_they_are_sent(desk: Desk) -> None:
    desk.store.submissions.submit([desk.new(), desk.new(), desk.new(queue="gpu")])
    desk.submit()
    ticks = desk.store.outbox.pending()
    assert [tick.queue for tick in ticks] == ["default", "gpu", "default"]
    assert desk.store.outbox.pending(limit=1) == ticks[:1]
    desk.store.outbox.sent([ticks[0].id, ticks[2].id])
    assert desk.store.outbox.pending() == [ticks[1]]
    desk.store.outbox.sent([])
    assert desk.store.outbox.queues_with_work() == ["default", "gpu"]


def test_webhooks_belong_to_an_owner_and_rotate(desk: Desk) -> None:
    webhooks = desk.store.webhooks
    hook = webhooks.create("local", "mine", "https://a", ["video.failed"])
    assert hook.secret.startswith("whsec_")
    assert hook.enabled
    rotated = webhooks.rotate(hook.id, "local")
    assert (rotated.previous_secret, rotated.rotated_at is None) == (hook.secret, False)
    assert rotated.secret != hook.secret
    changed = webhooks.update(hook.id, "local", {"url": "https://b", "event_types": ("x",)})
    assert (changed.url, changed.event_types) == ("https://b", ("x",))
    assert webhooks.update(hook.id, "local", {}) == changed
    with pytest.raises(ValueError, match="secret"):
        webhooks.update(hook.id, "local", {"secret": "x"})
    assert webhooks.list("local") == [changed] == webhooks.list(None)
    assert webhooks.list("other") == []
    for call in (webhooks.get, webhooks.rotate, webhooks.delete):
        with pytest.raises(NotFoundError):
            call(hook.id, "other")
    webhooks.send_test(hook.id, "local", "video.completed")
    webhooks.delete(hook.id, "local")
    assert webhooks.due(10, 60) == []


def test_deliveries_are_claimed_retried_and_logged(desk: Desk) -> None:
    webhooks = desk.store.webhooks
    hook = webhooks.create("local", "mine", "https://a", ["video.completed"])
    made = [webhooks.send_test(hook.id, "local", "video.completed") for _ in range(3)]
    assert [one.id for one in webhooks.due(2, lease_s=60)] == [one.id for one in made[:2]]
    [third] = webhooks.due(2, lease_s=-1)
    assert third.attempt == 1
    [again] = webhooks.due(2, lease_s=60)  # its claim ran out
    assert (again.id, again.attempt) == (third.id, 2)
    webhooks.finish(made[0].id, "delivered", 200, "x" * 9000)
    webhooks.finish(made[1].id, "pending", 500, "later", next_at=made[1].created_at + 3600)
    webhooks.finish(made[2].id, "failed", None, None)
    webhooks.finish(made[2].id, "delivered", 200, None)  # too late: it is settled
    log = {one.id: one for one in webhooks.deliveries(hook.id)}
    assert [log[one.id].state for one in made] == ["delivered", "pending", "failed"]
    assert len(log[made[0].id].response or "") == 2000
    assert log[made[2].id].finished_at is not None
    assert webhooks.due(5, 60) == []
    with desk.store.db.write() as conn:
        conn.execute(update(deliveries).values(next_at=0))
    assert [one.id for one in webhooks.due(5, 60)] == [made[1].id]
    newest = webhooks.deliveries(hook.id, limit=2)
    assert len(newest) == 2
    rest = webhooks.deliveries(hook.id, after=newest[-1].id)
    assert {one.id for one in [*newest, *rest]} == set(log)
    assert webhooks.prune(-10) == 2


def test_two_senders_claim_different_deliveries(desk: Desk) -> None:
    hook = desk.store.webhooks.create("local", "mine", "https://a", ["video.completed"])
    for _ in range(20):
        desk.store.webhooks.send_test(hook.id, "local", "video.completed")
    claimed: list[str] = []

    def work() -> None:
        while some := desk.store.webhooks.due(3, 60):
            claimed.extend(one.id for one in some)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claimed) == len(set(claimed)) == 20


def test_workers_come_beat_and_go(desk: Desk) -> None:
    roster = desk.store.workers
    mine = WorkerRecord("w1", "host", 1, "boot-1", "default", "idle", details={"a": 1})
    roster.beat(mine)
    [seen] = roster.list(fresh_s=60)
    assert seen.seen_at > 1.7e9
    assert replace(seen, seen_at=0.0) == mine
    roster.beat(replace(mine, state="busy", model="papercut", job_id="video_x"))
    roster.beat(replace(mine, id="w2", boot_id="boot-2"))
    roster.beat(replace(mine, id="w3", host="elsewhere"))
    assert [one.state for one in roster.list()] == ["busy", "idle", "idle"]
    assert (roster.count("default"), roster.count("gpu")) == (3, 0)
    assert roster.gone("host", ["boot-1"]) == ["w2"]
    assert roster.gone("host", []) == ["w1"]
    with desk.store.db.write() as conn:
        conn.execute(update(workers).values(seen_at=workers.c.seen_at - 100))
    assert roster.list(fresh_s=60) == []
    assert roster.prune(1000) == []
    assert roster.prune(50) == ["w3"]
    roster.remove("w3")
    assert roster.list() == []


def test_keys_are_found_by_secret_until_revoked(desk: Desk) -> None:
    keys = desk.store.keys
    key, secret = keys.create("laptop", {"max_queued": 5})
    assert secret.startswith(f"lt_{key.prefix}_")
    assert len(secret) > 50
    assert keys.find(secret) == key
    assert key.limits == {"max_queued": 5}
    for wrong in (secret[:-1], secret.upper(), "", "lt_x"):
        assert keys.find(wrong) is None
    with desk.store.db.read() as conn:
        [row] = conn.execute(select(api_keys)).all()
    assert secret not in str(tuple(row))
    revoked = keys.revoke(key.id)
    assert revoked.revoked_at is not None
    assert keys.find(secret) is None
    assert keys.list() == [revoked]
    for missing in (key.id, "key_x"):
        with pytest.raises(NotFoundError):
            keys.revoke(missing)
