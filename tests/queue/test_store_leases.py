"""The worker's side: order of claims, fences, expiry, poison, and the one commit."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import select, update

from longtake.errors import LeaseLostError
from longtake.queue.held import Renewal
from longtake.queue.records import (
    TRANSITIONS,
    ArtifactKind,
    ChunkRecord,
    ErrorCode,
    Job,
    JobState,
)
from longtake.queue.store import Store
from longtake.queue.tables import jobs
from longtake.queue.transitions import move

if TYPE_CHECKING:
    from tests.queue.conftest import Desk

# claims until nothing is left, and says what it had
CLAIMER = """
import sys
from longtake.queue.database import open_database
from longtake.queue.store import Store
store = Store(open_database(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
while (job := store.leases.claim(sys.argv[2], "default")) is not None:
    print(job.id)
"""


def test_priority_then_place(desk: Desk) -> None:
    for prompt, priority in (("c", 5), ("a", 0), ("d", 5), ("b", 1)):
        desk.submit(prompt, priority=priority)
    assert [desk.claim().prompt for _ in range(4)] == ["a", "b", "c", "d"]
    assert desk.store.leases.claim("w", "default") is None


def test_owners_are_served_in_turn(desk: Desk) -> None:
    for owner, count in (("greedy", 4), ("modest", 2), ("late", 1)):
        for number in range(count):
            desk.submit(f"{owner}-{number}", owner=owner)
    order = [desk.claim().prompt for _ in range(7)]
    assert order[:3] == ["greedy-0", "late-0", "modest-0"]  # never served: by name
    assert order[3:] == ["greedy-1", "modest-1", "greedy-2", "greedy-3"]


def test_the_loaded_model_goes_first_for_a_while(desk: Desk) -> None:
    for prompt, model in (("a", "other"), ("b", "loaded"), ("c", "loaded")):
        desk.submit(prompt, model=model)
    assert desk.claim(loaded_model="loaded", affinity_s=60).prompt == "b"
    assert desk.claim(loaded_model="loaded", affinity_s=0).prompt == "a"
    assert desk.claim(loaded_model="third", affinity_s=60).prompt == "c"


def test_paused_later_and_other_queues_stay(desk: Desk) -> None:
    paused = desk.submit("paused")
    desk.store.submissions.edit(paused.id, "local", {"paused": True})
    desk.submit("later", not_before=paused.created_at + 3600)
    desk.submit("elsewhere", queue="gpu")
    assert desk.store.leases.claim("w", "default") is None
    assert desk.store.outbox.queues_with_work() == ["gpu"]
    assert desk.claim(queue="gpu").prompt == "elsewhere"


def test_a_claim_says_who_and_for_how_long(desk: Desk) -> None:
    desk.submit()
    job = desk.claim("worker-7", lease_s=100)
    assert (job.state, job.lease_owner, job.fence, job.attempt) == (
        JobState.RUNNING, "worker-7", 1, 1,
    )  # fmt: skip
    assert job.lease_until is not None
    assert job.started_at is not None
    assert 99 < job.lease_until - job.started_at < 101
    [attempt] = desk.store.listings.attempts(job.id)
    assert (attempt.worker, attempt.fence, attempt.outcome) == ("worker-7", 1, None)
    [started] = [e for e in desk.store.events.read(0) if e.type == "video.started"]
    assert started.data == {"attempt": 1}


def test_renewal_tells_progress_and_what_is_wanted(desk: Desk) -> None:
    desk.submit()
    job = desk.claim(lease_s=10)
    desk.store.held.renew(job.id, job.fence, 500)
    assert desk.told(job) == ["queued", "started"]
    desk.store.held.renew(job.id, job.fence, 500, {"step": 2})
    now = desk.get(job)
    assert now.progress == {"step": 2}
    assert now.lease_until is not None
    assert job.lease_until is not None
    assert now.lease_until > job.lease_until + 400
    assert desk.store.events.read(0)[-1].data == {"x_progress": {"step": 2}}


def test_a_chunk_is_stored_in_two_parts(desk: Desk) -> None:
    desk.submit()
    job = desk.claim()
    latents = desk.store_latents(job, 0)
    [chunk] = desk.store.listings.chunks(job.id)
    assert (chunk.latents_key, chunk.segment_key, chunk.fence) == (latents.key, None, 1)
    assert desk.get(job).chunks_done == 0
    segment = desk.store_chunk(job, 0)
    [chunk] = desk.store.listings.chunks(job.id)
    assert (chunk.segment_key, chunk.frames, chunk.timings) == (segment.key, 12, {"decode": 0.5})
    now = desk.get(job)
    assert (now.chunks_done, now.bytes_stored, now.progress["chunk"]) == (1, 20, 1)
    last = desk.store.events.read(0)[-1]
    assert last.data == {"chunk": 0, "chunks": 3, "frames": 12, "segment": segment.id}


def test_a_decode_alone_keeps_the_latents_of_the_attempt_before(desk: Desk) -> None:
    desk.submit()
    first = desk.claim()
    latents = desk.store_latents(first, 0)
    desk.store.leases.release(first.id, first.fence, counts=True)
    job = desk.claim()
    segment = desk.file(job, ArtifactKind.SEGMENT, "segments/0")
    record = ChunkRecord(job.id, 0, job.fence, 12, None, segment.key, {})
    desk.store.held.record_chunk(job.id, job.fence, record, [segment])
    [chunk] = desk.store.listings.chunks(job.id)
    assert (chunk.latents_key, chunk.segment_key) == (latents.key, segment.key)
    desk.complete(job)
    assert desk.garbage() == []


def test_a_newer_file_takes_the_olders_place(desk: Desk) -> None:
    desk.submit()
    job = desk.claim()
    for index in range(2):
        preview = desk.file(job, ArtifactKind.PREVIEW, f"preview-{index}")
        record = ChunkRecord(job.id, index, job.fence, 12, None, None, {})
        desk.store.held.record_chunk(job.id, job.fence, record, [preview])
    # the same file told once more, as after a lost connection, is no garbage
    desk.store.held.record_chunk(job.id, job.fence, record, [preview])
    assert [one.key for one in desk.store.files.of_job(job.id)] == [preview.key]
    assert desk.garbage() == [f"jobs/{job.id}/1/preview-0"]
    assert desk.told(job)[2:4] == ["chunk", "preview"]


def test_complete_publishes_once_and_tidies(desk: Desk) -> None:
    desk.submit()
    lost = desk.claim()
    desk.store_latents(lost, 0)
    desk.store.leases.release(lost.id, lost.fence, counts=True)
    job = desk.claim()
    desk.store_chunk(job, 0)
    desk.store.held.renew(job.id, job.fence, 60, {"step": 1})
    done = desk.complete(job)
    assert (done.state, done.lease_owner, done.lease_until) == (JobState.COMPLETED, None, None)
    assert done.completed_at is not None
    assert done.expires_at == pytest.approx(done.completed_at + 30 * 86_400, abs=1)
    assert desk.complete(job) == done
    kinds = Counter(one.kind for one in desk.store.files.of_job(job.id))
    assert kinds == {"latents": 1, "segment": 1, "video": 1}
    assert desk.garbage() == [f"jobs/{job.id}/1/latents/0", f"jobs/{job.id}/1/"]
    assert desk.told(job) == ["queued", "started", "requeued", "started", "chunk", "completed"]
    assert desk.store.events.read(0)[-1].data == {"frames": 33}
    outcomes = [one.outcome for one in desk.store.listings.attempts(job.id)]
    assert outcomes == ["released", "completed"]


def test_a_look_tells_what_a_renewal_would_and_writes_nothing(desk: Desk) -> None:
    desk.submit()
    job = desk.claim()
    held = desk.store.held
    assert held.look(job.id, job.fence) == Renewal(cancel_requested=False, keep_chunks=False)
    desk.store.submissions.cancel(job.id, None, keep_chunks=True)
    asked = desk.get(job)
    told = held.look(job.id, job.fence)
    assert told == held.renew(job.id, job.fence, 60) == Renewal(True, True)
    assert asked.lease_until == job.lease_until != desk.get(job).lease_until
    held_no_more = job.fence + 1
    with pytest.raises(LeaseLostError):
        held.look(job.id, held_no_more)
    desk.store.leases.cancelled(job.id, job.fence)
    with pytest.raises(LeaseLostError):
        held.look(job.id, job.fence)


def test_every_write_under_an_old_fence_is_refused(desk: Desk) -> None:
    desk.submit()
    old = desk.claim("worker-1")
    desk.lose(old)
    job = desk.claim("worker-2")
    assert (job.id, job.fence) == (old.id, 2)
    before = desk.get(job), desk.told(job), desk.store.files.of_job(job.id)
    calls, held = desk.store.leases, desk.store.held
    record = ChunkRecord(old.id, 0, old.fence, 12, None, None, {})
    for write in (
        lambda: held.renew(old.id, old.fence, 60),
        lambda: held.renew(old.id, old.fence, 60, {"step": 1}),
        lambda: held.record_latents(old.id, old.fence, record, []),
        lambda: held.record_chunk(old.id, old.fence, record, []),
        lambda: calls.fail(old.id, old.fence, {"code": "x"}),
        lambda: calls.cancelled(old.id, old.fence),
        lambda: calls.release(old.id, old.fence, counts=True),
        lambda: desk.complete(old),
    ):
        with pytest.raises(LeaseLostError, match="fence 1"):
            write()
    assert (desk.get(job), desk.told(job), desk.store.files.of_job(job.id)) == before
    assert desk.complete(job).state == JobState.COMPLETED
    with pytest.raises(LeaseLostError):
        desk.complete(old)


def test_nothing_is_written_to_a_job_that_is_queued_again(desk: Desk) -> None:
    desk.submit()
    job = desk.claim()
    desk.lose(job)
    [freed] = desk.store.leases.expire()
    assert (freed.state, freed.fence) == (JobState.QUEUED, 1)
    with pytest.raises(LeaseLostError):
        desk.store_chunk(job, 0)
    with pytest.raises(LeaseLostError):
        desk.complete(job)


def test_lost_workers_use_up_the_tries(desk: Desk) -> None:
    desk.submit()
    for attempt in range(1, 6):
        job = desk.claim(f"worker-{attempt}")
        assert job.attempt == attempt
        desk.lose(job)
    assert desk.store.leases.claim("worker-6", "default") is None
    failed = desk.get(job)
    assert failed.state == JobState.FAILED
    assert failed.error is not None
    assert failed.error["code"] == ErrorCode.WORKER_LOST
    assert desk.told(job)[-2:] == ["started", "failed"]
    outcomes = [one.outcome for one in desk.store.listings.attempts(job.id)]
    assert outcomes == ["lost"] * 4 + ["failed"]
    assert desk.store.leases.expire() == []


def test_a_lost_try_that_stored_a_chunk_does_not_count(desk: Desk) -> None:
    desk.submit()
    for index in range(7):
        job = desk.claim()
        desk.store_chunk(job, index)
        desk.lose(job)
        desk.store.leases.expire()
    assert (desk.get(job).state, desk.get(job).attempt) == (JobState.QUEUED, 0)


def test_workers_known_dead_lose_their_jobs_at_once(desk: Desk) -> None:
    desk.submit("a")
    desk.submit("b")
    mine, theirs = desk.claim("dead"), desk.claim("alive")
    assert desk.store.leases.expire() == []
    assert desk.store.leases.reclaim(["dead", "unknown"]) == [mine.id]
    assert desk.get(mine).state == JobState.QUEUED
    assert desk.get(theirs).state == JobState.RUNNING
    assert desk.store.outbox.queues_with_work() == ["default"]
    again = desk.claim("new")
    desk.store.leases.reclaim(["new"], counts=False)
    assert desk.get(again).attempt == 1


def test_a_warm_stop_costs_no_try(desk: Desk) -> None:
    desk.submit()
    for _ in range(7):
        job = desk.claim()
        freed = desk.store.leases.release(job.id, job.fence, counts=False, outcome="preempted")
        assert (freed.state, freed.attempt, freed.not_before) == (JobState.QUEUED, 0, 0.0)
    requeued = [e for e in desk.store.events.read(0) if e.type == "video.requeued"]
    assert [event.data for event in requeued] == [{"reason": "preempted"}] * 7


def test_an_error_waits_and_the_last_try_fails(desk: Desk) -> None:
    desk.submit()
    error = {"code": "out_of_memory", "message": "too large"}
    for attempt in range(1, 6):
        job = desk.claim()
        freed = desk.store.leases.release(
            job.id, job.fence, counts=True, not_before_in_s=60, outcome="oom", error=error
        )
        if attempt < 5:
            assert 59 < freed.not_before - freed.updated_at < 61
            assert desk.store.leases.claim("w", "default") is None
            _allow(desk, job)
    assert (freed.state, freed.error) == (JobState.FAILED, error)


def test_poison_is_the_same_chunk_again_and_again(desk: Desk) -> None:
    desk.submit()
    for strike in (1, 2):
        job = desk.claim()
        freed = desk.store.leases.release(job.id, job.fence, counts=False, strike_chunk=4)
        assert (freed.strikes, freed.strike_chunk) == (strike, 4)
    job = desk.claim()
    failed = desk.store.leases.release(job.id, job.fence, counts=False, strike_chunk=4)
    assert failed.state == JobState.FAILED
    assert failed.error is not None
    assert failed.error["code"] == ErrorCode.POISON
    assert "chunk 4" in failed.error["message"]


def test_progress_and_other_ends_do_not_add_to_poison(desk: Desk) -> None:
    desk.submit()
    release = desk.store.leases.release
    for chunk in (1, 1, None, None, 2, 2):
        job = desk.claim()
        freed = release(job.id, job.fence, counts=False, strike_chunk=chunk)
        assert freed.state == JobState.QUEUED
    assert freed.strikes == 2  # a worker lost between adds nothing, another chunk starts anew
    job = desk.claim()
    desk.store_chunk(job, 2)
    assert desk.get(job).strikes == 0
    for strike in (1, 2):
        freed = release(job.id, job.fence, counts=False, strike_chunk=3)
        assert freed.strikes == strike
        job = desk.claim()
    failed = release(job.id, job.fence, counts=False, strike_chunk=3, poison_limit=3)
    assert failed.state == JobState.FAILED


def test_deliveries_are_written_with_the_end_they_tell(desk: Desk) -> None:
    webhooks = desk.store.webhooks
    both = webhooks.create("local", "both", "https://a", ["video.completed", "video.failed"])
    webhooks.create("local", "cancelled", "https://b", ["video.cancelled"])
    webhooks.create("other", "theirs", "https://c", ["video.completed"])
    off = webhooks.create("local", "off", "https://d", ["video.completed"])
    webhooks.update(off.id, "local", {"enabled": False})
    desk.submit("a")
    job = desk.claim()
    desk.complete(job)
    [delivery] = webhooks.due(10, lease_s=60)
    assert (delivery.webhook_id, delivery.type, delivery.state) == (
        both.id, "video.completed", "pending",
    )  # fmt: skip
    payload = delivery.payload
    assert payload["id"] == delivery.id
    assert payload["id"].startswith("evt_")
    assert (payload["object"], payload["type"]) == ("event", "video.completed")
    assert payload["data"] == {"id": job.id}
    assert payload["created_at"] == int(delivery.created_at)
    assert payload["timestamp"].endswith("Z")
    desk.submit("b")
    failed = desk.claim()
    desk.store.leases.fail(failed.id, failed.fence, {"code": "x"})
    queued = desk.submit("c")
    desk.store.submissions.cancel(queued.id, "local")
    assert [one.type for one in webhooks.due(10, 60)] == ["video.failed", "video.cancelled"]
    assert webhooks.due(10, 60) == []


def test_threads_of_two_engines_claim_each_job_once(desk: Desk, two_stores: list[Store]) -> None:
    made = desk.store.submissions.submit([desk.new() for _ in range(200)])
    had: list[str] = []

    def work(store: Store, name: str) -> None:
        while (job := store.leases.claim(name, "default")) is not None:
            had.append(job.id)

    threads = [
        threading.Thread(target=work, args=(two_stores[number % 2], f"worker-{number}"))
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(had) == 200
    assert set(had) == {job.id for job in made}


def test_owners_take_turns_also_when_many_claim(desk: Desk, two_stores: list[Store]) -> None:
    for owner in ("a", "b"):
        desk.store.submissions.submit([desk.new(owner=owner) for _ in range(30)])

    def work(store: Store) -> None:
        while store.leases.claim("worker", "default") is not None:
            pass

    threads = [threading.Thread(target=work, args=(two_stores[n % 2],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = desk.store.events.read(0)
    assert [one.owner for one in log if one.type == "video.started"] == ["a", "b"] * 30


def test_processes_claim_each_job_once(desk: Desk, database_url: str) -> None:
    made = desk.store.submissions.submit([desk.new() for _ in range(200)])
    command = [sys.executable, "-c", CLAIMER, database_url]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    workers = [subprocess.Popen([*command, f"w{n}"], **pipes, text=True) for n in range(2)]  # type: ignore[call-overload]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    had = [worker.communicate()[0].split() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert Counter(had[0] + had[1]) == dict.fromkeys((job.id for job in made), 1)


def test_two_threads_commit_one_expired_lease_once(desk: Desk) -> None:
    desk.submit()
    old = desk.claim("worker-1")
    desk.lose(old)
    new = desk.claim("worker-2")
    outcomes: list[str] = []

    def commit(job: Job) -> None:
        try:
            outcomes.append(desk.complete(job).state)
        except LeaseLostError:
            outcomes.append("lost")

    threads = [threading.Thread(target=commit, args=(job,)) for job in (old, new)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["completed", "lost"]
    assert [one.fence for one in desk.store.files.of_job(new.id)] == [2]
    assert desk.told(new).count("completed") == 1


def test_a_state_changes_only_as_the_table_says(desk: Desk) -> None:
    job = desk.submit()
    for origin in JobState:
        for target in set(JobState) - TRANSITIONS[origin]:
            with desk.store.db.write() as conn, pytest.raises(ValueError, match="cannot become"):
                move(desk.store.db, conn, [origin], target, jobs.c.id == job.id, values={})
    with desk.store.db.write() as conn:
        there = jobs.c.id == job.id
        lost = move(desk.store.db, conn, [JobState.RUNNING], JobState.QUEUED, there, values={})
    assert lost is None
    assert desk.get(job) == job


@pytest.mark.parametrize("loaded_model", [None, "papercut"])
def test_a_claim_walks_the_index(desk: Desk, loaded_model: str | None) -> None:
    desk.store.submissions.submit([desk.new() for _ in range(200)])
    plans = desk.plans(lambda: desk.claim(loaded_model=loaded_model))
    assert "ix_jobs_claim" in plans
    for scan in ("SCAN jobs", "SCAN one", "SCAN other", "Seq Scan on jobs"):
        assert scan not in plans.replace("USING COVERING INDEX", "")


def _allow(desk: Desk, job: Job) -> None:
    """Let the time pass for which a job waits."""
    with desk.store.db.write() as conn:
        conn.execute(update(jobs).where(jobs.c.id == job.id).values(not_before=0))
        assert conn.execute(select(jobs.c.not_before)).scalar() == 0
